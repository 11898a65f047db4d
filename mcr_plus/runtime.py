"""The life of a job in this process: from `init` to `finalize`, or to the end of the process without it."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import operator
import os
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial, reduce
from itertools import chain, count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from mcr_plus import config as configuration
from mcr_plus.backends import backend_class, preferred_backends, reaching
from mcr_plus.c10d import HashStore, PrefixStore, Store
from mcr_plus.communicator import Communicator
from mcr_plus.config import Config, DispatchOptions, HierarchicalOptions
from mcr_plus.descriptors import descriptors_for, descriptors_left, lacking_descriptors
from mcr_plus.dispatch.bells import open_bells
from mcr_plus.dispatch.board import Failure, open_board
from mcr_plus.dispatch.engine import Engine, GroupState
from mcr_plus.dispatch.meeting import SHORT, call_off, let_go_first, meet
from mcr_plus.dispatch.operation import Lane
from mcr_plus.dispatch.peers import Peers
from mcr_plus.dispatch.progress import ProgressThread
from mcr_plus.dispatch.stage import GroupRuntime, Line
from mcr_plus.environment import (
    LaunchEnvironment,
    host_name,
    launch_environment,
    msccl_library,
    quota_cores,
    usable_cores,
)
from mcr_plus.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    InvalidArgument,
    McrError,
    NotInitialized,
    OrderMismatch,
)
from mcr_plus.groups import OpenGroup, give_up, let_go
from mcr_plus.hierarchy.nodes import Part, check_nodes, inner_groups
from mcr_plus.interfaces import Backend, Channel, Context, Stage, World
from mcr_plus.kernels import compiling
from mcr_plus.launch.rendezvous import exchange, open_plain_store, open_store
from mcr_plus.launch.signing import SignedStore
from mcr_plus.message import Group
from mcr_plus.pipeline import Pipeline, finish
from mcr_plus.selection.checks import check_targets, checked_tables, use_algorithms
from mcr_plus.selection.fingerprint import differences, fingerprint_here, library_versions

_TO_JOIN: Final = 24  # file descriptors that libraries open once in a job, whatever they connect
ValueT = TypeVar("ValueT")
Source = str | Path | Mapping[str, Any] | None
"""Where a configuration may be read from, see `config.load`."""


class Runtime:
    """Everything that `init` creates and `finalize` takes down."""

    def __init__(
        self,
        config: Config,
        world: World,
        backends: Mapping[str, type[Backend]],
        loaded: Config,
        timeout: float | None = None,
    ) -> None:
        """`loaded`: the configuration before a program's own `timeout`, in seconds, has been put into it."""
        options = config.options("dispatch")
        assert isinstance(options, DispatchOptions)
        self.config = config
        self.loaded = loaded
        self.timeout = timeout
        self.is_native = True  # made by `init`, and not for torch.distributed
        self.world = world
        self.closed = False
        self.ended = "finalize has been called"  # how that came about, for messages
        self._classes = backends
        self._peers = Peers(world.rank, world.hosts, world.store, world.timeout)
        bells = open_bells(world.store, world.rank, world.hosts, world.timeout)
        self.world = world = replace(world, bells=bells)
        here = world.hosts.count(world.hosts[world.rank])
        self.engine = Engine(
            self._peers,
            wait=options.wait,
            oversubscribed=world.crowded,
            bells=bells,
            beside=self._peers.beside(),
            ranks=here,
            short=here > quota_cores(),
        )
        self._backends: dict[str, Backend] = {}
        self.groups: list[OpenGroup] = []  # in the order in which they were opened
        # What of groups that were left in good order must be closed on all ranks together: by name and ranks,
        # the channels by their libraries.
        self._left: dict[tuple[str, tuple[int, ...]], dict[str, Channel]] = {}
        self._ended: list[Stage] = []  # of groups that were closed, as far as they have learnt something
        # Group → operation → what codecs had kept in an earlier job and nobody has asked for yet.
        self.restored: dict[str, dict[str, Any]] = {}
        self.found: dict[str, dict[str, Any]] = {}  # group → what online refinement had found out
        self._off: dict[int, dict[str, str]] = {}  # rank → libraries it calls no more, as last agreed on
        self._groups = 0
        self._dropped: frozenset[str] = frozenset()
        # By the tags of their operations: modules that share one would share what codecs keep for it.
        self.tagged: WeakValueDictionary[str, Any] = WeakValueDictionary()
        try:
            # A single process needs no library: whatever is named, copies do it.
            for name, kind in backends.items() if world.size > 1 else [("local", backends["local"])]:
                self._backends[name] = kind(world)
            self.engine.backends = list(self._backends.values())
            if options.progress == "thread":
                self._drive_by_thread()
            self.communicator = self.open_group("world", tuple(range(world.size)))
        except BaseException:
            self._take_back()
            raise
        compiling.watchers.append(self.engine.compiles)

    def _take_back(self) -> None:
        """Close what has been opened for a job that cannot begin."""
        self.closed = True
        self.engine.stop_thread()
        for opened in self.groups:
            let_go(opened.runtime.lines)
            opened.state.close()
            opened.state.board.close()
        for backend in self._backends.values():
            backend.close(clean=False)
        self.engine.waiting.close()
        self.engine.waiting.abandon()
        if self.world.bells is not None:
            self.world.bells.close()

    @property
    def backend_names(self) -> list[str]:
        """The libraries of this job, in fallback order, but for those that the group `world` goes without."""
        known = [name for name in self._classes if name != "local" or self.world.size == 1]
        return [name for name in known if name not in self._dropped]

    def _stop_watching(self) -> None:
        if self.engine.compiles in compiling.watchers:
            compiling.watchers.remove(self.engine.compiles)

    def _drive_by_thread(self) -> None:
        """Start the progress thread, if any library needs one."""
        waiting = [backend for backend in self.engine.backends if getattr(backend, "needs_polls", False)]
        for backend in waiting:
            if problem := backend.refuses_threads():  # type: ignore[attr-defined]  # see `Backend`
                raise BackendUnavailable(
                    f"dispatch: progress: thread: {problem}; progress: caller works with it"
                )
        if waiting:
            self.engine.progress_thread = ProgressThread(self.engine.drive)

    @property
    def communicators(self) -> list[Communicator]:
        """Of all groups that are open, equal on all ranks of each."""
        return [each.communicator(self) for each in self.groups]

    def open_group(
        self, name: str, ranks: tuple[int, ...], config: Config | None = None, *, checked: bool = False
    ) -> Communicator:
        """Create the communicator of `ranks`; collective over them.

        `config`: of its pipeline, None for that of the job. `checked`: whether the ranks have agreed that all
        of them have file descriptors left for it, see `agree`; if not, they do so now.
        """
        world, config = self.world, config or self.config
        rank = ranks.index(world.rank) if world.rank in ranks else -1
        group = Group(name, ranks, rank)
        if not checked and rank >= 0 and group.size > 1 and world.store is not None:
            store, meetings = world.store_of(group), count()

            def tell(mine: object) -> list[Any]:
                what = f"opening/{name}/{next(meetings)}"
                told = exchange(store, rank, group.size, what, json.dumps(mine), world.timeout)
                return [json.loads(text) for text in told]

            self._agree(ranks, tell, None, f"group '{name}'", lambda _: [group.size] * group.size)
        try:
            lines, dropped = self._open_lines(group) if rank >= 0 else ({}, {})
            self._tell_what_is_missing(group, dropped)
            if name == "world":
                self._dropped = frozenset(dropped)
            return self._open_over(group, lines, config).communicator(self)
        except McrError:
            raise
        except RuntimeError as error:  # of torch's store, or of a library that has asked it
            raise BackendError(f"group '{name}' cannot be opened over the job's store: {error}") from error
        finally:
            for failed in world.stores.keys() - {each.name for each in self.groups}:
                self.leave_store(failed)

    def leave_store(self, name: str) -> None:
        """Let go of a group's keys in the job's store, unless rank 0, which serves it, does not answer."""
        store = self.world.stores.pop(name, None)
        if store is not None and self._peers.status(0) not in ("dead", "stopped"):
            store.leave()

    def _open_over(
        self, group: Group, lines: dict[str, Line], config: Config, *, inner: bool = False
    ) -> OpenGroup:
        """A group whose libraries are open."""
        world, name, rank = self.world, group.name, group.rank
        one_host = len({world.hosts[each] for each in group.ranks}) == 1
        store = world.store_of(group) if rank >= 0 and group.size > 1 and world.store is not None else None
        with ExitStack() as undo:
            undo.callback(let_go, lines)
            board = open_board(store, group, one_host, world.timeout)
            channels: list[Any] = [
                line.channel for line in lines.values() if hasattr(line.channel, "ballots")
            ]
            if channels:  # one library only: the n-th ballot of each rank must be for the same operation
                channels[0].ballots = board.ballots
            state = GroupState(group, board)
            restored, found = (kept.setdefault(name, {}) for kept in (self.restored, self.found))
            runtime = GroupRuntime(self.engine, state, lines, {}, restored=restored, found=found)
            usable = {name: self._classes[name] for name in lines} if rank >= 0 else dict(self._classes)
            parts: dict[str, Pipeline] = {}
            context = Context(config, world, group, usable, runtime, parts)
            pipeline = Pipeline(context)
            undo.pop_all()
        opened = OpenGroup(group, pipeline, runtime, config, inner)
        self.engine.states.append(state)
        state.recorded = bool(self.engine.recorders)
        state.refresh()
        self.groups.append(opened)
        for part, members in inner_groups(config, world.hosts, group).items():
            # On all ranks in the same order, here and not at the first use: it is collective.
            below = self._open_part(group, part, members, config)
            opened.parts.append(below)
            runtime.caches.append(below.runtime.forget)
            parts[part] = below.pipeline
        return opened

    def _open_part(self, group: Group, part: Part, inner: Group, config: Config) -> OpenGroup:
        """Open a group inside of `group`, of `config`; one that cannot be had is told to all of them.

        A library that one of the groups of this part must go without is left out in all of them. Raises
        `BackendUnavailable` on all ranks of `group` if that is one the configuration names for the step.
        """
        problem = ""
        lines: dict[str, Line] = {}
        dropped: dict[str, str] = {}
        try:
            lines, dropped = self._open_lines(inner)
        except BackendUnavailable as error:
            problem = f"group '{inner.name}': {error}"
        named = {name: f"group '{inner.name}': {reason}" for name, reason in dropped.items()}
        with ExitStack() as undo:
            undo.callback(let_go, lines)
            missing = self._missing(group, part, config, (problem, list(lines), named))
            undo.pop_all()
        self._tell_what_is_missing(inner, missing)
        let_go({name: lines.pop(name) for name in missing.keys() & lines.keys()})
        return self._open_over(inner, lines, config.below("hierarchical"), inner=True)

    def _missing(
        self, group: Group, part: Part, config: Config, mine: tuple[str, list[str], dict[str, str]]
    ) -> dict[str, str]:
        """The libraries that one of the groups of a part must go without, and why; raises for `_open_part`.

        `mine`: of this rank's group of the part, why it cannot be had, its libraries, and those it lacks.
        """
        world, what = self.world, f"opened/{group.name}/{part}"
        answers = exchange(
            world.store_of(group), group.rank, group.size, what, json.dumps(mine), world.timeout
        )
        told = [json.loads(text) for text in answers]
        if problem := next((problem for problem, _, _ in told if problem), ""):
            raise BackendUnavailable(problem)
        missing: dict[str, str] = {}
        for _, _, reasons in told:
            missing = {**reasons, **missing}
        step = "inter" if part == "across" else "local"
        for name in sorted(_named_for(step, config) & missing.keys()):
            raise BackendUnavailable(f"hierarchical.{step}.backend: {name} was asked for; {missing[name]}")
        for _, opened, _ in told:
            if missing and not set(opened) - missing.keys():
                raise BackendUnavailable("; ".join(missing.values()))
        return missing

    def _open_lines(self, group: Group) -> tuple[dict[str, Line], dict[str, str]]:
        """Every library of the job that can serve a group, as this group uses it; what is left out, and why.

        Left out is, where the configuration names none, one that cannot be had for this group after all.
        """
        names = reaching(self._backends, self.world, group)
        lines: dict[str, Line] = {}
        dropped = {name: reason for name, reason in self._off_in(group.ranks).items() if name in names}
        for name, reason in dropped.items():
            if self.config.backends is not None or len(names) == len(dropped):
                raise BackendUnavailable(f"backend {name}: {reason}")
        with ExitStack() as undo:
            undo.callback(let_go, lines)
            for name in names:
                if name in dropped:
                    continue
                backend = self._backends[name]
                try:
                    lines[name] = Line(backend, backend.open(group), Lane())
                except BackendUnavailable as error:  # told to all ranks of the group alike
                    if self.config.backends is not None or len(names) == 1:
                        raise
                    dropped[name] = str(error)
            undo.pop_all()
        return lines, dropped

    def _off_in(self, ranks: Sequence[int]) -> dict[str, str]:
        """What libraries one of these ranks calls no more, and why: as last agreed on, so alike on all."""
        return {
            name: f"rank {rank}: {reason}"
            for rank in reversed(ranks)
            for name, reason in self._off.get(rank, {}).items()
        }

    def _tell_what_is_missing(self, group: Group, missing: Mapping[str, str]) -> None:
        for name, reason in missing.items() if group.rank == 0 else ():
            _log.warning("group '%s' goes without %s: %s", group.name, name, reason)

    def new_group(self, ranks: Sequence[int]) -> Communicator:
        """See `mcr_plus.new_group`."""
        size = self.world.size
        try:
            chosen = tuple(operator.index(rank) for rank in ranks)
        except TypeError:
            raise InvalidArgument(f"ranks: expected a list of ranks, got {ranks!r}") from None
        wrong = [rank for rank in chosen if not 0 <= rank < size]
        if wrong or len(set(chosen)) != len(chosen) or not chosen:
            raise InvalidArgument(
                f"ranks: expected distinct ranks from 0 to {size - 1}, at least one, got {list(ranks)}"
            )
        sizes = [len(chosen) if rank in chosen else 0 for rank in range(size)]
        for rank, theirs in enumerate(self.agree(self.communicator, chosen, "new_group", lambda _: sizes)):
            if theirs != chosen:
                raise OrderMismatch(
                    f"new_group: rank {self.world.rank} passed {list(chosen)}, rank {rank} passed "
                    f"{list(theirs)}; all ranks of the job must create the same groups in the same order"
                )
        self._groups += 1
        return self.open_group(f"group{self._groups}", chosen, checked=True)

    def agree(
        self,
        communicator: Communicator,
        value: ValueT,
        what: str,
        sizes: Callable[[Sequence[ValueT]], Sequence[int]],
    ) -> list[ValueT]:
        """Every rank's `value`, before groups are opened inside of a group; collective over that.

        Groups inside of it that all their ranks have dropped are closed on the way. `sizes`: by these values,
        how many ranks the new group of each rank has. Raises `BackendError` on all ranks if one of them has
        not enough file descriptors left for it.
        """
        tell = partial(communicator.all_gather_object, tag=what)
        return self._agree(communicator.ranks, tell, value, what, sizes)

    def _agree(
        self,
        ranks: Sequence[int],
        tell: Callable[[object], list[Any]],
        value: ValueT,
        what: str,
        sizes: Callable[[Sequence[ValueT]], Sequence[int]],
    ) -> list[ValueT]:
        """See `agree`; `tell` gathers what these ranks say."""
        while True:
            # As many as any of these groups may need, because values are not known yet.
            room = descriptors_left(self._descriptors(len(ranks)))
            told = tell((value, self._offered(ranks), room, self.engine.off))
            values = [theirs for theirs, *_ in told]
            needs = [self._descriptors(size) for size in sizes(values)]
            short = lacking_descriptors(ranks, [left for _, _, left, _ in told], needs)
            dropped = dict(zip(ranks, (theirs for _, theirs, _, _ in told), strict=True))
            self._off.update(zip(ranks, (theirs for *_, theirs in told), strict=True))
            if not self._close_dropped(dropped) and short:
                raise BackendError(f"{what}: {short}")
            if not short:
                return values

    def _descriptors(self, size: int) -> int:
        """File descriptors that a group of so many ranks may take in each of them."""
        groups = 1 + 3 * (self.config.options("hierarchical") is not None)
        return groups * descriptors_for(self._classes, size) if size > 1 else 0

    def _offered(self, ranks: Sequence[int]) -> dict[str, list[int]]:
        """The groups of no other ranks than these that the program has dropped here, or has left.

        By their names, with their ranks. A group in use by messages is none of them. Those that nobody else
        has, or that have failed, are closed at once.
        """
        found = {name: list(members) for name, members in self._left if set(members) <= set(ranks)}
        for each in [each for each in self.groups if each.is_dropped]:
            if each.group.size == 1 or each.group.rank < 0 or each.state.failure is not None:
                self._remove(each, clean=each.state.failure is None)
            elif set(each.group.ranks) <= set(ranks) and not self.engine.has_messages(each.state):
                found[each.name] = list(each.group.ranks)
        return found

    def _close_dropped(self, dropped: Mapping[int, Mapping[str, list[int]]]) -> bool:
        """Close the groups that all their ranks say they have dropped; whether there are any, on any rank.

        `dropped`: what `_offered` gave, by rank.
        """
        together = {
            (name, tuple(ranks))
            for theirs in dropped.values()
            for name, ranks in theirs.items()
            if all(dropped[rank].get(name) == ranks for rank in ranks)
        }
        open_ones = {(each.name, each.group.ranks): each for each in self.groups if not each.inner}
        for each in sorted(together):
            off = self._off_in(each[1])
            for library, channel in self._left.pop(each, {}).items():
                if library not in off:
                    channel.close()
            if (opened := open_ones.get(each)) is not None:
                try:
                    opened.take_over()
                    self.close_together(opened)
                except McrError as error:
                    _log.warning("group '%s', which the program has dropped: %s", opened.name, error)
        return bool(together)

    def close_group(self, opened: OpenGroup, clean: bool = True) -> None:
        """Take one group down in this process; others may still use theirs.

        Waits for everything in flight if `clean`, and raises its first error.
        """
        try:
            if clean:
                self._settle(opened)
        finally:
            self._remove(opened, clean)

    def close_together(self, opened: OpenGroup) -> None:
        """See `Communicator.close`."""
        if opened is self.communicator.opened:
            self.leave(self.communicator)
        elif not opened.state.closed:
            together, state = False, opened.state
            try:
                self._settle(opened)
                if opened.group.size > 1 and opened.group.rank >= 0 and state.failure is None:
                    # From here on nothing is in flight on any rank.
                    off = opened.communicator(self).all_gather_object(self.engine.off, tag="close")
                    self._off.update(zip(opened.group.ranks, off, strict=True))
                together = state.failure is None
            finally:
                self._remove(opened, together, together=together)

    def _remove(self, opened: OpenGroup, clean: bool, *, together: bool = False) -> None:
        off = self._off_in(opened.group.ranks) if together else ()
        for each in opened.all:
            self._ended += [stage for stage in each.pipeline.stages if getattr(stage, "found", None)]
            left = each.shut_alone(clean, together=together, off=off)
            if left:
                self._left[each.name, each.group.ranks] = left
            self.groups.remove(each)
            self.engine.states.remove(each.state)
            self.leave_store(each.name)
            for kept in (self.restored, self.found):
                if not kept.get(each.name, True):
                    del kept[each.name]

    def settle(self, communicator: Communicator) -> None:
        """Wait for everything in flight in a group; raises its first error."""
        self._settle(communicator.opened)

    def _settle(self, opened: OpenGroup) -> None:
        if opened.state.failure is None:
            opened.pipeline.flush()
            self.engine.drain([each.state for each in opened.all])

    def leave(self, communicator: Communicator, clean: bool = True) -> None:
        """Close a group here, or the job if it is the group of all its ranks, unless that is closed already.

        Without `clean`, as at the end of a `with` block after an exception, nothing waits for peers.
        """
        if self.closed or communicator.closed:
            return
        if communicator is self.communicator:
            self.close(clean)
        else:
            self.close_group(communicator.opened, clean)

    def close(self, clean: bool) -> None:
        """Take everything down. Waits for what is in flight if `clean`, and raises its first error."""
        self.closed = True
        job.communicator = None
        job.off.update(self.engine.off)
        self._stop_watching()
        self.engine.stop_thread()
        error: McrError | None = None
        clean = clean and not self.engine.failed
        if clean:
            try:
                for opened in self.groups:
                    opened.pipeline.flush()
                self.engine.drain()
            except McrError as failure:
                error, clean = failure, False
        if clean:
            error = self._finish()
        for state in self.engine.states:
            state.publish()
            if clean:
                state.board.mark_closed()
            else:
                state.board.mark_failed(Failure(0, "it left the job after an error"))
        clean = clean and self.meet(self.world.timeout)
        for opened in reversed(self.groups):
            opened.shut(clean)
        give_up(chain.from_iterable(channels.values() for channels in self._left.values()))
        for state in self.engine.states:
            state.close()
            if clean:
                state.board.close()
        self._close_libraries(clean)
        self.engine.waiting.close()
        if error is not None:
            raise error

    def give_back(self) -> None:
        """Before an end in no good order: close what no peer waits for, where nothing is in flight.

        What all ranks must close together is left for `close_left`, unless its library may still be at an
        operation.
        """
        for opened in reversed(self.groups):
            idle = not self.engine.forget(opened.state)
            left = self._left.setdefault((opened.name, opened.group.ranks), {})
            for name, line in opened.runtime.lines.items():
                release = getattr(line.channel, "release", None)
                if release is not None and idle:
                    release()
                elif release is None and name not in opened.state.unfinished:
                    left[name] = line.channel

    @property
    def left(self) -> list[tuple[str, tuple[int, ...], str]]:
        """The channels that are open still and idle here: group, ranks and library of each."""
        return [
            (name, ranks, library)
            for (name, ranks), channels in self._left.items()
            for library, channel in channels.items()
            if hasattr(channel, "give_up") and library not in self.engine.off
        ]

    def close_left(self, left: Sequence[Sequence[tuple[str, tuple[int, ...], str]]]) -> None:
        """Close those that are `left` on all their ranks, which do so now; what is only here stays open."""
        everywhere = [set(theirs) for theirs in left]
        for each in sorted(everywhere[self.world.rank]):
            name, ranks, library = each
            if all(each in everywhere[rank] for rank in ranks):
                self._left[name, ranks][library].close()

    def _close_libraries(self, clean: bool) -> None:
        for backend in self._backends.values():
            backend.close(clean)
            if not hasattr(backend, "finalize") and (clean or not hasattr(backend, "before_exit")):
                job.used.pop(id(backend), None)  # nothing of it is left for the end of the process

    def _tell_what_was_not_asked_for(self) -> None:
        left = [f"'{group}': {name}" for group, kept in self.restored.items() for name in kept]
        if left and self.world.rank == 0:
            told = "state: %d of the operations that were loaded were never issued, such as in group %s"
            _log.warning(told, len(left), left[0])

    def _finish(self) -> McrError | None:
        """Let stages keep what they have learnt. An error is this rank's own; its end is in good order."""
        try:
            finish([*self._ended, *chain.from_iterable(each.pipeline.stages for each in self.groups)])
            self._tell_what_was_not_asked_for()
        except McrError as failure:
            return failure
        return None

    def meet(self, patience: float = SHORT) -> bool:
        """Wait until all ranks have come to their end, however their operations went."""
        board = self.engine.states[0].board

        def has_failed(rank: int) -> bool:
            return patience > SHORT and board.failure(rank) is not None

        store, names = self.world.store, {each.name for each in job.used.values()}

        def ask() -> None:
            if store is not None:
                job.off |= {name for name in names if store.check([f"off/{name}"])}

        job.together = meet(
            self.world,
            "closing",
            self._peers,
            patience=patience,
            has_failed=has_failed,
            notes=[f"off/{name}" for name in job.off],
            then=ask,
        )
        return job.together

    def crash(self) -> None:
        """Leave after an uncaught exception: wait for nobody, but let whoever caused it leave first."""
        call_off(self.world, self._peers)
        self.leave(self.communicator, clean=False)
        let_go_first(self._peers, self.engine.blamed)

    def abandon(self) -> None:
        """In a forked child: the parent's groups are not ours, and neither is its end."""
        self.closed = True
        self._stop_watching()
        self.engine.abandon()
        for state in self.engine.states:
            state.abandon()
        for backend in self._backends.values():
            abandon = getattr(backend, "abandon", None)
            if abandon is not None:
                abandon()


