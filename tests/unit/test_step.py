"""Records of steps: merging of ranks, roles, and the file."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcr_plus.bucketing.step import (
    CapturedStep,
    ComputeEvent,
    IssueEvent,
    Mark,
    NeedEvent,
    Probed,
    RankStep,
    ReadyEvent,
    Role,
    WaitEvent,
    model_hash,
)
from mcr_plus.bucketing.step_file import line_of
from mcr_plus.errors import ConfigError, InvalidArgument

COMPUTED = {"a": 0.010, "b": 0.020, "end": 0.005}
"""Seconds of computing before each mark, and after the last one."""
SENT = 0.007


def together(ranks: int, steps: int, seed: int, late: float) -> dict[int, list[RankStep]]:
    """Ranks that compute as `COMPUTED` says, each come up to `late` seconds late to an all_reduce, and wait.

    All ranks end the operation together, `SENT` seconds after the last one has issued it.
    """
    chance = random.Random(seed)
    found: dict[int, list[RankStep]] = {rank: [] for rank in range(ranks)}
    for _ in range(steps):
        delays = [chance.uniform(0, late) for _ in range(ranks)]
        delays[chance.randrange(ranks)] = late  # a straggler, another one in each step
        delays[chance.randrange(ranks)] = 0.0
        issue = [COMPUTED["a"] + COMPUTED["b"] + delay for delay in delays]
        done = max(issue) + SENT
        for rank in range(ranks):
            marks = (
                Mark(NeedEvent("layer"), "a", COMPUTED["a"], COMPUTED["a"]),
                Mark(ReadyEvent("layer.weight", 400, "float32 cpu"), "b", issue[rank], issue[rank]),
                Mark(IssueEvent(5, "all_reduce", 400, tuple(range(ranks)), "gradients", None,
                                ("layer.weight",)),
                     "b", issue[rank], issue[rank], done - issue[rank], "world#1"),
                Mark(WaitEvent(5), "b", issue[rank], done),
            )  # fmt: skip
            found[rank].append(RankStep(done + COMPUTED["end"], marks))
    return found


@pytest.mark.parametrize("late", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_skew_is_taken_for_waiting_and_not_for_communication(seed: int, late: float) -> None:
    step = CapturedStep.merged(together(5, 7, seed, late), nodes=2, model="m")
    assert [role.ranks for role in step.roles] == [(0, 1, 2, 3, 4)]
    (issue,) = [event for event in step.roles[0].events if isinstance(event, IssueEvent)]
    assert issue.seconds == pytest.approx(SENT, rel=0.01)
    assert step.seconds == pytest.approx(sum(COMPUTED.values()) + late + SENT, rel=0.01)
    computed = {each.name: each.seconds for each in step.roles[0].events if isinstance(each, ComputeEvent)}
    assert computed["a"] == pytest.approx(COMPUTED["a"], rel=0.01)
    assert computed["end"] == pytest.approx(COMPUTED["end"], rel=0.01)
    assert computed["b"] >= COMPUTED["b"] * 0.99  # of the slowest rank, including its delay
    kinds = [type(event) for event in step.roles[0].events]
    assert kinds == [ComputeEvent, NeedEvent, ComputeEvent, ReadyEvent, IssueEvent, WaitEvent, ComputeEvent]


def test_ranks_that_are_slow_in_turns_make_a_step_as_slow_as_it_was() -> None:
    """Ranks wait for each other twice in a step; in each part another one is slow, and parts are skewed."""
    chance = random.Random(5)
    parts = 3
    spent = [[[chance.lognormvariate(0, 1) for _ in range(parts)] for _ in range(2)] for _ in range(9)]

    def rank(me: int) -> list[RankStep]:
        steps = []
        for of_ranks in spent:
            now, marks = 0.0, []
            for part in range(parts - 1):
                issued = now + of_ranks[me][part]
                now += max(each[part] for each in of_ranks)
                key = f"world#{part}"
                marks.append(
                    Mark(IssueEvent(part, "all_to_all", 4, (0, 1)), "w", issued, issued, now - issued, key)
                )
                marks.append(Mark(WaitEvent(part), "w", issued, now))
            now += of_ranks[me][-1]
            marks.append(Mark(ReadyEvent("w", 4, "float32 cpu"), "w", now, now))
            steps.append(RankStep(now, tuple(marks)))
        return steps

    step = CapturedStep.merged({0: rank(0), 1: rank(1)}, nodes=1, model="m")
    computed = sum(each.seconds for each in step.roles[0].events if isinstance(each, ComputeEvent))
    longest = sorted(sum(max(each[part] for each in of) for part in range(parts)) for of in spent)
    assert computed == pytest.approx(longest[4], rel=1e-9)


def of_two(marks: Any, seconds: float) -> CapturedStep:
    """Return the step of two ranks with these marks, five times."""
    ready = Mark(ReadyEvent("w", 4, "float32 cpu"), "w", seconds, seconds)
    steps = {rank: [RankStep(seconds, (*marks(rank), ready))] * 5 for rank in range(2)}
    return CapturedStep.merged(steps, nodes=1, model="m")


def computed_in(step: CapturedStep) -> float:
    return sum(each.seconds for each in step.roles[0].events if isinstance(each, ComputeEvent))


def test_ranks_that_compute_beside_each_other_are_not_counted_twice() -> None:
    """Rank 0 computes 10 s before the wait and 1 s after it, rank 1 the reverse."""

    def asynchronous(rank: int) -> list[Mark]:
        first = 1.0 if rank else 10.0
        issue = Mark(IssueEvent(0, "all_reduce", 4, (0, 1)), "w", 0.0, 0.0, 0.1, "world#1")
        return [issue, Mark(WaitEvent(0), "w", first, first)]

    def from_a_root(rank: int) -> list[Mark]:
        first = 10.0 if rank else 1.0
        issue = Mark(IssueEvent(0, "broadcast", 4, (0, 1)), "w", first, first, 0.1, "world#1")
        return [issue, Mark(WaitEvent(0), "w", first, first)]

    for marks in (asynchronous, from_a_root):
        assert computed_in(of_two(marks, 11.0)) == pytest.approx(11.0)


def test_a_step_computes_no_longer_than_it_takes() -> None:
    """Rank 0 is late after the last wait, and rank 1 before the first one of the next step."""

    def marks(rank: int) -> list[Mark]:
        first = 6.0 if rank else 1.0
        issue = Mark(IssueEvent(0, "all_reduce", 4, (0, 1)), "w", first, first, 0.1, "world#1")
        return [issue, Mark(WaitEvent(0), "w", first, first)]

    assert computed_in(of_two(marks, 11.0)) == pytest.approx(11.0)


def test_a_file_whose_gradients_are_never_ready_is_refused(tmp_path: Path) -> None:
    events = (ComputeEvent("w", 1.0), IssueEvent(0, "all_reduce", 4, (0, 1), gradients=("w",)), WaitEvent(0))
    path = tmp_path / "step.json"
    CapturedStep(2, 1, "m", 1.0, 0.0, (Role((0, 1), events),)).save(path)
    with pytest.raises(
        ConfigError, match=r"step\.json.*no gradient is ready; expected those that operations carry"
    ):
        CapturedStep.load(path)


def test_parts_whose_medians_are_all_zero_are_not_lost() -> None:
    """Nine seconds per step, in another one of three places each time."""

    def step(number: int) -> RankStep:
        times = [9.0 if number % 3 <= place else 0.0 for place in range(3)]
        marks = [Mark(NeedEvent(f"m{place}"), "w", at, at) for place, at in enumerate(times)]
        return RankStep(9.0, (*marks, Mark(ReadyEvent("w", 4, "float32 cpu"), "w", 9.0, 9.0)))

    merged = CapturedStep.merged({0: [step(number) for number in range(9)]}, nodes=1, model="m")
    assert computed_in(merged) == pytest.approx(9.0)


def test_steps_usual_on_some_ranks_only_give_no_times_of_operations() -> None:
    """Rank 0 waits a second for rank 1, half of whose steps have another sequence of events."""

    def rank(me: int, number: int) -> RankStep:
        ready = Mark(ReadyEvent("w", 4, "float32 cpu"), "w", 1.0, 1.0)
        sent = Mark(IssueEvent(0, "all_reduce", 4, (0, 1)), "w", 1.0, 1.0, 0.1 if me else 1.1, "world#1")
        waits = Mark(WaitEvent(0), "w", 1.0, 1.1)
        return RankStep(2.1, (sent, ready, waits) if me and number % 2 else (ready, sent, waits))

    step = CapturedStep.merged(
        {me: [rank(me, number) for number in range(8)] for me in range(2)}, nodes=1, model="m"
    )
    assert {each.seconds for role in step.roles for each in role.events if isinstance(each, IssueEvent)} == {
        0.1
    }


def test_ranks_with_other_events_are_another_role_and_operations_keep_their_ids() -> None:
    def rank(me: int, seconds: float) -> list[RankStep]:
        pair = (0, 1) if me < 2 else (2, 3)
        marks = (
            Mark(ReadyEvent("w", 4, "float32 cpu"), "w", seconds, seconds),
            Mark(IssueEvent(0, "all_gather", 8, pair), "w", seconds, seconds, 0.1, f"pair{pair[0]}#1"),
            Mark(IssueEvent(1, "all_reduce", 4, (0, 1, 2, 3)), "w", seconds, seconds, 0.2, "world#1"),
            Mark(WaitEvent(1), "w", seconds, seconds + 0.2),
            Mark(WaitEvent(0), "w", seconds + 0.2, seconds + 0.2),
        )
        return [RankStep(seconds + 0.3, marks)] * 3

    step = CapturedStep.merged({me: rank(me, 1.0 + me) for me in range(4)}, nodes=1, model="m")
    assert [role.ranks for role in step.roles] == [(0, 1), (2, 3)]
    ids = [
        {each.kind: each.id for each in role.events if isinstance(each, IssueEvent)} for role in step.roles
    ]
    assert ids[0]["all_reduce"] == ids[1]["all_reduce"]
    assert ids[0]["all_gather"] != ids[1]["all_gather"]
    for role, own, slowest in zip(step.roles, ids, (2.0, 4.0), strict=True):
        assert role.events[0] == ComputeEvent("w", slowest)  # of rank 1, of rank 3
        waits = [each.id for each in role.events if isinstance(each, WaitEvent)]
        assert waits == [own["all_reduce"], own["all_gather"]]


def one(seconds: float, *params: str) -> RankStep:
    marks = [Mark(ReadyEvent(param, 4, "float32 cpu"), param, seconds / 2, seconds / 2) for param in params]
    return RankStep(seconds, tuple(marks))


def test_first_steps_that_compile_and_rare_sequences_are_left_out() -> None:
    steps = [one(50.0, "w"), one(9.0, "w"), one(1.0, "w"), one(1.1, "w"), one(2.9, "v", "w"), one(1.2, "w")]
    step = CapturedStep.merged({0: steps}, nodes=1, model="m")
    assert step.seconds == 1.1
    assert step.spread == pytest.approx((2.9 - 1.0) / 1.15)
    assert [event for event in step.roles[0].events if isinstance(event, ReadyEvent)] == [
        ReadyEvent("w", 4, "float32 cpu")
    ]
    # Only barriers at the beginning: later ones are part of the program.
    assert CapturedStep.merged({0: [*steps[2:], one(50.0, "w")]}, nodes=1, model="m").spread > 30


def test_times_of_few_equal_steps_are_noted() -> None:
    steps = [one(1.0, "w"), one(1.0, "v", "w"), one(1.0, "u", "w"), one(1.2, "w")]
    notes = CapturedStep.merged({0: steps}, nodes=1, model="m").notes
    assert notes == ("only 2 of 4 steps have the same events; times are medians of few samples",)
    assert CapturedStep.merged({0: [*steps, one(1.0, "w")]}, nodes=1, model="m").notes == ()


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ({0: [one(1, "w")] * 2}, "2 steps; expected at least 3"),
        ({0: [one(1, "w")] * 4, 1: [one(1, "w")] * 3}, "rank 1 has 3 steps, and rank 0 4"),
        ({0: [one(1)] * 3}, "no backward pass"),
        ({0: []}, "0 steps"),
        ({0: [one(0.0)] * 3}, "no backward pass"),  # a trace of GPU kernels alone
        ({0: [one(0.0, "w")] * 3}, "steps take no time"),
        ({0: [one(9.0, "w"), one(1.0, "w"), one(0.0, "w"), one(0.0, "w")]}, "steps take no time"),
    ],
)
def test_captures_that_do_not_fit_are_refused(steps: dict[int, list[RankStep]], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(problem)):
        CapturedStep.merged(steps, nodes=1, model="m")


def test_the_hash_of_a_model_is_of_names_shapes_and_dtypes() -> None:
    base = [("a.weight", (3, 4), "float32"), ("a.bias", (3,), "float32")]
    others = [
        base[::-1], base[:1], [("b.weight", (3, 4), "float32"), base[1]],
        [("a.weight", (4, 3), "float32"), base[1]], [("a.weight", (3, 4), "float64"), base[1]],
    ]  # fmt: skip
    hashes = [model_hash(each) for each in [base, *others]]
    assert len(set(hashes)) == len(hashes)
    assert model_hash(iter([(name, list(shape), dtype) for name, shape, dtype in base])) == hashes[0]


# -- the file -----------------------------------------------------------------------------------------------

STEP = CapturedStep(
    3, 2, "0123", 0.25, 0.04,
    (
        Role((0, 2), (ComputeEvent("a", 0.1), NeedEvent("a"), ReadyEvent("a.weight", 12, "float32 cpu"),
                      IssueEvent(3, "all_reduce", 12, (0, 2), "gradients", 0.01, ("a.weight",)),
                      WaitEvent(3))),
        Role((1,), (ComputeEvent("b", 0.25), IssueEvent(4, "send", 7, (1, 0)))),
    ),
    "kineto", False, ("something",),
)  # fmt: skip


def test_a_saved_step_is_loaded_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    STEP.save(file)
    assert CapturedStep.load(file) == STEP
    assert json.loads(file.read_text())["version"] == 1


def test_measurements_of_the_job_are_part_of_the_file(tmp_path: Path) -> None:
    """It is optional: an older step has none."""
    probed = {"gloo": Probed("all_reduce", (4096, 1 << 20), (1e-3, 5e-3), (0.1, 0.3))}
    step, file = replace(STEP, measured=probed), tmp_path / "step.json"
    step.save(file)
    assert CapturedStep.load(file) == step
    assert "measured" not in json.loads(STEP.text())
    for old, new, problem in (
        ("[4096, 1048576]", "[4096, 4096]", "measured.gloo.sizes: (4096.0, 4096.0); expected ascending"),
        ("[0.1, 0.3]", "[0.1]", "measured.gloo.shares: 1 values; expected 2"),
        ("[0.001, 0.005]", "[0.001, -1.0]", "measured.gloo.seconds[1]: -1.0: "),
    ):
        assert old in step.text()
        file.write_text(step.text().replace(old, new))
        with pytest.raises(ConfigError) as error:
            CapturedStep.load(file)
        assert problem in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"seconds": 0.1}', '"seconds": -0.1}', ":13: roles[0].events[0].seconds: -0.1: "),
        ('"seconds": 0.1}', '"seconds": NaN}', ":13: roles[0].events[0].seconds: nan: "),
        ('"event": "need"', '"event": "want"', ":14: roles[0].events[1]: "),
        ('"nbytes": 12, "like"', '"nbytes": "12", "like"', ":15: roles[0].events[2].nbytes: '12': "),
        ('"like": "float32 cpu"', '"kind": "float32 cpu"', ":15: roles[0].events[2].like: missing field; "),
        ('"like": "float32 cpu"', '"like": " "', ":15: roles[0].events[2].like: ' ': "),
        ('"seconds": 0.1}', '"seconds": 1e300}', ":13: roles[0].events[0].seconds: 1e+300: "),
        ('"group": [0, 2]', '"group": [0, 3]', ":16: roles[0].events[3].group: rank 3; expected"),
        ('"group": [0, 2]', '"group": [0, 1]', ":16: roles[0].events[3].group: without rank 2, which issues"),
        ('"group": [0, 2]', '"group": [0, 2, 2]', ":16: roles[0].events[3].group: (0, 2, 2); expected each"),
        ('{"event": "wait", "id": 3}', '{"event": "wait", "id": 4}', ":17: roles[0].events[4].id: 4 is not"),
        ('"ranks": [1]', '"ranks": [2]', ": roles[1].ranks: rank 2 is in roles[0] too"),
        ('"ranks": [1]', '"ranks": [5]', ": roles[1].ranks: rank 5 is beyond the last"),
        ('"ranks": 3', f'"ranks": {10**12}', ":4: ranks: 1000000000000: input should be less"),
        ('"nodes": 2', f'"nodes": {10**12}', ":5: nodes: 1000000000000: input should be less"),
        ('"nbytes": 12, "like"', f'"nbytes": {2**63}, "like"', ":15: roles[0].events[2].nbytes: 9223372"),
        ('"nbytes": 12, "like"', f'"nbytes": {"9" * 5000}, "like"', ":15: not JSON that can be read: "),
        ('"ranks": [0, 2]', '"ranks": [0]', ": roles: rank 2 is in no role"),
        ('"version": 1', '"version": 2', ":2: version: 2; expected 1"),
        ('"version": 1,', "", ":1: version: missing"),
        ('"nodes": 2,', '"nodes": 2, "extra": 1,', ": extra: "),
        ('"seconds": 0.25', '"seconds": 0.25,,', ": not JSON: "),
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_a_malformed_file_is_refused_with_its_line(tmp_path: Path, old: str, new: str, problem: str) -> None:
    file, text = tmp_path / "step.json", STEP.text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        CapturedStep.load(file)
    assert str(error.value).startswith(str(file))
    assert problem in str(error.value)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{", b"\xff\xfe", b'{"version": 1}', b"[" * 100_000])
def test_files_without_a_step_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "step.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        CapturedStep.load(file)
    with pytest.raises(ConfigError, match="No such file"):
        CapturedStep.load(tmp_path / "missing.json")


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    for content, said in (
        (
            '{"version": 1}',
            "1: document: missing fields source, ranks, nodes, model, seconds, spread, by_caller",
        ),
        (STEP.text().replace('"group": [0, 2]', '"group": []'), "16: roles[0].events[3].group: []: "),
        (
            replace(STEP, roles=(Role((0, 1, 2), ()),)).text(),
            "11: roles: no event; expected",
        ),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError) as error:
            CapturedStep.load(file)
        (line,) = str(error.value).splitlines()
        assert line.startswith(f"{file}:{said}"), line
        assert "expected" in line or "should" in line


def test_an_unknown_operation_is_a_barrier_and_named(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_text(STEP.text().replace('"kind": "all_reduce"', '"kind": "all_reduced"', 1))
    step = CapturedStep.load(file)
    assert step.notes[-1] == "an unknown operation, 'all_reduced', counts as a barrier"
    issues = [each for role in step.roles for each in role.events if isinstance(each, IssueEvent)]
    assert any((each.kind, each.nbytes) == ("barrier", 0) for each in issues)


def test_line_numbers_match_an_indented_document() -> None:
    document: dict[str, Any] = {"a": [1, {"b": "x\ny,:", "c": [[], {}, [1]]}], "d": {"e": math.pi}}
    text = json.dumps(document, indent=1)
    lines = text.splitlines()
    assert lines[line_of(text, ("a", 1, "b")) - 1].strip().startswith('"b"')
    assert lines[line_of(text, ("a", 1, "c", 2, 0)) - 1].strip() == "1"
    assert lines[line_of(text, ("d", "e")) - 1].strip().startswith('"e"')
    assert line_of(text, ("d", "nothing")) == line_of(text, ("d",))
