"""Compare ranks, so that all ranks raise an error together."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from mcr_plus.errors import InvalidArgument, OrderMismatch, ResultMismatch
from mcr_plus.job.hooks import JobHook
from mcr_plus.job.process import job
from mcr_plus.local_sgd import arguments
from mcr_plus.training.wrap import is_wrapped

if TYPE_CHECKING:
    from mcr_plus.local_sgd.fragments import Fragment
    from mcr_plus.local_sgd.local import LocalSteps

CHECK: Final = "local.check"
DIGEST, STEPS, TOKENS, NANOSECONDS, CHANGED = range(5)
"""Columns of the table that travels with each fragment; it has a row for each rank."""

_NUMBERS: Final = "mcr.local"
_TAG: Final = re.compile(r" tag=outer\.(?:(\d+)\.)?\d+(?: |$)")
_live: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


class _Reminder(JobHook):
    """Warns at the end of the job of steps that have not been averaged."""

    def unfinished(self) -> str | None:
        """See `JobHook`."""
        if not any(each.position or any(part.flight for part in each.fragments) for each in _live):
            return None
        return "mcr.local: the last steps have not been averaged, so models differ; end with local.finish()"


_REMINDER: Final = _Reminder()


class _Own(NamedTuple):
    """Numbers and settings of one rank's `LocalSteps`, as sent to the other ranks.

    Attributes:
        number: next free number on this rank.
        live: numbers of this group that the program still uses.
    """

    settings: dict[str, str]
    number: int
    live: tuple[int, ...]


def agree(local: LocalSteps) -> int:
    """Compare the settings, and return the number of this `LocalSteps` in its group; collective.

    Codecs keep residuals by tag, and tags contain the number. So numbers only grow, even from one world to
    the next, and no `LocalSteps` starts with the residuals of another. Codec state of a number is dropped
    here, once no rank uses the number (ranks collect garbage at different times).
    """
    comm = local.comm
    settings = {name: repr(value) for name, value in vars(local.settings).items()}
    settings["outer"] = type(local.fragments[0].optimizer).__name__
    live = {each.number for each in _live if comm in (each.comm, each.comm.succession.successor)}
    own = _Own(settings, comm.opened.numbers.get(_NUMBERS, 0), tuple(live))
    answers: list[_Own] = comm.all_gather_object(own, tag=CHECK)
    named = comm.opened.group.named
    for rank, other in enumerate(answers):
        for name, value in settings.items():
            if other.settings[name] != value:
                raise InvalidArgument(
                    f"{name}: {value} on {named(comm.rank)}, but {other.settings[name]} on {named(rank)}; "
                    "expected the same on all ranks"
                )
    number = max(each.number for each in answers)
    over = set(range(number)).difference(*(each.live for each in answers))
    if over:
        for group in comm.opened.all:
            group.pipeline.forget_state(lambda name: _number_in(name) in over)
    keep_number(local, number)
    return number


def keep_number(local: LocalSteps, number: int) -> None:
    """Reserve a number, so that no later `LocalSteps` of the group gets it."""
    numbers = local.comm.opened.numbers
    numbers[_NUMBERS] = max(numbers.get(_NUMBERS, 0), number + 1)
    _live.add(local)
    if _REMINDER not in job.hooks:
        job.hooks += (_REMINDER,)


def _number_in(operation: str) -> int | None:
    """Return the number in the tag of an operation, given its name; None if it belongs to no fragment."""
    found = _TAG.search(operation)
    return None if found is None else int(found[1] or 0)


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Raise `InvalidArgument` if the model's gradients are averaged already."""
    averages = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    if averages or is_wrapped(model):
        by = "in DistributedDataParallel" if averages else "wrapped by mcr.wrap"
        raise InvalidArgument(
            f"model: it is {by}, which averages gradients in every step; pass a model that is not"
        )


def changes(local: LocalSteps) -> str | None:
    """Return the change in this rank's model that prevents further steps; None without a change."""
    try:
        refuse_wrapped(local.model)
        now = arguments.trained(local.model, local.inner)
    except InvalidArgument as error:
        return str(error)
    none = ("none", None)
    for (name, param), (then, before) in zip_longest(now, local.named, fillvalue=none):
        if param is not before:
            return (
                f"model: since mcr.local trained parameters have changed: '{name}' in place of '{then}'; "
                "call mcr.local again on all ranks"
            )
    for fragment in local.fragments:
        for leaf, (name, param) in fragment.pairs:
            if leaf.shape != param.shape:
                return (
                    f"model: since mcr.local '{name}' has changed its shape from {list(leaf.shape)} to "
                    f"{list(param.shape)}; call mcr.local again on all ranks"
                )
    return None


def compare_table(local: LocalSteps, fragment: Fragment, table: torch.Tensor, refusal: str | None) -> None:
    """Raise an error on all ranks if a rank cannot continue, or if rows differ.

    Args:
        table: int64 [ranks, columns], one row per rank.
        refusal: the reason why this rank cannot continue; None if it can.
    """
    named = local.comm.opened.group.named
    changed = [rank for rank, each in enumerate(table[:, CHANGED].tolist()) if each]
    if changed:
        raise InvalidArgument(
            refusal
            or f"model: trained parameters have changed on {named(*changed)} since mcr.local, whose "
            "error names them; call mcr.local again on all ranks"
        )
    steps = table[:, STEPS].tolist()
    if not local.settings.uneven and len(set(steps)) > 1:
        listed = ", ".join(f"{named(rank)}: {each}" for rank, each in enumerate(steps))
        raise OrderMismatch(
            f"{fragment.tag}: ranks have made different numbers of steps ({listed}); call local.step() "
            "alike on all ranks, or pass uneven=True"
        )
    compare_digests(local, fragment, table[:, DIGEST].tolist())


def compare_digests(local: LocalSteps, fragment: Fragment, digests: Sequence[int]) -> None:
    """Raise `ResultMismatch` on all ranks if their outer parameters differ."""
    if len(set(digests)) > 1:
        usual = max(digests, key=digests.count)
        others = [rank for rank, each in enumerate(digests) if each != usual]
        named = local.comm.opened.group.named
        raise ResultMismatch(
            f"{fragment.tag}: outer parameters on {named(*others)} differ from the rest, after "
            f"{fragment.rounds} outer steps with compress={local.settings.compress!r} and "
            f"{type(fragment.optimizer).__name__}; each must compute the same bits on all ranks"
        )


def share_of(local: LocalSteps, own: float, times: Sequence[float]) -> int:
    """Return the number of steps of a rank while the fastest rank makes `every`; 0 if unknown."""
    known = [each for each in times if each]
    share = min(known) / own if own else 1.0
    return max(len(local.fragments), round(local.settings.every * share))
