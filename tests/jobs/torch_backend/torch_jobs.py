"""What ranks of the tests of the backend of torch.distributed do, and what went wrong, by section."""

from __future__ import annotations

import gc
import json
import logging
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import has_come, wait_for_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch_features import FSDP2_ON_CPU, FSDP_HOOKS

import mcr_plus as mcr
from mcr_plus.core.c10d import PrefixStore, TCPStore
from mcr_plus.job.init import current
from mcr_plus.torch_backend import process_group as torch_backend
from mcr_plus.torch_backend.process_group import McrProcessGroup
from mcr_plus.torch_backend.work import TorchWork

Config = Mapping[str, Any]
QUICK: Final[Config] = {"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "30s"}}]}
COMPRESSED: Final[Config] = {
    "version": 1,
    "pipeline": [{"compress": {}}, {"select": {}}, {"dispatch": {"timeout": "30s"}}],
    "rules": [
        {"match": {"kind": "all_reduce"}, "compress": {"codec": "int8_block"}},
        {"match": {"kind": "all_gather"}, "compress": {"codec": "bf16"}},
        {"match": {"kind": "reduce_scatter"}, "compress": {"codec": "int8_block"}},
    ],
}


@contextmanager
def job(config: Config | None = QUICK, **options: Any) -> Iterator[McrProcessGroup]:
    dist.init_process_group("mcr", pg_options=config, **options)
    try:
        group = dist.group.WORLD
        assert isinstance(group, McrProcessGroup)
        yield group
    finally:
        dist.destroy_process_group()


def values(rank: int, *shape: int, salt: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([rank, salt]).integers(-9, 10, shape)).float()


def all_values(*shape: int, salt: int = 0) -> list[np.ndarray]:
    return [values(rank, *shape, salt=salt).double().numpy() for rank in range(dist.get_world_size())]


def same(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.double().numpy(), expected)


# -- what torch's own tests leave out -------------------------------------------------------------------


def scaled_sums() -> None:
    with job():
        rank, size = dist.get_rank(), dist.get_world_size()
        total = np.sum(all_values(7), axis=0)
        half: Any = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
        x = values(rank, 7)
        dist.all_reduce(x, half)
        same(x, total / 2)
        x = values(rank, 7)
        dist.reduce(x, 1, half)
        same(x, total / 2 if rank == 1 else values(rank, 7).double().numpy())
        whole, part = values(rank, 6 * size), torch.empty(6)
        dist.reduce_scatter_tensor(part, whole, half)
        same(part, np.split(np.sum(all_values(6 * size), axis=0), size)[rank] / 2)
        same(whole, values(rank, 6 * size).double().numpy())
        leaf = values(rank, 7).requires_grad_()
        dist.all_reduce(leaf, half)
        same(leaf.detach(), total / 2)
        leaf = values(rank, 6 * size).requires_grad_()
        dist.reduce_scatter_tensor(part, leaf, half)
        assert leaf.grad_fn is None
        refused = torch.full((3,), 2.0).to(torch.float8_e4m3fn)
        with pytest.raises(mcr.Unsupported, match="float8"):
            dist.all_reduce(refused, half)
        assert (refused.float() == 2).all()


def means_of_integers() -> None:
    """As the sum, cut: of all collectives that reduce, and packed with means of others."""
    with job():
        rank, size, mean = dist.get_rank(), dist.get_world_size(), dist.ReduceOp.AVG
        total = np.sum(all_values(7), axis=0)
        for async_op in (False, True):
            x = values(rank, 7).long()
            work = dist.all_reduce(x, mean, async_op=async_op)
            if work is not None:
                work.wait()
            same(x, np.trunc(total / size))
            x = values(rank, 7).long()
            work = dist.reduce(x, 1, mean, async_op=async_op)
            if work is not None:
                work.wait()
            same(x, np.trunc(total / size) if rank == 1 else values(rank, 7).double().numpy())
        cut = np.split(np.trunc(np.sum(all_values(6 * size), axis=0) / size), size)[rank]
        whole, part = values(rank, 6 * size).int(), torch.empty(6, dtype=torch.int32)
        dist.reduce_scatter_tensor(part, whole, mean)
        same(part, cut)
        dist.reduce_scatter(part.zero_(), list(whole.chunk(size)), mean)
        same(part, cut)
        parts = [torch.empty(6, dtype=torch.int32), torch.empty(6)]
        with _coalescing_manager():
            for each, source in zip(parts, (whole, whole.float()), strict=True):
                dist.reduce_scatter_tensor(each, source, mean)
        same(parts[0], cut)
        same(parts[1], np.split(np.sum(all_values(6 * size), axis=0) / size, size)[rank])
        xs = [values(rank, 7).long(), values(rank, 7)]
        with _coalescing_manager():
            for x in xs:
                dist.all_reduce(x, mean)
        same(xs[0], np.trunc(total / size))
        same(xs[1], total / size)
        with pytest.raises(mcr.Unsupported, match="AVG on bool"):
            dist.all_reduce(torch.ones(3, dtype=torch.bool), mean)


def as_pybind_takes_them() -> None:
    """The overloads without options, which programs use that call a group's own methods."""
    with job() as group:
        rank, size = dist.get_rank(), dist.get_world_size()
        call: Any = group
        total, others = (
            np.sum(all_values(7), axis=0),
            [values(each, 7).double().numpy() for each in range(size)],
        )
        x = values(rank, 7)
        call.reduce(x, 1).wait()
        same(x, total if rank == 1 else others[rank])
        x = values(rank, 7)
        call.reduce(x, 0, dist.ReduceOp.MAX).wait()
        same(x, np.max(others, axis=0) if rank == 0 else others[rank])
        for way in ({"op": dist.ReduceOp.MAX}, {"opts": dist.ReduceOp.MAX}):
            x = values(rank, 7)
            call.allreduce(x, **way).wait()
            same(x, np.max(others, axis=0))
        for root in ({"root": 1}, {"opts": 1}):
            x = values(rank, 7)
            call.broadcast(x, **root).wait()
            same(x, others[1])
        parts = [torch.empty(7) for _ in range(size)]
        call.gather(parts, values(rank, 7), 1).wait()
        call.scatter(x, parts, root=1).wait()
        same(x, others[rank])
        if rank == 0:
            call.send([x], dstRank=1, tag=4).wait()
        else:
            call.recv([x], srcRank=0, tag=4).wait()
        same(x, others[0])


def sparse_sums() -> None:
    with job():
        rank, size = dist.get_rank(), dist.get_world_size()
        dense = [np.zeros((5, 2)) for _ in range(size)]
        for each in range(size):
            dense[each][each], dense[each][4] = each + 1, 10
        x = torch.tensor(dense[rank]).to_sparse(1)
        dist.all_reduce(x)
        same(x.to_dense(), np.sum(dense, axis=0))
        with pytest.raises(mcr.Unsupported, match="only SUM and AVG"):
            dist.all_reduce(torch.tensor(dense[rank]).to_sparse(), dist.ReduceOp.MAX)


def uneven_lists() -> None:
    with job():
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = [torch.empty(each + 1, 3) for each in range(size)]
        dist.all_gather(parts, values(rank, rank + 1, 3))
        for each, part in enumerate(parts):
            same(part, values(each, each + 1, 3).double().numpy())
        mine = torch.empty(rank + 1)
        dist.reduce_scatter(mine, [values(rank, each + 1, salt=each) for each in range(size)])
        same(mine, np.sum(all_values(rank + 1, salt=rank), axis=0))


def coalesced() -> None:
    """Small tensors travel as one, whichever way a program asks for it."""
    with job():
        rank, size = dist.get_rank(), dist.get_world_size()
        xs = [values(rank, n, salt=n) for n in (3, 1, 70)]
        outs = [torch.empty(size * n) for n in (3, 1, 70)]
        wholes = [values(rank, size * n, salt=n) for n in (3, 1, 70)]
        parts = [torch.empty(n) for n in (3, 1, 70)]
        with mcr.record() as log:
            with _coalescing_manager():
                for out, x in zip(outs, xs, strict=True):
                    dist.all_gather_into_tensor(out, x)
            with _coalescing_manager(async_ops=True) as manager:
                for part, whole in zip(parts, wholes, strict=True):
                    dist.reduce_scatter_tensor(part, whole)
            manager.wait()
            with _coalescing_manager():
                for x in xs:
                    dist.all_reduce(x)
        assert [(r.kind, r.fused) for r in log.records] == [
            ("all_gather", 3), ("reduce_scatter", 3), ("all_reduce", 3)
        ], log.records  # fmt: skip
        for n, x, out, part in zip((3, 1, 70), xs, outs, parts, strict=True):
            same(x, np.sum(all_values(n, salt=n), axis=0))
            same(out, np.concatenate(all_values(n, salt=n)))
            same(part, np.split(np.sum(all_values(size * n, salt=n), axis=0), size)[rank])


def messages() -> None:
    with job():
        rank, size = dist.get_rank(), dist.get_world_size()
        right, left = (rank + 1) % size, (rank - 1) % size
        got = torch.empty(5)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, values(rank, 5), right)]
        )
        for work in works:
            work.wait()
        same(got, values(left, 5).double().numpy())
        if rank == 0:
            found = [dist.recv(torch.empty(1), tag=3) for _ in range(size - 1)]
            assert sorted(found) == list(range(1, size)), found
        else:
            dist.send(torch.ones(1), 0, tag=3)


