"""Let ranks agree on how to continue in another world."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from mcr_plus.communicator.transfer import broadcast_state
from mcr_plus.errors import InvalidArgument, McrError
from mcr_plus.local_sgd.consistency import share_of

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.local_sgd.fragments import Fragment
    from mcr_plus.local_sgd.local import LocalSteps

_TAG: Final = "local.resume"


class _RankProgress(NamedTuple):
    """Progress of one rank.

    Attributes:
        number: number of the group's `LocalSteps`, part of the tags.
        pace: nanoseconds per step; 0 if not measured.
        dues: by fragment, the step after which an arrived mean is applied; None if no mean has arrived.
    """

    number: int
    pace: int

    steps: int
    position: int
    rounds: int
    done: tuple[int, ...]
    dues: tuple[int | None, ...]
    layout: str


def resume(local: LocalSteps) -> None:
    """Continue in a new world, see `LocalSteps.resume`."""
    comm = local.comm.successor()
    local.catch_up()
    for fragment in local.fragments:
        if fragment.flight is not None:
            try:
                local.arrived(fragment)  # wait now, because the fragment's table has ranks of the old world
            except McrError:  # the flight has failed
                continue
    local.comm = comm
    own = _RankProgress(
        local.number,
        local.pace,
        local.steps,
        local.position,
        local.rounds,
        tuple(fragment.rounds for fragment in local.fragments),
        tuple(_due(local, each) for each in local.fragments),
        repr([fragment.layout for fragment in local.fragments]),
    )
    answers: list[_RankProgress] = comm.all_gather_object(own, tag=_TAG)
    _check(answers, comm)
    foremost = max(range(comm.size), key=lambda rank: (answers[rank].steps, -rank))
    first = answers[foremost]
    is_new = own.steps == 0 and first.steps > 0
    local.take_number(first.number)
    if local.settings.uneven:  # ranks are at different steps, so all begin a window
        local.steps = first.steps if is_new else local.steps
        local.rounds = max(each.rounds for each in answers)
        local.begin_window(share_of(local, own.pace, [each.pace for each in answers]))
    else:
        local.steps, local.position, local.rounds = first.steps, first.position, first.rounds
    for index, fragment in enumerate(local.fragments):
        done = [each.done[index] for each in answers]
        src = done.index(max(done))
        if min(done) < max(done) or (any(each.steps == 0 for each in answers) and first.steps):
            state = (fragment.anchor, fragment.optimizer.state_dict())
            anchor, outer = broadcast_state(state if comm.rank == src else None, comm, src)
            if fragment.rounds < max(done) or is_new:
                fragment.anchor.copy_(anchor)
                fragment.load_outer(outer)
                fragment.draw(1.0 if is_new or first.steps <= local.settings.warmup else local.settings.mix)
                fragment.rounds = max(done)
        # All ranks must come to the same result: a fragment counts only if it has arrived on all ranks.
        if own.done[index] < max(done):
            fragment.flight = None  # other ranks have applied it
        elif min(done) < max(done) or len({each.dues[index] for each in answers}) > 1:
            fragment.drop()
        if is_new:
            fragment.tokens = 0.0
    local.forget_weights()
    local._left = time.perf_counter()


def _due(local: LocalSteps, fragment: Fragment) -> int | None:
    """Return the step after which an arrived mean is applied; equal on all ranks except with `uneven`."""
    if fragment.flight is None:
        return None
    return 0 if local.settings.uneven else fragment.flight.due


def _check(answers: list[_RankProgress], comm: Communicator) -> None:
    named = comm.opened.group.named
    for rank, each in enumerate(answers):
        if each.layout != answers[0].layout:
            raise InvalidArgument(
                f"model: {named(rank)} has cut its model into other fragments than {named(0)}; make "
                "mcr.local with the same model and settings on all ranks"
            )
