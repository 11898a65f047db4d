"""What ranks do in the tests of `mcr.sync`."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from ranks import wait_for_files

import mcr_plus as mcr
from mcr_plus.weight_sync import receiver, sync
from mcr_plus.weight_sync.connection import SourceConnection


class Model(torch.nn.Module):
    """Several dtypes, tied and non-contiguous parameters, buffers, an empty and a 0-dim tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.embedding = torch.nn.Parameter(torch.randn(301, 64, generator=draw).bfloat16())
        self.head = torch.nn.Linear(64, 301, bias=False)
        self.head.weight = self.embedding
        self.turned = torch.nn.Parameter(torch.randn(33, 65, generator=draw).t())
        self.scale = torch.nn.Parameter(torch.randn((), generator=draw, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor([3, 4]))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("mask", torch.rand(77, generator=draw) < 0.5, persistent=False)
        self.register_buffer("waves", torch.randn(9, generator=draw, dtype=torch.complex64))

    def tensors(self) -> list[torch.Tensor]:
        return [*self.parameters(), *self.buffers()]


def bits(model: Model) -> list[Any]:
    """All bits, as numbers that JSON can hold."""
    return [tensor.detach().contiguous().view(torch.uint8).sum().item() for tensor in flat(model)] + [
        hash_of(tensor) for tensor in flat(model)
    ]


def flat(model: Model) -> list[torch.Tensor]:
    return [
        torch.view_as_real(tensor.detach()).reshape(-1)
        if tensor.is_complex()
        else tensor.detach().reshape(-1)
        for tensor in model.tensors()
        if tensor.numel()
    ]


def hash_of(tensor: torch.Tensor) -> int:
    raw = tensor.detach().contiguous().view(torch.uint8).numpy().astype(np.float64)
    return int((raw * (1 + np.arange(raw.size) % 9973)).sum())


def step(model: Model, seed: int, share: float = 0.01) -> None:
    """Move a share of all elements by one step of their bits; some become NaN with a payload."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.tensors():
            values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            moved = torch.rand(values.shape, generator=draw) < share
            if values.dtype is torch.bool:
                values.logical_xor_(moved)
                continue
            kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
            copy = values.contiguous().view(kind)
            values.copy_((copy + moved.to(kind)).view(values.dtype))
        model.embedding[0, seed % 64] = (
            torch.tensor([0x7FA0 | seed % 16]).to(torch.int16).view(torch.bfloat16)[0]
        )


def in_turns(backends: list[str], rounds: int) -> dict[str, Any]:
    """Every version is pulled, and each has the bits of the source."""
    with mcr.init(backends=backends) as comm:
        model = Model()
        places = [tensor.data_ptr() for tensor in model.tensors()]
        weights = mcr.sync(model, src=0)
        seen, versions = [], []
        for number in range(rounds):
            if comm.rank == 0:
                step(model, number)
                versions.append(weights.push())
                assert weights.pull() is None
            else:
                assert weights.push() is None
                versions.append(weights.pull(timeout=20))
            seen.append(bits(model))
            comm.barrier()
        assert [tensor.data_ptr() for tensor in model.tensors()] == places
        assert model.head.weight is model.embedding
        stats = weights.stats()
        weights.close()
        weights.close()
        text = ""
        try:
            weights.pull()
        except mcr.NotInitialized as error:
            text = str(error)
        return {"seen": seen, "versions": versions, "stats": stats, "closed": text}


def of_a_group() -> dict[str, Any]:
    """The source is the group's last rank; the world's rank 0 is not in it. A state dict; own versions."""
    with mcr.init(backends=["gloo"]) as comm:
        group = mcr.new_group([2, 1])
        if comm.rank == 0:
            return {}
        state = {"b": torch.arange(6.0) * comm.rank, "a": torch.ones(3, dtype=torch.int8) * comm.rank}
        weights = mcr.sync(state, src=1, tag="actor", group=group)
        other = mcr.sync({"x": torch.full((5,), float(comm.rank))}, src=2, tag="critic", group=group)
        weights.push(7)
        first = weights.pull(timeout=20)
        group.barrier()
        state["b"].mul_(2)
        weights.push(100)
        second = weights.pull(timeout=20)
        other.push()
        other.pull(timeout=20)
        try:
            weights.push(100)
            refused = ""
        except mcr.InvalidArgument as error:
            refused = str(error)
        return {
            "pulled": [first, second], "state": {name: value.tolist() for name, value in state.items()},
            "refused": refused,
        }  # fmt: skip


def late_and_idle() -> dict[str, Any]:
    """Rank 1 pulls once at the end, rank 2 never; the source goes on at its pace with bounded memory."""
    with mcr.init(backends=["gloo"]) as comm:
        model = Model()
        weights = mcr.sync(model, src=0, history=0.5)
        most, found, stats = 0, 0, {}
        if comm.rank == 0:
            for number in range(40):
                step(model, number)
                found = weights.push() or 0
                most = max(most, weights.stats()["history_bytes"])
                time.sleep(0.02)
            while weights.stats()["version"] < found:
                time.sleep(0.01)
        comm.barrier()
        if comm.rank == 1:
            found = weights.pull(timeout=20) or 0
            while found < 40:
                found = weights.pull(timeout=20) or 0
            nothing = weights.pull(wait=False)
            assert nothing is None
        time.sleep(0.3)
        stats = weights.stats()
        comm.barrier()
        unused = weights._end._unused if comm.rank else 0  # type: ignore[union-attr]
        return {"version": found, "bits": bits(model), "stats": stats, "most": most, "unused": unused}


def counted(numel: int, version: int) -> torch.Tensor:
    """Of each version, every 1009th element is one more than before, others each time."""
    found = (torch.arange(numel, dtype=torch.int64) * 2654435761 % 65521).to(torch.int16)
    for each in range(1, version + 1):
        found[each::1009] += 1
    return found


def far_behind(numel: int, count: int) -> dict[str, Any]:
    """A receiver is so many versions behind, as if a version took no time to be applied, then a second."""
    with mcr.init(backends=["gloo"]) as comm, mock.patch.object(receiver, "AHEAD", 1):
        held = counted(numel, 0) if comm.rank == 0 else torch.zeros(numel, dtype=torch.int16)
        weights = mcr.sync({"w": held}, history=2.0)
        end: Any = weights._end
        version, wrong, anchors, costs = 0, 0, [], []

        def push(versions: int) -> int:
            for number in range(version, version + versions):
                held[number + 1 :: 1009] += 1
                weights.push()
            while weights.stats()["version"] < version + versions:
                time.sleep(0.001)
            return version + versions

        for behind, apply_s in ((0, None), (0, None), (count, 0.0), (count, 1.0)):
            if comm.rank == 0:
                version = push(1)
            while comm.rank and not end._is_paused:  # what follows is asked for by `pull`
                time.sleep(0.001)
            comm.barrier()
            if comm.rank == 0:
                version = push(behind)
            version = comm.broadcast_object(version, 0)
            if comm.rank and apply_s is not None:
                end._feeds[0]._apply_s = apply_s
            while comm.rank and (weights.pull(timeout=60) or 0) < version:
                pass
            comm.barrier()
            wrong += int((held != counted(numel, version)).sum())
            anchors.append(weights.stats()["anchors"])
            costs.append(end._feeds[0].cost if comm.rank else 0)
            comm.barrier()  # or the next version would be pulled already
        return {"wrong": wrong, "anchors": anchors, "costs": costs}


def corrupted(rounds: int) -> dict[str, Any]:
    """Rank 1 receives damaged bytes from time to time; rank 2 does not notice."""
    received = SourceConnection._received
    draw = np.random.default_rng(3)
    count = 0

    def damaged(self: SourceConnection, *args: Any) -> Any:
        nonlocal count
        kind, newest, parts, body = received(self, *args)
        count += 1
        if parts and count % 3 == 0:
            at = int(draw.integers(8 * parts, len(body)))
            body[at] ^= 1 << int(draw.integers(8))
        return kind, newest, parts, body

    with mcr.init(backends=["gloo"]) as comm:
        if comm.rank == 1:
            SourceConnection._received = damaged  # type: ignore[assignment,method-assign]
        model = Model()
        weights = mcr.sync(model, src=0)
        same = 0
        for number in range(rounds):
            if comm.rank == 0:
                step(model, number)
            weights.push()
            weights.pull(timeout=20)
            same += all(each == bits(model) for each in comm.all_gather_object(bits(model)))
        return {"same": same, "stats": weights.stats()}


def restarted() -> dict[str, Any]:
    """A new sync after the old one: a rank that has kept its weights gets changes, another an anchor."""
    with mcr.init(backends=["gloo"]) as comm:
        model = Model()
        with mcr.sync(model) as weights:
            if comm.rank == 0:
                step(model, 1)
            weights.push()
            weights.pull(timeout=20)
        if comm.rank == 2:  # as a process that was started again has them
            model = Model(seed=9)
        with mcr.sync(model) as weights:
            if comm.rank == 0:
                step(model, 2)
            weights.push()
            weights.pull(timeout=20)
            stats = weights.stats()
        return {"bits": bits(model), "stats": stats}


def reconnected() -> dict[str, Any]:
    """The connection of a receiver breaks; it connects again, and goes on from what it holds."""
    with mcr.init(backends=["gloo"]) as comm:
        model = Model()
        weights = mcr.sync(model)
        for number in range(4):
            if comm.rank == 0:
                step(model, number)
                for link in list(weights._end._links.values()) if number == 2 else []:  # type: ignore[union-attr]
                    link._socket.shutdown(2)
            weights.push()
            weights.pull(timeout=20)
            comm.barrier()
        return {"bits": bits(model), "stats": weights.stats()}


def death(victim: int, folder: str) -> dict[str, Any]:
    """A rank is killed; what the others' calls raise, and that they can end."""
    comm = mcr.init(backends=["gloo"], timeout=20)
    model = Model()
    weights = mcr.sync(model)
    weights.push()
    weights.pull(timeout=20)
    comm.barrier()
    Path(folder, f"past.{comm.rank}").touch()
    if comm.rank == victim:
        wait_for_files(*(Path(folder, f"past.{rank}") for rank in range(comm.size)))
        os.kill(os.getpid(), signal.SIGKILL)
    raised, lost, began = "", [], time.monotonic()
    try:
        while True:
            weights.push()
            weights.pull(timeout=10)
            time.sleep(0.1)
            if comm.rank == 0 and weights.stats()["lost"] and comm.size > 2:
                break
    except mcr.McrError as error:
        raised, lost = type(error).__name__, list(getattr(error, "ranks", []))
    seconds = time.monotonic() - began
    stats = weights.stats()
    try:
        mcr.finalize()
    except mcr.McrError as error:
        stats["finalize"] = type(error).__name__
    return {"raised": raised, "lost": lost, "seconds": seconds, "stats": stats}


def refusals() -> list[str]:
    """The texts of all errors, in order."""
    texts = []

    def refused(call: Any) -> None:
        try:
            call()
            texts.append("accepted")
        except mcr.McrError as error:
            texts.append(f"{type(error).__name__}: {error}")

    with mcr.init(backends=["gloo"]) as comm:
        one = torch.zeros(3)
        refused(lambda: mcr.sync({"a": one if comm.rank else torch.zeros(3, dtype=torch.bfloat16)}))
        refused(lambda: mcr.sync({"a": one} if comm.rank else {"a": one, "b": torch.ones(2)}))
        refused(lambda: mcr.sync({"a": one} if comm.rank else {"a": 3}))  # type: ignore[dict-item]
        refused(lambda: mcr.sync({}))
        refused(lambda: mcr.sync(5))  # type: ignore[arg-type]
        refused(lambda: mcr.sync({"a": one}, src=5 if comm.rank else 0))
        refused(lambda: mcr.sync({"a": one}, tag="" if comm.rank else "x"))
        refused(lambda: mcr.sync({"a": one}, history=-1))
        with mock.patch.object(sync, "listen", side_effect=OSError("Cannot assign requested address")):
            refused(lambda: mcr.sync({"a": one}))
        state = {"a": torch.zeros(3), "b": torch.zeros(2)}
        weights = mcr.sync(state)
        refused(lambda: mcr.sync(state))
        refused(lambda: weights.pull(timeout=-1) if comm.rank else weights.push(0))
        refused(lambda: weights.pull(timeout=0.1) if comm.rank else weights.push("1"))  # type: ignore[arg-type]
        kept, state["b"] = state["b"], torch.zeros(5)
        if comm.rank == 0:
            refused(weights.push)
        state["b"] = kept
        comm.barrier()
        weights.push()
        if comm.rank:
            state["b"] = torch.zeros(2).bfloat16()
            refused(lambda: weights.pull(timeout=20))
        return texts


def threads_after_the_job() -> list[str]:
    """Threads of weight synchronisation that live on after `finalize`, without a `close` before."""
    mcr.init(backends=["gloo"])
    weights = mcr.sync({"w": torch.zeros(1000)})
    weights.push()
    weights.pull()
    mcr.finalize()
    return [each.name for each in threading.enumerate() if "sync" in each.name]
