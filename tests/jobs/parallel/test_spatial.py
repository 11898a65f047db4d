"""Halo exchanges and convolutions spread over real ranks, against one process that has the whole tensor."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import mcr_plus as mcr
from mcr_plus import autograd, spatial
from mcr_plus.layout import state
from mcr_plus.layout.halo import Halo
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")

CLOSE: Final[Any] = {"rtol": 1e-10, "atol": 1e-10}
Layouts = dict[str, mcr.Layout]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return values that are the same on all ranks."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layouts(size: int) -> Layouts:
    """Return layouts of two and three dimensions: rows, columns, uneven, empty, reordered, with corners."""
    ranks = list(range(size))
    uneven = [1, *[2] * (size - 2), 9 - 1 - 2 * (size - 2)]
    found = {
        "rows": mcr.Layout.sharded((9, 7), ranks, 0),
        "columns": mcr.Layout.sharded((4, 11), ranks, 1),
        "uneven": mcr.Layout.sharded((9, 5), ranks, 0, sizes=uneven),
        "an empty one": mcr.Layout.sharded((6, 8), ranks, 0, sizes=[6 - (size - 2), 0, *[1] * (size - 2)]),
        "other order": mcr.Layout.sharded((9, 6), ranks[::-1], 0),
        "depth": mcr.Layout.sharded((8, 5, 6), ranks, 0),
        "depth, uneven": mcr.Layout.sharded((4, 9, 3), ranks, 1, sizes=uneven[::-1]),
    }
    if size == 4:
        found["mesh"] = mcr.Layout.mesh((7, 9), [[0, 1], [2, 3]], ["S0", "S1"])
        found["mesh in space"] = mcr.Layout.mesh((6, 5, 7), [[3, 1], [2, 0]], ["S0", "S2"])
    if size == 3:
        boxes = {0: [[(0, 3), (0, 8)]], 1: [[(3, 7), (0, 5)]], 2: [[(3, 7), (5, 8)]]}
        found["bricks"] = mcr.Layout.boxes((7, 8), boxes)
    return found


class Case(NamedTuple):
    """Arguments of a convolution with 4 input channels."""

    options: dict[str, Any]

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether torch's own layer takes an input of this shape."""
        try:
            self.layer(len(shape))(values(1, 4, *shape))
        except RuntimeError:
            return False
        return True

    def layer(self, dims: int, **more: Any) -> Any:
        kinds: dict[Any, Any] = {(2, False): nn.Conv2d, (3, False): nn.Conv3d}
        kinds |= {(2, True): spatial.Conv2d, (3, True): spatial.Conv3d}
        options = {
            key: value[:dims] if isinstance(value, tuple) else value for key, value in self.options.items()
        }
        torch.manual_seed(3)
        return kinds[dims, bool(more)](4, 6, dtype=torch.float64, **options, **more)


CASES = [
    Case({"kernel_size": 3, "padding": 1}),
    Case({"kernel_size": 3, "padding": 1, "padding_mode": "circular"}),
    Case({"kernel_size": 3}),
    Case({"kernel_size": 1}),
    Case({"kernel_size": 1, "stride": 2}),
    Case({"kernel_size": (3, 5, 1), "padding": (1, 2, 0), "groups": 2}),
    Case({"kernel_size": 3, "stride": 2, "padding": 1, "bias": False}),
    Case({"kernel_size": 2, "stride": (2, 1, 2)}),
    Case({"kernel_size": 2, "stride": 3, "padding": 1, "padding_mode": "circular"}),
    Case({"kernel_size": (3, 1, 1), "stride": (1, 2, 4), "padding": (1, 0, 0), "padding_mode": "circular"}),
    Case({"kernel_size": (3, 2, 3), "dilation": (2, 3, 1), "padding": (2, 1, 1)}),
    Case({"kernel_size": 5, "padding": 4, "groups": 2}),
    Case({"kernel_size": (4, 2, 3), "padding": "same", "dilation": (1, 2, 1)}),
    Case({"kernel_size": (3, 4, 2), "padding": "same", "padding_mode": "circular"}),
    Case({"kernel_size": 3, "dilation": 3, "padding": 3, "padding_mode": "circular", "stride": 2}),
]


