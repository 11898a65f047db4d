"""Redistribution on real ranks, on every library, against NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from jobs.layout.redistributions import bad_calls
from ranks import Via, run_ranks

import mcr_plus as mcr
from mcr_plus.layout.plan import costs_of
from mcr_plus.layout.program import MessageCosts
from mcr_plus.layout.survey import survey
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
LIBRARIES = ["msccl", "gloo", pytest.param("mpi", marks=needs_mpi)]


def launched(
    what: str, ranks: int, backend: str, timeout: float = 120, args: Sequence[str] = ()
) -> list[Any]:
    """Return each rank's findings. `what`: a function of `redistributions`, or a module and a function."""
    via: Via = "mpi" if backend == "mpi" else "torch"
    target = what if ":" in what else f"jobs.layout.redistributions:{what}"
    results = run_ranks(target, ranks, args=[*args, backend], via=via, timeout=timeout)
    for result in results:
        value = result.value
        assert value["failures"] == [], f"rank {result.rank}: {value['failed']} of {value['cases']} failed"
        assert value["cases"] > 0
    return [result.value for result in results]


@pytest.mark.short("2-msccl")
@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_any_layout_to_any_other(ranks: int, backend: str) -> None:
    for value in launched("everything", ranks, backend, timeout=400):
        assert value["cases"] > 400


@pytest.mark.short("calls-msccl")
@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("name", ["everything", "states", "calls"])
def test_by_messages_between_pairs_of_ranks(name: str, backend: str) -> None:
    for value in launched("by_messages", 3, backend, timeout=400, args=[name]):
        assert value["rounds"] > 10


@pytest.mark.short("3-msccl")
@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_plans_are_kept_and_calls_may_be_in_flight_together(ranks: int, backend: str) -> None:
    launched("calls", ranks, backend)


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_with_layouts_of_another_cached_plan_raises_on_all_ranks(ranks: int, backend: str) -> None:
    for value in launched("other_plans", ranks, backend):
        assert value["cases"] == 4


@pytest.mark.short("3-msccl")
@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_state_of_many_tensors_in_one_round_and_in_many(ranks: int, backend: str) -> None:
    for value in launched("states", ranks, backend, timeout=200):
        buffers = value["buffers"]
        assert 0 < buffers["1MiB"] <= buffers["None"]


@pytest.mark.short("2-mpi")
@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_addends_are_kept_where_the_target_is_the_source(ranks: int, backend: str) -> None:
    launched("kept_addends", ranks, backend)


@pytest.mark.short("3-gloo")
@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [3, 4])
def test_collectives_in_groups_of_one_and_into_other_local_tensors(ranks: int, backend: str) -> None:
    for value in launched("native_collectives", ranks, backend):
        assert value["chosen"][:4] == ["all_gather", "all_reduce", "all_reduce", "all_gather"]
        along_an_axis = ["all_gather", "reduce_scatter", "all_reduce"] * (ranks == 4)
        assert value["chosen"][4:] == [*along_an_axis, "broadcast", "broadcast"]


@pytest.mark.parametrize("named", ["stage", "rule"])
def test_a_broadcast_leaves_source_and_replicas_exact_under_a_codec(named: str) -> None:
    codec = {"codec": "int8_block"}
    stages = [{"compress": codec if named == "stage" else {}}, {"select": {}}, {"dispatch": {}}]
    rules = [{"match": {"tag": "redistribute"}, "compress": codec}] if named == "rule" else []
    for result in run_ranks(
        "jobs.layout.redistributions:under_a_codec", 3, args=["gloo", stages, rules], via="torch"
    ):
        assert result.value == 0.0


def test_a_rank_that_would_run_a_collective_in_other_groups_is_found() -> None:
    launched("other_groups", 4, "gloo")


@pytest.mark.short("2-gloo")
@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_codec_leaves_replicas_with_the_same_bits(ranks: int, backend: str) -> None:
    values = launched("codecs", ranks, backend)
    assert all(value["refused"] == values[0]["refused"] for value in values)
    assert values[0]["cases"] > 30
    for text in values[0]["refused"]:
        assert "a replica of" in text