class Job:
    """The process's one runtime, and how its process ends."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.communicator: Communicator | None = None  # of all ranks, between init and finalize
        self.crashed = False
        self.hooked = False
        self.together = True  # all ranks have come to this point: what ends a library together may be called
        self.used: dict[int, Backend] = {}  # those that have a part in the end of the process
        self.off: set[str] = set()  # those of them that some rank calls no more, by their names
        # Leaves groups of torch's that nobody has any more, set by who makes them.
        self.leave_dropped: Callable[[], None] = lambda: None

    def hook(self) -> None:
        """Be told about the end of the process, an uncaught exception, and forks."""
        if self.hooked:
            return
        self.hooked = True
        atexit.register(self.at_exit)
        os.register_at_fork(after_in_child=self.after_fork)
        previous = sys.excepthook

        def note_crash(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            self.crashed = True
            previous(kind, value, trace)

        sys.excepthook = note_crash

    def at_exit(self) -> None:
        """Leave in good order if the program has; in no case wait for ranks that will not come."""
        self.leave_dropped()
        runtime = self.runtime
        if runtime is not None and self.crashed:
            runtime.crash()
        elif runtime is not None:
            with contextlib.suppress(McrError):
                self.together &= runtime.closed
                runtime.leave(runtime.communicator)
            if not self.together:
                runtime.meet()
        for backend in self.used.values():
            before_exit = getattr(backend, "before_exit", None)
            if before_exit is not None:
                before_exit()
        if self.together and not self.crashed:
            users: list[Any] = [*self.used.values()]
            if all(backend.name != "mpi" for backend in self.used.values()):
                users += _loaded_without_use()
            for backend in [each for each in users if each.name not in self.off]:
                finalize = getattr(backend, "finalize", None)
                if finalize is not None:
                    finalize()

    def after_fork(self) -> None:
        """A forked child has no part in the job."""
        atexit.unregister(self.at_exit)
        if self.runtime is not None:
            self.runtime.abandon()
            self.runtime = None


def _named_for(step: str, config: Config) -> set[str]:
    """The libraries that the hierarchical stage, or a rule that changes it, names for `local` or `inter`."""
    named = [spec.options for spec in config.pipeline]
    named += [each.options for rule in config.rules for each in rule.overrides]
    choices = [getattr(each, step).backend for each in named if isinstance(each, HierarchicalOptions)]
    return {choice.partition(":")[0] for choice in choices if choice is not None}


def _loaded_without_use() -> list[type[Backend]]:
    """MPI, if it only carried the address of the job's store."""
    return [backend_class("mpi")] if "mcr_plus.backends.mpi" in sys.modules else []


