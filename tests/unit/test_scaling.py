"""Costs on another cluster: the closed forms of algorithms, and measured, scaled or assumed costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from steps import step_of

from mcr_plus.bucketing import probe as probing
from mcr_plus.bucketing.advise import advise
from mcr_plus.bucketing.network import simulate
from mcr_plus.bucketing.scaling import ClusterCosts, Measured, from_probe, from_step, from_table, wire_bytes
from mcr_plus.bucketing.step import CapturedStep, IssueEvent, Probed, ReadyEvent, Role
from mcr_plus.bucketing.topology import Topology, parse_latency, parse_rate
from mcr_plus.errors import ConfigError, InvalidArgument, Unsupported
from mcr_plus.tables.cost import CostModel, TimeCurve, placed
from mcr_plus.tables.table import Query, parse_table

LATENCY, RATE = 1e-4, 12.5e6  # of a round, seconds and bytes per second
MIB = 1 << 20


def cluster(nodes: int = 64, **more: Any) -> Topology:
    links = {"nic": {"rate": "100Mbit/s"}, **more.pop("links", {})}
    return Topology.of({"nodes": nodes, **more, "links": links})


def measured(kind: str, library: str, rounds: float, part: float, ranks: int = 2) -> Measured:
    """Return the times of some rounds, each with a part of the bytes."""
    sizes = [2**power for power in range(3, 28)]
    points = {size: 1e6 * rounds * (LATENCY + part * size / RATE) for size in sizes}
    return Measured(kind, library, placed(ranks, ranks, 1), TimeCurve.through(points))


FORMS: dict[str, tuple[float, float, Callable[[int], tuple[float, float]]]] = {
    "all_reduce": (2, 1 / 2, lambda n: (2 * (n - 1), 2 * (n - 1) / n)),
    "all_gather": (1, 1 / 2, lambda n: (n - 1, (n - 1) / n)),
    "reduce_scatter": (1, 1 / 2, lambda n: (n - 1, (n - 1) / n)),
    "all_to_all": (1, 1 / 2, lambda n: (n - 1, (n - 1) / n)),
    "broadcast": (1, 1, lambda n: (math.ceil(math.log2(n)), math.ceil(math.log2(n)))),
    "gather": (1, 1 / 2, lambda n: (n - 1, (n - 1) / n)),
}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("kind", FORMS)
def test_times_follow_the_formulas(kind: str, ranks: int) -> None:
    rounds, part, form = FORMS[kind]
    costs = ClusterCosts([measured(kind, "gloo", rounds, part)], cluster())
    latencies, volume = form(ranks)
    found = costs.of(kind, MIB, range(ranks), "gloo")
    assert found.seconds == pytest.approx(latencies * LATENCY + volume * MIB / RATE, rel=1e-9)
    assert found.how == ("measured" if ranks == 2 else "scaled")


@pytest.mark.parametrize("nbytes", [1 << 10, MIB])
@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_the_best_algorithm_of_a_library_counts(ranks: int, nbytes: int) -> None:
    """Two ranks take one round with all bytes (doubling), or two rounds with half of them (a ring)."""
    points = {2**power: 1e6 * (2 * LATENCY + 2**power / RATE) for power in range(3, 28)}
    two = Measured("all_reduce", "mpi", placed(2, 2, 1), TimeCurve.through(points))
    doubling = math.log2(ranks) * (2 * LATENCY + nbytes / RATE)
    ring = 2 * (ranks - 1) * LATENCY + 2 * (ranks - 1) / ranks * nbytes / RATE
    found = ClusterCosts([two], cluster()).of("all_reduce", nbytes, range(ranks), "mpi")
    assert found.seconds == pytest.approx(min(doubling, ring), rel=1e-9)
    by_gloo = ClusterCosts([Measured("all_reduce", "gloo", two.at, two.curve)], cluster())
    assert by_gloo.of("all_reduce", nbytes, range(ranks), "gloo").seconds == pytest.approx(ring, rel=1e-9)


def test_racks_share_their_uplinks() -> None:
    """A ring crosses an uplink once; an all_to_all crosses it with half of the ranks' data for the others."""
    topology = cluster(8, links={"rack": {"nodes": 4, "uplink": "50Mbit/s"}})
    ring = ClusterCosts([measured("all_reduce", "gloo", 2, 1 / 2)], topology)
    expected = 14 * LATENCY + 14 / 8 * MIB / (RATE / 2)
    assert ring.of("all_reduce", MIB, range(8), "gloo").seconds == pytest.approx(expected, rel=1e-9)
    pairs = ClusterCosts([measured("all_to_all", "gloo", 1, 1 / 2)], topology)
    expected = 7 * LATENCY + 4 * 4 * MIB / 8 / (RATE / 2)
    assert pairs.of("all_to_all", MIB, range(8), "gloo").seconds == pytest.approx(expected, rel=1e-9)
    use = pairs.use("all_to_all", MIB, topology.placement(range(8)), "gloo")
    assert use.busy["uplink"] == pytest.approx(1, abs=0.01)
    assert use.busy["nic"] == pytest.approx(7 / 8 * MIB / RATE / use.cost.seconds)