@pytest.mark.short("2-mpi")
@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_bad_calls_are_refused_on_all_ranks_alike(ranks: int, backend: str) -> None:
    values = launched("refusals", ranks, backend)
    for name, _, error, says in bad_calls(ranks):
        kinds = {value["said"][name][0] for value in values}
        texts = [value["said"][name][1] for value in values]
        assert len(kinds) == 1, f"{name}: {kinds}, {texts}"
        assert kinds == {error} or (not error and kinds <= {"InvalidArgument", "Unsupported"}), (
            f"{name}: {kinds}, {texts}"
        )
        for text in texts:
            assert all(each in text for each in says), f"{name}: {text}"


# -- costs by a table ---------------------------------------------------------------------------------------

TABLE = """\
version: 1
rules:
  - kind: all_to_all
    bytes: 0..
    backend: gloo
    measured:
      gloo: {measured}
  - kind: send
    bytes: 0..
    backend: gloo
    measured:
      gloo: {{8B: 270, 1KiB: 280}}
"""


def costs_by(table: str | None) -> list[Any]:
    """Run on ranks; return the costs of messages and bytes, and the plan for a sum that becomes replicas."""
    select: dict[str, Any] = {} if table is None else {"table": table}
    config = {"version": 1, "backends": ["gloo"], "pipeline": [{"select": select}, {"dispatch": {}}]}
    with mcr.init(config) as comm:
        costs = costs_of(comm, None)
        everyone = list(range(comm.size))
        source = mcr.Layout.sharded((6, 4), everyone, 0)
        target = mcr.Layout.sharded((6, 4), everyone, 1)
        local = torch.arange(24.0).view(6, 4)[2 * comm.rank : 2 * comm.rank + 2]
        found = mcr.redistribute(local, source, target)
        assert found is not None
        return [list(costs), found.flatten().tolist()]


@pytest.mark.long
def test_costs_of_messages_and_bytes_are_those_of_the_table(tmp_path: Path) -> None:
    alpha, beta, ranks = 90e-6, 2e-9, 3  # seconds of a message, and of a byte that a rank sends to another

    def us(nbytes: int) -> float:
        return 1e6 * ((ranks - 1) * alpha + beta * nbytes * (ranks - 1) / ranks)

    file = tmp_path / "table.yaml"
    file.write_text(
        TABLE.format(measured="{" + ", ".join(f"{2**p}B: {us(2**p):.9g}" for p in range(3, 24)) + "}")
    )
    whole = np.arange(24.0).reshape(6, 4)
    for table in (str(file), None):
        for rank, result in enumerate(run_ranks(costs_by, ranks, args=[table], via="torch")):
            costs, found = result.value
            expected = MessageCosts(alpha, beta, send=3 * alpha) if table else MessageCosts()
            assert costs == pytest.approx(list(expected), rel=1e-3)
            assert found == np.array_split(whole, [2, 4], axis=1)[rank].ravel().tolist()


def few_partners(nodes: list[int] | None = None) -> list[Any]:
    """Run on ranks: the kinds of the operations that redistributions with few and many partners issue."""
    found = []
    of_ranks = None if nodes is None else np.array(nodes)
    with (
        mcr.init({"version": 1, "backends": ["gloo"]}) as comm,
        patch("mcr_plus.layout.plan.nodes_of", return_value=of_ranks),
    ):
        last, everyone = comm.size - 1, range(comm.size)
        for source, target in (
            (mcr.Layout.replicated((5,), [0]), mcr.Layout.replicated((5,), [last])),
            (mcr.Layout.sharded((8, 8), everyone, 0), mcr.Layout.sharded((8, 8), everyone, 1)),
        ):
            shape = source.local_shape(comm.rank)
            x = None if shape is None else torch.full(shape, 1.0 + comm.rank)
            mcr.redistribute(x, source, target)
            with mcr.record() as log:
                y = mcr.redistribute(x, source, target)
            found.append([[each.kind for each in log.records], None if y is None else y.sum().item()])
    return found


def test_few_messages_are_not_sent_as_one_operation_of_all_ranks() -> None:
    *others, last = [result.value for result in run_ranks(few_partners, 4, via="torch")]
    assert [each[0][0] for each in others] == [["send"], [], []]
    assert last[0] == [["recv"], 5.0]
    for value in (*others, last):
        assert value[1] == [["all_to_all_v"], 40.0]