_log = logging.getLogger("mcr_plus")
job = Job()
_lock = threading.Lock()


def init(
    config: Source = None,
    *,
    backends: Sequence[str] | None = None,
    timeout: float | timedelta | None = None,
) -> Communicator:
    """Join the job and return the communicator of all its ranks; collective.

    Works under `mcr-plus run`, torchrun, mpirun and mpiexec (Open MPI, MPICH), srun, and as a single
    process. A default process group of torch.distributed may exist; it is not touched.

    Args:
        config: path of a YAML file, a mapping of the same form, or None: every backend that is found, the
            built-in preference, nothing compressed.
        backends: names in fallback order; overrides the configuration.
        timeout: seconds that ranks may take to find each other, and the deadline of operations unless the
            configuration's dispatch stage sets one.

    Raises:
        ConfigError: the configuration is wrong, or differs between ranks.
        NotInitialized: `init` was called before without `finalize`.
        BackendUnavailable: a backend that was asked for is missing on some rank.
        BackendError: a rank has too few file descriptors left.
        LaunchError: the ranks cannot find each other.
    """
    with _lock:
        job.leave_dropped()
        if job.runtime is not None and not job.runtime.closed:
            raise NotInitialized("init was called before; call finalize first (or use `with mcr.init(...)`)")
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        loaded = readable(partial(_load, config, backends, seconds))
        patience = seconds if isinstance(seconds, (int, float)) and seconds > 0 else 300.0
        try:
            world = _join(launch_environment(), patience)
        except McrError:
            if isinstance(loaded, ConfigError):  # nearer to the cause
                raise loaded from None
            raise
        return _begin(loaded, world, seconds).communicator


