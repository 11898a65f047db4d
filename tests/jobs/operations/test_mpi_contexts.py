"""MPI's communicators for signatures: the limit of their number, and behaviour at the limit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from mismatches import outcome_of
from ranks import meet, own_rank, run_ranks

import mcr_plus as mcr
from mcr_plus.backends.mpi.contexts import Contexts
from mcr_plus.job.init import current
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

pytestmark = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")

ONLY_MPI: dict[str, Any] = {
    "version": 1,
    "backends": ["mpi"],
    "pipeline": [{"select": {}}, {"dispatch": {"timeout": "30s"}}],
}
SIGNATURES = 200


def _check(comm: mcr.Communicator, numel: int, times: int) -> None:
    for _ in range(times):
        value = torch.arange(numel) * (comm.rank + 1)
        comm.all_reduce(value)
        assert value.tolist() == [n * comm.size * (comm.size + 1) // 2 for n in range(numel)]


def _rooms(comm: mcr.Communicator) -> dict[str, int]:
    return {name: channel.contexts.limit for name, channel in _channels(comm).items()}


def _channels(comm: mcr.Communicator) -> dict[str, Any]:
    lines = {opened.name: opened.runtime.channels for opened in current().groups}
    return {name: each["mpi"].channel for name, each in lines.items() if "mpi" in each}


def many_groups(groups: int) -> dict[str, Any]:
    """Run on ranks: more signatures in many groups than MPICH has communicators; groups of two ranks too."""
    comm = mcr.init(ONLY_MPI)
    everybody = list(range(comm.size))
    made = []
    for _ in range(groups):
        made.append(mcr.new_group(everybody[::-1]))
        if comm.size > 2:
            made.append(mcr.new_group([0, 1]))  # the others have more left than these
    rooms = _rooms(comm)
    made = [group for group in made if group.rank >= 0]
    for group in made:
        for numel in range(1, SIGNATURES + 1):
            _check(group, numel, 3)
    for group in made:  # and again, when all there are have been made
        for numel in (1, SIGNATURES // 2, SIGNATURES):
            _check(group, numel, 2)
    contexts = sum(len(channel.contexts.own) for channel in _channels(comm).values())
    before = Contexts.unreserved
    first, *_, last = [group for group in made if group.size == comm.size]
    first.close()
    given_back = Contexts.unreserved - before == rooms[first.opened.name]
    mine = SIGNATURES if last.rank else SIGNATURES - 1  # mismatches without one are detected, too
    told = outcome_of(lambda: _check(last, mine, 1))["error"]
    return {"contexts": contexts, "rooms": rooms, "given back": given_back, "told": told}


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "groups"), [(2, 12), (3, 4)])
def test_communicators_are_bounded_in_a_process(ranks: int, groups: int) -> None:
    results = run_ranks(many_groups, ranks, args=[groups], timeout=180, teardown=True)
    for result in results:
        found, rooms = result.value, result.value["rooms"]
        assert found["contexts"] <= sum(rooms.values()) <= 1024
        assert rooms["world"] == 192
        assert min(rooms.values()) < 192
        assert found["given back"]
        assert found["told"] == "OrderMismatch"
        assert all(rooms[name] == room for name, room in results[0].value["rooms"].items() if name in rooms)


class _Short:
    """A communicator that cannot be duplicated: it fails at once, or after all ranks have called it."""

    def __init__(self, comm: Any, fails: str) -> None:
        self._comm, self._fails = comm, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Idup(self) -> tuple[Any, Any]:  # noqa: N802 - MPI's name
        from mpi4py import MPI

        none_left = MPI.Exception(MPI.ERR_OTHER)
        if self._fails == "at once":
            raise none_left
        made = self._comm.Idup()
        return made[0], _Late(made[1], none_left)


class _Late:
    def __init__(self, request: Any, error: Exception) -> None:
        self._request, self._error = request, error

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        if self._request.Test():
            raise self._error
        return False


def without_communicators(fails: str, ranks: list[int]) -> dict[str, Any]:
    """Run on ranks: some run out of communicators, in a new group and in a group in use."""
    comm = mcr.init(ONLY_MPI)
    used, fresh = (mcr.new_group(list(range(comm.size))) for _ in range(2))
    for numel in (1, 2):
        _check(used, numel, 3)
    if comm.rank in ranks:
        for group in (used, fresh):
            contexts = _channels(comm)[group.opened.name].contexts
            contexts._comm = _Short(contexts._comm, fails)
    found = {"known": outcome_of(lambda: _check(used, 1, 2)), "new": outcome_of(lambda: _check(used, 3, 4))}
    if found["new"]["error"] is None:
        mine = 4 if used.rank else 3
        _check(used, 4, 3)
        found["mistake"] = outcome_of(lambda: _check(used, mine, 1))
    found["fresh"] = outcome_of(lambda: _check(fresh, 1, 1))
    return found


@pytest.mark.parametrize(("fails", "ranks"), [("late", [0, 1]), ("late", [1]), ("at once", [0])])
def test_no_rank_waits_for_one_without_communicators(fails: str, ranks: list[int]) -> None:
    results = run_ranks(without_communicators, 2, args=[fails, ranks], check=False)
    for result in results:
        found = result.value
        assert found["known"]["error"] is None
        assert found["fresh"]["error"] == "BackendError"
        if fails == "late":  # all share one, and are compared
            assert found["new"]["error"] is None
            assert found["mistake"]["error"] == "OrderMismatch"
        else:
            assert found["new"]["error"] == "BackendError"
            assert "MPI cannot create a communicator for the operation" in found["new"]["text"]
        assert all(each["seconds"] < 10 for each in found.values())


def without_groups() -> list[dict[str, Any]]:
    """Run on ranks: rank 1 cannot duplicate the communicator of a new group, with MPI alone and with all."""
    found = []
    for backends in (["mpi"], None):
        settings = ONLY_MPI if backends else {"version": 1, "pipeline": ONLY_MPI["pipeline"]}
        comm = mcr.init(settings)
        backend: Any = next(each for each in comm._runtime.engine.backends if each.name == "mpi")
        if comm.rank == 1:
            backend._comm = _NoDuplicate(backend._comm)
        found.append(outcome_of(lambda comm=comm: _check(mcr.new_group([1, 0]), 3, 3)))  # type: ignore[misc]
        if comm.rank == 1:
            backend._comm = backend._comm.comm
        _check(mcr.new_group([1, 0]), 3, 3)
        mcr.finalize()
    return found


class _NoDuplicate:
    """A communicator that fails to duplicate groups."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def Create_group(self, *arguments: Any) -> Any:  # noqa: N802 - MPI's name
        return _NoDuplicate(self.comm.Create_group(*arguments))

    def Dup(self) -> Any:  # noqa: N802 - MPI's name
        from mpi4py import MPI

        self.comm.Dup()
        raise MPI.Exception(MPI.ERR_OTHER)


