"""Turns of simulated ranks, threads that run one at a time, and the states between two turns.

A turn lasts from one pause of a rank to its next one. `Decisions` decides whose turn it is, and whether a
rank's query finds a device's work done, so that a run can be repeated and its alternatives be tried.

Two rules keep the number of runs small when all orders are tried (`interleavings`). A state has only facts
that can matter later: each rank's place in its program, the work that the rank has found done, and the
entries of its streams, each with the work that the rank had found done by then. And if the order of a turn
and some ranks' turns does not matter, only one of the orders is tried (`Turn`).

The order of posts, stream entries and calls to a library does not matter, although other ranks look for them:
a look may always be answered with "not yet" once more, so a run in which an entry comes early has all courses
of a run in which it comes late. The order of a look in vain matters: a rank that can supply the missing entry
may change the look. So turns with such looks are put off (`Vain`) while another rank can run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unit.devices.device_model import Shared

if TYPE_CHECKING:
    from unit.devices.device_model import FakeStreams, Machine, Place


State = tuple[Hashable, tuple[Hashable, ...]]
"""What programs do from here on follows from the first part; the races of a rank, from its second one too."""


@dataclass
class Turn:
    """A decision about whose turn it is, of actors `able`, by their numbers in the order of the choices.

    `needs`: for each actor, the actors whose turns must keep their order with its next turn. It is known for
    actors that are not able, because they have looked in vain for an action of the needed actors, and for
    every actor after a turn.
    """

    able: list[int]
    needs: dict[int, set[int]]

    def needed(self, first: int) -> set[int]:
        """Return the smallest set with an actor and all actors that its members need.

        No sequence of other actors' turns has an order that matters with the next turn of a member.
        """
        found, todo = set[int](), [first]
        while todo:
            each = todo.pop()
            if each not in found:
                found.add(each)
                todo += self.needs.get(each, ())
        return found


class Decisions:
    """The decisions of a run: the first ones are `given`, later ones `pick` chooses.

    `made`: the choices, each with the number of alternatives. `turns`: the choices of the next turn, by their
    places in `made`. From place `free` on (None: never), a turn that looks in vain ends the run.
    """

    def __init__(
        self,
        given: Sequence[int] = (),
        pick: Callable[[int], int] = lambda _: 0,
        free: int | None = None,
    ) -> None:
        self.given = given
        self.pick = pick
        self.free = free
        self.made: list[tuple[int, int]] = []
        self.turns: dict[int, Turn] = {}

    def __call__(self, count: int) -> int:
        if count == 1:
            return 0
        number = len(self.made)
        choice = self.given[number] if number < len(self.given) else self.pick(count)
        self.made.append((choice, count))
        return choice


class Stuck(Exception):
    """No rank can continue."""


class Vain(Exception):
    """A turn has looked for an entry in vain, at the decision of this number, while others can continue."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Known(Exception):
    """The run has reached a state from which another run has continued."""


class Turns:
    """Gives the ranks their turns. `ends_in` gets each state with the number of decisions, before a turn.

    If it returns true, the run ends there, with `Known`.

    At most `most_denied` times a query denies work that could be done: in a whole run, and later queries find
    the work done; or, with `forgets`, in each turn, and later queries of the turn wait for the next one.
    """

    def __init__(self, machine: Machine, decide: Decisions) -> None:
        self.most_denied = 1
        self.forgets = False
        self.only: int | None = None  # the rank that runs last; only it learns late
        self.opening = 0  # ranks that open their groups, in one order, before anything is decided
        self.machine = machine
        self.decide = decide
        self.back = threading.Semaphore(0)
        self.actors: list[Actor] = []
        self.ended: Exception | None = None
        self.now: Actor | None = None
        self.ends_in: Callable[[State, int], bool] | None = None
        self.courses: list[tuple[int, Hashable]] = []  # of ranks that have ended

    def run(self) -> None:
        """Run until all programs have ended. Raises `Stuck`, or the error of a rank."""
        machine = self.machine
        while alive := [actor for actor in self.actors if not (actor.ended or actor.is_helper)]:
            able = [actor for actor in self.actors if actor.is_able()]
            if not self.opening:
                able.sort(key=lambda actor: (actor.home.device == self.only, bool(actor.looked)))
            if not able:
                before = machine.version
                machine.pass_time()
                if machine.version == before:
                    self.end(Stuck(f"{len(alive)} ranks wait, and nothing can run"))
                continue
            now = self._has_a_turn(able)
            if now.ended and self.ended is None and not now.is_helper:
                self.courses.append((self.actors.index(now), now.course()))
            if now.error is not None and self.ended is None:
                self.end(now.error)
        error, self.ended = self.ended, self.ended or Stuck("the programs have ended")
        for helper in self.actors:
            if not helper.ended:
                helper.go.release()
                self.back.acquire()
        if error is not None:
            raise error

    def _has_a_turn(self, able: Sequence[Actor]) -> Actor:
        """Let one of several have its turn."""
        is_free = self.ended is None and not self.opening
        if is_free and self.ends_in is not None and self.ends_in(self.state(able), len(self.decide.made)):
            self.end(Known())
        number = len(self.decide.made)
        turn = self._turn(able)
        now = self.now = able[self.decide(len(able)) if is_free and self.ended is None else 0]
        needed = self._beside(now) if self.only in (None, now.home.device) else set()
        now.looked.clear()
        now.touched.clear()
        now.go.release()
        self.back.acquire()
        if is_free and self.ended is None and len(able) > 1:
            if self.only is None:
                needed |= self.those_of(now.looked | now.touched)
            turn.needs[self.actors.index(now)] = needed
            self.decide.turns[number] = turn
            if now.looked and self.decide.free is not None and number >= self.decide.free:
                self.end(Vain(number))
        return now

    def _beside(self, now: Actor) -> set[int]:
        """Return the threads of the same rank that can have turns, including this one."""
        return {at for at, each in enumerate(self.actors) if each.home is now.home and each.is_awake}

    def _turn(self, able: Sequence[Actor]) -> Turn:
        """Return the actors that can have a turn, and the needs of the others."""
        needs = dict[int, set[int]]()
        for at, each in enumerate(self.actors):
            if not each.ended and each not in able and self.only is None:
                at_home = {number for number, other in enumerate(self.actors) if other.home is each.home}
                needs[at] = self.those_of(each.looked) | at_home
        return Turn([self.actors.index(each) for each in able], needs)

    def those_of(self, shared: Iterable[Shared]) -> set[int]:
        """Return the actors of the ranks that may change an object."""
        found = set[int]()
        for each in shared:
            for at, actor in enumerate(self.actors):
                if each.ranks is None or actor.home.device in each.ranks:
                    found.add(at)
        return found

    def state(self, able: Sequence[Actor]) -> State:
        """Return all facts that can matter from here on: places in programs, and ranks' possible races."""
        control = tuple((each.state(), each in able) for each in self.actors)
        return control, tuple(each.history() for each in self.actors)

    def end(self, error: Exception) -> None:
        """Make all ranks raise where they are."""
        self.ended = error
        for actor in self.actors:
            actor.wake()


