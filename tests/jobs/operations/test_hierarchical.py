"""The hierarchical stage: shared nodes, refused settings, and results on real ranks against oracles."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from jobs.operations import hierarchical_jobs
from jobs.operations.hierarchical_jobs import FOUR_RANKS, config, every_section, four_ranks
from ranks import Via, nursery, run_ranks
from two_hosts import TwoHosts, why_not

import mcr_plus as mcr
from mcr_plus.config.reader import dump, fingerprint, load, loads
from mcr_plus.core.group import Group
from mcr_plus.errors import ConfigError
from mcr_plus.hierarchy.decompose import _Steps
from mcr_plus.hierarchy.nodes import Nodes, inner_groups, nodes_of
from mcr_plus.hierarchy.options import HierarchicalOptions
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")


# -- who shares a node ----------------------------------------------------------------------------


def layout(hosts: str, ranks: Sequence[int] | None = None, rank: int = 0, **options: Any) -> Nodes | str:
    """Return the nodes of a group of a job; each host is named by a letter."""
    members = tuple(range(len(hosts))) if ranks is None else tuple(ranks)
    return nodes_of(load(config(**options)), tuple(hosts), Group("world", members, rank))


@pytest.mark.parametrize(
    ("hosts", "options", "ranks", "expected"),
    [
        ("aabb", {}, None, ((0, 1), (2, 3))),
        ("abab", {}, None, ((0, 2), (1, 3))),
        ("aaaa", {"ranks_per_node": 2}, None, ((0, 1), (2, 3))),
        ("aaaa", {"nodes": [[3, 0], [1, 2]]}, None, ((0, 3), (1, 2))),
        ("aaabbb", {}, None, ((0, 1, 2), (3, 4, 5))),
        ("aabbcc", {}, None, ((0, 1), (2, 3), (4, 5))),
        ("aabbcc", {}, (5, 0, 4, 1), ((0, 2), (1, 3))),  # group ranks, in the order of the group
        ("aabb", {"ranks_per_node": 4}, None, "all 4 ranks are on one node"),
        ("aaaa", {}, None, "all 4 ranks are on one node"),
        ("abcd", {}, None, "every node has one rank"),
        ("aabb", {}, (0, 2), "every node has one rank"),
        ("aabb", {}, (0, 1, 2), "nodes have different numbers of ranks: 1 of 1 and 1 of 2"),
        ("aaaaa", {"ranks_per_node": 2}, None, "nodes have different numbers of ranks: 1 of 1 and 2 of 2"),
    ],
)
def test_nodes(hosts: str, options: dict[str, Any], ranks: Any, expected: Any) -> None:
    found = layout(hosts, ranks, **options)
    assert (found.ranks if isinstance(found, Nodes) else found) == expected


@pytest.mark.parametrize(("rank", "place"), [(0, (0, 0)), (1, (1, 0)), (2, (0, 1)), (3, (1, 1))])
def test_the_place_and_the_groups_of_a_rank(rank: int, place: tuple[int, int]) -> None:
    nodes = layout("abab", rank=rank)
    assert isinstance(nodes, Nodes)
    assert (nodes.node, nodes.index) == place == nodes.place(rank)
    node, index = place
    assert inner_groups(load(config()), tuple("abab"), Group("world", (0, 1, 2, 3), rank)) == {
        "intra": Group(f"world/node{node}", (node, node + 2), index),
        "inter": Group(f"world/across{index}", (2 * index, 2 * index + 1), node),
        "intra2": Group(f"world/node{node}/back", (node, node + 2), index),
    }


def test_no_groups_on_one_node_without_the_stage_or_for_outsiders() -> None:
    assert not inner_groups(load(config()), ("a",) * 4, Group("world", (0, 1, 2, 3), 0))
    without = load({"pipeline": [{"select": {}}, {"dispatch": {}}]})
    assert not inner_groups(without, tuple("aabb"), Group("world", (0, 1, 2, 3), 0))
    assert not inner_groups(load(config()), tuple("aabb"), Group("other", (0, 1, 2, 3), -1))


# -- configuration --------------------------------------------------------------------------------


def text_of(options: str, rest: str = "  - select: {}\n  - dispatch: {}\n") -> str:
    return f"version: 1\nbackends: [mpi, gloo]\npipeline:\n  - hierarchical:\n{options}\n{rest}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            "      nodes: [[0, 1], [3, 4]]",
            "5: pipeline[0].hierarchical.nodes: rank 2 is missing; expected every rank from 0 to 4 once",
        ),
        (
            "      min: 0\n      nodes: [[0, 1], [1, 2]]",
            "6: pipeline[0].hierarchical.nodes: rank 1 is written twice",
        ),
        ("      nodes: [[0, 1], []]", "5: pipeline[0].hierarchical.nodes: a node without ranks"),
        ("      nodes: [0, 1]", "5: pipeline[0].hierarchical.nodes: expected a list of ranks for every node"),
        ("      nodes: [[0, x]]", "5: pipeline[0].hierarchical.nodes: expected ranks, which are integers"),
        (
            "      nodes: [[0], [1]]\n      ranks_per_node: 1",
            "4: pipeline[0].hierarchical: nodes and ranks_p",
        ),
        ("      ranks_per_node: 0", "5: pipeline[0].hierarchical.ranks_per_node: "),
        ("      kinds: [all_reduce, reduce]", "5: pipeline[0].hierarchical.kinds: unknown kind 'reduce'"),
        ("      local: {backend: 'mpi:'}", "5: pipeline[0].hierarchical.local.backend: 'mpi:' names no algo"),
        ("      local: {backend: mpo}", "5: pipeline[0].hierarchical.local.backend: unknown backend 'mpo'"),
        (
            "      inter: {backend: nccl}",
            "5: pipeline[0].hierarchical.inter.backend: backend 'nccl' is not in",
        ),
        ("      inter: {backends: mpi}", "5: pipeline[0].hierarchical.inter.backends: unknown key"),
        (
            "      inter:\n        compress: {codec: int9}",
            "6: pipeline[0].hierarchical.inter.compress.codec: unknown codec 'int9'",
        ),
        (
            "      inter:\n        compress:\n          codec: topk\n          ratio: x",
            "8: pipeline[0].hierarchical.inter.compress.ratio: ",
        ),
        ("      inter: {compress: bf16}", "5: pipeline[0].hierarchical.inter.compress: expected a mapping"),
        (
            "      inter: {compress: {codec: bf16}}",
            "5: pipeline[0].hierarchical.inter.compress: a codec needs the stage 'compress'",
        ),
    ],
)
def test_invalid_options_are_refused_with_their_place(options: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loads(text_of(options), "run.yaml")
    assert str(refused.value).startswith(f"run.yaml:{expected}")


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("{ranks_per_node: 2}", "nodes of a job are the same"),
        ("{inter: {backend: nccl}}", "backend 'nccl' is not in backends"),
        ("{inter: {compress: {codec: bf16}}}", "a codec needs the stage 'compress'"),
    ],
)
def test_rules_are_checked(rules: str, expected: str) -> None:
    rest = "  - select: {}\n  - dispatch: {}\n"
    rule = f"rules:\n  - match: {{tag: x}}\n    hierarchical: {rules}\n"
    with pytest.raises(ConfigError, match=r"run\.yaml:10: rules") as refused:
        loads(text_of("      min: 0", rest + rule), "run.yaml")
    assert expected in str(refused.value)


def test_outside_backends_are_checked() -> None:
    checked = load(config(backends=["mpi", "gloo"], local={"backend": "mpi"}))
    with pytest.raises(ConfigError, match="backend 'mpi' is not in backends; known: gloo"):
        checked.with_backends(["gloo"])


def test_the_order_of_stages() -> None:
    stages: list[dict[str, Any]] = [{"compress": {}}, {"hierarchical": {}}, {"select": {}}, {"dispatch": {}}]
    with pytest.raises(ConfigError, match="expected the order fuse, hierarchical, compress"):
        load({"version": 1, "pipeline": stages})


def test_options_round_trip_through_yaml() -> None:
    codec = {"codec": "topk", "ratio": 0.5, "error_feedback": {"decay": 0.5}}
    inter: dict[str, Any] = {"backend": "gloo", "compress": codec}
    first = load(config(nodes=[[0, 2], [1, 3]], kinds=["all_to_all_single"], inter=inter))
    assert load(dump(first)) == first
    assert fingerprint(load(dump(first))) == fingerprint(first)
    options = first.options("hierarchical")
    assert isinstance(options, HierarchicalOptions)
    assert options.kinds == ("all_to_all",)
    written = dump(first)["pipeline"][0]["hierarchical"]["inter"]["compress"]
    assert written == {"values": "float32", "chunk": None, **inter["compress"]}
    assert fingerprint(first) != fingerprint(load(config(nodes=[[0, 1], [2, 3]])))


# -- explaining -----------------------------------------------------------------------------------


def steps_of(kind: str = "all_reduce", nbytes: int | str = "1MiB", **options: Any) -> list[tuple[str, str]]:
    where = {name: options.pop(name) for name in ("ranks", "nodes_", "tag", "dtype") if name in options}
    nodes = where.pop("nodes_", 2)
    found = mcr.explain(kind, nbytes, **{"ranks": 4, **where}, nodes=nodes, config=config(**options))
    return [(step["operation"], step["decision"]) for step in found["steps"] if step["stage"] != "dispatch"]


def test_explain_shows_the_steps() -> None:
    first, *steps = steps_of(
        backends=["mpi", "gloo"], local={"backend": "mpi"},
        inter={"backend": "gloo", "compress": {"codec": "int8_block"}},
    )  # fmt: skip
    assert first[0] == "all_reduce SUM float32[262144]"
    assert first[1].startswith("2 nodes of 2 ranks: reduce_scatter in the node")
    said = [f"{operation}: {decision}" for operation, decision in steps]
    assert any("reduce_scatter SUM float32[131072]" in s and "world/node0" in s and "mpi" in s for s in said)
    assert any("all_reduce SUM float32[131072]" in s and "world/across0: codec int8_block" in s for s in said)
    assert any("all_gather float32[131072]" in s and "world/node0/back" in s for s in said)
    backends = mcr.explain(
        "all_reduce", "1MiB", ranks=4, nodes=2,
        config=config(backends=["mpi", "gloo"], local={"backend": "mpi"}, inter={"backend": "gloo"}),
    )["backends"]  # fmt: skip
    assert backends == ["mpi", "gloo"]


def test_explain_uses_a_backend_that_is_available_in_nodes_only() -> None:
    said = steps_of(backends=["gloo", "msccl"], local={"backend": "msccl"}, inter={"backend": "gloo"})
    assert [decision for operation, decision in said if "world/node0" in operation and "msccl" in decision]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nodes_": 1, "ranks_per_node": 4}, "all 4 ranks are on one node"),
        ({"nodes_": 4}, "every node has one rank"),
        ({"ranks": 3}, "nodes have different numbers of ranks"),
        ({"min": "2MiB"}, "1MiB is less than 2MiB"),
        ({"nbytes": 4}, "fewer elements than the 2 ranks of a node"),
        ({"compress": {"codec": "powersgd"}, "nbytes": 1024}, None),
        (
            {"local": {"backend": "msccl:all_pairs"}, "backends": ["gloo", "msccl"]},
            "backend msccl:all_pairs cannot do reduce_scatter: ",
        ),
        (
            {"inter": {"backend": "msccl"}, "backends": ["gloo", "msccl"]},
            "backend msccl cannot do a step: group 'world/inter' is on 2 hosts",
        ),
        (
            {
                "inter": {"backend": "msccl", "compress": {"codec": "int8_block"}},
                "backends": ["gloo", "msccl"],
            },
            "backend msccl cannot do a step: group 'world/inter' is on 2 hosts",
        ),
        (
            {
                "inter": {"backend": "msccl:ring", "compress": {"codec": "int8_block"}},
                "backends": ["gloo", "msccl"],
                "local": {"backend": "gloo"},
            },
            "backend msccl cannot do a step: group 'world/inter' is on 2 hosts",
        ),
    ],
)
def test_explain_prints_why_an_operation_stays_flat(options: dict[str, Any], reason: str | None) -> None:
    (operation, decision), *_ = steps_of(**options)
    if reason is None:
        assert decision.startswith("2 nodes")
    else:
        assert decision.startswith(f"not in steps: {reason}")
        assert "SUM" in operation


def test_the_default_takes_steps_where_hosts_have_several_ranks() -> None:
    def by_default(ranks: int, nodes: int, nbytes: str = "1MiB", device: str = "cpu") -> str:
        found = mcr.explain("all_reduce", nbytes, ranks=ranks, nodes=nodes, device=device)
        return str(found["steps"][0]["decision"])

    assert by_default(4, 2).startswith("2 nodes of 2 ranks")
    assert by_default(2, 2) == "not in steps: every node has one rank"
    assert by_default(4, 2, "4KiB").startswith("not in steps: 4KiB is less than")
    assert by_default(4, 2, device="cuda").startswith("not in steps: CUDA's libraries know the hosts")
    assert by_default(4, 1).startswith("backend ")  # nothing to say about steps


def test_explain_prints_why_a_codec_is_not_used() -> None:
    (_, decision), *_ = steps_of(inter={"compress": {"codec": "int8_block"}}, dtype="int32")
    assert "; codec int8_block not used between nodes: codec int8_block takes float32" in decision
    feedback = {"codec": "int8_block", "error_feedback": True}
    (_, decision), *_ = steps_of(inter={"compress": feedback})
    assert "expected tag=" in decision
    (_, decision), *_ = steps_of(inter={"compress": feedback}, tag="gradients")
    assert "not used" not in decision


def test_the_state_of_a_codec_between_nodes_is_not_shared_in_buckets() -> None:
    for feedback, fused in (
        (False, "fused with operations that differ only in size"),
        (True, "not fused: its codec keeps"),
    ):
        inter = {"compress": {"codec": "int8_block", "error_feedback": feedback}}
        found = mcr.explain(
            "all_reduce",
            "64KiB",
            ranks=4,
            nodes=2,
            tag="x",
            async_op=True,
            config=config(fuse={}, inter=inter),
        )
        assert found["steps"][0]["decision"].startswith(fused)


def test_explain_of_other_operations_shows_nothing() -> None:
    for kind in ("gather", "all_to_all_v", "send", "barrier"):
        assert all(
            "in steps" not in decision for _, decision in steps_of(kind, 0 if kind == "barrier" else 16)
        )
    assert all("in steps" not in decision for _, decision in steps_of(nbytes=0))


def test_a_rule_that_names_a_backend_keeps_the_operation_flat() -> None:
    rules = [{"match": {"tag": "flat"}, "backend": "gloo"}]
    found = mcr.explain(
        "all_reduce", "1MiB", ranks=4, nodes=2, tag="flat", config={**config(), "rules": rules}
    )
    assert found["steps"][0]["decision"] == "not in steps: backend gloo is named by the call or a rule"


def test_a_job_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 ranks are listed; expected all 2 of this job"):
        mcr.explain("all_reduce", 1024, ranks=2, config=config(nodes=[[0, 1], [2, 3]]))


# -- waiting ----------------------------------------------------------------------------------


class Slow(mcr.Work):
    """An operation that completes after a time of waiting, by this clock; records timeouts of `wait`."""

    def __init__(self, seconds: float, clock: list[float]) -> None:
        self.seconds, self.clock = seconds, clock
        self.timeouts: list[float] = []

    def wait(self, timeout: float | timedelta | None = None) -> None:
        assert isinstance(timeout, float)
        self.timeouts.append(timeout)
        self.clock[0] += min(timeout, self.seconds)
        if timeout < self.seconds:
            raise mcr.CommTimeout("late")

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def then(self, function: Callable[[], None]) -> mcr.Work:
        raise NotImplementedError

    @property
    def info(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("timeout", [0.5, timedelta(seconds=0.5)])
def test_the_timeout_of_a_wait_covers_all_steps(
    timeout: float | timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("mcr_plus.core.deadline.monotonic", lambda: clock[0])
    step, agreed = Slow(0.4, clock), Slow(0.3, clock)
    work = _Steps([step], "all_reduce", nbytes=4, legs=True)
    work.agreed = agreed
    with pytest.raises(mcr.CommTimeout):
        work.wait(timeout)
    assert agreed.timeouts == [pytest.approx(0.5)]
    assert step.timeouts == [pytest.approx(0.2)]


# -- results ----------------------------------------------------------------------------------


SHARED_MEMORY_AND_GLOO: dict[str, Any] = {
    "ranks_per_node": 2, "local": {"backend": "msccl"}, "inter": {"backend": "gloo"}
}  # fmt: skip


@pytest.mark.short("shared memory, gloo]")
@pytest.mark.parametrize(
    ("ranks", "backends", "options", "every_type"),
    [
        pytest.param(
            4, ["mpi", "gloo"],
            {"nodes": [[3, 0], [2, 1]], "local": {"backend": "mpi"}, "inter": {"backend": "gloo"}}, True,
            marks=needs_mpi, id="nodes in no order",
        ),
        pytest.param(
            6, ["mpi", "gloo"], {"ranks_per_node": 3, "local": {"backend": "gloo"}}, True,
            marks=needs_mpi, id="2 x 3",
        ),
        pytest.param(
            6, ["mpi", "gloo"], {"nodes": [[0, 3], [1, 4], [2, 5]], "dispatch": {"check": "every"}}, True,
            marks=needs_mpi, id="3 x 2, always compared",
        ),
        pytest.param(
            4, ["gloo", "msccl"], SHARED_MEMORY_AND_GLOO, True, id="shared memory, gloo, every type"
        ),
        pytest.param(4, ["gloo", "msccl"], SHARED_MEMORY_AND_GLOO, False, id="shared memory, gloo"),
    ],
)  # fmt: skip
def test_results(ranks: int, backends: list[str], options: dict[str, Any], every_type: bool) -> None:
    via: Via = "mpi" if "mpi" in backends else "torch"
    args = [backends, options, every_type]
    for result in run_ranks(every_section, ranks, args=args, via=via, timeout=300):
        assert result.value["failures"] == []
        assert result.value["cases"] > (300 if every_type else 100)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    """Return the failures on four ranks with two nodes of two, by section."""
    return [result.value for result in run_ranks(four_ranks, 4, via="torch", timeout=300)]


@pytest.mark.long
@pytest.mark.parametrize("section", FOUR_RANKS)
def test_on_four_ranks(outcomes: list[dict[str, str]], section: str) -> None:
    assert [each[section] for each in outcomes] == [""] * 4


@pytest.mark.long
def test_parameters_and_gradients_of_fsdp() -> None:
    run_ranks(hierarchical_jobs.parameters_and_gradients_of_fsdp, 4, via="torch", timeout=300)


@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=f"two hosts: {why_not()}")
def test_two_hosts_of_two_ranks(tmp_path: Path) -> None:
    with TwoHosts(None) as hosts:
        line = [nursery().python, hierarchical_jobs.__file__, str(tmp_path)]
        hosts.mpirun(line, per_host=2, timeout=300)
    reports = [json.loads((tmp_path / f"{rank}").read_text()) for rank in range(4)]
    assert [report["failures"] for report in reports] == [[]] * 4
    assert {report["groups"] for report in reports} == {
        f"world/node{node} world/across{index} world/node{node}/back" for node in (0, 1) for index in (0, 1)
    }