def test_a_group_that_one_rank_cannot_open_is_opened_by_none() -> None:
    for result in run_ranks(without_groups, 2):
        only, among_others = result.value
        assert only["error"] == "BackendUnavailable"
        assert "backend mpi: no communicator for group 'group1'" in only["text"]
        assert among_others["error"] is None


def one_after_another(seed: int) -> list[int]:
    """Run on ranks, as on several hosts: compressed operations in flight start their steps after others.

    MPI's work for the first operations of a signature is collective, so no rank may do it twice, however long
    an admitted operation waits for the one before it. Ranks come to each at different times.
    """
    stages = [{"compress": {"codec": "int8_block"}}, *ONLY_MPI["pipeline"]]
    with mock.patch("mcr_plus.job.init.host_name", return_value=f"host{own_rank()}"):
        comm = mcr.init({**ONLY_MPI, "pipeline": stages})
    program, own = random.Random(seed), random.Random(seed * 100 + comm.rank)
    for step in range(40):
        works, values, expected = [], [], []
        for _ in range(program.randrange(1, 6)):
            tag, numel = f"{program.randrange(step + 1)}", program.choice([4096, 5000])
            inputs = [torch.full((numel,), float(program.randrange(1, 9))) for _ in range(comm.size)]
            values.append(inputs[comm.rank].clone())
            expected.append(float(sum(each[0] for each in inputs)))
            works.append(comm.all_reduce(values[-1], async_op=True, tag=tag))
            if own.random() < 0.3:
                time.sleep(own.random() * 5e-3)
        for work in own.sample(works, len(works)):
            assert work is not None
            work.wait()
        for value, total in zip(values, expected, strict=True):
            torch.testing.assert_close(value, torch.full_like(value, total), rtol=0.02, atol=0.0)
    return sorted(_channels(comm)["world"].contexts.own)


