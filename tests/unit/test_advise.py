"""`mcr-plus plan`: the best buckets of a step and its predictions, by closed forms and all partitions."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import mcr_plus
from steps import step_of

from mcr_plus.bucketing.advise import advise
from mcr_plus.bucketing.buckets import searched
from mcr_plus.bucketing.costs import OVERHEAD
from mcr_plus.bucketing.network import simulate
from mcr_plus.bucketing.programs import BucketPlan, PlannedBucket
from mcr_plus.bucketing.saved import SavedBucket, SavedPlan, digests
from mcr_plus.bucketing.scaling import ClusterCosts, Measured, from_step
from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, IssueEvent, ReadyEvent, Role, WaitEvent
from mcr_plus.bucketing.topology import Topology
from mcr_plus.config.reader import load
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.tables.cost import TimeCurve, placed

ALPHA, BETA = 2e-3, 1e-9  # seconds, and seconds per byte

ONE_HOST = Topology.of({"nodes": 1, "ranks_per_node": 8})


def affine(library: str, alpha: float, beta: float, ranks: int = 2, share: float | None = None) -> Measured:
    sizes = np.geomspace(4.0, 1e9, 30)
    shares = None if share is None else (sizes, np.full(30, share))
    return Measured(
        "all_reduce", library, placed(ranks, 1, ranks), TimeCurve(sizes, 1e6 * (alpha + beta * sizes)), shares
    )


def costs(*measured: Measured, topology: Topology = ONE_HOST) -> ClusterCosts:
    return ClusterCosts(measured or [affine("gloo", ALPHA, BETA)], topology)


def test_one_gradient_is_a_closed_form() -> None:
    advice = advise(step_of([("w", 1 << 20, 0.01)], forward=0.03, after=0.005), costs())
    took = ALPHA + BETA * 2**20
    # The operation hides the time of issuing.
    assert advice.timeline.step_s == pytest.approx(0.03 + 0.01 + took + 0.005, rel=1e-6)
    assert advice.timeline.how == "measured"
    assert advice.timeline.compute_s == pytest.approx(0.045 + OVERHEAD, rel=1e-6)
    assert advice.timeline.exposed_s == pytest.approx(took, rel=2e-2)
    assert advice.plan.buckets == [PlannedBucket(("w",), "gloo")]


def best_of_all(step: CapturedStep, known: ClusterCosts, names: list[str]) -> float:
    """The shortest simulated step with any partition of the gradients, in this order, by any libraries."""
    best = np.inf
    for cuts in product((False, True), repeat=len(names) - 1):
        groups: list[list[str]] = [[names[0]]]
        for cut, name in zip(cuts, names[1:], strict=True):
            if cut:
                groups.append([])
            groups[-1].append(name)
        for libraries in product(known.libraries(), repeat=len(groups)):
            plan = BucketPlan(
                [PlannedBucket(tuple(group), each) for group, each in zip(groups, libraries, strict=True)],
                "gloo",
            )
            best = min(best, simulate(step, plan, known, overhead=OVERHEAD).step_s)
    return best


def random_gradients(seed: int) -> list[tuple[str, int, float]]:
    random = np.random.default_rng(seed)
    return [
        (f"w{at}", int(random.integers(1, 40)) * 100_000, float(random.uniform(0, 4e-3))) for at in range(5)
    ]


@pytest.mark.short("5")
@pytest.mark.parametrize("seed", range(6))
def test_no_partition_and_no_library_is_better(seed: int) -> None:
    gradients = random_gradients(seed)
    step = step_of(gradients, forward=0.002)
    both = [affine("gloo", 1e-4, 3e-9), affine("mpi", 2e-3, 8e-10)]
    known = costs(*both[: 1 + seed % 2])
    advice = advise(step, known)
    best = best_of_all(step, known, [name for name, _, _ in gradients])
    # With several libraries, and so channels, the search continues by single changes.
    assert advice.timeline.step_s <= best * (1.02 if len(known.libraries()) == 1 else 1.05)
    assert advice.bound <= best * (1 + 1e-9)
    assert advice.bound > 0.7 * best


@pytest.mark.parametrize("seed", [*range(6), 336])
def test_plans_of_polled_libraries_are_not_called_the_best(seed: int) -> None:
    """Such operations begin when the program polls; the search does not know these times."""
    gradients = random_gradients(seed)
    step = step_of(gradients, forward=0.002)
    assert step.by_caller
    known = costs(affine("mpi", 1e-4, 3e-9))
    advice = advise(step, known)
    best = best_of_all(step, known, [name for name, _, _ in gradients])
    assert advice.timeline.step_s <= best * 1.02
    assert advice.bound <= best * (1 + 1e-9)
    assert not advice.exact
    assert advice.timeline.step_s <= best * (1 + advice.gap) * (1 + 1e-9)


# -- steps with gradients that not all ranks send ------------------------------------------------------------

BOTH = (0, 1)


def test_gradients_that_are_not_averaged_stay_out_of_the_plan() -> None:
    """Parameters with `mcr_skip`, such as experts': they become ready, and no bucket carries them."""
    events = (
        ComputeEvent("forward", 0.01), ReadyEvent("experts.w", 4000, "float32 cpu"),
        ComputeEvent("backward", 0.01),
        ReadyEvent("w", 4000, "float32 cpu"), IssueEvent(0, "all_reduce", 4000, BOTH, None, 1e-3, ("w",)),
        WaitEvent(0),
    )  # fmt: skip
    advice = advise(CapturedStep(2, 1, "0" * 16, 0.03, 0.0, (Role(BOTH, events),)), costs())
    assert advice.plan.buckets == [PlannedBucket(("w",), "gloo")]
    assert {each.ranks for each in advice.timeline.per_op} == {2}