def _load(config: Source, backends: Sequence[str] | None, seconds: float | None) -> Config:
    """Read a configuration as `init` is told to, and check its timeout."""
    loaded = configuration.load(config)
    if isinstance(backends, str):
        known = ", ".join(preferred_backends())
        raise ConfigError(f"backends: expected a list of names, got {backends!r}; known: {known}")
    if backends is not None:
        loaded = loaded.with_backends(tuple(backends))
    if seconds is not None:
        loaded.with_timeout(seconds)
    return loaded


def readable(load: Callable[[], Config]) -> Config | ConfigError:
    """Return what `load` does, or its error, for all ranks to hear of: see `compare_configs`."""
    try:
        return load()
    except ConfigError as error:
        return error


def join(loaded: Config | ConfigError, store: Store, rank: int, size: int, timeout: float) -> Runtime:
    """`init` for ranks that have found each other: `store`, a new one, reaches all. Raises as `init` does.

    `loaded`: see `readable`.
    """
    with _lock:
        alone = World(0, 1, (host_name(),), timeout)
        runtime = _begin(loaded, alone if size == 1 else _world_of(store, rank, size, timeout), timeout)
        runtime.is_native = False
        return runtime


def meeting_place(timeout: float) -> tuple[Store, int, int]:
    """A store that reaches all ranks of the job, this rank and how many there are, as the launcher says."""
    environment = launch_environment()
    if environment.world_size == 1:
        return HashStore(), 0, 1
    store = open_plain_store(environment, timeout)
    return store, environment.rank, environment.world_size


