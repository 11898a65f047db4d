"""Online refinement: select goes on measuring while the job runs, and writes down what it has learnt.

An operation that several choices can do has a `Trial`. Its calls go to the choice in charge, but for at most
one in sixteen, which goes to a rival; some are timed. At call numbers that all ranks know they share their
times by a small all_reduce, and some calls later all of them draw the same conclusion from the same numbers:
a rival is dropped, the choice changes, or the trial ends. From then on a call costs one Python call more than
without.

What counts is the time from the last rank's call to the last rank's end, since ranks that come early wait
for the others whatever the library. Within a host the ranks' clocks are one clock; between hosts each rank's
own time is taken, and the longest counts.

Nobody waits for the shared times as long as no rank is `LAG` calls of the operation ahead of another. A rank
that is waits for the others before its next call. That is why only synchronous operations are tuned: issuing
an asynchronous one never waits.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite, isqrt
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, Literal, NamedTuple

import torch

from mcr_plus.backends import table_sizes
from mcr_plus.config import SelectOptions
from mcr_plus.dispatch.work import Work
from mcr_plus.errors import ConfigError, Unsupported
from mcr_plus.interfaces import Context, Issue
from mcr_plus.message import Message, Signature
from mcr_plus.selection.editing import by_choice, counts_all_ranks, cover, intersection
from mcr_plus.selection.fingerprint import Fingerprint, fingerprint_here, merged
from mcr_plus.selection.table import Curves, Query, Table, TableKey, TableRule
from mcr_plus.selection.writing import save_table
from mcr_plus.tuning.statistics import confidence_rank
from mcr_plus.units import Range

_log = logging.getLogger("mcr_plus")

BLOCK: Final = 32  # calls, of which at most two go to a rival
TURN: Final = 2  # calls of a rival in a row, the last of them timed: the first ones after a change are slower
TIMED: Final = 4  # timed calls of a block: the rival's, and three of the choice in charge
TURNS: Final = 3  # blocks per rival between two exchanges, when all rivals are there
ROUNDS: Final = 12  # exchanges without a change after which a trial ends undecided
FEW: Final = 6  # below so many times, no order statistic encloses the median with 95 %
FACTOR: Final = 3.0  # a difference that few times can show
MARGIN: Final = 0.05  # a gain that is not worth a change
LAG: Final = 16  # calls between an exchange and its use
TAG: Final = "select.online"  # of the all_reduce by which ranks share times

_GOLDEN: Final = 0x9E3779B9  # 2³² over the golden ratio: its multiples fill a circle evenly
_LARGEST: Final = 1 << 40  # bytes; where no table says anything, sizes up to here are asked for
_LEAST_US: Final = 1e-3  # microseconds that a table can say

Verdict = Literal["faster", "no faster", "open"]


# -- the trial: plain data and arithmetic ---------------------------------------------------------------


class Turn(NamedTuple):
    """Which candidate a call uses, and where its time goes; None: it is not timed."""

    candidate: int
    slot: int | None


@dataclass
class Trial:
    """Which of its candidates the n-th call of an operation uses, and what is known of them.

    No clock and no communication. Everything but `local` is equal on all ranks, for it follows from the
    number of calls and from numbers that the ranks have agreed on. All fields are plain data.

    Of the first n calls at most n × `TURN` / `BLOCK` go to others than the candidate in charge, for every n.
    A trial of k candidates ends within `BLOCK` + k × `ROUNDS` × (`TURNS` × (k - 1) × `BLOCK` + lag) calls.

    Attributes:
        candidates: the choices (`name` or `name:algorithm`), first the one in charge at the start.
        lag: calls between an exchange and its use.
        chosen: index of the candidate in charge.
        rivals: indices of those still tried.
        former: indices of those that have been in charge; whoever comes back stays.
        calls: how many calls have been made.
        began: number of the call at which the present round began.
        exchanges: how often times have been agreed on.
        rounds: the same, since the candidate in charge changed.
        times: agreed seconds by candidate, since the candidate in charge changed.
        medians: the last median of each candidate in seconds; while it was in charge, if it ever was.
        local: this rank's clock in this round: at the start of each timed call, then at the end of each.
        frozen: the trial has ended.
    """

    candidates: tuple[str, ...]
    lag: int = LAG
    chosen: int = 0
    rivals: list[int] = field(default_factory=list)
    former: list[int] = field(default_factory=list)
    calls: int = 0
    began: int = BLOCK
    exchanges: int = 0
    rounds: int = 0
    times: list[list[float]] = field(default_factory=list)
    medians: list[float | None] = field(default_factory=list)
    local: list[float] = field(default_factory=list)
    frozen: bool = False

    @classmethod
    def of(cls, candidates: Sequence[str], lag: int = LAG) -> Trial:
        """A new trial of at least two candidates; the first is in charge."""
        count = len(candidates)
        trial = cls(tuple(candidates), lag, rivals=list(range(1, count)))
        trial.times, trial.medians = [[] for _ in candidates], [None] * count
        trial._clear()
        return trial

    @property
    def blocks(self) -> int:
        """How many blocks a round has."""
        return TURNS * (len(self.candidates) - 1)

    @property
    def exchange_at(self) -> int:
        """The call before which ranks share their times."""
        return self.began + self.blocks * BLOCK

    @property
    def apply_at(self) -> int:
        """The call before which the shared times are acted on."""
        return self.exchange_at + self.lag

    def schedule(self) -> dict[int, Turn]:
        """The calls of this round that are timed or go to a rival, by number.

        Where in its block such a call stands moves along evenly, so that no period of the program (layers
        of a step, say) always meets the same candidate.
        """
        turns: dict[int, Turn] = {}
        for block in range(0 if self.frozen else self.blocks):
            start = self.began + block * BLOCK
            place = ((start // BLOCK * _GOLDEN) % (1 << 32)) * (BLOCK - TURN + 1) >> 32
            rival = self.rivals[block % len(self.rivals)]
            for call in range(place, place + TURN):
                turns[start + call] = Turn(rival, None)
            for index in range(TIMED):
                call = (place + TURN - 1 + index * BLOCK // TIMED) % BLOCK
                turns[start + call] = Turn(self.chosen if index else rival, block * TIMED + index)
        return turns

    def take(self, exchange: int, slot: int, began: float, ended: float) -> None:
        """Note when a timed call of the round after `exchange` exchanges began and ended on this rank.

        Seconds on a clock that the ranks share, or with `began` 0. Ignored if the round is over.
        """
        if exchange == self.exchanges and not self.frozen:
            self.local[slot], self.local[len(self.local) // 2 + slot] = began, ended

    def contribution(self) -> list[float]:
        """What this rank gives to the exchange, of which the maximum over all ranks is taken."""
        return list(self.local)

    def agree(self, numbers: Sequence[float]) -> None:
        """Draw the conclusions from the maximum of all ranks' contributions; a new round begins."""
        half = len(numbers) // 2
        for turn in self.schedule().values():
            if turn.slot is not None:
                seconds = numbers[half + turn.slot] - numbers[turn.slot]
                if isfinite(seconds):  # some rank has timed it
                    self.times[turn.candidate].append(seconds)
        for candidate, times in enumerate(self.times):
            if times and candidate not in self.former:
                self.medians[candidate] = median(times)
        self.began = self.apply_at
        self.exchanges += 1
        self.rounds += 1
        self._decide()
        self._clear()

    def _decide(self) -> None:
        own = self.times[self.chosen]
        verdicts = {rival: compare(own, self.times[rival]) for rival in self.rivals}
        self.rivals = [rival for rival, verdict in verdicts.items() if verdict != "no faster"]
        faster = [rival for rival, verdict in verdicts.items() if verdict == "faster"]
        if faster:
            self._change(min(faster, key=lambda rival: median(self.times[rival])))
        self.frozen |= not self.rivals or self.rounds >= ROUNDS

    def _change(self, new: int) -> None:
        """Put another candidate in charge. All are timed anew: who is in charge may change their times."""
        old = self.chosen
        self.rivals.remove(new)
        if not _clearly_slower(self.times[new], self.times[old]):
            self.rivals.append(old)
        self.frozen = new in self.former
        self.former.append(old)
        self.chosen = new
        self.rounds = 0
        self.times = [[] for _ in self.candidates]

    def _clear(self) -> None:
        self.local = [-inf] * (2 * TIMED * self.blocks)


