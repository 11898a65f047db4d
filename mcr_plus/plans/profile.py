"""Profile a model: find its chain of blocks, and measure them.

In one pass, a dispatch mode follows each tensor from the operation that makes it to those that use it. A tensor
is *computed* if it depends on a parameter or on random numbers; all others are data that any rank can have. The
model can be cut where a module begins if its input is the only computed tensor that is still used. Blocks lie
between such cuts, and what a parent computes between two modules belongs to the first of them. All passes run
the whole model and only mark the time at the cuts, so the blocks' times add up to the pass.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple, get_args

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from mcr_plus.bucketing.step import model_hash
from mcr_plus.core.kinds import dtype_name
from mcr_plus.core.units import whole_number
from mcr_plus.errors import InvalidArgument, Unsupported, short
from mcr_plus.plans.blocks import Axis, Block, How, Profile

_HOWS: Final = get_args(How)
_HEADS: Final = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads")
_GATES: Final = ("gate", "router")
_STRENGTH: Final = ("split", "halo", "gather", "exchange")  # of several, the last is that of the whole


class _Value:
    """A tensor of the pass: who made it and when, and who used it when."""

    def __init__(self, tensor: torch.Tensor, born: int, maker: str, computed: bool) -> None:
        self.shape, self.dtype, self.nbytes = tuple(tensor.shape), tensor.dtype, _nbytes(tensor)
        self.born, self.maker, self.computed = born, maker, computed
        self.uses: list[tuple[int, str]] = []


class _Call:
    """A call of a module. `cut`: which of its inputs is the only computed tensor in use; None if it has none."""

    def __init__(self, module: Any, name: str, number: int, time: int, inputs: list[_Value]) -> None:
        self.module, self.name, self.number, self.time, self.inputs = module, name, number, time, inputs
        self.kids: list[_Call] = []
        self.parent: _Call | None = None
        self.drawn = b""  # state of the random numbers at this time
        self.cut: int | None = None


class _Flow(TorchDispatchMode):
    """Follows the tensors of a pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {id(param): name for name, param in model.named_parameters()}
        self.used: dict[str, set[int]] = defaultdict(set)  # parameter → times
        self.values: list[_Value] = []
        self.calls: list[_Call] = []
        self.stack: list[_Call] = []
        self.time = 0
        self._known: Any = WeakTensorKeyDictionary()

    def use(self, tensor: torch.Tensor) -> _Value | None:
        """Note a use at this time; return what is known of the tensor, None for parameters."""
        if (name := self.parameters.get(id(tensor))) is not None:
            self.used[name].add(self.time)
            return None
        value = self._known.get(tensor) or self._made(tensor, 0, False)
        value.computed |= tensor.requires_grad  # outputs of functions that the mode does not see
        value.uses.append((self.time, self.stack[-1].name if self.stack else "loss"))
        return value

    def _made(self, tensor: torch.Tensor, born: int, computed: bool) -> _Value:
        value = _Value(tensor, born, self.stack[-1].name if self.stack else "loss", computed)
        self._known[tensor] = value
        self.values.append(value)
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        outputs = func(*args, **(kwargs or {}))
        self.time += 1
        inputs = [self.use(tensor) for tensor in _tensors((args, kwargs))]
        computed = torch.Tag.nondeterministic_seeded in func.tags
        computed |= any(value is None or value.computed for value in inputs)
        for tensor in _tensors(outputs):
            if (value := self._known.get(tensor)) is None:
                self._made(tensor, self.time, computed)
            else:  # written in place
                value.computed |= computed
        return outputs

    def enter(self, module: Any, name: str, tensors: Sequence[torch.Tensor], drawn: bytes = b"") -> None:
        self.time += 1
        found = [self.use(tensor) for tensor in tensors]
        call = _Call(module, name, len(self.calls), self.time, [each for each in found if each is not None])
        call.drawn = drawn
        if self.stack:
            call.parent = self.stack[-1]
            call.parent.kids.append(call)
        self.calls.append(call)
        self.stack.append(call)

    def alive(self, time: int) -> list[_Value]:
        """Return the computed tensors made before a time and used from then on."""
        return [v for v in self.values if v.computed and v.born < time and v.uses and v.uses[-1][0] >= time]