@pytest.mark.parametrize(("per", "shared"), [("node", 4), ("rank", 1)])
def test_ranks_of_a_node_share_its_link(per: str, shared: int) -> None:
    """All_to_all of 2 nodes with 4 ranks: each sends half of its bytes to the other node."""
    topology = Topology.of(
        {"nodes": 2, "ranks_per_node": 4, "links": {"nic": {"rate": "100Mbit/s", "per": per}}}
    )
    costs = ClusterCosts([measured("all_to_all", "gloo", 1, 1 / 2)], topology)
    expected = 7 * LATENCY + shared * MIB / 2 / RATE
    assert costs.of("all_to_all", MIB, range(8), "gloo").seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2, 10])
def test_other_links(factor: float) -> None:
    """The part of a time that the rate explains changes with the rate; the rest does not."""
    before = cluster()
    after = before.changed([f"nic={100 * factor:g}Mbit/s", "nic.latency=1ms"])
    found = ClusterCosts([measured("all_reduce", "gloo", 2, 1 / 2)], after, before).of(
        "all_reduce", MIB, range(4), "gloo"
    )
    assert found.seconds == pytest.approx(6 * (LATENCY + 1e-3) + 1.5 * MIB / RATE / factor, rel=1e-6)
    assert found.how == "scaled"


@pytest.mark.parametrize("factor", [0.25, 2, 8])
def test_a_link_inside_nodes_counts_where_it_is_the_slowest(factor: float) -> None:
    """A ring covers two nodes of two ranks; links inside have half of the rate of links between nodes."""
    links = {"inside": {"rate": "50Mbit/s"}, "nic": {"rate": "100Mbit/s"}}
    before = Topology.of({"nodes": 2, "ranks_per_node": 2, "links": links})
    rounds, sizes = 6, [2**power for power in range(3, 28)]
    points = {size: 1e6 * (rounds * LATENCY + 1.5 * size / (RATE / 2)) for size in sizes}
    four = Measured("all_reduce", "gloo", placed(4, 2, 2), TimeCurve.through(points))
    same = ClusterCosts([four], before).of("all_reduce", MIB, range(4), "gloo")
    after = ClusterCosts([four], before).on(before.changed([f"inside={50 * factor:g}Mbit/s"]))
    found = after.of("all_reduce", MIB, range(4), "gloo")
    slowest = RATE * min(factor / 2, 1)
    assert found.seconds == pytest.approx(rounds * LATENCY + 1.5 * MIB / slowest, rel=1e-6)
    assert (same.how, found.how) == ("measured", "scaled")
    later = ClusterCosts([four], before).on(before.changed(["inside.latency=1ms", "inside=50Mbit/s"]))
    assert later.of("all_reduce", MIB, range(4), "gloo").how == "scaled"


def test_ranks_with_a_link_each_are_faster_than_those_that_share_one() -> None:
    """All_to_all of 2 nodes with 4 ranks, measured where they share the link of their node."""
    links = {"nic": {"rate": "100Mbit/s", "per": "node"}}
    before = Topology.of({"nodes": 2, "ranks_per_node": 4, "links": links})
    sizes = [2**power for power in range(3, 28)]
    points = {size: 1e6 * (7 * LATENCY + 4 * size / 2 / RATE) for size in sizes}
    eight = Measured("all_to_all", "gloo", placed(8, 2, 4), TimeCurve.through(points))
    apart = ClusterCosts([eight], before).on(before.changed(["nic.per=rank"]))
    found = apart.of("all_to_all", MIB, range(8), "gloo")
    assert found.seconds == pytest.approx(7 * LATENCY + MIB / 2 / RATE, rel=1e-6)
    assert found.how == "scaled"


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ("nic=100Gbit/s", "this cluster's nic is unknown.* expected links.nic .*--topology"),
        ("inside=1GB/s", "this cluster's inside is unknown.* expected links.inside .*--topology"),
        ("nic.latency=1us", "this cluster's nic is unknown"),
        ("uplink=1Tbit/s", "this cluster's rack is unknown"),
    ],
)
def test_an_unknown_link_cannot_be_changed(change: str, missing: str) -> None:
    captured_on = Topology.of({"nodes": 2})
    with pytest.raises(ConfigError, match=f"^{change}: {missing}"):
        captured_on.changed([change])
    step = step_of([("w", MIB, 0.01)], seconds=0.02)
    with pytest.raises(ConfigError, match=f"^{change}: {missing}"):
        advise(step, ClusterCosts(from_step(step), captured_on), what_ifs=[change])


def test_a_link_unknown_at_the_measurement_claims_no_gain() -> None:
    two = measured("all_reduce", "gloo", 2, 1 / 2)
    unknown = Topology.of({"nodes": 2})
    costs = ClusterCosts([two], cluster(), unknown)
    assert costs.of("all_reduce", MIB, (0, 1), "gloo").how == "assumed"
    with pytest.raises(Unsupported, match="nic: its rate is unknown on the cluster where all_reduce by gloo"):
        costs.on(cluster().changed(["nic=1Gbit/s"]))
    advice = advise(step_of([("w", MIB, 0.01)]), costs, what_ifs=["nic=1Gbit/s"])
    assert not any(each.change.startswith("nic") for each in advice.what_ifs)
    assert any(text.startswith("nic=1Gbit/s: nic: its rate is unknown") for text in advice.skipped)
    # A cluster without a description has the measured links.
    there = ClusterCosts([two], unknown, cluster()).of("all_reduce", MIB, (0, 1), "gloo")
    assert there.seconds == pytest.approx(2 * LATENCY + MIB / RATE)


