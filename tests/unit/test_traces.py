"""Steps from traces: synthetic traces with known times, and damaged files."""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from mcr_plus.bucketing.json_stream import members
from mcr_plus.bucketing.step import (
    CapturedStep,
    ComputeEvent,
    IssueEvent,
    NeedEvent,
    Probed,
    ReadyEvent,
    Role,
    WaitEvent,
)
from mcr_plus.bucketing.traces import load_step
from mcr_plus.cli.main import main
from mcr_plus.errors import ConfigError

FORWARD, BACKWARD, OPTIMIZER, SENT = 20_000.0, 10_000.0, 4_000.0, 7_000.0
"""Microseconds: of the forward pass, of each of two gradients, of the optimizer, of each all_reduce."""
START = 1_700_000_000_000_000.0
Events = list[dict[str, Any]]


def event(
    name: str, begin: float, end: float, thread: int = 1, cat: str = "cpu_op", **args: Any
) -> dict[str, Any]:
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 9, "tid": thread, "ts": begin, "dur": end - begin,
        "args": named,
    }  # fmt: skip


def gradient(at: float, *shape: int) -> dict[str, Any]:
    dims, kind = [list(shape)], ["float"]
    return event("torch::autograd::AccumulateGrad", at - 10, at, Input_Dims=dims, Input_type=kind)


def host_traces(ranks: int, late: float, seed: int, steps: int = 4) -> list[Events]:
    """Return traces of gloo on hosts: ranks end the forward pass up to `late` microseconds late.

    The first all_reduce is in flight while the second gradient is computed, and the program waits for both.
    """
    chance = random.Random(seed)
    at = [START + chance.uniform(0, 100) for _ in range(ranks)]
    traces: list[Events] = [[event("aten::zeros", each, each + 1)] for each in at]
    for step in range(steps):
        delays = [chance.uniform(0, late) for _ in range(ranks)]
        delays[chance.randrange(ranks)] = late
        fast = chance.randrange(ranks)
        delays[fast] = 0.0 if delays[fast] < late else late
        forward = [begin + FORWARD + delay for begin, delay in zip(at, delays, strict=True)]
        first = [begin + BACKWARD for begin in forward]
        second = [begin + BACKWARD for begin in first]
        done = [max(first) + SENT, max(max(second), max(first) + SENT) + SENT]
        for rank, events in enumerate(traces):
            events += [
                event("aten::mm", at[rank], forward[rank]),
                event("MulBackward0", forward[rank], first[rank]), gradient(first[rank], 100),
                event("MulBackward0", first[rank], second[rank]), gradient(second[rank], 50, 4),
                event("Optimizer.step#SGD.step", done[1], done[1] + OPTIMIZER, cat="user_annotation"),
                event("aten::add_", done[1], done[1] + OPTIMIZER),
            ]  # fmt: skip
            for index, (issued, elements) in enumerate(((first[rank], 100), (second[rank], 200))):
                number = 100 * step + 10 * index
                args: dict[str, Any] = {
                    "Input_type": ["TensorList"],
                    "Input_Dims": [[[elements]]],
                    "Record_function_id": number,
                }
                events.append(event("c10d::allreduce_", issued, issued + 1, **args))
                args = {"Input_type": ["float"], "Input_Dims": [[elements]], "Record_function_id": number + 1}
                begin = max(issued, done[0]) if index else issued
                events.append(event("gloo:all_reduce", begin, done[index], 2, "user_annotation", **args))
        at = [done[1] + OPTIMIZER] * ranks
    return traces


def gpu_trace(rank: int, late: float, steps: int = 3) -> Events:
    """Return a trace of NCCL: the host launches a step within 1 ms, and the GPU computes it until later.

    Both all_reduces run during computing; the stream of the optimizer waits for them. Rank 0 is `late`.
    """
    events: Events = []
    number = 0

    def launch(host: float, begin: float, end: float, stream: int, name: str) -> None:
        nonlocal number
        number += 1
        events.append(event("cudaLaunchKernel", host, host + 2, 1, "cuda_runtime", correlation=number))
        events.append(event(name, begin, end, stream, "kernel", correlation=number))

    for step in range(steps):
        host = START + step * (FORWARD + 2 * BACKWARD + SENT + OPTIMIZER + late + 500)
        gpu, slow = host + 500, late if rank == 0 else 0.0
        forward = gpu + FORWARD + slow
        grads = [forward + BACKWARD, forward + 2 * BACKWARD]
        done = [gpu + FORWARD + late + (index + 1) * BACKWARD + SENT for index in range(2)]
        events += [event(f"ProfilerStep#{step}", host, host + 400, cat="user_annotation")]
        launch(host + 10, gpu, forward, 7, "gemm")
        for index, elements in enumerate((100, 200)):
            at = host + 100 + 100 * index
            launch(at, grads[index] - BACKWARD, grads[index], 7, "gemm")
            events.append({**gradient(at + 20, *((100,) if index == 0 else (50, 4))), "tid": 3})
            about: dict[str, Any] = {
                "Collective_name": "allreduce", "dtype": "Float", "In_msg_nelems": elements, "Group_size": 2,
                "Out_msg_nelems": elements, "Process_Group_Name": "0", "Process_Group_Ranks": "[0, 1]",
            }  # fmt: skip
            events.append(event("record_param_comms", at + 30, at + 60, **about))
            launch(at + 40, grads[index], done[index], 20, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)")
        events += [event("Optimizer.step#Adam.step", host + 350, host + 380, cat="user_annotation")]
        launch(host + 360, done[1], done[1] + OPTIMIZER, 7, "adam")
    return events