class _Segment(NamedTuple):
    """A block: the modules called in it, in `begin` to `end`, and its input. `at`: call and input at its cut."""

    name: str
    members: list[_Call]
    begin: int
    end: int
    input: _Value | None
    at: tuple[int, int]
    drawn: bool


class _Task:
    """A model, and the arguments of a pass."""

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[..., torch.Tensor] | None) -> None:
        self.model, self.loss = model, loss
        pair = loss is not None and isinstance(batch, tuple | list) and len(batch) == 2
        inputs, self.target = (batch[0], tuple(batch[1:])) if pair else (batch, ())
        self.kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
        self.args = () if self.kwargs else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        self.names = {id(module): name or "model" for name, module in model.named_modules()}
        self.parameters = dict(model.named_parameters())
        self.trained = {name: param for name, param in self.parameters.items() if param.requires_grad}
        first = next(iter((*self.parameters.values(), *_tensors(batch))), torch.empty(0))
        self.device = first.device

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
        return perf_counter()

    def drawn(self) -> bytes:
        """Return the states of the generators that the model may draw from."""
        module = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        states = [torch.get_rng_state(), *([module.get_rng_state(self.device)] if module else [])]
        return b"".join(state.numpy().tobytes() for state in states)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore buffers and random numbers."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        kind = self.device.type
        devices = [] if kind == "cpu" else [self.device.index or 0]
        with torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind):
            try:
                yield
            finally:
                with torch.no_grad():
                    for buffer, before in buffers:
                        buffer.copy_(before)

    def forward(
        self,
        enter: Callable[[Any, str, Sequence[torch.Tensor]], None],
        leave: Callable[[], Any] = lambda: None,
    ) -> torch.Tensor:
        """Run a pass, and tell of every call of a module."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            enter(module, self.names[id(module)], _tensors((args, kwargs)))

        def after(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 - a hook
            leave()

        hooks = [h for m in self.model.modules() for h in (
            m.register_forward_pre_hook(before, with_kwargs=True), m.register_forward_hook(after))]  # fmt: skip
        try:
            output = self.model(*self.args, **self.kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        if self.loss is not None:
            if isinstance(output, torch.Tensor):
                enter(self.loss, "loss", [output])
            output = self.loss(output, *self.target)
        if not isinstance(output, torch.Tensor):
            what = "loss" if self.loss is not None else "model"
            raise Unsupported(
                f"mcr.profile: {what}: its output is a {type(output).__name__}; expected a tensor"
                + ("" if self.loss is not None else ", or `loss`, a function of the output that returns one")
            )
        return output


# -- the chain ----------------------------------------------------------------------------------------------


def _chain(task: _Task) -> tuple[_Flow, list[_Segment], _Value]:
    """Find the blocks of a model. Raises `Unsupported` if tensors go around its modules."""
    flow = _Flow(task.model)

    def enter(module: Any, name: str, tensors: Sequence[torch.Tensor]) -> None:
        flow.enter(module, name, tensors, task.drawn())

    with flow:
        result = task.forward(enter, lambda: flow.stack.pop())
        flow.stack.clear()
        flow.time += 1
        last = flow.use(result)
    end_state = task.drawn()
    assert last is not None, "the output of a model is no parameter"
    for call in flow.calls:
        alive = flow.alive(call.time)
        wanted = alive or [v for v in call.inputs if v.dtype.is_floating_point][:1]
        if len(wanted) == 1 and wanted[0] in call.inputs:
            call.cut = call.inputs.index(wanted[0])
    root, expanded = flow.calls[0], set[_Call]()
    starts = _expand(root, expanded, [call for call in flow.calls if call.parent is None][1:], flow)
    if starts and not any(c.time < starts[0].time and c not in expanded for c in flow.calls):
        starts = starts[1:]  # nothing but preparation comes before
    times = [0, *(call.time for call in starts), flow.time]
    names: set[str] = set()
    segments = []
    for start, begin, end in zip([None, *starts], times, times[1:], strict=False):
        inside = [c for c in flow.calls if begin <= c.time < end and c not in expanded]
        members = [c for c in inside if c.parent is None or c.parent in expanded]
        name = again = " + ".join(dict.fromkeys(c.name for c in members))
        while again in names:
            again = f"{name} ({1 + int(again[len(name) + 2 : -1] or 1)})"
        names.add(again)
        cut = start.cut if start is not None else None
        first = start.inputs[cut] if start is not None and cut is not None else _first(members)
        place = (start.number, cut) if start is not None and cut is not None else (0, 0)
        states = [call.drawn for call in flow.calls if begin <= call.time <= end] + [end_state] * (
            end == flow.time
        )
        segments.append(_Segment(again, members, begin, end, first, place, len(set(states)) > 1))
    return flow, segments, last


def _first(members: Sequence[_Call]) -> _Value | None:
    return next((value for call in members for value in call.inputs), None)


def _expand(call: _Call, expanded: set[_Call], after: Sequence[_Call], flow: _Flow) -> list[_Call]:
    """Return the calls at which the blocks within a call begin. `after`: further calls, of the loss."""
    kids = [*call.kids, *after]
    broken = next((kid for kid in kids if kid.cut is None and any(v.computed for v in kid.inputs)), None)
    root = call.parent is None
    if broken is not None and root:
        raise Unsupported(_refusal(broken, flow))
    starts = [kid for kid in kids if kid.cut is not None]
    if broken is not None or not (starts or (root and kids)) or (not root and _inner(call.module)):
        return [call]
    expanded.add(call)
    return [each for kid in starts for each in _expand(kid, expanded, (), flow)]


def _refusal(call: _Call, flow: _Flow) -> str:
    """Say which tensor goes around a module."""
    alive = flow.alive(call.time)
    around = next((v for v in alive if v not in call.inputs), alive[-1])
    user = next(name for time, name in around.uses if time >= call.time)
    return (
        f"mcr.profile: {call.name} is not a block of a chain: {len(alive)} tensors are in use when it begins, "
        f"among them {list(around.shape)} of {around.maker}, which {user} uses; expected its input alone (a "
        "skip connection inside of one module is fine)"
    )


# -- measuring ----------------------------------------------------------------------------------------------


def _marked(
    task: _Task, segments: Sequence[_Segment], reached: Callable[[int, torch.Tensor], None]
) -> torch.Tensor:
    """Run a pass, and tell of the tensor with which each block but the first begins."""
    cuts = {segment.at: index for index, segment in enumerate(segments) if index}
    calls = {number: (index, position) for (number, position), index in cuts.items()}
    count = 0

    def enter(module: Any, name: str, tensors: Sequence[torch.Tensor]) -> None:  # noqa: ARG001
        nonlocal count
        if count in calls:
            index, position = calls[count]
            reached(index, [t for t in tensors if id(t) not in params][position])
        count += 1

    params = {id(param) for param in task.parameters.values()}
    return task.forward(enter)


class _Saved:
    """Bytes that autograd keeps, by block."""

    def __init__(self, task: _Task, blocks: int) -> None:
        own = [*task.parameters.values(), *task.model.buffers()]
        self._left_out = {key for tensor in own for key, _ in _storages(tensor)}
        self._seen: dict[int, int] = {}  # storage → latest block that keeps it
        self.block = 0
        self.new, self.before = [0] * blocks, [0] * blocks

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        for key, nbytes in _storages(tensor):
            if key not in self._left_out and self._seen.get(key) != self.block:
                (self.before if key in self._seen else self.new)[self.block] += nbytes
                self._seen[key] = self.block
        return tensor


def _gradients(task: _Task, result: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Run the backward pass; hooks of gradients that start communication are not called."""
    given = torch.autograd.grad(
        result, list(task.trained.values()), torch.ones_like(result), allow_unused=True
    )
    return dict(zip(task.trained, given, strict=True))


