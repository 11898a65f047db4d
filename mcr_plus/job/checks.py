"""Checks between ranks before a job begins: configuration, resources, libraries and tables."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mcr_plus.backends import backend_class, library_versions, preferred_backends
from mcr_plus.backends.base import Backend
from mcr_plus.config import reader as configuration
from mcr_plus.config.schema import Config
from mcr_plus.core.collector import collector_paused
from mcr_plus.core.environment import msccl_library
from mcr_plus.core.file_limit import descriptors_left, lacking_descriptors
from mcr_plus.core.units import whole_numbers
from mcr_plus.errors import BackendError, BackendUnavailable, ConfigError, InvalidArgument, short
from mcr_plus.job.process import job
from mcr_plus.rendezvous.store import exchange
from mcr_plus.rendezvous.world import World
from mcr_plus.selection.checks import check_targets, checked_tables

_TO_JOIN: Final = 24  # file descriptors that libraries open once per job, in addition to connections
_log = logging.getLogger("mcr_plus")


def compare_configs(loaded: Config | ConfigError, world: World, timeout: float | None = None) -> Config:
    """Compare configurations; raise `ConfigError` on all ranks if they differ; collective.

    All ranks also raise if one of them cannot read its configuration, or a file that it names. `timeout`: the
    program's own, in seconds; used where the configuration has none.
    """
    library = "unset" if msccl_library() is None else "set"
    fingerprint, problem = "", None
    name = "" if isinstance(loaded, ConfigError) else loaded.name
    try:
        if isinstance(loaded, ConfigError):
            raise loaded
        for hook in job.hooks:
            hook.check(loaded)
        if world.store is None:
            return loaded
        fingerprint = configuration.fingerprint(loaded if timeout is None else loaded.with_timeout(timeout))
    except ConfigError as error:
        problem = error
    except OSError as error:  # a folder that may not be searched
        problem = ConfigError(f"{name}: {error}")
    # Errors are exchanged too, so that all ranks raise and none waits for another.
    mine = json.dumps([fingerprint, library, name, "" if problem is None else str(problem)])
    answers = [json.loads(text) for text in _gather(world, "config", mine)]
    if problem is not None:
        raise problem
    for rank, (_, _, _, text) in enumerate(answers):
        if text:
            raise ConfigError(f"{text} (on rank {rank})")
    assert isinstance(loaded, Config)
    differing = [rank for rank, (other, *_) in enumerate(answers) if other != answers[0][0]]
    if differing:
        names = "; ".join(f"rank {rank}: {answers[rank][2]}" for rank in (0, differing[0]))
        effective = loaded if timeout is None else loaded.with_timeout(timeout)
        options = {**configuration.dump(effective, units=True), "observe": None}  # in which ranks may differ
        # The options are exchanged only now, because they are long and needed only for the text.
        everywhere = [json.loads(text) for text in _gather(world, "options", json.dumps(options))]
        where = _difference(everywhere[0], everywhere[differing[0]])
        raise ConfigError(
            f"{name}: the configuration (with its tables) differs between ranks: rank 0 and ranks "
            f"{differing} ({names}), in {where}; all ranks must use the same"
        )
    others = [rank for rank, (_, set_or_not, *_) in enumerate(answers) if set_or_not != answers[0][1]]
    if others:
        raise ConfigError(
            f"MCR_MSCCL_LIBRARY is {answers[0][1]} on rank 0, but not so on ranks {others}; "
            "msccl must be the same on all ranks"
        )
    return loaded


def _difference(one: Any, other: Any, place: str = "") -> str:
    """Return the first option in which two configurations differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if one.get(key) != other.get(key):
                return _difference(one.get(key), other.get(key), f"{place}.{key}" if place else key)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            if pair[0] != pair[1]:
                return _difference(*pair, f"{place}[{index}]")
    if one == other:
        return "the content of a table or of an algorithm"
    return f"{place}: {short(one)} and {short(other)}"


