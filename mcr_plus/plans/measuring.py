"""Measure the passes of a model by block: seconds, and bytes that are kept."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mcr_plus.bucketing.live_bytes import LiveBytes
from mcr_plus.errors import Unsupported
from mcr_plus.plans.whole import WholeModel, nbytes_of, storage_key, tensors_in


class AxisSizes(NamedTuple):
    """Bytes and seconds that a cut of parameters divides, and bytes of the input of what it cuts."""

    saved: int = 0
    params: int = 0
    input: int = 0
    seconds: float = 0.0


Boundary = tuple[int, int | None]
"""The call of a module with which a block begins, by its number, and the index of the block's input."""
_Axes = Callable[[nn.Module], Sequence[str]]


class MeasuredPass:
    """A forward and a backward pass, and a forward pass without a graph: seconds and bytes by block.

    `begins`: of the blocks. `axes`: parameter axes along which a module is cut; None: count no bytes, which
    takes time.
    """

    def __init__(self, whole: WholeModel, begins: Sequence[Boundary], axes: _Axes | None = None) -> None:
        self._cuts = {call: (index, cut) for index, (call, cut) in enumerate(begins) if index}
        self._whole, self._ready, self.needs_gradient = whole, dict[int, float](), dict[int, bool]()
        self._axes = axes
        count = len(begins)
        self.saved, self.saved_before, self.transient, self.through = ([0] * count for _ in range(4))
        self.by_axis = [defaultdict[str, AxisSizes](AxisSizes) for _ in begins]
        batch = tensors_in((whole.inputs, whole.kwargs, whole.target))
        self._keepers = {storage_key(own): -1 for own in (*whole.parameters(), *whole.buffers(), *batch)}
        self._inside: list[tuple[nn.Module, Sequence[str], set[tuple[int, int]], float]] = []
        self._live: LiveBytes | None = None
        with ExitStack() as stack:
            if axes is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t))
                self._live = stack.enter_context(LiveBytes())
            result, self.forward = self._run()
            self._backward(result)
        self._live = None
        with torch.no_grad():
            self.recompute = self._run()[1]

    def _backward(self, result: Tensor) -> None:
        whole, count = self._whole, len(self.saved)
        self._left = self._live.mark()[0] if self._live else 0
        trained = [param for param in whole.parameters() if param.requires_grad]
        begin = whole.now()
        # Not `backward()`: hooks of ready gradients would communicate, and the program's gradients change.
        given = torch.autograd.grad(result, trained, torch.ones_like(result), allow_unused=True)
        end = whole.now()
        self._mark_backward(0)
        found = {param: each for param, each in zip(trained, given, strict=True) if each is not None}
        # Those of timed passes go: the next pass would find other memory, which is slower at first.
        self.gradients = found if self._live else {}
        ready = [*(self._ready.get(index, end) for index in range(count)), begin]
        # Hooks of one tensor, which a block has handed through, run in the order of the blocks.
        self.backward = [max(late - early, 0.0) for late, early in pairwise(ready)]

    def _mark_backward(self, block: int) -> None:
        """Note what the backward pass of a block has needed at most, beyond what was there at its begin."""
        if self._live:
            now, peak = self._live.mark()
            self.transient[block] = max(self.transient[block], peak - self._left)
            self._left = now

    def _run(self) -> tuple[Tensor, list[float]]:
        self._count, self._marks = 0, [self._whole.now()]
        result = self._whole.run(self._enter, self._leave)
        self._mark_forward()
        if len(self._marks) != len(self.saved) + 1:
            raise Unsupported("model: it calls other modules from pass to pass; expected the same modules")
        return result, [late - early for early, late in pairwise(self._marks)]

    def _enter(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        index, cut = self._cuts.get(self._count, (0, None))
        self._count += 1
        if index:
            needs_gradient = cut is not None and tensors[cut].requires_grad
            self.needs_gradient.setdefault(index - 1, needs_gradient)  # not of the pass without a graph
            if cut is not None and needs_gradient:
                tensors[cut].register_hook(lambda _: self._on_ready(index))
            self._mark_forward()
        axes = self._axes(module) if self._axes and not self._inside else ()
        if axes:
            self._inside.append((module, axes, set(map(storage_key, tensors)), self._whole.now()))
        if axes and self._live:
            params = sum(map(nbytes_of, module.parameters()))
            given = nbytes_of(tensors[0]) if tensors else 0
            self._add(axes, AxisSizes(0, params, given))

    def _leave(self, module: nn.Module, _: Any, __: Any, outputs: Any) -> None:
        if self._inside and self._inside[-1][0] is module:
            _, axes, _, began = self._inside.pop()
            if not self._live:  # the pass without a graph
                self._add(axes, AxisSizes(seconds=self._whole.now() - began))
        if self._live and next(module.parameters(recurse=False), None) is not None:
            self.through[len(self._marks) - 1] += sum(map(nbytes_of, tensors_in(outputs)))

    def _mark_forward(self) -> None:
        block = len(self._marks) - 1
        self._marks.append(self._whole.now())
        if self._live:
            now, peak = self._live.mark()
            self.transient[block] = peak - now

    def _on_ready(self, index: int) -> None:
        self._ready[index] = self._whole.now()
        self._mark_backward(index)

    def _add(self, axes: Sequence[str], more: AxisSizes) -> None:
        found = self.by_axis[len(self._marks) - 1]
        for axis in axes:
            found[axis] = AxisSizes._make(map(sum, zip(found[axis], more, strict=True)))

    def _keep(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        index, keeper = len(self._marks) - 1, self._keepers.get(key)
        if keeper not in {-1, index}:
            (self.saved if keeper is None else self.saved_before)[index] += key[1]
            self._keepers[key] = index
            if keeper is None and self._inside and key not in self._inside[-1][2]:
                self._add(self._inside[-1][1], AxisSizes(key[1]))
        return tensor


def state_bytes(optimizer: torch.optim.Optimizer, gradients: Mapping[Any, Tensor]) -> dict[Any, int]:
    """Return the bytes of the state by parameter; where there is none yet, that of a step with zeros."""
    sizes: dict[Any, int] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param)
            if not state and param in gradients:
                twin: Any = copy.copy(optimizer)
                like = torch.zeros_like(param).requires_grad_()
                like.grad = torch.zeros_like(gradients[param])
                twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [like]}]
                step = type(twin).step
                getattr(step, "__wrapped__", step)(twin)  # without hooks, which are for steps of the program
                state = twin.state[like]
            sizes[param] = sum(map(nbytes_of, tensors_in(state)))
    return sizes