def _begin(loaded: Config | ConfigError, world: World, timeout: float | None) -> Runtime:
    job.hook()
    try:
        loaded = compare_configs(loaded, world, timeout)
        config = loaded if timeout is None else loaded.with_timeout(timeout)
        use_algorithms(config)
        _check_descriptors(world)
        chosen = _choose_backends(config, world)
        world = replace(world, libraries=_libraries(chosen, world))
        check_tables(config, world)
        check_nodes(config, world.size)
        runtime = Runtime(config, world, chosen, loaded, timeout)
    except McrError:
        job.together = meet(world, "refused")  # so that every rank can read the reason
        raise
    job.runtime = runtime
    job.together = False
    job.communicator = runtime.communicator
    for backend in runtime.engine.backends:
        job.used[id(backend)] = backend
    return runtime


def _join(environment: LaunchEnvironment, timeout: float) -> World:
    if environment.world_size == 1:
        return World(0, 1, (host_name(),), timeout)
    store = open_store(environment, timeout)
    return _world_of(store, environment.rank, environment.world_size, timeout)


def _world_of(store: Store, rank: int, size: int, timeout: float) -> World:
    mine = json.dumps([host_name(), sum(1 << core for core in usable_cores())])
    places = [json.loads(text) for text in exchange(store, rank, size, "hosts", mine, timeout)]
    hosts = tuple(host for host, _ in places)
    here = reduce(operator.or_, (mask for host, mask in places if host == hosts[rank]))
    secret = store.secret if isinstance(store, SignedStore) else b""
    return World(rank, size, hosts, timeout, store, cores=here.bit_count(), secret=secret)


