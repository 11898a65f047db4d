"""`mcr.elastic`: a training loop that survives lost ranks and takes new ranks in."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Protocol

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.transfer import Has, broadcast_state
from mcr_plus.core import environment
from mcr_plus.core.units import whole_number
from mcr_plus.core.work import Work
from mcr_plus.elasticity.api import seconds_of
from mcr_plus.elasticity.leaving import (
    agreed_with_notices,
    changes_line,
    ends_on_notice,
    unless_told,
)
from mcr_plus.elasticity.newcomers import GIVE, TAKE_IN, Newcomers, StateRequest, passport_of
from mcr_plus.elasticity.state_receiver import StateReceiver
from mcr_plus.engine.closing import drain
from mcr_plus.errors import (
    BackendError,
    InvalidArgument,
    NotInitialized,
    PeerLost,
    Revoked,
)
from mcr_plus.job.epoch_change import join_job, leave_epoch
from mcr_plus.job.init import current
from mcr_plus.job.notice import notice
from mcr_plus.job.rebind import Inheritance, inheriting
from mcr_plus.job.runtime import Runtime
from mcr_plus.local_sgd.local import LocalSteps
from mcr_plus.membership.request import JoinRequest
from mcr_plus.membership.rules import Proposal
from mcr_plus.training.parameters import check_elastic, unaveraged

_LOOK_EVERY: Final = 0.25  # seconds between looks in the store for processes that want to join
_TAG: Final = "elastic"
_log = logging.getLogger("mcr_plus")


class Stateful(Protocol):
    """An object whose state newcomers receive: a sampler, a scheduler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Set the state."""
        ...


@dataclass
class ElasticStep:
    """A step of `elastic`: the context in which the program computes it.

    Attributes:
        number: number of the step, from 0.
        lost: the loss that ended the step; None if the step is complete.
        failed: whether another error ended it.
    """

    number: int
    lost: PeerLost | None = None
    failed: bool = False
    _entered: bool = False

    def __enter__(self) -> ElasticStep:
        if self._entered:
            raise InvalidArgument(
                f"elastic: step {self.number} has had a `with` block; put the whole step into one block, as "
                "the whole step is repeated after a loss"
            )
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and is_loss(error):
            # Raise a new error: the frames in the old traceback would keep the old world alive.
            self.lost = error.again(str(error)) if isinstance(error, PeerLost) else PeerLost(str(error))
            return True
        self.failed = error is not None
        return False


def elastic(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *state: Stateful,
    steps: int | None = None,
    min_ranks: int | None = None,
    timeout: float | str | timedelta | None = None,
    precopy: bool = True,
) -> Iterator[ElasticStep]:
    """Yield the steps of a training loop that goes on when ranks are lost, and takes ranks in.

    `model` and `optimizer` are wrapped by `mcr.wrap`, or the result of `mcr.local` is in `state`. If a rank
    is lost within a step, the others go on without it and repeat the step. Replicas are equal between
    steps, so no checkpoint is needed: a rank that had not completed the last step receives the state of one
    that had. A process restarted by `mcr-plus run --min-ranks` is alone in its job until its loop begins. The
    others take it in between two steps and send it model, optimizer and `state`; with `precopy`, model and
    optimizer travel beforehand, while they train. The first rank that went on reports each change on stderr.

    Ranks may change between two steps: read `mcr.get_rank()` and `mcr.get_world_size()` in each step, and
    divide its data among the current ranks. Earlier communicators are then revoked, and have
    successors without the newcomers (`Communicator.successor`). Gradients are dropped, so accumulate
    them within one step. A sampler that counts calls is a step ahead after a repeated step: derive the data
    from the number of the step.

    With `elastic: {notice: ...}` in the configuration, a rank may be told to leave (SIGTERM, a file). It
    completes its step; then the others go on without it, and its process ends with status 0 (`SystemExit`).
    If all ranks are told, or fewer than `min_ranks` would be left, the loop ends on all of them after the
    step, with a line on stderr, so that the program can save its state.

    Args:
        model: replicated on all ranks; changed in place.
        optimizer: the optimizer of the model; its state is replicated too.
        state: other objects whose state newcomers need, with `state_dict` and `load_state_dict`.
        steps: number of steps; None for no end.
        min_ranks: number of ranks with which training goes on; None: `--min-ranks` of `mcr-plus run`, or a
            majority. Fewer ranks wait for newcomers until `timeout`.
        timeout: time that ranks wait for each other, and for newcomers if they are too few; None for the
            timeout of the job.
        precopy: whether one rank sends a newcomer a copy of model and optimizer, if they have 16 MiB or more,
            and the gradients of the following steps, while all train on. The copy occupies CPU memory until
            it is sent. Without `precopy`, all ranks wait for the whole state. The same on all ranks.

    Raises:
        InvalidArgument: arguments have a wrong type; neither `wrap` nor `local` averages the model, or
            it has parameters that are not replicated (`mcr_skip`, DTensor) and would be lost with their rank;
            `min_ranks` above the number of ranks; a second `with` block of a step.
        NotInitialized: `init` has not been called, or a step was used without `with`.
        BackendError: fewer ranks than `min_ranks` are left.
        Revoked: the others have declared this rank lost, for example after a SIGSTOP.
        LaunchError: the job refused this process: its version, configuration or model differs.
        SystemExit: this process was restarted, and the others have completed the last step meanwhile; or
            this rank has left on notice.

    Example:
        ```python
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = mcr.wrap(model, optimizer)
        for step in mcr.elastic(model, optimizer, steps=3):
            with step:
                optimizer.zero_grad()
                model(torch.ones(8 // mcr.get_world_size(), 4)).sum().backward()
                optimizer.step()
        ```
    """
    loop = _Loop(model, optimizer, state, steps, min_ranks, timeout, precopy)
    return loop.steps()


class _Loop:
    """State of one call of `elastic`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Sequence[Stateful],
        steps: int | None,
        min_ranks: int | None,
        timeout: float | str | timedelta | None,
        precopy: bool,
    ) -> None:
        runtime = current()
        _check_arguments(model, optimizer, state)
        if not isinstance(precopy, bool):
            raise InvalidArgument(f"precopy: expected True or False, got {precopy!r}")
        self._model, self._optimizer, self._state = model, optimizer, state
        self._steps = steps
        self._timeout = runtime.world.timeout if timeout is None else seconds_of(timeout)
        self._passport = passport_of(runtime, model, optimizer)
        self._done = 0  # steps in the state of model and optimizer; -1 while they have no valid state
        self._looked = 0.0
        self._asking: tuple[Work, torch.Tensor] | None = None
        self._leavers: list[int] = []  # ranks that leave on notice after this step
        self._applied = False  # whether the optimizer has made its step in the current iteration
        self._newcomers = Newcomers(model, optimizer, precopies=precopy)
        self._receiver: StateReceiver | None = None  # set until this process has the state
        self._precopy = precopy
        several = environment.launch_environment().world_size > 1
        joins = several and environment.restarts() > 0 and runtime.roster is None
        self._least = checked_bounds(steps, min_ranks, None if joins else runtime.world.size)
        self._begins_job = not joins
        if joins:
            self._join()
        elif runtime.roster is not None:
            runtime.roster.passport = self._passport
            runtime.roster.note_training(takes_in=True)

    def steps(self) -> Iterator[ElasticStep]:
        """Yield the steps, see `elastic`. The hook on the optimizer lives as long as this generator."""
        notice.resume(current().config)
        hook = self._optimizer.register_step_post_hook(self._note_applied)
        try:
            yield from self._steps_left()
        finally:
            hook.remove()
            self._newcomers.end()
            notice.close()

    def _steps_left(self) -> Iterator[ElasticStep]:
        # Ranks that were told in `init` leave before their first step.
        if self._begins_job and current().config.elastic.notice is not None and self._change(regroups=False):
            return
        while not self._ended():
            step = ElasticStep(self._done)
            self._applied = False
            try:
                yield step
            except GeneratorExit:  # the program has left the loop
                if not step.failed:
                    self._end()
                raise
            if not step._entered:
                raise NotInitialized("elastic: use each step in a `with` block, so that losses are caught")
            regroups = step.lost is not None
            # If a rank is lost after this rank's optimizer step, this rank does not repeat the step.
            if not regroups or self._applied:
                self._done += 1
            if self._change(regroups):
                return

    def _change(self, regroups: bool) -> bool:
        """Let ranks leave and join between two steps; return whether the loop ends on notice.

        `regroups`: a rank was lost in the step.
        """
        if not regroups:
            try:
                regroups = self._meet_newcomers()
                if regroups:
                    drain(current().engine)
            except BackendError as error:
                if not is_loss(error):
                    raise
                regroups = True
        world = current().world
        if ends_on_notice(self._leavers, world.rank, world.size, self._least, self._done, waits=regroups):
            self._end()
            return True
        if regroups or self._leavers:
            self._regroup()
        return False

    def _note_applied(self, *_: object) -> None:
        self._applied = True

    def _ended(self) -> bool:
        """Return whether all ranks have completed the last step; from then on nobody is taken in."""
        while self._steps is not None and self._done >= self._steps:
            runtime = current()
            try:
                runtime.communicator.barrier(tag=_TAG)
            except BackendError as error:  # a rank that has not completed it needs this one
                if not is_loss(error):
                    raise
                self._regroup()
                continue
            self._end()
            return True
        return False

    def _end(self) -> None:
        """Stop taking in newcomers."""
        runtime = current()
        if runtime.roster is not None and runtime.world.rank == 0:
            with suppress(RuntimeError):  # the store may not answer
                runtime.roster.end()

    def _meet_newcomers(self) -> bool:
        """Do for waiting processes what rank 0 decided, and learn which ranks have notice to leave.

        Returns whether to take processes in now; the same on all ranks. Without notices, the decision was
        made one step ago, so that no rank waits for it.
        """
        runtime = current()
        comm, wanted = runtime.communicator, StateRequest()
        now = time.monotonic()
        if runtime.roster is not None and comm.rank == 0 and now - self._looked >= _LOOK_EVERY:
            self._looked = now
            wanted = self._newcomers.look(runtime.roster)
        if runtime.config.elastic.notice is not None:
            agreed, told, _ = agreed_with_notices(comm, wanted)
            self._leavers = told if self._steps is None or self._done < self._steps else []
        else:
            agreed = wanted if comm.size == 1 else self._asked(comm, wanted)
        if agreed.what == GIVE and runtime.roster is not None:
            self._newcomers.give(runtime.roster, agreed)
        return agreed.what == TAKE_IN

    def _asked(self, comm: Communicator, wanted: StateRequest) -> StateRequest:
        """Return what rank 0 wanted one step ago, and begin to send what it wants now."""
        agreed = StateRequest()
        if self._asking is not None:
            work, errand = self._asking
            work.wait()
            agreed = StateRequest(*errand.tolist())
        self._asking = None
        if agreed.what != TAKE_IN:
            errand = torch.tensor(wanted, device="cpu")
            asks = comm.broadcast(errand, 0, async_op=True, compress=False, tag=_TAG)
            if asks is not None:
                self._asking = asks, errand
        return agreed

    def _join(self) -> None:
        """Become a rank of the job."""
        self._done = -1
        self._receiver = StateReceiver(self._model, self._optimizer)
        poll = unless_told(self._receiver.poll if self._precopy else _be_ready)
        try:
            with inheriting(current()) as inheritance:
                joined = join_job(self._passport, self._proposal(), self._timeout, "elastic", poll)
                if joined is None:
                    _log.warning(
                        "elastic: the job has ended before this process could join it, so it ends too"
                    )
                    raise SystemExit(0)
                has_begun = self._begin(joined, inheritance)
        except BaseException:
            self._receiver.close()
            raise
        if not has_begun:
            self._regroup()

    def _proposal(self) -> Proposal:
        """Return this rank's proposal, with its notice if all ranks have completed the step with it."""
        leaves, self._leavers = current().world.rank in self._leavers, []
        return Proposal(least=self._least, patient=not leaves, leaves=leaves)

    def _regroup(self) -> None:
        """Go on with the remaining ranks and waiting processes; repeat if a rank is lost meanwhile."""
        began, lost = time.monotonic(), dict[int, str]()
        while True:
            self._asking = None
            if (roster := current().roster) is not None:
                roster.precopies = self._newcomers.precopies()
            with inheriting(current()) as inheritance:
                runtime, changes = leave_epoch(current(), self._proposal(), self._timeout, "elastic")
                lost.update(changes.lost)
                if runtime.roster is not None:
                    self._newcomers.have_joined(runtime.roster)
                for param in self._model.parameters():
                    param.grad = None  # from a failed pass, or a bucket that no longer exists
                has_begun = self._begin(runtime, inheritance)
            if not has_begun:
                continue
            first = next(rank for rank, before in enumerate(changes.former) if before is not None)
            if runtime.world.rank == first:
                seconds = time.monotonic() - began
                line = changes_line(lost, changes.joined, self._done, runtime.world.size, seconds)
                _log.warning("%s", line)
            return

    def _begin(self, runtime: Runtime, inheritance: Inheritance) -> bool:
        """Start in a new world: hook the model into it, and get the state of the foremost rank.

        Returns False if a rank was lost meanwhile.
        """
        inheritance.is_new = self._done < 0
        try:
            inheritance.give(runtime)
            self._receive(runtime.communicator)
        except PeerLost:
            return False
        return True

    def _receive(self, comm: Communicator) -> None:
        """Give all ranks the state of a rank that has completed the most steps."""
        if self._receiver is not None:
            self._receiver.finish()
        has_parts = self._receiver is not None and self._receiver.has_parts
        own = self._done, has_parts, self._newcomers.gives
        answers: list[tuple[int, bool, bool]] = comm.all_gather_object(own, tag=_TAG)
        foremost = max(done for done, _, _ in answers)
        if foremost < 0:
            raise BackendError("elastic: all ranks that had the state of the model are lost")
        has: list[Has] = [
            "all" if done == foremost else "parts" if parts else "nothing" for done, parts, _ in answers
        ]
        if set(has) != {"all"}:
            if self._done < foremost:
                self._done = -1
                self._newcomers.end()  # its steps differ from those that it has sent
            # A newcomer's state is most similar to that of the rank that sent it.
            src = max(range(comm.size), key=lambda rank: (has[rank] == "all", answers[rank][2], -rank))
            self._receive_state(comm, src, has)
        self._done, self._receiver = foremost, None

    def _receive_state(self, comm: Communicator, src: int, has: Sequence[Has]) -> None:
        beside = [*self._model.parameters(), *self._model.buffers()]
        states = [self._optimizer.state_dict(), *(each.state_dict() for each in self._state)]
        received = broadcast_state(states, comm, src, beside, has)
        if self._done < 0:
            for target, state in zip([self._optimizer, *self._state], received, strict=True):
                target.load_state_dict(state)


