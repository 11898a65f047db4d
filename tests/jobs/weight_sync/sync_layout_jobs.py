"""What ranks do in the tests of `mcr.sync` with parts of tensors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import layout_oracle as oracle
import numpy as np
import torch
import torch.distributed as dist
from ranks import wait_for_files

import mcr_plus as mcr
from mcr_plus.weight_sync.connection import SourceConnection

SOURCES, RECEIVERS = [0, 1, 2], [3, 4]
State = dict[str, torch.Tensor]


def sides() -> dict[str, tuple[oracle.Side, oracle.Side]]:
    """Of each tensor the layouts of three sources and of two receivers, by the definition."""
    return {
        "embedding": (
            oracle.mesh((301, 64), SOURCES, ["S0"]), oracle.sharded((301, 64), RECEIVERS, 0, [90, 211]),
        ),
        "up": (oracle.mesh((65, 33), SOURCES, ["S0"]), oracle.mesh((65, 33), RECEIVERS, ["S1"])),
        "flat": (
            oracle.flat((40, 31), SOURCES, [[(0, 500)], [(500, 500)], [(500, 1240)]]),
            oracle.mesh((40, 31), RECEIVERS, ["R"]),
        ),
        "norm": (oracle.mesh((129,), SOURCES, ["R"]), oracle.mesh((129,), RECEIVERS, ["R"])),
        "first": (oracle.mesh((7, 9), [1], ["R"]), oracle.mesh((7, 9), [3], ["R"])),
    }  # fmt: skip


def wholes(version: int) -> dict[str, torch.Tensor]:
    """The whole tensors of a version: each step moves some elements of the one before, others of each."""
    draw = torch.Generator().manual_seed(0)
    found = {}
    for name, (here, _) in sides().items():
        bits = torch.randint(1 << 14, here.shape, generator=draw, dtype=torch.int16)
        for number in range(1, version + 1):
            flat = bits.view(-1)
            flat[(number * 7) % 97 :: 97] += number
        found[name] = bits.view(torch.bfloat16)
    return found


def part(whole: torch.Tensor, side: oracle.Side, rank: int) -> torch.Tensor:
    return whole.reshape(-1)[torch.from_numpy(side.tensors[rank])]


def state_of(rank: int, version: int) -> State:
    """What a rank holds of a version."""
    side = {name: pair[rank in RECEIVERS] for name, pair in sides().items()}
    return {
        name: part(whole, side[name], rank)
        for name, whole in wholes(version).items()
        if rank in side[name].tensors
    }


def layouts_of(rank: int) -> dict[str, mcr.Layout]:
    return {name: pair[rank in RECEIVERS].layout for name, pair in sides().items()}


def step(state: State, rank: int, version: int) -> None:
    for name, value in state_of(rank, version).items():
        state[name].copy_(value)


def same(state: State, rank: int, version: int) -> bool:
    expected = state_of(rank, version)
    return all(
        torch.equal(value.view(torch.int16), expected[name].view(torch.int16))
        for name, value in state.items()
    )


def at_their_own_pace(rounds: int, history: float) -> dict[str, Any]:
    """Sources and receivers run as fast as they can; each version that is pulled is whole."""
    with mcr.init(backends=["gloo"]) as comm:
        rank = comm.rank
        wrong: list[int] = []
        pulled: list[int] = []
        state = state_of(rank, 0)
        weights = mcr.sync(state, src=SOURCES, layout=layouts_of(rank), history=history)
        if rank in SOURCES:
            for version in range(1, rounds + 1):
                step(state, rank, version)
                weights.push()
        else:
            while not pulled or pulled[-1] < rounds:
                pulled.append(weights.pull(timeout=30) or 0)
                if not same(state, rank, pulled[-1]):
                    wrong.append(pulled[-1])
        weights.close()
        return {"wrong": wrong, "pulled": pulled, "stats": weights.stats()}


def damaged_and_broken(rounds: int) -> dict[str, Any]:
    """Rank 3 receives damaged bytes of source 1 from time to time, and its connection to source 2 breaks."""
    received, count = SourceConnection._received, 0

    def damaged(self: SourceConnection, *args: Any) -> Any:
        nonlocal count
        kind, newest, parts, body = received(self, *args)
        if parts and self.source == 1:
            count += 1
            if count % 3 == 0:
                body[-5] ^= 0x40
        return kind, newest, parts, body

    with mcr.init(backends=["gloo"]) as comm:
        rank, good = comm.rank, 0
        if rank == 3:
            SourceConnection._received = damaged  # type: ignore[assignment,method-assign]
        state = state_of(rank, 0)
        weights = mcr.sync(state, src=SOURCES, layout=layouts_of(rank))
        for version in range(1, rounds + 1):
            if rank in SOURCES:
                step(state, rank, version)
                if rank == 2 and version % 4 == 0:
                    link = weights._end._links.get(3)  # type: ignore[union-attr]
                    if link is not None:
                        link._socket.shutdown(2)
                weights.push()
            else:
                good += weights.pull(timeout=30) == version and same(state, rank, version)
            comm.barrier()
        return {"good": good, "stats": weights.stats()}


def started_again() -> dict[str, Any]:
    """A new sync in which rank 4 has other weights, as a process that was started again."""
    with mcr.init(backends=["gloo"]) as comm:
        rank, good = comm.rank, 0
        state = state_of(rank, 0)
        for version in (1, 2):
            if rank == 4 and version == 2:
                state = {name: torch.zeros_like(each) for name, each in state.items()}
            with mcr.sync(state, src=SOURCES, layout=layouts_of(rank)) as weights:
                if rank in SOURCES:
                    step(state, rank, version)
                    weights.push(version)
                else:
                    good += weights.pull(timeout=30) == version and same(state, rank, version)
                stats = weights.stats()
        return {"good": good, "stats": stats}


def death(victim: int, folder: str) -> dict[str, Any]:
    """One of two sources, or the only receiver, is killed while nothing is pushed."""
    comm = mcr.init(backends=["gloo"], timeout=30)
    rank = comm.rank
    layout = mcr.Layout.sharded((6, 4), [0, 1], 0)
    tensor = torch.zeros(layout.local_shape(rank) or (6, 4))
    weights = mcr.sync({"w": tensor}, src=[0, 1], layout={"w": layout} if rank < 2 else None)
    weights.push()
    weights.pull(timeout=20)
    comm.barrier()
    Path(folder, f"past.{rank}").touch()
    if rank == victim:
        wait_for_files(*(Path(folder, f"past.{each}") for each in range(comm.size)))
        os.kill(os.getpid(), signal.SIGKILL)
    raised, lost = "", []
    try:
        if victim == 2:
            while True:
                weights.push()
        weights.pull(timeout=60)
    except mcr.McrError as error:
        raised, lost = type(error).__name__, list(getattr(error, "ranks", []))
    if victim < 2:  # a source that ends would say so to the receiver
        if rank == 2:
            Path(folder, "told").touch()
        wait_for_files(Path(folder, "told"))
    try:
        mcr.finalize()
    except mcr.McrError:
        pass
    return {"raised": raised, "lost": lost}


def refusals() -> list[str]:
    """The texts of all errors, in order; rank 2 is the receiver."""
    texts: list[str] = []
    with mcr.init(backends=["gloo"]) as comm:
        rank = comm.rank
        rows = mcr.Layout.sharded((6, 4), [0, 1], 0)
        columns = mcr.Layout.sharded((6, 4), [2], 1)
        own = torch.zeros((rows if rank < 2 else columns).locals[rank])
        right = {"w": rows if rank < 2 else columns}

        def refused(state: Any, src: Any, layout: Any) -> None:
            try:
                mcr.sync(state, src=src, layout=layout).close()
                texts.append("accepted")
            except mcr.McrError as error:
                texts.append(f"{type(error).__name__}: {error}")

        refused({"w": own}, [0, 1], right)
        refused({"w": own}, [0], right)  # rank 1 holds what rank 0 lacks, and is a receiver
        refused({"w": own[1:]} if rank == 1 else {"w": own}, [0, 1], right)
        refused({"w": own}, [0, 1], {"w": columns} if rank == 1 else right)
        refused({"v": own} if rank == 1 else {"w": own}, [0, 1], right)
        refused({"w": own}, [0, 1], [rows])
        refused({"w": own}, [0, 1], {"w": "S0"})
        refused({"w": own}, [0, 1], {"w": mcr.Layout.mesh((3, 4), [0, 1], ["P"])} if rank < 2 else right)
        refused({"w": own.bfloat16()} if rank == 2 else {"w": own}, [0, 1], right)
        refused({"w": own}, [0, 0], right)
        refused({"w": own}, [], right)
        refused({"w": own}, [0, 1], None)  # rank 0 has (3, 4), the receiver (6, 4)
    return texts


class Block(torch.nn.Module):
    """Two layers that are cut for tensor parallel ranks, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = torch.nn.Linear(10, 12), torch.nn.Linear(12, 10)
        self.norm = torch.nn.LayerNorm(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return out


def fsdp_to_tensor_parallel(steps: int) -> dict[str, Any]:
    """FSDP2 over tensor parallel layers on ranks 0 to 3, other DTensors on ranks 4 and 5, all of it on 6."""
    from dtensors import placed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("mcr")
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    servers = DeviceMesh("cpu", [4, 5])
    model: Any = Block()
    cuts = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    state: Any = model
    if rank < 4:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif rank < 6:
        state = {
            name: placed(each.detach(), servers, [Shard(cuts[name])]) if name in cuts else each.detach()
            for name, each in model.named_parameters()
        }
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    weights = mcr.sync(state, src=range(4))
    good = 0
    wholes_: list[Any] = [None]
    for number in range(1, steps + 1):
        if rank < 4:
            inner.zero_grad()
            model(torch.full((3, 10), 0.1 + 0.2 * number)).square().sum().backward()
            inner.step()
            weights.push()
            whole = {name: each.full_tensor().detach() for name, each in model.named_parameters()}
            wholes_ = [{name: each.tolist() for name, each in whole.items()}]
        assert weights.pull(timeout=30) == (number if rank > 3 else None)
        dist.broadcast_object_list(wholes_, src=0)
        if rank > 3:
            good += _holds(state, wholes_[0], rank, cuts)
    sent = weights.stats()["dense_bytes"]
    weights.close()
    text = ""
    if rank < 6:
        on = mesh["tp"] if rank < 4 else servers
        state = {"w": DTensor.from_local(torch.zeros(3, 4), on, [Partial()], run_check=False)}
    else:
        state = {"w": torch.zeros(3, 4)}
    try:
        mcr.sync(state, src=range(4))
    except mcr.InvalidArgument as error:
        text = str(error)
    dist.destroy_process_group()
    return {"good": good, "dense_bytes": sent, "refused": text}


def _holds(state: Any, whole: Any, rank: int, cuts: dict[str, int]) -> bool:
    named: Any = dict(state.named_parameters()) if isinstance(state, torch.nn.Module) else state
    for name, each in named.items():
        expected = np.array(whole[name], np.float32)
        local = each.detach()
        if rank < 6 and name in cuts:
            expected = np.split(expected, 2, axis=cuts[name])[rank - 4]
            local = each.to_local().detach()
        if not np.array_equal(local.numpy(), expected):
            return False
    return True
