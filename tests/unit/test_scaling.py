"""Costs on another cluster: the closed forms of algorithms, and what is measured, scaled or assumed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcr_plus.errors import ConfigError, InvalidArgument, Unsupported
from mcr_plus.plan.scaling import Costs, Measured, from_probe, from_step, from_table, wire_bytes
from mcr_plus.plan.step import Issue, Probed, Role, Step
from mcr_plus.plan.topology import Topology, parse_latency, parse_rate
from mcr_plus.tables.cost import CostModel, Curve, placed
from mcr_plus.tables.table import Query, parse_table

LATENCY, RATE = 1e-4, 12.5e6  # of a round, seconds and bytes per second
MIB = 1 << 20


def cluster(nodes: int = 64, **more: Any) -> Topology:
    links = {"nic": {"rate": "100Mbit/s"}, **more.pop("links", {})}
    return Topology.of({"nodes": nodes, **more, "links": links})


def measured(kind: str, library: str, rounds: float, part: float, ranks: int = 2) -> Measured:
    """Times of so many rounds, each with a part of the bytes."""
    sizes = [2**power for power in range(3, 28)]
    points = {size: 1e6 * rounds * (LATENCY + part * size / RATE) for size in sizes}
    return Measured(kind, library, placed(ranks, ranks, 1), Curve.through(points))


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
    costs = Costs([measured(kind, "gloo", rounds, part)], cluster())
    latencies, volume = form(ranks)
    found = costs.of(kind, MIB, range(ranks), "gloo")
    assert found.seconds == pytest.approx(latencies * LATENCY + volume * MIB / RATE, rel=1e-9)
    assert found.how == ("measured" if ranks == 2 else "scaled")


@pytest.mark.parametrize("nbytes", [1 << 10, MIB])
@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_the_best_algorithm_of_a_library_counts(ranks: int, nbytes: int) -> None:
    """Of two ranks one round with all bytes, as doubling has, or two with half, as a ring."""
    points = {2**power: 1e6 * (2 * LATENCY + 2**power / RATE) for power in range(3, 28)}
    two = Measured("all_reduce", "mpi", placed(2, 2, 1), Curve.through(points))
    doubling = math.log2(ranks) * (2 * LATENCY + nbytes / RATE)
    ring = 2 * (ranks - 1) * LATENCY + 2 * (ranks - 1) / ranks * nbytes / RATE
    found = Costs([two], cluster()).of("all_reduce", nbytes, range(ranks), "mpi")
    assert found.seconds == pytest.approx(min(doubling, ring), rel=1e-9)
    by_gloo = Costs([Measured("all_reduce", "gloo", two.at, two.curve)], cluster())
    assert by_gloo.of("all_reduce", nbytes, range(ranks), "gloo").seconds == pytest.approx(ring, rel=1e-9)


def test_racks_share_their_uplinks() -> None:
    """A ring crosses an uplink once; of an all_to_all, what half of the ranks send to the others does."""
    topology = cluster(8, links={"rack": {"nodes": 4, "uplink": "50Mbit/s"}})
    ring = Costs([measured("all_reduce", "gloo", 2, 1 / 2)], topology)
    expected = 14 * LATENCY + 14 / 8 * MIB / (RATE / 2)
    assert ring.of("all_reduce", MIB, range(8), "gloo").seconds == pytest.approx(expected, rel=1e-9)
    pairs = Costs([measured("all_to_all", "gloo", 1, 1 / 2)], topology)
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
    costs = Costs([measured("all_to_all", "gloo", 1, 1 / 2)], topology)
    expected = 7 * LATENCY + shared * MIB / 2 / RATE
    assert costs.of("all_to_all", MIB, range(8), "gloo").seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2, 10])
def test_other_links(factor: float) -> None:
    """What the rate explains changes with it, and the rest does not."""
    before = cluster()
    after = before.changed([f"nic={100 * factor:g}Mbit/s", "nic.latency=1ms"])
    found = Costs([measured("all_reduce", "gloo", 2, 1 / 2)], after, before).of(
        "all_reduce", MIB, range(4), "gloo"
    )
    assert found.seconds == pytest.approx(6 * (LATENCY + 1e-3) + 1.5 * MIB / RATE / factor, rel=1e-6)
    assert found.how == "scaled"


def test_a_faster_link_does_not_help_ranks_that_are_slow() -> None:
    slow = {2**power: 1e6 * 8 * 2**power / RATE for power in range(3, 28)}
    costs = [Measured("all_reduce", "gloo", placed(2, 2, 1), Curve.through(slow))]
    ten = (
        Costs(costs, cluster().changed(["nic=1Gbit/s"]), cluster())
        .of("all_reduce", MIB, range(2), "gloo")
        .seconds
    )
    assert 7 / 8 * 8 * MIB / RATE * 0.98 <= ten <= 8 * MIB / RATE


def test_nothing_that_is_assumed_looks_measured() -> None:
    two = measured("all_reduce", "gloo", 2, 1 / 2)
    costs = Costs([two], cluster())
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
    one_point = Measured("all_reduce", "gloo", two.at, Curve.through({8: 10.0}))
    assert Costs([one_point], cluster()).of("all_reduce", MIB, (0, 1), "gloo").how == "assumed"
    # Times inside a node say nothing about those between nodes.
    here = Measured("all_reduce", "gloo", placed(2, 1, 2), two.curve)
    links = {"inside": {"rate": "1GB/s"}, "nic": {"rate": "100Mbit/s"}}
    topology = Topology.of({"nodes": 2, "ranks_per_node": 2, "links": links})
    assert Costs([here], topology).of("all_reduce", MIB, (0, 1), "gloo").how == "measured"
    assert Costs([here], topology).of("all_reduce", MIB, (0, 2), "gloo").how == "assumed"


def test_unknown_costs_are_refused() -> None:
    costs = Costs([measured("all_reduce", "gloo", 2, 1 / 2)], Topology.of({"nodes": 4}))
    with pytest.raises(
        Unsupported, match=r"all_to_all by 'mpi' of 4 ranks on 4 nodes.* no nic link; known: gloo"
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


def test_tables_have_times_and_shares() -> None:
    costs = Costs(from_table(parse_table(TABLE)), cluster())
    found = costs.of("all_reduce", MIB, (0, 1), "gloo")
    assert found == (1e-3, 0.1, "measured", "measured")
    assert costs.of("all_reduce", 1 << 10, (0, 1), "gloo")[1:] == (0.5, "measured", "measured")
    assert costs.of("all_gather", 2 * MIB, (0, 1), "gloo").seconds == 1e-3  # bytes of one rank in the table
    assert costs.of("all_reduce", MIB, range(4), "gloo")[2:] == ("scaled", "scaled")


def test_probes_and_steps_have_times_too() -> None:
    probed = Probed("all_reduce", (8, MIB), (1e-3, 2e-3), (0.2, 0.4))
    job = Step(2, 2, "", 1.0, 0.0, (Role((0, 1), ()),), measured={"mpi": probed})
    found = Costs(from_probe(job), cluster()).of("all_reduce", MIB, (0, 1), "mpi")
    assert found == (2e-3, 0.4, "measured", "measured")
    events = (Issue(0, "all_reduce", 64, (0, 1), None, 3e-3), Issue(1, "all_reduce", 64, (0, 1), None, 5e-3))
    step = Step(2, 2, "", 1.0, 0.0, (Role((0, 1), events),))
    found = Costs(from_step(step), cluster()).of("all_reduce", 64, (0, 1), "captured")
    assert found.seconds == pytest.approx(4e-3)
    assert found[2:] == ("measured", "assumed")


def test_shares_of_the_probe_complete_a_table_without_them() -> None:
    table = measured("all_reduce", "gloo", 2, 0.5)
    job = Step(
        2, 2, "", 1.0, 0.0, (Role((0, 1), ()),),
        measured={"gloo": Probed("all_reduce", (8, MIB), (1e-3, 2e-3), (0.2, 0.4))},
    )  # fmt: skip
    alone = Costs([table], cluster()).of("all_reduce", MIB, (0, 1), "gloo")
    both = Costs([table, *from_probe(job)], cluster()).of("all_reduce", MIB, (0, 1), "gloo")
    assert alone[1:] == (0.0, "measured", "assumed")
    assert both == (alone.seconds, 0.4, "measured", "measured")


def test_between_sizes_far_apart_nothing_is_measured() -> None:
    far = Measured("all_reduce", "gloo", placed(2, 2, 1), Curve.through({3072: 100.0, 13 * MIB: 9000.0}))
    costs = Costs([far], cluster())
    assert [costs.of("all_reduce", size, (0, 1), "gloo").how for size in (3072, MIB, 12 * MIB, 13 * MIB)] == [
        "measured", "scaled", "measured", "measured",
    ]  # fmt: skip


def test_times_over_links_that_may_be_others_are_assumed() -> None:
    """A table of one cluster, and the links of another, without a word about those of the first."""
    table = measured("all_reduce", "gloo", 2, 0.5)
    guessed = Costs([table], cluster(), guessed=True)
    assert guessed.of("all_reduce", MIB, (0, 1), "gloo").how == "assumed"
    assert (
        guessed.on(cluster().changed(["nic=1Gbit/s"])).of("all_reduce", MIB, (0, 1), "gloo").how == "assumed"
    )
    unknown = Costs([table], Topology.of({"nodes": 64}), guessed=True)
    assert unknown.of("all_reduce", MIB, (0, 1), "gloo").how == "measured"


def test_a_disturbed_operation_makes_no_slope() -> None:
    """Of two sizes that are almost equal the faster counts, or larger sizes would take any time."""
    times = {1000: 1e-4, 790_000: 6e-4, 791_000: 12e-3}
    events = tuple(
        Issue(at, "all_reduce", size, (0, 1), None, took) for at, (size, took) in enumerate(times.items())
    )
    step = Step(2, 1, "", 1.0, 0.0, (Role((0, 1), events),))
    costs = Costs(from_step(step), cluster(nodes=1, ranks_per_node=2))
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
    assert found.placement([0, 1, 4, 16]) == (4, 3, 2, 2, 3)
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


def test_quantities() -> None:
    assert [parse_rate(text) for text in ("8bit/s", "1kbit/s", "1MiB/s", "2.5GB/s")] == [1, 125, MIB, 2.5e9]
    assert [parse_latency(value) for value in ("5us", "5µs", "1.5ms", "20ns", 0)] == pytest.approx(
        [5e-6, 5e-6, 1.5e-3, 2e-8, 0]
    )
    assert np.isclose(Costs([], cluster()).topology.medium.rates["nic"], RATE)
