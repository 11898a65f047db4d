"""Transfer of groups, models, persistent operations and codec state from a world to its replacement.

All of it is listed in one exchange, so that ranks agree on the list before they open anything. A group or a
model that one of its ranks has dropped would otherwise keep the other ranks waiting.
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.persistent import PersistentBinding
from mcr_plus.communicator.successors import succeed
from mcr_plus.communicator.transfer import broadcast_state
from mcr_plus.core.environment import host_name
from mcr_plus.errors import phrase_ranks
from mcr_plus.job.hooks import Follower
from mcr_plus.job.process import job
from mcr_plus.job.runtime import Runtime
from mcr_plus.pipeline.state import StateTensor, holds_tensors
from mcr_plus.rendezvous.identity import own_process

_ATTACHED: Final = "inheritance"
_log = logging.getLogger("mcr_plus")
Member = tuple[int, str, str]
"""Identity of a process, whatever its rank."""
Key = tuple[str, str, str]
"""Group, stage, and operation name."""
Carried = dict[Key, dict[str, torch.Tensor]]
"""This rank's tensors, by operation and tensor name."""


class _FormerGroup(NamedTuple):
    """A group of an earlier world as one rank has it: its ranks there, and how often it was split."""

    name: str
    ranks: tuple[int, ...]
    splits: int


class _WrappedModel(NamedTuple):
    """A wrapped model: the groups of its gradients and of its ranks, and a digest of its parameters."""

    branch: str
    group: str
    digest: str


class _PreviousState(NamedTuple):
    """State that one rank had in the previous world.

    Attributes:
        origin: equal for ranks that come from the same world.
        codecs: names of codec state; None if the rank takes the state of other ranks.
        made, splits: numbers that are part of the names of later groups.
    """

    origin: str
    members: tuple[Member, ...]
    groups: tuple[_FormerGroup, ...]
    models: tuple[_WrappedModel, ...]
    codecs: list[Key] | None
    made: int
    splits: int


class _Chosen(NamedTuple):
    """A group to reopen: its name in the old world, its new name, and its ranks."""

    origin: str
    before: str
    name: str
    ranks: tuple[int, ...]
    splits: int


@dataclass
class Inheritance:
    """Transferable state that this rank has of a world that ends.

    Attributes:
        members: members of that world, by rank.
        groups: groups of the program, by name.
        codecs: see `taken_from`.
        is_new: whether the rank takes other ranks' codec state instead of keeping its own.
    """

    origin: str
    members: tuple[Member, ...]
    world: Communicator
    groups: dict[str, Communicator]
    made: int
    codecs: Carried
    is_new: bool = False
    _followers: list[Follower] = field(default_factory=list)

    def give(self, new: Runtime) -> None:
        """Recreate the state of the old worlds in a new one; collective over the new world.

        If it raises, because a rank is lost meanwhile, the next world inherits the same state.
        """
        new.attached[_ATTACHED] = self
        comm = new.communicator
        assert new.roster is not None or comm.size == 1
        processes = [_member(each) for each in new.roster.members] if new.roster is not None else [_own()]
        places = {process: rank for rank, process in enumerate(processes)}
        groups = [self.world, *self.groups.values()]
        self._followers = [follower for hook in job.hooks for follower in hook.followers(groups)]
        answers: list[_PreviousState] = comm.all_gather_object(self._had())
        new.groups_made = max(new.groups_made, *(each.made for each in answers))
        comm.splits = max(comm.splits, *(each.splits for each in answers))
        chosen, refused = _groups(answers, places)
        models = _models(answers, chosen)
        ranks = {"world": comm.ranks} | {each.name: each.ranks for each in chosen if each.name == each.before}
        of_branches = {branch: ranks.get(group, comm.ranks) for _, branch, group in models}
        put_into(new, self.codecs, [each.codecs for each in answers], {**ranks, **of_branches})
        opened = {"world": comm}
        for each in chosen:
            mine = self.groups.get(each.before) if each.origin == self.origin else None
            if mine is not None or comm.rank in each.ranks:
                made = new.open_group(each.name, each.ranks)
                made.opened.follows, made.splits = True, each.splits
                opened[each.before] = made
        self._follow(models, opened)
        for name, old in {"world": self.world, **self.groups}.items():
            if name in opened:
                self._succeed(old, opened[name], places)
            else:
                old.succession.reason = refused.get((self.origin, name), "")
        del new.attached[_ATTACHED]
        self._followers = []
        # The remains of the old worlds are cycles of objects with buckets, memory and file descriptors.
        gc.collect()

    def _had(self) -> _PreviousState:
        return _PreviousState(
            self.origin,
            self.members,
            tuple(_FormerGroup(name, each.ranks, each.splits) for name, each in self.groups.items()),
            tuple(_WrappedModel(each.branch, each.comm.name, _digest(each)) for each in self._followers),
            None if self.is_new else sorted(self.codecs),
            self.made,
            self.world.splits,
        )

    def _follow(
        self, models: Sequence[tuple[dict[str, str], str, str]], opened: dict[str, Communicator]
    ) -> None:
        """Hook the chosen models into the new world, in the same order on all ranks."""
        own = {each.branch: each for each in self._followers}
        for names, branch, group in models:
            follower = own.pop(names.get(self.origin, ""), None)
            if follower is not None and group in opened:
                follower.follow(opened[group], branch)
        for left in own.values():
            _log.warning(
                "%s that was wrapped for group '%s' is not hooked into the new world: a rank lacks it, "
                "or the group is gone; wrap it again on all ranks",
                left.what,
                left.comm.name,
            )

    def _succeed(self, old: Communicator, new: Communicator, places: dict[Member, int]) -> None:
        ranks = {rank: places[member] for rank, member in enumerate(self.members) if member in places}
        succeed(old, new)
        for operation in list(old.persistents):
            origin: PersistentBinding = operation.origin  # type: ignore[attr-defined]
            origin.move(operation, new, ranks)
        old.persistents.clear()


