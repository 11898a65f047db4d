"""Buckets by ready times and costs, in `mcr.wrap` on real ranks."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn

import mcr_plus as mcr
from mcr_plus.bucketing import auto_plan
from mcr_plus.bucketing import probe as probing
from mcr_plus.bucketing.auto_plan import AutoPlan, Captured
from mcr_plus.bucketing.costs import BucketCurve
from mcr_plus.bucketing.probe import probe
from mcr_plus.bucketing.saved import SavedBucket, SavedPlan
from mcr_plus.bucketing.search import FoundPlan
from mcr_plus.bucketing.step import model_hash
from mcr_plus.communicator.costs import expected_us
from mcr_plus.communicator.gradient_policy import Choice
from mcr_plus.compression.codec import PayloadCodec, make
from mcr_plus.compression.scheme_bytes import as_all_reduces
from mcr_plus.core.message import Signature
from mcr_plus.fusion.bucket import BucketEntry, Cost
from mcr_plus.fusion.options import FuseOptions
from mcr_plus.observe.record import Record
from mcr_plus.training import wrap as wrapping
from mcr_plus.training.bucket_plan import _of_operations, earliest
from mcr_plus.training.reducer import Reducer

TABLE = """\
version: 1
rules:
  - kind: all_reduce
    bytes: 0..
    backend: gloo
    measured:
      gloo: {{8B: {small}, 64MiB: {large}}}
"""
LAYERS = 6


def linear(latency: float, per_byte: float) -> Cost:
    return lambda nbytes: np.asarray(latency + per_byte * nbytes, np.float64)


def test_dtypes_are_planned_apart_and_sent_as_they_become_ready() -> None:
    entries = [
        BucketEntry(0, 100, "float", 0.0),
        BucketEntry(1, 100, "half", 1.0),
        BucketEntry(2, 100, "float", 2.0),
        BucketEntry(3, 100, "half", 3.0),
        BucketEntry(4, 100, "float", 500.0),
    ]
    plan = earliest(entries, {"float": linear(10.0, 0.01), "half": linear(1000.0, 0.01)}, 1)
    assert [bucket.members for bucket in plan] == [(0, 2), (1, 3), (4,)]


def test_codecs_are_weighed_by_the_operations_that_move_their_payloads() -> None:
    """A matrix of 100 × 50 and 9 values, on 4 ranks; factors of rank 4; blocks unchanged."""
    numel, shapes = 5009, ((100, 50), (9,))
    bucket = Signature(
        "all_reduce", torch.float32, (numel,), 4 * numel, "world", 4, reduce_op="AVG", parts=shapes
    )
    int8 = make({"codec": "int8_block"})
    assert isinstance(int8, PayloadCodec)
    part = int8.wire_nbytes(-(-numel // (4 * int8.traits.alignment)) * int8.traits.alignment)
    sparse = make({"codec": "topk", "ratio": 0.01})
    assert isinstance(sparse, PayloadCodec)
    for codec, expected in (
        (make({"codec": "powersgd"}), (2, 4 * (4 * 100 + 9 + 4 * 50))),
        (make({"codec": "bf16"}), (1, 2 * numel)),
        (int8, (2, 4 * part)),  # a quarter to each rank, and a quarter back
        (sparse, (1, 2 * sparse.wire_nbytes(numel))),  # a payload from each of four ranks
    ):
        assert as_all_reduces(codec, bucket) == expected
    both = _of_operations(linear(10.0, 0.01), 2, 0.1)
    assert both(np.array([1000, 0])).tolist() == [21.0, 20.0]


def weighed(table: str) -> list[list[float]]:
    """Run on ranks: seconds of 1 MiB by `all_reduce_costs` and by the pipeline's steps, for each codec."""
    found = []
    for codec in ("none", "bf16", "int8_block"):
        stages: list[Any] = [{"fuse": {"plan": "exact"}}, {"compress": {"codec": codec}}, {"dispatch": {}}]
        stages.insert(2, {"select": {"table": table}})
        with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}) as comm:
            reducer = Reducer(list(nn.Linear(1024, 1024).named_parameters()), comm)
            assert reducer._costs is not None
            (cost,) = reducer._costs.values()
            steps = expected_us(comm, "all_reduce", torch.float32, 1 << 18, op="AVG", tag="gradients")
            assert steps is not None
            found.append([float(cost(np.array([1 << 20]))[0]), steps * 1e-6])
    return found


