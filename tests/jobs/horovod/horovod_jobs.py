"""Programs of test_horovod's ranks: Horovod's operations compared with float64 NumPy."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from ranks import has_come, wait_for_ranks
from torch import nn

import mcr_plus as mcr
import mcr_plus.horovod as hvd

Array = np.ndarray[Any, Any]
SHAPES: Final = ((), (7,), (5, 3), (0, 4))


def values(rank: int, *shape: int, salt: int = 0) -> Array:
    """Return a rank's input: whole numbers, so that sums are exact in every dtype, both signs."""
    return np.random.default_rng(1000 * salt + rank).integers(-9, 10, shape).astype(np.float64)


def mine(*shape: int, salt: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values(hvd.rank(), *shape, salt=salt), dtype=dtype)


def everyones(*shape: int, salt: int = 0) -> list[Array]:
    return [values(rank, *shape, salt=salt) for rank in range(hvd.size())]


def same(found: torch.Tensor, expected: Array, rtol: float = 0.0) -> None:
    assert tuple(found.shape) == expected.shape, (found.shape, expected.shape)
    np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=rtol, atol=0)


# -- operations -----------------------------------------------------------------------------------------


def reductions() -> None:
    size = hvd.size()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.int32, torch.int64):
        for salt, shape in enumerate(SHAPES):
            parts = everyones(*shape, salt=salt)
            x = mine(*shape, salt=salt, dtype=dtype)
            total = np.sum(parts, axis=0)
            same(hvd.allreduce(x, op=hvd.Sum), total)
            average = np.trunc(total / size) if not dtype.is_floating_point else total / size
            same(hvd.allreduce(x), average, rtol=1e-3)
            same(hvd.allreduce(x, op=hvd.Min), np.min(parts, axis=0))
            same(hvd.allreduce(x, op=hvd.Max), np.max(parts, axis=0))
            same(x, parts[hvd.rank()])
            before = (
                np.trunc(np.asarray(parts) * 0.7) if not dtype.is_floating_point else np.asarray(parts) * 0.7
            )
            scaled = before.sum(axis=0) * 0.5
            found = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.7, postscale_factor=0.5)
            if dtype.is_floating_point:
                np.testing.assert_allclose(found.double().numpy(), scaled, rtol=1e-2, atol=1e-1)
            else:
                same(found, np.trunc(scaled))
    y = mine(6, salt=9)
    assert hvd.allreduce_(y, op=hvd.Product) is y
    same(y, np.prod(everyones(6, salt=9), axis=0))
    exact = hvd.allreduce(torch.tensor([2**60 + 3]), op=hvd.Average)
    assert exact.item() == 2**60 + 3


def groups_of_tensors() -> None:
    shapes = [(3,), (4, 2), ()]
    tensors = [
        mine(*shape, salt=n, dtype=t)
        for n, (shape, t) in enumerate(zip(shapes, (torch.float32, torch.int64, torch.float64), strict=True))
    ]
    sums = [np.sum(everyones(*shape, salt=n), axis=0) for n, shape in enumerate(shapes)]
    for found, total in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), sums, strict=True):
        same(found, total)
    handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Sum, name="together")
    for found, given, total in zip(hvd.synchronize(handle), tensors, sums, strict=True):
        assert found is given
        same(found, total)
    for salt, found in enumerate(hvd.grouped_allgather([mine(2 + hvd.rank(), 3, salt=s) for s in (1, 2)]), 1):
        same(found, np.concatenate([values(r, 2 + r, 3, salt=salt) for r in range(hvd.size())]))
    rank, size = hvd.rank(), hvd.size()
    rows_of = [mine(size * rows, 3, salt=rows) for rows in (1, 2)]
    for rows, part in enumerate(hvd.grouped_reducescatter(rows_of, op=hvd.Sum), 1):
        same(part, np.sum(everyones(size * rows, 3, salt=rows), axis=0)[rank * rows : (rank + 1) * rows])