def check_convolution(case: Case, layout: mcr.Layout, overlap: bool) -> None:
    dims, shape = len(layout.shape), layout.shape
    whole = case.layer(dims)
    ours = case.layer(dims, layout=layout, overlap=overlap)
    assert ours.load_state_dict(whole.state_dict()) is not None
    x = values(2, 4, *shape).requires_grad_()
    mine = spatial.local_part(x.detach(), layout).requires_grad_()
    expected, found = whole(x), ours(mine)
    assert ours.out_layout.shape == tuple(expected.shape[2:])
    torch.testing.assert_close(found, spatial.local_part(expected, ours.out_layout), **CLOSE)
    weights = values(*expected.shape, seed=1)
    (expected.square() * weights).sum().backward()
    (found.square() * spatial.local_part(weights, ours.out_layout)).sum().backward()
    spatial.sum_gradients(ours)
    assert mine.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(mine.grad, spatial.local_part(x.grad, layout), **CLOSE)
    for name, param in whole.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, param.grad, **CLOSE)


def check_convolutions(comm: mcr.Communicator, every: int) -> int:
    """Every so manieth case of a layout, others of each layout; how many these were."""
    done = 0
    for turn, layout in enumerate(layouts(comm.size).values()):
        for number, case in enumerate(CASES):
            if (number + turn) % every == 0 and case.fits(layout.shape):
                check_convolution(case, layout, overlap=number % 3 != 2)
                done += 1
    return done


# -- halo exchanges -------------------------------------------------------------------------------


def with_halo(
    x: torch.Tensor, layout: mcr.Layout, widths: Sequence[int], periodic: bool, rank: int
) -> torch.Tensor:
    """Return a rank's box with its halo, by torch's own indexing."""
    pieces = layout.pieces(rank)
    if not len(pieces):
        return x.new_zeros(layout.locals[rank])
    for dim, size in enumerate(x.shape):
        low, high = (int(side[pieces[0], dim]) for side in layout.held)
        index = torch.arange(low - widths[0], high + widths[1])
        index = index % size if periodic else index[(index >= 0) & (index < size)]
        x = x.index_select(dim, index)
    return x


def check_halos(comm: mcr.Communicator) -> None:
    """Output, gradient, and gradient of the gradient, and the same bits again."""
    for layout in layouts(comm.size).values():
        for widths, periodic in (((1, 1), False), ((0, 2), True), ((4, 3), False), ((6, 7), True)):
            check_halo(comm, layout, widths, periodic)


def check_halo(comm: mcr.Communicator, layout: mcr.Layout, widths: tuple[int, int], periodic: bool) -> None:
    """The loss is the sum of all ranks' losses, which this process computes alone."""
    x, aims = values(*layout.shape).requires_grad_(), values(*layout.shape, seed=9)
    expected = [with_halo(x, layout, widths, periodic, rank) for rank in range(comm.size)]

    def loss(found: torch.Tensor, rank: int) -> torch.Tensor:
        return (values(*found.shape, seed=rank) * found**3).sum()

    total = torch.stack([loss(each, rank) for rank, each in enumerate(expected)]).sum()
    (first,) = torch.autograd.grad(total, x, create_graph=True)
    (second,) = torch.autograd.grad((first * aims).sum(), x)

    mine = spatial.local_part(x.detach(), layout).requires_grad_()
    before, after = widths
    found = autograd.halo_exchange(mine, layout, before, after, periodic, tag="halo")
    assert torch.equal(found, expected[comm.rank])
    (gradient,) = torch.autograd.grad(loss(found, comm.rank), mine, create_graph=True)
    torch.testing.assert_close(gradient, spatial.local_part(first.detach(), layout), **CLOSE)
    (again,) = torch.autograd.grad(loss(found, comm.rank), mine, retain_graph=True)
    assert torch.equal(again, gradient)
    (of_gradient,) = torch.autograd.grad((gradient * spatial.local_part(aims, layout)).sum(), mine)
    torch.testing.assert_close(of_gradient, spatial.local_part(second, layout), **CLOSE)