@pytest.mark.long
def test_a_codec_of_the_pipeline_is_weighed_once(tmp_path: Path) -> None:
    """The times of the table are linear, and an all_gather's are half by byte, see `as_all_reduces`."""
    (tmp_path / "table.yaml").write_text(
        TABLE.format(small=100, large=100_000)
        + TABLE.format(small=100, large=50_050).partition("rules:\n")[2].replace("all_reduce", "all_gather")
    )
    for result in run_ranks(weighed, 2, args=[str(tmp_path / "table.yaml")]):
        for seconds, steps in result.value:
            assert seconds - 50e-6 == pytest.approx(steps, rel=0.03)


def trained(table: str) -> dict[str, Any]:
    """Run on ranks; return buckets by pass, and how far gradients are from the mean over ranks."""
    torch.set_num_threads(1)
    stages = [{"fuse": {"plan": "exact"}}, {"select": {"table": table}}, {"dispatch": {"timeout": "30s"}}]
    buckets, worst = [], 0.0
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}) as comm:
        torch.manual_seed(1)
        model: Any = nn.Sequential(*[nn.Linear(40, 40) for _ in range(LAYERS)])
        twin = [nn.Sequential(*[nn.Linear(40, 40) for _ in range(LAYERS)]) for _ in range(comm.size)]
        for each in twin:
            each.load_state_dict(model.state_dict())
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(6):
            optimizer.zero_grad()
            for each in twin:
                each.zero_grad()
            for turn in range(2):  # only the second turn is averaged
                for rank, each in enumerate(twin):
                    batch = torch.randn(
                        8, 40, generator=torch.Generator().manual_seed(10 * step + turn + 100 * rank)
                    )
                    each(batch).square().mean().backward()
                    if rank == comm.rank:
                        if turn == 0:
                            with mcr.no_sync(model):
                                model(batch).square().mean().backward()
                        else:
                            model(batch).square().mean().backward()
            buckets.append(wrapping._wrapped[model].reducer.buckets)
            for param, *theirs in zip(model.parameters(), *[each.parameters() for each in twin], strict=True):
                mean = np.mean([their.grad.double().numpy() for their in theirs], axis=0)
                worst = max(
                    worst, float(np.abs(param.grad.double().numpy() - mean).max() / np.abs(mean).max())
                )
    return {"buckets": buckets, "worst": worst}


def test_the_times_of_a_table_determine_buckets(tmp_path: Path) -> None:
    """Expensive operations share buckets; cheap ones start as soon as they can."""
    sizes = {}
    for name, small, large in (("dear", 1e6, 1.001e6), ("cheap", 0.001, 1e6)):
        table = tmp_path / f"{name}.yaml"
        table.write_text(TABLE.format(small=small, large=large))
        one, other = run_ranks(trained, 2, args=[str(table)], via="torch")
        assert one.value["buckets"] == other.value["buckets"]
        assert max(one.value["worst"], other.value["worst"]) < 1e-6
        before, after = one.value["buckets"][0], one.value["buckets"][-1]
        assert one.value["buckets"][3:] == [after] * 3  # settled with the third pass
        assert sorted(chain.from_iterable(before)) == sorted(chain.from_iterable(after))
        sizes[name] = [len(bucket) for bucket in after]
    assert sizes["dear"] == [2 * LAYERS]
    assert len(sizes["cheap"]) > 1


def without_figures() -> str:
    """Run on ranks: a pipeline without measured costs."""
    stages: list[dict[str, Any]] = [{"fuse": {"plan": "exact"}}, {"select": {}}, {"dispatch": {}}]
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}):
        model = nn.Linear(3, 3)
        try:
            mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except mcr.ConfigError as error:
            return str(error)
    return "nothing"


def test_an_exact_plan_needs_a_table_with_times() -> None:
    for result in run_ranks(without_figures, 3, via="torch"):
        assert "plan: exact" in result.value
        assert "mcr-plus tune" in result.value