def test_a_faster_link_does_not_help_ranks_that_are_slow() -> None:
    slow = {2**power: 1e6 * 8 * 2**power / RATE for power in range(3, 28)}
    costs = [Measured("all_reduce", "gloo", placed(2, 2, 1), TimeCurve.through(slow))]
    ten = (
        ClusterCosts(costs, cluster().changed(["nic=1Gbit/s"]), cluster())
        .of("all_reduce", MIB, range(2), "gloo")
        .seconds
    )
    assert 7 / 8 * 8 * MIB / RATE * 0.98 <= ten <= 8 * MIB / RATE


def test_assumed_figures_do_not_look_measured() -> None:
    two = measured("all_reduce", "gloo", 2, 1 / 2)
    costs = ClusterCosts([two], cluster())
    assert costs.of("all_reduce", MIB, (3, 9), "gloo").how == "measured"
    assert costs.of("all_reduce", MIB, (3, 9), "gloo").share_how == "assumed"
    assert costs.of("all_reduce", 1 << 30, (0, 1), "gloo").how == "scaled"  # beyond the sizes
    assert costs.of("all_reduce", 1, (0, 1), "gloo").how == "scaled"
    assert (
        costs.of("all_reduce", MIB, (0, 1), "gloo", "int8_block").how == "assumed"
    )  # encoding takes time, too
    assert costs.of("all_reduce", MIB, (0, 1), "mpi").how == "assumed"
    assert costs.of("all_gather", MIB, (0, 1), "gloo").how == "assumed"
    assert costs.of("all_reduce", MIB, (5,), "gloo").seconds == 0.0
    one_point = Measured("all_reduce", "gloo", two.at, TimeCurve.through({8: 10.0}))
    assert ClusterCosts([one_point], cluster()).of("all_reduce", MIB, (0, 1), "gloo").how == "assumed"
    # Times inside a node say nothing about times between nodes.
    here = Measured("all_reduce", "gloo", placed(2, 1, 2), two.curve)
    links = {"inside": {"rate": "1GB/s"}, "nic": {"rate": "100Mbit/s"}}
    topology = Topology.of({"nodes": 2, "ranks_per_node": 2, "links": links})
    assert ClusterCosts([here], topology).of("all_reduce", MIB, (0, 1), "gloo").how == "measured"
    assert ClusterCosts([here], topology).of("all_reduce", MIB, (0, 2), "gloo").how == "assumed"


def test_unknown_costs_are_refused() -> None:
    costs = ClusterCosts([measured("all_reduce", "gloo", 2, 1 / 2)], Topology.of({"nodes": 4}))
    with pytest.raises(
        Unsupported, match=r"all_to_all by 'mpi' of 4 ranks on 4 nodes.* no nic link; .*known: gloo"
    ):
        costs.of("all_to_all", 8, range(4), "mpi")
    with pytest.raises(InvalidArgument, match="rank 4: expected 0 to 3"):
        costs.of("all_reduce", 8, range(5), "gloo")
    with pytest.raises(Unsupported, match="powersgd"):
        wire_bytes("powersgd", MIB)
    assert wire_bytes("bf16", MIB) == MIB // 2


TABLE = """\
version: 1
fingerprint: {ranks: 2, nodes: 2, ranks_per_node: 1}
rules:
  - {kind: all_reduce, async: false, bytes: 0.., backend: gloo, measured: {gloo: {1KiB: 100, 1MiB: 1000}}}
  - {kind: all_reduce, async: true, bytes: 0.., backend: gloo, measured: {gloo: {1KiB: 50, 1MiB: 100}}}
  - {kind: all_gather, basis: per_rank, bytes: 0.., backend: gloo, measured: {gloo: {1KiB: 100, 1MiB: 1000}}}
  - {kind: "*", bytes: 0.., backend: gloo}
"""


LIKES = """\
version: 1
fingerprint: {ranks: 2, nodes: 2, ranks_per_node: 1}
rules:
  - {kind: all_reduce, device: cuda, bytes: 0.., backend: gloo, measured: {gloo: {1KiB: 7, 1MiB: 70}}}
  - {kind: all_reduce, device: cpu, dtype: float16, bytes: 0.., backend: gloo, measured: {gloo: {1MiB: 900}}}
  - {kind: all_reduce, device: cpu, bytes: 0.., backend: gloo, measured: {gloo: {1KiB: 100, 1MiB: 1000}}}
  - {kind: all_gather, bytes: 0.., backend: gloo, measured: {gloo: {1KiB: 100, 1MiB: 1000}}}
  - {kind: broadcast, device: cuda, bytes: 0.., backend: nccl, measured: {nccl: {1KiB: 9}}}
"""