def exchanges() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = [3 * r for r in range(size)]  # the first rank has none
    same(hvd.allgather(mine(rows[rank], 2)), np.concatenate([values(r, n, 2) for r, n in enumerate(rows)]))
    for root in range(size):
        x = mine(4, salt=3)
        same(hvd.broadcast(x, root), values(root, 4, salt=3))
        same(x, values(rank, 4, salt=3))
        assert hvd.broadcast_(x, root_rank=root) is x
        same(x, values(root, 4, salt=3))
    splits = [[(s + 2 * d) % 4 for d in range(size)] for s in range(size)]
    sent = [values(s, sum(splits[s]) + 1, 2, salt=4) for s in range(size)]  # the last row goes nowhere
    starts = [np.cumsum([0, *splits[s]]) for s in range(size)]
    expected = np.concatenate([sent[s][starts[s][rank] : starts[s][rank + 1]] for s in range(size)])
    found, received = hvd.alltoall(torch.tensor(sent[rank]), torch.tensor(splits[rank], dtype=torch.int32))
    same(found, expected)
    assert received.tolist() == [splits[s][rank] for s in range(size)]
    assert received.dtype is torch.int32
    for count in (size * 2, size * 2 + 1, 1):  # ones that do not divide
        shares = [count // size + (r < count % size) for r in range(size)]
        start = sum(shares[:rank])
        total = np.sum(everyones(count, 3, salt=5), axis=0)[start : start + shares[rank]]
        same(hvd.reducescatter(mine(count, 3, salt=5), op=hvd.Sum), total)
        same(hvd.reducescatter(mine(count, 3, salt=5), postscale_factor=2.0), total / size * 2, rtol=1e-15)


def sparse() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = [[1, 1 + rank, 1], [], [4]][rank % 3]
    x = torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64),
        torch.tensor(values(rank, len(rows), 2)),
        (6, 2),
        check_invariants=True,
    )
    dense = hvd.allreduce(x.to_dense(), op=hvd.Sum)
    found = hvd.sparse_allreduce_async(x, name="rows", op=hvd.Sum)()
    assert found.is_sparse
    same(found.to_dense(), dense.numpy())
    same(hvd.allreduce(x).to_dense(), dense.numpy() / size, rtol=1e-15)


def backwards() -> None:
    rank, size = hvd.rank(), hvd.size()

    def gradient(function: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> torch.Tensor:
        x = mine(*shape, salt=6).requires_grad_()
        output = function(x)
        output.backward(torch.tensor(values(rank, *output.shape, salt=7)))
        assert x.grad is not None
        return x.grad

    grads = everyones(3, 2, salt=7)
    same(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 3, 2), np.sum(grads, axis=0))
    same(gradient(lambda x: hvd.grouped_allreduce([x, x * 1])[0], 3, 2), np.sum(grads, axis=0) / size, 1e-15)
    same(
        gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), 3, 2),
        np.sum(grads, axis=0) * 2,
    )
    root = np.sum(grads, axis=0) / size if rank == size - 1 else np.zeros((3, 2))
    same(gradient(lambda x: hvd.broadcast(x, size - 1), 3, 2), root, 1e-15)
    mean = np.sum(everyones(3 * size + sum(range(size)), 2, salt=7), axis=0) / size
    start = 3 * rank + sum(range(rank))
    same(gradient(hvd.allgather, 3 + rank, 2), mean[start : start + 3 + rank], 1e-15)
    # The gradient of a row comes from the rank that the row went to.
    theirs = everyones(2 * size, 2, salt=7)
    expected = np.concatenate([theirs[d][2 * rank : 2 * rank + 2] for d in range(size)])
    same(gradient(hvd.alltoall, 2 * size, 2), expected)
    scattered = np.concatenate(everyones(2, 2, salt=7))
    same(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), 2 * size, 2), scattered * size)
    same(gradient(hvd.reducescatter, 2 * size, 2), scattered)
    x = mine(2).requires_grad_()
    with pytest.raises(mcr.Unsupported, match="Max has no gradient"):
        hvd.allreduce(x, op=hvd.Max).sum().backward()


# -- names and order ------------------------------------------------------------------------------------


