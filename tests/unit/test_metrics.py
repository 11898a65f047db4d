"""Metrics of a rank: sums against numpy's, sizes against their definition, options, and what is refused."""

from __future__ import annotations

import importlib.util
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcr_plus.config.reader import dump, fingerprint, load, loads
from mcr_plus.core.message import Signature
from mcr_plus.errors import ConfigError
from mcr_plus.observe import sinks
from mcr_plus.observe.metrics import Metrics, families, size_range
from mcr_plus.observe.options import observe_options
from mcr_plus.rendezvous.world import World

HOSTS = ("a", "b", "a", "b")
_TOLD_APART = ("collective", "p2p_operation", "message_size", "codec")


def signature(kind: Any, nbytes: int | None, ranks: int = 4, **fields: Any) -> Signature:
    return Signature(kind, None, (), nbytes, "world", ranks, backend="msccl", algorithm="ring", **fields)


def completed(of: Any, seconds: float, waited: float, **fields: Any) -> Any:
    """A handle as the engine passes it on, with the fields that count."""
    message = SimpleNamespace(codec=None, uncompressed_bytes=None, own_bytes=lambda: 24)
    vars(message).update(
        {name: fields.pop(name) for name in ("codec", "uncompressed_bytes") if name in fields}
    )
    values = {"t_issue": 10.0, "t_done": 10.0 + seconds, "t_wait": 10.0 + seconds - waited, "error": None}
    return SimpleNamespace(operation=of, message=message, ran_on="", **{**values, **fields})


class Bound(SimpleNamespace):
    """In place of a bound operation, which is told from others by its identity."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def operation(of: Signature) -> Any:
    return Bound(signature=of, state=SimpleNamespace(group=SimpleNamespace(ranks=range(of.ranks))))


def taken(metrics: Metrics, name: str) -> dict[Any, float]:
    """The samples of a metric by the labels that tests tell apart."""
    (family,) = [family for family in metrics.take() if family.name == name]
    return {
        tuple(
            dict(labels).get(each) for each in ("collective", "p2p_operation", "message_size", "codec")
        ): value
        for labels, value in family.samples.items()
    }


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(World(2, 4, HOSTS, 1.0), version="mcr_plus 1", job="77")


def test_sums_are_those_of_numpy(metrics: Metrics) -> None:
    random_ = random.Random(3)
    times = [random_.uniform(1e-4, 3e-3) for _ in range(37)]
    waits = [each * random_.random() for each in times]
    gather = operation(signature("all_gather", 4096))
    for seconds, waited in zip(times, waits, strict=True):
        metrics.ended(completed(gather, seconds, waited))
    key = ("AllGather", None, "1-2KB", None)  # 4096 bytes are of four ranks together
    found = {family.name: family for family in metrics.take()}
    exact = np.array(times, np.float64)
    algbw = math.exp(np.mean(np.log(4096 / 1e9 / exact)))
    expected = {
        "nccl_bus_bandwidth_gbs": algbw * 3 / 4,
        "nccl_collective_algobw_gbs": algbw,
        "nccl_collective_exec_time_microseconds": exact.mean() * 1e6,
        "mcr_operations": 37,
        "mcr_wire_bytes": 37 * 4096,
        "mcr_payload_bytes": 37 * 4096,
        "mcr_waited_seconds": sum(waits),
    }
    for name, value in expected.items():
        ((labels, sample),) = found[name].samples.items()
        assert sample == pytest.approx(value), name
        assert dict(labels).items() >= {
            "version": "mcr_plus 1", "slurm_job_id": "77", "node": "a", "gpu": "CPU1", "comm_name": "world",
            "n_nodes": "2", "nranks": "4", "algo_proto": "msccl:ring",
        }.items()  # fmt: skip
    assert not found["nccl_p2p_bus_bandwidth_gbs"].samples
    assert not found["mcr_codec"].samples
    # A second window: gauges are its own, counters go on.
    metrics.ended(completed(gather, 2e-3, 0.0))
    assert taken(metrics, "nccl_collective_exec_time_microseconds")[key] == pytest.approx(2000)
    assert taken(metrics, "mcr_operations") == {(*key[:3], "none"): 38}
    # And one without operations: gauges stay.
    assert taken(metrics, "nccl_collective_exec_time_microseconds")[key] == pytest.approx(2000)


def test_kinds_codecs_and_what_does_not_count(metrics: Metrics) -> None:
    metrics.ended(completed(operation(signature("send", 10)), 1e-3, 0))
    metrics.ended(completed(operation(signature("barrier", 0)), 1e-3, 1e-3))
    metrics.ended(completed(operation(signature("all_to_all_v", None)), 1e-3, 0))
    coded = operation(signature("all_reduce", 500))
    metrics.ended(completed(coded, 1e-3, 0, codec="int8_block", uncompressed_bytes=2000))
    metrics.ended(completed(coded, 1e-3, 0, error=RuntimeError()))
    metrics.ended(completed(coded, 1e-3, 0, t_issue=0.0))
    metrics.ended(completed(coded, 1e-3, 0, t_done=None))
    assert taken(metrics, "mcr_operations") == {
        ("Send", None, "10-11B", "none"): 1,
        ("Barrier", None, "0B", "none"): 1,
        ("AlltoAll", None, "24-25B", "none"): 1,
        ("AllReduce", None, "1-2KB", "int8_block"): 1,
    }
    assert taken(metrics, "mcr_codec") == {("AllReduce", None, "1-2KB", "int8_block"): 0.25}
    assert taken(metrics, "nccl_p2p_exec_time_microseconds") == {
        (None, "Send", "10-11B", None): pytest.approx(1000)
    }
    bandwidths = taken(metrics, "nccl_bus_bandwidth_gbs")
    assert ("Barrier", None, "0B", None) not in bandwidths
    assert bandwidths[("AllReduce", None, "1-2KB", None)] == pytest.approx(2000 / 1e9 / 1e-3 * 2 * 3 / 4)


def test_sizes_are_ranges_in_powers_of_1024() -> None:
    """Inspector's own rule, step by step: divide by 1024 as often as possible, cut off, add one."""
    chance = random.Random(5)
    sizes = [0, 1, 1023, 1024, 1025, 2**20 - 1, 2**20, 9 * 2**29, 2**30 - 1, 2**40 - 1, 2**40, 5 * 2**50]
    for nbytes in [*sizes, *(chance.randrange(2**44) for _ in range(200))]:
        value, units = nbytes, ["B", "KB", "MB", "GB", "TB"]
        while value >= 1024 and len(units) > 1:
            value, units = value // 1024, units[1:]
        assert size_range(nbytes) == ("0B" if not nbytes else f"{value}-{value + 1}{units[0]}")
    assert size_range(9 * 2**29) == "4-5GB"