@pytest.mark.parametrize("nodes", [None, [0, 1]])
def test_a_single_message_is_no_operation_of_both_ranks(nodes: list[int] | None) -> None:
    first, last = [result.value for result in run_ranks(few_partners, 2, args=[nodes], via="torch")]
    assert [first[0], last[0]] == [[["send"], None], [["recv"], 5.0]]
    assert first[1][0] == last[1][0] == ["all_to_all_v"]  # each of them sends and receives


# -- memory and dtypes of later calls, and mistakes of one rank ---------------------------------------------


@pytest.mark.parametrize("backend", ["msccl", "gloo"])
def test_tensors_that_share_memory(backend: str) -> None:
    launched("jobs.layout.later_redistributions:shared", 2, backend)


@pytest.mark.short("msccl")
@pytest.mark.parametrize("backend", ["msccl", "gloo"])
def test_later_calls_do_not_wait_for_ranks_that_are_late(backend: str) -> None:
    launched("jobs.layout.later_redistributions:latest", 2, backend)


@pytest.mark.short("limits")
@pytest.mark.parametrize("what", ["kept", "limits", "repeated"])
def test_plans_and_buffers_that_are_kept(what: str) -> None:
    launched(f"jobs.layout.later_redistributions:{what}", 2, "gloo")


@pytest.mark.parametrize("ranks", [2, 3])
def test_mistakes_of_one_rank_raise_on_all(ranks: int) -> None:
    values = launched("jobs.layout.later_redistributions:alone", ranks, "gloo")
    says = {
        "no layout": "target: expected a Layout, got 'S1'",
        "no dtype": "dtype: expected a torch.dtype",
        "no replicas": "replicas: expected 'same' or 'sum', got 'mean'",
        "no tensor": "x: expected a torch.Tensor or None, got str",
        "no widths": "before: expected a whole number from 0",
        "an unknown name": "target: there are no layouts for 'v'",
        "no source": "source: expected a mapping",
        "a source outside": f"rank {ranks} is not in group 'world'",
        "a number": "specs: expected names, got 3",
        "a list": "specs: expected a mapping",
    }
    for name, text in says.items():
        for rank, value in enumerate(values):
            kind, found = value["said"][name]
            assert kind == "InvalidArgument", f"{name}: {kind}, {found}"
            assert text in found, f"{name}: {found}"
            if name.startswith("no ") and rank != ranks - 1:
                assert f"on rank {ranks - 1}" in found
    *others, last = [value["said"]["a known plan"] for value in values]
    assert last == ["InvalidArgument", "target: expected a Layout, got 'S1'"]
    assert all(kind == "OrderMismatch" for kind, _ in others)
    assert all(value["said"]["no plan"][0] == "NotInitialized" for value in values)


def on_nodes(nodes: list[int]) -> list[Any]:
    """Run on ranks, as if these were their nodes: plans from rank 0 to all others, and errors of results."""
    torch.set_num_threads(1)
    size = 1 << 18
    found: list[Any] = []
    with mcr.init({"version": 1, "backends": ["gloo"]}) as comm:
        others = range(1, comm.size)
        pairs = [
            (mcr.Layout.sharded((size,), [0], 0), mcr.Layout.replicated((size,), others)),
            (mcr.Layout.sharded((size,), [0], 0), mcr.Layout.sharded((size,), others, 0)),
        ]
        values = torch.arange(size, dtype=torch.float32)
        with patch("mcr_plus.layout.plan.nodes_of", return_value=np.array(nodes)):
            for source, target in pairs:
                move = mcr.redistribution({"w": (source, target)})
                given = {"w": values} if comm.rank == 0 else {}
                mine = move(
                    given, {"w": torch.empty(target.local_shape(comm.rank) or ())} if comm.rank else {}
                )
                begin = sum((target.local_shape(rank) or (0,))[0] for rank in range(1, comm.rank))
                begin = 0 if target.has_replicas else begin
                got = mine.get("w")
                right = got is None or torch.equal(got, values[begin : begin + got.numel()])
                found.append([right, move.plan.chosen[0].program.name, move.plan.loads[0].tolist()])
    return found