@pytest.mark.parametrize("late", [0.0, 3_000.0, 90_000.0])
def test_times_are_those_of_the_gpu_where_there_are_kernels(tmp_path: Path, late: float) -> None:
    step = load_step(written(tmp_path, [gpu_trace(rank, late) for rank in range(2)]))
    (role,) = step.roles
    issues = [each for each in role.events if isinstance(each, IssueEvent)]
    assert [(each.nbytes, each.gradients) for each in issues] == [
        (400, ("gradient 0 [100]",)), (800, ("gradient 1 [50, 4]",)),
    ]  # fmt: skip
    assert [each.seconds for each in issues] == [pytest.approx(SENT / 1e6, rel=0.01)] * 2
    ready = seconds_before(role, lambda each: isinstance(each, ReadyEvent))
    assert ready == pytest.approx((500 + FORWARD + late + BACKWARD) / 1e6, rel=0.01)
    assert next(each for each in role.events if isinstance(each, ReadyEvent)).like == "float32 cuda"
    computed = sum(each.seconds for each in role.events if isinstance(each, ComputeEvent))
    assert computed == pytest.approx((500 + FORWARD + late + 2 * BACKWARD + OPTIMIZER) / 1e6, rel=0.01)


def written(folder: Path, traces: list[Events], **about: Any) -> list[Path]:
    paths = []
    for rank, events in enumerate(traces):
        path = folder / f"rank{rank}.json"
        info = {"backend": "gloo", "rank": rank, "world_size": len(traces)}
        path.write_text(json.dumps({"distributedInfo": info, **about, "traceEvents": events}))
        paths.append(path)
    return paths


def seconds_before(role: Role, wanted: Callable[[Any], bool]) -> float:
    total = 0.0
    for each in role.events:
        if wanted(each):
            return total
        total += each.seconds if isinstance(each, ComputeEvent) else 0.0
    raise AssertionError("no such event")


@pytest.mark.parametrize("late", [0.0, 9_000.0, 200_000.0])
@pytest.mark.parametrize("seed", range(3))
def test_skew_between_ranks_is_recovered(tmp_path: Path, late: float, seed: int) -> None:
    step = load_step(written(tmp_path, host_traces(3, late, seed)))
    assert (step.ranks, step.source, step.notes) == (3, "kineto", ())
    assert [role.ranks for role in step.roles] == [(0, 1, 2)]
    (role,) = step.roles
    issues = [each for each in role.events if isinstance(each, IssueEvent)]
    assert [(each.kind, each.nbytes, each.group) for each in issues] == [
        ("all_reduce", 400, (0, 1, 2)), ("all_reduce", 800, (0, 1, 2)),
    ]  # fmt: skip
    for each in issues:
        assert each.seconds == pytest.approx(SENT / 1e6, rel=0.01)
    assert [each.gradients for each in issues] == [("gradient 0 [100]",), ("gradient 1 [50, 4]",)]
    first = seconds_before(role, lambda each: isinstance(each, ReadyEvent))
    second = seconds_before(
        role, lambda each: isinstance(each, ReadyEvent) and each.param.startswith("gradient 1")
    )
    assert second - first == pytest.approx(BACKWARD / 1e6, rel=0.01)
    assert first >= (FORWARD + BACKWARD) / 1e6 * 0.99
    assert step.seconds == pytest.approx((FORWARD + late + 2 * BACKWARD + SENT + OPTIMIZER) / 1e6, rel=0.01)
    waits = [each.id for each in role.events if isinstance(each, WaitEvent)]
    assert sorted(waits) == [each.id for each in issues]
    assert role.events[-1].seconds == pytest.approx(OPTIMIZER / 1e6, rel=0.01)  # type: ignore[union-attr]


def test_ranks_without_skew_have_their_own_computing(tmp_path: Path) -> None:
    (role,) = load_step(written(tmp_path, host_traces(2, 0.0, 1))).roles
    ready = seconds_before(role, lambda each: isinstance(each, ReadyEvent))
    assert ready == pytest.approx((FORWARD + BACKWARD) / 1e6, rel=0.01)
    computed = sum(each.seconds for each in role.events if isinstance(each, ComputeEvent))
    assert computed == pytest.approx((FORWARD + 2 * BACKWARD + OPTIMIZER) / 1e6, rel=0.01)


# -- other forms, and unreadable files
# ------------------------------------------------------------------------


def test_a_folder_compressed_files_and_a_saved_step_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    paths = written(tmp_path / "plain", host_traces(2, 0.0, 1))
    step = load_step(paths)
    assert load_step(tmp_path / "plain") == load_step([str(path) for path in paths[::-1]]) == step
    (tmp_path / "gz").mkdir()
    for path in paths:
        with gzip.open(tmp_path / "gz" / f"{path.name}.gz", "wt") as file:
            file.write(path.read_text())
    assert load_step(tmp_path / "gz") == step
    paths[0].rename(tmp_path / "plain" / "²0.json")  # a digit that Python's int refuses
    assert load_step(tmp_path / "plain") == step
    paths[0] = tmp_path / "plain" / "²0.json"
    step.save(tmp_path / "step.json")
    assert load_step(tmp_path / "step.json") == step
    with pytest.raises(ConfigError, match="a step among traces"):
        load_step([tmp_path / "step.json", *paths])


def test_unknown_operations_are_barriers_and_are_named(tmp_path: Path) -> None:
    traces = host_traces(2, 0.0, 1)
    for events in traces:
        for each in events:
            if each["name"] == "c10d::allreduce_" and each["args"]["Input Dims"] == [[[200]]]:
                each["name"] = "c10d::quantum_teleport_"
                each["args"] = {}
        events[:] = [
            e for e in events if e["name"] != "gloo:all_reduce" or e["args"]["Input Dims"] == [[100]]
        ]
    step = load_step(written(tmp_path, traces))
    kinds = [(each.kind, each.nbytes) for each in step.roles[0].events if isinstance(each, IssueEvent)]
    assert kinds == [("all_reduce", 400), ("barrier", 0)]
    assert any("'c10d::quantum_teleport_'" in note and "(8 times)" in note for note in step.notes)


