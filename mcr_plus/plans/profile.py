"""Profile a model: find its chain of blocks, and measure them.

In one pass, a dispatch mode follows each tensor from the operation that makes it to those that use it. Tensors
that depend on parameters or random numbers are *computed*; all others are data that any rank can have. The
model may be cut where a module begins if no other computed tensor than its input is used from then on. What a
parent computes between two such modules belongs to the first. All passes run the whole model and mark the time
at the cuts, so the times of the blocks add up to the pass.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from mcr_plus.bucketing.step import model_hash
from mcr_plus.core.kinds import dtype_name
from mcr_plus.core.units import whole_number
from mcr_plus.errors import InvalidArgument, Unsupported, short
from mcr_plus.plans.blocks import VERSION, Axis, Block, How, Profile

_CONSTANT, _BATCH, _PARAMETER, _COMPUTED = range(4)  # what a tensor depends on; the higher one counts
_Cuts = dict[str, tuple[int, How]]
"""Number of parts, and how, by axis; 0 parts: as many as the input is long."""
_LONG: Final = ("batch", "sequence", "space")
_BY_BATCH: Final[_Cuts] = {"batch": (0, "split")}
_BY_TOKEN: Final[_Cuts] = {**_BY_BATCH, "sequence": (0, "split")}
_BY_POINT: Final[_Cuts] = {**_BY_TOKEN, "space": (0, "split")}
_BY_BORDERS: Final[_Cuts] = {**_BY_BATCH, "space": (0, "halo")}
_LEAVES: Final[dict[str, tuple[_Cuts, dict[str, tuple[str, How]]]]] = {
    "Linear": (_BY_TOKEN, {"hidden": ("out_features", "columns")}),
    "Embedding": (_BY_TOKEN, {"hidden": ("embedding_dim", "columns"), "rows": ("num_embeddings", "sum")}),
    "EmbeddingBag": (_BY_BATCH, {"hidden": ("embedding_dim", "columns")}),
    "MultiheadAttention": ({**_BY_BATCH, "sequence": (0, "gather")}, {"heads": ("num_heads", "sum")}),
    **dict.fromkeys(("Conv2d", "Conv3d"), (_BY_BORDERS, {"hidden": ("out_channels", "columns")})),
    **dict.fromkeys(("MaxPool2d", "MaxPool3d", "AvgPool2d", "AvgPool3d"), (_BY_BORDERS, {})),
    **dict.fromkeys(("ReLU", "LeakyReLU", "GELU", "SiLU", "Tanh", "Dropout", "Identity"), (_BY_POINT, {})),
    **dict.fromkeys(("LayerNorm", "RMSNorm"), (_BY_TOKEN, {})),
    **dict.fromkeys(("GroupNorm", "Flatten", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d"), (_BY_BATCH, {})),
}
"""Axes of torch's modules: how the whole may be cut, and by which attribute the parameters."""


@dataclass(eq=False)
class _Value:
    """A tensor of the pass. `uses`: times, and names of modules."""

    tensor: tuple[tuple[int, ...], torch.dtype, int]  # shape, dtype and bytes
    born: int
    maker: str
    origin: int
    uses: list[tuple[int, str]] = field(default_factory=list)


@dataclass(eq=False)
class _Call:
    """A call of a module. `cut`: index of the input that is the only computed tensor; None if it is not."""

    module: nn.Module
    name: str
    number: int
    time: int
    inputs: list[_Value]
    parent: _Call | None
    kids: list[_Call] = field(default_factory=list)
    cut: int | None = None


class _Segment(NamedTuple):
    """A block: the calls in it, its input, and its first and last time."""

    members: list[_Call]
    input: _Value
    begin: int
    end: int


class _Loss(nn.Module):
    """A function as a module."""


