"""Profile a model: find its chain of blocks, and measure them.

In one pass, a dispatch mode follows each tensor from the operation that makes it to those that use it.
Tensors that depend on parameters or random numbers are *computed*; others are data that every rank can have.
The model may be cut where a module begins if its input is the only computed tensor used from then on. What a
parent computes between two such modules belongs to the first. All passes run the whole model, and mark times
at the cuts.

Long because what follows tensors, what cuts and what measures share its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from mcr_plus.bucketing.step import model_hash
from mcr_plus.core.kinds import dtype_name
from mcr_plus.errors import InvalidArgument, Unsupported, expect, short
from mcr_plus.plans.blocks import VERSION, Axis, ModelBlock, Profile
from mcr_plus.plans.language import positive
from mcr_plus.plans.measuring import (
    AxisSizes,
    MeasuredPass,
    add_seconds,
    past_bytes,
    state_bytes,
    turn_seconds,
)  # fmt: skip
from mcr_plus.plans.slices import can_slice
from mcr_plus.plans.whole import LossFunction, WholeModel, nbytes_of, rows_of, tensors_in

_FEW: Final = 4  # part of the batch whose times are measured, too
_CONSTANT, _BATCH, _PARAMETER, _COMPUTED = range(4)  # what a tensor depends on; the higher one counts


@dataclass(eq=False)
class _Value:
    """A tensor of the pass. `uses`: times, and names of modules."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    born: int
    maker: str
    origin: int
    uses: list[tuple[int, str]] = field(default_factory=list)


@dataclass(eq=False)
class _Call:
    """A call of a module. `cut`: index of the input that is the only computed tensor in use, if one is."""

    module: nn.Module
    name: str
    number: int
    time: int
    inputs: list[_Value]
    kids: list[_Call] = field(default_factory=list)
    cut: int | None = None


class _Segment(NamedTuple):
    """A block: the calls in it, its input, and its times."""

    members: list[_Call]
    input: _Value
    times: range