def test_ranges_of_our_own_backend_and_modules_are_read(tmp_path: Path) -> None:
    events = [
        event("nn.Module: Linear_0", START, START + 90, cat="python_function"),
        event("aten::mm", START + 10, START + 500),
        gradient(START + 500, 100),
        event("c10d::allreduce_", START + 510, START + 540, Input_type=["TensorList"], Input_Dims=[[]],
              Concrete_Inputs=["", "", "False", "-1"]),
        event("mcr:all_reduce", START + 515, START + 535, cat="user_annotation", Input_type=["float"],
              Input_Dims=[[100]]),
        event("aten::add_", START + 900, START + 1000),
        event("Optimizer.step#SGD.step", START + 900, START + 1000, cat="user_annotation"),
    ]  # fmt: skip
    step = load_step(written(tmp_path, [events]))
    assert step.by_caller
    kinds = [type(each) for each in step.roles[0].events if not isinstance(each, ComputeEvent)]
    assert kinds == [NeedEvent, ReadyEvent, IssueEvent, WaitEvent]
    computed = sum(each.seconds for each in step.roles[0].events if isinstance(each, ComputeEvent))
    assert computed == pytest.approx((510 + 100) / 1e6, abs=2e-6)
    assert any("only 1 step" in note for note in step.notes)


def moved_to_nodes(traces: list[Events]) -> list[Events]:
    """Move shapes and types from events of Kineto to nodes of execution traces, and return these."""
    nodes: list[Events] = []
    for rank, events in enumerate(traces):
        nodes.append([])
        for number, each in enumerate(events):
            each["pid"] = 70 + rank
            if "Input Dims" not in each["args"]:
                continue
            identity = each["args"].setdefault("Record function id", 5000 + number)
            dims, _ = each["args"].pop("Input Dims"), each["args"].pop("Input type")
            shape = dims[0][0] if isinstance(dims[0][0], list) else dims[0]
            elements = shape[0] * (shape[1] if len(shape) > 1 else 1)
            inputs = {
                "values": [[1, 2, 0, elements, 4, "cpu"]], "shapes": [shape], "types": ["Tensor(float)"],
            }  # fmt: skip
            attrs = [{"name": "rf_id", "type": "uint64", "value": identity}]
            nodes[rank].append({"id": number, "name": each["name"], "inputs": inputs, "attrs": attrs})
    return nodes


def test_an_execution_trace_adds_facts_missing_from_kineto(tmp_path: Path) -> None:
    traces = host_traces(2, 0.0, 1)
    whole = load_step(written(tmp_path, traces))
    nodes = moved_to_nodes(traces)
    paths = written(tmp_path, traces)
    assert any("expected record_shapes=True" in note for note in load_step(paths).notes)
    graphs = []
    for rank in range(2):
        graphs.append(tmp_path / f"et{rank}.json")
        graphs[-1].write_text(
            json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 70 + rank, "nodes": nodes[rank]})
        )
    joined = load_step([*paths, *graphs])
    assert (joined.source, joined.roles, joined.model) == ("et", whole.roles, whole.model)
    with pytest.raises(ConfigError, match=r"et0\.json: an execution trace has no times"):
        load_step(graphs)
    graphs[1].write_text(json.dumps({"pid": 12345, "nodes": nodes[1]}))
    with pytest.raises(ConfigError, match=r"et1\.json: no Kineto trace of this run \(process 12345"):
        load_step([*paths, *graphs])


def broken(tmp_path: Path, change: Callable[[list[Events]], Any], **about: Any) -> str:
    traces = host_traces(3, 0.0, 1)
    change(traces)
    with pytest.raises(ConfigError) as error:
        load_step(written(tmp_path, traces, **about))
    return str(error.value)


def test_invalid_traces_are_refused_with_their_place(tmp_path: Path) -> None:
    def drop(*names: str) -> Callable[[list[Events]], None]:
        def change(traces: list[Events]) -> None:
            for events in traces:
                events[:] = [each for each in events if each["name"] not in names]

        return change

    assert "no backward pass" in broken(tmp_path, drop("torch::autograd::AccumulateGrad"))
    text = broken(tmp_path, lambda traces: traces[1][3].update(dur=-5))
    assert re.search(r"rank1\.json: byte \d+: dur of event .*: -5; expected microseconds", text)
    place = int(re.search(r"byte (\d+)", text)[1])  # type: ignore[index]
    assert (tmp_path / "rank1.json").read_bytes()[place:].startswith(b'{"ph": "X"')
    wrong: list[Any] = ["soon", None, float("nan"), 1e300, True]
    while wrong:
        assert "rank0.json: byte " in broken(tmp_path, lambda traces: traces[0][5].update(ts=wrong.pop()))
    text = broken(
        tmp_path,
        lambda traces: traces[2].extend(
            event(f"ProfilerStep#{n}", START + n * 100, START + n * 100 + 150, cat="user_annotation")
            for n in range(3)
        ),
    )
    assert "rank2.json: a step begins 0.050 ms before the last one ends" in text


def test_a_trace_of_another_model_is_refused(tmp_path: Path) -> None:
    def another(traces: list[Events]) -> None:
        for each in traces[2]:
            if each["name"] == "torch::autograd::AccumulateGrad" and each["args"]["Input Dims"] == [[100]]:
                each["args"]["Input Dims"] = [[10, 10]]

    text = broken(tmp_path, another)
    assert "rank2.json: rank 2 has a gradient float32 cpu [10, 10], and rank 0 has float32 cpu [100]" in text
    assert "expected traces of one model" in text