class _Whole(nn.Module):
    """Model and loss as one module, and what a pass needs."""

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.model, self.has_loss = model, loss is not None
        self.loss = loss if isinstance(loss, nn.Module) else _Loss()
        pair = loss is not None and isinstance(batch, tuple | list) and len(batch) == 2
        inputs, self.target = (batch[0], batch[1:]) if pair else (batch, ())
        self.kwargs = inputs if isinstance(inputs, Mapping) else {}
        self.inputs = inputs if isinstance(inputs, tuple | list) else () if self.kwargs else (inputs,)
        if loss is not None and not isinstance(loss, nn.Module):
            self.loss.forward = loss  # type: ignore[method-assign]
        self.device = next((t.device for t in (*model.parameters(), *_tensors(batch))), torch.device("cpu"))

    def forward(self) -> Tensor:
        output: Any = self.model(*self.inputs, **self.kwargs)
        if self.has_loss:
            output = self.loss(output, *self.target)
        if not isinstance(output, Tensor):
            at, more = (
                ("loss", "") if self.has_loss else ("model", ", or `loss`, a function that makes one of it")
            )
            raise Unsupported(f"{at}: its output is a {type(output).__name__}; expected a tensor{more}")
        return output

    def run(self, enter: Callable[..., None], leave: Callable[..., None] | None = None) -> Tensor:
        """Run a pass, and tell of each module and its tensors."""

        def tell(module: nn.Module, args: Any, kwargs: Any) -> None:
            enter(module, _tensors((args, kwargs)))

        hooks = [each.register_forward_pre_hook(tell, with_kwargs=True) for each in self.modules()]
        hooks += [each.register_forward_hook(leave) for each in self.modules() if leave]
        try:
            output: Tensor = self()
        finally:
            for hook in hooks:
                hook.remove()
        return output

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
        return perf_counter()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore buffers and random numbers afterwards."""
        before = [(buffer, buffer.clone()) for buffer in self.buffers()]
        device = self.device
        devices, kind = ([], "cuda") if device.type == "cpu" else ([device.index or 0], device.type)
        with torch.random.fork_rng(devices, device_type=kind):
            try:
                yield
            finally:
                for buffer, kept in before:
                    buffer.data.copy_(kept)


# -- the chain ----------------------------------------------------------------------------------------------


class _Flow(TorchDispatchMode):
    """Follows the tensors of a pass, and cuts it into blocks."""

    def __init__(self, whole: _Whole) -> None:
        super().__init__()
        self.time = 0
        self.random: list[int] = []
        self.values: Any = WeakTensorKeyDictionary()
        self.all: list[_Value] = []
        self.calls: list[_Call] = []
        self._stack: list[_Call] = []
        self._names = {module: name.removeprefix("model.") for name, module in whole.named_modules()}
        for tensor in _tensors((whole.inputs, whole.kwargs, whole.target)):
            self._add(tensor, _BATCH)
        for tensor in whole.parameters():
            self._add(tensor, _PARAMETER)
        with self:
            result = whole.run(self._enter, lambda *_: self._stack.pop() and None)
        self.time += 1
        self.result = self._use(result)
        self.segments = self._segments()

    def _add(self, tensor: Tensor, origin: int) -> _Value:
        maker = self._stack[-1].name if self._stack else "the batch"
        facts = tuple(tensor.shape), tensor.dtype, _nbytes(tensor)
        self.values[tensor] = value = _Value(facts, self.time, maker, origin)
        self.all.append(value)
        return value

    def _use(self, tensor: Tensor) -> _Value:
        value: _Value = self.values.get(tensor) or self._add(tensor, _CONSTANT)
        if tensor.requires_grad and value.origin < _PARAMETER:  # made by code that the mode does not see
            value.origin = _COMPUTED
        value.uses.append((self.time, self._stack[-1].name if self._stack else "the caller"))
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        outputs = func(*args, **(kwargs or {}))
        self.time += 1
        origin = max((self._use(tensor).origin for tensor in _tensors((args, kwargs))), default=_CONSTANT)
        if torch.Tag.nondeterministic_seeded in func.tags and (
            "attention" not in func.name() or any(isinstance(arg, float) and arg > 0 for arg in args)
        ):  # attention draws only with dropout, its only positional float
            self.random.append(self.time)
            origin = _COMPUTED
        for tensor in _tensors(outputs):
            value = self.values.get(tensor) or self._add(tensor, origin)  # known: written in place
            value.origin = max(value.origin, _COMPUTED if origin == _PARAMETER else origin)
        return outputs

    def _enter(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        self.time += 1
        parent = self._stack[-1] if self._stack else None
        inputs = [self._use(tensor) for tensor in tensors]
        call = _Call(module, self._names[module], len(self.calls), self.time, inputs, parent)
        if parent is not None:
            parent.kids.append(call)
        self.calls.append(call)
        self._stack.append(call)

    def _alive(self, time: int) -> list[_Value]:
        """Return the computed tensors made before a time and used from then on."""
        return [
            v
            for v in self.all
            if v.origin == _COMPUTED and v.born < time and v.uses and v.uses[-1][0] >= time
        ]

    def _segments(self) -> list[_Segment]:
        for call in self.calls:
            wanted = self._alive(call.time) or [v for v in call.inputs if v.tensor[1].is_floating_point][:1]
            if len(wanted) == 1 and wanted[0] in call.inputs:
                call.cut = call.inputs.index(wanted[0])
        expanded: set[_Call] = set()
        starts = self._starts(self.calls[0], expanded)
        plain = [call for call in self.calls if call not in expanded]
        members = [call for call in plain if call.parent in expanded or call.parent is None]
        if starts[0].number > members[0].number:
            starts = [members[0], *starts]
        times = [0, *(call.time for call in starts[1:]), self.time + 1]
        found = []
        for start, begin, end in zip(starts, times, times[1:], strict=False):
            inside = [call for call in members if begin <= call.time < end]
            first = [start.inputs[start.cut]] if start.cut is not None else start.inputs
            found.append(_Segment(inside, first[0] if first else self.result, begin, end))
        return found

    def _starts(self, call: _Call, expanded: set[_Call]) -> list[_Call]:
        """Return the calls with which the blocks in a call begin."""
        is_model = call.number < 2  # the model, or it and the loss
        broken = [
            kid for kid in call.kids if kid.cut is None and any(v.origin == _COMPUTED for v in kid.inputs)
        ]
        if broken and is_model:
            alive, time = self._alive(broken[0].time), broken[0].time
            around = next((value for value in alive if value not in broken[0].inputs), alive[-1])
            raise Unsupported(
                f"{broken[0].name}: no block of a chain, since {len(alive)} tensors are in use when it begins, among "
                f"them {list(around.tensor[0])} of {around.maker}, which {next(n for t, n in around.uses if t >= time)} "
                "uses; expected no other than its input (skip connections inside of a module are fine)"
            )
        starts = [kid for kid in call.kids if kid.cut is not None or call.parent is None]
        whole = hasattr(call.module, "mcr_axes") or (
            not isinstance(call.module, nn.Sequential) and _inner(call.module)
        )
        if broken or not starts or (whole and not is_model):
            return [call]
        expanded.add(call)
        return [each for kid in starts for each in self._starts(kid, expanded)]


# -- measuring ----------------------------------------------------------------------------------------------


class _Pass:
    """A forward and a backward pass, and a forward pass without a graph. `saved`: whether it counts bytes."""

    def __init__(self, whole: _Whole, segments: Sequence[_Segment], *, saved: bool = False) -> None:
        self._cuts = {
            segment.members[0].number: (i, segment.members[0].cut) for i, segment in enumerate(segments) if i
        }
        self._whole, self._ready = whole, dict[int, float]()
        self.saved, self.saved_before = [[0] * len(segments) for _ in range(2)]
        self._keepers = {
            key: -1 for own in (*whole.parameters(), *whole.buffers()) for key, _ in _storages(own)
        }
        hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        with hooks if saved else nullcontext():
            result, self.forward = self._run()
        trained = {name: param for name, param in whole.named_parameters() if param.requires_grad}
        begin = whole.now()
        # Not `backward()`: hooks of ready gradients would communicate, and gradients of the program be changed.
        given = torch.autograd.grad(
            result, list(trained.values()), torch.ones_like(result), allow_unused=True
        )
        end = whole.now()
        self.gradients = dict(zip(trained.values(), given, strict=True))
        ready = [self._ready.get(index, end) for index in range(len(segments))]
        self.backward = [a - b for a, b in zip(ready, [*ready[1:], begin], strict=True)]
        with torch.no_grad():
            self.recompute = self._run()[1]

    def _run(self) -> tuple[Tensor, list[float]]:
        self._count, self._marks = 0, [self._whole.now()]
        result = self._whole.run(self._enter)
        self._marks.append(self._whole.now())
        if len(self._marks) != len(self.saved) + 1:
            raise Unsupported("model: it calls other modules from pass to pass; expected the same modules")
        return result, [b - a for a, b in pairwise(self._marks)]

    def _enter(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:  # noqa: ARG002
        index, cut = self._cuts.get(self._count, (0, None))
        self._count += 1
        if index:
            if cut is not None and tensors[cut].requires_grad:
                tensors[cut].register_hook(partial(self._is_ready, index))
            self._marks.append(self._whole.now())

    def _is_ready(self, index: int, gradient: Tensor) -> None:  # noqa: ARG002
        self._ready[index] = self._whole.now()

    def _keep(self, tensor: Tensor) -> Tensor:
        index = len(self._marks) - 1
        for key, nbytes in _storages(tensor):
            keeper = self._keepers.get(key)
            if keeper not in {-1, index}:
                (self.saved if keeper is None else self.saved_before)[index] += nbytes
                self._keepers[key] = index
        return tensor


def _state_bytes(
    optimizer: torch.optim.Optimizer | None, gradients: Mapping[Any, Tensor | None]
) -> dict[Any, int]:
    """Return the bytes of the optimizer's state by parameter.

    Where there is no state yet, a copy of the optimizer takes a step with zeros.
    """
    sizes: dict[Any, int] = {}
    for group in [] if optimizer is None else optimizer.param_groups:
        for param in group["params"]:
            state = None if optimizer is None else optimizer.state.get(param)
            if not state and (gradient := gradients.get(param)) is not None:
                twin: Any = copy.copy(optimizer)
                like = torch.zeros_like(param).requires_grad_()
                like.grad = torch.zeros_like(gradient)
                twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [like]}]
                twin.step()
                state = twin.state[like]
            sizes[param] = sum(map(_nbytes, _tensors(state)))
    return sizes


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _dense(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors of which a tensor consists."""
    return [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else [tensor]


def _nbytes(tensor: Tensor) -> int:
    return sum(each.numel() * each.element_size() for each in _dense(tensor))


def _storages(tensor: Tensor) -> list[tuple[int, int]]:
    """Return address and bytes of a tensor's storages."""
    return [(each._cdata, each.nbytes()) for part in _dense(tensor) for each in [part.untyped_storage()]]


# -- axes ---------------------------------------------------------------------------------------------------


def _inner(module: nn.Module) -> _Cuts:
    """Return how the parameters of attention, experts and MLPs may be cut."""
    kids = dict(module.named_children())
    linears = [kid for kid in kids.values() if isinstance(kid, nn.Linear)]
    names = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads")
    heads = [count for name in names if type(count := getattr(module, name, None)) is int]
    if heads and linears:
        return {"heads": (heads[0], "sum")}
    gates = [kid for name, kid in kids.items() if name in {"gate", "router"} and isinstance(kid, nn.Linear)]
    if gates and any(isinstance(kid, nn.ModuleList) for kid in kids.values()):
        return {"experts": (gates[0].out_features, "exchange")}
    if len(linears) in {2, 3} and all(each.out_features == linears[-1].in_features for each in linears[:-1]):
        return {"hidden": (linears[0].out_features, "sum")}
    return {}


def _cuts(call: _Call) -> _Cuts:
    """Return how a called module may be cut."""
    module = call.module
    if (declared := getattr(module, "mcr_axes", None)) is not None:
        return _declared(module, declared)
    for kind in type(module).__mro__:
        if kind.__name__ in _LEAVES:
            whole, inner = _LEAVES[kind.__name__]
            return {**whole, **{axis: (getattr(module, name), how) for axis, (name, how) in inner.items()}}
    cuts = _together([_cuts(kid) for kid in call.kids])
    if found := _inner(module):
        cuts = {axis: cut for axis, cut in cuts.items() if axis in _LONG} | found
        if "heads" in found and "sequence" in cuts:
            cuts["sequence"] = (0, "gather")
    return cuts


def _together(each: Sequence[_Cuts]) -> _Cuts:
    """Return how modules may be cut together: the whole as all of them, and the parameters of any."""
    both: _Cuts = {axis: cut for cuts in each for axis, cut in cuts.items() if cut[1] in {"sum", "exchange"}}
    for axis in _LONG:
        hows = [cuts[axis][1] for cuts in each if axis in cuts]
        if hows and len(hows) == len(each):
            both[axis] = (0, next((how for how in hows if how != "split"), "split"))
    return both


def _declared(module: nn.Module, declared: Any) -> _Cuts:
    cuts: _Cuts = {}
    for axis, cut in declared.items() if isinstance(declared, Mapping) else [("", declared)]:
        parts, how = (
            (0, cut) if axis in _LONG else cut if isinstance(cut, tuple) and len(cut) == 2 else (0, "")
        )
        if how not in get_args(How) or (whole_number(parts) or 0) < (axis not in _LONG):
            raise InvalidArgument(
                f"{type(module).__name__}.mcr_axes: {short({axis: cut})}; expected such as {{'batch': 'split', "
                f"'hidden': (1024, 'sum')}}, with one of {', '.join(get_args(How))}"
            )
        cuts[axis] = (int(parts), how)
    return cuts


def _axes(segment: _Segment, output: _Value) -> dict[str, Axis]:
    each = [_cuts(call) for call in segment.members]
    (shape, dtype, _), after = segment.input.tensor, len(output.tensor[0])
    places = {
        "batch": range(min(1, len(shape))),
        "sequence": range(1, 2 if len(shape) == 2 + dtype.is_floating_point else 1),
        "space": range(2, len(shape) if len(shape) > 3 else 2),
    }
    axes = {}
    for axis, (count, how) in (each[0] if len(each) == 1 else _together(each)).items():
        dims = tuple(places.get(axis, ()))
        parts = tuple(shape[dim] for dim in dims) if axis in _LONG else (count,)
        if (
            all(parts) and parts and (not after or max(dims, default=0) < after)
        ):  # an output of one element is a loss
            axes[axis] = Axis(dims=dims, parts=parts, how=how)
    return axes


# -- the profile --------------------------------------------------------------------------------------------


def profile(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Tensor] | None = None,
    repeats: int = 5,
) -> Profile:
    """Measure a model as a chain of blocks: times, bytes, and the axes along which each may be cut.

    Blocks are the finest sequence of modules in which each gets one tensor from those before; any may read data
    of the batch. `nn.Sequential` and other modules are taken apart where they are such a chain, but for
    attention, experts, MLPs and modules with `mcr_axes`: these name the axes of modules that are not torch's, as
    `{"batch": "split", "hidden": (1024, "sum")}`; see `Axis`. The model runs in its present mode, without
    communication; gradients, buffers and random numbers stay as they are.

    Args:
        model: not compiled. A parameter of several blocks needs `parameter.mcr_shared = True`.
        batch: the input, or with `loss` a pair of input and target. A tuple or dict as input holds arguments.
        optimizer: the optimizer of the model, to count its state.
        loss: a function of the output, and of the target if there is one; it is the last block.
        repeats: number of timed passes; times are medians.

    Returns:
        A `Profile`: `print` shows a table, `save` writes a file.

    Raises:
        InvalidArgument: an argument is wrong.
        Unsupported: the model is no chain; the text names the module and the tensor that goes around it.

    Example:
        ```python
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
        profile = mcr.profile(model, torch.ones(4, 8), repeats=1)
        assert [block.parameters for block in profile.blocks] == [1152, 0, 264]
        ```
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if (count := whole_number(repeats)) is None or count < 1:
        raise InvalidArgument(f"repeats: {repeats!r}; expected a number from 1")
    if any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in model.modules()):
        raise Unsupported("model: it is compiled; expected the model before torch.compile")
    if not any(param.requires_grad for param in model.parameters()):
        raise InvalidArgument("model: no parameter needs a gradient; expected one that is trained")
    whole = _Whole(model, batch, loss)
    with whole.unchanged(), torch.enable_grad():
        flow = _Flow(whole)
        first = _Pass(whole, flow.segments, saved=True)
        passes = [_Pass(whole, flow.segments) for _ in range(count)]
        states = _state_bytes(optimizer, first.gradients)
    names = {param: name.removeprefix("model.") for name, param in whole.named_parameters()}
    users = {param: _users(flow, param, names[param]) for param in names}
    outputs = [segment.input for segment in flow.segments[1:]] + [flow.result]
    blocks, taken = [], Counter[str]()
    for index, (segment, output) in enumerate(zip(flow.segments, outputs, strict=True)):
        times = {
            key: median(getattr(each, key)[index] for each in passes)
            for key in ("forward", "backward", "recompute")
        }
        own = [param for param, used in users.items() if used[:1] == [index]]
        inside = range(segment.begin, segment.end)
        data = [
            v for v in flow.all if v.origin == _BATCH and v.born < segment.begin and v is not segment.input
        ]
        name = " + ".join(dict.fromkeys(call.name for call in segment.members))
        taken[name] += 1
        blocks.append(Block(
            name=name if taken[name] == 1 else f"{name} ({taken[name]})",
            kind=" + ".join(dict.fromkeys(type(call.module).__name__ for call in segment.members)), **times,
            parameters=sum(map(_nbytes, own)), optimizer=sum(states.get(param, 0) for param in own),
            gradients=sum(_nbytes(g) for param in own if (g := first.gradients.get(param)) is not None),
            saved=first.saved[index], saved_before=first.saved_before[index],
            output=output.tensor[2], shape=output.tensor[0], dtype=dtype_name(output.tensor[1]),
            axes=_axes(segment, output),
            shared=tuple(names[param] for param, used in users.items() if len(used) > 1 and index in used),
            reads_batch=index > 0 and any(time in inside for value in data for time, _ in value.uses),
            random=any(time in inside for time in flow.random),
        ))  # fmt: skip
    trained = (
        (name, p.shape, dtype_name(p.dtype)) for name, p in model.named_parameters() if p.requires_grad
    )
    return Profile(
        version=VERSION, model=model_hash(trained), device=whole.device.type,
        input=flow.segments[0].input.tensor[0], state_of=None if optimizer is None else type(optimizer).__name__,
        unused=tuple(names[param] for param, used in users.items() if not used), blocks=tuple(blocks),
    )  # fmt: skip


def _users(flow: _Flow, param: Tensor, name: str) -> list[int]:
    """Return the blocks that use a parameter. Raises `Unsupported` if several do, and it is not marked."""
    times = {time for time, _ in flow.values[param].uses}
    times |= {c.time for c in flow.calls if any(p is param for p in c.module.parameters(recurse=False))}
    used = [i for i, s in enumerate(flow.segments) if any(s.begin <= time < s.end for time in times)]
    if len(used) > 1 and not getattr(param, "mcr_shared", False):
        first, second = (flow.segments[index].members[0].name for index in used[:2])
        raise Unsupported(
            f"{second}: it shares the parameter {name} with {first}; expected parameters of one block, or "
            "parameter.mcr_shared = True, and a plan that keeps these blocks together"
        )
    return used
