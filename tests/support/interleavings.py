"""All orders of the turns of ranks, and of what hosts find done on devices, for small programs.

A run is repeated with other decisions until all have been tried; a run that comes to a state from which
another has gone on ends there. What devices do between two queries needs no enumeration: if the detector
finds no race, all orders give the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from device_programs import PROGRAMS, Program
from device_ranks import Decisions, Job, Known, Stuck
from device_settings import Setting, problems_of


@dataclass
class Explored:
    """`runs`: to their ends; `cut`: those that came to a known state; `states`: those with a choice."""

    runs: int = 0
    cut: int = 0
    states: set[Any] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    is_complete: bool = True


def explore(setting: Setting, program: Program, size: int, *, most: int, reduced: bool = True) -> Explored:
    """Run a program in all orders, at most `most` times; `reduced`: without running on from known states."""
    explored = Explored()
    given: list[int] | None = []
    while given is not None and not explored.problems:
        if explored.runs + explored.cut == most:
            explored.is_complete = False
            break
        job, decisions = Job(size, setting.config), Decisions(given)
        try:
            results = job.run(
                lambda rank: program(rank, **setting.options), decisions, explored.states if reduced else None
            )
            explored.problems += problems_of(setting, PROGRAMS[program], results)
            explored.runs += 1
        except Known:
            explored.cut += 1
        except Stuck as error:
            explored.problems.append(f"{error}, after {decisions.made}")
        explored.problems += job.simulator.detector.races
        given = _next(decisions.made)
    return explored


def _next(made: list[tuple[int, int]]) -> list[int] | None:
    """The decisions of the next run, None after the last one."""
    for place in reversed(range(len(made))):
        choice, count = made[place]
        if choice + 1 < count:
            return [*(each for each, _ in made[:place]), choice + 1]
    return None
