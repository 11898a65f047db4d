"""A job as one process runs it: its groups, its libraries, and its end."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from mcr_plus.board.base import Failure
from mcr_plus.communicator.open_group import OpenGroup, release_unused
from mcr_plus.core.environment import min_ranks, quota_cores
from mcr_plus.core.group import Group
from mcr_plus.engine.closing import abandon, close_states, drain, forget, help_others, never_waited
from mcr_plus.engine.engine import Engine
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import (
    BackendError,
    BackendUnavailable,
    McrError,
    OrderMismatch,
    PeerLost,
)
from mcr_plus.job.agreement import agree_before_opening, gather_patiently
from mcr_plus.job.checks import distinct_ranks
from mcr_plus.job.exit_barrier import SHORT, abort_barrier, linger_for, shutdown_barrier
from mcr_plus.job.libraries import IdleChannels, Libraries
from mcr_plus.job.members import first_roster, observed
from mcr_plus.job.notice import notice
from mcr_plus.job.opening import open_with_parts, warn_of_missing
from mcr_plus.job.process import job
from mcr_plus.job.wakeups import open_bells
from mcr_plus.kernels import compiling
from mcr_plus.pipeline.dispatch import DispatchStage
from mcr_plus.pipeline.pipeline import finish
from mcr_plus.pipeline.state import holds_tensors
from mcr_plus.rendezvous.store import exchange

if TYPE_CHECKING:
    from mcr_plus.backends.base import Backend
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.config.schema import Config
    from mcr_plus.engine.hook import OperationHook
    from mcr_plus.pipeline.stage import Stage
    from mcr_plus.rendezvous.processes import Sight
    from mcr_plus.rendezvous.world import World

_log = logging.getLogger("mcr_plus")
ValueT = TypeVar("ValueT")


class Runtime:
    """Everything that `init` creates and `finalize` takes down.

    Attributes:
        config: configuration of the job, including the program's own timeout.
        loaded: configuration without that timeout.
        timeout: the program's own timeout in seconds.
        is_native: whether `init` made the job, and not torch.distributed.
        closed: whether the job has ended here; `closed_because` says how, for messages.
        superseded: whether the job ended by a change of members, which another `reconfigure` may follow.
        communicator: communicator of all ranks.
        torch_ranks: number of each rank in torch.distributed, if it differs.
        groups: open groups, in the order in which they were opened.
        idle_channels: channels of groups closed here, which all ranks must close together.
        restored: group → stage → entries of a loaded state, see `Stage.load_state`.
        unmerged: group, stage and name of entries in `restored` that differ between ranks, see `rebind`.
        tagged: models by the tags of their operations. Two models with one tag would share codec state.
        attached: objects of higher layers that live as long as the job, by name.
        roster: the members of the job; None in a single process that no job has taken in.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        backends: Mapping[str, type[Backend]],
        loaded: Config,
        timeout: float | None = None,
        *,
        native: bool = True,
    ) -> None:
        options = config.options("dispatch")
        assert isinstance(options, DispatchOptions)
        self.config, self.loaded, self.timeout = config, loaded, timeout
        self.is_native = native
        self.closed = False
        self.closed_because = "finalize has been called"
        self.superseded = False
        self._goes_on = False  # the job, and its keepers, continue in another world
        self._peers = observed(world, options)
        bells = open_bells(world.store, world.rank, world.hosts, world.timeout)
        self.world = world = replace(world, bells=bells, lost=self.lost_among)
        self.roster = world.roster
        if self.roster is None and world.store is not None:
            self.roster = first_roster(world, self._peers, native=native)
            if world.rank == 0 and min_ranks() is not None:
                self.roster.announce()
        if self.roster is not None:
            self.roster.watch(self._peers.is_cut_off)
        here = world.hosts.count(world.hosts[world.rank])
        self.engine = Engine(
            self._peers,
            wait=options.wait,
            oversubscribed=world.oversubscribed,
            bells=bells,
            beside=self._peers.beside(),
            ranks=here,
            short=here > quota_cores(),
        )
        self.groups: list[OpenGroup] = []
        self.libraries = Libraries(config, world, backends)
        self.idle_channels = IdleChannels()
        self.torch_ranks: tuple[int, ...] | None = None
        self.restored: dict[str, dict[str, dict[str, Any]]] = {}
        self.unmerged: set[tuple[str, str, str]] = set()
        self.tagged: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.attached: dict[str, Any] = {}
        self._ended: list[Stage] = []  # stages of closed groups that need a `finish`
        self.groups_made = 0  # number of groups made by `new_group`
        try:
            self.libraries.open()
            self.engine.backends = list(self.libraries.backends.values())
            if options.progress == "thread":
                self._start_progress_thread()
            self.communicator = self.open_group("world", tuple(range(world.size)))
            for hook in job.hooks:
                hook.begin(self)
        except BaseException:
            self._abort_start()
            raise
        compiling.watchers.append(self.engine.compiles)

    def lost_ranks(self) -> dict[int, str]:
        """States of the job's lost ranks that this process knows."""
        return self._peers.states()

    def suspect(self, ranks: Sequence[int]) -> None:
        """Note that other processes have found these ranks lost; see `Peers.suspect`."""
        self._peers.suspect(ranks)

    def hand_over(self) -> Sight | None:
        """Return the agents' findings, before another world replaces this one; see `Peers.hand_over`."""
        return self._peers.hand_over()

    def is_running(self, rank: int) -> bool:
        """Return whether the process of a rank is seen to run."""
        return self._peers.status(rank) == "running"

    def has_leavers(self) -> bool:
        """Return whether a rank has left the job, in order or after an exception of its program."""
        board = self.communicator.opened.state.board
        peers = [rank for rank in range(self.world.size) if rank != self.world.rank]
        failures = [board.failure(rank) for rank in peers]
        return any(map(board.is_closed, peers)) or any(each and not each.sequence for each in failures)

    def lost_among(self, ranks: Sequence[int]) -> PeerLost | None:
        """Return the error of a wait for one of these ranks, if any is lost."""
        return self._peers.error(ranks)

    def _abort_start(self) -> None:
        """Close libraries and groups of a job that cannot begin."""
        self.closed = True
        self.engine.stop_thread()
        for opened in self.groups:
            release_unused(opened.runtime.channels)
            opened.state.close()
            opened.state.board.close()
        for backend in self.libraries.backends.values():
            backend.close(clean=False)
        self._peers.close()
        self.engine.waiting.close()
        self.engine.waiting.abandon()
        if self.world.bells is not None:
            self.world.bells.close()

    def _start_progress_thread(self) -> None:
        """Start the progress thread, if any library needs one."""
        polled = [backend for backend in self.engine.backends if backend.host_driven]
        for backend in polled:
            if problem := backend.thread_restriction():
                raise BackendUnavailable(
                    f"dispatch: progress: thread: {problem}; progress: caller works with it"
                )
        if polled:
            from mcr_plus.waiting.progress_thread import ProgressThread

            self.engine.progress_thread = ProgressThread(self.engine.progress_once)

    def add_hook(self, hook: OperationHook) -> None:
        """Add a hook. The program's calls are bound again, with the hook, to the same chains.

        Persistent operations bound before are not reported.
        """
        self.engine.add_hook(hook)
        self._forget_plans()

    def remove_hook(self, hook: OperationHook) -> None:
        """Remove a hook added by `add_hook`."""
        self.engine.remove_hook(hook)
        self._forget_plans()

    def _forget_plans(self) -> None:
        for opened in self.groups:
            opened.forget_plans()

    def set_timeout(self, opened: OpenGroup, seconds: float) -> None:
        """Set the deadline of a group's operations, also of operations in flight."""
        for group in opened.all:
            for stage in group.pipeline.stages:
                if isinstance(stage, DispatchStage):
                    stage.set_timeout(seconds)
            for operation in list(self.engine.bound):
                if operation.state is group.state:
                    operation.timeout = seconds

    # -- groups -----------------------------------------------------------------------------------

    @property
    def communicators(self) -> list[Communicator]:
        """Communicators of all open groups and of the groups inside them; the same on all ranks of each."""
        return [opened.communicator(self) for opened in self.groups]

    def open_group(
        self, name: str, ranks: tuple[int, ...], config: Config | None = None, *, checked: bool = False
    ) -> Communicator:
        """Create the communicator of `ranks`; collective over them.

        `config`: configuration of its pipeline, None for the job's. `checked`: whether the ranks have agreed
        (`agree`) that all of them have enough file descriptors for the group; if not, they do so now.
        """
        world, config = self.world, config or self.config
        rank = ranks.index(world.rank) if world.rank in ranks else -1
        group = Group(name, ranks, rank)
        if not checked and rank >= 0 and group.size > 1 and world.store is not None:
            store, rounds = world.store_of(group), count()

            def gather(mine: object) -> list[Any]:
                what = f"opening/{name}/{next(rounds)}"
                texts = exchange(store, rank, group.size, what, json.dumps(mine), world.timeout, group=group)
                return [json.loads(text) for text in texts]

            what, sizes = f"group '{name}'", [group.size] * group.size
            agree_before_opening(self, ranks, gather, None, what, lambda _: sizes)
        try:
            channels, dropped = self.libraries.open_channels(group) if rank >= 0 else ({}, {})
            warn_of_missing(group, dropped)
            if name == "world":
                self.libraries.dropped = frozenset(dropped)
            return open_with_parts(self, group, channels, config).communicator(self)
        except McrError:
            raise
        except RuntimeError as error:  # from torch's store, or a library that uses it
            raise BackendError(f"group '{name}' cannot be opened over the job's store: {error}") from error
        finally:
            for failed in set(world.stores) - {opened.name for opened in self.groups} - world.opening:
                self.leave_store(failed)

    def new_group(self, ranks: Sequence[int]) -> Communicator:
        """See `mcr_plus.new_group`."""
        chosen = distinct_ranks(ranks, self.world.size)
        sizes = [len(chosen) if rank in chosen else 0 for rank in range(self.world.size)]
        for rank, passed in enumerate(self.agree(self.communicator, chosen, "new_group", lambda _: sizes)):
            if passed != chosen:
                raise OrderMismatch(
                    f"new_group: rank {self.world.rank} passed {list(chosen)}, rank {rank} passed "
                    f"{list(passed)}; all ranks of the job must create the same groups in the same order"
                )
        self.groups_made += 1
        made = self.open_group(f"group{self.groups_made}", chosen, checked=True)
        made.opened.follows = True
        return made

    def agree(
        self,
        communicator: Communicator,
        value: ValueT,
        what: str,
        sizes: Callable[[Sequence[ValueT]], Sequence[int]],
    ) -> list[ValueT]:
        """Return every rank's `value`, before groups are opened inside a group; collective over that group.

        Also closes the groups inside it that all their ranks have dropped. `sizes` maps the values of all
        ranks to the size of each rank's new group. Raises `BackendError` on all ranks if one of them has too
        few file descriptors left for it.
        """
        gather = partial(gather_patiently, communicator, what)
        return agree_before_opening(self, communicator.ranks, gather, value, what, sizes)

    def wait_in_flight(self, opened: OpenGroup) -> None:
        """Wait for all operations in flight in a group; raise the first error."""
        if opened.state.failure is None:
            opened.pipeline.flush()
            drain(self.engine, [open_group.state for open_group in opened.all])
            opened.finish_arrays()

    def leave(self, communicator: Communicator, clean: bool = True) -> None:
        """Close a group here, or the job if the group has all its ranks; do nothing if it is already closed.

        Other ranks may still use the group. With `clean`, wait for all operations in flight and raise the
        first error. Without, as at the end of a `with` block after an exception, wait for none. If another
        world has replaced the world of this group, close the replacement instead.
        """
        if self.closed or communicator.closed:
            successor = job.runtime
            is_replaced = communicator is self.communicator and communicator.opened.state.revoked
            if is_replaced and successor is not None and not successor.closed:
                successor.leave(successor.communicator, clean)
            return
        if communicator is self.communicator:
            self.close(clean)
            return
        try:
            if clean:
                self.wait_in_flight(communicator.opened)
        finally:
            self.remove(communicator.opened, clean)

    def close_together(self, opened: OpenGroup) -> None:
        """See `Communicator.close`."""
        if opened is self.communicator.opened:
            self.leave(self.communicator)
        elif not opened.state.closed:
            together, state, group = False, opened.state, opened.group
            try:
                self.wait_in_flight(opened)
                if group.size > 1 and group.rank >= 0 and state.failure is None:
                    # From here on no rank has operations in flight.
                    off = opened.communicator(self).all_gather_object(self.engine.off, tag="close")
                    self.libraries.note_disabled(group.ranks, off)
                together = state.failure is None
            finally:
                self.remove(opened, together, together=together)

    def remove(self, opened: OpenGroup, clean: bool, *, together: bool = False) -> None:
        """Close a group with no operations left to wait for; see `OpenGroup.shut_alone`."""
        off = self.libraries.disabled_on(opened.group.ranks) if together else ()
        opened.forget_attached(clean)
        for open_group in opened.all:
            self._ended += [stage for stage in open_group.pipeline.stages if stage.needs_finish]
            self.idle_channels.add(open_group.group, open_group.shut_alone(clean, together=together, off=off))
            self.groups.remove(open_group)
            self.engine.states.remove(open_group.state)
            self.leave_store(open_group.name)
            if not any(self.restored.get(open_group.name, {}).values()):
                self.restored.pop(open_group.name, None)

    def leave_store(self, name: str) -> None:
        """Drop a group's keys in the job's store, unless rank 0, which serves it, does not answer."""
        store = self.world.stores.pop(name, None)
        if store is not None and not self._peers.is_away(0):
            store.leave()

    # -- the end ----------------------------------------------------------------------------------

    def close(self, clean: bool) -> None:
        """Close the job. With `clean`, wait for operations in flight and raise their first error."""
        self.closed = True
        job.communicator = None
        job.disabled.update(self.engine.off)
        self._stop_watching()
        self.engine.stop_thread()
        error: McrError | None = None
        clean = clean and not self.engine.failed
        # Complete all operations while peers still take part in them.
        if clean:
            try:
                for opened in self.groups:
                    opened.pipeline.flush()
                drain(self.engine)
                for opened in self.groups:
                    opened.finish_arrays()
            except McrError as failure:
                error, clean = failure, False
        if clean:
            for text in filter(None, (never_waited(self.engine), *job.unfinished())):
                _log.warning("rank %d: %s", self.world.rank, text)
            error = self._finish_stages()
        job.hooks_closing()
        # Peers that wait for this rank must learn that it leaves before it waits for them.
        for state in self.engine.states:
            state.publish()
            if clean:
                state.board.mark_closed()
            else:
                state.board.mark_failed(Failure(0, "it left the job after an error"))
        clean = clean and self.wait_for_all_to_end(self.world.timeout)
        job.hooks_closed()
        for opened in reversed(self.groups):
            opened.shut(clean)
        self.idle_channels.give_up()
        close_states(self.engine, clean)
        self.libraries.close(clean)
        if not self._goes_on:
            notice.close()
            self.leave_keepers()
        self._peers.close()
        self.engine.waiting.close()
        if error is not None:
            raise error

    def leave_keepers(self) -> None:
        """Let the keepers end once all ranks of their hosts have called this, or have ended."""
        if self.roster is not None and self.roster.kept is not None:
            self.roster.kept.leave()

    def _stop_watching(self) -> None:
        if self.engine.compiles in compiling.watchers:
            compiling.watchers.remove(self.engine.compiles)

    def _finish_stages(self) -> McrError | None:
        """Call `finish` of the stages. An error is this rank's own, and the job still ends in good order."""
        try:
            finish(
                [*self._ended, *chain.from_iterable(open_group.pipeline.stages for open_group in self.groups)]
            )
            unused = [
                f"'{group}': {name}"
                for group, stages in self.restored.items()
                for entries in stages.values()
                for name, value in entries.items()
                if holds_tensors(value)  # tensors change results; plain data, such as measurements, does not
            ]
            if unused and self.world.rank == 0:
                _log.warning(
                    "state: %d loaded operations were never issued, for example in group %s",
                    len(unused),
                    unused[0],
                )
        except McrError as failure:
            return failure
        return None

    def wait_for_all_to_end(self, timeout: float = SHORT) -> bool:
        """Wait until all ranks have ended the job, with or without errors; return whether they have.

        `timeout`: in seconds. If it exceeds the default, failed ranks are not waited for.
        """
        board = self.engine.states[0].board
        store, names = self.world.store, {backend.name for backend in job.backends.values()}

        def has_failed(rank: int) -> bool:
            return timeout > SHORT and board.failure(rank) is not None

        def read_disabled() -> None:
            if store is not None:
                job.disabled |= {name for name in names if store.check([f"off/{name}"])}

        job.all_ended = shutdown_barrier(
            self.world,
            "closing",
            self._peers,
            patience=timeout,
            has_failed=has_failed,
            notes=[f"off/{name}" for name in job.disabled],
            then=read_disabled,
            meanwhile=partial(help_others, self.engine),
        )
        return job.all_ended

    def prepare_reset(self) -> None:
        """Close the channels that no peer waits for; keep those that all ranks must close together.

        A channel whose library may still run an operation stays open.
        """
        self._goes_on = True
        for opened in reversed(self.groups):
            idle = not forget(self.engine, opened.state)
            channels = {name: each.channel for name, each in opened.runtime.channels.items()}
            for channel in channels.values() if idle else ():
                if channel.closes_alone:
                    channel.release()
            kept = {
                name: channel
                for name, channel in channels.items()
                if not channel.closes_alone and name not in opened.state.unfinished
            }
            self.idle_channels.add(opened.group, kept)

    def crash(self) -> None:
        """Leave after an uncaught exception; wait for no ranks except those that caused the exception."""
        abort_barrier(self.world, self._peers)
        self.leave(self.communicator, clean=False)
        linger_for(self._peers, self.engine.watchdog.failed_peers)

    def abandon(self) -> None:
        """Drop the parent's groups and libraries in a forked child, without closing them."""
        self.closed = True
        self._stop_watching()
        abandon(self.engine)
        for state in self.engine.states:
            state.abandon()
        for backend in self.libraries.backends.values():
            backend.abandon()
