"""Differentiable collectives on real ranks, compared with one process that has all inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.api import autograd
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")

Tensors = list[torch.Tensor]
Oracle = Callable[[Tensors], Tensors]  # the outputs of all ranks by their inputs

# Rows from rank s to rank d: some ranks skip others, one sends nothing, one receives nothing.
SPLITS = {
    2: [[[3, 0], [2, 5]], [[0, 0], [4, 0]], [[0, 3], [0, 2]]],
    3: [[[1, 0, 4], [2, 3, 0], [0, 0, 0]], [[0, 2, 5], [0, 1, 0], [0, 7, 3]], [[0, 0, 0]] * 3],
}


def values(rank: int, *shape: int) -> torch.Tensor:
    """Return a rank's values, different on every rank."""
    random = torch.Generator().manual_seed(100 + rank)
    return torch.randn(*shape, dtype=torch.float64, generator=random)


def loss(output: torch.Tensor, rank: int) -> torch.Tensor:
    """Weighs every element differently, and differently on every rank."""
    weights = torch.arange(1.0, output.numel() + 1, dtype=torch.float64).view(output.shape) + rank / 7
    return (weights * output.square()).sum()


def check(rank: int, ours: Callable[[torch.Tensor], torch.Tensor], oracle: Oracle, inputs: Tensors) -> None:
    """Output, gradient, and the gradient of its square, with neither input nor gradient changed."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    outputs = oracle(leaves)
    total = sum((loss(each, peer) for peer, each in enumerate(outputs)), torch.zeros(()))
    expected = torch.autograd.grad(total, leaves, create_graph=True)
    squares = sum((each.square().sum() for each in expected), torch.zeros(()))
    again = torch.autograd.grad(squares, leaves)

    x = inputs[rank].clone().requires_grad_()
    output = ours(x)
    torch.testing.assert_close(output, outputs[rank], rtol=1e-13, atol=1e-13)
    (incoming,) = torch.autograd.grad(loss(output, rank), output, create_graph=True)
    before = incoming.detach().clone()
    (gradient,) = torch.autograd.grad(output, x, incoming, create_graph=True)
    torch.testing.assert_close(gradient, expected[rank], rtol=1e-12, atol=1e-12)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    torch.testing.assert_close(second, again[rank], rtol=1e-12, atol=1e-12)
    assert torch.equal(incoming, before)
    assert torch.equal(x, inputs[rank])


def exchanged(splits: Sequence[Sequence[int]]) -> Oracle:
    def outputs(inputs: Tensors) -> Tensors:
        pieces = [each.split(list(sent)) for each, sent in zip(inputs, splits, strict=True)]
        return [torch.cat([piece[rank] for piece in pieces]) for rank in range(len(inputs))]

    return outputs


def check_exchange(comm: mcr.Communicator) -> None:
    rank, size = comm.rank, comm.size
    for splits in SPLITS[size]:
        sent, received = splits[rank], [row[rank] for row in splits]
        # torch.cat leaves tensors of shape [0] out of the graph, so the oracle needs rows with columns.
        for tail in ((), (3,), (2, 3)) if any(map(any, splits)) else ((3,),):
            inputs = [values(peer, sum(splits[peer]), *tail) for peer in range(size)]
            ours = lambda x, sent=sent, received=received: autograd.all_to_all_single(x, received, sent)  # noqa: E731
            check(rank, ours, exchanged(splits), inputs)
    even = [[2] * size] * size
    check(rank, autograd.all_to_all_single, exchanged(even), [values(p, 2 * size, 3) for p in range(size)])


def check_rest(comm: mcr.Communicator) -> None:
    rank, size = comm.rank, comm.size
    for shape in ((5,), (3, 2), (0, 4)):
        inputs = [values(peer, *shape) for peer in range(size)]
        check(rank, autograd.all_gather, lambda all_: [torch.cat(all_)] * size, inputs)
        inputs = [values(peer, size * shape[0], *shape[1:]) for peer in range(size)]

        def scattered(all_: Tensors) -> Tensors:
            return list(sum(all_[1:], all_[0]).tensor_split(size))

        check(rank, autograd.reduce_scatter, scattered, inputs)


def check_megatron(comm: mcr.Communicator) -> None:
    """f and g around a layer with a sharded middle equal the layer in one process."""
    rank, size = comm.rank, comm.size
    x, first, second = values(50, 4, 5), values(51, 5, 3 * size), values(52, 3 * size, 5)
    leaves = [each.clone().requires_grad_() for each in (x, first, second)]
    whole = (leaves[0] @ leaves[1]).tanh() @ leaves[2]
    expected = torch.autograd.grad(loss(whole, 0), leaves)

    share = slice(3 * rank, 3 * rank + 3)
    mine = [each.clone().requires_grad_() for each in (x, first[:, share], second[share])]
    output = autograd.all_reduce((autograd.replicate(mine[0]) @ mine[1]).tanh() @ mine[2])
    torch.testing.assert_close(output, whole, rtol=1e-13, atol=1e-13)
    gradients = torch.autograd.grad(loss(output, 0), mine)
    torch.testing.assert_close(gradients[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[1], expected[1][:, share], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[2], expected[2][share], rtol=1e-12, atol=1e-12)


def check_conjugates(comm: mcr.Communicator) -> None:
    """Check f and g alone, with a gradient that differs between ranks and has the strides of `expand`."""
    own = values(comm.rank, 3, 2)
    total = sum((values(peer, 3, 2) for peer in range(comm.size)), torch.zeros(3, 2, dtype=torch.float64))
    incoming = torch.tensor(comm.rank + 1.0, dtype=torch.float64).expand(3, 2)
    summed = torch.full((3, 2), comm.size * (comm.size + 1) / 2, dtype=torch.float64)
    for function, output, gradient in (
        (autograd.replicate, own, summed),
        (autograd.all_reduce, total, incoming),
    ):
        x = own.clone().requires_grad_()
        result = function(x)
        torch.testing.assert_close(result, output, rtol=1e-14, atol=1e-14)
        (found,) = torch.autograd.grad(result, x, incoming)
        assert torch.equal(found, gradient)
        assert torch.equal(x, own)
        assert torch.equal(incoming, torch.full((3, 2), comm.rank + 1.0, dtype=torch.float64))


def check_keywords(comm: mcr.Communicator, backend: str) -> None:
    """Forward and backward go to the same library under the same tag, compressed or not."""
    size = comm.size
    rows = [1] * size
    calls: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {}

    def options(tag: str) -> dict[str, Any]:
        return {"tag": tag, "backend": backend, "compress": False}

    exchange, gather = options("exchange"), options("gather")
    calls["exchange"] = (
        lambda x: autograd.all_to_all_single(x, rows, rows, **exchange),
        ["all_to_all_v", "all_to_all_v"],
    )
    calls["gather"] = (lambda x: autograd.all_gather(x, **gather), ["all_gather", "reduce_scatter"])
    scatter, f, g = options("scatter"), options("f"), options("g")
    calls["scatter"] = (lambda x: autograd.reduce_scatter(x, **scatter), ["reduce_scatter", "all_gather"])
    calls["f"] = (lambda x: autograd.replicate(x, **f), ["all_reduce"])
    calls["g"] = (lambda x: autograd.all_reduce(x, **g), ["all_reduce"])
    with mcr.record() as log:
        for call, _ in calls.values():
            call(values(comm.rank, size, 2).requires_grad_()).sum().backward()
    expected = [(kind, tag, backend) for tag, (_, kinds) in calls.items() for kind in kinds]
    assert [(each.kind, each.tag, each.backend) for each in log.records] == expected
    fine = torch.full((4,), 1 + 2**-12, dtype=torch.float32, requires_grad=True)  # bf16 has 1 for it
    coarse = autograd.all_reduce(fine, compress="bf16")
    assert coarse.tolist() == [size] * 4
    (gradient,) = torch.autograd.grad(autograd.replicate(fine, compress="bf16"), fine, fine.detach())
    assert gradient.tolist() == [size] * 4


def check_group(comm: mcr.Communicator) -> None:
    """Check a group in another order than the job's: its rank 0 is the job's last rank."""
    group = mcr.new_group([comm.size - 1, 0])
    if group.rank < 0:
        return
    x = values(comm.rank, 2, 3).requires_grad_()
    gathered = autograd.all_gather(x, group=group)
    torch.testing.assert_close(gathered, torch.cat([values(comm.size - 1, 2, 3), values(0, 2, 3)]))
    (gathered * (1 + torch.arange(4.0, dtype=torch.float64))[:, None]).sum().backward()
    assert x.grad is not None
    first = 2 * (1.0 + 2 * group.rank)
    assert x.grad[:, 0].tolist() == [first, first + 2]


def check_refusals(comm: mcr.Communicator) -> None:
    x = torch.zeros(comm.size * 2 + 1, 2)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: autograd.all_to_all_single(x, [1] * comm.size), "both or neither"),
        (lambda: autograd.all_to_all_single(x, [-1, 3], [1, 1]), "output_split_sizes: expected int"),
        (lambda: autograd.all_to_all_single(x, [1], [1]), "sizes that sum to dim 0"),
        (lambda: autograd.all_to_all_single(x), "not divisible"),
        (lambda: autograd.reduce_scatter(x), f"dim 0 is {len(x)}, not divisible by {comm.size}"),
        (lambda: autograd.all_gather(torch.zeros(())), "at least one dimension"),
        (lambda: autograd.replicate(x, group="all"), "expected a Communicator"),  # type: ignore[arg-type]
    ]
    for call, message in cases:
        with pytest.raises(mcr.InvalidArgument, match=message):
            call()


def on_this_rank(backend: str) -> int:
    """Run all checks on ranks; return their number."""
    torch.set_num_threads(1)
    with mcr.init(backends=[backend]) as comm:
        checks = [check_exchange, check_rest, check_megatron, check_conjugates, check_group, check_refusals]
        for each in checks:
            each(comm)
        check_keywords(comm, backend)
    return len(checks)


@pytest.mark.parametrize(("backend", "ranks"), [pytest.param("mpi", 2, marks=needs_mpi), ("gloo", 3)])
def test_gradients_are_those_of_one_process(backend: str, ranks: int) -> None:
    via: Any = "mpi" if backend == "mpi" else "torch"
    assert [each.value for each in run_ranks(on_this_rank, ranks, args=[backend], via=via)] == [6] * ranks