def _kept(task: _Task, segments: Sequence[_Segment]) -> tuple[_Saved, dict[str, torch.Tensor | None]]:
    saved = _Saved(task, len(segments))
    with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
        result = _marked(task, segments, lambda index, _: setattr(saved, "block", index))
    return saved, _gradients(task, result)


def _times(task: _Task, segments: Sequence[_Segment]) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of the blocks: forward, backward, and forward without a graph."""
    forward, ready = [task.now()], dict[int, float]()

    def reached(index: int, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: ready.setdefault(index, task.now()) and None)
        forward.append(task.now())

    result = _marked(task, segments, reached)
    forward.append(task.now())
    begin = task.now()
    _gradients(task, result)
    ended = task.now()
    marks = [ready.get(index, ended) for index in range(len(segments))] + [begin]
    with torch.no_grad():
        again = [task.now()]
        _marked(task, segments, lambda *_: again.append(task.now()))
        again.append(task.now())
    if not len(forward) == len(again) == len(marks):
        raise Unsupported("mcr.profile: the model calls other modules from pass to pass; expected the same")
    pairs = [zip(each, each[1:], strict=False) for each in (forward, marks, again)]
    ahead, back, bare = ([abs(b - a) for a, b in pair] for pair in pairs)
    return ahead, back, bare


def _state_bytes(optimizer: torch.optim.Optimizer | None, given: Mapping[Any, Any]) -> dict[int, int]:
    """Return the bytes of the optimizer's state by id of the parameter. `given`: gradients by parameter.

    Where there is no state yet, a copy of the optimizer takes a step with zeros.
    """
    sizes: dict[int, int] = {}
    for group in [] if optimizer is None else optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param) if optimizer is not None else None
            if not state and (grad := given.get(param)) is not None:
                twin: Any = copy.copy(optimizer)
                like = torch.zeros_like(param).requires_grad_()
                like.grad = torch.zeros_like(grad)
                twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [like]}]
                twin.step()
                state = twin.state[like]
            sizes[id(param)] = sum(map(_nbytes, _tensors(state)))
    return sizes


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors of which a tensor consists."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout == torch.strided else []


def _nbytes(tensor: torch.Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in _parts(tensor))


def _storages(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return address and bytes of the storages of a tensor."""
    storages = [part.untyped_storage() for part in _parts(tensor)]
    return [(storage._cdata, storage.nbytes()) for storage in storages]