def test_traces_with_more_steps_count_from_the_end(tmp_path: Path) -> None:
    traces = host_traces(2, 0.0, 1, steps=5)
    whole = load_step(written(tmp_path, traces))
    ends = sorted(each["ts"] + each["dur"] for each in traces[1] if each["name"].startswith("Optimizer.step"))
    traces[1][:] = [each for each in traces[1] if each["ts"] >= ends[0]]
    step = load_step(written(tmp_path, traces))
    assert "ranks have traced different numbers of steps; the last 4 of each count" in step.notes
    assert step.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert [type(each) for each in step.roles[0].events] == [type(each) for each in whole.roles[0].events]


# -- one rank's trace ---------------------------------------------------------------------------------------


def one_rank(path: Path, events: Events, **about: Any) -> Path:
    path.write_text(json.dumps({**about, "traceEvents": events}))
    return path


@pytest.mark.parametrize("rank", [0, 2])
def test_one_ranks_trace_counts_for_all(tmp_path: Path, rank: int) -> None:
    paths = written(tmp_path, host_traces(3, 0.0, 1))
    whole, step = load_step(paths), load_step(paths[rank])
    assert (step.ranks, step.model, len(step.roles)) == (3, whole.model, 1)
    assert step.seconds == pytest.approx(whole.seconds, rel=1e-3)
    for mine, theirs in zip(step.roles[0].events, whole.roles[0].events, strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, IssueEvent) and isinstance(theirs, IssueEvent):
            assert (mine.kind, mine.nbytes, mine.group, mine.gradients) == (
                "all_reduce", theirs.nbytes, (0, 1, 2), theirs.gradients,
            )  # fmt: skip
    assert any(f"assumed: the other 2 ranks do the same as rank {rank}" in note for note in step.notes)
    assert not any("assumed" in note for note in whole.notes)
    step.save(tmp_path / "saved")
    assert load_step(tmp_path / "saved") == step


def test_a_trace_without_the_number_of_ranks_asks_for_it(tmp_path: Path) -> None:
    path = one_rank(tmp_path / "trace.json", host_traces(2, 0.0, 1)[0])
    with pytest.raises(ConfigError, match=r"between ranks, such as 'c10d::allreduce_', .*expected --ranks N"):
        load_step(path)
    step = load_step(path, ranks=5)
    assert (step.ranks, step.roles[0].ranks) == (5, (0, 1, 2, 3, 4))
    assert any("assumed: the job has 5 ranks, by --ranks" in note for note in step.notes)
    by_rank = one_rank(tmp_path / "rank7.json", host_traces(2, 0.0, 1)[0])
    with pytest.raises(ConfigError, match="the trace of rank 7 in a job of 5 ranks"):
        load_step(by_rank, ranks=5)
    alone = [each for each in host_traces(2, 0.0, 1)[0] if "all" not in each["name"]]
    assert load_step(one_rank(by_rank, alone)).ranks == 1  # no communication: nothing to ask


def test_the_number_of_ranks_is_taken_from_groups(tmp_path: Path) -> None:
    step = load_step(one_rank(tmp_path / "trace.json", gpu_trace(0, 0.0)))
    assert step.ranks == 2
    assert any("assumed: the job has 2 ranks, as many as the largest group" in note for note in step.notes)
    events = host_traces(2, 0.0, 1)[0]
    nodes = moved_to_nodes([events])[0]
    text = json.dumps([{"pg_name": "0", "ranks": [], "group_size": 6}])  # as torch writes the group of all
    inputs = {"values": [text], "shapes": [[]], "types": ["String"]}
    nodes.append({"id": 1, "name": "## process_group:init ##", "inputs": inputs, "attrs": []})
    graph = tmp_path / "et.json"
    graph.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": events[0]["pid"], "nodes": nodes}))
    assert load_step([one_rank(tmp_path / "trace.json", events), graph]).ranks == 6


@pytest.mark.parametrize(
    ("rank", "group", "world"),
    [(0, [0, 2], 8), (5, [1, 3, 5, 7], 8), (3, [2, 3], 6), (4, [4, 1], 6), (0, [0], 3)],
)
def test_groups_of_one_rank_are_repeated_over_the_others(
    tmp_path: Path, rank: int, group: list[int], world: int
) -> None:
    events = host_traces(2, 0.0, 1)[0]
    first = next(each for each in events if each["name"] == "c10d::allreduce_")
    for each in events:  # the first operation of every step
        if each["name"] == "c10d::allreduce_" and each["args"]["Input Dims"] == first["args"]["Input Dims"]:
            each["args"] |= {"Process Group Name": "1", "Process Group Ranks": str(group)}
    info = {"rank": rank, "world_size": world}
    step = load_step(one_rank(tmp_path / "trace.json", events, distributedInfo=info))
    assert sorted(each for role in step.roles for each in role.ranks) == list(range(world))
    by_id: dict[int, set[tuple[int, ...]]] = {}
    small: set[tuple[int, ...]] = set()
    for role in step.roles:
        issues = [each for each in role.events if isinstance(each, IssueEvent)]
        assert {each.id for each in role.events if isinstance(each, WaitEvent)} == {
            each.id for each in issues
        }
        assert issues[1].group == tuple(range(world))
        for issued in issues:
            by_id.setdefault(issued.id, set()).add(issued.group)
            assert set(role.ranks) <= set(issued.group)
        small.add(issues[0].group)
    assert all(len(groups) == 1 for groups in by_id.values())  # an operation has one group
    assert sorted(each for group in small for each in group) == list(range(world))
    assert tuple(sorted(group)) in {tuple(sorted(each)) for each in small}