def test_plans_on_nodes_are_those_of_the_survey() -> None:
    """Ranks agree on a node's missing parts and choose the plan that one process finds from all loads."""
    nodes, size = [0, 1, 1], 1 << 18
    expected = [
        survey(mcr.Layout.sharded((size,), [0], 0), target, 4, np.array(nodes)).plan
        for target in (mcr.Layout.replicated((size,), [1, 2]), mcr.Layout.sharded((size,), [1, 2], 0))
    ]
    assert expected[0].links.sum() == 4 * size  # and not once for each replica
    for result in run_ranks(on_nodes, 3, args=[nodes], via="torch"):
        for (right, name, loads), plan in zip(result.value, expected, strict=True):
            assert right
            assert name == plan.program.name
            steps = plan.loads.max(axis=0)
            assert np.array_equal(np.array(loads)[: len(steps)], steps)


def in_waves(nodes: list[int]) -> list[Any]:
    """Run on ranks with these nodes: move tensors from the first two ranks to the last two, twice.

    Large tensors and a small one; returns the wrong tensors, and the operations of a call.
    """
    torch.set_num_threads(1)
    rows, columns = 1031, 1021  # 4 MiB
    found: list[Any] = []
    with mcr.init({"version": 1, "backends": ["gloo"]}) as comm:
        shape = (rows, columns)
        here = {
            "rows": mcr.Layout.sharded(shape, [0, 1], 0, [1000, 31]),
            "columns": mcr.Layout.sharded(shape, [1, 0], 1),
            "small": mcr.Layout.replicated((3,), [0, 1]),
            "flat": mcr.Layout.flat(shape, [0, 1], [(0, 700_000), (700_000, rows * columns)]),
        }
        there = {name: mcr.Layout.replicated(each.shape, [2, 3]) for name, each in here.items()}
        there["small"] = mcr.Layout.sharded((3,), [2, 3], 0)
        whole = {
            name: torch.arange(each.volume, dtype=torch.float32).view(each.shape) + 7 * at
            for at, (name, each) in enumerate(here.items())
        }
        flat = whole["flat"].view(-1)
        mine = {
            "rows": whole["rows"][:1000] if comm.rank == 0 else whole["rows"][1000:],
            "columns": whole["columns"].chunk(2, 1)[1 - comm.rank % 2].contiguous(),
            "small": whole["small"],
            "flat": flat[:700_000] if comm.rank == 0 else flat[700_000:],
        }
        right = whole | {"small": whole["small"][:2] if comm.rank == 2 else whole["small"][2:]}
        for memory in ("256MiB", "1MiB"):  # of the latter, one wave after the other would not fit
            with patch("mcr_plus.layout.plan.nodes_of", return_value=np.array(nodes)):
                move = mcr.redistribution(
                    {name: (each, there[name]) for name, each in here.items()}, memory=memory
                )
                for _ in range(2):
                    with mcr.record() as log:
                        got = move.start(mine if comm.rank < 2 else {})
                        got.wait()
                    results: Any = got.outputs if comm.rank >= 2 else {}
                    wrong = [name for name, each in results.items() if not torch.equal(each, right[name])]
                    found.append([wrong, len(results), len(log.records)])
    return found


def test_a_wave_is_gathered_while_the_next_one_crosses() -> None:
    for rank, result in enumerate(run_ranks(in_waves, 4, args=[[0, 0, 1, 1]], via="torch")):
        for wrong, count, _ in result.value:
            assert wrong == []
            assert count == 4 * (rank >= 2)
        # Operations of the second call, in four waves of two steps, and in rounds of at most 512 KiB.
        assert result.value[1][2] == 8
        assert result.value[3][2] > 30


def device_types() -> list[str]:
    """Run on ranks; return the device of operations where rank 1 has no tensors, and rank 0 has some."""
    found = []
    with mcr.init({"version": 1, "backends": ["gloo"]}) as comm:
        pair = mcr.Layout.sharded((4,), [0], 0), mcr.Layout.replicated((4,), [0])
        for kind in ("cpu", "cuda"):
            move = mcr.redistribution({"w": pair})
            with patch("torch.cuda.current_device", return_value=3):
                move._agree(None, torch.device(kind) if comm.rank == 0 else None)
            found.append(str(move._device))
    return found


def test_ranks_without_tensors_take_part_on_the_device_of_the_others() -> None:
    first, other = run_ranks(device_types, 2, via="torch")
    assert first.value == ["cpu", "cuda"]
    assert other.value == ["cpu", "cuda:3"]