def futures() -> None:
    with job():
        rank, size = dist.get_rank(), dist.get_world_size()
        for count in (5, 400_000):
            work = dist.all_reduce(values(rank, count), async_op=True)
            assert isinstance(work, TorchWork)
            future = work.get_future()
            doubled = future.then(lambda done: done.value()[0] * 2)
            deadline = time.monotonic() + 20
            while not doubled.done() and time.monotonic() < deadline:
                time.sleep(0.001)
            assert doubled.done(), "nobody completed the future"
            same(doubled.wait(), 2 * np.sum(all_values(count), axis=0))
            assert work.is_success()
            assert work.exception() is None
        gathered = [torch.empty(3) for _ in range(size)]
        work = dist.all_gather(gathered, values(rank, 3), async_op=True)
        assert work is not None
        work.wait()
        assert [x.tolist() for x in work.result()] == [x.tolist() for x in gathered]
        assert [x.tolist() for x in work.get_future().wait()] == [x.tolist() for x in gathered]


def futures_in_a_backward_pass() -> None:
    """Waited for within it, in C++ too; and after one that raised."""
    with job():
        rank, size = dist.get_rank(), dist.get_world_size()
        total = np.sum(all_values(5), axis=0)
        found: list[torch.Tensor] = []

        def hook(_: torch.Tensor) -> None:
            work = dist.all_reduce(values(rank, 5), async_op=True)
            assert work is not None
            found.append(work.get_future().then(lambda done: done.value()[0]).wait())

        x = torch.ones(3, requires_grad=True)
        x.register_hook(hook)
        (x * 2).sum().backward()
        same(found[0], total)
        kept: list[Any] = []

        def raising(_: torch.Tensor) -> None:
            work = dist.all_reduce(values(rank, 5), async_op=True)
            assert work is not None
            kept.append(work.get_future().then(lambda done: done.value()[0]))
            raise ValueError("on purpose")

        y = torch.ones(3, requires_grad=True)
        y.register_hook(raising)
        with pytest.raises(ValueError, match="on purpose"):
            (y * 2).sum().backward()
        same(kept[0].wait(), total)
        assert size > 1