def given(plan: str, rules: list[dict[str, Any]], compressed: bool) -> list[Any]:
    """Run on ranks: the error of a plan's file, or the codecs of gradients and of the end of the pass."""
    compress: list[dict[str, Any]] = [{"compress": {}}] if compressed else []
    stages: list[dict[str, Any]] = [{"fuse": {"plan": plan}}, *compress, {"select": {}}, {"dispatch": {}}]
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages, "rules": rules}):
        model: Any = nn.Linear(3, 5)
        try:
            model, _ = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except mcr.ConfigError as error:
            return [str(error)]
        with mcr.record() as log:
            model(torch.ones(2, 3)).sum().backward()
        return [None, [each.codec for each in log.records if each.tag == "gradients"]]


@pytest.mark.parametrize(
    ("codec", "rules", "compressed", "expected"),
    [
        ("bf16", [], True, [None, ["bf16", None]]),
        ("bf16", [{"match": {"param": "*"}, "compress": {"codec": "none"}}], True, [None, [None, None]]),
        ("powersgd", [], True, "'powersgd' has state"),
        ("bf16", [], False, "the pipeline has no stage `compress`"),
    ],
    ids=["used", "a rule decides", "refused", "no stage"],
)
def test_codecs_of_a_plan_from_a_file(
    tmp_path: Path, codec: str, rules: list[dict[str, Any]], compressed: bool, expected: Any
) -> None:
    named = [("weight", (5, 3), "float32"), ("bias", (5,), "float32")]
    bucket = SavedBucket(params=("bias", "weight"), codec=codec)
    file = tmp_path / "plan.json"
    SavedPlan(model=model_hash(named), ranks=2, buckets=(bucket,)).save(file)
    for result in run_ranks(given, 2, args=[str(file), rules, compressed], via="torch"):
        found = result.value
        assert (found == expected) if isinstance(expected, list) else (expected in found[0]), found


# -- in the job, without a table ----------------------------------------------------------------------------


def refused(fuse: dict[str, Any]) -> str:
    """Run on ranks; return the error of `mcr.wrap`, or of `mcr.init`."""
    compress: list[dict[str, Any]] = [{"compress": {}}] if fuse.pop("compressed", True) else []
    stages: list[dict[str, Any]] = [{"fuse": fuse}, *compress, {"select": {}}, {"dispatch": {}}]
    try:
        with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}):
            model = nn.Linear(3, 3)
            mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except mcr.ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("fuse", "message"),
    [
        ({"plan": "auto", "codecs": ["topk"]}, "fuse.codecs: 'topk' needs error feedback"),
        ({"plan": "auto", "codecs": ["powersgd"]}, "fuse.codecs: 'powersgd' has state"),
        ({"plan": "auto", "codecs": ["bf17"]}, "unknown codec 'bf17'; known: bf16, "),
        ({"plan": "auto", "codecs": 5}, "expected a list of codecs, got 5; known: bf16, "),
        ({"plan": "auto", "codecs": ["bf16"], "compressed": False}, "the pipeline has no stage `compress`"),
        ({"codecs": ["bf16"]}, "codecs: only `plan: auto` uses them"),
    ],
)
def test_codecs_that_a_plan_cannot_choose(fuse: dict[str, Any], message: str) -> None:
    for result in run_ranks(refused, 2, args=[fuse], via="torch"):
        assert message in result.value