def test_groups_that_cannot_be_repeated_are_refused(tmp_path: Path) -> None:
    all_traces = "expected the traces of all ranks"
    cases = (
        ([0, 1, 3], 6, all_traces),
        ([0, 2], 6, all_traces),
        ([1, 2], 4, "and rank 0"),
        ([0, 0], 4, "once"),
    )
    for group, world, problem in cases:
        events = host_traces(2, 0.0, 1)[0]
        for each in events:
            each["args"]["Process Group Ranks"] = group
        info = {"rank": 0, "world_size": world}
        with pytest.raises(ConfigError, match=problem):
            load_step(one_rank(tmp_path / "trace.json", events, distributedInfo=info))


def test_messages_of_one_ranks_trace_are_left_out(tmp_path: Path) -> None:
    events = host_traces(2, 0.0, 1)[0]
    sends = [
        {**each, "name": "c10d::send", "ts": each["ts"] + 50}
        for each in events
        if each["name"] == "c10d::allreduce_"
    ]
    info = {"rank": 0, "world_size": 4}
    plain = load_step(one_rank(tmp_path / "plain.json", events, distributedInfo=info))
    step = load_step(one_rank(tmp_path / "trace.json", [*events, *sends], distributedInfo=info))
    kinds = [each.kind for role in step.roles for each in role.events if isinstance(each, IssueEvent)]
    assert kinds == [each.kind for each in plain.roles[0].events if isinstance(each, IssueEvent)]
    assert any("sends and receives, and waits for them, are left out" in note for note in step.notes)