@pytest.mark.parametrize(
    ("like", "kind", "microseconds", "how"),
    [
        ("float32 cpu", "all_reduce", 1000, "measured"),
        ("float16 cpu", "all_reduce", 900, "measured"),
        ("bfloat16 cpu", "all_reduce", 1000, "scaled"),
        ("float32 cuda", "all_reduce", 70, "measured"),
        ("bfloat16 cuda", "all_reduce", 70, "scaled"),
        ("float32 cpu", "all_gather", 1000, "measured"),
        ("float32 cuda", "all_gather", 1000, "assumed"),  # a table that names no device has times of the CPU
    ],
)
def test_tables_are_read_for_the_device_and_the_dtype_of_the_step(
    like: str, kind: str, microseconds: float, how: str
) -> None:
    events = (ReadyEvent("w", 64, like), IssueEvent(0, "barrier", 64, (0, 1), None, 3e-3))
    step = CapturedStep(2, 2, "", 1.0, 0.0, (Role((0, 1), events),))
    costs = ClusterCosts([*from_table(parse_table(LIKES)), *from_step(step)], cluster())
    found = costs.of(kind, MIB, (0, 1), "gloo")
    assert found.seconds == pytest.approx(1e-6 * microseconds)
    assert found.how == how
    assert ("nccl" in costs.libraries()) == like.endswith("cuda")


def test_without_a_step_tables_are_read_for_float32_on_the_cpu() -> None:
    costs = ClusterCosts(from_table(parse_table(LIKES)), cluster())
    assert costs.of("all_reduce", MIB, (0, 1), "gloo")[::2] == (1e-3, "measured")
    several = (ReadyEvent("v", 64, "float32 cpu"), ReadyEvent("w", 64, "float16 cpu"))
    step = CapturedStep(
        2, 2, "", 1.0, 0.0, (Role((0, 1), (*several, IssueEvent(0, "barrier", 8, (0, 1), None, 1.0))),)
    )
    costs = ClusterCosts([*from_table(parse_table(LIKES)), *from_step(step)], cluster())
    assert costs.of("all_reduce", MIB, (0, 1), "gloo").how == "scaled"


def test_tables_have_times_and_shares() -> None:
    costs = ClusterCosts(from_table(parse_table(TABLE)), cluster())
    found = costs.of("all_reduce", MIB, (0, 1), "gloo")
    assert found == (1e-3, 0.1, "measured", "measured")
    assert costs.of("all_reduce", 1 << 10, (0, 1), "gloo")[1:] == (0.5, "measured", "measured")
    assert costs.of("all_gather", 2 * MIB, (0, 1), "gloo").seconds == 1e-3  # bytes of one rank in the table
    assert costs.of("all_reduce", MIB, range(4), "gloo")[2:] == ("scaled", "scaled")


def test_probes_and_steps_have_times_too() -> None:
    probed = Probed("all_reduce", (8, MIB), (1e-3, 2e-3), (0.2, 0.4))
    job = CapturedStep(2, 2, "", 1.0, 0.0, (Role((0, 1), ()),), measured={"mpi": probed})
    found = ClusterCosts(from_probe(job), cluster()).of("all_reduce", MIB, (0, 1), "mpi")
    assert found == (2e-3, 0.4, "measured", "measured")
    events = (
        IssueEvent(0, "all_reduce", 64, (0, 1), None, 3e-3),
        IssueEvent(1, "all_reduce", 64, (0, 1), None, 5e-3),
    )
    step = CapturedStep(2, 2, "", 1.0, 0.0, (Role((0, 1), events),))
    found = ClusterCosts(from_step(step), cluster()).of("all_reduce", 64, (0, 1), "captured")
    assert found.seconds == pytest.approx(4e-3)
    assert found[2:] == ("measured", "assumed")


def test_times_of_captured_vector_collectives_are_found() -> None:
    """A mixture of experts has such calls: its ranks send different numbers of tokens in each step."""
    events = (
        IssueEvent(0, "all_to_all_v", 64, (0, 1), None, 3e-3),
        IssueEvent(1, "all_to_all_v", 64, (0, 1), None, 5e-3),
    )
    step = CapturedStep(2, 2, "", 1.0, 0.0, (Role((0, 1), events),))
    found = ClusterCosts(from_step(step), cluster()).of("all_to_all_v", 64, (0, 1), "captured")
    assert found.seconds == pytest.approx(4e-3)
    assert found.how == "measured"
    assert simulate(step, None, ClusterCosts(from_step(step), cluster())).step_s == pytest.approx(8e-3)


def test_shares_of_the_probe_complete_a_table_without_them() -> None:
    table = measured("all_reduce", "gloo", 2, 0.5)
    job = CapturedStep(
        2, 2, "", 1.0, 0.0, (Role((0, 1), (ReadyEvent("w", 8, "float32 cpu"),)),),
        measured={"gloo": Probed("all_reduce", (8, MIB), (1e-3, 2e-3), (0.2, 0.4))},
    )  # fmt: skip
    alone = ClusterCosts([table], cluster()).of("all_reduce", MIB, (0, 1), "gloo")
    both = ClusterCosts([table, *from_probe(job)], cluster()).of("all_reduce", MIB, (0, 1), "gloo")
    assert alone[1:] == (0.0, "measured", "assumed")
    assert both == (alone.seconds, 0.4, "measured", "measured")