def check_types(comm: mcr.Communicator) -> None:
    """Integers and half precision too, strided inputs, and sums of half precision that are rounded once."""
    layout = mcr.Layout.sharded((2 * comm.size, 3), range(comm.size), 0)
    whole = torch.arange(6 * comm.size).view(2 * comm.size, 3)
    for dtype in (torch.int64, torch.bfloat16, torch.bool, torch.complex64):
        x = whole.to(dtype)
        mine = spatial.local_part(x, layout).t().contiguous().t()
        found = autograd.halo_exchange(mine, layout, (1, 0), (1, 0), periodic=True)
        rows = torch.arange(2 * comm.rank - 1, 2 * comm.rank + 3) % (2 * comm.size)
        assert torch.equal(found, x[rows])
    big = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    found = autograd.halo_exchange(big, layout, (2, 0), (2, 0), periodic=True)
    (found * torch.tensor(1 + 2.0**-7)).sum().backward()
    assert big.grad is not None
    assert torch.equal(big.grad, torch.full_like(big, 3 * (1 + 2**-7)))


# -- layers together ------------------------------------------------------------------------------


def networks(layout: mcr.Layout | None) -> nn.Sequential:
    """Return a small network on the whole tensor, or spread; the same parameters."""
    torch.manual_seed(5)
    layers: list[Any] = []

    def conv(*arguments: Any, **options: Any) -> None:
        nonlocal layout
        if layout is None:
            layers.append(nn.Conv3d(*arguments, **options).double())
        else:
            layers.append(spatial.Conv3d(*arguments, **options, layout=layout, tag="c").double())
            layout = layers[-1].out_layout

    def pool(name: str) -> None:
        nonlocal layout
        if layout is None:
            layers.append(getattr(nn, name)(2))
        else:
            layers.append(getattr(spatial, name)(2, layout=layout))
            layout = layers[-1].out_layout

    conv(1, 3, 3, padding=1, padding_mode="circular")
    layers.append(nn.LeakyReLU())
    pool("MaxPool3d")
    conv(3, 4, 3, padding=1)
    pool("AvgPool3d")
    conv(4, 2, 2, padding="same")
    return nn.Sequential(*layers)


def check_network(comm: mcr.Communicator) -> None:
    """Losses and gradients of a network of three convolutions, two poolings and a mean; steps agree too."""
    layout = mcr.Layout.sharded((4 * comm.size, 8, 4), range(comm.size), 0)
    whole, ours = networks(None), networks(layout)
    head = nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        for param in head.parameters():
            param.fill_(0.3)
    head_of_ours = copy.deepcopy(head)
    x = values(3, 1, *layout.shape)
    last: Any = ours[-1].out_layout
    for step in range(2):
        loss = head(whole(x).mean((2, 3, 4))).square().mean()
        found = (
            head_of_ours(spatial.global_mean(ours(spatial.local_part(x, layout)), last, tag="mean"))
            .square()
            .mean()
        )
        torch.testing.assert_close(found, loss, **CLOSE)
        loss.backward()
        found.backward()
        spatial.sum_gradients(ours, tag="weights")
        pairs = [
            *zip(whole.parameters(), ours.parameters(), strict=True),
            *zip(head.parameters(), head_of_ours.parameters(), strict=True),
        ]
        for param, mine in pairs:
            torch.testing.assert_close(mine.grad, param.grad, **CLOSE)
            with torch.no_grad():
                for each in (param, mine):
                    assert each.grad is not None
                    each.sub_(0.1 * each.grad)
                    each.grad = None
        assert step < 2
    assert isinstance(copy.deepcopy(ours), nn.Sequential)


