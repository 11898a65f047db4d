"""What the model of membership is made of: its rules, its setups, and the state of ranks and stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Final, Literal, NamedTuple

from mcr_plus.membership.rules import Decision, Process, Proposal, decide, members_after

Phase = Literal[
    "world", "left", "settle", "read", "hold", "pass", "arrive", "build", "count", "ask", "join", "gone"
]
Life = Literal["runs", "stopped", "dead"]
Look = tuple[tuple[int, str], ...]
"""Ranks that are lost, with their states, as one rank sees them."""


@dataclass(frozen=True)
class Rules:
    compare_set: bool = True
    majority: bool = True
    waits_for_living: bool = True
    marker: bool = True
    one_outcome: bool = True
    settles_again: bool = True
    same_attempt: bool = True
    requests_stay: bool = True
    knows_taken: bool = True
    minority_waits: bool = True
    tells_later: bool = True
    believes_error: bool = True
    passes_on: bool = True
    one_order: bool = True
    last_counts: bool = True


ALL_RULES: Final = Rules()


@dataclass(frozen=True)
class Setup:
    """What may happen in a job.

    Attributes:
        ranks: at the beginning.
        crashes, stops, failures: processes that die, that are stopped and continue, and store requests that
            fail after a proposal, at most.
        lies: looks that find a running rank silent, at most; by `liar` alone, if that is not None.
        newcomer: whether a process asks to be taken in. It gets the lowest rank.
        sides: side of a partition on which each rank is, for good. Each side has a store of its own.
        hosts: of each rank. From a build to the next world, ranks see what happens on their own host alone,
            where one of them lives.
        least: min_ranks of all calls.
        calls: how often a rank calls again after a refusal.
        done: operation up to which each rank has completed all in the first epoch; 0 where it is left out.
        silent_deaths: a dead rank may be found silent before it is found dead.
        early: deadlines pass at any moment.
        keepers: processes that have the values, to which decisions are written one after the other.
        keepers_die: of which so many die, at most; one is left.
        fine: every request to the store is a step of its own; otherwise those are one step of which other
            ranks see no more than one.
    """

    ranks: int = 3
    crashes: int = 0
    stops: int = 0
    failures: int = 0
    lies: int = 0
    liar: int | None = None
    newcomer: bool = False
    sides: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    least: int | None = None
    calls: int = 0
    done: tuple[int, ...] = ()
    silent_deaths: bool = False
    early: bool = False
    keepers: int = 1
    keepers_die: int = 0
    fine: bool = False


class Bid(NamedTuple):
    """A proposal; `done` is of the one group that there is."""

    lost: Look
    done: int | None


class Choice(NamedTuple):
    """A decision; `members` are processes of the next epoch."""

    stay: tuple[int, ...]
    join: bool
    members: tuple[int, ...]
    done: int | None
    refusal: str | None


class Attempt(NamedTuple):
    bids: tuple[Bid | None, ...] = ()
    decision: Choice | None = None
    copies: tuple[Choice | None, ...] = ()  # of the decision, by keeper, where there are several
    first: Choice | None = None  # the decision that the first of its readers has read


class Epoch(NamedTuple):
    """The keys of an epoch. `told`: a rank has failed its board, which those of the same world see."""

    leaving: bool = False
    told: bool = False
    arrived: tuple[tuple[int, int], ...] = ()  # ranks and exchanges
    outcome: Literal["", "made", "left"] = ""
    attempts: tuple[Attempt, ...] = ()
    went: tuple[tuple[int, ...], ...] = ()  # memberships with which ranks have gone on; not in the store


class Rank(NamedTuple):
    """One process."""

    phase: Phase
    life: Life = "runs"
    epoch: int = 0
    members: tuple[int, ...] = ()
    attempt: int = 0
    calls: int = 0
    done: int | None = None  # None: it has not made the world of its epoch
    look: Look = ()
    got: tuple[Bid | None, ...] = ()
    at: int = 0  # the proposal to read, the exchange of a build, or the keepers that a decision was passed to
    expired: bool = False
    decision: Choice | None = None
    heard: bool = False  # it has read the newcomer's request
    dropped: bool = False  # and knows that the newcomer has been taken in


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    stores: tuple[tuple[Epoch, ...], ...]
    asked: Literal["no", "counted", "written", "taken away"]
    crashes: int
    stops: int
    lies: int
    failures: int
    keepers: tuple[bool, ...] = (True,)  # whether they run


class Move(NamedTuple):
    """A step. `fair`: it happens at last, where the adversary may also never do what is not."""

    text: str
    after: State
    fair: bool = True


@cache
def _process(number: int, newcomer: int) -> Process:
    return Process(number, "", "", -1 if number == newcomer else number)


@cache
def proposal(bid: Bid, least: int | None) -> Proposal:
    return Proposal(dict(bid.lost), least=least, done={} if bid.done is None else {"world": bid.done})


@cache
def choose(
    members: tuple[int, ...],
    bids: tuple[Bid | None, ...],
    look: Look,
    newcomer: int | None,
    first_newcomer: int,
    expired: bool,
    least: int | None,
) -> Choice | None:
    """What the real rules say."""
    proposals = {rank: proposal(bid, least) for rank, bid in enumerate(bids) if bid is not None}
    joining = [] if newcomer is None else [_process(newcomer, first_newcomer)]
    found = decide(len(members), proposals, dict(look), joining, expired=expired)
    if found is None:
        return None
    after: tuple[int, ...] = ()
    if found.refusal is None:
        processes = [_process(member, first_newcomer) for member in members]
        after = tuple(process.pid for process in members_after(processes, found))
    assert Decision.read(found.plain()) == found
    return Choice(found.stay, bool(found.join), after, found.done.get("world"), found.refusal)


class Access:
    """Reads and writes parts of the states of one setup."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.newcomer = setup.ranks if setup.newcomer else None
        self.size = setup.ranks + setup.newcomer
        self.sides = setup.sides or (0,) * self.size

    def _with(self, state: State, who: int, **changes: Any) -> State:
        ranks = state.ranks
        return state._replace(ranks=(*ranks[:who], ranks[who]._replace(**changes), *ranks[who + 1 :]))

    def _epoch(self, state: State, who: int, number: int) -> Epoch:
        store = state.stores[self.sides[who]]
        return store[number] if number < len(store) else Epoch()

    def _write(self, state: State, who: int, **keys: Any) -> State:
        """Set keys of the epoch in which a rank is."""
        number, side = state.ranks[who].epoch, self.sides[who]
        store = state.stores[side]
        store += (Epoch(),) * (number + 1 - len(store))
        epoch = store[number]._replace(**keys)
        if epoch == store[number]:
            return state
        store = (*store[:number], epoch, *store[number + 1 :])
        return state._replace(stores=(*state.stores[:side], store, *state.stores[side + 1 :]))

    def _attempt(self, state: State, who: int) -> Attempt:
        attempts = self._epoch(state, who, state.ranks[who].epoch).attempts
        number = state.ranks[who].attempt
        return attempts[number] if number < len(attempts) else Attempt((None,) * self.size)

    def _note(self, state: State, who: int, **keys: Any) -> State:
        """Set keys of the attempt in which a rank is."""
        rank = state.ranks[who]
        attempts = self._epoch(state, who, rank.epoch).attempts
        attempts += (Attempt((None,) * self.size),) * (rank.attempt + 1 - len(attempts))
        changed = attempts[rank.attempt]._replace(**keys)
        attempts = (*attempts[: rank.attempt], changed, *attempts[rank.attempt + 1 :])
        return self._write(state, who, attempts=attempts)

    def sees(self, rank: Rank, who: int, member: int) -> bool:
        """Whether a rank is told of another one's process."""
        hosts = self.setup.hosts
        return not hosts or rank.epoch == 0 or rank.phase == "world" or hosts[who] == hosts[member]

    def is_observed(self, state: State, who: int) -> bool:
        """Whether another rank of the same host can tell others of this one's death."""
        hosts = self.setup.hosts
        return not hosts or any(
            rank.life == "runs" and rank.phase != "gone" and hosts[other] == hosts[who]
            for other, rank in enumerate(state.ranks)
            if other != who
        )

    # -- what a rank sees ------------------------------------------------------------------------------

    def _looks(self, state: State, who: int) -> Iterator[tuple[Look, int]]:
        """What a rank may see of the members of its epoch, and how many of them run and look silent."""
        setup, members = self.setup, state.ranks[who].members
        may_lie = state.lies and setup.liar in (None, who)
        each: list[tuple[str, ...]] = []
        for member in members:
            other = state.ranks[member]
            away = other.life != "runs" or other.phase == "gone"
            if member == who or (away and not self.sees(state.ranks[who], who, member)):
                each.append(("",))
            elif self.sides[member] != self.sides[who]:
                each.append(("silent",))
            elif state.ranks[who].expired and not setup.early:  # all has been seen by then
                each.append(("dead" if other.phase == "gone" else other.life.replace("runs", ""),))
            elif other.phase == "gone":
                each.append(("dead", "", "silent") if setup.silent_deaths else ("dead", ""))
            elif other.life == "stopped":
                each.append(("stopped", ""))
            else:
                each.append(("", "silent") if may_lie else ("",))
        for states in product(*each):
            lied = sum(
                found == "silent"
                and state.ranks[member].life == "runs"
                and state.ranks[member].phase != "gone"
                and self.sides[member] == self.sides[who]
                for member, found in zip(members, states, strict=True)
            )
            if lied <= state.lies:
                yield tuple((rank, found) for rank, found in enumerate(states) if found), lied


def seen(look: Look) -> str:
    return "seeing " + (", ".join(f"{rank} {state}" for rank, state in look) or "nothing")


def decided(choice: Choice) -> str:
    if choice.refusal is not None:
        return f"refused, {choice.refusal}"
    return f"{choice.members} go on" + ("" if choice.done is None else f", operation {choice.done} is done")