def compare(own: Sequence[float], rival: Sequence[float]) -> Verdict:
    """How a rival's median compares with that of the candidate in charge, if that is certain.

    `faster` and `no faster` are meant by more than `MARGIN`. Each median is enclosed with 95 % by order
    statistics; with fewer times than `FEW`, `FACTOR` must lie between all of them.
    """
    if min(len(own), len(rival)) < FEW:
        if _clearly_slower(own, rival):
            return "no faster"
        return "faster" if _clearly_slower(rival, own) else "open"
    (own_low, own_high), (low, high) = _interval(own), _interval(rival)
    if high < own_low and median(rival) < (1 - MARGIN) * median(own):
        return "faster"
    return "no faster" if low > (1 - MARGIN) * own_high else "open"


def _clearly_slower(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `other` takes more than `FACTOR` times as long as `one`; three times of each can show that."""
    if min(len(one), len(other)) < 3:
        return False
    return _interval(other)[0] > FACTOR * _interval(one)[1]


def _interval(times: Sequence[float]) -> tuple[float, float]:
    """Bounds of the median."""
    ordered = sorted(times)
    rank = confidence_rank(len(ordered))
    return ordered[rank], ordered[-1 - rank]


# -- the calls ------------------------------------------------------------------------------------------


def tunable(signature: Signature) -> bool:
    """Whether an operation's choice may change while the job runs.

    Not if a call or rule names it. Send and receive may not, because their two ends must choose alike, nor
    operations on a GPU, whose end the host does not see, nor asynchronous ones, whose issue must not wait.
    """
    fixed = signature.backend is not None or signature.is_p2p or signature.kind == "barrier"
    waits = not signature.async_op and signature.device == "cpu"
    return waits and not fixed and signature.ranks > 1 and signature.nbytes != 0


class Router:
    """Sends the calls of one operation to the candidates of its trial.

    `issue` is what the stage hands out. `chains` are the bound candidates; `share` issues the exchange.
    """

    def __init__(
        self,
        trial: Trial,
        chains: Sequence[Issue],
        share: Callable[[torch.Tensor], Work],
        *,
        one_clock: bool,
    ) -> None:
        self.trial = trial
        self._chains = chains
        self._runs = [getattr(chain, "run", None) or partial(_run, chain) for chain in chains]
        self._share = share
        self._shared: tuple[Work, torch.Tensor] | None = None
        self._one_clock = one_clock
        self._turns = trial.schedule()
        self._usual = Turn(trial.chosen, None)
        self._next = trial.exchange_at
        self._issue: Issue = self._try_issue
        self._run: Callable[[Message], None] = self._try_run
        self.issue = self._entry()
        self._show_operation()

    def _entry(self) -> Issue:
        def issue(message: Message) -> Work:
            return self._issue(message)

        def run(message: Message) -> None:
            self._run(message)

        issue.run = run  # type: ignore[attr-defined]
        return issue

    def _show_operation(self) -> None:
        """As every chain does; a persistent operation that is bound now stays with the choice of now."""
        operation = getattr(self._chains[self.trial.chosen], "operation", None)
        self.issue.operation = operation  # type: ignore[attr-defined]

    def _try_issue(self, message: Message) -> Work:
        turn = self._turn()
        if turn.slot is None or message.after is not None:
            work = self._chains[turn.candidate](message)
        else:
            began = perf_counter()
            work = self._chains[turn.candidate](message)
            work.then(partial(self._take, self.trial.exchanges, turn.slot, began))
        self.trial.calls += 1  # only now: a call that is refused is none
        return work

    def _try_run(self, message: Message) -> None:
        turn = self._turn()
        if turn.slot is None:
            self._runs[turn.candidate](message)
        else:
            began = perf_counter()
            self._runs[turn.candidate](message)
            self._take(self.trial.exchanges, turn.slot, began)
        self.trial.calls += 1

    def _take(self, exchange: int, slot: int, began: float) -> None:
        ended = perf_counter()
        self.trial.take(exchange, slot, *((began, ended) if self._one_clock else (0.0, ended - began)))

    def _turn(self) -> Turn:
        if self.trial.calls == self._next:
            self._step()
        return self._turns.get(self.trial.calls, self._usual)

    def _step(self) -> None:
        """Share times, or act on what was shared: before the same call on all ranks."""
        if self._shared is None:
            values = torch.tensor(self.trial.contribution(), dtype=torch.float64)
            self._shared = self._share(values), values
            self._next = self.trial.apply_at
        else:
            self._settle(*self._shared)

    def _settle(self, work: Work, values: torch.Tensor) -> None:
        work.wait()
        self._shared = None
        trial = self.trial
        trial.agree(values.tolist())
        self._turns, self._usual = trial.schedule(), Turn(trial.chosen, None)
        self._next = trial.exchange_at
        self._show_operation()
        if trial.frozen:
            self._issue, self._run = self._chains[trial.chosen], self._runs[trial.chosen]

    def finish(self) -> None:
        """At the end of the job: count what was shared and not yet used."""
        if self._shared is not None and self._shared[0].is_completed():
            self._settle(*self._shared)


def _run(chain: Issue, message: Message) -> None:
    chain(message).wait()


class Refinement:
    """Online refinement for one select stage: its trials, and the file that they are written to."""

    def __init__(self, options: SelectOptions, context: Context, table: Table | None) -> None:
        """Raises `ConfigError` if the file is the table itself."""
        self.table = table
        self.path = _target(options)
        self.writes = context.world.rank == 0
        self._world = context.world
        self._found = {} if context.runtime is None else context.runtime.found
        self._settled: dict[str, Learnt] = {}  # by another job, or before signatures were forgotten
        self._hosts = {context.world.hosts[rank] for rank in context.group.ranks}
        self._trials: list[tuple[Router, Query, Callable[[int], str | None]]] = []

    def bind(
        self,
        signature: Signature,
        candidates: Sequence[str],
        query: Query,
        *,
        place: Callable[[str, Signature], Issue],
        prefer: Callable[[Signature], str],
    ) -> Issue:
        """The callable that issues an operation by one of its candidates; the first is in charge.

        `query`: the operation as a table sees it. `place` binds an operation to a choice; a rival that it
        refuses is left out. `prefer` chooses where no table does.
        """
        bound = {candidates[0]: place(candidates[0], signature)}
        for rival in candidates[1:]:
            with suppress(Unsupported):  # on all ranks alike
                bound[rival] = place(rival, signature)
        if len(bound) == 1:
            return bound[candidates[0]]

        def default(size: int) -> str | None:
            try:
                return prefer(signature.replace(nbytes=size))
            except Unsupported:
                return None

        earlier = self._found.get(name := _name(query, bound), {})
        if earlier.get("choice") in bound:
            choice = earlier["choice"]
            if earlier.get("ended"):
                self._settled[name] = Learnt(query, choice, earlier.get("us", {}), default)
                return bound[choice]
            bound = {choice: bound[choice], **bound}
        trial = Trial.of(list(bound))
        sharing = _sharing(signature, len(trial.local))
        share = place(prefer(sharing), sharing)
        router = Router(
            trial,
            list(bound.values()),
            lambda values: share(Message(sharing, (values,), (values,))),
            one_clock=len(self._hosts) == 1,
        )
        self._trials.append((router, query, default))
        return router.issue

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """What trials have found out so far, for another job: equal on all ranks, plain data."""
        state = {
            name: {"choice": each.choice, "us": dict(each.measured), "ended": True}
            for name, each in self._settled.items()
        }
        for router, query, _ in self._trials:
            trial = router.trial
            choice = trial.candidates[trial.chosen]
            state[_name(query, trial.candidates)] = {
                "choice": choice, "us": _microseconds(trial), "ended": trial.frozen
            }  # fmt: skip
        return {**self._found, **state}

    def forget(self) -> None:
        """End the trials; those that come again go on with what was found out, the rest is kept."""
        self._found.update(self.state)
        for router, query, default in self._trials:
            if known := _microseconds(router.trial):
                choice = router.trial.candidates[router.trial.chosen]
                self._settled[_name(query, router.trial.candidates)] = Learnt(query, choice, known, default)
        self._trials.clear()

    def learnt(self) -> list[Learnt]:
        """What this stage's trials have found out, those that have not ended included."""
        found = dict(self._settled)
        later = []
        for router, query, default in self._trials:
            router.finish()
            trial = router.trial
            if known := _microseconds(trial):
                found.pop(_name(query, trial.candidates), None)
                later.append(Learnt(query, trial.candidates[trial.chosen], known, default))
        return [*found.values(), *later]

    def fingerprint(self) -> dict[str, tuple[str, ...]]:
        """The facts of this job."""
        nodes = Counter(self._world.hosts)
        return fingerprint_here(
            self._world.libraries,
            ranks=self._world.size,
            nodes=len(nodes),
            ranks_per_node=max(nodes.values()),
        )


def _name(query: Query, candidates: Iterable[str]) -> str:
    """An operation and its candidates, in whatever order."""
    return f"{' '.join(map(str, query))}: {', '.join(sorted(candidates))}"


def _microseconds(trial: Trial) -> dict[str, float]:
    """The last median of each candidate that has one."""
    pairs = zip(trial.candidates, trial.medians, strict=True)
    return {name: seconds * 1e6 for name, seconds in pairs if seconds is not None}


def _sharing(signature: Signature, numbers: int) -> Signature:
    """The all_reduce of that many numbers over the ranks of an operation."""
    return Signature(
        "all_reduce", torch.float64, (numbers,), numbers * torch.float64.itemsize, signature.group,
        signature.ranks, reduce_op="MAX", tag=TAG, async_op=True,
    )  # fmt: skip


def check_target(options: SelectOptions) -> None:
    """Raise `ConfigError` if the refined table could not be written: now, not at the end of the job."""
    if options.online:
        folder = _target(options).parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            what = "cannot be written to" if folder.is_dir() else "is no folder"
            raise ConfigError(
                f"select: online: {folder} {what}; expected 'refined: FILE' in a folder that can be written"
            )


def _target(options: SelectOptions) -> Path:
    """The file to write; relative paths are relative to the working directory of now."""
    source = None if options.table is None else options.table.resolve().absolute()
    if options.refined is None:
        folder, stem = (Path.cwd(), "mcr_plus") if source is None else (source.parent, source.stem)
        return folder / f"{stem}.refined.yaml"
    target = Path(options.refined).absolute()
    if source is not None and options.table is not None and target.resolve() == source.resolve():
        raise ConfigError(
            f"{options.table.place}: refined: {options.refined!r} is the table itself, which is never "
            "overwritten; expected another file"
        )
    return target


# -- the refined table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learnt:
    """What a trial found out: the choice, and median microseconds by candidate.

    `default` gives the choice for operations of other sizes where no table has a rule, None if none can.
    """

    query: Query
    choice: str
    measured: Mapping[str, float]
    default: Callable[[int], str | None]

    @property
    def key(self) -> TableKey:
        """The operations that a rule cannot tell from this one but by their size."""
        query = self.query
        ranks, nodes, per_node = (
            Range(number, number + 1) for number in (query.ranks, query.nodes, query.ranks_per_node)
        )
        return TableKey(query.kind, query.dtype, ranks, nodes, per_node, query.device, None, query.async_op)


def save_refined(refinements: Sequence[Refinement]) -> None:
    """Write what was learnt, all of one path in one file; on rank 0, which knows its own groups' trials.

    Without anything learnt there is no file. If one cannot be written, a warning says so.
    """
    writing = [each for each in refinements if each.writes]
    for path in dict.fromkeys(each.path for each in writing):
        ours = [each for each in writing if each.path == path]
        learnt = [entry for each in ours for entry in each.learnt()]
        if learnt:
            table = ours[0].table
            source = "no table" if table is None else Path(table.name).name
            told = f"{source}, refined while a job ran (select: {{online: true}})"
            try:
                save_table(refined_table(table, learnt, ours[0].fingerprint()), path, comment=[told])
            except ConfigError as error:  # the job has done its work: it does not fail over this
                _log.warning("what online refinement has learnt is lost: %s", error)


def refined_table(table: Table | None, learnt: Sequence[Learnt], here: Fingerprint) -> Table:
    """`table` with what was learnt laid over it, for operations like those that were seen and no others.

    They get rules of their own, before all that held for them: as before, but for the octave of each size
    seen (from a power of two to the next; two sizes of one octave part at their geometric mean).
    """
    before = () if table is None else table.rules
    groups: dict[TableKey, list[Learnt]] = {}
    # A kind covers its vector form, so that stands first.
    for entry in sorted(learnt, key=lambda entry: not entry.query.kind.endswith("_v")):
        groups.setdefault(entry.key, []).append(entry)
    places: dict[int, list[TableRule]] = {}
    for key, entries in groups.items():
        place = next((index for index, rule in enumerate(before) if rule.key.includes(key)), len(before))
        places.setdefault(place, []).extend(_refined_rules(before, entries))
    rules: list[TableRule] = []
    for index, rule in enumerate(before):
        rules += [*places.get(index, ()), *([] if rule.key in groups else [rule])]
    rules += places.get(len(before), ())
    if table is None:
        return Table(tuple(rules), fingerprint=here)
    return replace(table, rules=tuple(rules), fingerprint=merged([table.fingerprint, here]))


def _refined_rules(before: Sequence[TableRule], learnt: Sequence[Learnt]) -> list[TableRule]:
    """The rules of one key: those learnt, over those that held before, neighbours with one choice joined."""
    first = learnt[0]
    old = [rule for rule in before if rule.key.includes(first.key)] or _preference(first)
    new = [
        rule
        for size, sizes in _ranges({entry.query.nbytes for entry in learnt}).items()
        for rule in _learnt_rule(first.key, sizes, [e for e in learnt if e.query.nbytes == size])
    ]
    figures: dict[str, dict[int, float]] = {}
    for sizes, rule in (*cover(old, first.key), *((rule.sizes, rule) for rule in new)):
        for choice, curve in _figures(rule, sizes, first.query).items():
            figures.setdefault(choice, {}).update(curve)
    whole = TableRule("", 0, None, first.key, figures)
    return [
        TableRule(
            rule.backend, sizes.lo, sizes.hi, first.key, _figures(whole, sizes, first.query), rule.reason
        )
        for sizes, rule in by_choice(cover([*new, *old], first.key))
        if rule is not None
    ]


def _preference(entry: Learnt) -> list[TableRule]:
    """What is chosen where no table says anything, by octave; a size that none can do as the one below."""
    starts = [0, *(1 << power for power in range(1, _LARGEST.bit_length()))]
    rules, choice = [], entry.choice
    for lo, hi in zip(starts, [*starts[1:], None], strict=True):
        choice = entry.default(lo) or choice
        rules.append(TableRule(choice, lo, hi, entry.key))
    return rules


def _learnt_rule(key: TableKey, sizes: Range, learnt: Sequence[Learnt]) -> Iterator[TableRule]:
    """What was learnt of one size; where operations that a rule cannot tell apart differ, medians decide.

    It holds for those of `sizes` that the choice is for, which may be none.
    """
    names = dict.fromkeys(name for entry in learnt for name in entry.measured)
    us = {name: median(entry.measured[name] for entry in learnt if name in entry.measured) for name in names}
    choice = min({entry.choice: None for entry in learnt}, key=lambda choice: us.get(choice, inf))
    size = learnt[0].query.nbytes
    measured: Curves = {}
    if size is not None:
        measured = {name: {size: max(us[name], _LEAST_US)} for name in names}
    if (held := intersection(sizes, table_sizes(choice))) is not None:
        yield TableRule(choice, held.lo, held.hi, key, measured)


def _ranges(sizes: Iterable[int | None]) -> dict[int | None, Range]:
    """The range of each size, smaller ones first, of which the first that covers a size counts.

    It is the octave, up to the geometric mean with the next size if that is nearer; everything for operations
    without a size.
    """
    ordered = sorted(size for size in sizes if size is not None)
    if not ordered:
        return {None: Range(0)}
    found: dict[int | None, Range] = {}
    for size, above in zip(ordered, [*ordered[1:], None], strict=True):
        lo = 1 << size.bit_length() >> 1
        hi = max(2 * lo, 1)
        found[size] = Range(lo, hi if above is None else min(hi, isqrt(size * above) + 1))
    return found


def _figures(rule: TableRule | None, sizes: Range, query: Query) -> Curves:
    """What was measured in a range of total bytes, its ends included."""
    if rule is None:
        return {}
    unit = query.ranks if rule.key.basis == "per_rank" and counts_all_ranks(query.kind) else 1
    found = {}
    for choice, curve in rule.measured.items():
        points = {size * unit: us for size, us in curve.items()}
        inside = {s: us for s, us in points.items() if sizes.lo <= s and (sizes.hi is None or s <= sizes.hi)}
        if inside:
            found[choice] = inside
    return found