# -- axes ---------------------------------------------------------------------------------------------------

_Cuts = dict[str, tuple[int, How]]
"""How a module may be cut by axis, and into how many parts; 0: as long as the block's input."""


def _split(*names: str) -> _Cuts:
    return dict.fromkeys(names, (0, "split"))


def _inner(module: Any) -> _Cuts:
    """Return the cuts of a module's parameters: those declared, or of attention, experts and MLPs."""
    if (declared := getattr(module, "mcr_axes", None)) is not None:
        return _declared(module, declared)
    if not isinstance(module, nn.Module) or isinstance(module, nn.Sequential):
        return {}
    kids = dict(module.named_children())
    linears = [kid for kid in kids.values() if isinstance(kid, nn.Linear)]
    heads = [getattr(module, name, None) for name in _HEADS]
    if linears and (found := [n for n in heads if isinstance(n, int)]):
        return {"heads": (found[0], "sum")}
    gates = [kids[name] for name in _GATES if isinstance(kids.get(name), nn.Linear)]
    lists = [kid for kid in kids.values() if isinstance(kid, nn.ModuleList)]
    if gates and lists:
        return {"experts": (int(gates[0].out_features), "exchange")}
    if len(linears) in (2, 3) and all(x.out_features == linears[-1].in_features for x in linears[:-1]):
        return {"hidden": (linears[0].out_features, "sum")}
    return {}


def _declared(module: Any, declared: Any) -> _Cuts:
    """Check `module.mcr_axes`: {"batch": "split", "hidden": (1024, "sum")}."""
    cuts: _Cuts = {}
    for name, cut in declared.items() if isinstance(declared, Mapping) else [("", declared)]:
        parts, how = (
            (0, cut) if isinstance(cut, str) else cut if isinstance(cut, tuple) and len(cut) == 2 else (0, 0)
        )
        if how not in _HOWS or (whole_number(parts) or 0) < (0 if name in _DIMS else 1):
            raise InvalidArgument(
                f"{type(module).__name__}.mcr_axes: {short({name: cut})}; expected {{axis: how}} for batch, sequence "
                f"and space, and {{axis: (parts, how)}} for others, with how in {', '.join(_HOWS)}"
            )
        cuts[name] = (int(parts), how)
    return cuts