def add_seconds(whole: WholeModel, gradient: Tensor) -> float:
    """Return the seconds to add a gradient to another one, as autograd does it beside the pass measured."""
    into, times = torch.zeros_like(gradient).add_(gradient), list[float]()
    for _ in range(3):
        begin = whole.now()
        into.add_(gradient)
        times.append(whole.now() - begin)
    return median(times)


def past_bytes(whole: WholeModel) -> dict[Any, int]:
    """Return the bytes that modules leave to later slices of a sequence, of all of it; by module."""
    found: dict[Any, int] = {}

    def leave(module: Any, args: Any, _: Any, __: Any) -> None:
        if hasattr(module, "forward_slice"):
            found[module] = sum(map(nbytes_of, tensors_in(module.forward_slice(*args, [])[1])))

    if any(hasattr(module, "forward_slice") for module in whole.modules()):
        with torch.no_grad():
            whole.run(lambda *_: None, leave)
    return found


def turn_seconds(repeats: int = 20) -> float:
    """Return the seconds of both passes of a part in turn with others that computes almost nothing."""
    from mcr_plus.plans.cutting import CutModule, same  # which asks the profile how modules are cut

    smallest = nn.Sequential(nn.Linear(2, 2, device="cpu"), nn.Linear(2, 1, device="cpu"))
    module = CutModule(smallest, "hidden", 2, [(0, 1), (1, 2)], same, same)
    x, times = torch.ones(1, 2, requires_grad=True, device="cpu"), list[float]()
    for _ in range(repeats):
        begin = perf_counter()
        module(x).sum().backward()
        times.append(perf_counter() - begin)
    return median(times) / 2