@pytest.mark.short("2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_operations_that_start_later_pass_the_gate_once(ranks: int) -> None:
    first, *others = run_ranks(one_after_another, ranks, args=[ranks], timeout=120)
    assert len(first.value) > 20
    assert all(other.value == first.value for other in others)


def in_opposite_orders() -> list[bool]:
    """Run on ranks: rank 1 begins the communicator of one group only when that of the other has been made."""
    comm = mcr.init(ONLY_MPI)
    groups = [mcr.new_group([0, 1]) for _ in range(2)]
    contexts = [_channels(comm)[group.opened.name].contexts for group in groups]
    found = []
    for digest, (early, late) in enumerate((contexts, contexts[::-1])):
        begun = early.make(digest) if comm.rank == 0 else None
        assert begun is None or not any(begun() for _ in range(100))
        meet(f"begun{digest}", 2)
        found.append(_ends(late.make(digest)))
        found.append(_ends(begun or early.make(digest)))
    return found


def _ends(poll: Callable[[], bool]) -> bool:
    """Poll for at most 10 s; return whether it has ended."""
    deadline = time.monotonic() + 10
    while not (ended := poll()) and time.monotonic() < deadline:
        pass
    return ended


def test_ranks_may_begin_the_communicators_of_groups_in_different_orders() -> None:
    """Open MPI holds up a duplication until all ranks have begun another one that is in progress."""
    for result in run_ranks(in_opposite_orders, 2):
        assert result.value == [True] * 4


def groups_amid_operations() -> dict[str, Any]:
    """Run on ranks, as on two hosts: make groups while operations in steps are in flight."""
    stages = [{"hierarchical": {"min": 0}}, *ONLY_MPI["pipeline"]]
    with mock.patch("mcr_plus.job.init.host_name", return_value=f"host{own_rank() // 2}"):
        comm = mcr.init({**ONLY_MPI, "pipeline": stages})
    libraries, engine = current().libraries, current().engine
    found: dict[str, Any] = {"sums": [], "waiting": []}
    opens = libraries.open_channels

    def open_channels(group: Any) -> Any:
        found["waiting"].append(bool(engine.blocked))
        return opens(group)

    with mock.patch.object(libraries, "open_channels", open_channels):
        for turn in range(6):
            values = [torch.full((1000,), float(comm.rank)) for _ in range(4)]
            group = None
            for again in (False, True):  # the second time MPI makes communicators
                tags = [f"{turn}.{number}" for number in range(len(values))]
                works = [
                    comm.all_reduce(each, async_op=True, tag=tag)
                    for each, tag in zip(values, tags, strict=True)
                ]
                if again:
                    group = mcr.new_group([3, 1] if turn % 2 else [0, 1, 2, 3])
                for work in works:
                    assert work is not None
                    work.wait()
            found["sums"] += [float(each.mean()) for each in values]
            if group is not None and group.rank >= 0:
                group.close()
    return found


def test_groups_are_made_when_operations_in_steps_have_started() -> None:
    """The calls that make groups block; Open MPI holds them up until all ranks have begun a duplication."""
    for result in run_ranks(groups_amid_operations, 4, timeout=60):
        assert result.value["sums"] == [24.0] * 24
        assert not any(result.value["waiting"])
