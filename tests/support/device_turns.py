"""Turns of simulated ranks, which are threads that run one at a time, and the states between two turns.

A turn goes from one pause of a rank to its next one. Whose turn it is, and whether a query of a rank finds
work of a device done, is decided by `Decisions`, so that a run can be repeated and its alternatives be tried.

Two things keep the number of runs small where all orders are tried (`interleavings`). A state is described by
what can matter later, not by how it came about: each rank's place in its program, what it has found done, and
what is in its streams, with what the rank had found done at each entry. And of a turn that touches nothing
that other ranks touch (`Machine.touch`), no other order is tried: it commutes with all turns of theirs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from device_model import FakeStreams, Machine, Place


class Decisions:
    """What is decided in a run: the first decisions are `given`, later ones `pick` chooses.

    `made`: the choices, each with the number of alternatives. `turns`: the decisions about whose turn it is,
    by their places in `made`, each with whether the turn has touched what other ranks touch.
    """

    def __init__(self, given: Sequence[int] = (), pick: Callable[[int], int] = lambda _: 0) -> None:
        self.given = given
        self.pick = pick
        self.made: list[tuple[int, int]] = []
        self.turns: dict[int, bool] = {}

    def __call__(self, count: int) -> int:
        if count == 1:
            return 0
        number = len(self.made)
        choice = self.given[number] if number < len(self.given) else self.pick(count)
        self.made.append((choice, count))
        return choice


class Stuck(Exception):
    """No rank can go on."""


class Known(Exception):
    """The run has come to a state from which another run has gone on."""


class Turns:
    """Whose turn it is. `ends_in`: is given each state with the number of decisions, before a turn.

    A run for which it returns true ends there, with `Known`.

    A query does not find done what could be done at most `most_denied` times: in a whole run, after which it
    does, or with `forgets` in each turn, after which it does not before the next turn.
    """

    def __init__(self, machine: Machine, decide: Decisions) -> None:
        self.most_denied = 1
        self.forgets = False
        self.opening = 0  # ranks that open their groups, in one order, before anything is decided
        self.machine = machine
        self.decide = decide
        self.back = threading.Semaphore(0)
        self.actors: list[Actor] = []
        self.ended: Exception | None = None
        self.now: Actor | None = None
        self.ends_in: Callable[[Hashable, int], bool] | None = None
        self.courses: list[Hashable] = []  # of ranks that have ended

    def run(self) -> None:
        """Until all programs have ended. Raises `Stuck`, or what a rank raised."""
        machine = self.machine
        while alive := [actor for actor in self.actors if not (actor.ended or actor.is_helper)]:
            able = [actor for actor in self.actors if actor.is_able()]
            if not able:
                before = machine.version
                machine.pass_time()
                if machine.version == before:
                    self.end(Stuck(f"{len(alive)} ranks wait, and nothing can run"))
                continue
            free = self.ended is None and not self.opening
            if free and self.ends_in is not None:
                state = self.state(able)
                if self.ends_in(state, len(self.decide.made)):
                    self.end(Known())
            number = len(self.decide.made)
            self.now = able[self.decide(len(able)) if free and self.ended is None else 0]
            home = self.now.home
            self.now.touched = any(
                each.home is home and each.is_awake for each in self.actors if each is not self.now
            )
            self.now.go.release()
            self.back.acquire()
            if free and self.ended is None and len(able) > 1:
                self.decide.turns[number] = self.now.touched
            if self.now.ended and self.ended is None and not self.now.is_helper:
                self.courses.append((self.actors.index(self.now), self.now.course()))
            if self.now.error is not None and self.ended is None:
                self.end(self.now.error)
        error, self.ended = self.ended, self.ended or Stuck("the programs have ended")
        for helper in self.actors:
            if not helper.ended:
                helper.go.release()
                self.back.acquire()
        if error is not None:
            raise error

    def state(self, able: Sequence[Actor]) -> Hashable:
        """All that can matter from here on."""
        return tuple((each.state(), each in able) for each in self.actors)

    def end(self, error: Exception) -> None:
        """Make all ranks raise where they are."""
        self.ended = error
        for actor in self.actors:
            actor.wake()


class Actor:
    """A thread that runs when it is its turn: of a rank, whose streams are those of `home`.

    `is_helper`: not that of its program; it sleeps until it is woken.
    """

    def __init__(
        self,
        turns: Turns,
        function: Callable[[], None],
        name: str,
        home: FakeStreams,
        *,
        is_helper: bool = False,
    ) -> None:
        self.turns = turns
        self.home = home
        self.is_helper = self.sleeps = is_helper
        self.go = threading.Semaphore(0)
        self.moved = True  # whether its last turn has changed anything, so that another one may as well
        self.seen = 0  # what ranks share, as its last turn has left it: `Machine.common`
        self.touched = False  # whether the turn has read or written what others may write or read
        self.ended = False
        self.error: Exception | None = None
        self.denied = dict[Hashable, int]()  # how often a query has not found done what it could have
        self.noted = set[Hashable]()
        self.reached = dict[Hashable, int]()  # what it is ordered behind: the last place in each sequence
        self._place: Hashable = "begin"
        self._statements = 0
        self._function = function
        turns.actors.append(self)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.go.acquire()
        self._began = self.turns.machine.version
        try:
            if self.turns.ended is None:
                self._function()
        except Exception as error:
            self.error = error
        self.ended = True
        self.turns.back.release()

    @property
    def is_awake(self) -> bool:
        """Whether it can have a turn without being woken by its rank."""
        return not (self.ended or self.sleeps)

    def is_able(self) -> bool:
        """Whether it can have a turn that may change anything."""
        return self.is_awake and (self.moved or self.seen != self.turns.machine.common)

    def wake(self) -> None:
        """Let it have a turn."""
        self.sleeps, self.moved = False, True

    def opens(self) -> None:
        """Wait until all ranks have opened their groups."""
        turns = self.turns
        turns.opening -= 1
        turns.machine.share()
        while turns.opening:
            self.yields(paused=True)
        self.yields(paused=False)

    def reaches(self, place: Place) -> None:
        """Note a place that the host is ordered behind."""
        sequence, count = place
        self.noted.add(place)
        self.reached[sequence] = max(count, self.reached.get(sequence, 0))

    def clock(self) -> Hashable:
        """What the host is ordered behind."""
        return frozenset(self.reached.items())

    def finds(self, what: Hashable) -> bool:
        """Whether a query finds done what may be done by now."""
        if self.turns.opening:
            return True
        times = self.denied.get(what, 0)
        if times == self.turns.most_denied:
            return not self.turns.forgets
        if self.turns.decide(2):
            return True
        self.denied[what] = times + 1
        self.turns.machine.version += 1
        return False

    def state(self) -> Hashable:
        """What can matter later: where it is, what it has noted, and what is in its streams.

        Nothing races with a rank that has ended, but others may wait for what is in its streams.
        """
        if self.ended:
            return "end", tuple(stream.shape for stream in self.home.streams)
        denied = None if self.turns.forgets else frozenset(self.denied)
        return self._place, self._statements, denied, self.course()

    def course(self) -> Hashable:
        """What the rank has come upon, and what it has put into its streams in which order."""
        return frozenset(self.noted), tuple(stream.digest for stream in self.home.streams)

    def yields(self, *, paused: bool) -> None:
        """Give up the turn; `paused`: until something changes."""
        machine = self.turns.machine
        self.moved = not paused or machine.version != self._began
        self.seen = machine.common
        self._statements += not paused
        if self.turns.ends_in is not None:
            self._place = _place_of(sys._getframe(1))
        self.turns.back.release()
        self.go.acquire()
        self._began = machine.version
        if self.turns.forgets:
            self.denied.clear()
        if self.turns.ended is not None:
            raise Stuck("the run has ended")


def _place_of(frame: Any) -> Hashable:
    """Where a thread is in its program."""
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append((code.co_name, code.co_firstlineno, frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(lines))
