"""Convolution and pooling of tensors whose spatial dimensions are sharded over ranks.

    from mcr_plus import spatial

    layout = mcr.Layout.sharded((64, 64, 64), range(mcr.get_world_size()), 0)
    conv = spatial.Conv3d(4, 16, 3, padding=1, layout=layout)
    pool = spatial.MaxPool3d(2, layout=conv.out_layout)
    y = pool(conv(x))                       # x: [N, 4, *layout.local_shape(rank)]
    spatial.global_mean(y, pool.out_layout) # [N, 16], the same on all ranks

N and C are complete on every rank; the spatial dimensions are divided into one box per rank (Dryden et al.
2019, arXiv 1903.06681). A layer takes the layout of its input and computes the layout of its output,
`out_layout`. Forward and backward results equal those of torch's layer on the whole tensor, except for
rounding.

Weights are replicated, and each rank computes the gradient contribution of its part of the output. The
gradient is the sum over ranks: call `sum_gradients(model)` after `backward()`. (`mcr.wrap` averages, so it
needs a loss multiplied by the number of ranks.)
"""

# Long because the layers share their functions, and each has an example.

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mcr_plus.api import autograd
from mcr_plus.communicator.calls import CallOptions, Unpack
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.job.init import member_of
from mcr_plus.layout.autograd import check_ranks
from mcr_plus.layout.halo import HALF, Halo, check_single, lifted, one_per_dim
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import Boxes, Ints, as_ints
from mcr_plus.layout.stencil import Range, StencilPart, Strip, Window, box_of, of_boxes, part_of

__all__ = [
    "AvgPool2d", "AvgPool3d", "Conv2d", "Conv3d", "MaxPool2d", "MaxPool3d", "global_mean", "local_part",
    "sum_gradients",
]  # fmt: skip

_FRONT: Final = 2  # N and C


def _at(slices: Iterable[slice]) -> Any:
    """Return the index of a box in the last dimensions."""
    return (..., *slices)