def check_edges(comm: mcr.Communicator) -> None:
    """Check empty and changing batches, inputs without gradient, autocast, a group, and records."""
    ranks = list(range(comm.size))
    layout = mcr.Layout.sharded((6, 5), ranks, 0)
    conv = spatial.Conv2d(2, 3, 3, padding=1, layout=layout, tag="conv")
    local = layout.locals[comm.rank]
    for number in (0, 2, 1):
        x = torch.ones(number, 2, *local)
        conv(x).sum().backward()
        conv(x.requires_grad_()).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
    with torch.no_grad(), mcr.record() as log:
        conv(torch.ones(1, 2, *local))
    assert {(each.kind, each.tag) for each in log.records} == {("all_to_all_v", "conv")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = conv(torch.ones(1, 2, *local))
        (half.sum()).backward()
    assert half.dtype == torch.bfloat16
    assert conv.weight.grad is not None
    assert conv.weight.grad.dtype == torch.float32

    pair = mcr.new_group([comm.size - 1, 0])
    if pair.rank >= 0:
        two = mcr.Layout.sharded((6, 5), [comm.size - 1, 0], 0)
        inside = spatial.Conv2d(2, 3, 3, padding=1, layout=two, group=pair)
        plain = nn.Conv2d(2, 3, 3, padding=1)
        inside.load_state_dict(plain.state_dict())
        x = torch.randn(1, 2, 6, 5, generator=torch.Generator().manual_seed(0))
        found = inside(spatial.local_part(x, two, group=pair))
        torch.testing.assert_close(found, spatial.local_part(plain(x), two, group=pair))
        mean = spatial.global_mean(found, two, group=pair)
        torch.testing.assert_close(mean, plain(x).mean((2, 3)))
        spatial.sum_gradients(inside, group=pair)
        assert inside.weight.grad is not None  # of a layer that no loss has used
        assert not inside.weight.grad.any()


def refusals(comm: mcr.Communicator) -> Iterator[tuple[str, Any]]:
    ranks = list(range(comm.size))
    layout = mcr.Layout.sharded((8, 4), ranks, 0)
    local = layout.locals[comm.rank]
    few = mcr.Layout.sharded((8, 4), [0], 0)
    yield (
        "is not those of group|are not those of group",
        lambda: autograd.halo_exchange(torch.ones(8, 4), few, 1, 1),
    )
    yield "expected a torch.Tensor", lambda: autograd.halo_exchange([1.0], layout, 1, 1)  # type: ignore[arg-type]
    yield "expected a local tensor of shape", lambda: autograd.halo_exchange(torch.ones(3, 3), layout, 1, 1)
    conv = spatial.Conv2d(2, 3, 3, padding=1, layout=layout)
    yield r"of shape \[N, 2, ", lambda: conv(torch.ones(1, 3, *local))
    yield r"of shape \[N, 2, ", lambda: conv(torch.ones(2, *local))
    yield "expected a layout of 3 spatial dim", lambda: spatial.Conv3d(1, 1, 1, layout=layout)
    yield "expected a Layout", lambda: spatial.Conv2d(1, 1, 1, layout="S0")  # type: ignore[arg-type]
    yield "more than dilation", lambda: spatial.Conv2d(1, 1, 3, padding=3, layout=layout)
    yield (
        "expected 'zeros' or 'circular'",
        lambda: spatial.Conv2d(1, 1, 3, padding_mode="reflect", layout=layout),
    )
    yield r"the kernel reads \[9, 9\] elements", lambda: spatial.Conv2d(1, 1, 9, layout=layout)
    whole = mcr.Layout.replicated((8, 4), ranks)
    first = mcr.Layout.sharded((8, 4), ranks, 0, [8] + [0] * (comm.size - 1))
    yield "has elements on several ranks", lambda: spatial.Conv2d(1, 1, 3, layout=whole)
    yield "has addends", lambda: spatial.Conv2d(1, 1, 3, layout=mcr.Layout.mesh((8, 4), ranks, ["P"]))
    odd = mcr.Layout.sharded((8, 4), ranks, 0, sizes=[3, *[1] * (comm.size - 2), 5 - (comm.size - 2)])
    yield r"the box \[\(0, 3\), \(0, 4\)\] of rank 0", lambda: spatial.MaxPool2d(2, layout=odd)
    yield "only a stride equal to kernel_size", lambda: spatial.AvgPool2d(2, 1, layout=layout)
    yield "larger than", lambda: spatial.MaxPool2d(16, layout=first)
    yield "that ends with", lambda: spatial.local_part(torch.ones(4, 8), layout)
    yield r"expected \[N, C, ", lambda: spatial.global_mean(torch.ones(1, 8), layout)


def check_refusals(comm: mcr.Communicator) -> None:
    for pattern, call in refusals(comm):
        with pytest.raises((mcr.InvalidArgument, mcr.Unsupported), match=pattern):
            call()


def check_pooling(comm: mcr.Communicator) -> None:
    """Like torch, pooling ignores the rest after the last whole window; ranks without rows join."""
    sizes = [2] * (comm.size - 1)
    layout = mcr.Layout.sharded((2 * comm.size + 1, 5), range(comm.size), 0, sizes=[*sizes, 3])
    x = values(1, 2, *layout.shape)
    for ours, theirs in ((spatial.MaxPool2d, F.max_pool2d), (spatial.AvgPool2d, F.avg_pool2d)):
        pool = ours(2, layout=layout)
        expected = theirs(x, 2)
        assert pool.out_layout.shape == tuple(expected.shape[2:])
        found = pool(spatial.local_part(x, layout))
        assert torch.equal(found, spatial.local_part(expected, pool.out_layout))
        assert "kernel_size=(2, 2)" in repr(pool)
    one = mcr.Layout.sharded((4, 4), range(comm.size), 0, sizes=[4, *[0] * (comm.size - 1)])
    pool = spatial.MaxPool2d((4, 2), layout=one)
    assert pool(spatial.local_part(values(1, 1, 4, 4), one)).numel() == 2 * (comm.rank == 0)


def check_volume(comm: mcr.Communicator) -> None:
    """A halo of one layer sends that layer to each neighbour, forward and back, and nothing else."""
    layout = mcr.Layout.sharded((4 * comm.size, 6), range(comm.size), 0)
    x = torch.ones(layout.locals[comm.rank], requires_grad=True)
    with mcr.record() as log:
        autograd.halo_exchange(x, layout, (1, 0), (1, 0), tag="h").sum().backward()
    sent = [each.bytes for each in log.records if each.kind == "all_to_all_v"]
    neighbours = 1 if comm.rank in (0, comm.size - 1) else 2
    assert len(sent) == 2
    assert max(sent) <= 2 * neighbours * 6 * 4, sent
    halo = Halo(layout, layout.with_halo((1, 0), (1, 0)))
    assert halo.moves
    assert math.prod(halo.target.locals[comm.rank]) == 6 * (4 + neighbours)
    assert np.array_equal(halo.source.held.lows, layout.held.lows)


def check_widths(comm: mcr.Communicator) -> None:
    """Whole numbers of any kind, and nothing else."""
    layout = mcr.Layout.sharded((2 * comm.size, 3), range(comm.size), 0)
    x = torch.ones(layout.locals[comm.rank])
    right = autograd.halo_exchange(x, layout, (1, 0), (1, 0))
    fine: list[Any] = [(np.int64(1), 0), np.array([1, 0]), [True, False]]
    for widths in fine:
        found = autograd.halo_exchange(x, layout, widths, widths)
        assert torch.equal(found, right)
    wrong: list[Any] = [1.5, "1", None, (1.0, 0.0), -1, (1, 0, 0), {}]
    for each in wrong:
        with pytest.raises(mcr.InvalidArgument, match="before: expected a whole number from 0, or 2"):
            autograd.halo_exchange(x, layout, each, 1)
    for no_layout in ([1], "S0", None):
        with pytest.raises(mcr.InvalidArgument, match="layout: expected a Layout"):
            autograd.halo_exchange(x, no_layout, 1, 1)  # type: ignore[arg-type]
    one: Any = np.int64(1)
    pool = spatial.MaxPool2d(one, layout=layout)
    assert pool.kernel_size == (1, 1)


def everything(every: int) -> int:
    torch.set_num_threads(1)
    with mcr.init() as comm:
        check_halos(comm)
        check_types(comm)
        check_volume(comm)
        check_pooling(comm)
        check_network(comm)
        check_edges(comm)
        check_refusals(comm)
        check_widths(comm)
        return check_convolutions(comm, every)


@pytest.mark.short("2-some")
@needs_mpi
@pytest.mark.parametrize(("ranks", "every"), [(2, 3), (2, 1), (3, 1), (4, 1)], ids=["2-some", "2", "3", "4"])
def test_spread_layers_are_those_of_one_process(ranks: int, every: int) -> None:
    for result in run_ranks(everything, ranks, args=[every], timeout=300):
        assert result.value >= 69 // every


def exact() -> None:
    """Check halos and a convolution with corners on gloo alone."""
    with mcr.init(backends=["gloo"]) as comm:
        check_halos(comm)
        check_network(comm)


@pytest.mark.long
def test_halos_over_gloo() -> None:
    run_ranks(exact, 2, via="torch", timeout=120)


def two_groups() -> list[float]:
    """Two samples, each split over a pair of ranks: gradients are summed inside the pairs."""
    torch.set_num_threads(1)
    found = []
    with mcr.init(backends=["gloo"]) as comm:
        pairs = [mcr.new_group([0, 1]), mcr.new_group([3, 2])]
        group = pairs[comm.rank // 2]
        layout = mcr.Layout.sharded((8, 4), sorted(group.ranks), 0)
        one = spatial.Conv2d(1, 1, 1, layout=layout, group=group)
        two = spatial.Conv2d(1, 1, 3, padding=1, layout=one.out_layout, group=group)
        last = nn.Conv2d(1, 1, 1)
        model = nn.Sequential(one, two, last)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0)
        x = torch.ones(1, 1, *layout.locals[comm.rank])
        (model(x).sum() * (1 + comm.rank // 2)).backward()
        own: Any = last.bias
        before = own.grad.item()
        spatial.sum_gradients(model)
        assert own.grad.item() == before
        found = [two.bias.grad.item(), one.weight.grad.item()]  # type: ignore[union-attr]

        again = copy.deepcopy(model)  # the group is the same, as there is one
        assert isinstance(again[0], spatial.Conv2d)
        assert again[0].group is group
        assert again[0].weight is not one.weight
        assert again[0].layout == layout
        assert torch.equal(again(x), model(x))
        pool = copy.deepcopy(spatial.AvgPool2d(2, layout=layout, group=group))
        assert pool.group is group
        with pytest.raises(mcr.Unsupported, match="cannot be pickled"):
            pickle.dumps(one)

        everyone = spatial.Conv2d(1, 1, 1, layout=mcr.Layout.sharded((8, 4), range(4), 0))
        everyone.weight = one.weight
        with pytest.raises(mcr.InvalidArgument, match="share a parameter"):
            spatial.sum_gradients(nn.Sequential(one, everyone))
        with pytest.raises(mcr.InvalidArgument, match="are not those of group"):
            spatial.sum_gradients(everyone, group=group)
        half = mcr.Layout.sharded((512, 512), sorted(group.ranks), 0)
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            mean = spatial.global_mean(torch.ones(1, 2, 256, 512, dtype=dtype), half, group=group)
            assert mean.dtype is dtype
            assert mean.tolist() == [[1.0, 1.0]]
    return found


def test_layers_of_several_groups() -> None:
    for rank, result in enumerate(run_ranks(two_groups, 4, via="torch", timeout=120)):
        factor = 1 + rank // 2
        # 3x3 ones around each of 8x4 elements of ones, inside the tensor
        assert result.value == [32.0 * factor, (3 * 8 - 2) * (3 * 4 - 2) * factor]


def slow_paths() -> int:
    """Return how often the halo of a layer in training takes the slow path of a first call."""
    looked = []
    with mcr.init(backends=["gloo"]) as comm:
        layout = mcr.Layout.sharded((8, 4), range(comm.size), 0)
        conv = spatial.Conv2d(1, 1, 3, padding=1, layout=layout)
        x = torch.ones(1, 1, *layout.locals[comm.rank], requires_grad=True)
        conv(x).sum().backward()
        do_state: Any = state
        checked = do_state.checked

        def counted(*args: Any) -> Any:
            looked.append(1)
            return checked(*args)

        do_state.checked = counted
        for overlap in (True, False):
            conv.overlap = overlap
            for _ in range(3):
                conv(x).sum().backward()
    return len(looked)


def test_halo_plans_are_reused_in_later_steps() -> None:
    for result in run_ranks(slow_paths, 2, via="torch", timeout=120):
        assert result.value == 0