def distinct_ranks(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the ranks of a new group in a job of `size`; raise `InvalidArgument` if they cannot form one."""
    if (numbers := whole_numbers(ranks)) is None:
        raise InvalidArgument(f"ranks: expected a list of ranks, got {ranks!r}")
    chosen = tuple(numbers)
    wrong = [rank for rank in chosen if not 0 <= rank < size]
    if wrong or len(set(chosen)) != len(chosen) or not chosen:
        raise InvalidArgument(
            f"ranks: expected distinct ranks from 0 to {size - 1}, at least one, got {list(ranks)}"
        )
    return chosen


def check_descriptors(world: World) -> None:
    """Raise `BackendError` on all ranks if one has too few file descriptors for any library to start."""
    need = _TO_JOIN + world.size
    left = [int(text) for text in _gather(world, "descriptors", str(descriptors_left(need)))]
    if world.size > 1 and (short := lacking_descriptors(range(world.size), left, [need] * world.size)):
        raise BackendError(f"init: {short}")


def choose_backends(config: Config, world: World) -> dict[str, type[Backend]]:
    """Return the job's backends: those requested, or all that are available on every rank; and `local`.

    A single process that requests none gets only `local`, and imports no other backend. Raises
    `BackendUnavailable` on all ranks if a requested backend is unavailable, or if there is none.
    """
    named = config.backends
    if named is None and world.size == 1:
        return {"local": backend_class("local")}
    names = [name for name in (named or preferred_backends()) if name != "local"]
    with collector_paused():
        classes = {name: backend_class(name) for name in names}
    lacking = {}
    for name, kind in classes.items():
        availability = kind.availability()
        if not availability.available:
            lacking[name] = f"{availability.reason}; {availability.remedy}"
    everywhere = [json.loads(text) for text in _gather(world, "backends", json.dumps(lacking))]
    for rank, missing in enumerate(everywhere):
        for name, reason in missing.items():
            if named is not None:
                where = f" on rank {rank}" if world.size > 1 else ""
                raise BackendUnavailable(
                    f"backend {name} was asked for and is not available{where}: {reason}"
                )
            classes.pop(name, None)
    if world.size > 1:
        classes = _drop_foreign_backends(classes, world, strict=named is not None)
        if not classes:
            raise BackendUnavailable(f"no backend is available on all ranks: {everywhere}")
    return {**classes, "local": backend_class("local")}


def versions_on_rank_0(backends: Mapping[str, type[Backend]], world: World) -> dict[str, str]:
    """Return rank 0's versions of the libraries, so that all ranks decide by the same versions."""
    mine = library_versions([name for name in backends if name != "local"] if world.size > 1 else [])
    versions: dict[str, str] = json.loads(_gather(world, "libraries", json.dumps(mine))[0])
    return versions


def check_tables(config: Config, world: World) -> None:
    """Warn about tables that were measured elsewhere; refuse such tables if `strict`.

    Raises `ConfigError` on all ranks if the table is strict and any rank differs, if it names a backend that
    the configuration does not, or if rank 0 could not write a refined table.
    """
    problem = ""
    try:
        check_targets(config)
    except ConfigError as error:
        problem = str(error)
    if problem := _gather(world, "refined", problem)[0]:  # rank 0 will write it
        raise ConfigError(problem)
    for number, table in enumerate(checked_tables(config)):  # equal on all ranks, whatever their paths
        from mcr_plus.tables.fingerprint import differences, fingerprint_here

        shape = Counter(world.hosts)
        here = fingerprint_here(
            world.libraries, ranks=world.size, nodes=len(shape), ranks_per_node=max(shape.values())
        )
        texts = _gather(world, f"table/{number}", json.dumps(differences(table.fingerprint, here)))
        everywhere = [json.loads(text) for text in texts]
        rank = next((rank for rank, found in enumerate(everywhere) if found), None)
        if rank is None:
            continue
        warning = f"{table.name}: measured elsewhere than rank {rank} runs: {'; '.join(everywhere[rank])}"
        if table.strict:
            raise ConfigError(f"{warning} (strict: true)")
        if world.rank == 0:
            _log.warning("%s; `mcr-plus tune` measures here", warning)


def _drop_foreign_backends(
    classes: dict[str, type[Backend]], world: World, *, strict: bool
) -> dict[str, type[Backend]]:
    """Return the names without backends that this job's launcher does not serve, such as MPI under torchrun.

    With `strict`, such a backend raises `BackendUnavailable`, unless the world has replaced another one: the
    surviving ranks continue with the libraries that they still have.
    """
    kept, epoch = dict(classes), 0 if world.roster is None else world.roster.epoch
    for name, kind in classes.items():
        verdicts = _gather(world, f"unavailable/{name}", kind.unavailable_in(world))
        refusal = next((verdict for verdict in verdicts if verdict), "")
        if refusal and strict and epoch == 0:
            raise BackendUnavailable(f"backend {name} was asked for, but {refusal}")
        if refusal:
            del kept[name]
            if epoch:
                job.disabled.add(name)  # its shutdown would wait for ranks that are gone
            if strict and world.rank == 0:
                _log.warning("epoch %d continues without %s: %s", epoch, name, refusal)
    return kept


def _gather(world: World, what: str, value: str) -> list[str]:
    """Return every rank's value."""
    if world.store is None:
        return [value]
    return exchange(world.store, world.rank, world.size, what, value, world.timeout)