def is_loss(error: BaseException) -> bool:
    """Return whether ranks are lost, or have left the job by an exception of their program."""
    return isinstance(error, PeerLost) or (
        isinstance(error, BackendError) and not isinstance(error, Revoked) and current().has_leavers()
    )


def checked_bounds(steps: int | None, min_ranks: int | None, size: int | None) -> int | None:
    """Return `min_ranks`, or else the launcher's; raises `InvalidArgument`. `size`: most ranks, if known."""
    if steps is not None and ((count := whole_number(steps)) is None or count < 0):
        raise InvalidArgument(f"steps: expected a number of steps or None, got {steps!r}")
    least = environment.min_ranks() if min_ranks is None else min_ranks
    if least is not None and ((count := whole_number(least)) is None or not 1 <= count <= (size or count)):
        upto = "on" if size is None else f"to {size}"
        raise InvalidArgument(f"min_ranks: expected a number of ranks from 1 {upto}, got {least!r}")
    return least


def _be_ready(request: JoinRequest) -> bool:
    """Ask to be taken in at once; the state follows afterwards."""
    if not request.is_ready:
        request.be_ready()
    return False


def _check_arguments(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Sequence[Stateful]
) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    check_elastic(optimizer)
    for number, each in enumerate(state):
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise InvalidArgument(
                f"state {number}: expected an object with state_dict and load_state_dict, got "
                f"{type(each).__name__}"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if getattr(tensor, "mcr_skip", False) or hasattr(tensor, "placements"):
            raise InvalidArgument(
                f"model: '{name}' is not replicated, so it is lost with a rank; elastic needs replicas"
            )
    local = {id(param) for each in state if isinstance(each, LocalSteps) for _, param in each.named}
    alone = unaveraged((name, param) for name, param in model.named_parameters() if id(param) not in local)
    if alone is not None:
        raise InvalidArgument(
            f"model: '{alone}' is averaged neither by mcr.wrap nor by an mcr.local among `state`, so "
            "replicas would not stay equal; call mcr.wrap(model, optimizer) first (without "
            "DistributedDataParallel around it), or mcr.local, and pass what it returns as `state`"
        )