def _gather(world: World, what: str, value: str) -> list[str]:
    """Every rank's value."""
    if world.store is None:
        return [value]
    return exchange(world.store, world.rank, world.size, what, value, world.timeout)


def compare_configs(loaded: Config | ConfigError, world: World, timeout: float | None = None) -> Config:
    """Return the configuration, or raise `ConfigError` on all ranks if they differ in theirs; collective.

    So do all, at once, if one of them cannot read its own, or a file that it names. `timeout`: what the
    program asks for; it counts where the configuration names none.
    """
    library = "unset" if msccl_library() is None else "set"
    found, problem = "", None
    name = "" if isinstance(loaded, ConfigError) else loaded.name
    try:
        if isinstance(loaded, ConfigError):
            raise loaded
        if world.store is None:
            return loaded
        found = configuration.fingerprint(loaded if timeout is None else loaded.with_timeout(timeout))
    except ConfigError as error:
        problem = error
    except OSError as error:  # a folder that may not be searched
        problem = ConfigError(f"{name}: {error}")
    mine = json.dumps([found, library, name, "" if problem is None else str(problem)])
    prints = [json.loads(text) for text in _gather(world, "config", mine)]
    if problem is not None:
        raise problem
    for rank, (_, _, _, told) in enumerate(prints):
        if told:
            raise ConfigError(f"{told} (on rank {rank})")
    assert isinstance(loaded, Config)
    differing = [rank for rank, (found, *_) in enumerate(prints) if found != prints[0][0]]
    if differing:
        names = "; ".join(f"rank {rank}: {prints[rank][2]}" for rank in (0, differing[0]))
        raise ConfigError(
            f"{name}: the configuration (with its tables) differs between ranks: rank 0 and ranks "
            f"{differing} ({names}); all ranks must use the same"
        )
    others = [rank for rank, (_, set_or_not, *_) in enumerate(prints) if set_or_not != prints[0][1]]
    if others:
        raise ConfigError(
            f"MCR_MSCCL_LIBRARY is {prints[0][1]} on rank 0, but not so on ranks {others}; "
            "msccl must be the same on all ranks"
        )
    return loaded


