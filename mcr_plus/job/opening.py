"""Opening of a group whose channels are open: its state, its pipeline, and its groups by node."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

from mcr_plus import registry
from mcr_plus.board.opening import open_board
from mcr_plus.communicator.open_group import OpenGroup, release_unused
from mcr_plus.config.schema import Config
from mcr_plus.core.group import Group
from mcr_plus.engine.group_runtime import GroupRuntime
from mcr_plus.engine.group_state import BackendChannel, GroupState
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import BackendUnavailable
from mcr_plus.hierarchy.nodes import inner_groups
from mcr_plus.hierarchy.options import HierarchicalOptions
from mcr_plus.pipeline.pipeline import Pipeline
from mcr_plus.pipeline.stage import Context
from mcr_plus.rendezvous.store import exchange

if TYPE_CHECKING:
    from mcr_plus.engine.engine import Engine
    from mcr_plus.hierarchy.nodes import Part
    from mcr_plus.job.runtime import Runtime
    from mcr_plus.rendezvous.world import World

    Wrap = Callable[[World, Engine, GroupState, Mapping[str, BackendChannel], DispatchOptions], None]

_log = logging.getLogger("mcr_plus")


def open_with_parts(
    runtime: Runtime,
    group: Group,
    channels: Mapping[str, BackendChannel],
    config: Config,
    *,
    inner: bool = False,
) -> OpenGroup:
    """Open a group over its channels, and the groups inside it; collective over its ranks."""
    world, name, rank = runtime.world, group.name, group.rank
    one_host = world.hosts_of(group) == 1
    store = world.store_of(group) if rank >= 0 and group.size > 1 and world.store is not None else None
    with ExitStack() as undo:
        # An error before the group is complete must release its channels.
        undo.callback(release_unused, channels)
        board = open_board(store, group, one_host, world.timeout)
        voting = [each.channel for each in channels.values() if each.channel.takes_ballots]
        if voting:  # one library only: the n-th ballot of each rank must be for the same operation
            voting[0].ballots = board.ballots
        state = GroupState(group, board, _remedy(runtime, name), ring=getattr(config.observe, "ring", 0))
        options = config.options("dispatch")
        assert isinstance(options, DispatchOptions)
        for wrapper in _wrappers(config, options):
            wrap = cast("Wrap", registry.get("wrappers", wrapper))
            wrap(world, runtime.engine, state, channels, options)
        restored = runtime.restored.setdefault(name, {})
        of_group = GroupRuntime(runtime.engine, state, channels, {}, restored=restored)
        classes = runtime.libraries.classes
        usable = {name: classes[name] for name in channels} if rank >= 0 else dict(classes)
        parts: dict[str, Pipeline] = {}
        pipeline = Pipeline(Context(config, world, group, usable, of_group, parts))
        undo.pop_all()
    opened = OpenGroup(group, pipeline, of_group, config, world.secret, inner)
    runtime.engine.states.append(state)
    state.recorded = runtime.engine.hooks.timed
    state.refresh()
    runtime.groups.append(opened)
    for part, members in inner_groups(config, world.hosts, group).items():
        # Opened here and not at the first use, because opening is collective; same order on all ranks.
        below = _open_part(runtime, group, part, members, config)
        opened.parts.append(below)
        of_group.caches.append(below.runtime.forget)
        parts[part] = below.pipeline
    return opened


def _wrappers(config: Config, options: DispatchOptions) -> Iterator[str]:
    """Return the names of the wrappers between a group's libraries and the engine."""
    if options.failover:
        yield "failover"
    if any(isinstance(each, DispatchOptions) and each.verify for each in config.all_options):
        yield "verify"


def warn_of_missing(group: Group, missing: Mapping[str, str]) -> None:
    """Log on the group's rank 0 which libraries the group goes without, and why."""
    for name, reason in missing.items() if group.rank == 0 else ():
        _log.warning("group '%s' does not use %s: %s", group.name, name, reason)


def _remedy(runtime: Runtime, name: str) -> str:
    """Return the remedy after a failure of the group `name`, for messages."""
    if not runtime.is_native:
        return "destroy the process group and make a new one"
    fresh = "mcr.reset() makes a fresh world"
    if name.partition("/")[0] == "world":
        return fresh
    return f"close it on its ranks and make another with mcr.new_group, or {fresh}"


def _open_part(runtime: Runtime, group: Group, part: Part, inner: Group, config: Config) -> OpenGroup:
    """Open a group inside `group`; if it cannot be opened, all ranks of `group` raise.

    A library that one group of this part must do without is left out in all of them. Raises
    `BackendUnavailable` on all ranks of `group` if the configuration names that library for the step.
    """
    problem = ""
    channels: dict[str, BackendChannel] = {}
    dropped: dict[str, str] = {}
    try:
        channels, dropped = runtime.libraries.open_channels(inner)
    except BackendUnavailable as error:
        problem = f"group '{inner.name}': {error}"
    named = {name: f"group '{inner.name}': {reason}" for name, reason in dropped.items()}
    with ExitStack() as undo:
        undo.callback(release_unused, channels)
        missing = _missing(runtime, group, part, config, (problem, list(channels), named))
        undo.pop_all()
    warn_of_missing(inner, missing)
    release_unused({name: channels.pop(name) for name in missing.keys() & channels.keys()})
    return open_with_parts(runtime, inner, channels, config.below("hierarchical"), inner=True)


def _missing(
    runtime: Runtime,
    group: Group,
    part: Part,
    config: Config,
    mine: tuple[str, list[str], dict[str, str]],
) -> dict[str, str]:
    """Return the libraries that one group of a part must do without, and why; raises for `_open_part`.

    `mine`: about this rank's group of the part: why it cannot be opened, its libraries, and missing ones.
    """
    world, what = runtime.world, f"opened/{group.name}/{part}"
    texts = exchange(
        world.store_of(group), group.rank, group.size, what, json.dumps(mine), world.timeout, group=group
    )
    answers = [json.loads(text) for text in texts]
    if problem := next((problem for problem, _, _ in answers if problem), ""):
        raise BackendUnavailable(problem)
    missing: dict[str, str] = {}
    for _, _, reasons in answers:
        missing = {**reasons, **missing}
    step = "inter" if part == "inter" else "local"
    for name in sorted(_named_for(step, config) & missing.keys()):
        raise BackendUnavailable(f"hierarchical.{step}.backend: {name} was asked for; {missing[name]}")
    for _, opened, _ in answers:
        if missing and not set(opened) - missing.keys():
            raise BackendUnavailable("; ".join(missing.values()))
    return missing


def _named_for(step: str, config: Config) -> set[str]:
    """Return the libraries that the hierarchical stage, or a rule for it, names for `local` or `inter`."""
    hierarchical = [options for options in config.all_options if isinstance(options, HierarchicalOptions)]
    backends = [(options.local if step == "local" else options.inter).backend for options in hierarchical]
    return {backend.partition(":")[0] for backend in backends if backend is not None}