class _Flow(TorchDispatchMode):
    """Follows the tensors of a pass, and finds the blocks."""

    def __init__(self, whole: WholeModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.time = 0
        self.random: list[int] = []
        self.known: Any = WeakTensorKeyDictionary()
        self.values: list[_Value] = []
        self.calls: list[_Call] = []
        self._stack: list[_Call] = []
        self._names = {module: name.removeprefix("model.") for name, module in whole.named_modules()}
        for tensor in tensors_in((whole.inputs, whole.kwargs, whole.target)):
            self._add(tensor, _BATCH)
        for tensor in whole.parameters():
            self._add(tensor, _PARAMETER)
        with self:
            result = whole.run(self._enter, lambda *_: self._stack.pop() and None)
        self.time += 1
        self.result = self._use(result)
        if not result.requires_grad:
            raise InvalidArgument(
                "loss: its output needs no gradient; expected one that depends on parameters"
            )
        for call in self.calls:
            alive = self._alive(call)
            wanted = alive or [value for value in call.inputs if value.dtype.is_floating_point]
            if wanted and wanted[0] in call.inputs and len(alive) < 2:
                call.cut = call.inputs.index(wanted[0])

    def _add(self, tensor: Tensor, origin: int) -> _Value:
        maker = self._stack[-1].name if self._stack else "the batch"
        value = _Value(tuple(tensor.shape), tensor.dtype, nbytes_of(tensor), self.time, maker, origin)
        self.known[tensor] = value
        self.values.append(value)
        return value

    def _look(self, tensor: Tensor) -> _Value:
        value: _Value = self.known.get(tensor) or self._add(tensor, _CONSTANT)
        if tensor.grad_fn is not None:  # also if it was made by code that the mode does not see
            value.origin = _COMPUTED
        return value

    def _use(self, tensor: Tensor) -> _Value:
        value = self._look(tensor)
        value.uses.append((self.time, self._stack[-1].name if self._stack else "the caller"))
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.time += 1
        origin = max((self._use(tensor).origin for tensor in tensors_in((args, kwargs))), default=_CONSTANT)
        # Attention draws only with dropout, its only number that is given by position.
        drops = "attention" not in func.name() or any(isinstance(arg, float) and arg > 0 for arg in args)
        if torch.Tag.nondeterministic_seeded in func.tags and drops:
            self.random.append(self.time)
            origin = _COMPUTED
        for tensor in tensors_in(outputs):
            value = self.known.get(tensor) or self._add(tensor, origin)  # known: written in place
            value.origin = max(value.origin, _COMPUTED if origin == _PARAMETER else origin)
        return outputs

    def _enter(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        inputs = [self._look(tensor) for tensor in tensors]
        self.time += 1
        # A loss may leave out some; its operations show which it uses.
        if not isinstance(module, LossFunction):
            inputs = [self._use(tensor) for tensor in tensors]
        call = _Call(module, self._names[module], len(self.calls), self.time, inputs)
        if self._stack:
            self._stack[-1].kids.append(call)
        self.calls.append(call)
        self._stack.append(call)

    def _alive(self, call: _Call) -> list[_Value]:
        """Return the computed tensors made before a call and used from then on."""
        made = (value for value in self.values if value.origin == _COMPUTED and value.born < call.time)
        return [value for value in made if value.uses and value.uses[-1][0] >= call.time]

    def segments(self) -> list[_Segment]:
        """Return the blocks. Raises `Unsupported` if tensors go around modules of the model."""
        expanded: set[_Call] = set()
        starts = self._starts(self.calls[0], expanded)
        starts = [call for call in starts if call.cut is None or call.inputs[call.cut].shape]
        kids = [kid for call in expanded for kid in call.kids if kid not in expanded]
        members = sorted(kids, key=lambda call: call.time)
        starts = sorted({members[0], *starts}, key=lambda call: call.time)
        times = pairwise([0, *(call.time for call in starts[1:]), self.time + 1])
        return [
            _Segment(
                [call for call in members if begin <= call.time < end],
                (start.inputs or self.values)[start.cut or 0], range(begin, end),
            )
            for start, (begin, end) in zip(starts, times, strict=True)
        ]  # fmt: skip

    def _starts(self, call: _Call, expanded: set[_Call]) -> list[_Call]:
        """Return the calls with which the blocks in a call begin."""
        outer = call.number < 2  # the model, or it with the loss
        if call.number == 0:
            self._starts(self.calls[1], set())  # what is wrong in the model comes before the loss
        broken = [k for k in call.kids if k.cut is None and any(v.origin == _COMPUTED for v in k.inputs)]
        if broken and outer:
            alive, kid = self._alive(broken[0]), broken[0]
            around = next((value for value in alive if value not in kid.inputs), alive[-1])
            user = next(name for time, name in around.uses if time >= kid.time)
            raise Unsupported(
                f"{kid.name}: no block of a chain: the tensor {list(around.shape)} that {around.maker} makes "
                f"goes around it, to {user}; expected its input alone: put modules that run beside each "
                "other, and what joins them, into one module; `mcr.wrap` and `mcr.fsdp` take any model"
            )
        starts = [kid for kid in call.kids if kid.cut is not None or call.number == 0]
        one = type(call.module) is not nn.Sequential and inner_axes(call.module)
        if broken or not starts or ((one or hasattr(call.module, "mcr_axes")) and not outer):
            return [call]
        expanded.add(call)
        return [each for kid in starts for each in self._starts(kid, expanded)]


# -- axes ---------------------------------------------------------------------------------------------------

_Cuts = dict[str, Any]
"""How a module may be cut, by axis; (number of parts, how) for axes of its parameters."""
_LONG: Final = ("batch", "sequence", "space")
_TOKENS: Final = {"batch": "split", "sequence": "split"}
_SPACE: Final = {"batch": "split", "space": "halo"}
_LOSSES: Final = ("LossFunction", "CrossEntropyLoss", "MSELoss", "L1Loss", "BCEWithLogitsLoss")
_POINTS: Final = {
    "ReLU", "LeakyReLU", "ELU", "GELU", "SiLU", "Tanh", "Sigmoid", "Softplus", "Identity", "Dropout",
}  # fmt: skip
_LEAVES: Final[dict[str, _Cuts]] = {
    "Linear": {**_TOKENS, "hidden": ("out_features", "columns")},
    "Embedding": {**_TOKENS, "hidden": ("embedding_dim", "columns"), "rows": ("num_embeddings", "sum")},
    "EmbeddingBag": {"batch": "split", "hidden": ("embedding_dim", "columns")},
    "MultiheadAttention": {"batch": "split", "sequence": "gather"},  # not taken apart: no cut of its heads
    **{f"Conv{dims}d": {**_SPACE, "hidden": ("out_channels", "columns")} for dims in (2, 3)},
    **{f"{kind}Pool{dims}d": _SPACE for kind in ("Max", "Avg") for dims in (2, 3)},
    **{name: {**_TOKENS, "space": "split"} for name in sorted(_POINTS)},
    **{f"Adaptive{kind}Pool{dims}d": {"batch": "split"} for kind in ("Max", "Avg") for dims in (1, 2, 3)},
    **{name: {"batch": "split"} for name in ("GroupNorm", "Flatten")},
    "LayerNorm": _TOKENS, "RMSNorm": _TOKENS, **{name: {"batch": "split"} for name in _LOSSES},
}  # fmt: skip
"""Cuts of classes, and the attributes with the numbers of parts."""


HEADS: Final = (
    "heads", "num_heads", "n_heads", "n_head", "num_attention_heads", "kv_heads", "num_kv_heads",
    "n_kv_heads", "num_key_value_heads",
)  # fmt: skip
"""Attributes of attention with numbers of heads, which are divided together."""


def inner_axes(module: nn.Module) -> _Cuts:
    """Return how the parameters of attention, experts and MLPs may be cut."""
    kids = dict(module.named_children())
    linears = [kid for kid in kids.values() if isinstance(kid, nn.Linear)]
    counts = [count for name in HEADS if type(count := getattr(module, name, None)) is int]
    if linears and counts:
        return {"heads": (gcd(*counts), "sum")}  # heads that share keys and values stay together
    gate = kids.get("gate", kids.get("router"))
    if isinstance(gate, nn.Linear) and any(isinstance(kid, nn.ModuleList) for kid in kids.values()):
        return {"experts": (gate.out_features, "exchange")}
    others = {type(kid).__name__ for kid in kids.values() if kid not in linears}
    fits = all(each.out_features == linears[-1].in_features for each in linears[:-1])
    if len(linears) in {2, 3} and fits and others <= _POINTS:
        return {"hidden": (linears[0].out_features, "sum")}
    return {}


def _cuts(call: _Call) -> _Cuts:
    """Return how a called module may be cut: as declared, as its class, or as its parts allow."""
    if hasattr(call.module, "mcr_axes"):
        return dict(call.module.mcr_axes)  # type: ignore[arg-type]
    if known := next((kind.__name__ for kind in type(call.module).__mro__ if kind.__name__ in _LEAVES), None):
        leaf = _LEAVES[known].items()
        return {axis: cut if axis in _LONG else (getattr(call.module, cut[0]), cut[1]) for axis, cut in leaf}
    cuts, inner = _together([_cuts(kid) for kid in call.kids]), inner_axes(call.module)
    if "heads" in inner and "sequence" in cuts:
        cuts["sequence"] = "gather"
    return {**cuts, **inner}


def _together(each: Sequence[_Cuts]) -> _Cuts:
    """Return how modules may be cut together: as all of them along the input, and as any inside."""
    both: _Cuts = {}
    for axis in _LONG:
        hows = [cuts[axis] for cuts in each if axis in cuts]
        if hows and len(hows) == len(each):
            both[axis] = next((how for how in hows if how != "split"), "split")
    inner = [(axis, cut) for cuts in each for axis, cut in cuts.items() if axis not in _LONG]
    inner.sort(key=lambda pair: pair[1][0])  # of several embeddings, the largest is cut
    for axis, cut in inner:
        if cut[1] == "sum" and axis != "rows" and axis in both:
            both[axis] = gcd(both[axis][0], cut[0]), "sum"  # a cut goes through all of them
        elif cut[1] in {"sum", "exchange"}:
            both[axis] = cut
    return both


def _divided(module: nn.Module) -> list[str]:
    """Return the axes of parameters along which a module is cut as a whole."""
    cuts = getattr(module, "mcr_axes", None) or inner_axes(module)
    return [axis for axis in cuts if axis not in _LONG]


def _bytes_of_leaves(calls: Sequence[_Call], rows: int | None) -> int:
    """Return the bytes of parameters, with `rows` those of embeddings of so many rows."""
    modules = {module for call in calls for module in call.module.modules()}
    own = [module for module in modules if rows in (None, getattr(module, "num_embeddings", 0))]
    return sum(nbytes_of(param) for module in own for param in module.parameters(recurse=False))


def _axes(
    segment: _Segment, output: _Value, sizes: Mapping[str, AxisSizes], seconds: float
) -> dict[str, Axis]:
    """Return the axes of a block, of which a pass without a graph has taken `seconds`."""
    # A function of a scalar is one of the whole batch's loss.
    calls = [call for call in segment.members if not call.inputs or call.inputs[call.cut or 0].shape]
    each = [_cuts(call) for call in calls]
    shape, features = segment.input.shape, int(segment.input.dtype.is_floating_point)
    dims_of = {
        "batch": range(1), "sequence": range(1, 2 if len(shape) == 2 + features else 1),
        "space": range(2, len(shape) if len(shape) > 3 else 2),
    }  # fmt: skip
    axes = {}
    for axis, cut in (each[0] if len(each) == 1 else _together(each)).items():
        dims = tuple(dims_of.get(axis, ()))
        if axis in _LONG and (not dims or (output.shape and len(output.shape) <= max(dims))):
            continue  # an output without dimensions is a loss
        try:
            count, how = ((), cut) if axis in _LONG else ((cut[0],), cut[1])
            own: dict[str, Any] = sizes[axis]._asdict() if axis in sizes else {}
            if own:
                own["work"] = min(own.pop("seconds") / seconds, 1.0)
            elif count:
                params = _bytes_of_leaves(calls, count[0] if axis == "rows" else None)
                own = {"params": params, "input": output.nbytes if how == "sum" else 0}
            parts = count or tuple(shape[dim] for dim in dims)
            axes[axis] = Axis(dims=dims, parts=parts, how=how, **own)
        except (ValueError, TypeError, LookupError):
            raise InvalidArgument(
                f"{segment.members[0].name}: its axis {axis}: {short(cut)}; expected mcr_axes such as "
                "{'batch': 'split', 'hidden': (1024, 'sum')}"
            ) from None
    return axes


# -- the profile --------------------------------------------------------------------------------------------


def profile(
    model: nn.Module, batch: Any, *, optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Tensor] | None = None, repeats: int = 5,
) -> Profile:  # fmt: skip
    """Measure a model as a chain of blocks: times, bytes, and the axes along which each may be cut.

    Blocks are the finest sequence of modules in which each gets one tensor from those before; any may read
    data of the batch. `nn.Sequential` and other modules are taken apart where they are such a chain, but for
    attention, experts, MLPs and modules with `mcr_axes`, which names the axes of modules that are not known:
    `{"batch": "split", "hidden": (1024, "sum")}`, see `Axis`. The model runs in its present mode, without
    communication of gradients; gradients, buffers and random numbers stay as they are.

    Args:
        model: not compiled. A parameter of several blocks needs `parameter.mcr_shared = True`.
        batch: the input, or with `loss` a pair of input and target. A tuple or dict as input holds arguments.
        optimizer: the optimizer of the model, to count its state.
        loss: a function of the output, and of the target if there is one; it is the last block.
        repeats: number of timed passes; times are medians.

    Raises:
        InvalidArgument: an argument is wrong.
        Unsupported: the model is no chain; the text names the module, and the tensor that goes around it.

    Example:
        ```python
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
        profile = mcr.profile(model, torch.ones(4, 8), repeats=1)
        assert [block.parameters for block in profile.blocks] == [1152, 0, 264]
        ```
    """
    if not tensors_in(batch):
        raise InvalidArgument(f"batch: {short(batch)}; expected a tensor, or a tuple or dict with one")
    if not isinstance(model, nn.Module) or not any(param.requires_grad for param in model.parameters()):
        raise InvalidArgument(f"model: {short(model)}; expected a module with parameters that need gradients")
    if optimizer is not None:
        expect("optimizer", optimizer, torch.optim.Optimizer)
    if loss is not None:
        expect("loss", loss, Callable)  # type: ignore[arg-type]
    count = positive(repeats, "repeats")
    if any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in model.modules()):
        raise Unsupported("model: it is compiled; expected the model before torch.compile")
    whole = WholeModel(model, loss)
    whole.take(batch)
    with whole.unchanged(), torch.enable_grad():
        flow = _Flow(whole)
        segments = flow.segments()
        names = {param: name.removeprefix("model.") for name, param in whole.named_parameters()}
        users = _users(flow, segments, names)
        begins = [(segment.members[0].number, segment.members[0].cut) for segment in segments]
        first = MeasuredPass(whole, begins, _divided)
        passes = [MeasuredPass(whole, begins) for _ in range(count)]
        past = past_bytes(whole)
        outputs = [*(segment.input for segment in segments[1:]), flow.result]
        axes = [_axes(*each) for each in zip(segments, outputs, first.by_axis, first.recompute, strict=True)]
        items = segments[0].input.shape[0] if all("batch" in each for each in axes) else 0
        few = max(items // _FEW, 1)
        whole.take(rows_of(batch, items, 0, few))
        try:
            small = [MeasuredPass(whole, begins) for _ in range(count if items > few else 0)]
        except (RuntimeError, ValueError, IndexError) as error:
            raise InvalidArgument(
                f"batch: the model fails with {few} of its {items} items: {short(str(error))}; tensors of "
                f"{items} rows are taken for data of the items"
            ) from error
        turn = turn_seconds()
        added = {param: add_seconds(whole, each) for param, each in first.gradients.items()}
        states = state_bytes(optimizer, first.gradients) if optimizer is not None else {}
        _drop_wrong(whole, segments, axes)
        if items > 1 and not outputs[-1].shape and not flow.random and not _is_mean(whole, batch, items):
            del axes[-1]["batch"]
    blocks = []
    for index, (segment, output) in enumerate(zip(segments, outputs, strict=True)):
        own = [param for param, used in users.items() if used[:1] == [index]]
        begin = segment.times[0]
        data = [v for v in flow.values if v.origin == _BATCH and v.born < begin and v is not segment.input]
        name = " + ".join(dict.fromkeys(call.name for call in segment.members))
        first_call = segment.members[0]
        count = sum(call.module is first_call.module for call in flow.calls[: first_call.number + 1])
        blocks.append(ModelBlock(
            name=name if count == 1 else f"{name} ({count})",
            kind=" + ".join(dict.fromkeys(type(call.module).__name__ for call in segment.members)),
            forward=median(each.forward[index] for each in passes),
            backward=median(each.backward[index] for each in passes),
            forward_fixed=_fixed([each.forward[index] for each in passes],
                                 [each.forward[index] for each in small], few / max(items, 1)),
            backward_fixed=_fixed([each.backward[index] for each in passes],
                                  [each.backward[index] for each in small], few / max(items, 1)),
            recompute=median(each.recompute[index] for each in passes),
            params={names[param]: nbytes_of(param) for param in own},
            optimizer=sum(states.get(param, 0) for param in own),
            gradients=sum(nbytes_of(first.gradients[param]) for param in own if param in first.gradients),
            saved=first.saved[index], saved_before=first.saved_before[index],
            transient=first.transient[index], through=first.through[index],
            output=output.nbytes, shape=output.shape, dtype=dtype_name(output.dtype),
            axes=axes[index],
            shared=tuple(names[param] for param, used in users.items() if len(used) > 1 and index in used),
            reads_batch=index > 0 and any(time in segment.times for v in data for time, _ in v.uses),
            random=any(time in segment.times for time in flow.random),
            detached=not first.needs_gradient.get(index, True),
            accumulate=sum(added.get(param, 0.0) for param in own),
            past=sum(past.get(part, 0) for call in segment.members for part in call.module.modules()),
        ))  # fmt: skip
    trained = (
        (name, p.shape, dtype_name(p.dtype)) for name, p in model.named_parameters() if p.requires_grad
    )
    return Profile(
        version=VERSION, model=model_hash(trained), device=whole.device.type, input=segments[0].input.shape,
        state_of=None if optimizer is None else type(optimizer).__name__,
        unused=tuple(names[param] for param, used in users.items() if not used), turn=turn,
        sliced=can_slice(model, blocks), blocks=tuple(blocks),
    )  # fmt: skip


def _drop_wrong(whole: WholeModel, segments: Sequence[_Segment], axes: Sequence[dict[str, Axis]]) -> None:
    """Drop axes of attention and MLPs whose parts do not add up, and of experts that cannot be dealt."""
    from mcr_plus.plans.cutting import adds_up

    calls: dict[nn.Module, tuple[Any, Any]] = {}
    right: dict[str, bool] = {}  # layers that look alike are tried once

    def leave(module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        if inner_axes(module) and not hasattr(module, "mcr_axes"):
            calls[module] = args, kwargs

    with torch.no_grad():
        whole.run(lambda *_: None, leave)
    for segment, own in zip(segments, axes, strict=True):
        for module in {module for call in segment.members for module in call.module.modules()} & calls.keys():
            for axis, (count, how) in inner_axes(module).items():
                key = f"{axis} {_likeness(module)}"
                if how == "exchange":
                    right[key] = hasattr(module, "mcr_cut")
                elif key not in right:
                    right[key] = count < 2 or adds_up(module, axis, *calls[module])
                if not right[key]:
                    own.pop(axis, None)


def _likeness(module: nn.Module) -> list[Any]:
    """Return what tells a module from others: its code, and attributes such as a flag for a skip."""
    common = vars(nn.Module())
    own = [{k: v for k, v in vars(part).items() if k not in common} for part in module.modules()]
    return [module, *map(type, module.modules()), own]


def _is_mean(whole: WholeModel, batch: Any, items: int) -> bool:
    """Return whether the loss of a batch is the mean of those of two parts, weighted by their items."""
    found, first = [], items // 3 or 1
    for low, high in ((0, items), (0, first), (first, items)):
        whole.take(rows_of(batch, items, low, high))
        with torch.no_grad():
            loss = whole()
        found.append(float(loss) * (high - low) / items)
    close: float = max(torch.finfo(loss.dtype).eps ** 0.5, 1e-3)
    return abs(found[0] - found[1] - found[2]) <= close * (abs(found[1]) + abs(found[2]))


def _fixed(whole: Sequence[float], small: Sequence[float], share: float) -> float:
    """Return the part of a time that does not depend on the size, from those of a share of the batch."""
    if not small:
        return 0.0
    fixed = (median(small) - share * median(whole)) / (1 - share)
    return min(max(fixed, 0.0), median(whole))


def _users(flow: _Flow, segments: Sequence[_Segment], names: Mapping[Any, str]) -> dict[Any, list[int]]:
    """Return the blocks that use each parameter. Raises `Unsupported` if several do, and it is not marked."""
    times = {param: {time for time, _ in flow.known[param].uses} for param in names}
    for call in flow.calls:
        for param in call.module.parameters(recurse=False):  # also of modules that the mode does not see into
            times[param].add(call.time)
    users = {
        param: [index for index, segment in enumerate(segments) if not used.isdisjoint(segment.times)]
        for param, used in times.items()
    }
    for param, used in users.items():
        if len(used) > 1 and not getattr(param, "mcr_shared", False):
            first, second = (segments[index].members[0].name for index in used[:2])
            raise Unsupported(
                f"{second}: it shares {names[param]} with {first}; expected parameters of one block; "
                "the parameter's `mcr_shared = True`, set before `mcr.profile`, allows it"
            )
    return users