def test_shares_are_measured_only_near_their_own_sizes() -> None:
    """The table has asynchronous operations of small sizes alone."""
    sizes = np.array([64.0, 1024.0])
    two = measured("all_reduce", "gloo", 2, 1 / 2)
    known = Measured("all_reduce", "gloo", two.at, two.curve, (sizes, np.array([0.1, 0.3])))
    costs = ClusterCosts([known], cluster())
    assert costs.of("all_reduce", 1024, (0, 1), "gloo")[1:] == (0.3, "measured", "measured")
    assert costs.of("all_reduce", MIB, (0, 1), "gloo")[1:] == (0.3, "measured", "scaled")


class Clocked:
    """A stand-in for a communicator and its clock: operations at `rate` slow concurrent computing down.

    A piece of computing takes `PIECE`, or PIECE / (1 - share) while an operation of that share is in flight.
    """

    PIECE = 1e-4

    def __init__(self, rate: float, latency: float = 1e-3) -> None:
        self.now, self.rate, self.latency = 0.0, rate, latency
        self._ends, self._share = 0.0, 0.0

    def clock(self) -> float:
        return self.now

    def send(self, values: torch.Tensor, library: str) -> Any:
        self._ends = ends = max(self._ends, self.now) + self.seconds(values.nbytes)
        self._share = self.share(values.nbytes)
        return SimpleNamespace(wait=lambda: self._wait(ends))

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.rate

    @staticmethod
    def share(nbytes: int) -> float:
        return 0.1 + 0.02 * math.log2(nbytes / 4096)

    def _wait(self, ends: float) -> None:
        self.now = max(self.now, ends)

    def progress(self) -> None:
        self.now += self.PIECE / (1 - (self._share if self.now < self._ends else 0.0))

    def all_reduce(self, *_: Any, **__: Any) -> None:
        pass