@contextmanager
def inheriting(runtime: Runtime, *, takes_codecs: bool = False) -> Iterator[Inheritance]:
    """Yield the state to give to the world that replaces this one; local.

    `takes_codecs`: whether a rank without codec state, such as a new one, takes other ranks' state.
    """
    kept: Inheritance | None = runtime.attached.get(_ATTACHED)
    if kept is None or not (runtime.closed or kept.world is not runtime.communicator):
        kept = runtime.attached[_ATTACHED] = _taken(runtime)
    # Otherwise no later world has received it.
    kept.is_new = takes_codecs and not kept.codecs
    try:
        yield kept
    except BaseException:
        if not runtime.closed and kept.world is runtime.communicator:
            del runtime.attached[_ATTACHED]  # the world stays, and the program may drop its groups
        raise


def _taken(runtime: Runtime) -> Inheritance:
    roster = runtime.roster
    members = tuple(map(_member, roster.members)) if roster is not None else (_own(),)
    made = {opened.name: opened for opened in runtime.groups if opened.follows and not opened.is_dropped}
    return Inheritance(
        hashlib.sha256(f"{members} {roster and roster.epoch}".encode()).hexdigest()[:16],
        members,
        runtime.communicator,
        {name: opened.communicator(runtime) for name, opened in made.items()},
        runtime.groups_made,
        {} if runtime.closed else taken_from(runtime),
    )


def _member(process: Sequence[object]) -> Member:
    pid, started, place, _ = process
    return pid, started, place  # type: ignore[return-value]


def _own() -> Member:
    return _member(own_process(host_name(), 0))


def _digest(follower: Follower) -> str:
    shapes = [f"{name} {list(param.shape)} {param.dtype}" for name, param in follower.named]
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def _origins(answers: Sequence[_PreviousState]) -> dict[str, dict[int, _PreviousState]]:
    """Return origin → previous state of its ranks, by rank; in the order of their first ranks."""
    found: dict[str, dict[int, _PreviousState]] = {}
    for rank, had in enumerate(answers):
        found.setdefault(had.origin, {})[rank] = had
    return found


def _groups(
    answers: Sequence[_PreviousState], places: dict[Member, int]
) -> tuple[list[_Chosen], dict[tuple[str, str], str]]:
    """Return the groups to reopen, the same on all ranks; and why others are not, by origin and name."""
    chosen: list[_Chosen] = []
    refused = {}
    for number, (origin, hads) in enumerate(_origins(answers).items()):
        known = {group.name: group for had in hads.values() for group in had.groups}
        having = {rank: {group.name: group for group in had.groups} for rank, had in hads.items()}
        members = next(iter(hads.values())).members
        for name, group in sorted(known.items(), key=lambda item: (len(item[0]), item[0])):
            left = [places[members[rank]] for rank in group.ranks if members[rank] in places]
            without = [rank for rank in left if name not in having[rank]]
            if not left:
                refused[origin, name] = "none of its ranks is left"
            elif without:
                refused[origin, name] = f"{phrase_ranks(without)} had closed or dropped it"
            else:
                is_taken = any(each.name == name for each in chosen)
                splits = max(having[rank][name].splits for rank in left)
                called = f"{name}+{number}" if is_taken else name
                chosen.append(_Chosen(origin, name, called, tuple(left), splits))
    return chosen, refused


