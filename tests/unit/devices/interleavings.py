"""All orders of the ranks' turns, and of the hosts' findings on devices, for small programs.

A run is repeated with other decisions until all have been tried, depth first. `explore(reduced=True)` leaves
out runs that can show nothing new (`device_turns`):

- A run ends if all relevant parts of its state have been continued from before (state hashing): the places of
  the programs, and the possible races of each rank. Different ranks' parts may come from different states,
  since memory belongs to one rank, and programs' actions follow from their places.
- Only orders of turns that may matter are tried: a persistent set (Godefroid,
  Partial-Order Methods, 1996; found on the way as in Flanagan and Godefroid, POPL 2005). No turn is put off
  for ever, since no state comes twice in a run.
- Turns that look in vain for other ranks' future work are put off while another turn is possible.
- The courses of one rank (`only`) do not depend on the times of other ranks' turns or on their answers: a
  later action of theirs is a later answer for that rank. So the others run as far as they can.
- Work of devices after the last query has one order: without a race all orders have the same result.

`reduced=False` tries everything, and checks the notion of states: from one state, or from the same places of
programs, the same decisions of the next turn lead to the same state. The `courses` of each rank must be the
same.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from unit.devices.device_programs import PROGRAMS, Program
from unit.devices.device_ranks import After, Job
from unit.devices.device_settings import Setting, problems_of
from unit.devices.device_turns import Decisions, Known, State, Stuck, Turn, Vain


@dataclass
class Explored:
    """`runs`: complete runs; `cut`: runs that reached a known state; `states`: the states before a turn.

    `known`: places of programs with a rank's possible races, by rank. `courses`: the findings and stream
    entries of ranks that have ended (`Actor`).
    """

    runs: int = 0
    cut: int = 0
    states: set[Hashable] = field(default_factory=set)
    known: set[Hashable] = field(default_factory=set)
    courses: set[tuple[int, Hashable]] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    is_complete: bool = True


@dataclass
class _Decision:
    """A decision on the path to the next try. `turn`: facts about the decision, if it chooses a turn."""

    choice: int
    count: int
    turn: Turn | None
    tried: list[int] = field(default_factory=list)  # before `choice`
    vain: list[int] = field(default_factory=list)  # put off

    def next(self, *, reduced: bool) -> int | None:
        """Return the next choice, or None after the last choice that may show something new."""
        if not reduced or self.turn is None:
            return self.choice + 1 if self.choice + 1 < self.count else None
        tried, able = [*self.tried, self.choice], self.turn.able
        needed = self.turn.needed(able[tried[0]])
        return next((at for at, each in enumerate(able) if each in needed and at not in tried), None)


def explore(
    setting: Setting,
    program: Program,
    size: int,
    *,
    most: int,
    reduced: bool = True,
    forgets: bool = True,
    after: After = "nothing",
    only: int | None = None,
) -> Explored:
    """Run a program in all orders, at most `most` times.

    `forgets`: a host may find nothing done as often as there is other work; otherwise once for each entry.
    `after`: when orders begin: once all ranks have opened their groups and connected, or have run the program
    once. `only`: try all courses of one rank while the others run as far as they can; impossible if orders
    begin at once, since entries of the store may not be found late.
    """
    explored = Explored()
    path: list[_Decision] = []
    leads: dict[Any, Any] = {}
    put_off = False
    while not explored.problems:
        if explored.runs + explored.cut == most:
            explored.is_complete = False
            break
        free = len(path) - put_off if reduced and only is None else None
        job, decisions = Job(size, setting.config), Decisions([each.choice for each in path], free=free)
        course: list[tuple[State, int]] = []
        vain: int | None = None
        try:
            results = job.run(
                lambda rank: program(rank, **setting.options),
                decisions,
                _watch(explored, course, path, reduced),
                forgets,
                after,
                only,
            )
            explored.problems += problems_of(setting, PROGRAMS[program], results)
            explored.runs += 1
            if not reduced:
                explored.problems += _contradictions(leads, course, decisions)
        except Known:
            explored.cut += 1
        except Vain as error:
            explored.cut += 1
            vain = error.number
        except Stuck as error:
            explored.problems.append(f"{error}, after {decisions.made}")
        explored.courses.update(job.turns.courses)
        explored.problems += job.simulator.detector.races
        put_off = vain is not None and _put_off(path, decisions, vain)
        if vain is None:
            _note(path, decisions.made, decisions)
            if not _advance(path, reduced):
                break
    return explored


def _watch(explored: Explored, course: list[tuple[State, int]], path: list[_Decision], reduced: bool) -> Any:
    """Return the function by which a run asks, before each turn, whether it ends there."""
    given = len(path)

    def ends_in(state: State, made: int) -> bool:
        course.append((state, made))
        explored.states.add(hash(state))
        control, histories = hash(state[0]), state[1]
        by_rank = {hash((control, *each)) for each in enumerate(histories)}
        is_known = made >= given and by_rank <= explored.known
        explored.known |= by_rank
        return reduced and is_known

    return ends_in


def _note(path: list[_Decision], made: list[tuple[int, int]], decisions: Decisions) -> None:
    """Bring the path up to date with the decisions of a run, or with the first of them."""
    for place, (choice, count) in enumerate(made):
        turn = decisions.turns.get(place)
        if place == len(path):
            path.append(_Decision(choice, count, turn))
        elif turn is not None and (known := path[place].turn) is not None:
            mover = turn.able[choice]
            known.needs.setdefault(mover, set()).update(turn.needs[mover])
    assert [(each.choice, each.count) for each in path] == made, "a run is not what it was before"


def _put_off(path: list[_Decision], decisions: Decisions, number: int) -> bool:
    """Choose another turn; return False if all look in vain: then the first turn is taken after all."""
    _note(path, decisions.made[: number + 1], decisions)
    last = path[number]
    last.vain.append(last.choice)
    left = [at for at in range(last.count) if at not in last.vain]
    last.choice = left[0] if left else 0
    return bool(left)


def _advance(path: list[_Decision], reduced: bool) -> bool:
    """Advance to the next decisions; return False if all have been tried."""
    while path:
        last = path[-1]
        following = last.next(reduced=reduced)
        if following is not None:
            last.tried.append(last.choice)
            last.choice = following
            return True
        path.pop()
    return False


def _contradictions(
    leads: dict[Any, Any], course: list[tuple[State, int]], decisions: Decisions
) -> list[str]:
    """Note the states after the turns of a run; return the turns that led elsewhere before."""
    found = []
    for (state, begin), (after, end) in pairwise(course):
        made = tuple(choice for choice, _ in decisions.made[begin:end])
        for before, then in ((state, after), (state[0], after[0])):
            if leads.setdefault((before, made), then) != then:
                found.append(f"the decisions {made} lead to two states, at {decisions.made[:begin]}")
    return found