@pytest.mark.parametrize("megabytes", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_the_probe_has_no_shares_that_it_did_not_measure(
    megabytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm: Any = Clocked(megabytes * 1e6)
    monkeypatch.setattr(probing, "perf_counter", comm.clock)
    monkeypatch.setattr(probing, "_EDGE", 1)  # computing takes the clock's time
    found = probing.probe(comm, torch.float32, torch.device("cpu"), 50 << 20, ["gloo"], comm.send)["gloo"]
    expected = [comm.share(int(size)) for size in found.sizes]
    assert found.shares.tolist() == pytest.approx(expected, abs=0.02)
    assert found.seconds.tolist() == pytest.approx((1e-3 + found.sizes / comm.rate).tolist())
    assert len(found.sizes) >= 2
    assert comm.now < 2.2


class Bursting(Clocked):
    """A link that sends up to `BURST` unused bytes at once: a token bucket."""

    BURST = 1 << 18

    def seconds(self, nbytes: int) -> float:
        begins = max(self._ends, self.now)
        tokens = min(self.BURST, self._tokens + (begins - self._seen) * self.rate)
        taken = self.latency + max(0.0, nbytes - tokens) / self.rate
        self._tokens, self._seen = max(tokens - nbytes, 0.0), begins + taken
        return taken

    _tokens, _seen = float(BURST), 0.0


def test_the_probe_measures_what_a_link_sustains(monkeypatch: pytest.MonkeyPatch) -> None:
    comm: Any = Bursting(119e6, latency=1e-5)
    monkeypatch.setattr(probing, "perf_counter", comm.clock)
    monkeypatch.setattr(probing, "_EDGE", 1)
    found = probing.probe(comm, torch.float32, torch.device("cpu"), 4 << 20, ["mpi"], comm.send)["mpi"]
    size = 1 << 18
    assert size <= comm.BURST  # alone, it would take no more than the latency
    assert found.times(np.array([size]))[0] == pytest.approx(size / comm.rate, rel=0.2)


def test_the_probe_sees_how_times_grow_with_size_on_distant_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three libraries have two sizes each; a message takes 20 ms."""
    comm: Any = Clocked(1e6, latency=0.02)
    monkeypatch.setattr(probing, "perf_counter", comm.clock)
    monkeypatch.setattr(probing, "_EDGE", 1)
    found = probing.probe(
        comm, torch.float32, torch.device("cpu"), 50 << 20, ["gloo", "mpi", "shm"], comm.send
    )
    for curve in found.values():
        assert curve.times(np.array([MIB]))[0] == pytest.approx(0.02 + MIB / 1e6, rel=0.05)
    assert comm.now < 3


def test_between_sizes_far_apart_nothing_is_measured() -> None:
    far = Measured("all_reduce", "gloo", placed(2, 2, 1), TimeCurve.through({3072: 100.0, 13 * MIB: 9000.0}))
    costs = ClusterCosts([far], cluster())
    assert [costs.of("all_reduce", size, (0, 1), "gloo").how for size in (3072, MIB, 12 * MIB, 13 * MIB)] == [
        "measured", "scaled", "measured", "measured",
    ]  # fmt: skip


def test_times_over_links_that_may_be_others_are_assumed() -> None:
    """The table is from one cluster, the links from another; the first's links are unknown."""
    table = measured("all_reduce", "gloo", 2, 0.5)
    guessed = ClusterCosts([table], cluster(), guessed=True)
    assert guessed.of("all_reduce", MIB, (0, 1), "gloo").how == "assumed"
    assert (
        guessed.on(cluster().changed(["nic=1Gbit/s"])).of("all_reduce", MIB, (0, 1), "gloo").how == "assumed"
    )
    unknown = ClusterCosts([table], Topology.of({"nodes": 64}), guessed=True)
    assert unknown.of("all_reduce", MIB, (0, 1), "gloo").how == "measured"


def test_a_disturbed_operation_makes_no_slope() -> None:
    """The faster of two almost equal sizes counts, or larger sizes could get any time."""
    times = {1000: 1e-4, 790_000: 6e-4, 791_000: 12e-3}
    events = tuple(
        IssueEvent(at, "all_reduce", size, (0, 1), None, took)
        for at, (size, took) in enumerate(times.items())
    )
    step = CapturedStep(2, 1, "", 1.0, 0.0, (Role((0, 1), events),))
    costs = ClusterCosts(from_step(step), cluster(nodes=1, ranks_per_node=2))
    found = costs.of("all_reduce", 1_580_000, (0, 1), "captured").seconds
    assert found == pytest.approx(1e-4 + (1_580_000 - 1000) * 5e-4 / 789_000, rel=0.01)


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_tables_scale_to_other_numbers_of_ranks(ranks: int) -> None:
    points = "{" + ", ".join(f"{2**p}B: {1e6 * (2 * LATENCY + 2**p / RATE):.12g}" for p in range(3, 25)) + "}"
    text = f"""\
version: 1
fingerprint: {{nodes: 2, ranks_per_node: 1}}
rules:
  - {{kind: all_reduce, ranks: 2, bytes: 0.., backend: gloo, measured: {{gloo: {points}}}}}
"""
    model = CostModel(parse_table(text))
    found = model.expected("gloo", Query("all_reduce", MIB, ranks=ranks, nodes=ranks, ranks_per_node=1))
    assert found is not None
    assert found.figure == "extrapolated"
    expected = 2 * (ranks - 1) * LATENCY + 2 * (ranks - 1) / ranks * MIB / RATE
    assert found.us == pytest.approx(1e6 * expected, rel=1e-6)
    # More ranks on a node share its link in a way that the table does not have.
    shared = model.expected("gloo", Query("all_reduce", MIB, ranks=4, nodes=2, ranks_per_node=2))
    assert shared is not None
    assert shared.us == pytest.approx(1e6 * (2 * LATENCY + MIB / RATE))
    assert shared.figure == "extrapolated"


# -- racks -------------------------------------------------------------------------------------------------


def racked(nodes: int = 8, **more: Any) -> Topology:
    """Return racks of four nodes; links between racks have half of the rate of a node."""
    return cluster(nodes, links={"rack": {"nodes": 4, "uplink": "50Mbit/s", "latency": "1ms"} | more})


def over_racks(nodes: int) -> dict[int, float]:
    """Microseconds of a ring over racks."""
    rounds = 2 * (nodes - 1)
    sizes = [2**power for power in range(3, 28)]
    return {size: 1e6 * (rounds * (LATENCY + 1e-3) + rounds / nodes * size / (RATE / 2)) for size in sizes}


def test_a_captured_cluster_with_racks_is_the_measured_one() -> None:
    eight = Measured("all_reduce", "gloo", placed(8, 8, 1), TimeCurve.through(over_racks(8)))
    found = ClusterCosts([eight], racked(), racked()).of("all_reduce", MIB, range(8), "gloo")
    assert found.how == "measured"
    assert found.seconds == pytest.approx(1e-6 * over_racks(8)[MIB])
    probed = Probed("all_reduce", (8, MIB), (1e-3, 2e-3), (0.2, 0.4))
    job = CapturedStep(8, 8, "", 1.0, 0.0, (Role(tuple(range(8)), ()),), measured={"gloo": probed})
    found = ClusterCosts(from_probe(job), racked()).of("all_reduce", MIB, range(8), "gloo")
    assert found == (2e-3, 0.4, "measured", "measured")


def test_the_latency_between_racks_counts_once() -> None:
    """Times between racks include it; it is added to times in one rack."""
    eight = Measured("all_reduce", "gloo", placed(8, 8, 1), TimeCurve.through(over_racks(8)))
    found = ClusterCosts([eight], racked(16), racked()).of("all_reduce", MIB, range(16), "gloo")
    assert found.how == "scaled"
    assert found.seconds == pytest.approx(1e-6 * over_racks(16)[MIB], rel=1e-6)
    two = measured("all_reduce", "gloo", 2, 1 / 2)
    found = ClusterCosts([two], racked(), racked()).of("all_reduce", MIB, range(8), "gloo")
    assert found.seconds == pytest.approx(1e-6 * over_racks(8)[MIB], rel=1e-6)


def test_times_between_racks_predict_times_in_one_rack() -> None:
    eight = Measured("all_reduce", "gloo", placed(8, 8, 1), TimeCurve.through(over_racks(8)))
    found = ClusterCosts([eight], racked(), racked()).of("all_reduce", MIB, range(4), "gloo")
    assert found.seconds == pytest.approx(6 * LATENCY + 1.5 * MIB / RATE, rel=1e-6)
    faster = racked().changed(["uplink=100Mbit/s", "rack.latency=0us"])
    found = ClusterCosts([eight], racked()).on(faster).of("all_reduce", MIB, range(8), "gloo")
    assert found.seconds == pytest.approx(14 * LATENCY + 14 / 8 * MIB / RATE, rel=1e-6)
    assert found.how == "scaled"


def test_groups_of_a_captured_step_lie_in_their_own_racks() -> None:
    """Pairs in a rack and pairs across racks have different times, wherever their nodes are."""
    inside, across = ((0, 1), (5, 6)), ((0, 4), (3, 7))
    events = tuple(
        IssueEvent(number, "all_reduce", size, group, None, seconds)
        for number, (group, size, seconds) in enumerate(
            [
                (inside[0], MIB, 1e-3), (inside[1], 2 * MIB, 2e-3),
                (across[0], MIB, 4e-3), (across[1], 2 * MIB, 8e-3),
            ]
        )
    )  # fmt: skip
    step = CapturedStep(8, 8, "", 1.0, 0.0, (Role(tuple(range(8)), events),))
    costs = ClusterCosts(from_step(step), racked())
    for groups, millisecond in ((inside, 1e-3), (across, 4e-3)):
        for group in groups:
            for size in (1, 1.5, 2):
                found = costs.of("all_reduce", int(size * MIB), group, "captured")
                assert found.how == "measured"
                assert found.seconds == pytest.approx(size * millisecond)


# -- NCCL ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 8, 64, 4096])
def test_nccl_has_trees_whose_latency_grows_with_the_logarithm_of_nodes(nodes: int) -> None:
    topology = Topology.of({"nodes": nodes, "links": {"nic": {"rate": "100Gbit/s"}}})
    two = {2**power: 1e6 * (2 * 2e-6 + 2**power / 12.5e9) for power in range(3, 34)}
    costs = ClusterCosts([Measured("all_reduce", "nccl", placed(2, 2, 1), TimeCurve.through(two))], topology)
    for size in (64 << 10, 1 << 30):
        found = costs.of("all_reduce", size, range(nodes), "nccl").seconds
        tree = 2 * math.log2(nodes) * 2e-6 + 2 * (nodes - 1) / nodes * size / 12.5e9
        assert found == pytest.approx(tree, rel=1e-6)
    rings = ClusterCosts(
        [Measured("all_reduce", "nccl:ring", placed(2, 2, 1), TimeCurve.through(two))], topology
    )
    ring = 2 * (nodes - 1) * (2e-6 + (64 << 10) / nodes / 12.5e9)
    assert rings.of("all_reduce", 64 << 10, range(nodes), "nccl:ring").seconds == pytest.approx(ring)


@pytest.mark.parametrize("ranks", [16, 128])
def test_nccl_takes_trees_for_small_sizes_and_rings_for_large_ones(ranks: int) -> None:
    """The links decide: a tree takes fewer rounds, and a ring has 1 / 0.92 of its bandwidth."""
    links = {"inside": {"rate": "200GB/s"}, "nic": {"rate": "100Gbit/s", "latency": "5us"}}
    topology = Topology.of({"nodes": ranks // 8, "ranks_per_node": 8, "links": links})
    costs = ClusterCosts([], topology)
    of = [costs.of("all_reduce", size, range(ranks), "nccl").seconds for size in (1 << 10, 16 << 30)]
    rings = [costs.of("all_reduce", size, range(ranks), "nccl:ring").seconds for size in (1 << 10, 16 << 30)]
    assert of[0] < 0.25 * rings[0]
    assert of[1] == rings[1]


@pytest.mark.parametrize("inside", [None, {"rate": "10GB/s"}])
def test_more_ranks_in_nodes_take_no_less_time(inside: dict[str, str] | None) -> None:
    """This holds for unknown links inside nodes, too: their rounds have the other links' latency."""
    links: dict[str, Any] = {"nic": {"rate": "10Gbit/s"}} | ({} if inside is None else {"inside": inside})
    topology = Topology.of({"nodes": 4, "ranks_per_node": 8, "links": links})
    points = {2**power: 20 + 2**power / 1e3 for power in range(3, 28)}
    costs = ClusterCosts(
        [Measured("all_reduce", "mpi", placed(8, 4, 2), TimeCurve.through(points))], topology
    )
    for size in (1 << 10, MIB):
        taken = [costs.of("all_reduce", size, range(ranks), "mpi").seconds for ranks in (16, 32)]
        assert sorted(taken) == taken
        assert taken[0] >= 20e-6


def test_nccl_on_one_node_and_other_kinds_have_rings() -> None:
    topology = Topology.of({"nodes": 64, "ranks_per_node": 8, "links": {"nic": {"rate": "100Gbit/s"}}})
    points = TimeCurve.through({2**power: 20.0 + 2**power / 1e4 for power in range(3, 31)})
    for kind, factor in (("all_reduce", 14 / 2), ("all_gather", 7), ("reduce_scatter", 7)):
        one, two = (Measured(kind, "nccl", placed(count, 1, count), points) for count in (1, 2))
        assert ClusterCosts([one], topology).of(kind, 8, range(0, 512, 8), "nccl").how == "assumed"
        found = ClusterCosts([two], topology).of(kind, 8, range(8), "nccl").seconds
        assert found == pytest.approx(factor * 20e-6, rel=0.01)
    gather = Measured("all_gather", "nccl", placed(2, 2, 1), points)
    across = ClusterCosts([gather], topology).of("all_gather", 8, range(0, 512, 8), "nccl").seconds
    assert across == pytest.approx(63 * 20e-6, rel=0.01)


# -- cluster.yaml --------------------------------------------------------------------------------------------


def test_a_cluster_is_read_with_its_units(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "nodes: 8\nranks_per_node: 4\nlinks:\n  inside: {rate: 50GB/s, latency: 2us}\n"
        "  nic: {rate: 100Gbit/s, latency: 5us, per: rank}\n"
        "  rack: {nodes: 4, uplink: 200 Gbit/s, latency: 1.5us}\n"
    )
    found = Topology.load(file)
    assert found.ranks == 32
    assert [found.rate(link) for link in ("inside", "nic", "uplink")] == [50e9, 12.5e9, 25e9]
    assert [found.latency(link) for link in ("inside", "nic", "uplink")] == pytest.approx(
        [2e-6, 5e-6, 6.5e-6]
    )
    assert [found.shared(link) for link in ("inside", "nic", "uplink")] == [False, False, True]
    assert found.placement([0, 1, 4, 16]) == (4, 3, 2, 2, 3, None)
    changed = found.changed(["nic=400Gbit/s", "nic.per=node", "nodes=16", "uplink=1Tbit/s"])
    assert (changed.rate("nic"), changed.shared("nic"), changed.nodes, changed.rate("uplink")) == (
        50e9,
        True,
        16,
        125e9,
    )
    assert found.rate("nic") == 12.5e9


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("nodes: 2\nlinks:\n  nic: {rate: 100}", 3, "links.nic.rate: expected a rate with its unit"),
        ("nodes: 2\nlinks:\n  nic: {rate: '100'}", 3, "the unit is missing in '100'"),
        ("nodes: 2\nlinks:\n  nic: {rate: 100Gb}", 3, "wrong unit 'Gb'"),
        (
            "nodes: 2\nlinks:\n  nic:\n    rate: 1Gbit/s\n    latency: 5",
            5,
            "links.nic.latency: expected a latency",
        ),
        ("nodes: 2\nlinks:\n  nic: {rate: 0Gbit/s}", 3, "above 0"),
        ("nodes: 2\nlinks:\n  nic: {rate: 1Gbit/s, per: host}", 3, "unknown value 'host'; known: rank, node"),
        (
            "nodes: 6\nlinks:\n  rack:\n    nodes: 4\n    uplink: 1Gbit/s",
            4,
            "racks of 4 nodes do not divide 6",
        ),
        ("nodes: 6\nlinks:\n  rail: {rate: 1Gbit/s}", 3, "unknown key 'rail'; known: inside, nic, rack"),
        ("nodes: 2\nlinks: 3", 2, "links: expected a mapping of options, got 3; known: inside, nic, rack"),
        ("nodes: 2\nlinks: {nic: 1Gbit/s}", 2, "got '1Gbit/s'; known: latency, per, rate"),
        ("nodes: 0", 1, "nodes: expected a number of at least 1"),
        ("ranks_per_node: 2", 1, "nodes: missing"),
        ("nodes: two", 1, "nodes: expected a whole number"),
        ("nodes: 2\nversion: 7", 2, "version"),
    ],
)
def test_mistakes_in_a_cluster_have_a_line(tmp_path: Path, text: str, place: int, message: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Topology.load(file)
    assert str(caught.value).startswith(f"{file}:{place}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nic", "nic: expected NAME=VALUE"),
        ("nic=100", "nic=100: links.nic.rate: expected a rate"),
        ("nick=1Gbit/s", "unknown name 'nick'; known: .*did you mean 'nic'"),
        ("nodes=7", "racks of 4 nodes do not divide 7"),
        ("rack.nodes=x", "expected a whole number"),
    ],
)
def test_mistakes_in_changes_are_named(change: str, message: str) -> None:
    topology = cluster(8, links={"rack": {"nodes": 4, "uplink": "1Gbit/s"}})
    with pytest.raises(ConfigError, match=message):
        topology.changed([change])


def test_rates_and_latencies_are_parsed() -> None:
    assert [parse_rate(text) for text in ("8bit/s", "1kbit/s", "1MiB/s", "2.5GB/s")] == [1, 125, MIB, 2.5e9]
    assert [parse_latency(value) for value in ("5us", "5µs", "1.5ms", "20ns", 0)] == pytest.approx(
        [5e-6, 5e-6, 1.5e-3, 2e-8, 0]
    )
    assert np.isclose(ClusterCosts([], cluster()).topology.medium.rates["nic"], RATE)
