"""Online refinement: the decisions of trials, agreement of ranks, written tables, and costs."""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, cast

import msccl_samples as samples
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import own_rank, run_ranks
from tiers import examples

import mcr_plus as mcr
from mcr_plus import registry
from mcr_plus.backends import backend_class
from mcr_plus.backends.base import Channel, Poll, Start
from mcr_plus.backends.mpi.backend import MpiBackend
from mcr_plus.config.reader import load
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.units import Range
from mcr_plus.core.work import JointWork, Work
from mcr_plus.errors import ConfigError
from mcr_plus.msccl import catalog
from mcr_plus.msccl.writer import write_algorithm
from mcr_plus.observe.explain import explain
from mcr_plus.pipeline.stage import Context, Issue
from mcr_plus.pipeline.treatment import Treatment
from mcr_plus.rendezvous.mpi_launcher import mpi_usable
from mcr_plus.rendezvous.world import World
from mcr_plus.selection import online
from mcr_plus.selection.options import SelectOptions
from mcr_plus.selection.refined_table import RefinedTable, refined_table
from mcr_plus.selection.stage import SelectStage
from mcr_plus.selection.trial import LAG, OnlineTrial
from mcr_plus.tables.table import Query, Table, TableKey, TableRule, load_table, parse_table
from mcr_plus.tables.writing import table_text
from mcr_plus.trials import router
from mcr_plus.trials.router import Router
from mcr_plus.trials.trial import Turn, compare

PLAIN = Signature("all_reduce", torch.float32, (4,), 16, "world", 2, reduce_op="SUM")

# -- the trial --------------------------------------------------------------------------------------

Agreed = Callable[[OnlineTrial], list[float]]


def play(
    trial: OnlineTrial, agreed: Agreed, calls: int, local: random.Random | None = None
) -> Iterator[Turn]:
    """Make a rank's calls, with `agreed` for the result of the ranks' exchange, and own times `local`."""
    shared: list[float] = []
    turns = trial.schedule()
    for call in range(trial.calls, trial.calls + calls):
        if call == trial.exchange_at and not trial.frozen:
            assert len(trial.contribution()) == 2 * 4 * 3 * (len(trial.candidates) - 1)
            shared = agreed(trial)
        if call == trial.apply_at and not trial.frozen:
            trial.agree(shared)
            turns = trial.schedule()
        turn = turns.get(call, Turn(trial.chosen, None))
        yield turn
        if turn.slot is not None and local is not None:
            trial.take(trial.exchanges, turn.slot, local.random(), 1 + local.random())
        trial.calls += 1


def timed(seconds: Callable[[int, int], float], missing: float = 0.0, seed: int = 0) -> Agreed:
    """Return the agreed times if a call takes `seconds(candidate, candidate in charge)`; some are unknown."""
    chance = random.Random(seed)

    def agreed(trial: OnlineTrial) -> list[float]:
        half = len(trial.local) // 2
        numbers = [-inf] * (2 * half)
        for turn in trial.schedule().values():
            if turn.slot is not None and chance.random() >= missing:
                numbers[turn.slot] = chance.uniform(0, 1e6)
                numbers[half + turn.slot] = numbers[turn.slot] + seconds(turn.candidate, trial.chosen)
        return numbers

    return agreed


def noisy(medians: Sequence[float], sigma: float, seed: int) -> Callable[[int, int], float]:
    chance = random.Random(seed)
    return lambda candidate, chosen: medians[candidate] * chance.lognormvariate(0, sigma)


def bound(candidates: int, lag: int) -> int:
    """Return the number of calls after which a trial has ended, by the documentation."""
    return 32 + candidates * 12 * (3 * (candidates - 1) * 32 + lag)


TRIALS = st.tuples(
    st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=4),  # median seconds by candidate
    st.floats(0, 2.0),  # noise
    st.floats(0, 1.0),  # share of times that no rank has
    st.sampled_from([LAG, 4 * LAG]),
    st.integers(0, 1 << 30),
)


@settings(max_examples=examples(60))
@given(TRIALS)
@example(([0.5, 0.25], 0.75, 0.578125, 16, 1791))  # which takes all calls that it may
def test_share_of_calls_that_go_to_rivals_is_bounded_and_ends(
    drawn: tuple[list[float], float, float, int, int],
) -> None:
    medians, sigma, missing, lag, seed = drawn
    trial = OnlineTrial.of([str(index) for index in range(len(medians))], lag)
    agreed = timed(noisy(medians, sigma, seed), missing, seed)
    rivals = 0
    # The call after the last exchange finds the trial ended.
    for call, turn in enumerate(play(trial, agreed, bound(len(medians), lag) + 1), 1):
        rivals += turn.candidate != trial.chosen
        assert rivals <= call / 16
    assert trial.frozen
    assert {turn.candidate for turn in play(trial, agreed, 100)} == {trial.chosen}


