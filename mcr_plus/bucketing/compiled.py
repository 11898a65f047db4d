"""Compile a model in parts, so that gradients become ready part by part.

A graph compiled as a whole is a single node of autograd: all its gradients become ready at its end, and
communication cannot overlap with computation. Here Dynamo's graph of the forward pass is cut at the ends of
modules, and each part is compiled separately. The cost of a cut is the loss of fusion across it.
"""

from __future__ import annotations

import operator
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import fx, nn

from mcr_plus.errors import InvalidArgument
from mcr_plus.kernels.compiling import watched

_NAMES_SHOWN: Final = 20  # largest number of modules in an error text
_ROOT: Final = re.compile(r"^[^.]*?\[[^\]]*\]\.?")  # Dynamo's name of the module whose frame is compiled
_ITEM: Final = re.compile(r"\._modules\['([^']*)'\]")  # its name of a module in a container, in torch 2.6

Cuts = tuple[str, ...]


class GraphPart(NamedTuple):
    """A part of a graph.

    `after`: the part begins at the end of these modules; empty at the beginning of a graph. `parameters`: the
    gradients of these parameters become ready with the part.
    """

    after: Cuts
    parameters: tuple[str, ...]


def blocks(model: nn.Module) -> list[str]:
    """Return the names of a model's repeated children: modules in its `Sequential`s and `ModuleList`s.

    Nested containers are searched, but not the inside of a block. Omitted are modules without parameters, and
    containers with fewer than two modules that have parameters.
    """

    def children(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        for key, child in module.named_children():
            if any(True for _ in child.parameters()):
                yield f"{name}.{key}" if name else key, child

    def inside(module: nn.Module, name: str) -> Iterator[str]:
        own = list(children(module, name))
        if not isinstance(module, nn.Sequential | nn.ModuleList):
            for path, child in own:
                yield from inside(child, path)
        elif len(own) > 1 or any(isinstance(child, nn.Sequential | nn.ModuleList) for _, child in own):
            for path, child in own:
                if isinstance(child, nn.Sequential | nn.ModuleList):
                    yield from inside(child, path)
                else:
                    yield path

    return list(dict.fromkeys(inside(model, "")))


def chosen_cuts(model: nn.Module, cuts: str | Sequence[str]) -> Cuts:
    """Return the names of modules after which the graph may be cut.

    Raises:
        InvalidArgument: `cuts` is neither "auto", "none" or "blocks", nor a sequence of names of the
            model's modules.
    """
    if cuts == "none":
        return ()
    if cuts in ("auto", "blocks"):
        return tuple(blocks(model))
    known = [name for name, _ in model.named_modules() if name]
    if isinstance(cuts, str):
        raise InvalidArgument(
            f"cuts: got {cuts!r}, expected 'auto', 'none', 'blocks' or a list of names of modules"
        )
    for name in cuts:
        if name not in known:
            raise InvalidArgument(
                f"cuts: the model has no module {name!r}; modules: {', '.join(known[:_NAMES_SHOWN])}"
                + ", …" * (len(known) > _NAMES_SHOWN)
            )
    return tuple(dict.fromkeys(cuts))


class CompiledCall:
    """Replaces a model's forward pass by compiled variants, one per set of cuts, made on first use.

    `places`: modules after which the graph may be cut. `cuts`: modules after which the graph is cut.
    `is_auto`: measured times determine the cuts. `before`: called with the model before every forward pass,
    outside of the compiled code.
    """

    def __init__(
        self, model: nn.Module, cuts: str | Sequence[str], backend: Any, options: dict[str, Any]
    ) -> None:
        self.places = chosen_cuts(model, cuts)
        self.is_auto = cuts == "auto"
        self.cuts: Cuts = () if self.is_auto else self.places
        self.before: Callable[[nn.Module], None] | None = None
        self._model = weakref.ref(model)
        self._inner = _inner(backend, options)
        self._options = {key: options[key] for key in ("dynamic", "fullgraph") if key in options}
        self._variants: dict[Cuts, tuple[_Backend, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass with the current cuts."""
        model = self._model()
        assert model is not None  # the caller holds the model
        if self.before is not None:
            self.before(model)
        return self._variant(model)[1](*args, **kwargs)

    def set_cuts(self, cuts: Collection[str]) -> None:
        """Use these cuts, a subset of `places`, from the next forward pass on."""
        self.cuts = tuple(place for place in self.places if place in cuts)

    def parts(self) -> list[GraphPart]:
        """Return the parts compiled with the current cuts, in the order of the forward pass."""
        return self._variants[self.cuts][0].parts if self.cuts in self._variants else []

    def _variant(self, model: nn.Module) -> tuple[_Backend, Any]:
        if self.cuts not in self._variants:
            backend = _Backend(model, self.cuts, self._inner)
            call = torch.compile(_forward(model), backend=backend, **self._options)
            self._variants[self.cuts] = backend, call
        return self._variants[self.cuts]


def _forward(model: nn.Module) -> Callable[..., Any]:
    """Return the forward pass, including hooks, as a function with its own code object.

    Dynamo caches compiled code by code object, up to a limit; without a separate code object, variants and
    models would share the limit. Nor does Dynamo compile torch's own code, such as `Sequential`.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    return FunctionType(forward.__code__.replace(), globals(), "forward", None, forward.__closure__)


def _inner(backend: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """Return the compiler of the parts."""
    mode, settings = options.get("mode"), options.get("options")
    if backend == "inductor":
        made: Callable[..., Any] = torch._TorchCompileInductorWrapper(mode, settings, options.get("dynamic"))
        return made
    if mode is not None or settings is not None:
        raise InvalidArgument(f"mode, options: expected only with backend='inductor', got {backend!r}")
    if callable(backend):
        return backend  # type: ignore[no-any-return]
    from torch._dynamo import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        found: Callable[..., Any] = lookup_backend(backend)
    except InvalidBackend:
        known = ", ".join(list_backends(exclude_tags=()))
        raise InvalidArgument(f"backend: torch.compile has no {backend!r}; known: {known}") from None
    return found


class _Backend:
    """A backend of Dynamo that cuts each graph and compiles the parts with another backend."""

    def __init__(self, model: nn.Module, cuts: Cuts, inner: Callable[..., Any]) -> None:
        self.parts: list[GraphPart] = []
        self._model = weakref.ref(model)
        self._cuts = {name: type(model.get_submodule(name)) for name in cuts}
        self._inner = inner

    def __call__(self, graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        with watched():
            if not torch.is_grad_enabled():
                return self._inner(graph, inputs, **options)
            part_of, parts = self._cut(graph, inputs)
            known = {name for part in self.parts for name in part.parameters}  # recompiled, or used before
            news = [
                GraphPart(after, tuple(each for each in names if each not in known)) for after, names in parts
            ]
            self.parts += [part for part in news if part.parameters]
            if len(parts) == 1:
                return self._inner(graph, inputs, **options)
            return _compiled_parts(graph, inputs, part_of, self._inner, options)

    def _cut(self, graph: fx.GraphModule, inputs: list[Any]) -> tuple[dict[fx.Node, int], list[GraphPart]]:
        """Return the part of each node, and the parts; with every part, some gradient becomes ready."""
        part_of: dict[fx.Node, int] = {}
        after: list[Cuts] = [()]
        active: set[str] = set()
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            if _is_item(node):  # the source may not be a tensor, so both stay in one part
                part_of[node] = part_of.get(node.args[0], len(after) - 1)
                continue
            now = self._active(graph, node)
            if active - now:
                after.append(tuple(sorted(active - now)))
            part_of[node] = len(after) - 1
            active = now
        first = self._first_uses(graph, inputs, part_of)
        used = set(first.values())
        kept = [at for at in range(len(after)) if at in used] or [0]
        begins = [0, *kept[1:]]  # nodes before the first parameter join its part
        number = {at: sum(begin <= at for begin in begins) - 1 for at in range(len(after))}
        part_of = {node: number[at] for node, at in part_of.items()}
        for node in graph.graph.find_nodes(op="get_attr"):
            part_of[node] = min((part_of[user] for user in node.users if user in part_of), default=0)
        parts = [
            GraphPart(after[begin], tuple(name for name, at in first.items() if number[at] == place))
            for place, begin in enumerate(begins)
        ]
        return part_of, parts

    def _active(self, graph: fx.GraphModule, node: fx.Node) -> set[str]:
        """Return the modules of `cuts` that contain a node."""
        stack = node.meta.get("nn_module_stack")
        if not stack:  # a checkpoint is a node with a nested graph
            named: list[Any] = [arg.target for arg in node.args if _is_attribute(arg)]
            bodies = [
                body for body in (getattr(graph, name) for name in named) if isinstance(body, fx.GraphModule)
            ]
            stacks = (each.meta.get("nn_module_stack") for body in bodies for each in body.graph.nodes)
            stack = next((each for each in stacks if each), {})
        entries = [(_ROOT.sub("", _ITEM.sub(r".\1", path)), kind) for path, kind, *_ in stack.values()]
        return {name for name, kind in entries if self._cuts.get(name) is kind}

    def _first_uses(
        self, graph: fx.GraphModule, inputs: list[Any], part_of: dict[fx.Node, int]
    ) -> dict[str, int]:
        """Return the part with the first use of each trainable parameter, which backward reaches last."""
        model = self._model()
        named = {} if model is None else {id(each): name for name, each in model.named_parameters()}
        found: dict[str, int] = {}
        for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
            name = named.get(id(value))
            if name is not None and value.requires_grad:
                places = [part_of[user] for user in node.users if user in part_of]
                if places:
                    found[name] = min(places)
        return found


def _is_attribute(arg: object) -> TypeGuard[fx.Node]:
    return isinstance(arg, fx.Node) and arg.op == "get_attr"


def _is_item(node: fx.Node) -> bool:
    """Return whether a node takes an item of another node's result."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def _compiled_parts(
    graph: fx.GraphModule,
    inputs: list[Any],
    part_of: dict[fx.Node, int],
    inner: Callable[..., Any],
    options: dict[str, Any],
) -> fx.GraphModule:
    """Return the graph with separately compiled parts, made by torch's splitter for DDP buckets."""
    from torch._dynamo import utils
    from torch._dynamo.backends import distributed
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.split_module import split_module

    split = split_module(graph, None, part_of.__getitem__)  # type: ignore[arg-type]
    for name in ("propagate_dynamo_source", "propagate_metadata"):
        if hasattr(distributed, name):  # torch 2.6 lacks it
            getattr(distributed, name)(graph, split)
    fake_mode = detect_fake_mode(inputs) or FakeTensorMode()
    compiler = distributed.SubmodCompiler(split, partial(inner, **options), fake_mode)
    without_hooks = getattr(utils, "_disable_saved_tensors_hooks_during_tracing", nullcontext)
    with without_hooks():
        compiler.run(*inputs)
    split.recompile()
    return split