def test_roles_send_their_own_gradients_and_shared_ones() -> None:
    """There are two stages of a pipeline, each on two ranks, with an embedding on all four."""

    def stage(name: str, ranks: tuple[int, ...], pace: float, first: int) -> Role:
        events: list[Any] = [ComputeEvent("forward", 0.01)]
        for at in range(3):
            events += [ComputeEvent("backward", pace), ReadyEvent(f"{name}{at}", 2 << 20, "float32 cpu")]
        own = tuple(f"{name}{at}" for at in range(3))
        events += [
            ComputeEvent("backward", pace), ReadyEvent("embedding", 1 << 20, "float32 cpu"),
            IssueEvent(first, "all_reduce", 6 << 20, ranks, "gradients", 0.01, own),
            IssueEvent(9, "all_reduce", 1 << 20, (0, 1, 2, 3), "gradients", 0.01, ("embedding",)),
            WaitEvent(first), WaitEvent(9),
        ]  # fmt: skip
        return Role(ranks, tuple(events))

    roles = (stage("a", (0, 1), 0.002, 0), stage("b", (2, 3), 0.003, 1))
    step = CapturedStep(4, 1, "0" * 16, 0.05, 0.0, roles)
    known = costs(affine("gloo", ALPHA, BETA), affine("gloo", ALPHA, BETA, 4))
    advice = advise(step, known)
    buckets = advice.plan.buckets or ()
    assert sorted(name for each in buckets for name in each.params) == sorted(
        [f"{stage}{at}" for stage in "ab" for at in range(3)] + ["embedding"]
    )
    assert not any(len(each.params) > 1 and "embedding" in each.params for each in buckets)
    assert advice.bound <= advice.timeline.step_s
    assert all(advice.timeline.step_s <= each.step_s * 1.001 for each in advice.others.values())


def mixed_step() -> CapturedStep:
    """Return a step with two dtypes; `late` has a gradient on rank 1 alone, and `unused` on no rank."""
    carried = ("a", "half", "b", "late", "unused")

    def role(rank: int, *ready: tuple[str, int, str]) -> Role:
        events: list[Any] = [ComputeEvent("forward", 0.01)]
        for name, nbytes, dtype in ready:
            events += [ComputeEvent("backward", 0.002), ReadyEvent(name, nbytes, f"{dtype} cpu")]
        sent = IssueEvent(0, "all_reduce", 1 << 20, BOTH, "gradients", 0.01, carried)
        return Role((rank,), (*events, sent, WaitEvent(0)))

    first = (("a", 1 << 20, "float32"), ("half", 1 << 19, "bfloat16"), ("b", 1 << 10, "float32"))
    roles = (role(0, *first), role(1, *first, ("late", 1 << 12, "float32")))
    return CapturedStep(2, 1, "0" * 16, 0.03, 0.0, roles)