def strided_and_coalesced() -> None:
    """A thread of futures and a wait, both at the end of one operation: the result is there."""
    with job():
        size = dist.get_world_size()
        for _ in range(20):
            wide = torch.ones(2000, 8)
            views = [wide[:, :3], wide[:, 4:7]]
            with _coalescing_manager(async_ops=True) as manager:
                for view in views:
                    dist.all_reduce(view)
            for work in manager.works:
                work.get_future()
            manager.wait()
            assert (views[0] == size).all()
            assert (views[1] == size).all()


def errors_of_what_nobody_waits_for() -> None:
    """Their errors are logged when the group is destroyed, and the program can go on."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcr_plus").addHandler(handler)
    try:
        with job():
            dist.all_reduce(torch.ones(dist.get_rank() + 2), async_op=True)
    finally:
        logging.getLogger("mcr_plus").removeHandler(handler)
    assert any("was never waited for has failed" in text for text in logged), logged


def a_destroyed_group_stays_so() -> None:
    with job() as world:
        group: Any = dist.new_group(list(range(dist.get_world_size())))
        dist.all_reduce(torch.ones(2), group=group)
        before = sum(thread.name == "mcr-msccl" for thread in threading.enumerate())
        dist.destroy_process_group(group)
        assert sum(thread.name == "mcr-msccl" for thread in threading.enumerate()) <= before
        with pytest.raises(mcr.NotInitialized, match="has been destroyed"):
            group.allreduce([torch.ones(2)])
        assert len(world.communicator._runtime.engine.states) == 1


def dropped_groups() -> None:
    """Without `shutdown`, as torchft does it: noticed without the garbage collector, and by the peers."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def made(name: str) -> McrProcessGroup:
        asked = SimpleNamespace(
            store=PrefixStore(f"dropped/{name}", store), group_rank=rank, group_size=size, group_id="drop",
            global_ranks_in_group=[], timeout=timedelta(seconds=20),
        )  # fmt: skip
        return torch_backend.create(asked, QUICK)

    def summed(group: McrProcessGroup) -> list[float]:
        x = torch.full((2,), rank + 1.0)
        group.allreduce([x]).wait()
        return x.tolist()

    total = [size * (size + 1) / 2] * 2
    gc.disable()
    try:
        group: Any = made("first")
        assert summed(group) == total
        store.set(f"dropped/past/{rank}", "1")
        if rank:  # the other ranks see the failure
            store.wait([f"dropped/past/{each}" for each in range(size)])
            del group
        else:
            start = time.monotonic()
            with pytest.raises(mcr.BackendError, match=r"rank 1 has given up: .*dropped without shutdown"):
                summed(group)
            assert time.monotonic() - start < 10
            group.abort()
        group = made("second")  # a job of its own
        assert summed(group) == total
        if rank:
            group.abort()
        del group
        group = made("third")
        beside: Any = made("beside")
        x = torch.full((2,), rank + 1.0)
        work = beside.allreduce([x])
        del beside  # its handle has it
        work.wait()
        assert x.tolist() == total
        running = group.communicator._runtime
        assert len(running.communicators) == 2
        del work
        assert summed(group) == summed(made("more")) == total
        assert len(running.communicators) == 2  # without the one beside
        del group
        mcr.init(QUICK)
        assert running.closed
        mcr.finalize()
    finally:
        gc.enable()