def _models(
    answers: Sequence[_PreviousState], chosen: Sequence[_Chosen]
) -> list[tuple[dict[str, str], str, str]]:
    """Return the models that all ranks of their groups have, in the same order on all ranks.

    For each model: origin → name of its branch there, the name of the new branch, and its former group. Ranks
    from one world identify a model by its branch, whose name is the same on all of them. Ranks from several
    worlds have the same models if the models have the same parameters in the same order.
    """
    found: list[tuple[dict[str, str], str, str]] = []
    of_world: dict[str, dict[tuple[str, int], str]] = {}  # by origin, digest and number: branches
    groups = {(each.origin, each.before): each for each in chosen}
    for origin, hads in _origins(answers).items():
        alike, mine = Counter[str](), of_world.setdefault(origin, {})
        known = {model for had in hads.values() for model in had.models}
        for model in sorted(known, key=lambda each: (len(each.branch), each.branch)):
            group = groups.get((origin, model.group))
            ranks = list(hads) if model.group == "world" else group.ranks if group is not None else ()
            if not ranks or any(model not in hads[rank].models for rank in ranks):
                continue
            if group is not None:
                branch = model.branch.replace(group.before, group.name, 1)
                found.append(({origin: model.branch}, branch, model.group))
            else:
                mine[model.digest, alike[model.digest]] = model.branch
                alike[model.digest] += 1
    first = next(iter(of_world.values()))
    for key, branch in first.items():
        if all(key in branches for branches in of_world.values()):
            names = {origin: branches[key] for origin, branches in of_world.items()}
            found.append((names, branch, "world"))
    return found


def taken_from(runtime: Runtime) -> Carried:
    """Return this rank's codec state between calls, such as residuals; local.

    Only operations whose state consists of each rank's residuals are included. Others start anew. State that
    ranks share (estimates of a sum, counters) still contains the lost ranks' part, or differs where a failed
    pass has changed it on some ranks; and the parts that a rank sums for others have other boundaries in
    another world.
    """
    carried: Carried = {}
    for group, stage, name in runtime.unmerged:
        value = runtime.restored.get(group, {}).get(stage, {}).get(name)
        if holds_tensors(value):
            carried[group, stage, name] = dict(value or {})
    for opened in runtime.groups:
        for (stage, name), value in opened.pipeline.state().items() if opened.group.rank >= 0 else ():
            tensors = _residuals(value)
            if tensors is not None:
                carried[opened.name, stage, name] = tensors
    return carried


def _residuals(value: Any) -> dict[str, torch.Tensor] | None:
    if not isinstance(value, list) or not all(isinstance(each, StateTensor) for each in value):
        return None
    if any(each.role != "own" for each in value):
        return None
    return {each.name: each.tensor.detach().clone() for each in value} or None


def put_into(
    runtime: Runtime,
    carried: Carried,
    answers: Sequence[Sequence[Key] | None],
    ranks: Mapping[str, Sequence[int]],
) -> None:
    """Put codec state of the previous world into a new one; collective over all its ranks.

    Operations for which a survivor of their group has no state start anew, on all ranks alike. A new rank
    gets the same entries, with zeros: it has no values left to send. Call this before models are wrapped for
    the new world, and groups opened.

    Args:
        carried: see `taken_from`.
        answers: the keys of `carried` by rank; None for new ranks.
        ranks: group → its ranks; groups that are not in it have all ranks.
    """
    comm = runtime.communicator
    known = [None if keys is None else set(keys) for keys in answers]
    common = set()
    for key in set[Key]().union(*filter(None, known)):
        having = [known[rank] for rank in ranks.get(key[0], comm.ranks)]
        if all(keys is None or key in keys for keys in having) and any(having):
            common.add(key)
    if None in known and common:
        src = next(rank for rank, keys in enumerate(known) if keys is not None)
        shared = sorted(common & (known[src] or set()))
        received = broadcast_state([carried[key] for key in shared] if comm.rank == src else None, comm, src)
        if known[comm.rank] is None:
            zeros = [{name: torch.zeros_like(each) for name, each in state.items()} for state in received]
            carried = dict(zip(shared, zeros, strict=True))
    for group, stage, name in common & carried.keys():
        if comm.rank in ranks.get(group, comm.ranks):
            kept = runtime.restored.setdefault(group, {}).setdefault(stage, {})
            kept[name] = carried[group, stage, name]
            runtime.unmerged.add((group, stage, name))
    for communicator in runtime.communicators:
        if communicator.rank >= 0:
            communicator.pipeline.load_state()