def test_dtypes_travel_apart_and_gradients_of_one_rank_are_sent_by_all() -> None:
    step = mixed_step()
    advice = advise(step, costs())
    buckets = advice.plan.buckets or ()
    assert sorted(name for each in buckets for name in each.params) == ["a", "b", "half", "late"]
    assert ("half",) in [each.params for each in buckets]
    assert advice.bound <= advice.timeline.step_s
    # By hand: computing and issuing `half` on the slower rank, then the other operation.
    plan = BucketPlan([PlannedBucket(("half",), "gloo"), PlannedBucket(("a", "b", "late"), "gloo")], "gloo")
    expected = 0.01 + 4 * 0.002 + OVERHEAD + ALPHA + BETA * ((1 << 20) + (1 << 10) + (1 << 12))
    assert simulate(step, plan, costs(), overhead=OVERHEAD).step_s == pytest.approx(expected, rel=1e-3)


def test_unused_parameters_are_named_in_a_written_plan(tmp_path: Path) -> None:
    mixed_step().save(tmp_path / "step.json")
    answer = mcr_plus("plan", tmp_path / "step.json", "-o", tmp_path / "plan.yaml")
    assert answer.returncode == 0, answer.stderr
    plan = SavedPlan.load(tmp_path / "plan.buckets.json")
    assert plan.unused == ("unused",)
    names = ["unused", "late", "b", "half", "a"]
    assert plan.difference(plan.model, names, 2, ["gloo"]) is None
    assert "'unused' is in the plan, but not among" in str(
        plan.difference(plan.model, names[1:], 2, ["gloo"])
    )


def test_nothing_beats_the_bound_where_gradients_travel_in_groups() -> None:
    """Groups have two of four ranks: an all_reduce of four costs more, but none is sent."""

    def role(ranks: tuple[int, int], number: int) -> Role:
        events: list[Any] = [ComputeEvent("forward", 0.01)]
        for at in range(4):
            events += [ComputeEvent("backward", 0.01), ReadyEvent(f"w{at}", 2 << 20, "float32 cpu")]
        names = tuple(f"w{at}" for at in range(4))
        return Role(
            ranks,
            (*events, IssueEvent(number, "all_reduce", 8 << 20, ranks, None, 0.1, names), WaitEvent(number)),
        )

    step = CapturedStep(4, 1, "0" * 16, 0.1, 0.0, (role((0, 2), 0), role((1, 3), 1)))
    known = costs(affine("gloo", 1e-3, 8e-9), affine("gloo", 1e-3, 8e-8, 4))
    advice = advise(step, known)
    best = np.inf
    for cuts in product((False, True), repeat=3):
        ends = [at + 1 for at, cut in enumerate(cuts) if cut] + [4]
        plan = BucketPlan(
            [
                PlannedBucket(tuple(f"w{at}" for at in range(begin, end)), "gloo")
                for begin, end in zip([0, *ends], ends, strict=False)
            ],
            "gloo",
        )
        best = min(best, simulate(step, plan, known, overhead=OVERHEAD).step_s)
    assert advice.timeline.step_s == pytest.approx(best)
    assert advice.bound <= best
    assert advice.bound > 0.9 * best


