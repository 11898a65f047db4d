"""All orders of the turns of ranks, and of what hosts find done on devices, for small programs.

A run is repeated with other decisions until all have been tried, depth first. `explore(reduced=True)` leaves
out what can show nothing new (`device_turns`):

- A run ends in a state from which another run has gone on (state hashing).
- Of a turn that touches nothing which other ranks touch, whatever the rank is told in it, no other order is
  tried: a persistent set of one rank (Godefroid, Partial-Order Methods, 1996; Flanagan and Godefroid, POPL
  2005). Turns cannot be put off for ever, since no state comes twice in a run.
- What devices do after the last query: if the detector finds no race, all orders of that give the same.

`reduced=False` tries everything, and checks that states are what they are taken for: from one state, the same
decisions of the next turn lead to the same state. `courses`, of each rank, must be the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from device_programs import PROGRAMS, Program
from device_ranks import Job
from device_settings import Setting, problems_of
from device_turns import Decisions, Known, Stuck


@dataclass
class Explored:
    """`runs`: to their ends; `cut`: those that came to a known state; `states`: those before a turn.

    `courses`: of ranks that have ended, what they came upon and what they put into their streams (`Actor`).
    """

    runs: int = 0
    cut: int = 0
    states: set[Hashable] = field(default_factory=set)
    courses: set[Hashable] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    is_complete: bool = True


@dataclass
class _Decision:
    """A decision on the way to what is tried next. `is_own`: a turn that touches nothing of others so far."""

    choice: int
    count: int
    is_own: bool


def explore(
    setting: Setting,
    program: Program,
    size: int,
    *,
    most: int,
    reduced: bool = True,
    forgets: bool = True,
    opened: bool = False,
) -> Explored:
    """Run a program in all orders, at most `most` times.

    `forgets`: a host may find nothing done as often as there is something else to do; otherwise once for each
    thing. `opened`: orders begin when all ranks have opened their groups.
    """
    explored = Explored()
    path: list[_Decision] = []
    leads: dict[Any, Hashable] = {}
    while not explored.problems:
        if explored.runs + explored.cut == most:
            explored.is_complete = False
            break
        job, decisions = Job(size, setting.config), Decisions([each.choice for each in path])
        course: list[tuple[Hashable, int]] = []
        try:
            results = job.run(
                lambda rank: program(rank, **setting.options),
                decisions,
                _watch(explored, course, path, reduced),
                forgets,
                opened,
            )
            explored.problems += problems_of(setting, PROGRAMS[program], results)
            explored.runs += 1
            if not reduced:
                explored.problems += _contradictions(leads, course, decisions)
        except Known:
            explored.cut += 1
        except Stuck as error:
            explored.problems.append(f"{error}, after {decisions.made}")
        explored.courses.update(job.turns.courses)
        explored.problems += job.simulator.detector.races
        _note(path, decisions, reduced)
        if not _advance(path):
            break
    return explored


def _watch(
    explored: Explored, course: list[tuple[Hashable, int]], path: list[_Decision], reduced: bool
) -> Any:
    """What a run asks before each turn: whether it ends there."""
    given = len(path)

    def ends_in(state: Hashable, made: int) -> bool:
        course.append((state, made))
        is_known = made >= given and state in explored.states
        explored.states.add(state)
        return reduced and is_known

    return ends_in


def _note(path: list[_Decision], decisions: Decisions, reduced: bool) -> None:
    """Bring the path up to date with the decisions of a run."""
    for place, (choice, count) in enumerate(decisions.made):
        is_turn = place in decisions.turns
        is_own = reduced and is_turn and not decisions.turns[place]
        if place < len(path):
            path[place].is_own &= is_own
        else:
            path.append(_Decision(choice, count, is_own))
    assert [(each.choice, each.count) for each in path] == decisions.made, "a run is not what it was before"


def _advance(path: list[_Decision]) -> bool:
    """Go on to the next decisions; False if all have been tried."""
    while path:
        last = path[-1]
        if last.choice + 1 < last.count and not last.is_own:
            path[-1] = _Decision(last.choice + 1, last.count, True)
            return True
        path.pop()
    return False


def _contradictions(
    leads: dict[Any, Hashable], course: list[tuple[Hashable, int]], decisions: Decisions
) -> list[str]:
    """Note what the turns of a run lead to; returns those that have led elsewhere before."""
    found = []
    for (state, begin), (after, end) in pairwise(course):
        made = tuple(choice for choice, _ in decisions.made[begin:end])
        if leads.setdefault((state, made), after) != after:
            found.append(f"the decisions {made} lead to two states, at {decisions.made[:begin]}")
    return found