def test_options_are_kept_and_decide_nothing() -> None:
    text = "version: 1\nobserve: {prometheus: job.prom, otlp: 'http://localhost:4318', every: 500ms}\n"
    config = loads(text)
    expected = {"prometheus": "job.prom", "otlp": "http://localhost:4318", "every": 0.5}
    assert config.observe == observe_options().model_validate(expected)
    assert load(dump(config)) == config
    assert load(dump(config, units=True)) == config
    assert fingerprint(config) == fingerprint(loads("version: 1"))
    port = observe_options().model_validate({"prometheus": 9400})
    assert loads("version: 1\nobserve: {prometheus: 9400}").observe == port


@pytest.mark.parametrize(
    ("block", "what"),
    [
        ("{prometheus: job.txt}", "x.yaml:2: observe.prometheus: expected a file that ends with .prom"),
        ("{prometheus: 0}", "a port from 1 to 65535, got 0"),
        ("{prometheus: 65536}", "got 65536"),
        ("{prometheus: true}", "got True"),
        ("{prometheus: [1]}", "expected a file"),
        (
            "{otlp: localhost:4318}",
            "x.yaml:2: observe.otlp: expected a URL such as http://localhost",
        ),
        ("{otlp: 'ftp://a'}", "expected a URL"),
        ("{otlp: 'http://a:99999'}", "expected a URL"),
        ("{otlp: 5}", "expected a URL"),
        ("{every: 0.01}", "x.yaml:2: observe.every: expected a number of at least 0.1"),
        ("{prom: 1}", "x.yaml:2: observe.prom: unknown key 'prom'"),
        ("[1]", "observe: expected"),
    ],
)
def test_bad_options(block: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(f"version: 1\nobserve: {block}\n", "x.yaml")
    assert what in str(caught.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for options in ({"prometheus": "x.prom"}, {"otlp": "http://a"}):
        with pytest.raises(ConfigError, match=r"observe\.\w+: needs .*mcr_plus\[metrics\]"):
            sinks.open_sinks(options, rank=0, local=0)


def test_names_are_those_of_inspector() -> None:
    assert {name for name in families() if name.startswith("nccl_")} == {
        "nccl_bus_bandwidth_gbs",
        "nccl_collective_exec_time_microseconds",
        "nccl_collective_algobw_gbs",
        "nccl_p2p_bus_bandwidth_gbs",
        "nccl_p2p_exec_time_microseconds",
    }
