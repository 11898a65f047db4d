"""What ranks agree on when they go on in another world."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from mcr_plus.errors import InvalidArgument, McrError
from mcr_plus.training.transfer import broadcast_state

if TYPE_CHECKING:
    from mcr_plus.training.local_steps.local import LocalSteps

_TAG: Final = "local.resume"


class _Had(NamedTuple):
    """What one rank has.

    Attributes:
        dues: by fragment, the step after which what has arrived is applied; None if nothing has.
    """

    steps: int
    position: int
    rounds: int
    done: tuple[int, ...]
    dues: tuple[int | None, ...]
    layout: str


def resume(local: LocalSteps) -> None:
    """See `LocalSteps.resume`."""
    local.comm = comm = local.comm.successor()
    for fragment in local.fragments:
        if fragment.flight is not None:
            try:
                local.arrived(fragment)
            except McrError:  # of the world that is gone; the flight is over
                continue
    own = _Had(
        local.steps,
        local.position,
        local.rounds,
        tuple(fragment.rounds for fragment in local.fragments),
        tuple(None if each.flight is None else each.flight.due for each in local.fragments),
        repr([fragment.layout for fragment in local.fragments]),
    )
    answers: list[_Had] = comm.all_gather_object(own, tag=_TAG)
    _check(answers, comm.ranks)
    foremost = max(range(comm.size), key=lambda rank: (answers[rank].steps, -rank))
    first = answers[foremost]
    is_new = own.steps == 0 and first.steps > 0
    if local.settings.uneven:  # ranks are at steps of their own, so all begin a window
        local.steps = first.steps if is_new else local.steps
        local.position, local.rounds = 0, max(each.rounds for each in answers)
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
                fragment.optimizer.load_state_dict(outer)
                fragment.draw(1.0 if is_new or first.steps <= local.settings.warmup else local.settings.mix)
                fragment.rounds = max(done)
        # One verdict: what is in flight counts if it has arrived on all of them.
        if own.done[index] < max(done):
            fragment.flight = None  # it has been applied elsewhere
        elif min(done) < max(done) or len({each.dues[index] for each in answers}) > 1:
            fragment.drop()
        if is_new:
            fragment.tokens = 0.0
    local.forget_weights()
    local._left = time.perf_counter()


def _check(answers: list[_Had], ranks: tuple[int, ...]) -> None:
    for rank, each in zip(ranks, answers, strict=True):
        if each.layout != answers[0].layout:
            raise InvalidArgument(
                f"model: rank {rank} has cut its model into other fragments than rank {ranks[0]}; make "
                "mcr.local with the same model and settings on all ranks"
            )
