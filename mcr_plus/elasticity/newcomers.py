"""Duties of training ranks toward processes that wait to join: send them the state, take them in."""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from mcr_plus.config import reader as configuration
from mcr_plus.core.environment import package_version
from mcr_plus.elasticity.state_source import StateSource
from mcr_plus.elasticity.state_stream import WORTH, nbytes_of
from mcr_plus.kernels.digest import digest
from mcr_plus.rendezvous.network import host_address

if TYPE_CHECKING:
    from mcr_plus.job.runtime import Runtime
    from mcr_plus.membership.epoch_log import EpochLog

_log = logging.getLogger("mcr_plus")
NOTHING, TAKE_IN, GIVE = range(3)
_OURS: Final = "127.0.0.1"


class StateRequest(NamedTuple):
    """Action between two steps, as decided by rank 0; the same on all ranks.

    Attributes:
        what: no action, take newcomers in, or send the state to one newcomer.
        rank, number, attempt: the sending rank, the newcomer's number, and the number of failed attempts.
    """

    what: int = NOTHING
    rank: int = 0
    number: int = 0
    attempt: int = 0


class Newcomers:
    """Duties of one rank toward newcomers. `precopies`: newcomers get the state before they are taken in."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, precopies: bool) -> None:
        self._model, self._optimizer, self._allowed = model, optimizer, precopies
        self._given: dict[tuple[int, int], int] = {}  # request and attempt → sending rank, in this epoch
        self._sources: dict[int, StateSource] = {}

    def precopies(self) -> bool:
        """Return whether newcomers get the state before they are taken in."""
        return self._allowed and nbytes_of(self._model, self._optimizer) >= WORTH

    @property
    def gives(self) -> bool:
        """Whether this rank is sending the state to a newcomer."""
        return any(not source.is_over for source in self._sources.values())

    def look(self, roster: EpochLog) -> StateRequest:
        """Return the action for waiting newcomers; called on rank 0."""
        waiting = roster.newcomers()
        if not waiting:
            return StateRequest()
        if not self.precopies():
            return StateRequest(TAKE_IN)
        requests = [roster.request(number) for number in waiting]
        if any(request.is_ready for request in requests):
            return StateRequest(TAKE_IN)
        for request in requests:
            attempt = request.attempt()
            if (request.number, attempt) in self._given or request.has_source(attempt):
                continue
            place, busy = waiting[request.number].place, list(self._given.values())
            rank = min(
                range(len(roster.members)),
                key=lambda each: (roster.members[each].place != place, busy.count(each), each),
            )
            self._given[request.number, attempt] = rank
            return StateRequest(GIVE, rank, request.number, attempt)
        return StateRequest()

    def give(self, roster: EpochLog, errand: StateRequest) -> None:
        """Start sending the current state to a newcomer, if `errand` names this rank."""
        if roster.rank != errand.rank:
            return
        request, place = roster.request(errand.number), None
        try:
            newcomer = roster.newcomers().get(errand.number)
            if newcomer is None:  # the newcomer has died
                return
            address = _OURS if newcomer.place == roster.members[roster.rank].place else host_address()
            name = f"{request.key}/{errand.attempt}"
            source = StateSource(self._model, self._optimizer, roster.root.secret, name, address)
            digest(torch.zeros(1, device="cpu"))  # compile it before the others must wait for it
            self.end(errand.number)
            self._sources[errand.number], place = source, source.place
        except (OSError, MemoryError, RuntimeError) as error:
            _log.warning("elastic: a newcomer cannot get the state from this rank: %s", error)
        with suppress(RuntimeError):  # the store may not answer; the next look finds out
            request.offer(errand.attempt, place)

    def have_joined(self, roster: EpochLog) -> None:
        """Start a new epoch: newcomers that were taken in get the rest of their messages, and no new ones."""
        self._given.clear()
        for number, source in list(self._sources.items()):
            if source.is_over:
                self.end(number)
            elif number in roster.taken:
                source.finish()

    def end(self, number: int | None = None) -> None:
        """Stop sending to one newcomer, or to all of them."""
        for each in list(self._sources) if number is None else [number]:
            if (source := self._sources.pop(each, None)) is not None:
                source.close()


def passport_of(runtime: Runtime, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the properties that a newcomer must share with the job."""
    shapes = ", ".join(f"{name} {list(each.shape)} {each.dtype}" for name, each in model.named_parameters())
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:12]
    count = sum(1 for _ in model.parameters())
    return {
        "mcr_plus": package_version(),
        "torch": torch.__version__,
        "the configuration": configuration.fingerprint(runtime.config),
        "the model": f"{type(model).__name__} with {count} parameters (digest of their shapes: {digest})",
        "the optimizer": type(optimizer).__name__,
    }