def any_order() -> None:
    """Ranks start and await the same operations in orders of their own."""
    rank, size = hvd.rank(), hvd.size()
    random = np.random.default_rng(rank)
    for step in range(4):
        handles = {}
        for number in random.permutation(40):
            handles[number] = hvd.allreduce_async(
                mine(number % 7, salt=number), name=f"t{number}", op=hvd.Sum
            )
            if number % 11 == 0:
                hvd.poll(handles[number])
        gathers = {
            n: hvd.allgather_async(mine(2, salt=n), name=f"g{n}.{step}") for n in random.permutation(5)
        }
        hvd.barrier()
        for number in random.permutation(40):
            same(hvd.synchronize(handles[number]), np.sum(everyones(number % 7, salt=number), axis=0))
        for number, handle in gathers.items():
            same(hvd.synchronize(handle), np.concatenate(everyones(2, salt=number)))
    # A request longer than a row.
    name = "long " * 1000 + "name"
    same(hvd.allreduce(mine(3), name=name, op=hvd.Sum), np.sum(everyones(3), axis=0))
    handle = hvd.allreduce_async(mine(3), name="polled", op=hvd.Sum)
    assert not hvd.poll(handle)
    while not hvd.poll(handle):
        time.sleep(1e-4)
    same(hvd.synchronize(handle), np.sum(everyones(3), axis=0))
    same(hvd.synchronize(handle), np.sum(everyones(3), axis=0))
    assert size == hvd.size()


def disagreements() -> None:
    """Disagree in many ways: each is an error on all ranks that names the difference; the job continues."""
    rank = hvd.rank()
    first = rank == 0
    ones, dtype = torch.ones(2), torch.float32 if first else torch.int32
    either = hvd.allreduce if first else hvd.allgather
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("the shape differs", lambda: hvd.allreduce(torch.ones(3 + rank), name="x")),
        ("the shape differs", lambda: hvd.allreduce(torch.ones((2, 6) if first else (3, 4)))),
        ("the dtype differs: float32 .* int32", lambda: hvd.allreduce(torch.ones(3, dtype=dtype))),
        (
            "the reduce op differs: Sum .* Average",
            lambda: hvd.allreduce(ones, op=hvd.Sum if first else hvd.Average),
        ),
        ("prescale_factor differs", lambda: hvd.allreduce(ones, prescale_factor=2.0 + rank)),
        ("root_rank differs", lambda: hvd.broadcast(ones, min(rank, 1))),
        ("the shape beyond the first dimension", lambda: hvd.allgather(torch.ones(2, 3 + rank))),
        ("the operation differs", lambda: either(ones, name="y")),
        ("the number of tensors differs", lambda: hvd.grouped_allreduce([ones] * (1 + first), name="z")),
        ("all ranks wait for operations", lambda: hvd.allreduce(ones, name=f"own {rank}")),
    ]
    for number, (text, call) in enumerate(cases):
        with pytest.raises(hvd.HorovodInternalError, match=text):
            call()
        same(hvd.allreduce(mine(4, salt=number), op=hvd.Sum), np.sum(everyones(4, salt=number), axis=0))
    # The other ranks learn of a rank's mistake, or they would wait for it.
    with pytest.raises(ValueError if first else hvd.HorovodInternalError, match="splits: "):
        hvd.alltoall(torch.ones(hvd.size()), [9] * hvd.size() if first else None)
    handle = hvd.allreduce_async(torch.ones(2), name="twice")
    with pytest.raises(ValueError, match="'twice' is pending already"):
        hvd.allreduce_async(torch.ones(2), name="twice")
    same(hvd.synchronize(handle), np.ones(2))
    with pytest.raises(mcr.Unsupported, match="Adasum"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    with pytest.raises(ValueError, match="expected one of them"):
        hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)


def joins() -> None:
    """Ranks with less data take part with neutral values."""
    rank, size = hvd.rank(), hvd.size()
    for turn in range(3):
        steps = [2 + (r + turn) % size for r in range(size)]
        for step in range(steps[rank]):
            active = [values(r, 5, salt=step) for r in range(size) if step < steps[r]]
            same(hvd.allreduce(mine(5, salt=step), op=hvd.Sum), np.sum(active, axis=0))
            same(hvd.allreduce(mine(5, salt=step)), np.sum(active, axis=0) / size, 1e-15)
            same(hvd.allreduce(mine(5, salt=step), op=hvd.Max), np.max(active, axis=0))
            x = torch.ones(2, 2).to_sparse()
            same(hvd.allreduce(x, op=hvd.Sum).to_dense(), np.full((2, 2), float(len(active))))
        last = hvd.join()
        assert steps[last] == max(steps)
        assert hvd.allgather_object(last) == [last] * size
        same(hvd.allreduce(mine(2), op=hvd.Sum), np.sum(everyones(2), axis=0))
    if rank == 0:
        assert hvd.join() != 0
    else:
        with pytest.raises(hvd.HorovodInternalError, match=r"ranks \[0\] have joined"):
            hvd.allgather(torch.ones(2), name="while another has joined")
        hvd.join()