class Actor:
    """A thread of a rank that runs when it has its turn, with the streams of `home`.

    `is_helper`: it is not the program's thread and sleeps until it is woken.
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
        self.moved = True  # whether its last turn has changed anything: then the next may, too
        self.seen = 0  # `Machine.common`, as its last turn has left it
        self.looked = set[Shared]()  # the objects of its last turn's looks in vain
        self.touched = set[Shared]()  # other objects of that turn with an order that matters
        self._watched = dict[Shared, int]()  # how often this had changed then
        self.ended = False
        self.error: Exception | None = None
        self.denied = dict[Hashable, int]()  # how often a query has denied possible work
        self.noted = set[Hashable]()
        self.found = set[Hashable]()  # places that it has found done
        self.reached = dict[Hashable, int]()  # the last place before it in each sequence
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
        """Return whether it can have a turn without being woken by its rank."""
        return not (self.ended or self.sleeps)

    def is_able(self) -> bool:
        """Return whether it can have a turn that may change anything."""
        machine = self.turns.machine
        if not self.is_awake or self.moved:
            return self.is_awake
        changes = machine.changes
        return self.seen != machine.common or any(changes[each] != n for each, n in self._watched.items())

    def wake(self) -> None:
        """Let it have a turn."""
        self.sleeps, self.moved = False, True

    def opens(self) -> None:
        """Wait until all ranks have opened their groups."""
        turns = self.turns
        turns.opening -= 1
        turns.machine.common += 1
        while turns.opening:
            self.yields(paused=True)
        self.yields(paused=False)

    def reaches(self, place: Place) -> None:
        """Note a place that the host comes after."""
        sequence, count = place
        self.found.add(place)
        self.reached[sequence] = max(count, self.reached.get(sequence, 0))

    def clock(self) -> Hashable:
        """Return the places that the host comes after."""
        return frozenset(self.reached.items())

    def finds(self, what: Hashable) -> bool:
        """Return whether a query finds possible work done."""
        if self.turns.opening or self.turns.only not in (None, self.home.device):
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
        """Return its place, its notes, its order, and the entries of its streams."""
        shapes = tuple(stream.shape for stream in self.home.streams)
        if self.ended:
            return "end", shapes
        denied = None if self.turns.forgets else frozenset(self.denied)
        return self._place, self._statements, denied, frozenset(self.noted), self.clock(), shapes

    def history(self) -> Hashable:
        """Return its findings and its streams' entries, each with its order; nothing at the end."""
        return None if self.ended else self.course()

    def course(self) -> Hashable:
        """Return the rank's findings, and its streams' entries in their order."""
        return frozenset(self.noted | self.found), tuple(stream.digest for stream in self.home.streams)

    def yields(self, *, paused: bool) -> None:
        """Give up the turn; `paused`: until something changes."""
        machine = self.turns.machine
        self.moved = not paused or machine.version != self._began
        at_home = Shared(("rank", self.home.device))  # others of the rank look again
        machine.changes[at_home] += self.moved
        self._watched = {each: machine.changes[each] for each in (*self.looked, at_home)}
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
    """Return a thread's place in its program."""
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append((code.co_name, code.co_firstlineno, frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(lines))