def _check_descriptors(world: World) -> None:
    """Raise `BackendError` on all ranks if one has too few file descriptors for any library to start."""
    need = _TO_JOIN + world.size
    left = [int(text) for text in _gather(world, "descriptors", str(descriptors_left(need)))]
    if world.size > 1 and (short := lacking_descriptors(range(world.size), left, [need] * world.size)):
        raise BackendError(f"init: {short}")


def _choose_backends(config: Config, world: World) -> dict[str, type[Backend]]:
    """The backends of the job: those asked for, or all that are there on every rank."""
    wanted = config.backends
    classes = {name: backend_class(name) for name in (wanted or preferred_backends()) if name != "local"}
    lacking = {}
    for name, kind in classes.items():
        found = kind.availability()
        if not found.available:
            lacking[name] = f"{found.reason}; {found.remedy}"
    everywhere = [json.loads(text) for text in _gather(world, "backends", json.dumps(lacking))]
    for rank, missing in enumerate(everywhere):
        for name, reason in missing.items():
            if wanted is not None:
                where = f" on rank {rank}" if world.size > 1 else ""
                raise BackendUnavailable(
                    f"backend {name} was asked for and is not available{where}: {reason}"
                )
            classes.pop(name, None)
    if world.size > 1:
        classes = _without_strangers(classes, world, strict=wanted is not None)
        if not classes:
            raise BackendUnavailable(f"no backend is available on all ranks: {everywhere}")
    return {**classes, "local": backend_class("local")}


def _libraries(backends: Mapping[str, type[Backend]], world: World) -> dict[str, str]:
    """What is behind the backends on rank 0, so that all ranks decide by the same."""
    mine = library_versions([name for name in backends if name != "local"] if world.size > 1 else [])
    found: dict[str, str] = json.loads(_gather(world, "libraries", json.dumps(mine))[0])
    return found


def check_tables(config: Config, world: World) -> None:
    """Warn about tables that were measured elsewhere; refuse those that say so.

    Raises `ConfigError` on all ranks if the table is strict and any rank differs, if it names a backend that
    the configuration does not, or if rank 0 could not write a refined one.
    """
    told = ""
    try:
        check_targets(config)
    except ConfigError as error:
        told = str(error)
    if problem := _gather(world, "refined", told)[0]:  # rank 0 is to write it
        raise ConfigError(problem)
    for number, table in enumerate(checked_tables(config)):  # equal on all ranks, wherever they lie
        shape = Counter(world.hosts)
        here = fingerprint_here(
            world.libraries, ranks=world.size, nodes=len(shape), ranks_per_node=max(shape.values())
        )
        found = _gather(world, f"table/{number}", json.dumps(differences(table.fingerprint, here)))
        for rank, text in enumerate(found):
            told = f"{table.name}: measured elsewhere than rank {rank} runs: {'; '.join(json.loads(text))}"
            if json.loads(text) and table.strict:
                raise ConfigError(f"{told} (strict: true)")
            if json.loads(text) and world.rank == 0:
                _log.warning("%s; `mcr-plus tune` measures here", told)
            if json.loads(text):
                break