def tried(slow: str, codecs: list[str]) -> dict[str, Any]:
    """Run `plan: auto` on ranks; the buckets of one plan, `searched` or `by size`, take 50 ms more.

    Returns the report, the buckets of the last pass, the gradients' error against the mean over ranks, the
    codecs of the last pass, the codecs of a job that continues from this job's state, and a sum of gradients.
    """
    torch.set_num_threads(1)
    send, after, delays = Reducer._send_complete, AutoPlan.after, False

    def delayed(reducer: Reducer) -> None:
        nonlocal delays
        plans = reducer._auto._plans if reducer._auto is not None else []
        if reducer._next == 0 and plans:
            members = [tuple(slot.index for slot in flat.slots) for flat in reducer._flats]
            is_searched = members == [bucket.members for bucket in plans[1].buckets]
            delays = is_searched == (slow == "searched")
            if delays:
                time.sleep(0.05)
        send(reducer)

    def quick(plan: AutoPlan, began: float, ready: Any, computed: float, ended: float, order: Any) -> Any:
        """Subtract the time that other work on the machine has added to a pass without delay."""
        return after(plan, began, ready, computed, ended if delays else min(ended, began + 0.01), order)

    def apart(captured: Captured, libraries: Any) -> FoundPlan:  # whatever is better, so that plans differ
        return FoundPlan(
            [(at, at + 1, at % len(libraries)) for at in range(len(captured.order))], 1.0, 0.5, True
        )

    fuse = {"plan": "auto", "codecs": codecs}
    stages: list[dict[str, Any]] = [{"fuse": fuse}, {"compress": {}}, {"select": {}}, {"dispatch": {}}]
    worst, reports = 0.0, []
    records, batches = list[Record](), list[torch.Tensor]()
    with (
        mcr.init({"version": 1, "pipeline": stages, "backends": ["gloo"]}) as comm,
        patch.object(Reducer, "_send_complete", delayed),
        patch.object(AutoPlan, "after", quick),
        patch.object(AutoPlan, "_searched", lambda _, *arguments: apart(*arguments)),
    ):
        torch.manual_seed(1)
        model: Any = nn.Sequential(*[nn.Linear(40, 40) for _ in range(LAYERS)])
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        twin = copy.deepcopy(model)
        for step in range(26):
            reports.append(mcr.plan_report())
            optimizer.zero_grad()
            batches = [
                torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))
                for rank in range(comm.size)
            ]
            with mcr.record() as log:
                model(batches[comm.rank]).square().mean().backward()
            records = log.records
            found = []
            for batch in batches:
                twin.zero_grad()
                twin(batch).square().mean().backward()
                found.append([param.grad.double().numpy().copy() for param in twin.parameters()])
            for param, *theirs in zip(model.parameters(), *found, strict=True):
                mean = np.mean(theirs, axis=0)
                worst = max(
                    worst, float(np.abs(param.grad.double().numpy() - mean).max() / np.abs(mean).max())
                )
        buckets = wrapping._wrapped[model].reducer.buckets
        encoded = [each.codec for each in records if each.kind == "all_reduce"]
        total = sum(param.grad.double().sum().item() for param in model.parameters())
        mcr.load_state_dict(mcr.state_dict())
        again: Any = copy.deepcopy(twin)
        model, _ = mcr.wrap(again, torch.optim.SGD(again.parameters(), lr=0.1))
        model(batches[comm.rank]).square().mean().backward()
        given = mcr.plan_report()
    return {
        "before": reports[20], "report": reports[-1], "buckets": buckets, "worst": worst,
        "encoded": encoded, "given": given, "total": total,
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("codecs", [[], ["bf16"]], ids=["exact", "codecs"])
@pytest.mark.parametrize(("slow", "chosen"), [("searched", "by size"), ("by size", "searched")])
def test_auto_plan_keeps_the_plan_with_faster_measured_steps(
    slow: str, chosen: str, codecs: list[str]
) -> None:
    results = [each.value for each in run_ranks(tried, 2, args=[slow, codecs], via="torch", timeout=120)]
    for value in results:
        assert value["before"] is None
        assert value["worst"] < (2**-7 if codecs else 1e-6)
        assert value["total"] == results[0]["total"]  # the same bits on all ranks
        used = set(value["report"]["codecs"])
        assert used == ({None, "bf16"} if codecs and chosen == "searched" else {None})
        assert ("bf16" in value["encoded"]) == ("bf16" in used)
        assert value["given"]["codecs"] == value["report"]["codecs"]
        report = value["report"]
        assert report == results[0]["report"]
        assert report["chosen"] == chosen
        assert report["buckets"] == value["buckets"]
        assert (len(report["buckets"]) == 2 * LAYERS) == (chosen == "searched")
        assert abs(report["measured_ms"] - report["baseline_ms"]) > 5


def hierarchically() -> dict[str, Any]:
    """Run on four ranks, as if on two nodes: the searched plan leaves its buckets to the pipeline."""
    torch.set_num_threads(1)
    nodes = {"nodes": [[0, 1], [2, 3]], "min": 0, "kinds": ["all_reduce"]}
    stages: list[dict[str, Any]] = [
        {"fuse": {"plan": "auto"}}, {"hierarchical": nodes}, {"select": {}}, {"dispatch": {}},
    ]  # fmt: skip

    def by_pipeline(plan: AutoPlan, captured: Captured, choices: Sequence[Choice]) -> FoundPlan:
        return FoundPlan([(0, len(captured.order), choices.index(Choice()))], 1.0, 0.0, True)

    with (
        mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}) as comm,
        patch.object(AutoPlan, "_searched", by_pipeline),
        patch("mcr_plus.bucketing.auto_plan.MARGIN", -1e9),
    ):
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        model, _ = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        records = list[Record]()
        for _ in range(25):
            model.zero_grad()
            with mcr.record() as log:
                model(torch.full((4, 16), 1.0 + comm.rank)).sum().backward()
            records = log.records
        report = mcr.plan_report()
        assert report is not None
        bias = list(model.parameters())[-1].grad[0].item()
        return {
            "chosen": [report["chosen"], report["libraries"]], "bias": bias,
            "groups": sorted({each.group for each in records}),
        }  # fmt: skip