@pytest.mark.parametrize("seed", range(8))
def test_no_random_plan_beats_the_bound(seed: int) -> None:
    """Costs with corners, shares of the core, one or two libraries, and links with and without a rate."""
    draw = np.random.default_rng(seed)
    links = {"inside": {"rate": "1GB/s"}} if seed % 2 else {}
    libraries = ["gloo", "mpi"][: 1 + seed // 2 % 2]
    sizes = np.geomspace(4, 1e8, 12)
    known = []
    for library in libraries:
        seconds = draw.uniform(1e-5, 3e-3) + draw.uniform(1e-10, 8e-9) * sizes
        us = 1e6 * seconds * draw.uniform(1, 1.2, 12)
        points = dict(zip(sizes.astype(int).tolist(), us.tolist(), strict=True))
        shares = sizes, np.full(12, draw.choice([0.0, 0.3, 0.9]))
        known.append(Measured("all_reduce", library, placed(2, 1, 2), TimeCurve.through(points), shares))
    over = ClusterCosts(known, Topology.of({"nodes": 1, "ranks_per_node": 2, "links": links}))
    gradients = [(f"w{at}", int(draw.integers(1, 4 << 20)), float(draw.uniform(0, 5e-3))) for at in range(6)]
    step = step_of(gradients, forward=0.002, after=0.003)
    bound = searched(step, over, 2, until=0.0).bound
    for _ in range(40):
        ends = [at + 1 for at in range(5) if draw.random() < 0.5] + [6]
        plan = [
            PlannedBucket(tuple(name for name, _, _ in gradients[begin:end]), str(draw.choice(libraries)))
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        assert simulate(step, BucketPlan(plan, "gloo"), over, overhead=OVERHEAD).step_s >= bound * (1 - 1e-9)


def test_two_libraries_over_links_of_unknown_rate_do_not_overlap_for_free() -> None:
    gradients = [(f"w{at}", 4 << 20, 1e-3) for at in range(12)]
    step = step_of(gradients, forward=0.02)
    one = advise(step, costs(affine("gloo", 1e-3, 8e-9)))
    both = advise(step, costs(affine("gloo", 1e-3, 8e-9), affine("mpi", 1e-3, 8e-9)))
    assert both.timeline.step_s == pytest.approx(one.timeline.step_s, rel=0.02)
    assert both.bound <= min(one.timeline.step_s, both.timeline.step_s)
    assert both.bound > 0.95 * both.timeline.step_s


def test_the_library_of_the_step_is_no_other_one_than_those_of_the_table() -> None:
    step = step_of([(f"w{at}", 4 << 20, 1e-3) for at in range(6)], forward=0.02, seconds=0.1)
    advice = advise(step, costs(affine("gloo", 1e-3, 8e-9), *from_step(step)))
    assert {bucket.library for bucket in advice.plan.buckets or ()} == {"gloo"}


def test_an_unmeasured_share_is_reported() -> None:
    """If operations run during computing, their share of the core is a part of the time."""
    gradients = [(f"w{at}", 1 << 20, 0.01) for at in range(4)]
    without = advise(step_of(gradients), costs()).timeline
    assert (without.how, without.times_how) == ("assumed", "measured")
    known = advise(step_of(gradients), costs(affine("gloo", ALPHA, BETA, share=0.2))).timeline
    assert (known.how, known.times_how) == ("measured", "measured")
    exposed = advise(step_of([("w", 64 << 20, 0.01)]), costs()).timeline  # without computing
    assert exposed.how == "measured"


def test_searches_end_in_time() -> None:
    step = step_of([(f"w{at}", 1 << 20, 1e-3) for at in range(60)], forward=0.02)
    known = costs(affine("gloo", 1e-4, 3e-9), affine("mpi", 2e-3, 8e-10))
    advice = advise(step, known, what_ifs=["compute=0.5"], seconds=0.0)
    assert [each.change for each in advice.what_ifs] == ["compute=0.5"]  # it was asked for
    assert any("the searches have used" in text for text in advice.skipped)


def test_predicted_times_are_those_of_the_changed_cluster() -> None:
    """With a gradient at the end all time is exposed, and twice the rate halves the link's time."""
    cluster = {"nodes": 2, "ranks_per_node": 1, "links": {"nic": {"rate": "1Gbit/s"}}}
    sizes = np.geomspace(4.0, 1e9, 30)
    measured = Measured("all_reduce", "gloo", placed(2, 2, 1), TimeCurve(sizes, 1e6 * sizes / 125e6))
    step = step_of([("w", 12_500_000, 0.05)])
    advice = advise(
        step, ClusterCosts([measured], Topology.of(cluster)), what_ifs=["nic=4Gbit/s", "compute=0.5"]
    )
    by_change = {each.change: each for each in advice.what_ifs}
    base = advice.timeline.step_s
    assert base == pytest.approx(0.15, rel=2e-2)
    assert by_change["nic=4Gbit/s"].gain == pytest.approx(0.075, rel=5e-2)
    assert by_change["nic=2Gbit/s"].gain == pytest.approx(0.05, rel=5e-2)
    assert by_change["compute=0.5"].gain == pytest.approx(0.025, rel=5e-2)
    assert by_change["compress=int8_block"].gain > 0.05
    assert by_change["compress=int8_block"].how == "assumed"
    assert [each.gain for each in advice.what_ifs] == sorted((e.gain for e in advice.what_ifs), reverse=True)
    assert by_change["nic=4Gbit/s"].how == "scaled"
    assert by_change["compute=0.5"].how == "assumed"


def test_scaling_has_the_origin_of_costs() -> None:
    topology = Topology.of({"nodes": 4, "ranks_per_node": 2, "links": {"nic": {"rate": "10Gbit/s"}}})
    advice = advise(step_of([("w", 1 << 20, 0.01)]), costs(topology=topology), ranks=8)
    assert [at.ranks for at in advice.scaling] == [1, 2, 4, 8]
    assert [at.how for at in advice.scaling[:2]] == ["measured", "measured"]
    assert advice.scaling[0].step_s < advice.scaling[1].step_s
    assert advice.scaling[-1].how != "measured"
    assert all(at.bound <= at.step_s * (1 + 1e-9) for at in advice.scaling)


def test_steps_without_gradients_are_simulated_as_they_are() -> None:
    advice = advise(step_of([], forward=0.02, seconds=0.001), costs())
    assert advice.plan.buckets is None
    assert advice.timeline.step_s >= 0.02
    assert not any(each.change.startswith("compress") for each in advice.what_ifs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("nick=1Gbit/s", "nick"),
        ("nic", "NAME=VALUE"),
        ("nic=100", "nic is unknown"),
        ("compute=fast", "factor"),
        ("compute=-1", "factor"),
        ("compress=int9", "int9"),
    ],
)
def test_unknown_changes_are_refused(change: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        advise(step_of([("w", 100, 0.01)]), costs(), what_ifs=[change])


def test_more_ranks_than_there_are_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="ranks: 9, but the cluster has 8"):
        advise(step_of([("w", 100, 0.01)]), costs(), ranks=9)


# -- the command --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_writes_a_pipeline_a_report_and_json(tmp_path: Path) -> None:
    step = step_of([("b", 400, 0.001), ("a.w", 4 << 20, 0.02)], forward=0.01, seconds=0.012)
    step.save(tmp_path / "step.json")
    links = "  inside: {rate: 10GB/s}\n  nic: {rate: 10Gbit/s, latency: 20us}\n"
    (tmp_path / "cluster.yaml").write_text(f"nodes: 8\nranks_per_node: 4\nlinks:\n{links}")
    answer = mcr_plus(
        "plan", tmp_path / "step.json", "--ranks", 32, "--topology", tmp_path / "cluster.yaml",
        "--what-if", "compress=int8_block", "--what-if", "nic=40Gbit/s",
        "-o", tmp_path / "plan.yaml", "--report", tmp_path / "plan.html", "--json",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    document: dict[str, Any] = json.loads(answer.stdout)
    assert {"step_ms", "bound_ms", "compute_ms", "exposed_ms", "how"} <= document.keys()
    assert document["bound_ms"] <= document["step_ms"]
    assert document["compute_ms"] == pytest.approx(31, rel=1e-2)
    assert document["ranks"] == 32
    assert document["how"] == "assumed"  # nothing was measured between nodes
    assert {"compress=int8_block", "nic=40Gbit/s"} <= {each["change"] for each in document["what_if"]}
    config = load(tmp_path / "plan.yaml")
    assert config.pipeline[0].name == "fuse"
    plan = SavedPlan.load(tmp_path / "plan.buckets.json")
    assert (plan.model, plan.ranks) == (step.model, 32)
    assert [list(bucket.params) for bucket in plan.buckets] == document["buckets"]
    report = (tmp_path / "plan.html").read_text()
    assert report.count("<svg") == 2
    assert not any(each["change"].startswith("compute") for each in document["what_if"])  # impossible
    for text in (
        "measured",
        "scaled",
        "assumed",
        "nic=40Gbit/s",
        "a.w",
        "prefers-color-scheme: dark",
        "viewport",
    ):
        assert text in report
    assert mcr_plus("validate", tmp_path / "plan.yaml").returncode == 0
    (tmp_path / "plan.buckets.json").write_text("{}")
    broken = mcr_plus("validate", tmp_path / "plan.yaml")
    assert broken.returncode == 2
    assert "plan.buckets.json" in broken.stderr


TABLE = """version: 1
fingerprint: {ranks: 2, nodes: 1, ranks_per_node: 2}
rules:
  - kind: all_reduce
    bytes: 0..
    backend: gloo
    measured:
      "mpi:ring": {1KiB: 50, 16KiB: 100, 256KiB: 300, 4MiB: 4000}
      gloo: {1KiB: 90, 16KiB: 200, 4MiB: 9000}
"""


def test_a_written_plan_can_be_run_from_its_own_folder(tmp_path: Path) -> None:
    """Tables of the pipeline are found from there, and only its own libraries are planned."""
    step_of([(f"w{at}", 1 << 20, 2e-3) for at in range(6)], forward=0.02, seconds=0.05).save(
        tmp_path / "step.json"
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "table.yaml").write_text(TABLE)
    for backends, libraries in (("[gloo]", {"gloo"}), ("[mpi, gloo]", {"mpi:ring"})):
        (tmp_path / "a" / "run.yaml").write_text(
            f"version: 1\nbackends: {backends}\npipeline:\n"
            "  - select: {table: table.yaml}\n  - dispatch: {progress: thread}\n"
        )
        answer = mcr_plus(
            "plan", tmp_path / "step.json", "--config", tmp_path / "a" / "run.yaml",
            "-o", tmp_path / "b" / "plan.yaml", "--json",
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        document = json.loads(answer.stdout)
        assert set(document["libraries"]) == libraries
        assert (document["how"], document["scaling"][0]["ranks"]) == ("assumed", 1)  # shares are not in it
        plan = SavedPlan.load(tmp_path / "b" / "plan.buckets.json")
        names = [f"w{at}" for at in range(6)]
        tables = digests(load(tmp_path / "b" / "plan.yaml"))
        assert len(tables) == 1
        assert plan.difference(plan.model, names, 2, ["mpi", "gloo"], tables=tables) is None
        validated = mcr_plus("validate", tmp_path / "b" / "plan.yaml")
        assert validated.returncode == 0, validated.stderr
    (tmp_path / "a" / "table.yaml").write_text(TABLE.replace("backend: gloo", "backend: glue"))
    answer = mcr_plus("validate", tmp_path / "b" / "plan.yaml")
    assert answer.returncode == 2


def test_facts_of_links_and_the_gap_are_reported(tmp_path: Path) -> None:
    step_of([(f"w{at}", 1 << 20, 2e-3) for at in range(6)], seconds=0.05).save(tmp_path / "step.json")
    (tmp_path / "cluster.yaml").write_text("nodes: 1\nranks_per_node: 8\nlinks:\n  inside: {rate: 10GB/s}\n")
    words = ["plan", tmp_path / "step.json", "--topology", tmp_path / "cluster.yaml"]
    guessed = mcr_plus(*words, "--json")
    assert "--measured-on" in guessed.stderr
    assert json.loads(guessed.stdout)["times_how"] == "assumed"
    named = mcr_plus(*words, "--measured-on", tmp_path / "cluster.yaml")
    assert named.stderr == ""
    assert "above the best ones" in named.stdout or "are the best ones" in named.stdout
    assert json.loads(guessed.stdout)["gap_of"] in ("search", "bound")
    assert "assumed (times scaled)" in named.stdout


def test_notes_are_printed_though_the_plan_fails(tmp_path: Path) -> None:
    step = step_of([("w", 1 << 20, 2e-3)], seconds=0.05)
    replace(step, notes=("an unknown operation, 'all_reduced', counts as a barrier",)).save(
        tmp_path / "step.json"
    )
    answer = mcr_plus("plan", tmp_path / "step.json", "--ranks", 64)
    assert answer.returncode == 2
    assert "note: an unknown operation, 'all_reduced'" in answer.stderr


@pytest.mark.long
def test_bad_usage_is_a_line(tmp_path: Path) -> None:
    step_of([("w", 400, 0.001)], seconds=0.001).save(tmp_path / "step.json")
    (tmp_path / "cluster.yaml").write_text("nodes: 8\nlinks:\n  nic: {rate: 10}\n")
    (tmp_path / "cut.json").write_text((tmp_path / "step.json").read_text()[:90])
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "three.json").write_text("3")
    replace(CapturedStep.load(tmp_path / "step.json"), source="kineto").save(tmp_path / "traced.json")
    for words, said in (
        ((tmp_path / "step.json", "--ranks", 3), "--topology"),
        ((tmp_path / "step.json", "--topology", tmp_path / "cluster.yaml"), "cluster.yaml:3"),
        ((tmp_path / "none.json",), "none.json"),
        ((tmp_path / "empty.json",), "empty.json: byte 0: an empty file; expected a step that"),
        ((tmp_path / "three.json",), "three.json: byte 0: not a JSON object; expected a step that"),
        ((tmp_path / "step.json", "--what-if", ""), "mcr-plus: '': expected NAME=VALUE"),
        ((tmp_path / "step.json", "--what-if", "nic.latency=5us"), "nic.latency=5us: this cluster's nic is"),
        ((tmp_path / "step.json", "--what-if", "uplink=1Gbit/s"), "uplink=1Gbit/s: this cluster's rack is"),
        ((tmp_path / "cut.json",), "cut.json"),
        ((tmp_path / "step.json", "--what-if", "x=1"), "x=1"),
        ((tmp_path / "step.json", "--report", tmp_path / "no" / "r.html"), "such folder"),
        ((tmp_path / "step.json", "--report", tmp_path), "expected a file"),
        ((tmp_path / "step.json", "-o", tmp_path), "expected a file"),
        ((tmp_path / "traced.json", "-o", tmp_path / "plan.yaml"), "no parameter names"),
        ((tmp_path / "step.json", "--what-if", "compress=int9"), "int9"),
    ):
        answer = mcr_plus("plan", *words)
        assert answer.returncode == 2, (words, answer)
        assert said in " ".join(answer.stderr.replace("│", " ").split())
        assert "Traceback" not in answer.stderr


def test_gradients_of_unknown_cost_name_the_cure(tmp_path: Path) -> None:
    step_of([("w", 400, 0.001)]).save(tmp_path / "step.json")
    answer = mcr_plus("plan", tmp_path / "step.json")
    assert answer.returncode == 1
    (line,) = answer.stderr.splitlines()
    assert "on these ranks; expected one of: a tuning table with all_reduce (--config)" in line


def test_shm_is_another_name_of_msccl_in_plans() -> None:
    plan = SavedPlan(model="m", ranks=2, buckets=(SavedBucket(params=("a",), library="shm:ring"),))
    assert plan.buckets[0].library == "msccl:ring"
    assert plan.difference("m", ["a"], 2, ["msccl", "gloo"]) is None


def test_the_codec_of_the_configuration_compresses_the_buckets(tmp_path: Path) -> None:
    step = step_of([(f"w{at}", 1 << 20, 2e-3) for at in range(6)], forward=0.02, seconds=0.05)
    step.save(tmp_path / "step.json")
    (tmp_path / "table.yaml").write_text(TABLE)

    def planned(compress: str) -> tuple[dict[str, Any], str]:
        (tmp_path / "run.yaml").write_text(
            f"version: 1\nbackends: [gloo]\npipeline:\n{compress}"
            "  - select: {table: table.yaml}\n  - dispatch: {}\n"
        )
        config = ("plan", tmp_path / "step.json", "--config", tmp_path / "run.yaml")
        answer, printed = mcr_plus(*config, "--json"), mcr_plus(*config)
        assert answer.returncode == printed.returncode == 0, answer.stderr
        return json.loads(answer.stdout), printed.stderr

    plain, _ = planned("")
    coded, _ = planned("  - compress: {codec: int8_block}\n")
    assert coded["plans"]["as captured"]["step_ms"] == plain["plans"]["as captured"]["step_ms"]
    alone = [each["plans"]["each gradient alone"]["step_ms"] for each in (coded, plain)]
    exposed = [each - 32 for each in alone]
    assert exposed[0] < 0.4 * exposed[1]
    assert coded["step_ms"] < plain["step_ms"]
    assert (coded["how"], coded["times_how"]) == ("assumed", "assumed")  # encoding is not in the table
    assert not any(each["change"] == "compress=int8_block" for each in coded["what_if"])
    of_shapes, said = planned("  - compress: {codec: powersgd}\n")
    assert of_shapes["step_ms"] == plain["step_ms"]
    (note,) = [each for each in of_shapes["notes"] if "powersgd" in each]
    assert "the prediction ignores" in note
    assert f"note: {note}" in " ".join(said.split())