@pytest.mark.long
@settings(max_examples=examples(40))
@given(TRIALS, st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_equal_agreed_numbers_mean_equal_choices_despite_local_times(
    drawn: tuple[list[float], float, float, int, int], mine: int, theirs: int
) -> None:
    medians, sigma, missing, lag, seed = drawn
    traces = []
    for local in (random.Random(mine), random.Random(theirs), None):
        trial = OnlineTrial.of([str(index) for index in range(len(medians))], lag)
        agreed = timed(noisy(medians, sigma, seed), missing, seed)
        traces.append(list(play(trial, agreed, bound(len(medians), lag) + 100, local)))
    assert traces[0] == traces[1] == traces[2]


@settings(max_examples=examples(20))
@given(TRIALS, st.integers(0, 5))
def test_trial_restored_from_plain_data_continues_alike(
    drawn: tuple[list[float], float, float, int, int], exchanges: int
) -> None:
    medians, sigma, _, lag, seed = drawn
    first = OnlineTrial.of([str(index) for index in range(len(medians))], lag)
    for _ in play(first, timed(noisy(medians, sigma, seed)), bound(len(medians), lag)):
        if first.exchanges == exchanges:
            break
    second = OnlineTrial(**json.loads(json.dumps(asdict(first))))
    later = [timed(noisy(medians, sigma, seed + 1)) for _ in range(2)]
    assert list(play(first, later[0], 1000)) == list(play(second, later[1], 1000))


@pytest.mark.short("1")
@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_fastest_wins_under_noise(best: int) -> None:
    medians = [1.0, 1.0, 1.0]
    medians[best] = 0.6
    for seed in range(100):
        trial = OnlineTrial.of("abc")
        for _ in play(trial, timed(noisy(medians, 0.2, seed), 0.1, seed), bound(3, LAG)):
            pass
        assert trial.frozen
        assert trial.chosen == best


def test_hopeless_candidates_are_dropped_at_the_first_exchange() -> None:
    trial = OnlineTrial.of("abc")
    slow = [turn.candidate for turn in play(trial, timed(noisy([1, 9, 1.2], 0.1, 1)), 4000)].count(1)
    assert slow == 6  # three turns of two calls
    assert trial.chosen == 0


def test_a_choice_a_hundred_times_too_slow_is_left_at_the_first_exchange() -> None:
    trial = OnlineTrial.of("ab")
    trace = [turn.candidate for turn in play(trial, timed(noisy([100, 1], 0.3, 1)), 200)]
    assert trace[32 + 96 + 16 :] == [1] * (200 - 144)
    assert trial.frozen


def test_equally_fast_candidates_do_not_change_the_choice() -> None:
    changed = 0
    for seed in range(100):
        trial = OnlineTrial.of("ab")
        for _ in play(trial, timed(noisy([1, 1], 0.2, seed)), bound(2, LAG)):
            pass
        assert trial.frozen
        changed += trial.chosen != 0
    assert changed <= 3  # chance changes something, rarely


def test_choice_that_is_slower_in_use_is_reverted_permanently() -> None:
    """b in charge is slower than a in charge: a rival meets an idle library, for instance."""

    def seconds(candidate: int, chosen: int) -> float:
        return {(0, 0): 10.0, (1, 0): 8.0, (1, 1): 12.0, (0, 1): 9.0}[candidate, chosen]

    trial = OnlineTrial.of("ab")
    charge = [trial.chosen for _ in play(trial, timed(seconds), bound(2, LAG))]
    changes = sum(one != other for one, other in pairwise(charge))
    assert changes == 2
    assert trial.frozen
    assert trial.candidates[trial.chosen] == "a"
    assert trial.medians == [10.0, 12.0]  # the medians in charge


def test_a_late_time_of_an_earlier_round_is_not_counted() -> None:
    trial = OnlineTrial.of("ab")
    for _ in play(trial, timed(noisy([1, 1], 0.2, 0)), 32 + 96 + 16 + 1):
        pass
    assert trial.exchanges == 1
    trial.take(0, 3, 5.0, 6.0)
    assert trial.contribution() == [-inf] * 24
    trial.take(1, 3, 5.0, 6.0)
    assert [number for number in trial.contribution() if number != -inf] == [5.0, 6.0]


def test_every_place_of_a_period_meets_every_candidate() -> None:
    """A program that repeats itself every 2 to 32 calls must not time one candidate at one place only."""
    trial = OnlineTrial.of("abc")
    places: dict[tuple[int, int], set[int]] = {}
    for call, turn in enumerate(play(trial, timed(noisy([1, 1.01, 1.02], 0.9, 3)), 4000)):
        for period in (2, 4, 8):
            if turn.slot is not None and turn.candidate != trial.chosen:
                places.setdefault((period, turn.candidate), set()).add(call % period)
    assert all(len(met) == period for (period, _), met in places.items())
    assert len(places) == 6


@pytest.mark.parametrize(
    ("own", "rival", "expected"),
    [
        ([1.0] * 9, [0.3] * 3, "faster"),
        ([1.0] * 9, [0.4] * 3, "open"),  # three times show a factor of three, no less
        ([1.0] * 9, [3.1] * 3, "no faster"),
        ([1.0] * 9, [2.9] * 3, "open"),
        ([1.0] * 2, [9.0] * 3, "open"),
        ([1.0] * 9, [9.0] * 2, "open"),
        ([1.0] * 9, [], "open"),
        ([1.0] * 9, [0.9] * 6, "faster"),
        ([1.0] * 9, [0.96] * 6, "no faster"),  # the gain is too small for a change
        ([1.0] * 9, [1.0] * 6, "no faster"),
        ([1.0] * 9, [0.5] * 5 + [2.0], "open"),
        ([1.0] * 30, [0.5] * 20 + [9.0] * 2, "faster"),  # outliers do not matter
        ([1.0] * 30 + [99.0] * 3, [4.0] * 3, "no faster"),
    ],
)
def test_compare(own: list[float], rival: list[float], expected: str) -> None:
    assert compare(own, rival) == expected


# -- the calls --------------------------------------------------------------------------------------


class Library:
    """Chains with operations that take a given time by a clock that only they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float], one_clock: bool) -> None:
        self.now = 50.0
        self.log: list[str] = []
        self.shared: list[list[float]] = []
        self.refuses = False
        monkeypatch.setattr(router, "perf_counter", lambda: self.now)
        chains = [self._chain(str(index), each) for index, each in enumerate(seconds)]
        self.router = Router(OnlineTrial.of("01"), chains, self._share, one_clock=one_clock)

    def _chain(self, name: str, seconds: float) -> Issue:
        """Return a chain without the fast path, like one after an outside stage."""

        def end() -> None:
            self.now += seconds

        def issue(message: Message) -> Work:
            if self.refuses:
                raise mcr.OrderMismatch("another thread")
            self.log.append(name)
            return JointWork([], "all_reduce", nbytes=16).then(end)

        return Issue(issue)

    def _share(self, values: torch.Tensor) -> Work:
        self.shared.append(values.tolist())
        return JointWork([], "all_reduce", nbytes=16)


@pytest.mark.parametrize("one_clock", [True, False])
@pytest.mark.parametrize("short_way", [True, False])
def test_calls_are_timed_from_the_call_to_the_end(
    monkeypatch: pytest.MonkeyPatch, one_clock: bool, short_way: bool
) -> None:
    library = Library(monkeypatch, [0.5, 0.0625], one_clock)
    for _ in range(32 + 96 + 16):
        if short_way:
            library.router.issue.run(Message(PLAIN))
        else:
            library.router.issue.start(Message(PLAIN)).wait()
    assert library.log.count("1") == 6
    (numbers,) = library.shared
    half = len(numbers) // 2
    spans = [(began, ended - began) for began, ended in zip(numbers[:half], numbers[half:], strict=True)]
    assert sorted(span for _, span in spans) == [0.0625] * 3 + [0.5] * 9
    assert all((began > 50.0) if one_clock else (began == 0.0) for began, _ in spans)
    library.log.clear()
    for _ in range(100):
        library.router.issue(Message(PLAIN))
    assert library.log == ["1"] * 100


def test_refused_calls_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch, [0.5, 0.0625], one_clock=True)
    for refused in (True, False) * 3:
        library.refuses = refused
        with pytest.raises(mcr.OrderMismatch) if refused else nullcontext():
            library.router.issue(Message(PLAIN))
    assert library.router.trial.calls == 3


def test_an_operation_that_waits_for_another_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch, [0.5, 0.0625], one_clock=True)
    earlier = JointWork([], "all_reduce", nbytes=16)
    for _ in range(32 + 96 + 1):
        library.router.issue(Message(PLAIN, after=earlier)).wait()
    assert library.shared == [[-inf] * 24]


# -- the refined table ------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(1, 1 << 22), st.integers(0, 22).map(lambda power: 1 << power))
CHOICES = st.sampled_from(["mpi", "gloo", "local"])


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Tables that the loader accepts, narrow keys first, with figures."""
    narrow = [
        TableKey("all_reduce", dtype="float32", async_op=False),
        TableKey("all_gather", basis="per_rank"),
        TableKey("all_reduce", ranks=Range(2, 5)),
        TableKey("all_reduce"),
        TableKey("*"),
    ]
    rules = []
    for key in draw(
        st.lists(st.sampled_from(narrow), unique=True, min_size=1).map(lambda k: sorted(k, key=narrow.index))
    ):
        cuts = sorted(draw(st.sets(SIZES, max_size=4)))
        for lo, hi in zip([0, *cuts], [*cuts, None], strict=True):
            end = hi or 1 << 23
            points = draw(st.dictionaries(st.integers(lo, end), st.floats(0.5, 1e4), max_size=2))
            curves = (
                {draw(CHOICES): {size: float(f"{us:.4g}") for size, us in points.items()}} if points else {}
            )
            rules.append(TableRule(draw(CHOICES), lo, hi, key, curves))
    return Table(tuple(rules), "base.yaml", {"ranks": ("2", "4")})


@st.composite
def queries(draw: st.DrawFn) -> Query:
    kind = draw(st.sampled_from(["all_reduce", "all_gather", "broadcast"]))
    dtype, ranks = draw(st.sampled_from(["float32", "bfloat16"])), draw(st.integers(2, 3))
    return Query(kind, draw(SIZES), dtype, ranks, 1, ranks, "cpu", draw(st.booleans()))


def found_out(query: Query, choice: str, **more: Any) -> RefinedTable:
    details: dict[str, Any] = {
        "measured": {"mpi": 2.5, "gloo": 31.25},
        "default": lambda _: "local",
    }
    return RefinedTable(query, choice, **{**details, **more})


def test_results_of_an_algorithm_hold_for_its_sizes_only(tmp_path: Path) -> None:
    for name, algorithm in {
        "small": replace(samples.ring(2), least=1500, most=3000),
        "chain": samples.chain(2, 0),  # of one root, and a rule is for all
    }.items():
        write_algorithm(algorithm, tmp_path / f"{name}.xml")
    learnt = [Query(kind, 2048) for kind in ("all_reduce", "broadcast")]
    choices = dict(zip(learnt, ("msccl:small", "msccl:chain"), strict=True))
    with catalog.kept():
        catalog.use(sorted(tmp_path.glob("*.xml")))
        refined = refined_table(None, [found_out(query, choices[query]) for query in learnt], {})
    chosen = {size: lookup(refined, Query("all_reduce", size)) for size in (2047, 2048, 3000, 3001)}
    assert chosen == {2047: "local", 2048: "msccl:small", 3000: "msccl:small", 3001: "local"}
    assert lookup(refined, Query("broadcast", 2048)) == "local"


def lookup(table: Table | None, query: Query) -> str:
    rule = None if table is None else table.lookup(query)
    return "local" if rule is None else rule.backend  # as `found_out` has it


@pytest.mark.long
@settings(max_examples=examples(150))
@given(
    st.one_of(st.none(), tables()),
    st.lists(st.tuples(queries(), CHOICES), min_size=1, max_size=6, unique_by=lambda pair: pair[0]),
    st.lists(queries(), max_size=10),
)
def test_refined_table_changes_only_refined_rules(
    base: Table | None, learnt: list[tuple[Query, str]], others: list[Query]
) -> None:
    refined = refined_table(base, [found_out(query, choice) for query, choice in learnt], {"ranks": ("2",)})
    again = parse_table(table_text(refined))  # without gaps, overlaps or rules out of reach
    assert again.rules == refined.rules
    for query, choice in learnt:
        rule = again.lookup(query)
        assert rule is not None
        assert rule.backend == choice
        assert [rule.measured[name][query.nbytes or 0] for name in ("mpi", "gloo")] == [2.5, 31.25]
    for query in others:
        assert lookup(again, query) == expected(base, dict(learnt), query)


def expected(base: Table | None, learnt: dict[Query, str], query: Query) -> str:
    """Return the candidate at the nearest size (by ratio) of the octave, for otherwise equal operations."""
    assert query.nbytes is not None
    octave = [
        seen
        for seen in learnt
        if seen._replace(nbytes=None) == query._replace(nbytes=None)
        and (seen.nbytes or 0).bit_length() == query.nbytes.bit_length()
    ]
    if not octave:
        return lookup(base, query)
    size = query.nbytes
    nearest = min(octave, key=lambda seen: max(size / (seen.nbytes or 1), (seen.nbytes or 1) / size))
    return learnt[nearest]


@settings(max_examples=examples(50))
@given(tables(), queries(), CHOICES)
def test_refining_a_refined_table_adds_nothing_new(base: Table, query: Query, choice: str) -> None:
    once = refined_table(base, [found_out(query, choice)], {"ranks": ("2",)})
    assert refined_table(once, [found_out(query, choice)], {"ranks": ("2",)}).rules == once.rules


@settings(max_examples=examples(50))
@given(tables(), queries(), CHOICES)
def test_refined_table_keeps_the_figures_and_joins_equal_neighbours(
    base: Table, query: Query, choice: str
) -> None:
    refined = refined_table(base, [found_out(query, choice, measured={})], {"ranks": ("2",)})
    ours = [rule for rule in refined.rules if rule.key == found_out(query, choice).key]
    assert all(one.backend != other.backend for one, other in pairwise(ours))
    found = base.lookup(query)
    before = [rule for rule in base.rules if found is not None and rule.key == found.key]
    per_rank = bool(before) and before[0].key.basis == "per_rank"
    assert points(ours) == points(before, query.ranks if per_rank and query.kind == "all_gather" else 1)


def points(rules: Sequence[TableRule], unit: int = 1) -> set[tuple[str, int]]:
    """Return the candidates with figures by size; rules `per_rank` count a byte of every rank as one."""
    return {(name, size * unit) for rule in rules for name, curve in rule.measured.items() for size in curve}


def test_sizes_of_one_octave_part_at_their_geometric_mean() -> None:
    base = parse_table("version: 1\nrules:\n  - {kind: all_reduce, bytes: 0.., backend: mpi}\n")
    seen = [(5000, "gloo"), (7200, "local"), (100, "gloo"), (100 << 10, "mpi")]
    learnt = [found_out(Query("all_reduce", size), choice, measured={}) for size, choice in seen]
    rules = refined_table(base, learnt, {}).rules
    spans = [(rule.lo, rule.hi, rule.backend) for rule in rules if rule.key.dtype == "float32"]
    assert spans == [
        (0, 64, "mpi"),
        (64, 128, "gloo"),
        (128, 4096, "mpi"),
        (4096, 6001, "gloo"),  # up to √(5000 × 7200) = 6000
        (6001, 8192, "local"),
        (8192, None, "mpi"),
    ]
    assert rules[-1] == base.rules[0]


def test_medians_decide_between_operations_of_one_rule() -> None:
    query = Query("all_reduce", 4096)
    learnt = [
        found_out(query, "mpi", measured={"mpi": 10.0, "gloo": 11.0}),
        found_out(query, "gloo", measured={"mpi": 30.0, "gloo": 9.0}),
    ]
    for order in (learnt, learnt[::-1]):
        rule = refined_table(None, order, {}).lookup(query)
        assert rule is not None
        assert rule.backend == "gloo"
        assert rule.measured == {"mpi": {4096: 20.0}, "gloo": {4096: 10.0}}


def test_vector_operations_without_a_size_get_a_rule_for_all_sizes() -> None:
    base = parse_table('version: 1\nrules:\n  - {kind: "*", bytes: 0.., backend: mpi}\n')
    plain, vector = Query("all_gather", 4096), Query("all_gather_v", None)
    learnt = [found_out(plain, "gloo"), found_out(vector, "local")]
    refined = parse_table(table_text(refined_table(base, learnt, {})))
    assert [lookup(refined, query) for query in (plain, vector)] == ["gloo", "local"]
    assert lookup(refined, plain._replace(nbytes=1 << 20)) == "mpi"
    assert lookup(refined, vector._replace(dtype="int8")) == "mpi"


def test_rules_of_a_vector_form_keep_their_place() -> None:
    base = parse_table(
        "version: 1\nrules:\n"
        "  - {kind: all_gather_v, bytes: 0.., backend: gloo}\n"
        "  - {kind: all_gather, bytes: 0.., backend: mpi}\n"
    )
    refined = refined_table(base, [found_out(Query("all_gather", 4096), "local")], {})
    assert lookup(refined, Query("all_gather", 4096)) == "local"
    for size in (None, 4096, 1 << 30):
        assert lookup(refined, Query("all_gather_v", size)) == "gloo"


def test_without_a_table_unobserved_sizes_keep_the_preference() -> None:
    learnt = [
        found_out(Query("broadcast", 4096), "mpi", default=lambda size: "gloo" if size >= 1 << 16 else "mpi")
    ]
    table = refined_table(None, learnt, {"ranks": ("2",)})
    assert [(rule.lo, rule.hi, rule.backend) for rule in table.rules] == [
        (0, 1 << 16, "mpi"),
        (1 << 16, None, "gloo"),
    ]
    assert table.fingerprint == {"ranks": ("2",)}


# -- on ranks ---------------------------------------------------------------------------------------

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")


class Delayed(Channel):
    """MPI's channel, with something done before each operation."""

    def __init__(self, inner: Channel, before: Callable[[], object]) -> None:
        self._inner = inner
        self._before = before

    def bind(self, signature: Signature) -> Start:
        start = self._inner.bind(signature)

        def delayed(message: Message) -> Poll:
            self._before()
            return start(message)

        return delayed

    def gate(self, signature: Signature, digest: int) -> Any:
        inner: Any = self._inner
        return inner.gate(signature, digest)

    def close(self) -> None:
        self._inner.close()


def toy(backend_name: str, before: Callable[[], object]) -> None:
    """Register MPI under another name, with something done before each operation."""

    class Toy(MpiBackend):
        name = backend_name

        def open(self, group: Group) -> Channel:
            return Delayed(super().open(group), before)

    registry.register("backends", backend_name, Toy)


def join(backends: Sequence[str], compress: dict[str, Any] | None = None, **select: Any) -> mcr.Communicator:
    torch.set_num_threads(1)
    pipeline = [{"select": {"online": True, **select}}, {"dispatch": {"timeout": "20s"}}]
    if compress is not None:
        pipeline.insert(0, {"compress": compress})
    return mcr.init({"version": 1, "backends": list(backends), "pipeline": pipeline})


def backends_used(log: Any) -> list[str]:
    """Return the library of each operation in program order, without the exchanges."""
    mine = [record for record in log.records if record.tag != online.TAG]
    return [record.backend for record in sorted(mine, key=lambda record: record.sequence)]


def in_charge(trace: Sequence[str]) -> str:
    """Return the choice of 64 calls or more: a rival, if any is left, gets at most 6 of 64."""
    (name, count), *_ = Counter(trace).most_common()
    assert count >= len(trace) - 6, trace
    return name


QUICK_S, SLOW_S = 0.0005, 1.0
SLOW_TABLE = "version: 1\nrules:\n  - {kind: all_reduce, bytes: 0.., backend: slow}\n"


def quick_and_slow() -> None:
    """Libraries that take a given time by the trial's clock, on a busy machine, too."""
    skipped = 0.0

    def skip() -> None:
        nonlocal skipped
        skipped += SLOW_S

    toy("quick", lambda: time.sleep(QUICK_S))
    toy("slow", skip)
    setattr(router, "perf_counter", lambda: time.perf_counter() + skipped)  # noqa: B010 - as in `disagree`


def recover(folder: str) -> dict[str, Any]:
    """Run a job with a wrong table, and a second job with the table that the first has written."""
    quick_and_slow()
    mine = Path(folder, f"rank{own_rank()}")
    mine.mkdir()
    os.chdir(mine)
    comm = join(["slow", "quick"], table=str(Path(folder, "wrong.yaml")))
    x = torch.full((32,), 2.0**comm.rank)
    with mcr.record() as log:
        for _ in range(600):
            x.fill_(comm.rank + 1)
            mcr.all_reduce(x)
            assert x.tolist() == [3.0] * 32
    comm.opened.runtime.forget()
    with mcr.record() as anew:
        for _ in range(40):
            mcr.all_reduce(x)
    ratio, best = inf, torch.zeros(1, dtype=torch.float64)
    for _ in range(10):  # a busy machine spoils some, not all
        turn = [times(mcr.all_reduce, x, backend=name) for name in (None, "quick") * 100]
        ratio = min(ratio, statistics.median(turn[::2]) / statistics.median(turn[1::2]))
        mcr.all_reduce(best.fill_(ratio), mcr.MAX, backend="quick")
        if best <= 1.05:
            break
    state = mcr.state_dict()
    mcr.finalize()
    mine.joinpath("after").write_text("")  # the second job writes from here on
    refined = load_table(Path(folder, "wrong.refined.yaml"))
    rule = refined.lookup(Query("all_reduce", 128))
    join(["slow", "quick"], table=str(Path(folder, "wrong.refined.yaml")), online=False)
    with mcr.record() as second:
        mcr.all_reduce(x)
        mcr.all_reduce(torch.ones(1000))
    mcr.finalize()
    join(["slow", "quick"], table=str(Path(folder, "wrong.yaml")))
    mcr.load_state_dict(state)
    with mcr.record() as resumed:
        for _ in range(40):
            mcr.all_reduce(x)
        mcr.all_reduce(torch.ones(1000))
    again = mcr.state_dict()
    mcr.finalize()
    return {
        "resumed": backends_used(resumed),
        "kept": again["tuner"]["world"].items() > state["tuner"]["world"].items(),
        "used": backends_used(log),
        "anew": backends_used(anew),
        "ratio": ratio,
        "rule": [rule.backend, sorted(rule.measured)] if rule else None,
        "second": backends_used(second),
    }


def times(call: Callable[..., object], *args: Any, **more: Any) -> float:
    began = time.perf_counter()
    call(*args, **more)
    return time.perf_counter() - began


@needs_mpi
def test_a_job_with_a_wrong_table_recovers_and_the_next_one_starts_right(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(SLOW_TABLE)
    for result in run_ranks(recover, 2, args=[str(tmp_path)]):
        value = result.value
        assert value["used"][:32] == ["slow"] * 32
        assert value["used"][:144].count("quick") == 6
        assert in_charge(value["used"][-64:]) == "quick"
        assert value["ratio"] <= 1.05
        assert value["rule"] == ["quick", ["quick", "slow"]]
        assert value["second"] == ["quick", "slow"]  # nothing was learnt of the other size
        assert value["anew"] == ["quick"] * 40
        assert value["resumed"] == ["quick"] * 40 + ["slow"]
        assert value["kept"]
    assert (tmp_path / "wrong.yaml").read_text() == SLOW_TABLE
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"wrong.yaml", "wrong.refined.yaml", "rank0/after", "rank1/after"}


def disagree(scenario: str) -> dict[str, Any]:
    """Run ranks with clocks that make each of them find another library the fastest."""
    clock = [0.0]
    chance = random.Random(own_rank())
    names = ["a", "b", "c"]
    favourite = names[own_rank() % 3]

    def spend(name: str) -> Callable[[], None]:
        def before() -> None:
            steady = 1.0 if name == favourite else 7.0
            clock[0] += steady if scenario == "steady" else chance.expovariate(1 / steady)

        return before

    for name in names:
        toy(name, spend(name))
    setattr(router, "perf_counter", lambda: clock[0])  # noqa: B010 - mypy knows no such name to assign
    with alone() as folder:
        comm = join(names)
        total = comm.size * (comm.size + 1) // 2
        with mcr.record() as log:
            for step in range(900):
                x = torch.full((8,), comm.rank + 1.0)
                mcr.all_reduce(x)
                parts = torch.zeros(comm.size)
                mcr.all_gather_into_tensor(parts, torch.tensor([comm.rank + 1.0]))
                assert (x == total).all(), step
                assert parts.tolist() == [rank + 1.0 for rank in range(comm.size)], step
        mcr.finalize()
        found = backends_used(log)
        return {"reduce": found[::2], "gather": found[1::2], "written": os.listdir(folder)}


@contextmanager
def alone() -> Iterator[Path]:
    """A working directory of this rank's own."""
    with tempfile.TemporaryDirectory(prefix="mcr-test-") as folder:
        os.chdir(folder)
        yield Path(folder)
        os.chdir("/")


@pytest.mark.short("2-steady")
@needs_mpi
@pytest.mark.parametrize(("ranks", "scenario"), [(2, "steady"), (3, "steady"), (3, "random")])
def test_ranks_that_measure_different_things_agree_at_every_call(ranks: int, scenario: str) -> None:
    traces = [result.value for result in run_ranks(disagree, ranks, args=[scenario])]
    written = [trace.pop("written") for trace in traces]
    assert written == [["mcr_plus.refined.yaml"], *[[]] * (ranks - 1)]
    assert all(trace == traces[0] for trace in traces)
    for trace in traces[0].values():
        assert len(trace) == 900
        assert set(trace) == {"a", "b", "c"}
        for calls in range(1, 240):  # until the first conclusions
            assert sum(name != "a" for name in trace[:calls]) <= calls / 16


def use_groups() -> dict[str, Any]:
    quick_and_slow()
    with alone():
        comm = join(["slow", "quick"], refined="learnt.yaml")
        pairs = [mcr.new_group([0, 2]), mcr.new_group([1, 2])]
        mine = [group for group in (comm, *pairs) if group.rank >= 0]
        used: dict[str, list[str]] = {}
        for _ in range(600):
            for group in mine:
                with mcr.record() as log:
                    x = torch.full((16,), 1.0 + group.rank)
                    group.all_reduce(x)
                    assert x.tolist() == [{2: 3.0, 3: 6.0}[group.size]] * 16
                used.setdefault(group.name, []).extend(backends_used(log))
        for group in mine[1:]:
            group.close()  # their results are written all the same
        mcr.finalize()
        written = Path("learnt.yaml")
        table = load_table(written) if written.exists() else None
        queries = [Query("all_reduce", 64, ranks=ranks, ranks_per_node=ranks) for ranks in (2, 3, 4)]
        return {"used": used, "table": table and [lookup(table, query) for query in queries]}


@pytest.mark.long
@needs_mpi
def test_every_group_has_its_own_trials_and_rank_0_writes_those_of_its_own() -> None:
    values = [result.value for result in run_ranks(use_groups, 3)]
    for one in values:
        for name, trace in one["used"].items():
            assert in_charge(trace[-64:]) == "quick"
            assert all(trace == other["used"].get(name, trace) for other in values)
    assert sorted(len(value["used"]) for value in values) == [2, 2, 3]
    assert [value["table"] for value in values] == [["quick", "quick", "local"], None, None]


def bind_once(folder: str) -> dict[str, Any]:
    """Bind persistent operations during the trial and after it."""
    quick_and_slow()
    comm = join(["slow", "mpi"], refined=str(Path(folder, "goes-away", "table.yaml")))
    x = torch.zeros(2)
    early = mcr.persistent("all_reduce", x)
    with mcr.record() as log:
        for step in range(2400):
            x.fill_(comm.rank + step)
            if step % 3:
                early()
            else:
                early.start().wait()
            assert x.tolist() == [1.0 + 2 * step] * 2, step
        late = mcr.persistent("all_reduce", x)
        for step in range(20):
            x.fill_(comm.rank + step)
            late()
            assert x.tolist() == [1.0 + 2 * step] * 2, step
            mcr.all_reduce(x)
            assert x.tolist() == [2.0 + 4 * step] * 2, step
    if comm.rank == 0:
        Path(folder, "goes-away").rmdir()
    mcr.finalize()
    early_run, late_run = (cast("partial[None]", op).func.__qualname__ for op in (early, late))
    return {
        "used": backends_used(log),
        "early": "bind_request" in early_run,
        "late": "bind_request" in late_run,
    }


@pytest.mark.long
@needs_mpi
def test_persistent_operations_are_tuned_or_keep_the_final_choice(tmp_path: Path) -> None:
    (tmp_path / "goes-away").mkdir()
    results = run_ranks(bind_once, 2, args=[str(tmp_path)])
    first, second = (result.value for result in results)
    assert first["used"] == second["used"]
    assert first["used"][-40:] == ["mpi"] * 40
    for value in (first, second):
        assert not value["early"]  # the slow library was in charge, which has no persistent operations
        assert value["late"]
    # A finished job does not fail if the table cannot be written.
    assert "the results of online refinement are lost: " in results[0].stderr
    assert "goes-away/table.yaml: cannot write" in results[0].stderr


def fail(rank: int) -> dict[str, Any]:
    """Run a trial with a rival that fails on one rank, or on all (-1)."""
    uses = [0]

    def break_down() -> None:
        uses[0] += 1
        if uses[0] == 4 and rank in (-1, own_rank()):
            raise RuntimeError("the library broke")

    toy("broken", break_down)
    with alone() as folder:
        comm = join(["mpi", "broken"])
        x = torch.ones(4)
        errors = [error for _ in range(200) if (error := _error_of(comm.all_reduce, x))]
        mcr.finalize()
        return {"errors": errors, "written": os.listdir(folder)}


def _error_of(call: Callable[..., object], *args: Any) -> str:
    try:
        call(*args)
    except mcr.BackendError as error:
        return str(error)
    return ""


@needs_mpi
@pytest.mark.parametrize("rank", [-1, 1])
def test_error_in_a_rival_is_raised_and_no_rank_hangs(rank: int) -> None:
    values = [result.value for result in run_ranks(fail, 2, args=[rank])]
    for index, value in enumerate(values):
        first, *later = value["errors"]
        assert "the library broke" in first
        if index != rank and rank != -1:
            assert "rank 1 has given up" in first
        assert later
        assert all("cannot be used after it has failed" in text for text in later)
        assert value["written"] == []


# -- untouched tables --------------------------------------------------------------------------------


def nowhere(folder: str) -> str:
    """Run on ranks: only rank 1 could write the refined table, and rank 1 does not write it."""
    os.chdir(Path(folder, str(own_rank())))
    try:
        join(["gloo"], refined="out/refined.yaml")
    except mcr.ConfigError as error:
        return str(error)
    return "joined"


def test_a_table_that_could_not_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1" / "out").mkdir(parents=True)
    for result in run_ranks(nowhere, 2, args=[str(tmp_path)], via="torch"):
        told = f"select: online: {tmp_path}/0/out is not a folder; expected 'refined: FILE'"
        assert result.value.startswith(told)


@Issue
def chain(message: Message) -> Any:
    raise AssertionError("not issued here")


class Chains:
    """The rest of a pipeline: one chain for all."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.bound: list[Signature] = []

    def __call__(self, signature: Signature) -> Any:
        self.bound.append(signature)
        return chain

    def through(self, pipeline: object, signature: Signature) -> Any:
        return self(signature)

    def moving(self, signature: Signature, instead: object) -> Any:
        return self(signature)

    def treatment(self, signature: Signature) -> Treatment:
        return Treatment(signature.compress)

    def note(self, text: str, details: object = None) -> None:
        self.notes.append(text)


def select(options: SelectOptions, ranks: int = 2) -> SelectStage:
    names = ["mpi", "gloo"] if ranks > 1 else ["local"]
    world = World(0, ranks, ("host",) * ranks, 10.0)
    backends = {name: backend_class(name) for name in names}
    return SelectStage(options, Context(load({}), world, Group("world", tuple(range(ranks)), 0), backends))


def test_off_returns_the_unchanged_chain() -> None:
    following = Chains()
    assert select(SelectOptions()).bind(PLAIN, following) is chain
    assert [signature.backend for signature in following.bound] == ["mpi"]
    assert "online" not in following.notes[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "gloo"},
        {"kind": "send", "reduce_op": None},
        {"kind": "recv", "reduce_op": None},
        {"kind": "barrier", "reduce_op": None, "dtype": None, "nbytes": 0},
        {"shape": (0,), "nbytes": 0},
        {"device": "cuda"},
        {"async_op": True},
        {"ranks": 1},
    ],
)
def test_untuned_operations_use_the_unchanged_chain(changes: dict[str, Any]) -> None:
    following = Chains()
    signature = PLAIN.replace(**changes)
    assert select(SelectOptions(online=True), signature.ranks).bind(signature, following) is chain
    assert len(following.bound) == 1
    assert "online" not in following.notes[0]


def test_tuned_operations_look_like_any_other() -> None:
    following = Chains()
    issue = select(SelectOptions(online=True)).bind(PLAIN, following)
    assert issue is not chain
    assert [signature.backend for signature in following.bound] == ["mpi", "gloo", "mpi"]
    assert following.bound[2].kind == "all_reduce"  # the exchange
    assert following.notes == [f"{following.notes[0].partition(';')[0]}; online refinement: mpi against gloo"]


def test_a_rival_that_refuses_is_left_out() -> None:
    class Refusing(Chains):
        def __call__(self, signature: Signature) -> Any:
            if signature.backend == "gloo":
                raise mcr.Unsupported("not this one")
            return super().__call__(signature)

    assert select(SelectOptions(online=True)).bind(PLAIN, Refusing()) is chain


def test_explain_lists_the_candidates_of_a_trial() -> None:
    config = {
        "version": 1,
        "backends": ["gloo", "mpi"],
        "pipeline": [{"select": {"online": True}}, {"dispatch": {}}],
    }
    steps = explain("all_reduce", 4096, config=config)["steps"]
    assert "online refinement: gloo against mpi" in steps[0]["decision"]
    steps = explain("send", 4096, config=config)["steps"]
    assert "online" not in steps[0]["decision"]


def test_the_table_itself_is_never_the_file_to_write(tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    table.write_text('version: 1\nrules:\n  - {kind: "*", bytes: 0.., backend: mpi}\n')
    options = {"table": str(table), "online": True, "refined": str(tmp_path / "." / "table.yaml")}
    config = {"version": 1, "pipeline": [{"select": options}, {"dispatch": {}}]}
    with pytest.raises(ConfigError, match=r"select.table: refined: .* is the table itself.*expected another"):
        explain("all_reduce", 4096, config=config)