_DIMS: Final[dict[str, Callable[[_Value], range]]] = {
    "batch": lambda x: range(min(1, len(x.shape))),
    "sequence": lambda x: range(1, 2 if len(x.shape) == 3 - (not x.dtype.is_floating_point) else 1),
    "space": lambda x: range(2, len(x.shape) if len(x.shape) > 3 else 2),
}
"""Dimensions of a block's input along an axis."""


def _leaf(module: Any) -> _Cuts:
    """Return the cuts of torch's modules without children."""
    kind, home = type(module).__name__, type(module).__module__
    if isinstance(module, nn.Linear):
        return {**_split("batch", "sequence"), "hidden": (module.out_features, "columns")}
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        rows: _Cuts = {"rows": (module.num_embeddings, "sum")} if getattr(module, "mode", "") != "max" else {}
        flows = _split("batch", "sequence") if isinstance(module, nn.Embedding) else _split("batch")
        return {**flows, "hidden": (module.embedding_dim, "columns"), **rows}
    if isinstance(module, nn.Conv2d | nn.Conv3d):
        space: How = "split" if max(module.kernel_size) == 1 else "halo"
        return {**_split("batch"), "space": (0, space), "hidden": (module.out_channels, "columns")}
    if re.fullmatch(r"(Max|Avg)Pool[23]d", kind):
        return {**_split("batch"), "space": (0, "split" if module.kernel_size == module.stride else "halo")}
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return _split("batch", "sequence")
    if home in {"torch.nn.modules.activation", "torch.nn.modules.dropout"} or isinstance(module, nn.Identity):
        return {} if "max" in kind or isinstance(module, nn.MultiheadAttention) else _split(*_DIMS)
    if isinstance(module, nn.GroupNorm | nn.Flatten) or "Adaptive" in kind:
        return _split("batch")
    return {}


def _cuts(call: _Call) -> _Cuts:
    """Return the cuts of a called module: of the whole along what all its modules allow, and of parameters."""
    inner = _inner(call.module)
    if getattr(call.module, "mcr_axes", None) is not None:
        return inner
    if isinstance(call.module, nn.MultiheadAttention):
        return {**_split("batch"), "sequence": (0, "gather"), **inner}
    if not call.kids:
        return _leaf(call.module)
    cuts = _together([_cuts(kid) for kid in call.kids])
    if inner:
        cuts = {name: cut for name, cut in cuts.items() if name in _DIMS}
    if "heads" in inner and "sequence" in cuts:
        cuts["sequence"] = (0, "gather")
    return {**cuts, **inner}


def _together(each: Sequence[_Cuts]) -> _Cuts:
    """Return the cuts of modules that run one after another."""
    flows = {name: [cuts[name][1] for cuts in each if name in cuts] for name in _DIMS}
    both: _Cuts = {
        name: (0, max(hows, key=_STRENGTH.index))
        for name, hows in flows.items()
        if len(hows) == len(each) > 0
    }
    for cuts in each:
        both |= {
            name: cut for name, cut in cuts.items() if name not in _DIMS and cut[1] in {"sum", "exchange"}
        }
    return both


def _axes(segment: _Segment, output: _Value) -> dict[str, Axis]:
    each = [_cuts(call) for call in segment.members]
    axes = {}
    for name, (parts, how) in (each[0] if len(each) == 1 else _together(each)).items():
        if name not in _DIMS:
            axes[name] = Axis(dims=(), parts=(parts,), how=how)
        elif segment.input is not None and (dims := tuple(_DIMS[name](segment.input))):
            lengths = tuple(segment.input.shape[dim] for dim in dims)
            if min(lengths) and (not output.shape or len(output.shape) > max(dims)):  # a scalar is a loss
                axes[name] = Axis(dims=dims, parts=lengths, how=how)
    return axes


# -- the profile --------------------------------------------------------------------------------------------


