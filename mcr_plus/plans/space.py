"""Cut blocks along space: convolutions and pooling of slabs, with the borders of neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from torch import Tensor, nn

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.errors import Unsupported
from mcr_plus.layout.autograd import with_halo
from mcr_plus.layout.halo import one_per_dim
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.stencil import Window
from mcr_plus.parallel.spatial import SlabConvolution, read_strip, window_of
from mcr_plus.plans.part import run_whole_before
from mcr_plus.plans.proof import ProvedPlan

_CONVOLUTIONS: Final = (nn.Conv2d, nn.Conv3d)
_POOLS: Final = (nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool2d, nn.AvgPool3d)


def cut_space(
    model: nn.Module, names: Sequence[str], proved: ProvedPlan, block: int, ranks: tuple[int, ...],
    comms: Mapping[tuple[int, ...], Communicator],
) -> None:  # fmt: skip
    """Let the convolutions and pooling of a block read and give this rank's slabs.

    Raises:
        Unsupported: the kind of padding, or several windows in one block that change the size of the volume.
    """
    tensors = proved.tensors
    layouts = []
    for end, tensor in (("input", block), ("output", block + 1)):
        slabs = [tensors.box(block, end, 0, 0, rank)[2] for rank in ranks]  # type: ignore[arg-type]
        shape = tensors.whole_shape(tensor)[2:]
        layouts.append(Layout.sharded(shape, ranks, 0, [high - low for low, high in slabs]))
    source, output = layouts
    for name in names:
        for path, module in model.get_submodule(name).named_modules(prefix=name):
            if not isinstance(module, (*_CONVOLUTIONS, *_POOLS)):
                continue
            window = _window(path, module)
            made = window.output(source).shape
            if made != output.shape:
                raise Unsupported(
                    f"{path}: it makes {list(made)} of {list(source.shape)}, and its block "
                    f"{list(output.shape)}; expected one such module in a block that is cut along space"
                )
            slab = _SlabModule(module, window, source, output, comms[ranks])
            module.forward = slab  # type: ignore[method-assign,assignment]
            run_whole_before(module, lambda *args, of=module: type(of).forward(of, *args))


def _window(path: str, module: nn.Module) -> Window:
    if isinstance(module, _CONVOLUTIONS):
        return window_of(module)
    dims, given = 2 if isinstance(module, _POOLS[::2]) else 3, {"dilation": 1, **vars(module)}
    numbers = [one_per_dim(given[name], dims) for name in ("kernel_size", "stride", "dilation", "padding")]
    kernel, stride, dilation, padding = cast("list[tuple[int, ...]]", numbers)
    if any(padding) or given["ceil_mode"] or given.get("return_indices"):
        raise Unsupported(f"{path}: padding, ceil_mode or return_indices; expected pooling without, in slabs")
    return Window(kernel, stride, dilation, padding, padding, False)


class _SlabModule:
    """Forward of a convolution or pooling whose input and output are slabs."""

    def __init__(
        self, module: nn.Module, window: Window, source: Layout, output: Layout, comm: Communicator
    ) -> None:
        self.module, self.window, self.source, self.output, self.comm = module, window, source, output, comm
        self._known: dict[tuple[int, ...], SlabConvolution] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Return this rank's slab of the output for its slab of the input."""
        front, module = (x.shape[0], x.shape[1]), self.module
        if front not in self._known:
            self._known[front] = SlabConvolution.bound(
                self.window, getattr(module, "groups", 1), (self.source, self.output), front, self.comm,
                {"tag": "plan.halo"},
            )  # fmt: skip
        how = self._known[front]
        if isinstance(module, _CONVOLUTIONS):
            return how(x, module.weight, module.bias)
        part = how.part
        assert part is not None  # the proof refuses parts without elements
        base = part.own
        if how.halo.moves:
            x, base = with_halo(x, how.halo, self.comm, "plan.halo"), part.needed
        x, _ = read_strip(x, base, part.whole.reads, self.source.shape, False)
        return cast("Tensor", type(module).forward(module, x))
