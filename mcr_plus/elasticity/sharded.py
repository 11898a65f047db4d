"""`mcr.elastic_sharded`: a training loop for FSDP2 models that goes on with fewer ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from mcr_plus.communicator.transfer import broadcast_state
from mcr_plus.elasticity.api import seconds_of
from mcr_plus.elasticity.buddies import Buddies
from mcr_plus.elasticity.leaving import agreed_with_notices, changes_line, ends_on_notice
from mcr_plus.elasticity.loop import ElasticStep, checked_bounds, is_loss
from mcr_plus.elasticity.newcomers import StateRequest
from mcr_plus.errors import BackendError, InvalidArgument, NotInitialized, PeerLost
from mcr_plus.job.init import current
from mcr_plus.job.notice import notice
from mcr_plus.membership.rules import Proposal
from mcr_plus.torch_backend.shrinking import regrouped
from mcr_plus.training.fsdp_state import Offer, fsdp_state, rebuilt_state, shards_of
from mcr_plus.training.parameters import check_elastic

_log = logging.getLogger("mcr_plus")
Build = Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer]]


@dataclass
class ShardedStep(ElasticStep):
    """A step of `elastic_sharded`.

    Attributes:
        model, optimizer: made by `build` for the current ranks; others after a change of ranks.
    """

    model: Any = None
    optimizer: Any = None


def elastic_sharded(
    build: Build,
    *,
    steps: int | None = None,
    min_ranks: int | None = None,
    timeout: float | str | timedelta | None = None,
) -> Iterator[ShardedStep]:
    """Yield the steps of a training loop over an FSDP2 model that goes on with fewer ranks.

    For torch's default group of the backend `mcr`. After each change of ranks, `build` is called again on the
    remaining ones, and gets the state of all shards.

    With `elastic: {notice: ...}` in the configuration, a rank that is told to leave completes its step and
    hands its shards to the others; no step is repeated. See `mcr.elastic` for the end of such ranks.

    With `elastic: {buddies: {steps: K}}`, each rank keeps a copy of another rank's shards. If a rank is lost,
    the others go back by at most K steps to the last copies, and no checkpoint is read. Without buddies, only
    shards with replicas (hybrid sharding) survive a loss.

    The program must not keep model or optimizer beyond a step. Derive data and learning rate from the
    number of the step, which may go back after a loss.

    Args:
        build: returns a model sharded over all ranks, and its optimizer; collective. Initial values are equal
            on all ranks.
        steps: number of steps; None for no end.
        min_ranks: number of ranks with which training goes on; None: `--min-ranks` of `mcr-plus run`, or a
            majority of those that do not leave on notice.
        timeout: time that ranks wait for each other after a loss; None for the timeout of the job.

    Raises:
        InvalidArgument: arguments have a wrong type, or `min_ranks` exceeds the number of ranks.
        NotInitialized: torch has no default group of the backend `mcr`, or a step was used without `with`.
        BackendError: too few ranks are left, or shards were lost with all their copies: load a checkpoint.
        Revoked: the others have declared this rank lost.
        SystemExit: this rank has left on notice.

    Example:
        ```python
        for step in mcr.elastic_sharded(build, steps=100):
            with step:
                step.optimizer.zero_grad()
                step.model(batch(step.number)).square().mean().backward()
                step.optimizer.step()
        ```
    """
    return _ShardedLoop(build, steps, min_ranks, timeout).steps()


class _ShardedLoop:
    """State of one call of `elastic_sharded`."""

    def __init__(
        self,
        build: Build,
        steps: int | None,
        min_ranks: int | None,
        timeout: float | str | timedelta | None,
    ) -> None:
        world = current().world
        if not callable(build):
            raise InvalidArgument(f"build: expected a function, got {build!r}")
        self._least = checked_bounds(steps, min_ranks, world.size)
        self._build, self._steps = build, steps
        self._timeout = world.timeout if timeout is None else seconds_of(timeout)
        self._done = 0
        self._applied = False
        self._model: Any = None
        self._optimizer: Any = None
        self._whole: dict[str, Any] | None = None  # state of all ranks, until copies of the shards exist
        self._buddies: Buddies | None = None
        options = current().config.elastic
        self._agrees = options.notice is not None or options.buddies is not None
        most = 0 if options.buddies is None else options.buddies.steps
        # A loss goes back by one period, and by another while a copy travels: both are at most `most`.
        self._period, self._waits = max(1, most // 2), most == 1

    def steps(self) -> Iterator[ShardedStep]:
        """Yield the steps, see `elastic_sharded`."""
        notice.resume(current().config)
        try:
            self._prepare()
            if self._change(None):
                return
            while self._steps is None or self._done < self._steps:
                yield (step := self._step())
                if not step._entered:
                    raise NotInitialized("elastic_sharded: use each step in a `with` block")
                if step.lost is None or self._applied:
                    self._done += 1
                if self._change(step.lost):
                    return
        finally:
            notice.close()
            if self._buddies is not None:
                self._buddies.close()

    def _step(self) -> ShardedStep:
        self._applied = False
        return ShardedStep(self._done, model=self._model, optimizer=self._optimizer)

    def _note_applied(self, *_: object) -> None:
        self._applied = True

    def _prepare(self) -> None:
        """Build the model of the first world."""
        try:
            self._set_up(None)
        except BackendError as error:
            if not is_loss(error):
                raise
            self._regroup()

    def _change(self, lost: PeerLost | None) -> bool:
        """Copy shards, and let ranks leave, between two steps; return whether the loop ends on notice."""
        if lost is None and self._agrees:
            try:
                return self._meet()
            except BackendError as error:
                if not is_loss(error):
                    raise
                lost = PeerLost(str(error))
        if lost is not None:
            self._regroup()
        return False

    def _meet(self) -> bool:
        """Agree with the other ranks on copies and leavers; return whether the loop ends on notice."""
        runtime, buddies = current(), self._buddies
        is_last = self._steps is not None and self._done >= self._steps
        if buddies is not None and self._done % self._period == 0 and not is_last:
            buddies.wait(max(buddies.own))
            copied = agreed_with_notices(runtime.communicator, StateRequest(), buddies.received)[2]
            buddies.keep_from(copied)
            if self._done > max(buddies.own):
                self._copy(buddies)
        _, leavers, _ = agreed_with_notices(runtime.communicator, StateRequest())
        if is_last or not leavers:
            return False
        world = runtime.world
        if ends_on_notice(leavers, world.rank, world.size, self._least, self._done, waits=False):
            return True
        # The state of all shards, on all ranks: a leaver goes only once all others have it.
        self._whole = fsdp_state(self._model, self._optimizer, step=self._done)
        runtime.communicator.barrier(tag="elastic")
        self._regroup(leaves=world.rank in leavers)
        return False

    def _copy(self, buddies: Buddies) -> None:
        tensors: list[torch.Tensor] = []
        shards = shards_of(self._model, self._optimizer, self._done, tensors)
        if shards.problem:
            raise InvalidArgument(f"build: {shards.problem}")
        buddies.copy(shards, tensors)
        if self._waits:
            buddies.wait(self._done)

    def _regroup(self, *, leaves: bool = False) -> None:
        """Go on with the remaining ranks; repeat if a rank is lost meanwhile."""
        began, lost = time.monotonic(), dict[int, str]()
        offers: list[Offer] | None = None
        while True:
            try:
                changes = regrouped(
                    Proposal(least=self._least, leaves=leaves), self._timeout, "elastic_sharded"
                )
                lost.update(changes.lost)
                offers = self._offers() if offers is None else offers
                self._set_up(self._state(offers))
            except PeerLost:
                leaves = False
                continue
            if current().world.rank == 0:
                seconds = time.monotonic() - began
                _log.warning("%s", changes_line(lost, [], self._done, current().world.size, seconds))
            return

    def _offers(self) -> list[Offer]:
        """Return the shards that this rank has: its present ones, and copies."""
        tensors: list[torch.Tensor] = []
        offers: list[Offer] = []
        if self._model is not None:
            offers.append((shards_of(self._model, self._optimizer, self._done, tensors), tensors))
        if self._buddies is not None:
            self._buddies.close()
            offers += self._buddies.offers()
        return offers

    def _state(self, offers: list[Offer]) -> dict[str, Any]:
        """Return the state with which all ranks go on; collective."""
        comm = current().communicator
        steps = comm.all_gather_object(-1 if self._whole is None else self._whole["step"], tag="elastic")
        if max(steps) < 0:
            self._whole = rebuilt_state(comm, offers)
        elif min(steps) < max(steps):  # a rank was lost while the others got it, or before they had copies
            self._whole = broadcast_state(self._whole, comm, steps.index(max(steps)))
        assert self._whole is not None
        return self._whole

    def _set_up(self, state: dict[str, Any] | None) -> None:
        """Build the model over the current ranks, load `state` if there is one, and copy the shards."""
        model, optimizer = self._build()
        check_elastic(optimizer)
        optimizer.register_step_post_hook(self._note_applied)
        if state is not None:
            load(model, optimizer, state)
            self._done = state["step"]
        self._model, self._optimizer = model, optimizer
        runtime = current()
        if self._buddies is not None:  # if a rank was lost meanwhile: those of this function's last call
            self._buddies.close()
        self._buddies = None
        if runtime.config.elastic.buddies is not None and runtime.world.size > 1:
            self._buddies = Buddies(runtime)
            self._copy(self._buddies)
            self._buddies.wait(self._done)
            runtime.communicator.barrier(tag="elastic")
        self._whole = None


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Set a sharded model and its optimizer to a state that `fsdp_state` has returned."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state["model"], options=full)
    if state["optimizer"]["state"]:  # empty before the first step
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=full)
