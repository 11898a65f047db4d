"""Life cycle of a process group: its end, its errors, and changes of its ranks, as c10d defines them.

The first group of the backend is the job's world. When it is shrunk or reconfigured, a new job replaces the
old job, and other groups of the old job raise `Revoked`. Other groups can be shrunk, but not reconfigured,
because a process has one job.
"""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch._C import _distributed_c10d as bindings

from mcr_plus.core.c10d import PrefixStore, Store
from mcr_plus.errors import (
    BackendError,
    CommTimeout,
    InvalidArgument,
    McrError,
    NotInitialized,
    PeerLost,
    Revoked,
    Unsupported,
)
from mcr_plus.job import reconfigure as reconfiguring
from mcr_plus.job.epoch_change import leave_epoch
from mcr_plus.job.process import job
from mcr_plus.job.rebind import inheriting
from mcr_plus.membership.rules import Proposal
from mcr_plus.torch_backend.hooks import HookableGroup
from mcr_plus.torch_backend.jobs import torch_job
from mcr_plus.torch_backend.work import DONE, Membership, untraced

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.job.runtime import Runtime

SHRINK_DEFAULT: Final = 0
SHRINK_ABORT: Final = 1
_log = logging.getLogger("mcr_plus")


@untraced
class LivingGroup(HookableGroup):
    """Life cycle of `McrProcessGroup`, without its operations.

    When a group and all its handles have been garbage-collected, it is left as by `abort`.
    """

    _membership: Membership
    _finalizer: weakref.finalize[..., object] | None = None

    def __init__(self, store: Store, rank: int, size: int, open_group: Callable[[], Communicator]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs have another signature
        self._store = store
        self._rank, self._size = rank, size
        self._open_group = open_group
        self._owner = 0
        self._destroyed = False
        self._communicator: Communicator | None = None
        self._runtime: Runtime | None = None  # runtime of the communicator, kept after the communicator's end
        self._failure: BaseException | None = None  # error of the last communicator
        self._name = self._desc = ""

    @property
    def communicator(self) -> Communicator:
        """The group's `mcr_plus.Communicator`; its calls take codecs, tags and backends."""
        if self._destroyed:
            raise NotInitialized(f"process group '{self._name}' has been destroyed")
        if self._communicator is None:
            self._enter(self._open_group())
        assert self._communicator is not None
        return self._communicator

    @property
    def is_destroyed(self) -> bool:
        """True if the group cannot be used any more, unless `reconfigure` follows."""
        return self._destroyed

    def _enter(self, communicator: Communicator) -> None:
        """Use a communicator of torch's job from now on."""
        self._communicator, self._runtime = communicator, torch_job.runtime
        self._rank, self._size = communicator.rank, communicator.size
        self._destroyed, self._failure, self._owner = False, None, 0
        self._membership = Membership(communicator)
        self._finalizer = weakref.finalize(self._membership, torch_job.drop, communicator, torch_job.runtime)
        self._finalizer.atexit = False

    def detach(self) -> Communicator | None:
        """Mark this group as destroyed, so that later calls raise; return its communicator."""
        communicator, self._communicator, self._owner, self._destroyed = self._communicator, None, 0, True
        if self._finalizer is not None:
            self._finalizer.detach()
        if communicator is not None:
            self._failure = communicator.state.failure
        return communicator

    def getRank(self) -> int:  # noqa: N802 - torch's name; its C++ code calls this
        """Return this process's rank in the group; `reconfigure` may change it."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802 - torch's name; its C++ code calls this
        """Return the number of ranks in the group; `reconfigure` may change it."""
        return self._size

    rank, size = getRank, getSize

    # -- the end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for operations in flight, then leave the group, and with the last group the job."""
        communicator = self.detach()
        if communicator is not None:
            try:
                torch_job.leave(communicator)
            except McrError as error:  # logged, not raised: else torch would not remove the group
                _log.error("an operation that was never waited for has failed: %s", error)

    def abort(self) -> None:
        """Leave the group, and with the last group the job, without waiting for operations or peers.

        `reconfigure` may follow, if this is the first group.
        """
        communicator = self.detach()
        if communicator is not None:
            torch_job.leave(communicator, clean=False)

    def get_error(self) -> Any:
        """Return why the group cannot be used any more, as `ErrorType`; SUCCESS if it can, and after `abort`.

        TIMEOUT means a deadline has passed, REMOTE_ERROR a rank was lost, COMM_ERROR anything else. Raises
        `Unsupported` if torch has no `ErrorType` (before 2.7).
        """
        kinds = getattr(bindings, "ErrorType", None)
        if kinds is None:
            raise Unsupported("get_error: this version of torch has no ErrorType")
        error = self.failure
        if error is None:
            return kinds.SUCCESS
        if isinstance(error, CommTimeout):
            return kinds.TIMEOUT
        return kinds.REMOTE_ERROR if isinstance(error, (PeerLost, Revoked)) else kinds.COMM_ERROR

    @property
    def place(self) -> str:
        """Name of the job, equal on all its ranks; it changes with each change of the ranks."""
        assert self._runtime is not None
        roster = self._runtime.roster
        return roster.place if roster is not None else ""

    @property
    def failure(self) -> BaseException | None:
        """The error that made the group unusable; None while the group can be used, and after `abort`."""
        return self._failure if self._communicator is None else self._communicator.state.failure

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of operations, also of operations in flight, and of the next `reconfigure`.

        Raises `InvalidArgument` if `timeout` is not positive.
        """
        seconds = timeout.total_seconds()
        if seconds <= 0:
            raise InvalidArgument(f"timeout: expected a positive duration, got {timeout}")
        communicator = self.communicator
        assert self._runtime is not None
        self._runtime.set_timeout(communicator.opened, seconds)

    _set_default_timeout = set_timeout

    # -- other ranks ------------------------------------------------------------------------------

    supports_shrinking = supports_reconfigure = supports_splitting = True

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,  # noqa: ARG002 - the group serves all devices
    ) -> LivingGroup | None:
        """Make a group of some ranks of this group, in the given order; return None on other ranks.

        Collective over `new_ranks`; other ranks need not call it. The new group has the pipeline of this
        group, and its timeout if `timeout` is None.

        Raises:
            InvalidArgument: `new_ranks` is empty, names a rank twice, or names a rank outside the group.
            Unsupported: `opts` is a pipeline; use `new_group` for another pipeline.
        """
        ranks = list(new_ranks)
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self._size)):
            raise InvalidArgument(
                f"new_ranks: expected different ranks of 0 to {self._size - 1}, got {ranks}"
            )
        if isinstance(opts, (str, Path, Mapping)):
            raise Unsupported(
                "pg_options: a split group keeps its parent's pipeline; new_group takes another"
            )
        if self._rank not in ranks:
            return None
        communicator, runtime = self.communicator, self._runtime
        assert runtime is not None
        seconds = None if timeout is None else timeout.total_seconds()
        name = group_name or f"{self._name}:split:{ranks}"
        group = self.over(
            PrefixStore(f"{name}/", self._store), torch_job.split(runtime, communicator, ranks, seconds)
        )
        group._name, group._desc = name, group_desc or f"{self._desc}:split"
        assert group.communicator
        return group

    splitGroup = split_group  # noqa: N815 - the name that C++ calls

    def shrink(
        self,
        ranks_to_exclude: Sequence[int],
        shrink_flags: int = SHRINK_DEFAULT,
        opts_override: object = None,
    ) -> LivingGroup:
        """Make a group without some ranks, dead or alive; collective over the remaining ranks.

        The remaining ranks keep their order. This group cannot be used afterwards; the caller destroys it.

        Args:
            ranks_to_exclude: ranks of this group; they do not call `shrink`.
            shrink_flags: SHRINK_DEFAULT first waits for operations in flight, unless the group has failed;
                SHRINK_ABORT does not wait.
            opts_override: None; the new group has the pipeline of this group.

        Raises:
            Unsupported: `opts_override` is something else.
            InvalidArgument: the excluded ranks are not in the group, are all its ranks, or have called
                `shrink`.
            CommTimeout: a remaining rank has not called `shrink` in time. As with the next error, the group
                stays unchanged, and all ranks may call `shrink` again.
            BackendError: another rank has been lost as well.
            Revoked: the other ranks have excluded this rank.
            LaunchError: the job's store does not answer.
        """
        excluded = sorted(set(ranks_to_exclude))
        if not excluded or excluded[0] < 0 or excluded[-1] >= self._size or len(excluded) >= self._size:
            raise InvalidArgument(
                f"ranks_to_exclude: expected some of the ranks 0 to {self._size - 1}, got "
                f"{list(ranks_to_exclude)}"
            )
        if self._rank in excluded:
            raise InvalidArgument(f"ranks_to_exclude: {self._rank} is this rank itself")
        if opts_override is not None:
            raise Unsupported("opts_override: a shrunk group keeps its pipeline; new_group takes another one")
        communicator, runtime = self.communicator, self._runtime
        assert runtime is not None
        if shrink_flags == SHRINK_DEFAULT:
            runtime.wait_in_flight(communicator.opened)
        stay = [rank for rank in range(self._size) if rank not in excluded]
        if communicator is not runtime.communicator:
            ranks = [communicator.ranks[rank] for rank in stay]
            return self.with_communicator(
                torch_job.open(runtime, ranks, self._name, communicator.opened.config)
            )
        proposal = Proposal(named=tuple(excluded), least=len(stay))
        with inheriting(runtime, takes_codecs=True) as inheritance:
            new, _ = leave_epoch(runtime, proposal, runtime.world.timeout, "shrink")
            torch_job.go_on(new)
            inheritance.give(new)
        return self.with_communicator(new.communicator)

    def with_communicator(self, communicator: Communicator) -> LivingGroup:
        """Return a group that uses an open communicator of this process's job."""
        group = self.over(self._store, communicator)
        group._enter(communicator)
        return group

    @classmethod
    def over(cls, store: Store, communicator: Communicator) -> LivingGroup:
        """Return a group of this class over an open communicator."""
        return cls(store, communicator.rank, communicator.size, lambda: communicator)

    def get_reconfigure_handle(self) -> str:
        """Return a text that identifies this process, also after `abort`, until `reconfigure` succeeds.

        Raises `Unsupported` unless this is the first group.
        """
        return reconfiguring.handle(self._world())

    def reconfigure(self, opts: Any) -> dist.Work:
        """Replace the world of this group by the processes named in `opts.handles`; collective.

        `opts`: torch's `ReconfigureOptions` (from 2.14 on), or any object with `uuid`, new for each attempt,
        `handles`, and optionally `timeout`. A list of handles is in rank order; a set is sorted. Rank and
        size of the group change; `hints` are ignored.

        Returns a complete handle. Raises `Unsupported` unless this is the first group, and otherwise the
        errors of `mcr_plus.reconfigure`.
        """
        runtime = self._world()
        handles, timeout = opts.handles, getattr(opts, "timeout", None)
        texts = sorted(handles) if isinstance(handles, (set, frozenset)) else list(handles)
        seconds = runtime.world.timeout
        if timeout is not None and timeout > timedelta(0):
            seconds = timeout.total_seconds()
        with inheriting(runtime, takes_codecs=True) as inheritance:
            new = reconfiguring.reconfigure(runtime, f"torch {opts.uuid}", texts, seconds)
            self.detach()
            torch_job.go_on(new)
            self._enter(new.communicator)
            inheritance.give(new)
        return DONE

    def _world(self) -> Runtime:
        """Return the job that has this group as its world; open the group first if needed."""
        if self._communicator is None and not self._destroyed:
            assert self.communicator
        runtime = self._runtime
        if runtime is None:
            raise NotInitialized(f"process group '{self._name}' has been destroyed before its first use")
        if self._communicator is not None and self._communicator is not runtime.communicator:
            raise Unsupported(
                f"process group '{self._name}' is not a whole job; only the first group of mcr can be "
                "reconfigured, and with it the job"
            )
        if not (runtime.closed or runtime is job.runtime):
            raise BackendError(f"process group '{self._name}' belongs to a job that has ended")
        return runtime