@pytest.mark.long
def test_a_plan_may_leave_buckets_to_a_hierarchical_pipeline() -> None:
    for result in run_ranks(hierarchically, 4, via="torch", timeout=120):
        assert result.value["chosen"] == ["searched", [None]]
        assert result.value["bias"] == 4.0
        assert any("across" in group for group in result.value["groups"])


def searched_for() -> dict[str, Any] | None:
    """Run on ranks: a whole trial of the plans that the search finds; return the report."""
    torch.set_num_threads(1)
    with mcr.init({"version": 1, "pipeline": [{"fuse": {"plan": "auto"}}, {"select": {}}, {"dispatch": {}}]}):
        model: Any = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        model, _ = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(24):
            model(torch.randn(16, 64)).square().mean().backward()
        return mcr.plan_report()


def test_ranks_agree_on_a_plan_and_its_libraries() -> None:
    results = [each.value for each in run_ranks(searched_for, 3, timeout=120)]
    assert results[0] is not None
    assert results == [results[0]] * 3
    names = {f"{layer}.{what}" for layer in range(4) for what in ("weight", "bias")}
    assert sorted(chain.from_iterable(results[0]["buckets"])) == sorted(names)
    assert len(results[0]["libraries"]) == len(results[0]["buckets"])
    assert 0 < results[0]["compute_ms"] < results[0]["foretold_ms"]
    assert all(
        results[0]["bound_ms"] <= results[0][name] * (1 + 1e-9)
        for name in ("foretold_ms", "measured_ms", "baseline_ms")
    )


def test_prediction_for_buckets_by_size_uses_the_library_of_the_capture() -> None:
    sizes = np.array([1e3, 1e6])
    curves = {
        Choice("quick"): BucketCurve(sizes, np.array([0.001, 0.002]), np.zeros(2)),
        Choice("slow"): BucketCurve(sizes, np.array([0.1, 0.2]), np.zeros(2)),
        Choice("quick", "bf16"): BucketCurve(sizes, np.array([1e-4, 2e-4]), np.zeros(2)),
    }
    nothing: Any = None
    plan = AutoPlan(
        nothing, [BucketEntry(0, 1000, "float", 0.0)], 8, FuseOptions(), curves, 8, ["weight"], ["slow"]
    )
    captured = Captured([0], [1.0], 1.0)
    assert plan.course(captured, [((0,), Choice())]).ends.tolist() == pytest.approx([1.001])
    plan.used = {1200: "slow:ring"}
    assert plan.course(captured, [((0,), Choice())]).ends.tolist() == pytest.approx([1.1])
    assert plan.course(captured, [((0,), Choice("quick"))]).ends.tolist() == pytest.approx([1.001])
    assert plan.course(captured, [((0,), Choice("quick", "bf16"))]).ends.tolist() == pytest.approx([1.0001])


class Distant:
    """Stands for a communicator over a slow link: an operation takes `latency` and its bytes at `rate`.

    Time passes by a clock of its own, in waits and in computing.
    """

    def __init__(self, latency: float, rate: float) -> None:
        self.latency, self.rate, self.free, self.now = latency, rate, 0.0, 100.0

    def send(self, values: torch.Tensor, library: str) -> Any:
        if library == "none":
            raise mcr.Unsupported(library)
        ends = self.free = max(self.free, self.now) + self.latency + values.nbytes / self.rate
        return SimpleNamespace(wait=lambda: self.wait_until(ends))

    def wait_until(self, ends: float) -> None:
        self.now = max(self.now, ends)

    def all_reduce(self, *_: Any, **__: Any) -> None:
        self.now += self.latency

    def progress(self) -> None:
        self.now += 1e-4  # of the computing before