def _without_strangers(
    classes: dict[str, type[Backend]], world: World, *, strict: bool
) -> dict[str, type[Backend]]:
    """Without backends that this job's launcher does not serve (MPI under torchrun), unless asked for."""
    kept = dict(classes)
    for name, kind in classes.items():
        serves = getattr(kind, "serves", None)
        reason = serves(world) if serves is not None else ""
        verdicts = _gather(world, f"serves/{name}", reason)
        refusal = next((verdict for verdict in verdicts if verdict), "")
        if refusal and strict:
            raise BackendUnavailable(f"backend {name} was asked for, but {refusal}")
        if refusal:
            del kept[name]
    return kept


def leave(communicator: Communicator, *, clean: bool = True) -> None:
    """Close a group, or the job if it is the group of all its ranks, unless that is closed already."""
    if job.runtime is not None:
        job.runtime.leave(communicator, clean)


def finalize() -> None:
    """Wait for what is in flight, leave the job in good order, and release everything.

    After the first, further calls do nothing. Raises `NotInitialized` if `init` has never been called, or the
    first error of an operation in flight.
    """
    runtime = job.runtime or current()
    if not runtime.closed:
        runtime.close(clean=True)


def reset() -> Communicator:
    """Make a fresh world of the same ranks, by the same configuration, in place of one that has failed.

    Collective over all ranks of the job, all of which must live. For programs that carry on after a failed
    operation, such as an `OrderMismatch`: its group is of no use any more, and where that is the group of all
    ranks, neither is the world. Nothing in flight is waited for; tensors of what had not ended must not be
    used again. Communicators, wrapped models, hooks and persistent operations of the old world are closed;
    what codecs keep between calls is gone unless it was saved (`mcr.state_dict`). Memory of operations that
    never ended stays taken until the end of the process. So do MPI's communicators of a group in which an
    operation on MPI has not ended well, or is in flight: three, and one per signature that the group has used
    on MPI more than once, 192 at most. Those of other groups are freed.

    Returns the communicator of all ranks. Where it raises, the old world is closed all the same, and all
    ranks may call `init` again, with another configuration if need be.

    Raises:
        NotInitialized: there is no world, or torch.distributed has made it: destroy its process group then.
        LaunchError: a rank has not called it within the time that `init` gave ranks to find each other.
        BackendUnavailable: the configuration names a library that has become unusable, as MPI does after an
            error inside it.
    """
    runtime = current()
    if not runtime.is_native:
        raise NotInitialized(
            "reset: this world belongs to torch.distributed; destroy its process group and make a new one"
        )
    runtime.give_back()
    runtime.close(clean=False)
    try:
        with _lock:
            return _begin(runtime.loaded, _fresh_world(runtime), runtime.timeout).communicator
    except McrError as error:
        runtime.ended = f"reset has failed ({error})"
        raise type(error)(
            f"reset: {error}. The world that there was is closed; to go on, let all ranks call mcr.init"
        ) from error


def _fresh_world(runtime: Runtime) -> World:
    world = runtime.world
    if world.store is not None:
        store, mine = world.store, json.dumps([secrets.token_hex(8), runtime.left])
        told = exchange(store, world.rank, world.size, "reset", mine, world.timeout)
        (name, _), *_ = answers = [json.loads(text) for text in told]
        # From here on no rank uses anything of the old world.
        runtime.close_left([[(of, tuple(ranks), by) for of, ranks, by in left] for _, left in answers])
        for group in list(world.stores):
            runtime.leave_store(group)
        part = store.part(name) if isinstance(store, SignedStore) else PrefixStore(name, store)
        world = _world_of(part, world.rank, world.size, world.timeout)
    for state in runtime.engine.states:  # all ranks have left
        state.board.close()
    return world


def current() -> Runtime:
    """The runtime between `init` and `finalize`."""
    runtime = job.runtime
    if runtime is None:
        raise NotInitialized("mcr.init has not been called in this process")
    if runtime.closed:
        raise NotInitialized(f"{runtime.ended}; call mcr.init again to join a job")
    return runtime


def is_initialized() -> bool:
    """Whether `init` has been called, and `finalize` not since."""
    return job.runtime is not None and not job.runtime.closed


def world() -> Communicator:
    """The communicator of all ranks."""
    return job.communicator or current().communicator


def member_of(group: Communicator | None) -> Communicator:
    """The communicator a call means: `group`, or that of all ranks."""
    if group is None:
        return job.communicator or current().communicator
    if not isinstance(group, Communicator):
        raise InvalidArgument(f"group: expected a Communicator or None, got {group!r}")
    return group


def get_backends() -> list[str]:
    """Names of the libraries this job uses, in fallback order."""
    return current().backend_names


def get_rank(group: Communicator | None = None) -> int:
    """This process's rank in `group` (None: in the job); -1 if it is not a member."""
    return member_of(group).rank


def get_world_size(group: Communicator | None = None) -> int:
    """Number of ranks in `group` (None: in the job)."""
    return member_of(group).size


def new_group(ranks: Sequence[int]) -> Communicator:
    """The communicator of `ranks`, which keep the given order; collective over the whole job.

    Other ranks get a communicator too; its `rank` is -1 and it refuses operations. A group is closed by its
    `close()`, at the end of a `with` block, or some time after all its ranks have dropped it.

    Raises:
        InvalidArgument: `ranks` are no ranks of the job.
        OrderMismatch: ranks have passed different ones.
        BackendError: a rank has too few file descriptors left.
    """
    return current().new_group(ranks)