def a_message_beside_a_barrier() -> None:
    """One thread waits in a barrier for what another thread of the same rank sends."""
    with job():
        if dist.get_rank() == 0:
            thread = threading.Timer(0.3, dist.send, (torch.ones(2), 1))
            thread.start()
            dist.barrier()
            thread.join()
        else:
            got = torch.zeros(2)
            dist.recv(got, 0)
            dist.barrier()
            assert (got == 1).all()


def parts_one_after_the_other() -> None:
    """mcr on a part of the ranks, and then on all: numbers of jobs differ between ranks."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    first: Any = dist.new_group([0], backend="mcr")
    start = time.monotonic()
    with pytest.raises(mcr.Unsupported, match="in the first group of backend mcr"):
        dist.new_group(list(range(size)), backend="mcr")
    assert time.monotonic() - start < 20
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=first)
        dist.destroy_process_group(first)
    whole: Any = dist.new_group(list(range(size)), backend="mcr")
    x = torch.ones(3)
    dist.all_reduce(x, group=whole)
    assert (x == size).all()
    dist.destroy_process_group()


def another_thread() -> None:
    with job():
        rank = dist.get_rank()
        found: list[torch.Tensor] = []

        def work() -> None:
            for all_reduce in (mcr.all_reduce, dist.all_reduce):
                x = values(rank, 4)
                all_reduce(x)
                found.append(x)

        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            work()
        for each in found:
            same(each, np.sum(all_values(4), axis=0))
        assert len(found) == 8


def groups_come_and_go() -> None:
    for _ in range(2):
        with job():
            rank, size = dist.get_rank(), dist.get_world_size()
            for _ in range(3):
                group: Any = dist.new_group(list(range(size)))
                x = torch.ones(3)
                dist.all_reduce(x, group=group)
                assert (x == size).all()
                dist.destroy_process_group(group)
            alone = dist.new_group([1])
            if rank == 1:
                dist.all_reduce(torch.ones(2), group=alone)
            kept = len(current().communicators)
            assert kept <= 2, kept
        assert not mcr.is_initialized()


def in_a_job_of_ours() -> None:
    """A job that mcr.init has joined is used as it is, and lives on."""
    with mcr.init(QUICK) as comm:
        with job(None):
            x = torch.ones(3)
            dist.all_reduce(x)
        comm.all_reduce(x)
        assert (x == comm.size**2).all()


def another_world() -> None:
    """mcr beside gloo as the program's own backend; its job lives as long as one of its groups."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    group: Any = dist.new_group(backend="mcr")
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x)
    assert (x == size**2).all()
    second: Any = dist.new_group(backend="mcr")
    dist.destroy_process_group(group)
    dist.all_reduce(x, group=second)
    third: Any = dist.new_group(backend="mcr")
    dist.destroy_process_group(second)
    dist.all_reduce(x, group=third)
    assert (x == size**4).all()
    dist.destroy_process_group(third)
    assert not mcr.is_initialized()
    dist.all_reduce(x, group=dist.new_group(backend="mcr"))
    dist.destroy_process_group()
    assert not mcr.is_initialized()


def timeouts_of_groups() -> None:
    """Each has its own, unless the YAML names one."""
    unset = {"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"check": "first"}}]}
    for config, expected in ((unset, [20.0, 3.0]), (QUICK, [30.0, 30.0])):
        with job(config, timeout=timedelta(seconds=20)) as world:
            group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=3))
            found: list[Any] = [each.communicator.config.options("dispatch") for each in (world, group)]
            assert [options.timeout for options in found] == expected, found
            group.allreduce([torch.ones(2)]).wait()
            group.set_timeout(timedelta(seconds=0.5))
            if dist.get_rank() == 0:
                with pytest.raises(mcr.CommTimeout, match=r"timeout is 0\.5 s"):
                    group.allreduce([torch.ones(2)]).wait()
            dist.barrier()  # rank 1 comes to nothing else before
            with pytest.raises(mcr.InvalidArgument, match="positive"):
                world.set_timeout(timedelta(0))


# -- the pipeline ---------------------------------------------------------------------------------------