def profile(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    repeats: int = 5,
) -> Profile:
    """Measure a model as a chain of blocks: times, bytes, and the axes along which each may be cut.

    Blocks are the finest sequence of modules in which the input of each is the only tensor that comes from
    earlier ones; data of the batch may be read anywhere. `nn.Sequential` and other modules are taken apart
    where their modules are such a chain, but attention, experts, MLPs and modules with `mcr_axes` are whole.
    Runs the model `2 * repeats + 4` times in its present mode, without communication; gradients, buffers and
    random numbers stay as they are.

    Axes follow from the kinds of torch's modules. For others, `module.mcr_axes = {"batch": "split", "hidden":
    (1024, "sum")}` says them: how, and the number of parts if it is no length of the input; see `Axis`.

    Args:
        model: not compiled. Parameters that several blocks use need `parameter.mcr_shared = True`.
        batch: the input, or with `loss` a pair of input and target. A tuple or a dict as input is passed as
            arguments.
        optimizer: the model's; its state is counted.
        loss: gets the output and, of a pair, the target; it is the last block. Without it the gradient of the
            output is one everywhere.
        repeats: number of timed passes, after which the medians are taken.

    Returns:
        A `Profile`; `print` shows its table, and `save` writes it.

    Raises:
        InvalidArgument: an argument is wrong, or nothing needs a gradient.
        Unsupported: the model is no chain; the text names the module at which a tensor goes around it.

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
        raise Unsupported("mcr.profile: the model is compiled; expected the model before torch.compile")
    task = _Task(model, batch, loss)
    with task.unchanged(), torch.enable_grad():
        flow, segments, result = _chain(task)
        if not task.trained:
            raise InvalidArgument("model: no parameter needs a gradient; expected one that is trained")
        saved, gradients = _kept(task, segments)
        times = [_times(task, segments) for _ in range(count + 1)][1:]
        states = _state_bytes(optimizer, {task.trained[n]: g for n, g in gradients.items()})
    owners = _owners(task, flow, segments)
    outputs = [segment.input or result for segment in segments[1:]] + [result]
    blocks = []
    for index, (segment, output) in enumerate(zip(segments, outputs, strict=True)):
        forward, backward, recompute = (median(each[kind][index] for each in times) for kind in range(3))
        own = [name for name, used in owners.items() if used and used[0] == index]
        given = [grad for name in own if (grad := gradients.get(name)) is not None]
        early = [
            v for v in flow.values if not v.computed and v.born < segment.begin and v is not segment.input
        ]
        blocks.append(Block(
            name=segment.name, kind=" + ".join(dict.fromkeys(_kind(c.module) for c in segment.members)),
            forward=forward, backward=backward, recompute=recompute,
            parameters=sum(_nbytes(task.parameters[name]) for name in own),
            gradients=sum(map(_nbytes, given)),
            optimizer=sum(states.get(id(task.parameters[name]), 0) for name in own),
            saved=saved.new[index], saved_before=saved.before[index],
            output=output.nbytes, shape=output.shape, dtype=dtype_name(output.dtype),
            axes=_axes(segment, output),
            shared=tuple(name for name, used in owners.items() if len(used) > 1 and index in used),
            reads_batch=bool(index) and any(segment.begin <= time < segment.end for v in early for time, _ in v.uses),
            random=segment.drawn,
        ))  # fmt: skip
    unused = [name for name, used in owners.items() if not used]
    return Profile(
        model=model_hash((name, p.shape, dtype_name(p.dtype)) for name, p in task.trained.items()),
        device=task.device.type, input=segments[0].input.shape if segments[0].input else (),
        state_of=None if optimizer is None else type(optimizer).__name__,
        notes=(f"no block uses {', '.join(unused)}",) if unused else (), blocks=tuple(blocks),
    )  # fmt: skip


def _kind(module: Any) -> str:
    return type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "loss")


def _owners(task: _Task, flow: _Flow, segments: Sequence[_Segment]) -> dict[str, list[int]]:
    """Return the blocks that use each parameter. Raises `Unsupported` for those that several share."""
    owners: dict[str, list[int]] = {}
    for name, param in task.parameters.items():
        calls = [c.time for c in flow.calls if isinstance(c.module, nn.Module)
                 and any(p is param for p in c.module.parameters(recurse=False))]  # fmt: skip
        times = flow.used[name].union(calls)
        owners[name] = used = [i for i, s in enumerate(segments) if any(s.begin <= t < s.end for t in times)]
        if len(used) > 1 and not getattr(param, "mcr_shared", False):
            first, second = (segments[i].name for i in used[:2])
            raise Unsupported(
                f"mcr.profile: {first} and {second} share the parameter {name}; expected parameters of one block, "
                "or parameter.mcr_shared = True, and a plan that keeps these blocks together"
            )
    return owners
