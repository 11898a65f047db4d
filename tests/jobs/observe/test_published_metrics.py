"""Metrics that jobs publish, against what their ranks have recorded; and places that cannot be reached."""

from __future__ import annotations

import gzip
import importlib.util
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ports import free_ports
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.observe import otlp as otlp_sink
from mcr_plus.observe import publisher
from mcr_plus.observe.record import Log

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("prometheus_client", "opentelemetry")),
    reason="needs the extra `metrics`",
)
CODEC = {"codec": "bf16"}


def operations(comm: mcr.Communicator) -> Log:
    with mcr.record() as log:
        for numel in (1000, 1000, 77):
            mcr.all_reduce(torch.full((numel,), 1.0 + comm.rank))
        mcr.all_reduce(torch.ones(5000), compress=CODEC)
        received = [[1, 1], [2, 2]][comm.rank]
        mcr.all_to_all_single(torch.empty(sum(received)), torch.ones(3), received, [1, 2])
        if comm.rank == 0:
            mcr.send(torch.ones(10), 1)
        else:
            mcr.recv(torch.empty(10), 0)
        mcr.barrier()
    return log


def totals(text: str) -> dict[str, float]:
    """Of a page for Prometheus, the sum of each metric over its labels."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def publish(folder: str, port: int, otlp: str) -> dict[str, Any]:
    """Runs on ranks: one job writes files and sends to `otlp`, and another one listens on ports."""
    torch.set_num_threads(1)
    observe: dict[str, Any] = {"prometheus": f"{folder}/job.prom", "otlp": otlp, "every": 0.1}
    comm = mcr.init({"version": 1, "backends": ["gloo"], "observe": observe})
    rank = comm.rank
    log = operations(comm)
    mcr.finalize()
    recorded = {
        "count": len(log.records),
        "wire": sum(record.wire_bytes for record in log.records),
        "payload": sum(record.bytes for record in log.records),
        "waited": sum(record.waited for record in log.records),
    }
    names = [f"{record.kind}" for record in log.records]

    mcr.init({"version": 1, "backends": ["gloo"], "observe": {"prometheus": port, "every": 0.1}})
    operations(comm=mcr.world())
    while totals(text := page(port + rank)).get("mcr_operations_total", 0) < len(names):
        time.sleep(0.05)
    mcr.finalize()
    with pytest.raises(urllib.error.URLError):
        page(port + rank)
    written = (Path(folder) / f"job_rank{rank}.prom").read_text()
    return {"recorded": recorded, "written": written, "page": totals(text)}


def fails(port: int, folder: str) -> dict[str, Any]:
    """Runs on ranks: the port of rank 1 is in use, a folder is missing, and nobody listens at the URL."""
    torch.set_num_threads(1)
    errors = []
    for observe in ({"prometheus": port}, {"prometheus": f"{folder}/none/job.prom"}):
        with pytest.raises(mcr.ConfigError) as caught:
            mcr.init({"version": 1, "backends": ["gloo"], "observe": observe})
        errors.append(str(caught.value))
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    logging.getLogger("mcr_plus").addHandler(handler)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # not listening: connections are refused
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        comm = mcr.init({"version": 1, "backends": ["gloo"], "observe": {"otlp": url, "every": 0.1}})
        operations(comm)
        while not any(url in line for line in lines):
            time.sleep(0.05)
        for _ in range(5):
            operations(comm)
            time.sleep(0.1)
        mcr.finalize()
    return {
        "errors": errors,
        "lines": [line for line in dict.fromkeys(lines) if "otlp" in line],
        "all": lines,
    }


@contextmanager
def hanging_collector(trickle: bytes) -> Iterator[tuple[str, threading.Event]]:
    """A collector that takes a connection and never answers, and an event that is set once it has one.

    `trickle`: what it sends again and again instead of an answer, so that no time-out of a read passes.
    """
    has_come, ends = threading.Event(), threading.Event()

    def hold(connection: socket.socket) -> None:
        with connection:
            connection.recv(1)
            has_come.set()
            while not ends.wait(0.2):
                with suppress(OSError):
                    connection.sendall(trickle)

    def accept() -> None:
        with suppress(OSError):
            while True:
                holder = threading.Thread(target=hold, args=[server.accept()[0]])
                holders.append(holder)
                holder.start()

    holders: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepts = threading.Thread(target=accept)
        accepts.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", has_come
        finally:
            ends.set()
            server.shutdown(socket.SHUT_RDWR)
            for thread in (accepts, *holders):
                thread.join()


def hangs(folder: str, trickle: str) -> dict[str, Any]:
    """Runs on ranks: a job whose collector never answers, and whose file does not wait for it."""
    torch.set_num_threads(1)
    mock.patch.object(publisher, "_LATE", 0.5).start()
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcr_plus").addHandler(handler)
    file = Path(folder) / "job.prom"
    with hanging_collector(trickle.encode()) as (url, has_come):
        observe = {"prometheus": str(file), "otlp": url, "every": 0.1}
        comm = mcr.init({"version": 1, "backends": ["gloo"], "observe": observe})
        written = file.with_name(f"job_rank{comm.rank}.prom")
        mcr.barrier()  # there is something to send
        assert has_come.wait(60)
        operations(comm)
        while totals(written.read_text()).get("mcr_operations_total", 0) < 8:  # publications go on
            time.sleep(0.05)
        while not any(url in line for line in lines):
            time.sleep(0.05)
        operations(comm)
        mcr.finalize()
        return {"lines": lines, "written": totals(written.read_text()), "url": url}


def answers_late() -> float:
    """Runs on ranks: a job whose collector answers only once its operations are over."""
    torch.set_num_threads(1)
    mock.patch.object(publisher, "_LAST", 60.0).start()
    mock.patch.object(otlp_sink, "_TIMEOUT", 60.0).start()
    has_come, may_answer = threading.Event(), threading.Event()

    def wait() -> None:
        has_come.set()
        assert may_answer.wait(60)

    with collector(wait) as (url, sent):
        comm = mcr.init({"version": 1, "backends": ["gloo"], "observe": {"otlp": url, "every": 0.1}})
        mcr.barrier()  # there is something to send
        assert has_come.wait(60)
        operations(comm)
        may_answer.set()
        mcr.finalize()
        metrics = sent[-1][1].resource_metrics[0].scope_metrics[0].metrics
        (counter,) = [metric for metric in metrics if metric.name == "mcr_operations"]
        return float(sum(point.as_double or point.as_int for point in counter.sum.data_points))


@contextmanager
def collector(before: Callable[[], None] = lambda: None) -> Iterator[tuple[str, list[Any]]]:
    """A collector of OpenTelemetry on a port of its own, and what it has been sent.

    It calls `before` ahead of each answer.
    """
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    sent: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            request = ExportMetricsServiceRequest()
            request.ParseFromString(body)
            before()
            sent.append((self.path, request))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_published_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    port, _ = free_ports(2)
    with collector() as (url, sent):
        results = [each.value for each in run_ranks(publish, 2, args=[str(tmp_path), port, url])]
    for rank, value in enumerate(results):
        recorded, found = value["recorded"], totals(value["written"])
        assert found["mcr_operations_total"] == recorded["count"] == 7
        assert found["mcr_wire_bytes_total"] == recorded["wire"]
        assert found["mcr_payload_bytes_total"] == recorded["payload"]
        assert found["mcr_waited_seconds_total"] == pytest.approx(recorded["waited"])
        assert found["mcr_codec"] == 0.5
        assert f'gpu="CPU{rank}"' in value["written"]
        assert 'collective="AllReduce"' in value["written"]
        assert f'p2p_operation="{["Send", "Recv"][rank]}"' in value["written"]
        assert value["page"]["mcr_operations_total"] == 7
    assert {path for path, _ in sent} == {"/v1/metrics"}
    points: dict[tuple[str, str], float] = {}
    for _, request in sent:
        for metric in request.resource_metrics[0].scope_metrics[0].metrics:
            if metric.name == "mcr_wire_bytes":
                assert metric.sum.is_monotonic
                for point in metric.sum.data_points:
                    labels = {each.key: each.value.string_value for each in point.attributes}
                    gpu, rest = labels.pop("gpu"), repr(sorted(labels.items()))
                    points[gpu, rest] = max(points.get((gpu, rest), 0), point.as_double or point.as_int)
    for rank, value in enumerate(results):
        total = sum(number for (gpu, _), number in points.items() if gpu == f"CPU{rank}")
        assert total == value["recorded"]["wire"]
    assert {each.name for each in tmp_path.iterdir()} == {"job_rank0.prom", "job_rank1.prom"}


@pytest.mark.long
def test_sinks_that_cannot_open_are_refused_and_unreachable_ones_logged_once(tmp_path: Path) -> None:
    port, taken = free_ports(2)
    with socket.create_server(("127.0.0.1", taken)):
        results = [each.value for each in run_ranks(fails, 2, args=[port, str(tmp_path)])]
    for value in results:  # on all ranks, although only one has it
        assert f"observe.prometheus: cannot listen on port {port + 1} of 127.0.0.1" in value["errors"][0]
        assert "none/job_rank" in value["errors"][1]
        assert "No such file or directory" in value["errors"][1]
        assert len(value["lines"]) == 1, value["all"]
        assert "not published" in value["lines"][0]


@pytest.mark.parametrize("trickle", ["", "HTTP/1.1 100 Continue\r\n\r\n"], ids=["silent", "trickling"])
def test_a_collector_that_never_answers_delays_nothing(tmp_path: Path, trickle: str) -> None:
    for result in run_ranks(hangs, 2, args=[str(tmp_path), trickle]):
        value = result.value
        assert value["written"]["mcr_operations_total"] == 15  # also the last ones, as `finalize` ends
        assert len(value["lines"]) == 1, value["lines"]
        assert f"observe.otlp: {value['url']}/v1/metrics: not published" in value["lines"][0]


def test_a_slow_collector_gets_the_last_publication() -> None:
    assert [result.value for result in run_ranks(answers_late, 2)] == [8, 8]