@pytest.mark.parametrize(("latency", "rate"), [(0.004, 1.2e6), (0.001, 12e6), (0.0005, 120e6)])
def test_the_probe_keeps_to_its_time_on_every_link(
    latency: float, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 10 Mbit/s, 100 Mbit/s and 1 Gbit/s, points that the time does not allow are extrapolated."""
    distant: Any = Distant(latency, rate)
    monkeypatch.setattr(probing, "perf_counter", lambda: distant.now)
    monkeypatch.setattr(probing, "_EDGE", 1)  # no work for the cores: it takes no time of this clock
    sizes = np.array([64 << 10, 1 << 20, 25 << 20])
    began = distant.now
    found = probe(
        distant, torch.float32, torch.device("cpu"), 50 << 20, ["gloo", "none", "mpi"], distant.send
    )
    assert distant.now - began < 3
    assert list(found) == ["gloo", "mpi"]
    for name in found:
        assert found[name].times(sizes) == pytest.approx(latency + sizes / rate, rel=0.05)


def left_alone() -> list[Any]:
    """Run on ranks: gradients that `plan: auto` excludes, and models without anything to plan."""
    found = []
    for codec, dtypes in (("topk", "ff"), (None, "fd"), (None, "")):
        compress: list[dict[str, Any]] = (
            [] if codec is None else [{"compress": {"codec": codec, "ratio": 0.1, "error_feedback": True}}]
        )
        stages = [{"fuse": {"plan": "auto"}}, *compress, {"select": {}}, {"dispatch": {}}]
        with mcr.init({"version": 1, "pipeline": stages}):
            layers = [
                nn.Linear(20, 20, bias=False, dtype=torch.float32 if each == "f" else torch.float64)
                for each in dtypes
            ]
            model: Any = nn.ModuleList([*layers, nn.Linear(3, 3, bias=False)])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for param in () if dtypes else model.parameters():
                param.mcr_skip = True
            model, _ = mcr.wrap(model, optimizer)
            for _ in range(3):
                outputs = [each(torch.ones(2, each.in_features, dtype=each.weight.dtype)) for each in model]
                torch.stack([output.double().sum() for output in outputs]).sum().backward()
            found.append(mcr.plan_report())
    return found


@pytest.mark.long
def test_auto_plan_falls_back_to_buckets_by_size_for_unsupported_gradients() -> None:
    first, other = run_ranks(left_alone, 2, timeout=120)
    assert first.value == other.value == [None, None, None]
    for reason in ("a codec with state", "several dtypes"):
        assert reason in first.stderr
    assert not other.stderr


def given_up(why: str) -> tuple[list[Any], list[int], float]:
    """Run on ranks: a search fails on the first rank, or its passes have a stale gradient.

    Returns whether a trial is running after each pass, the buckets of each pass, and the largest error of
    gradients.
    """

    def fails(*_: Any) -> FoundPlan:
        raise MemoryError("so many gradients")

    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [
        {"fuse": {"plan": "auto"}},
        {"select": {}},
        {"dispatch": {"timeout": "20s"}},
    ]
    goes_on, buckets, worst = [], [], 0.0
    with mcr.init({"version": 1, "pipeline": stages}) as comm, patch.object(AutoPlan, "_searched", fails):
        model: Any = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(16):
            optimizer.zero_grad(set_to_none=False)
            used = model if step == 0 or why == "failure" else model[:1]
            x = torch.full((2, 6), float(comm.rank + step))
            torch.stack([layer(x).sum() for layer in used]).sum().backward()
            mean = 2 * (step + (comm.size - 1) / 2)
            worst = max(worst, float((model[0].weight.grad - mean).abs().max()))
            reducer = wrapping._wrapped[model].reducer
            goes_on.append(reducer._auto is not None)
            buckets.append(len(reducer.buckets))
        assert mcr.plan_report() is None
    return goes_on, buckets, worst


@pytest.mark.long
@pytest.mark.parametrize(
    ("why", "passes", "said"), [("failure", 5, "MemoryError"), ("stale", 11, "without a new gradient")]
)
def test_failed_search_restores_buckets_by_size_on_all_ranks(why: str, passes: int, said: str) -> None:
    first, other = run_ranks(given_up, 2, args=[why], timeout=120)
    assert first.value == other.value
    goes_on, buckets, worst = first.value
    assert goes_on == [True] * (passes - 1) + [False] * (16 - passes + 1)
    assert set(buckets) == {1}
    assert worst < 1e-6
    assert said in first.stderr


def left_out() -> list[str]:
    """Run on ranks; return the errors of a plan without a gradient and of one with a gradient twice."""
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [
        {"fuse": {"plan": "auto"}},
        {"select": {}},
        {"dispatch": {"timeout": "20s"}},
    ]
    said = []
    for buckets in ([(0, 3, 0)], [(0, 3, 0), (2, 4, 0)]):
        found = FoundPlan(buckets, 1.0, 0.5, True)
        with (
            mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}),
            patch.object(AutoPlan, "_searched", lambda *_, found=found: found),
        ):
            model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
            model, _ = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(4):
                model(torch.ones(2, 6)).sum().backward()
            last = model(torch.ones(2, 6)).sum()
            with pytest.raises(mcr.McrError) as error:
                last.backward()
            said.append(str(error.value))
    return said


@pytest.mark.long
def test_plans_with_missing_or_duplicate_gradients_are_refused() -> None:
    for result in run_ranks(left_out, 2, timeout=120):
        out, twice = result.value
        assert "is in 0 buckets of a plan" in out
        assert "is in 2 buckets of a plan" in twice


class Gated(nn.Module):
    """Two layers of every pass, one layer of some passes, an unused layer, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.some, self.none, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.uses_some = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.first(x))
        x = self.some(x) if self.uses_some else x
        y: torch.Tensor = self.last(x)
        return y