def trained(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, losses = values(dist.get_rank(), 8, 64, salt=1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def ddp_is_compressed() -> None:
    with job(QUICK):
        plain = trained(nn.parallel.DistributedDataParallel(small_model()))
    with job(COMPRESSED), mcr.record() as log:
        losses = trained(nn.parallel.DistributedDataParallel(small_model()))
    codecs = {record.codec for record in log.records}
    assert "int8_block" in codecs, codecs
    np.testing.assert_allclose(losses, plain, rtol=0.02)
    assert losses != plain


def hooks_written_in_cpp() -> None:
    """DDP's built-in ones, over several buckets and steps; and without gradients on one rank, in `join`."""
    with job():
        rank, size = dist.get_rank(), dist.get_world_size()
        kinds: Any = dist
        forms = [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
        for name, dtype, error in [
            (name, *form) for name in ("ALLREDUCE", "FP16_COMPRESS") for form in forms
        ]:
            tolerance = error if name == "ALLREDUCE" else max(error, 2e-3)
            model = nn.ParameterList([torch.ones(n, dtype=dtype) for n in (300_001, 7, 70_000)])
            wrapped: Any = nn.parallel.DistributedDataParallel(_Dots(model), bucket_cap_mb=1)
            wrapped._register_builtin_comm_hook(getattr(kinds.BuiltinCommHookType, name))
            inputs: list[torch.Tensor] = []
            for step in range(3):
                inputs = [values(rank, weight.numel(), salt=step + 1).to(dtype) for weight in model]
                wrapped.zero_grad()
                wrapped(inputs).backward()
                for weight in model:
                    assert weight.dtype is dtype
                    mean = np.sum(all_values(weight.numel(), salt=step + 1), axis=0) / size
                    assert weight.grad is not None
                    found = weight.grad.double().numpy().ravel()
                    np.testing.assert_allclose(found, mean, rtol=tolerance, atol=tolerance)
            with wrapped.join():
                for _ in range(rank + 1):
                    wrapped(inputs).backward()


class _Dots(nn.Module):
    """A sum of products: the gradient of each weight is its input."""

    def __init__(self, weights: nn.ParameterList) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        each = [(w.ravel() * x).sum() for w, x in zip(self.weights, inputs, strict=True)]
        return torch.stack(each).sum()


def fsdp_is_compressed() -> None:
    found = []
    for config in (QUICK, COMPRESSED):
        with job(config), mcr.record() as log:
            found.append(trained(sharded(small_model())))
    codecs = {record.codec for record in log.records}
    assert {"bf16", "int8_block"} <= codecs, codecs
    np.testing.assert_allclose(found[1], found[0], rtol=0.05)


def fsdp_with_codecs_of_its_own() -> None:
    """Error feedback too, for every module has tags of its own."""
    with job(QUICK):
        plain = trained(sharded(small_model()))
    gradients = {"codec": "int4_block", "error_feedback": True}
    config = {**COMPRESSED, "rules": []}
    with job(config), mcr.record() as log:
        model = mcr.fsdp(sharded(small_model()), parameters="bf16", gradients=gradients)
        np.testing.assert_allclose(trained(model), plain, rtol=0.05)
    found = {(record.tag, record.codec) for record in log.records if record.codec is not None}
    for name in ("fsdp.0", "fsdp.2"):
        assert {(f"{name}.parameters", "bf16"), (f"{name}.gradients", "int4_block")} <= found, found
    with pytest.raises(mcr.InvalidArgument, match="none of its modules is sharded"):
        mcr.fsdp(small_model())


def fsdp_of_two_models() -> None:
    """Their operations have tags of their own, or they would share residuals."""
    with job():
        model = mcr.fsdp(sharded(small_model()))
        assert mcr.fsdp(model) is model
        with pytest.raises(mcr.InvalidArgument, match="another model has the tag 'fsdp'; pass tag="):
            mcr.fsdp(sharded(small_model()))
        mcr.fsdp(sharded(small_model()), tag="second")
        mcr.fsdp(model, tag="first")
        mcr.fsdp(sharded(small_model()))  # the tag is free
        with pytest.raises(mcr.Unsupported, match="no dimension of replicas"):
            mcr.fsdp(model, replicas="bf16", tag="first")


def fsdp_with_replicas() -> None:
    config = {**COMPRESSED, "rules": []}
    with job(config):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
        plain = trained(sharded(small_model(), mesh=mesh))
    with job(config), mcr.record() as log:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
        codec = {"codec": "int4_block", "error_feedback": True}
        losses = trained(mcr.fsdp(sharded(small_model(), mesh=mesh), replicas=codec))
    np.testing.assert_allclose(losses, plain, rtol=0.05)
    assert losses != plain
    found = {(record.tag, record.codec) for record in log.records}
    assert {("fsdp.0.replicas", "int4_block"), ("fsdp.2.replicas", "int4_block")} <= found, found


class _Branches(nn.Module):
    """Two parameters of the same size, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        result: torch.Tensor = getattr(self, name)(x)
        return result


def fsdp_refuses_gradients_of_other_branches() -> None:
    """Between shards and between replicas; torch averages the gradients of two parameters there."""
    for sizes in ((2,), (2, 1)):
        for known, frozen in ((True, False), (False, False), (False, True)):
            with job():
                names = ("replicas", "shards")[-len(sizes) :]
                mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
                branches: Any = _Branches()
                if frozen:
                    getattr(branches, "ba"[dist.get_rank()]).weight.requires_grad_(False)
                fully_shard(branches, mesh=mesh)
                model: Any = mcr.fsdp(branches)
                for name in "ab" if known else "":
                    model(torch.full((1, 4), 2.0 * dist.get_rank()), name).sum().backward()
                    grads = {each: getattr(model, each).weight.grad for each in "ab"}
                    assert grads.pop(name).to_local().eq(1).all(), name
                    model.zero_grad()
                with pytest.raises(mcr.OrderMismatch) as caught:
                    model(torch.ones(1, 4), "ab"[dist.get_rank()]).sum().backward()
                for name in ("a.weight", "b.weight"):
                    assert f"gradients of {name} alone" in str(caught.value), (sizes, known, frozen)


def fsdp_moves_beside_passes() -> None:
    """Rank 0 computes while it waits for nothing: rank 1 takes part in a collective only when it has."""
    with job(QUICK):
        plain = trained(sharded(small_model()), steps=1)
    with job(QUICK), mcr.record() as log:
        model = mcr.fsdp(sharded(small_model()))
        first, relu, last = model.children()
        first.set_modules_to_forward_prefetch([last])  # type: ignore[operator]
        if dist.get_rank() == 0:
            relu.register_forward_hook(lambda *_: has_come("fsdp in forward"))
            relu.register_full_backward_hook(lambda *_: has_come("fsdp in backward"))
        else:
            # The parameters of `last` in the forward pass, those of `first` in the backward pass, and the
            # gradients of `last`.
            for layer, passes in ((last, ["forward", ""]), (first, ["", "backward"])):
                shard: Any = layer._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
                layer.set_custom_all_gather(_Late(shard._all_gather_comm, passes))  # type: ignore[operator]
                if layer is last:
                    reduce = _Late(shard._reduce_scatter_comm, ["backward"])
                    layer.set_custom_reduce_scatter(reduce)  # type: ignore[operator]
        assert trained(model, steps=1) == plain
    tags = {f"fsdp.{name}.{what}" for name in (0, 2) for what in ("parameters", "gradients")}
    assert {record.tag for record in log.records if record.is_async} >= tags


class _Late:
    """A collective of FSDP2 of which each call waits until rank 0 is in a pass, or for nothing."""

    def __init__(self, collective: Any, passes: list[str]) -> None:
        self._collective, self._passes = collective, passes
        self.allocate = collective.allocate

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if where := self._passes.pop(0):
            wait_for_ranks(f"fsdp in {where}", 1)
        return self._collective(*args, **keywords)


def fsdp_gradients_that_are_read_early() -> None:
    """By hooks, if need be of one rank, sums over passes, other dtypes: means, as one process has them."""

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        inputs = values(rank, 8, 64, salt=1).to(next(model.parameters()).dtype)
        squares: torch.Tensor = (model(inputs) - inputs[:, :8]).square()
        return squares.mean()

    in_bf16 = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    for passes, hooks, options in (
        (1, (0, 1), {}),
        (3, (), {}),
        (3, (0, 1), {}),
        (1, (0, 1), in_bf16),
        (2, (1,), {}),
    ):
        with job(QUICK):
            rank, size = dist.get_rank(), dist.get_world_size()
            exact = small_model().double()
            (sum(loss(exact, each) for each in range(size)) / size).backward()  # type: ignore[union-attr]
            model = mcr.fsdp(sharded(small_model(), **options))
            seen = dict[str, torch.Tensor]()

            def see(name: str, param: Any, seen: dict[str, torch.Tensor] = seen) -> None:
                seen[name] = param.grad.to_local().clone()

            hooked = rank in hooks
            for name, param in model.named_parameters() if hooked else ():
                param.register_post_accumulate_grad_hook(partial(see, name))
            for _ in range(passes):
                loss(model, rank).backward()
            tolerance = 2e-2 if options else 1e-5
            for (name, param), whole in zip(model.named_parameters(), exact.parameters(), strict=True):
                assert whole.grad is not None
                assert param.grad is not None
                found = param.grad.to_local()  # type: ignore[attr-defined]
                expected = passes * whole.grad.chunk(size)[rank].numpy()
                np.testing.assert_allclose(found.double().numpy(), expected, rtol=tolerance, atol=tolerance)
                assert not hooked or torch.equal(seen[name], found)


def fsdp_is_refused() -> None:
    """On a torch without hooks for the collectives of FSDP2."""
    with job(), pytest.raises(mcr.Unsupported, match=r"has no set_custom_all_gather .*; update it"):
        mcr.fsdp(sharded(small_model()))


def one_rank_has_a_wrong_configuration() -> None:
    """All mistakes are reported at once."""
    start = time.monotonic()
    wrong = {"version": 1, "pipeline": [{"select": {"bucket": 1}}, {"dispatch": {}}]}
    rank = int(os.environ["RANK"])
    expected = "unknown key 'bucket'" if rank == 1 else r"unknown key 'bucket'.* \(on rank 1\)"
    with pytest.raises(mcr.ConfigError, match=expected) as caught:
        dist.init_process_group("mcr", pg_options=wrong if rank == 1 else QUICK)
    assert _frames_of_ours(caught.value) == ["_create"]
    with pytest.raises(mcr.ConfigError, match=expected) as caught:
        mcr.init(wrong if rank == 1 else QUICK)
    assert _frames_of_ours(caught.value) == ["init"]
    with job():
        with pytest.raises(mcr.ConfigError, match=expected):
            dist.new_group([0, 1], pg_options=wrong if rank == 1 else QUICK)
        elsewhere = "nobody.yaml" if rank == 1 else QUICK
        with pytest.raises(mcr.ConfigError, match=r"nobody.yaml: cannot read: No such file"):
            dist.new_group([0, 1], pg_options=elsewhere)
    assert time.monotonic() - start < 20


def _frames_of_ours(error: BaseException) -> list[str]:
    """The functions of the package that a traceback shows, those of its causes too."""
    package = str(Path(mcr.__file__).parent)
    shown = traceback.TracebackException.from_exception(error)
    assert shown.__cause__ is None
    assert shown.__suppress_context__
    return [frame.name for frame in shown.stack if frame.filename.startswith(package)]


def options_are_checked() -> None:
    with pytest.raises(mcr.ConfigError, match="pg_options: expected the path"):
        dist.init_process_group("mcr", pg_options=3)
    wrong = [{"select": {"bucket": 1}}, {"dispatch": {}}]
    with pytest.raises(mcr.ConfigError, match="unknown key 'bucket'"):
        dist.init_process_group("mcr", pg_options={"version": 1, "pipeline": wrong})
    with job({**QUICK, "backends": ["gloo"]}):
        everyone = list(range(dist.get_world_size()))
        with pytest.raises(mcr.ConfigError, match="backend msccl is not part of this job"):
            dist.new_group(everyone, pg_options={**QUICK, "backends": ["msccl"]})
        for name, value in (("progress", "thread"), ("wait", "sleep")):
            other = [{"select": {}}, {"dispatch": {name: value}}]
            with pytest.raises(
                mcr.ConfigError, match=f"dispatch.{name}: {value} is set for this group alone"
            ):
                dist.new_group(everyone, pg_options={"version": 1, "pipeline": other})
        nodes = [{"hierarchical": {"nodes": [[0], [1], [2]]}}, {"select": {}}, {"dispatch": {}}]
        with pytest.raises(mcr.ConfigError, match="3 ranks are listed; expected all 2"):
            dist.new_group(everyone, pg_options={"version": 1, "pipeline": nodes})
        group = dist.new_group(everyone, pg_options=COMPRESSED)
        with mcr.record() as log:
            dist.all_reduce(torch.ones(70_000), group=group)
            dist.all_reduce(torch.ones(70_000))
        assert {record.codec for record in log.records} == {None, "int8_block"}


def what_cannot_be_done() -> None:
    with job():
        with pytest.raises(RuntimeError, match="meta"):
            dist.all_reduce(torch.empty(3, device="meta"))
        with pytest.raises(RuntimeError, match="BAND"):
            dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
        half: Any = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
        with pytest.raises(mcr.Unsupported, match="PREMUL_SUM; only SUM"):
            dist.all_reduce(torch.ones(3).to_sparse(), half)


def a_rank_that_is_late() -> None:
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    with job({"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "2s"}}]}) as group:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            with pytest.raises(mcr.CommTimeout, match="Rank 1 failed to pass monitoredBarrier"):
                group.monitored_barrier(timedelta(seconds=1))
            store.set("late", "1")
        else:
            store.wait(["late"])


def profiled() -> None:
    with job(), torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3))
        dist.all_gather_into_tensor(torch.empty(2 * 5, dtype=torch.int64), torch.ones(5, dtype=torch.int64))
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(2 * 4))
        dist.all_to_all_single(torch.empty(6), torch.ones(6))
        dist.barrier()
        rank = dist.get_rank()
    events: Any = profile.events()
    (event,) = [event for event in events if event.name == "mcr:all_reduce"]
    assert event.input_shapes == [[3]]
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        traced = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    args = [event["args"] for event in traced if event["name"].startswith("mcr:")]
    names = ("Collective name", "In msg nelems", "Out msg nelems", "dtype")
    assert [tuple(each[name] for name in names) for each in args] == [
        ("allreduce", 3, 3, "Float"),
        ("_allgather_base", 5, 10, "Long"),
        ("_reduce_scatter_base", 8, 4, "Float"),
        ("all_to_all", 6, 6, "Float"),
        ("barrier", 0, 0, "Byte"),
    ]
    common = {"Group size": 2, "Process Group Ranks": "[0, 1]", "Rank": rank}
    assert all(each.items() >= common.items() and "Process Group Name" in each for each in args)


OF_FSDP: Final = [
    *([fsdp_is_compressed] if FSDP2_ON_CPU else []),
    *(
        [
            fsdp_with_codecs_of_its_own,
            fsdp_of_two_models,
            fsdp_with_replicas,
            fsdp_refuses_gradients_of_other_branches,
            fsdp_moves_beside_passes,
            fsdp_gradients_that_are_read_early,
        ]
        if FSDP_HOOKS
        else [fsdp_is_refused]
    ),
]
SECTIONS: Final[dict[str, Callable[[], None]]] = {
    section.__name__: section
    for section in (
        scaled_sums, means_of_integers, as_pybind_takes_them, sparse_sums, uneven_lists, coalesced, messages,
        futures, futures_in_a_backward_pass, strided_and_coalesced, errors_of_what_nobody_waits_for,
        a_destroyed_group_stays_so, dropped_groups, a_message_beside_a_barrier, another_thread,
        groups_come_and_go, in_a_job_of_ours, another_world, timeouts_of_groups, ddp_is_compressed,
        hooks_written_in_cpp, *OF_FSDP,
        one_rank_has_a_wrong_configuration, options_are_checked, what_cannot_be_done, a_rank_that_is_late,
        profiled,
    )
}  # fmt: skip


def every_section() -> dict[str, str]:
    """What went wrong in each section; empty where nothing did."""
    torch.set_num_threads(1)
    found = {}
    for name, section in SECTIONS.items():
        found[name] = ""
        try:
            section()
        except BaseException:
            found[name] = traceback.format_exc()[-2000:]
    return found


# -- jobs of their own ----------------------------------------------------------------------------------


def with_other_files(folder: str) -> str:
    os.environ["MCR_CONFIG"] = f"{folder}/{os.environ['RANK']}.yaml"
    with pytest.raises(mcr.ConfigError) as refused:
        dist.init_process_group("mcr")
    return str(refused.value)


def with_mpi_only() -> str:
    with pytest.raises(mcr.BackendUnavailable) as refused:
        dist.init_process_group("mcr", pg_options={"version": 1, "backends": ["mpi"]})
    return str(refused.value)


def killed_in_fsdp() -> tuple[str, float]:
    """What the steps of the rank that is left raise, and after how many seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("mcr", pg_options=QUICK)
    model = sharded(small_model())
    trained(model, 1)
    if dist.get_rank() == 1:
        trained(model, 1)  # the other one is in the steps below
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    try:
        trained(model, 3)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def started_by_mpi() -> list[Any]:
    found = []
    for method in ("mcr://", "env://"):
        dist.init_process_group("mcr", init_method=method)
        x = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(x)
        found += [x.tolist(), mcr.get_backends()]
        dist.destroy_process_group()
    return found


def restarted() -> list[list[float]]:
    """Rank 1 dies in the first two attempts, in a job of `mcr.init` and in one of torch's first group."""
    attempt, dies = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"] == "1"
    found = []
    comm = mcr.init(QUICK)
    for backend in mcr.get_backends():
        x = torch.full((3,), comm.rank + 1.0)
        mcr.all_reduce(x, backend=backend)
        found.append(x.tolist())
    if attempt == 0:
        if dies:
            os._exit(17)
        mcr.barrier()
    mcr.finalize()
    with job():
        for _ in range(2):
            x = torch.full((3,), dist.get_rank() + 1.0)
            dist.all_reduce(x, group=dist.new_group([0, 1]))
            found.append(x.tolist())
            if attempt == 1 and dies:
                os._exit(17)
    return found


def under_the_name_of_gloo() -> list[str]:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    trained(nn.parallel.DistributedDataParallel(small_model()))
    half = dist.new_group([0])
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    found = [dist.get_backend(), type(group).__name__, type(half).__name__]
    dist.destroy_process_group()
    return found
