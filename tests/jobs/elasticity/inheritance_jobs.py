"""Programs of ranks that go on in another world with what they had, for `test_inheritance`."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from ranks import meet

import mcr_plus as mcr
from mcr_plus.communicator.transfer import broadcast_state
from mcr_plus.job import rebind


def _begin(*stages: dict[str, Any], backends: list[str] | None = None) -> mcr.Communicator:
    torch.set_num_threads(1)
    pipeline = [*stages, {"select": {}}, {"dispatch": {"timeout": "30s"}}]
    return mcr.init({"version": 1, "pipeline": pipeline}, backends=backends)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lose(comm: mcr.Communicator, victim: int) -> None:
    """Rank `victim` dies, once no other rank is inside an operation; they wait until they know."""
    meet(f"a death among {comm.size}", comm.size)
    if comm.rank == victim:
        _die()
    with suppress(mcr.PeerLost):
        while True:
            comm.all_reduce(torch.ones(8))


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except mcr.McrError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def persistent_operations(backend: str) -> dict[str, Any]:
    """Operations bound to tensors, after rank 1 of four has died; and one that was in flight."""
    comm = _begin(backends=[backend])
    rank = comm.rank
    group = mcr.new_group([3, 1, 0])
    x, y, z, g = (torch.zeros(6) for _ in range(4))
    gathered, reduced = torch.zeros(4), torch.zeros(2)
    wide, twelve = torch.zeros(12), torch.zeros(12)
    operations = {
        "sum": mcr.persistent("all_reduce", x, op=mcr.SUM),
        "from 2": mcr.persistent("broadcast", y, 2),
        "from 1": mcr.persistent("broadcast", torch.zeros(2), src=1),
        "to 3": mcr.persistent("reduce", z, dst=3),
        "gather": mcr.persistent("all_gather_into_tensor", gathered, torch.ones(1)),
        "scatter": mcr.persistent("reduce_scatter_tensor", reduced, torch.ones(8)),
        "exchange": mcr.persistent("all_to_all_single", wide, twelve),
        "barrier": mcr.persistent("barrier"),
    }
    inside = None if group.rank < 0 else group.persistent("all_reduce", g)
    for each in operations.values():
        each()
    if inside is not None:
        inside()
    flying = mcr.persistent("all_reduce", torch.ones(4))
    meet("before a death", comm.size)
    if rank == 1:
        _die()
    work = flying.start()
    with suppress(mcr.PeerLost):
        while True:
            comm.all_reduce(torch.ones(8))
    mcr.shrink()
    result: dict[str, Any] = {"errors": {}, "in flight": _error(work.wait).partition(":")[0]}
    for turn in (1.0, 2.0):
        for tensor in (x, y, z, g):
            tensor.fill_(turn * (1 + rank))
        twelve.copy_(100 * rank + torch.arange(12.0))
        for name, each in operations.items():
            if turn == 1:
                if text := _error(each):
                    result["errors"][name] = text
            elif name not in result["errors"]:
                handle = each.start()
                handle.wait()
        if inside is not None:
            inside()
        result[str(turn)] = {
            "sum": x.tolist(), "from 2": y.tolist(), "to 3": z.tolist(), "exchange": wide.tolist(),
            "group": g.tolist(),
        }  # fmt: skip
    flying()
    mcr.shrink()  # once more: nobody is lost
    x.fill_(1.0)
    operations["sum"]()
    result["again"] = x.tolist()
    mcr.finalize()
    return result


def groups() -> dict[str, Any]:
    """The successors of groups, after rank 1 of five has died, and then rank 4."""
    comm = _begin(backends=["gloo"])
    rank = comm.rank
    made: dict[str, mcr.Communicator | None] = {
        "some": mcr.new_group([4, 1, 3, 0]),
        "lost": mcr.new_group([1]),
        "closed": mcr.new_group([0, 2]),
        "dropped": mcr.new_group([2, 3]),
        "parity": comm.split(rank % 2, key=-rank),
        "branch": comm.branch(),
    }
    closed = made["closed"]
    assert closed is not None
    if closed.rank >= 0:
        closed.close()
    if rank == 3:
        del made["dropped"]
        gc.collect()
    _lose(comm, 1)
    new = mcr.shrink()
    result: dict[str, Any] = {"rank": rank, "world": comm.successor() is new, "first": {}, "second": {}}

    def look(found: dict[str, Any]) -> None:
        for name, group in made.items():
            assert group is not None
            try:
                group = group.successor()
            except mcr.McrError as error:
                found[name] = f"{type(error).__name__}: {error}"
                continue
            x = torch.tensor([10.0**rank])
            if group.rank >= 0:
                group.all_reduce(x)
            found[name] = (group.ranks, int(x.item()), group.name)

    look(result["first"])
    fresh = mcr.new_group([0, 1, 2])
    result["fresh"] = fresh.name
    _lose(new, 3)  # rank 4 of before
    latest = mcr.shrink(group=made["some"])
    result["is the latest"] = latest is made["some"].successor()  # type: ignore[union-attr]
    made["fresh"] = fresh
    look(result["second"])
    mcr.finalize()
    return result


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def _gradient(model: torch.nn.Module, rank: int) -> list[float]:
    model.zero_grad()
    model(torch.full((1, 3), 10.0**rank)).sum().backward()
    (weight, _) = model.parameters()
    assert weight.grad is not None
    return list(weight.grad.unique().tolist())


def models(backend: str) -> dict[str, Any]:
    """Models of all ranks, of a group, and one that rank 3 has dropped, after rank 1 of four has died."""
    comm = _begin(backends=[backend])
    rank = comm.rank
    pair, others = mcr.new_group([3, 0, 1]), mcr.new_group([2, 1])
    wrapped: dict[str, Any] = {}
    for number, (name, group) in enumerate(
        [("dropped", None), ("all", None), ("pair", pair), ("others", others), ("optimizer", None)]
    ):
        if group is not None and group.rank < 0:
            continue
        model = _model(number)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if name == "optimizer":
            mcr.DistributedOptimizer(optimizer)
        else:
            mcr.wrap(model, optimizer, group=group)
        wrapped[name] = model, optimizer
    if rank == 3:
        del wrapped["dropped"]
        gc.collect()
    _lose(comm, 1)
    mcr.shrink()
    result: dict[str, Any] = {}
    for name in ("all", "pair", "others", "optimizer"):
        if name in wrapped:
            result[name] = _gradient(wrapped[name][0], rank)
    if "dropped" in wrapped:
        result["dropped"] = _error(lambda: _gradient(wrapped["dropped"][0], rank)).partition(":")[0]
    mcr.finalize()
    return result


def residuals_of_groups() -> dict[str, Any]:
    """Residuals of error feedback in a group of three of four ranks, of which one dies."""
    compress = {"codec": "topk", "ratio": 0.1, "error_feedback": True}
    comm = _begin({"compress": compress}, backends=["gloo"])
    rank = comm.rank
    group = mcr.new_group([3, 1, 0])
    generator = torch.Generator().manual_seed(rank)
    inputs = []
    for _ in range(2):
        inputs.append(torch.randn(5000, generator=generator))
        if group.rank >= 0:
            group.all_reduce(inputs[-1], tag="a", compress=None)
    own = _residual(group)
    _lose(comm, 1)
    mcr.shrink()
    group = group.successor()
    x = torch.randn(5000, generator=generator)
    given = x.double().tolist()
    if group.rank >= 0:
        group.all_reduce(x, tag="a")
    result = {"own": own, "given": given, "sent": x.double().tolist(), "kept": _residual(group)}
    mcr.finalize()
    return result


def _residual(group: mcr.Communicator) -> list[float]:
    state = [value for (stage, _), value in group.pipeline.state().items() if stage == "compress"]
    if not state or group.rank < 0:
        return []
    tensor: torch.Tensor = state[0][0].tensor
    return list(tensor.double().flatten().tolist())


def a_loss_meanwhile(when: str) -> dict[str, Any]:
    """Rank 3 dies; rank 1 dies while the others open their groups in the world without rank 3."""
    comm = _begin(backends=["gloo"])
    rank = comm.rank
    group = mcr.new_group([3, 2, 0])
    model = _model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mcr.wrap(model, optimizer)
    x = torch.zeros(2)
    operation = mcr.persistent("all_reduce", x)
    _lose(comm, 3)
    if rank == 1:
        place = "_digest" if when == "asked" else "put_into"
        setattr(rebind, place, lambda *_: _die())
    attempts = 0
    while True:
        attempts += 1
        with suppress(mcr.PeerLost):
            group = mcr.shrink(group)
            break
    x.fill_(1.0 + rank)
    operation()
    y = torch.tensor([1.0 + rank])
    group.all_reduce(y)
    result = {
        "x": x.tolist(),
        "y": y.tolist(),
        "gradient": _gradient(model, rank),
        "size": mcr.get_world_size(),
    }
    mcr.finalize()
    return {**result, "attempts": attempts}


def merged_worlds(folder: str) -> dict[str, Any]:
    """Two worlds of two ranks, each with a group, become one; ranks 0 and 3 are the first of each."""
    comm = _begin(backends=["gloo"])
    rank = comm.rank
    handles = comm.all_gather_object(mcr.reconfigure_handle())
    own = [0, 1] if rank < 2 else [2, 3]
    mcr.reconfigure(f"halves {own}", [handles[each] for each in own])
    group = mcr.new_group([1, 0])
    x = torch.zeros(1)
    operation = group.persistent("broadcast", x, 1)  # from rank 1 or 3 of the first world
    model = _model(rank // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mcr.wrap(model, optimizer)
    Path(folder, f"handle.{rank}").write_text(mcr.reconfigure_handle())
    meet("handles", 4)
    handles = [Path(folder, f"handle.{each}").read_text() for each in (3, 0, 2, 1)]
    mcr.reconfigure("whole", handles)
    group = group.successor()
    x.fill_(float(rank))
    operation()
    gradient = _gradient(model, rank)
    later = mcr.new_group([0, 1])
    mcr.finalize()
    return {
        "ranks": group.ranks,
        "name": group.name,
        "later": later.name,
        "x": x.item(),
        "gradient": gradient,
    }


def left_hooks() -> dict[str, Any]:
    """Hooks of the optimizer after loops that end by themselves, by `break`, and by an exception."""
    _begin(backends=["gloo"])
    model = _model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mcr.wrap(model, optimizer)
    counts = [len(optimizer._optimizer_step_post_hooks)]
    for _ in range(2):
        for step in mcr.elastic(model, optimizer, steps=2):
            with step:
                optimizer.step()
        counts.append(len(optimizer._optimizer_step_post_hooks))
    for step in mcr.elastic(model, optimizer, steps=4):
        with step:
            optimizer.step()
        if step.number == 1:
            break
    counts.append(len(optimizer._optimizer_step_post_hooks))
    with suppress(ValueError):
        for step in mcr.elastic(model, optimizer, steps=4):
            with step:
                raise ValueError
    step = None  # type: ignore[assignment]
    gc.collect()
    counts.append(len(optimizer._optimizer_step_post_hooks))
    mcr.elastic(model, optimizer)  # never begun
    counts.append(len(optimizer._optimizer_step_post_hooks))
    mcr.finalize()
    return {"counts": counts}


def transfer(codec: str, where: str) -> dict[str, Any]:
    """A state with any bits, sent from rank 1 by a pipeline that encodes all broadcasts."""
    named = {"codec": codec}
    between = {"hierarchical": {"ranks_per_node": 2, "inter": {"compress": named}}}
    rule = {"match": {"kind": "broadcast"}, "compress": named}
    compress = {} if where != "both" else {"codec": "exp_window"}
    stages = [
        *([] if where == "rule" else [between]),
        {"compress": compress},
        {"select": {}},
        {"dispatch": {}},
    ]
    torch.set_num_threads(1)
    rules = [rule] if where == "rule" else []
    comm = mcr.init({"version": 1, "pipeline": stages, "rules": rules}, backends=["gloo"])
    generator = torch.Generator().manual_seed(comm.rank)
    bits = torch.randint(-(2**31), 2**31, (3000,), generator=generator).to(torch.int32)
    values = [torch.randn(70_000, generator=generator), bits.view(torch.float32), bits]
    state = {"some": values, "step": comm.rank}
    with mcr.record() as log:
        received = broadcast_state(state, comm, 1)
    own = [each.view(torch.int32) for each in received["some"]]
    same = comm.all_gather_object([each.tolist() for each in own])
    generator = torch.Generator().manual_seed(1)
    expected = torch.randint(-(2**31), 2**31, (3000,), generator=generator).to(torch.int32)
    result = {
        "equal": all(each == same[0] for each in same),
        "right": all(each.equal(expected) for each in own[1:]) and received["step"] == 1,
        "codecs": sorted({record.codec or "" for record in log.records if record.tag == "state"}),
    }
    mcr.finalize()
    return result