def irregular() -> list[Any]:
    """Run on ranks: a trial whose passes accumulate and use different layers on different ranks.

    Every operation is compared. Returns the report, the buckets, a hash of all operations in the order in
    which this rank sent them, and the gradients' error against the means over ranks.
    """

    def apart(_: AutoPlan, captured: Captured, libraries: Any) -> FoundPlan:
        pairs = pairwise([0, 1, 4, len(captured.order)])
        return FoundPlan([(a, b, n % len(libraries)) for n, (a, b) in enumerate(pairs)], 1.0, 0.5, True)

    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [
        {"fuse": {"plan": "auto"}},
        {"select": {}},
        {"dispatch": {"check": "every", "timeout": "20s"}},
    ]
    worst = 0.0
    with (
        mcr.init({"version": 1, "pipeline": stages}) as comm,
        patch.object(AutoPlan, "_searched", apart),
        patch.object(auto_plan, "MARGIN", -9.0),  # whatever it takes, the searched plan stays
    ):
        torch.manual_seed(2)
        model = Gated()
        twin = copy.deepcopy(model)
        mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def uses(step: int, rank: int) -> bool:
            """Return whether a pass uses it: rank 0's first and last passes, every second pass elsewhere."""
            return step % 2 == 0 if rank else step < 2 or step > 22

        with mcr.record() as log:
            for step in range(28):
                model.zero_grad()
                means: dict[str, torch.Tensor] = {}
                for rank in range(comm.size):
                    twin.zero_grad()
                    for turn in range(2):
                        batch = torch.randn(
                            4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * turn + rank)
                        )
                        twin.uses_some = model.uses_some = uses(step, rank)
                        twin(batch).square().mean().backward()
                        if rank == comm.rank:
                            with mcr.no_sync(model) if turn == 0 else nullcontext():
                                model(batch).square().mean().backward()
                    for name, param in twin.named_parameters():
                        if param.grad is not None:
                            means[name] = means.get(name, 0) + param.grad / comm.size
                for name, param in model.named_parameters():
                    assert (param.grad is None) == (name not in means), name
                    if param.grad is not None:
                        worst = max(worst, float((param.grad - means[name]).abs().max()))
        sent = [(each.kind, each.bytes, each.backend, each.tag) for each in log.records]
        digest = hashlib.sha256(repr(sent).encode()).hexdigest()
        return [mcr.plan_report(), wrapping._wrapped[model].reducer.buckets, digest, worst]


@pytest.mark.long
def test_ranks_send_the_same_with_different_parameters_in_use() -> None:
    results = [each.value for each in run_ranks(irregular, 3, timeout=120)]
    report, buckets, digest, _ = results[0]
    assert report["chosen"] == "searched"
    assert report["buckets"] == buckets
    assert [len(bucket) for bucket in buckets] == [1, 3, 4]
    for theirs in results:
        assert theirs[:3] == [report, buckets, digest]
        assert theirs[3] < 1e-6