def test_plan_of_one_ranks_trace_says_what_it_assumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = one_rank(tmp_path / "trace.json", host_traces(2, 0.0, 1)[0])

    def run(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["mcr-plus", "plan", str(path), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr()

    status, said = run()
    assert status == 2
    assert "expected --ranks N" in said.err
    assert "exposed communication" not in said.out
    status, said = run("--ranks", "3", "--json")
    assert status == 0
    found = json.loads(said.out)
    assert (found["ranks"], found["captured_ranks"]) == (3, 3)
    assert found["captured_ms"] > found["compute_ms"] > 0
    assert [note.partition(":")[0] for note in found["notes"][:2]] == ["assumed", "assumed"]


CHAKRA_HEADS = {
    "version": bytes([7, 0x0A, 5]) + b"0.0.4",
    "attributes": bytes([18, 0x12, 16, 0x0A, 6]) + b"schema" + bytes([0xEA, 1, 5]) + b"1.0.1",
}


@pytest.mark.parametrize("head", CHAKRA_HEADS)
@pytest.mark.parametrize("name", ["chakra.0.et", "trace.json", "trace.json.gz"])
def test_chakra_traces_in_protobuf_are_named(tmp_path: Path, head: str, name: str) -> None:
    path = tmp_path / name
    node = b"\x08\x01\x12\x04aten"
    data = CHAKRA_HEADS[head] + bytes([len(node)]) + node
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    for place in (path, tmp_path):
        with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}: a Chakra trace has operations"):
            load_step(place)


@pytest.mark.parametrize(
    "text",
    [
        '{"version": "0.0.4"}{"id": "1", "name": "aten::mm", "type": "COMP_NODE"}',
        '{"workload_graph": [{"Id": 1, "Name": "aten::mm", "NodeType": 4}]}',
    ],
)
def test_chakra_traces_in_json_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "chakra.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="a Chakra trace has operations"):
        load_step(path)


def test_missing_and_repeated_ranks_are_named(tmp_path: Path) -> None:
    paths = written(tmp_path, host_traces(4, 0.0, 1))
    with pytest.raises(
        ConfigError, match=r"no trace of rank 1, 3; expected one of each of the job's 4 ranks"
    ):
        load_step([paths[0], paths[2]])
    with pytest.raises(ConfigError, match=r"rank 2 is in .*rank2\.json too"):
        load_step([*paths, paths[2]])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no trace; expected \.json or \.json\.gz"):
        load_step(tmp_path / "empty")
    with pytest.raises(ConfigError, match="No such file"):
        load_step(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"traceEvents": [{"ph": "X"', "truncated"),
        (b'{"traceEvents": [{"ph": "M"}', "truncated"),
        (b'{"traceEvents": [{"ph": "M"},', "truncated"),
        (b'{"traceEvents": [{"ph": "M"}]', "truncated"),
        (b'{"traceEvents": [{"ph": "unfinished', "truncated"),
        (b'{"traceEvents": [17]}', "17; expected an event"),
        (b'{"traceEvents": [{"ph": oops}]}', "not JSON"),
        (b'{"traceEvents" [1]}', "expected a name and ':'"),
        (b'{"traceEvents": [{} {}]}', "expected ',' or ']'"),
        (b'{"traceEvents": []}', "no events; expected a trace"),
        (b'{"nodes": [3]}', "3; expected a node"),
        (b'{"other": 1}', "no events; expected a trace"),
        (b"7", "not a JSON object"),
        (b"", "byte 0: an empty file; expected a step that"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "not JSON"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_step(path)
    assert str(error.value).startswith(f"{path}: ")
    assert problem in str(error.value)


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.gz"
    whole = gzip.compress(json.dumps({"traceEvents": host_traces(1, 0.0, 1)[0]}).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"rank0\.json\.gz: byte \d+: cannot read further: "):
        load_step(path)


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcr_plus.bucketing.json_stream._CHUNK", 1 << 16)
    path = tmp_path / "large.json"
    filler = json.dumps(event("user note é", START, START + 1, cat="other", text="x" * 1000))
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n' + ",\n".join([filler] * 4_000) + "]}")
    size = path.stat().st_size
    tracemalloc.start()
    count = sum(1 for key, _, _ in members(path, ("traceEvents",)) if key == "traceEvents")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4_000
    assert most < 1e6 < size / 4


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_pieces_of_any_size_give_the_same_values(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcr_plus.bucketing.json_stream._CHUNK", chunk)
    events = [{"é": "ü\u2028\n", "n": [1, -2.5e-3, True, None]}, {}, 12, '\\"', [[]], 3.25]
    document = {"a": 1, "b": {"traceEvents": []}, "traceEvents": events, "é": "z", "last": 123456}
    path = tmp_path / "x.json"
    for indent in (None, 1):
        text = json.dumps(document, ensure_ascii=False, indent=indent)
        path.write_text(text)
        found = list(members(path, ("traceEvents",)))
        assert [value for key, value, _ in found if key == "traceEvents"] == events
        assert {key: value for key, value, _ in found if key != "traceEvents"} == {
            key: value for key, value in document.items() if key != "traceEvents"
        }
        for _, value, place in found:
            decoded, _ = json.JSONDecoder().raw_decode(text.encode()[place:].decode())
            assert decoded == value
    path.write_text(json.dumps(events))
    assert [value for _, value, _ in members(path, ("traceEvents",))] == events


# -- any field may be anything ------------------------------------------------------------------------------

Document = dict[str, Any] | list[Any]
At = tuple[str | int, ...]
MARK = "the value that is replaced"
VALUES = (
    "null", "[]", "{}", "[[]]", "[null]", '{"a": [null]}', '""', '"x"', '"12"', '"[-1, 1e9]"', '"\\ud800"',
    "-1", "0", "true", "2.5", "NaN", "-Infinity", "1e999", "1e300", str(10**12), str(10**30), "9" * 400,
    "9" * 5_000, "[" * 400 + "]" * 400, "[[-1, 1]]", f"[{10**12}]", '["\\ud800"]', '["", "", "\u00b2"]',
)  # fmt: skip
"""JSON texts: of every type, and numbers beyond all limits. 5,000 digits are more than Python reads."""


def kineto(events: Events, rank: int, ranks: int) -> Document:
    """Return a trace with all fields that readers use outside of events."""
    groups = [{"pg_name": "0", "pg_size": ranks, "ranks": list(range(ranks))}, {"pg_name": "1", "ranks": []}]
    info = {"backend": "gloo", "rank": rank, "world_size": ranks, "pg_config": groups}
    return {"schemaVersion": 1, "distributedInfo": info, "host_name": "host", "traceEvents": events}


def sent(begin: float, elements: int, **args: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"Input_Dims": [[elements]], "Input_type": ["float"], "External_id": 7}
    return event("record_param_comms", begin, begin + 5, **known | args)


def of_hosts() -> list[Document]:
    """Return traces of two ranks over gloo, with operations of all kinds of arguments."""
    traces = host_traces(2, 0.0, 1, steps=1)
    for rank, events in enumerate(traces):
        at = max(each["ts"] for each in events if each["name"] == "Optimizer.step#SGD.step") - 100
        peer = {"Dst_Rank": 1} if rank == 0 else {"Src_Rank": 0}
        kind = "recv" if rank else "send"
        events += [
            event("nn.Module: Linear_0", START, START + 90, cat="python_function"),
            event("c10d::allgather_", at, at + 5, Input_type=["float"], Input_Dims=[[5]],
                  Concrete_Inputs=["", "", "False", "-1"]),
            event(f"c10d::{kind}", at + 10, at + 15, Input_type=["TensorList"], Input_Dims=[[[5]]],
                  Concrete_Inputs=["", "", str(1 - rank)]),
            sent(at + 20, 6, Collective_name=kind, **peer),
            sent(at + 30, 6, Collective_name="alltoall", In_split_size="[2, 4]", dtype="Float", Group_size=2,
                 In_msg_nelems=6, Out_msg_nelems=6, Process_Group_Ranks="[0, 1]", Process_Group_Name="5"),
            sent(at + 40, 6, Collective_name="broadcast", Process_Group_Name="0", Process_Group_Ranks=[0, 1]),
        ]  # fmt: skip
    return [kineto(events, rank, 2) for rank, events in enumerate(traces)]


def of_graphs() -> list[Document]:
    """Return traces of two ranks over gloo, with their arguments in execution traces."""
    traces = host_traces(2, 0.0, 1, steps=1)
    nodes = moved_to_nodes(traces)
    groups = json.dumps([{"pg_name": "0", "ranks": [0, 1]}])
    for each in nodes:
        each.insert(0, {"id": 1, "name": "## process_group:init ##", "inputs": {"values": [groups]}})
        each[-1]["outputs"] = {"values": [[[1, 2, 0, 200, 4, "cpu"]]]}
        each[-1]["attrs"] += [
            {"name": name, "value": value}
            for name, value in (
                ("collective_name", "allreduce"), ("dtype", "Float"), ("in_msg_nelems", 200),
                ("out_msg_nelems", 200), ("pg_name", "0"), ("pg_size", 2), ("global_rank_start", 0),
                ("global_rank_stride", 1),
            )
        ]  # fmt: skip
    return [
        *({"distributedInfo": {"rank": rank}, "traceEvents": events} for rank, events in enumerate(traces)),
        *({"pid": 70 + rank, "nodes": each} for rank, each in enumerate(nodes)),
    ]


def saved_step() -> list[Document]:
    send = IssueEvent(4, "send", 7, (0, 1), "tag", 0.01, ("a.weight",), "float32")
    events = (
        ComputeEvent("a", 0.1),
        NeedEvent("a"),
        ReadyEvent("a.weight", 12, "float32 cpu"),
        send,
        WaitEvent(4),
    )
    probed = {"gloo": Probed("all_reduce", (4096, 1 << 20), (1e-3, 5e-3), (0.1, 0.3))}
    roles = (Role((0,), events), Role((1,), (ComputeEvent("b", 0.25),)))
    step = CapturedStep(2, 2, "0123", 0.25, 0.04, roles, "kineto", False, ("something",), probed)
    return [json.loads(step.text())]


FORMATS: dict[str, list[Document]] = {
    "hosts": of_hosts(),
    "GPUs": [kineto(gpu_trace(rank, 0.0, steps=1), rank, 2) for rank in range(2)],
    "events alone": [host_traces(1, 0.0, 1, steps=1)[0]],
    "execution traces": of_graphs(),
    "a step": saved_step(),
}


def fields(value: Any, at: At = ()) -> Iterator[At]:
    """Return the paths of the values in a document, the outermost first."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from fields(each, (*at, key))


def distinct(name: str) -> list[tuple[str, int, At]]:
    """Return the fields of a format, one of each kind: same events have the same fields."""
    found: dict[Any, tuple[str, int, At]] = {}
    for number, document in enumerate(FORMATS[name]):
        for at in fields(document):
            value: Any = document
            names = []
            for key in at:
                value = value[key]
                names.append(str(value.get("name")) if isinstance(value, dict) else None)
            found.setdefault(tuple(n or k for n, k in zip(names, at, strict=True)), (name, number, at))
    return list(found.values())


FIELDS = list(chain.from_iterable(map(distinct, FORMATS)))


def replaced(document: Document, at: At, text: str | None) -> str:
    """Return the text of a document with another value at a place, or without it."""
    if not at:
        return text or ""
    whole: Any = json.loads(json.dumps(document))
    inner = whole
    for key in at[:-1]:
        inner = inner[key]
    if text is None:
        del inner[at[-1]]
        return json.dumps(whole)
    inner[at[-1]] = MARK
    return json.dumps(whole).replace(json.dumps(MARK), text)


def documents(folder: Path, name: str, number: int, at: At, text: str | None) -> list[Path]:
    """Return the files of a format with a field replaced in one of them."""
    paths = [folder / f"{index}.json" for index in range(len(FORMATS[name]))]
    for index, (path, document) in enumerate(zip(paths, FORMATS[name], strict=True)):
        path.write_text(replaced(document, at, text) if index == number else json.dumps(document))
    return paths


def check_replaced(folder: Path, name: str, number: int, at: At, text: str | None) -> None:
    """Read a format with a field replaced: it is refused, or gives a step that can be saved and loaded."""
    paths = documents(folder, name, number, at, text)
    refused = ""
    try:
        load_step(paths, ranks=1).save(folder / "saved")
    except ConfigError as error:
        refused = str(error)
    if refused:
        assert refused.startswith(f"{folder}/")
    else:
        assert CapturedStep.load(folder / "saved") == load_step(paths, ranks=1)


@settings(max_examples=examples(300))
@given(st.sampled_from(FIELDS), st.sampled_from((None, *VALUES)))
def test_a_field_may_be_anything(
    tmp_path_factory: pytest.TempPathFactory, field: tuple[str, int, At], text: str | None
) -> None:
    check_replaced(tmp_path_factory.getbasetemp(), *field, text)


@pytest.mark.parametrize(
    ("name", "number", "where", "text", "problem"),
    [
        ("hosts", 1, "distributedInfo.rank", "-1",
         "rank of distributedInfo: -1; expected a whole number from 0 to 1,048,575"),
        ("hosts", 0, "distributedInfo.world_size", str(10**12),
         "expected a whole number from 1 to 1,048,576"),
        ("hosts", 0, "distributedInfo.world_size", '"2"', "world_size of distributedInfo: '2'; expected"),
        ("hosts", 0, "distributedInfo.pg_config.0.ranks", "5",
         "pg_config.ranks of distributedInfo: 5; expected"),
        ("hosts", 0, "distributedInfo", "[1]", "content of distributedInfo: [1]; expected an object"),
        ("hosts", 0, "host_name", "[]", "host_name of the file: []; expected a text"),
        ("hosts", 0, "traceEvents.8.tid", "[]", "tid of event 'c10d::allreduce_': []; expected a text or"),
        ("hosts", 0, "traceEvents.3.ts", "NaN",
         "ts of event 'torch::autograd::AccumulateGrad': nan; expected microseconds"),
        ("hosts", 0, "traceEvents.3.ts", None,
         "ts of event 'torch::autograd::AccumulateGrad': None; expected microseconds"),
        ("hosts", 0, "traceEvents.3.dur", "-Infinity", "AccumulateGrad': -inf; expected microseconds"),
        ("hosts", 0, "traceEvents.3.args", "[]",
         "args of event 'torch::autograd::AccumulateGrad': []; expected an object"),
        ("hosts", 0, "traceEvents.3.ts", "9" * 5_000, "a whole number of thousands of digits"),
        ("hosts", 0, "traceEvents.8.args.Input Dims", "[[[-1]]]", "[[[-1]]]; expected lists of sizes"),
        ("hosts", 0, "traceEvents.17.args.Process Group Ranks", "[1]", "ranks [1]; expected each rank once"),
        ("hosts", 0, "traceEvents.16.args.In msg nelems", "-5",
         "args.In msg nelems of event 'record_param_comms': -5;"),
        ("hosts", 0, "traceEvents.16.args.dtype", "5",
         "args.dtype of event 'record_param_comms': 5; expected a text"),
        ("hosts", 0, "traceEvents.16.args.Process Group Ranks", "5",
         "'record_param_comms': 5; expected a list of ranks"),
        ("hosts", 0, "traceEvents.16.args.Process Group Ranks", "[0, 2]",
         "a group of ranks [0, 2]; expected ranks below 2"),
        ("GPUs", 0, "traceEvents.1.args.correlation", '"1"',
         "args.correlation of event 'cudaLaunchKernel': '1'; exp"),
        ("execution traces", 2, "nodes.6.attrs", "5",
         "attrs of node 'gloo:all_reduce': 5; expected a list of"),
        ("execution traces", 2, "nodes.6.attrs.6.value", str(10**12),
         "expected a whole number from 0 to 1,048,576"),
        ("execution traces", 2, "nodes.6.attrs.8.value", str(10**12), "expected ranks below 1,048,576"),
        ("execution traces", 2, "nodes.6.inputs", '"x"', "inputs of node 'gloo:all_reduce': 'x'; expected"),
        ("execution traces", 2, "pid", "[]", "pid of the file: []; expected a text or a whole number"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_fields_of_another_type_are_named(
    tmp_path: Path, name: str, number: int, where: str, text: str | None, problem: str
) -> None:
    at = [int(key) if key.isdecimal() else key for key in where.split(".")]
    with pytest.raises(ConfigError) as error:
        load_step(documents(tmp_path, name, number, tuple(at), text))
    assert re.match(rf"{tmp_path}/{number}\.json: byte \d+: ", str(error.value))
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("name", "number", "at"),
    [
        ("hosts", 0, ("distributedInfo", "pg_config")),
        ("hosts", 0, ("distributedInfo", "pg_config", 0, "ranks")),
        ("hosts", 0, ("traceEvents", 9, "args", "Record function id")),
        ("execution traces", 2, ("nodes", 0, "inputs", "values")),
        ("execution traces", 2, ("nodes", 1, "attrs")),
        ("execution traces", 2, ("nodes", 1, "inputs", "types")),
    ],
)
def test_null_is_as_if_the_field_were_not_there(tmp_path: Path, name: str, number: int, at: At) -> None:
    found = load_step(documents(tmp_path, name, number, at, "null"))
    assert found == load_step(documents(tmp_path, name, number, at, None))


def test_an_operation_is_waited_for_after_its_issue(tmp_path: Path) -> None:
    """Invisible waits get their places from other ranks, one of which issues in another order."""
    at: At = ("traceEvents", 13, "ts")
    step = load_step(documents(tmp_path, "hosts", 0, at, str(START)))
    for role in step.roles:
        issued: set[int] = set()
        for each in role.events:
            if isinstance(each, IssueEvent):
                issued.add(each.id)
            assert not isinstance(each, WaitEvent) or each.id in issued


# -- memory -------------------------------------------------------------------------------------------------


def filling(count: int) -> Iterator[dict[str, Any]]:
    """Return events that say little about a step, except for a stream's computing."""
    for number in range(count // 4):
        at = START + number
        yield event("aten::mm", at, at + 0.5, Call_stack="x" * 100)
        yield event(f"nn.Module: Linear_{number % 10}", at, at + 0.5, cat="python_function")
        yield event("cudaLaunchKernel", at, at + 0.2, cat="cuda_runtime", correlation=number)
        yield event("gemm", at, at + 0.9, 7, "kernel", correlation=number, grid=[1, 2, 3])


@pytest.mark.long
def test_only_relevant_fields_of_events_are_kept(tmp_path: Path) -> None:
    count, path = 80_000, tmp_path / "rank0.json"
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        file.writelines(f"{json.dumps(each)},\n" for each in filling(count))
        for number in range(1_000):
            each = sent(START + 20 * number, 5, Collective_name="allreduce", Call_stack="y" * 20_000)
            file.write(f"{json.dumps(each)},\n")
        file.write(f"{json.dumps(gradient(START + count // 8, 10))}]}}")
    tracemalloc.start()
    step = load_step(path, ranks=1)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    kinds = [type(each) for each in step.roles[0].events]
    assert (kinds.count(NeedEvent), kinds.count(ReadyEvent), kinds.count(IssueEvent)) == (10, 1, 1_000)
    assert most < 12 << 20 < path.stat().st_size / 2


@pytest.mark.parametrize("declared", ["distributedInfo", "the name"])
def test_declared_ranks_take_no_memory(tmp_path: Path, declared: str) -> None:
    path = tmp_path / ("rank1048575.json" if declared == "the name" else "trace.json")
    info = {} if declared == "the name" else {"rank": 5, "world_size": 1 << 20}
    path.write_text(json.dumps({"distributedInfo": info, "traceEvents": host_traces(1, 0.0, 1)[0]}))
    tracemalloc.start()
    with pytest.raises(
        ConfigError,
        match=r"one rank's trace of 1,048,576 ranks|the trace of rank 1048575 in a job of 2 ranks",
    ):
        load_step(path, ranks=2)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 << 20
    path.rename(later := tmp_path / f"worker{10**12}.json")  # a time, as torch puts it into names
    later.write_text(json.dumps({"traceEvents": host_traces(1, 0.0, 1)[0]}))
    assert load_step(later, ranks=1).ranks == 1


def test_events_that_are_kept_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcr_plus.bucketing.trace_files._MOST_KEPT", 30)
    paths = written(tmp_path, host_traces(1, 0.0, 1, steps=4))
    assert load_step(paths).ranks == 1
    paths = written(tmp_path, host_traces(1, 0.0, 1, steps=5))
    with pytest.raises(
        ConfigError, match=r"rank0\.json: byte \d+: more than 30 steps, gradients, operations"
    ):
        load_step(paths)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    paths = [tmp_path / f"{index}.json" for index in range(len(FORMATS[name]))]
    for path, document in zip(paths, FORMATS[name], strict=True):
        path.write_text(json.dumps(document))
    assert load_step(paths, ranks=1).ranks == (1 if name == "events alone" else 2)