def process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    with pytest.raises(ValueError, match="is not part of the job"):
        hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0]))
    chosen = [size - 1, 0] if size > 2 else [0]
    some = hvd.add_process_set(chosen)
    assert some.ranks == sorted(chosen)
    assert some.included() == (rank in chosen)
    alone = hvd.add_process_set(hvd.ProcessSet([1]))
    with pytest.raises(ValueError, match="a set of ranks"):
        hvd.add_process_set(sorted(chosen))
    if some.included():
        total = np.sum([each for r, each in enumerate(everyones(3)) if r in chosen], axis=0)
        same(hvd.allreduce(mine(3), op=hvd.Sum, process_set=some), total)
        assert some.rank() == sorted(chosen).index(rank)
        found = hvd.broadcast_object({"rank": rank}, chosen[0], process_set=some)
        assert found == {"rank": chosen[0]}
    else:
        with pytest.raises(ValueError, match="is not in"):
            hvd.allreduce(mine(3), process_set=some)
    if rank == 1:
        same(hvd.allreduce(mine(3), process_set=alone), everyones(3)[1])
    assert hvd.remove_process_set(alone)
    assert not hvd.remove_process_set(alone)
    assert hvd.remove_process_set(some)
    assert some.size() is None
    assert not hvd.remove_process_set(hvd.global_process_set)
    same(hvd.allreduce(mine(3), op=hvd.Sum), np.sum(everyones(3), axis=0))


# -- training -------------------------------------------------------------------------------------------