def _nothing(x: torch.Tensor, more: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return an empty tensor that is part of the graph, for ranks without output."""
    return (x.sum() + more).expand(shape)


def read_strip(
    x: torch.Tensor, base: Sequence[Range], reads: Sequence[Range], size: Sequence[int], circular: bool
) -> tuple[torch.Tensor, list[int]]:
    """Return the input of a strip, and the padding on both sides that the convolution must still add.

    `x` holds the ranges `base`. The input is a view of `x`, or a copy with wrapped borders or padding.
    """
    pads: list[int] = []
    padding: list[int] = []
    for dim, ((low, high), (first, last), number) in enumerate(zip(base, reads, size, strict=True)):
        at = _FRONT + dim
        if _wraps((low, high), (first, last), number, circular):
            x = x.index_select(at, torch.arange(first, last, device=x.device) % number)
            first, last, low, high = 0, last - first, 0, last - first
        begin, end = max(first, low), min(last, high)
        x = x.narrow(at, begin - low, end - begin)
        both = min(begin - first, last - end)
        padding.append(both)
        pads = [begin - first - both, last - end - both, *pads]
    return F.pad(x, pads) if any(pads) else x, padding


def _returned(
    grad: torch.Tensor, base: Sequence[Range], reads: Sequence[Range], size: Sequence[int], circular: bool
) -> torch.Tensor:
    """Return the gradient of `read_strip`'s input from the gradient of its output."""
    pads: list[int] = []  # negative pads cut padding off
    for dim, ((low, high), (first, last), number) in enumerate(zip(base, reads, size, strict=True)):
        at = _FRONT + dim
        both = min(max(first, low) - first, last - min(last, high))
        if _wraps((low, high), (first, last), number, circular):
            found = grad.new_zeros(*grad.shape[:at], number, *grad.shape[at + 1 :])
            grad = found.index_add_(at, torch.arange(first, last, device=grad.device) % number, grad)
            first, last, both = low, high, 0
        pads = [first + both - low, high - last + both, *pads]
    return F.pad(grad, pads) if any(pads) else grad


def _wraps(base: Range, reads: Range, size: int, circular: bool) -> bool:
    """Return whether reads wrap around a dimension that is complete on this rank."""
    return circular and base == (0, size) and not 0 <= reads[0] <= reads[1] <= size


@dataclass(frozen=True)
class SlabConvolution:
    """Convolution of tensors with fixed N and C, on this rank."""

    window: Window
    groups: int
    size: tuple[int, ...]
    out_local: tuple[int, ...]
    part: StencilPart | None
    halo: Halo
    comm: Communicator
    options: CallOptions
    overlap: bool

    @classmethod
    def bound(
        cls, window: Window, groups: int, layouts: tuple[Layout, Layout], front: tuple[int, ...],
        comm: Communicator, options: CallOptions, *, overlap: bool = True,
    ) -> SlabConvolution:  # fmt: skip
        """Return the convolution on this rank. `layouts`: of input and output; `front`: N and C."""
        (source, output), rank = layouts, comm.ranks[comm.rank]
        halo = Halo(lifted(source, front), lifted(window.target(source, output), front))
        part = part_of(window, source, output, rank)
        return cls(window, groups, source.shape, output.locals[rank], part, halo, comm, options, overlap)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the local output for a local input."""
        if self.halo.moves:
            function = cast("Callable[..., torch.Tensor]", _Convolve.apply)
            return function(x, weight, bias, self)
        if self.part is None:
            return _nothing(x, weight.sum(), x.shape[0], weight.shape[0], *self.out_local)
        return self.of(*self.read(x, self.part.own, self.part.whole), weight, bias)

    def of(
        self, x: torch.Tensor, padding: list[int], weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the convolution of an input prepared by `read`."""
        function: Any = F.conv2d if len(self.size) == 2 else F.conv3d
        return cast(
            "torch.Tensor",
            function(x, weight, bias, self.window.stride, padding, self.window.dilation, self.groups),
        )

    def read(self, x: torch.Tensor, base: Sequence[Range], strip: Strip) -> tuple[torch.Tensor, list[int]]:
        return read_strip(x, base, strip.reads, self.size, self.window.circular)

    def run(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the input with its halo."""
        output = x.new_empty(x.shape[0], weight.shape[0], *self.out_local)
        part = self.part
        if not self.overlap:
            needed = self.halo.run(x, self.comm, self.options)
            if part is not None:
                output = self.of(*self.read(needed, part.needed, part.whole), weight, bias)
            return output, needed
        # Asynchronous on every rank, including ranks with nothing to compute in the meantime.
        work = self.halo.start(x, self.comm, self.options)
        if part is not None and part.inner is not None:
            output[_at(part.inner.at)] = self.of(*self.read(x, part.own, part.inner), weight, bias)
        work.wait()
        found = work.output
        assert found is not None  # every rank has a part of the output
        if part is not None:
            for strip in part.outer:
                output[_at(strip.at)] = self.of(*self.read(found, part.needed, strip), weight, bias)
        return output, found

    def gradients(
        self, grad: torch.Tensor, needed: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of input, weight and bias; the halo exchange overlaps with computation."""
        window, part = self.window, self.part

        def of(x: torch.Tensor, padding: list[int], *mask: bool) -> tuple[torch.Tensor | None, ...]:
            found = torch.ops.aten.convolution_backward(
                grad, x, weight, [weight.shape[0]], window.stride, padding, window.dilation, False,
                [0] * len(self.size), self.groups, list(mask),
            )  # fmt: skip
            return cast("tuple[torch.Tensor | None, ...]", found)

        read = None if part is None else self.read(needed, part.needed, part.whole)
        returning = None
        if wanted[0]:
            if read is None or part is None:
                back = torch.zeros_like(needed)
            else:
                (back, *_) = cast("tuple[torch.Tensor, ...]", of(*read, True, False, False))
                back = _returned(back, part.needed, part.whole.reads, self.size, window.circular)
            returning = self.halo.start_back(back.contiguous(), self.comm, self.options)
        of_weight = of_bias = None
        if wanted[1] or wanted[2]:
            if read is None:
                of_weight = torch.zeros_like(weight)
                of_bias = weight.new_zeros(weight.shape[0]) if wanted[2] else None
            else:
                (_, of_weight, of_bias) = of(*read, False, wanted[1], wanted[2])
        return None if returning is None else returning.wait(), of_weight, of_bias


class _Convolve(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: SlabConvolution
    ) -> torch.Tensor:
        output, needed = how.run(x, weight, bias)
        ctx.save_for_backward(needed, weight)
        ctx.how = how
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - what the decorator makes of it
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        needed, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        found = ctx.how.gradients(grads[0], needed, weight, wanted)
        return *(each if needs else None for each, needs in zip(found, wanted, strict=True)), None


def window_of(conv: nn.Conv2d | nn.Conv3d) -> Window:
    """Return the window of a convolution. Raises `Unsupported` for some kinds of padding."""
    if conv.padding_mode not in ("zeros", "circular"):
        raise Unsupported(f"padding_mode: expected 'zeros' or 'circular', got '{conv.padding_mode}'")
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    if conv.padding == "same":
        left = tuple(each // 2 for each in reach)
        right = tuple(each - before for each, before in zip(reach, left, strict=True))
    else:
        left = right = (0,) * len(reach) if conv.padding == "valid" else tuple(map(int, conv.padding))
    if any(pad > each for pad, each in zip(left, reach, strict=True)):
        raise Unsupported(
            f"padding {list(left)}: more than dilation * (kernel - 1) = {reach}, so that some outputs "
            "would read nothing but padding"
        )
    return Window(
        tuple(conv.kernel_size), tuple(conv.stride), tuple(conv.dilation), left, right,
        conv.padding_mode == "circular",
    )  # fmt: skip


class _Layer(nn.Module):
    """Base class of the layers: layout of their input, and group."""

    layout: Layout
    out_layout: Layout
    group: Communicator | None

    def _state(self) -> dict[str, Any]:
        """Return the attributes for a copy: all but the bound exchanges."""
        return {name: value for name, value in self.__dict__.items() if name != "_known"} | {"_known": {}}

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise Unsupported(
                f"a {type(self).__name__} of group '{self.group.name}' cannot be pickled: the group belongs "
                "to this process; pickle its state_dict()"
            )
        return self._state()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        memo[id(self.group)] = self.group  # share the group
        found = memo[id(self)] = type(self).__new__(type(self))
        found.__setstate__(copy.deepcopy(self._state(), memo))  # type: ignore[no-untyped-call]
        return found

    def _checked(self, x: torch.Tensor, channels: int | None = None) -> Communicator:
        comm = member_of(self.group)
        check_ranks(comm, self.layout, type(self).__name__)
        local = self.layout.locals[comm.ranks[comm.rank]]
        expected = f"[N, {'C' if channels is None else channels}, {', '.join(map(str, local))}]"
        if not isinstance(x, torch.Tensor):
            raise InvalidArgument(f"expected a tensor of shape {expected}, got {type(x).__name__}")
        fits = x.ndim == _FRONT + len(local) and tuple(x.shape[_FRONT:]) == local
        if not fits or channels not in (None, x.shape[1]):
            raise InvalidArgument(
                f"expected this rank's part of {self.layout}, of shape {expected}, got {list(x.shape)}"
            )
        return comm


class _Conv(_Layer):
    """Convolution layer with torch's arguments; `layout` is the layout of the input's spatial dimensions."""

    def __init__(
        self,
        *args: Any,
        layout: Layout,
        group: Communicator | None = None,
        tag: str | None = None,
        overlap: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)  # of torch's layer
        conv = cast("nn.Conv3d", self)
        _check(layout, len(conv.kernel_size), type(self).__name__)
        self.layout, self.group, self.tag, self.overlap = layout, group, tag, overlap
        self._window = window_of(conv)
        self.out_layout = self._window.output(layout)
        self._known: dict[Any, SlabConvolution] = {}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve `input` [N, in_channels, *local shape in `layout`]; returns [N, out_channels, *that in
        `out_layout`]."""
        conv, x = cast("nn.Conv3d", self), input
        comm = self._checked(x, conv.in_channels)
        key = (len(x), self.overlap)
        how = self._known.get(key)
        if how is None or how.comm is not comm:
            layouts, front = (self.layout, self.out_layout), tuple(x.shape[:_FRONT])
            how = self._known[key] = SlabConvolution.bound(
                self._window, conv.groups, layouts, front, comm, {"tag": self.tag}, overlap=self.overlap
            )
        weight, bias = conv.weight, conv.bias
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            return how(x, weight, bias)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return how(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


class Conv3d(_Conv, nn.Conv3d):
    """`torch.nn.Conv3d` for volumes whose depth, height and width are sharded over ranks.

    It takes the arguments of torch's layer, and has the same parameters and state.

    Args:
        layout: layout of the input's spatial dimensions: one box (may be empty) for each rank of the group,
            and each element on one rank, such as `mcr.Layout.sharded((64, 64), ranks, 0)` or
            `mcr.Layout.mesh(shape, ranks, ["S0", "S1"])`.
        group: ranks of the layout; None: the whole job.
        tag: tag of the halo exchanges, for rules; `redistribute` if None.
        overlap: convolve the interior while the halo is in flight, then the borders. False may be faster for
            small convolutions, or if halos arrive at once.

    Attributes:
        layout, out_layout: layouts of the spatial dimensions of input and output. An output element is on the
            rank that has the middle of its receptive field.

    Each input is this rank's part, [N, C, *layout.local_shape(rank)], with the same N on all ranks. Backward
    is collective if forward was. Gradients of gradients are not supported if ranks need halos. Gradients of
    weights are contributions of this rank: see `sum_gradients`.

    Raises:
        InvalidArgument: the layout has another number of dimensions, several boxes on a rank, replicas or
            addends; the group has other ranks; or an input is not this rank's part.
        Unsupported: `padding_mode` is neither `zeros` nor `circular`, or padding exceeds
            dilation * (kernel_size - 1).

    Example:
        ```python
        layout = mcr.Layout.sharded((8, 6, 6), range(mcr.get_world_size()), 0)
        conv = spatial.Conv3d(1, 4, 3, padding=1, padding_mode="circular", layout=layout)
        y = conv(torch.ones(1, 1, *layout.local_shape(mcr.get_rank())))
        assert y.shape == (1, 4, *layout.local_shape(mcr.get_rank()))
        ```
    """


class Conv2d(_Conv, nn.Conv2d):
    """`torch.nn.Conv2d` for images whose height and width are sharded over ranks.

    Arguments, attributes and errors are the same as for `Conv3d`.

    Example:
        ```python
        layout = mcr.Layout.sharded((8, 6), range(mcr.get_world_size()), 0)
        conv = spatial.Conv2d(3, 5, 3, stride=2, padding=1, layout=layout)
        y = conv(torch.ones(1, 3, *layout.local_shape(mcr.get_rank())))
        assert conv.out_layout.shape == (4, 3)
        assert y.shape == (1, 5, *conv.out_layout.local_shape(mcr.get_rank()))
        ```
    """


# -- pooling --------------------------------------------------------------------------------------


class _Pool(_Layer):
    """Pooling with windows that do not overlap, each on one rank."""

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        *,
        layout: Layout,
        group: Communicator | None = None,
    ) -> None:
        super().__init__()
        dims, name = self._dims, type(self).__name__
        _check(layout, dims, name)
        self.kernel_size = _each(kernel_size, dims, f"{name}: kernel_size")
        if stride is not None and _each(stride, dims, f"{name}: stride") != self.kernel_size:
            raise Unsupported(
                f"{name}: windows of {list(self.kernel_size)} at a stride of {stride}: only a stride "
                "equal to kernel_size, where windows do not overlap"
            )
        self.layout, self.group = layout, group
        kernel, size = as_ints(self.kernel_size), as_ints(layout.shape)
        for rank, low, high in zip(layout.owners.tolist(), *layout.held, strict=True):
            if (low % kernel).any() or ((high % kernel != 0) & (high < size)).any():
                raise Unsupported(
                    f"{name}: the box {_words(low, high)} of rank {rank} in {layout} cuts windows of "
                    f"{list(self.kernel_size)}; give the slabs sizes that are multiples of it"
                )
        total = size // kernel
        if (total < 1).any():
            raise InvalidArgument(f"{name}: windows of {list(self.kernel_size)} are larger than {layout}")
        self.out_layout = of_boxes(
            layout, total, Boxes(layout.held.lows // kernel, layout.held.highs // kernel)
        )

    _dims = 3
    _function: Callable[..., torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pool `x` [N, C, *local shape in `layout`]; returns [N, C, *local shape in `out_layout`]."""
        comm = self._checked(x)
        local = self.out_layout.locals[comm.ranks[comm.rank]]
        if 0 in local:
            return _nothing(x, x.new_zeros(()), *x.shape[:_FRONT], *local)
        return type(self)._function(x, self.kernel_size)

    def extra_repr(self) -> str:
        """Return the layer's arguments, as `print` shows them."""
        return f"kernel_size={self.kernel_size}"


class MaxPool3d(_Pool):
    """`torch.nn.MaxPool3d` with windows that do not overlap, for volumes sharded over ranks.

    Args:
        kernel_size: an int, or one for each spatial dimension. stride: the same, or None.
        layout, group: as in `Conv3d`. Borders between ranks must be multiples of the kernel's size.

    Attributes:
        layout, out_layout: layouts of the spatial dimensions of input and output.

    There is no communication. Elements after the last whole window are ignored, as in torch.

    Raises:
        InvalidArgument: as in `Conv3d`.
        Unsupported: a rank's box cuts a window, or the stride differs from the kernel's size.

    Example:
        ```python
        layout = mcr.Layout.sharded((8, 4, 4), range(mcr.get_world_size()), 0)
        pool = spatial.MaxPool3d(2, layout=layout)
        y = pool(torch.ones(1, 2, *layout.local_shape(mcr.get_rank())))
        assert pool.out_layout.shape == (4, 2, 2)
        assert y.shape == (1, 2, *pool.out_layout.local_shape(mcr.get_rank()))
        ```
    """

    _function = staticmethod(F.max_pool3d)


class AvgPool3d(_Pool):
    """`torch.nn.AvgPool3d` with windows that do not overlap; otherwise like `MaxPool3d`."""

    _function = staticmethod(F.avg_pool3d)


class MaxPool2d(_Pool):
    """`torch.nn.MaxPool2d` with windows that do not overlap; otherwise like `MaxPool3d`."""

    _dims = 2
    _function = staticmethod(F.max_pool2d)


class AvgPool2d(_Pool):
    """`torch.nn.AvgPool2d` with windows that do not overlap; otherwise like `MaxPool3d`."""

    _dims = 2
    _function = staticmethod(F.avg_pool2d)


# -- functions ------------------------------------------------------------------------------------


def global_mean(
    x: torch.Tensor, layout: Layout, *, group: Communicator | None = None, **options: Unpack[CallOptions]
) -> torch.Tensor:
    """Return the mean over all spatial dimensions of `x` on all ranks: [N, C, *local shape] → [N, C].

    The gradient is right if later computation is the same on all ranks, as for `autograd.all_reduce`.

    Raises:
        InvalidArgument: `x` is not this rank's part of `layout`.

    Example:
        ```python
        layout = mcr.Layout.sharded((8, 4), range(mcr.get_world_size()), 0)
        x = torch.full((1, 2, *layout.local_shape(mcr.get_rank())), 3.0)
        assert spatial.global_mean(x, layout).tolist() == [[3.0, 3.0]]
        ```
    """
    comm = member_of(group)
    check_ranks(comm, layout, "global_mean")
    local = layout.locals[comm.ranks[comm.rank]]
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"x: expected a torch.Tensor, got {type(x).__name__}")
    if x.ndim != _FRONT + len(local) or tuple(x.shape[_FRONT:]) != local:
        raise InvalidArgument(f"expected [N, C, {', '.join(map(str, local))}], got {list(x.shape)}")
    # A half-precision sum may overflow although the mean does not.
    dtype = torch.float32 if x.dtype in HALF else None
    total = x.flatten(_FRONT).sum(dim=_FRONT, dtype=dtype) / layout.volume
    mean = autograd.all_reduce(total, group=comm, **options)
    return mean if dtype is None else mean.to(x.dtype)


def local_part(x: torch.Tensor, layout: Layout, *, group: Communicator | None = None) -> torch.Tensor:
    """Return a copy of this rank's part of a whole tensor; `layout` describes the last dimensions.

    Raises:
        InvalidArgument: `x` does not end with the layout's shape, or the rank holds several boxes.

    Example:
        ```python
        layout = mcr.Layout.sharded((8, 4), range(mcr.get_world_size()), 0)
        x = spatial.local_part(torch.ones(1, 3, 8, 4), layout)
        assert x.shape == (1, 3, *layout.local_shape(mcr.get_rank()))
        ```
    """
    comm = member_of(group)
    check_single(layout, "local_part")
    check_ranks(comm, layout, "local_part")
    front = x.ndim - len(layout.shape)
    if front < 0 or tuple(x.shape[front:]) != layout.shape:
        raise InvalidArgument(f"expected a tensor that ends with {list(layout.shape)}, got {list(x.shape)}")
    rank = comm.ranks[comm.rank]
    box = box_of(layout, rank)
    if box is None:
        return x.new_zeros(*x.shape[:front], *layout.locals[rank])
    return x[_at(slice(*bounds) for bounds in box)].clone(memory_format=torch.contiguous_format)


def sum_gradients(
    model: nn.Module, *, group: Communicator | None = None, **options: Unpack[CallOptions]
) -> None:
    """Sum the gradients of all sharded convolutions in `model` over ranks, in one operation per group.

    Afterwards `param.grad` of their weights and biases is the gradient of the whole layer, on all ranks.
    Other layers, which compute the same on all ranks, are not touched. A rank without a gradient
    adds 0.

    Args:
        model: its convolutions are summed over their own groups, in the order of `model.modules()`.
        group: group of layers made without one; None: the whole job.
        options: as for every collective.

    Raises:
        InvalidArgument: a layer's layout has other ranks than its group, or layers of different groups
            share a parameter.
        NotInitialized: there is no job, or the group is closed.

    Example:
        ```python
        layout = mcr.Layout.sharded((8, 4), range(mcr.get_world_size()), 0)
        conv = spatial.Conv2d(1, 1, 1, layout=layout)
        conv(torch.ones(1, 1, *layout.local_shape(mcr.get_rank()))).sum().backward()
        spatial.sum_gradients(conv)
        assert conv.bias.grad.tolist() == [32.0]
        ```
    """
    groups: dict[str, Communicator] = {}
    params: dict[str, list[nn.Parameter]] = {}
    group_of: dict[nn.Parameter, str] = {}
    for layer in model.modules():
        if not isinstance(layer, _Conv):
            continue
        comm = member_of(group if layer.group is None else layer.group)
        check_ranks(comm, layer.layout, f"sum_gradients of a {type(layer).__name__}")
        groups[comm.name] = comm
        for param in layer.parameters():
            if not param.requires_grad:
                continue
            other = group_of.setdefault(param, comm.name)
            if other != comm.name:
                raise InvalidArgument(
                    f"sum_gradients: layers of the groups '{other}' and '{comm.name}' share a parameter of "
                    f"shape {list(param.shape)}"
                )
    for param, name in group_of.items():
        params.setdefault(name, []).append(param)
    for name, some in params.items():
        for param in some:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        groups[name].all_reduce_coalesced([cast("torch.Tensor", each.grad) for each in some], **options)


def _check(layout: Layout, dims: int, name: str) -> None:
    check_single(layout, name)
    if len(layout.shape) != dims:
        raise InvalidArgument(
            f"{name}: expected a layout of {dims} spatial dimensions, without those of N and C; got {layout}"
        )
    if layout.has_replicas or layout.overlaps:
        raise InvalidArgument(
            f"{name}: {layout} has elements on several ranks, whose gradients would count twice; ranks with "
            "other samples belong to another group"
        )
    layout.check_source()


def _each(given: int | Sequence[int], dims: int, what: str) -> tuple[int, ...]:
    found = one_per_dim(given, dims)
    if found is None or min(found) < 1:
        raise InvalidArgument(f"{what}: expected a whole number from 1, or {dims} of them; got {given!r}")
    return found


def _words(low: Ints, high: Ints) -> str:
    return str(list(zip(low.tolist(), high.tolist(), strict=True)))