def model_of(salt: int) -> nn.Sequential:
    torch.manual_seed(salt)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def trained(steps: int, passes: int = 1, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model that ranks have trained together, and a model trained on the mean gradient of all.

    With `op`, train on the sum of gradients; with `process_set`, on the gradients of its ranks.
    """
    rank = hvd.rank()
    together = options["process_set"].ranks if "process_set" in options else range(hvd.size())
    parts = 1 if options.get("op") == hvd.Sum else len(together)
    model, oracle = model_of(rank), model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=passes, **options
    )
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(reference, 2, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for again in range(passes):
            model(torch.tensor(values(rank, 3, 4, salt=step + again))).square().sum().backward()
        optimizer.step()
        scheduler.step()
        reference.zero_grad()
        for r in together:
            for again in range(passes):
                loss = oracle(torch.tensor(values(r, 3, 4, salt=step + again))).square().sum() / parts
                loss.backward()
        reference.step()
        schedule.step()
    return model, oracle


def optimizers() -> None:
    ways: list[dict[str, Any]] = [
        {}, {"passes": 3}, {"groups": 2}, {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.codec("fp16")}, {"compression": hvd.Compression.fp16},
        {"num_groups": 2}, {"op": hvd.Sum},
    ]  # fmt: skip
    alone = [hvd.add_process_set([r]) for r in range(hvd.size()) if hvd.size() > 1]
    ways += [{"process_set": each} for each in alone if each.included()]
    for way in ways:
        model, oracle = trained(4, **way)
        close = 0.05 if "compression" in way else 1e-10
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=close, atol=close)
    for each in alone:
        hvd.remove_process_set(each)


def guards() -> None:
    rank, size = hvd.rank(), hvd.size()
    model = model_of(0)
    named = list(model.named_parameters())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong, text in [
        ([("a", param) for _, param in named], "more than once: a"),
        (named[:1], "3 of the optimizer's 4"),
        ([param for _, param in named], "pairs"),
    ]:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(plain, wrong)  # type: ignore[arg-type]
    refused: list[dict[str, Any]] = [
        {"backward_passes_per_step": 0},
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
    ]
    for options in refused:
        with pytest.raises(ValueError, match=next(iter(options))):
            hvd.DistributedOptimizer(plain, named, **options)
    optimizer: Any = hvd.DistributedOptimizer(plain, named)
    assert id(optimizer) == id(plain)  # `is` would make type checkers take it for an SGD
    x = torch.tensor(values(rank, 3, 4))
    model(x).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        model(x).sum().backward()
    optimizer.synchronize()  # gradients that the second pass has spoiled
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.synchronize()
    norms = hvd.allgather_object([float(p.grad.norm()) for p in model.parameters() if p.grad is not None])
    assert norms == [norms[0]] * size
    before = [param.detach().clone() for param in model.parameters()]
    with optimizer.skip_synchronize():
        optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.detach(), old - 0.1 * param.grad)
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    assert [str(each.message) for each in told if "skip_synchronize" in str(each.message)]
    copied = pickle.loads(pickle.dumps(optimizer))
    assert type(copied) is torch.optim.SGD
    # A closure's gradients are reduced each time.
    optimizer.zero_grad()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    weight = next(model.parameters()).detach()
    same(hvd.allreduce(weight, op=hvd.Max), weight.numpy())


def branches() -> None:
    """Parameters that only some ranks use, and sparse gradients that only some have."""
    rank, size = hvd.rank(), hvd.size()
    for dense in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(6, 2, sparse=True).double()
        layers: Any = nn.ModuleList(nn.Linear(2, 2).double() for _ in range(size))
        model = nn.ModuleList([table, layers])
        start = [param.detach().clone() for param in model.parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), sparse_as_dense=dense
        )
        x = torch.tensor(values(rank, 3, 2))
        loss = layers[rank](x).sum()
        if rank == 0:
            loss = loss + 2 * table(torch.tensor([1, 1, 4])).sum()
        loss.backward()
        optimizer.step()
        expected = np.zeros((6, 2))
        expected[1], expected[4] = 4 / size, 2 / size
        same(start[0] - table.weight.detach(), expected, 1e-12)
        for r in range(size):
            ones = np.ones((2, 1)) * values(r, 3, 2).sum(axis=0)
            torch.testing.assert_close(
                start[1 + 2 * r] - layers[r].weight.detach(),
                torch.tensor(ones / size),
                rtol=1e-12,
                atol=1e-12,
            )


def extremes() -> None:
    """Values that a rank lacks are left out; they do not count as zeros."""
    rank, size = hvd.rank(), hvd.size()
    numpy_of: dict[Any, Callable[..., Any]] = {hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}
    for (op, expected), groups in itertools.product(numpy_of.items(), (0, 1)):
        shared, own, unused = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3))
        sign = -1.0 if op == hvd.Max else 1.0  # zeros would win
        parts = [sign * (2.0 + np.abs(values(r, 3))) for r in range(size)]
        names = zip(("shared", "own", "unused"), (shared, own, unused), strict=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([shared, own, unused], lr=1.0), list(names), op=op, groups=groups
        )
        loss = (shared * torch.tensor(parts[rank])).sum()
        if rank > 0:
            loss = loss + (own * torch.tensor(parts[rank])).sum()
        loss.backward()
        optimizer.step()
        same(-shared.detach(), expected(parts, axis=0))
        same(-own.detach(), expected(parts[1:], axis=0) if size > 1 else np.zeros(3))
        same(unused.detach(), np.zeros(3))


def late(_: str) -> str:
    """Rank 0 waits for an operation that rank 1 never starts, though rank 1 takes part in negotiations."""
    pipeline = [{"select": {}}, {"dispatch": {"timeout": "3s"}}]
    hvd.init(config={"version": 1, "backends": ["gloo"], "pipeline": pipeline})
    if hvd.rank() != 1:
        try:
            hvd.allreduce(torch.ones(2), name="wanted")
        except hvd.HorovodInternalError as error:
            return str(error)
        finally:
            has_come("told")
        return "nothing was raised"
    handle = hvd.allreduce_async(torch.ones(2), name="other")
    told = threading.Thread(target=wait_for_ranks, args=["told", 1])
    told.start()
    while told.is_alive():
        try:
            hvd.poll(handle)
        except mcr.McrError:
            break
        time.sleep(1e-3)
    told.join()
    return ""


def states() -> None:
    rank, size = hvd.rank(), hvd.size()
    model = model_of(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:
        model(torch.tensor(values(0, 3, 4))).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    found = [state["exp_avg"].tolist() for state in optimizer.state_dict()["state"].values()]
    assert len(found) == 4
    assert hvd.allgather_object(found) == [found] * size
    weights = [param.tolist() for param in model.parameters()]
    assert hvd.allgather_object(weights, name="weights") == [weights] * size
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast_object(1, size)


def batch_norm() -> None:
    rank, size = hvd.rank(), hvd.size()
    inputs = [torch.tensor(values(r, 2 + r, 3, 4)) + 1e4 for r in range(size)]  # far from zero
    ours, theirs = hvd.SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double()
    x, y = inputs[rank].clone().requires_grad_(), torch.cat(inputs).requires_grad_()
    start = sum(2 + r for r in range(rank))
    output, expected = ours(x), theirs(y)
    torch.testing.assert_close(output, expected[start : start + 2 + rank], rtol=1e-9, atol=1e-9)
    weights = torch.arange(float(expected.numel()), dtype=torch.float64).view(expected.shape)
    (output * weights[start : start + 2 + rank]).sum().backward()
    (expected * weights).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad, y.grad[start : start + 2 + rank], rtol=1e-6, atol=1e-6)
    assert ours.weight.grad is not None
    torch.testing.assert_close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), theirs.weight.grad)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(inputs[rank]))


def lives(folder: str) -> None:
    """Test the calls before, between and after the lives of a world."""
    with pytest.raises(ValueError, match=r"call hvd.init\(\) first"):
        hvd.rank()
    assert not hvd.is_initialized()
    for turn in range(2):
        hvd.init()
        hvd.init()
        assert hvd.local_rank() == hvd.rank()
        assert (hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (hvd.size(), 0, 1)
        hvd.start_timeline(f"{folder}/trace{turn}.json")
        same(hvd.allreduce(mine(3), op=hvd.Sum), np.sum(everyones(3), axis=0))
        hvd.stop_timeline()
        if hvd.rank() == 0:
            with open(f"{folder}/trace{turn}.json") as file:
                assert "all_reduce" in file.read()
        hvd.shutdown()
        assert not hvd.is_initialized()
    with mcr.init() as comm:  # the program's own
        hvd.init()
        x = torch.ones(2)
        mcr.all_reduce(x)
        same(hvd.allreduce(x, op=hvd.Sum), np.full(2, float(comm.size**2)))
        hvd.shutdown()
        mcr.all_reduce(x)
    hvd.init()
    if hvd.rank() == 0:
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="shut down by rank 0"):
            hvd.allreduce(torch.ones(2))
        hvd.shutdown()


SECTIONS: Final = (
    reductions, groups_of_tensors, exchanges, sparse, backwards, any_order, disagreements, joins,
    process_sets, optimizers, guards, branches, extremes, states, batch_norm,
)  # fmt: skip


def everything(folder: str) -> list[str]:
    """Run all sections in one job; return the names of the sections."""
    torch.set_num_threads(1)
    lives(folder)
    hvd.init()
    ran = []
    for section in SECTIONS:
        section()
        ran.append(section.__name__)
    hvd.shutdown()
    return ran


def fused(_: str) -> list[str]:
    """Test fusion with stages that hold operations back or change them, and without MPI."""
    torch.set_num_threads(1)
    config = {
        "version": 1,
        "backends": ["gloo"],
        "pipeline": [
            {
                "fuse": {
                    "bucket": "4KiB",
                    "kinds": ["all_reduce", "all_gather", "broadcast", "reduce_scatter"],
                }
            },
            {"compress": {"codec": "none"}},
            {"select": {}},
            {"dispatch": {"timeout": "30s", "check": "every"}},
        ],
    }
    hvd.init(config=config, process_sets=[hvd.ProcessSet([0])])
    for section in (exchanges, any_order, disagreements, joins):
        section()
    return ["fused"]  # left by the end of the process


def feedback(_: str) -> list[str]:
    """Test a codec with error feedback: each tensor has its own residual, in any bucket."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    way = hvd.Compression.codec("topk", ratio=0.2, error_feedback=True)
    sums = {name: torch.zeros(50) for name in "ab"}
    parts = {name: values(rank, 50, salt=ord(name)) for name in "ab"}
    for step in range(40):
        names = "ab" if (rank + step) % 2 else "ba"
        for name in names if step % 3 else "ab":  # sometimes together, sometimes one by one
            x = torch.tensor(parts[name], dtype=torch.float32)
            sums[name] += hvd.allreduce(x, name=name, compression=way) if step % 3 == 0 else 0
    for name in "ab":
        mean = np.mean(everyones(50, salt=ord(name)), axis=0) * 14
        error = np.abs(sums[name].numpy() - mean).max()
        assert error <= 9 * 5, (name, error)  # the residual still kept, not a loss over 14 steps
    assert size > 1
    return ["feedback"]


def alone(_: str) -> list[str]:
    """A job of one rank."""
    hvd.init()
    for section in (reductions, exchanges, any_order, optimizers, states):
        section()
    assert hvd.join() == 0
    hvd.shutdown()
    return ["alone"]
