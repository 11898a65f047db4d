"""Tensors of a simulated device: torch's operations on them are kernels on the current stream."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from unit.devices.device_model import FakeStream, FakeStreams
from unit.devices.race_detector import Range


class Block:
    """A piece of a device's memory, freed with the last tensor in it."""

    def __init__(self, home: FakeStreams, plain: torch.Tensor) -> None:
        self.home = home
        self.stream = home.current()
        self.users: list[FakeStream] = []  # noted by record_stream
        storage = plain.untyped_storage()
        self.range = storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    def __del__(self) -> None:
        self.home.machine.detector.when_idle(self._freed)

    def _freed(self) -> None:
        machine = self.home.machine
        detector = machine.detector
        owner = detector.new("the next owner of freed memory")
        for stream in (self.stream, *self.users):
            detector.order(owner, stream.number)
        for host in (machine.host(), *self.home.hosts):  # a thread frees it when all have let it go
            detector.order(owner, host)
        detector.launch(owner, "free", (), (self.range,))
        detector.forget(*self.range)


class DeviceTensor(torch.Tensor):
    """A tensor of a device. `plain` is its memory, `block` the block that holds it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    plain: torch.Tensor
    block: Block

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", max(self.block.home.device, 0))

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return self.block.home.device

    def record_stream(self, s: Any) -> None:
        self.block.users.append(s)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return a copy on the host; wait for the current stream."""
        out = self.block.home.machine.held(torch.empty_like(self.plain))
        source = self.plain
        _synchronised(self.block.home, "to host", lambda: out.copy_(source), ranges(source), ranges(out))
        return out

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor of a device has no numpy array")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _kernel(func, args, kwargs or {})


def uploaded(home: FakeStreams, values: torch.Tensor) -> DeviceTensor:
    """Values on the device, written there by the current stream."""
    plain = home.machine.held(values.detach().clone())
    tensor = _wrapped(plain, Block(home, plain))
    home.current().launch("upload", lambda: None, (), ranges(plain))
    return tensor


def _wrapped(plain: torch.Tensor, block: Block) -> DeviceTensor:
    tensor: DeviceTensor = torch.Tensor._make_subclass(DeviceTensor, plain)
    tensor.plain, tensor.block = plain, block
    return tensor


def unwrapped(value: Any) -> Any:
    return value.plain if isinstance(value, DeviceTensor) else value


def ranges(tensor: torch.Tensor) -> list[Range]:
    """Return the bytes of a tensor, which may have strides."""
    tensor = unwrapped(tensor)
    if not tensor.numel():
        return []
    size = tensor.element_size()
    if tensor.is_contiguous():
        return [(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * size)]
    places = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (count, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        places += (torch.arange(count) * stride).view(-1, *(1,) * (tensor.dim() - dim - 1))
    begins = sorted(set((places.flatten() * size + tensor.data_ptr()).tolist()))
    return [(at, at + size) for at in begins]


_SCALARS: Final = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")
_EMPTY: Final = ("aten::empty_like", "aten::new_empty", "aten::new_empty_strided")


def _synchronised(
    home: FakeStreams, name: str, run: Callable[[], Any], reads: Iterable[Range], writes: Iterable[Range]
) -> Any:
    """Run on the current stream, and wait for it."""
    results: list[Any] = []
    stream = home.current()
    entry = stream.launch(name, lambda: results.append(run()), reads, writes)
    machine = home.machine
    while not (machine.can_finish(entry) and (not machine.lazy or machine.decide(stream.place))):
        machine.sleep()
    home.machine.finish(entry)
    home.machine.detector.order(home.machine.host(), stream.number)
    home.machine.reached(stream.place)
    return results[0]


def _kernel(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one of torch's operations as a kernel on the current stream."""
    home = next(each.block.home for each in tree_leaves((args, kwargs)) if isinstance(each, DeviceTensor))
    plain_args, plain_kwargs = tree_map(unwrapped, args), tree_map(unwrapped, kwargs)
    name, schema = func._schema.name, func._schema

    def run() -> Any:
        return func(*plain_args, **plain_kwargs)

    given, reads, writes = _accesses(home, schema, args, kwargs)
    if name in _SCALARS:
        return _synchronised(home, name, run, reads, ())
    if not schema.is_mutable:
        return _made(home, name, run, given, reads)
    with_host = any(not isinstance(tensor, DeviceTensor) and tensor.dim() for tensor in given)
    if name == "aten::copy_" and with_host and not (args[2:] or [kwargs.get("non_blocking")])[0]:
        _synchronised(home, name, run, reads, writes)
    else:
        home.current().launch(name, run, reads, writes)
    if not schema.returns:
        return None
    return kwargs.get("out", args[0])


def _accesses(
    home: FakeStreams, schema: Any, args: Any, kwargs: Any
) -> tuple[list[torch.Tensor], list[Range], list[Range]]:
    """Return the tensors among the arguments of an operation, and the memory that it reads and writes."""
    given, reads, writes = list[torch.Tensor](), list[Range](), list[Range]()
    named = [*zip(schema.arguments, args, strict=False)]
    named += [(each, kwargs[each.name]) for each in schema.arguments[len(args) :] if each.name in kwargs]
    for argument, value in named:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                given.append(tensor)
                (writes if is_written else reads).extend(ranges(tensor))
                if not isinstance(tensor, DeviceTensor):
                    home.machine.held(tensor)
    return given, reads, writes


def _made(
    home: FakeStreams, name: str, run: Callable[[], Any], given: Sequence[torch.Tensor], reads: list[Range]
) -> Any:
    """Return the results of an operation that writes to no argument: views of them, or new tensors."""
    made = run()  # for the shapes, and the memory; the values come later
    sources = {t.untyped_storage().data_ptr(): t for t in given if isinstance(t, DeviceTensor)}
    outs = [out for out in tree_leaves(made) if isinstance(out, torch.Tensor)]
    fresh = [home.machine.held(out) for out in outs if out.untyped_storage().data_ptr() not in sources]
    if fresh and name not in _EMPTY:

        def again() -> None:
            for out, value in zip(fresh, tree_leaves(run()), strict=True):
                out.copy_(value)

        home.current().launch(name, again, reads, [each for out in fresh for each in ranges(out)])

    def wrap(out: Any) -> Any:
        if not isinstance(out, torch.Tensor):
            return out
        source = sources.get(out.untyped_storage().data_ptr())
        return _wrapped(out, Block(home, out) if source is None else source.block)

    return tree_map(wrap, made)


class OnDevice(TorchFunctionMode):
    """Makes the tensors that are asked for on a device there; a thread belongs to one rank."""

    def __init__(self, home: FakeStreams) -> None:
        self.home = home

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and len(args) > 1 and not isinstance(args[1], torch.dtype):
            kwargs["device"], args = args[1], args[:1] + args[2:]
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "cpu" or func is torch.device:
            return func(*args, **kwargs)
        kwargs["device"] = "cpu"
        if isinstance(args[0] if args else None, DeviceTensor):
            return func(*args, **kwargs)  # a conversion on the device
        made = func(*tree_map(unwrapped, args), **kwargs)
        plain = self.home.machine.held(made)
        if func is torch.empty:
            plain.view(torch.uint8).fill_(77)
            return _wrapped(plain, Block(self.home, plain))
        return uploaded(self.home, plain)


_BLOCKS: Final = {
    "encode": ("wire",), "decode": ("out",), "accumulate": ("total",), "reduce": ("total", "wire"),
    "clear": ("values",),
}  # fmt: skip
_LAUNCHERS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    **dict.fromkeys(("int8_block", "int4_block", "sign1", "topk", "topk_chunks"), _BLOCKS),
    "int_shared": _BLOCKS | {"amax": ("out",), "encode": ("words",)},
    "powersgd": {
        "find_left": ("left",), "find_right": ("right",), "orthonormalise": ("factors",),
        "expand": ("values",),
    },
}  # fmt: skip
"""The launchers of kernels by their module, with the arguments that they write to."""
_WAITING: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "delta": {"encode": ("wire", "base"), "encode_anchor": ("wire",), "apply": ("out",)},
}
"""Those that the host waits for, because they return something."""


@contextlib.contextmanager
def kernels_on_devices() -> Iterator[None]:
    """Let the launchers of codecs' kernels take tensors of a device: their CPU kernels run as its work."""
    before: list[tuple[Any, str, Any]] = []
    for name, launchers in (_LAUNCHERS | _WAITING).items():
        module = importlib.import_module(f"mcr_plus.kernels.{name}")
        for launcher, written in launchers.items():
            if (function := getattr(module, launcher, None)) is not None:
                before.append((module, launcher, function))
                setattr(module, launcher, _launched(function, written, waits=name in _WAITING))
    try:
        yield
    finally:
        for module, launcher, function in before:
            setattr(module, launcher, function)


def _launched(function: Callable[..., Any], written: Sequence[str], *, waits: bool) -> Callable[..., Any]:
    names = list(inspect.signature(function).parameters)

    def launch(*args: Any, **options: Any) -> Any:
        homes = [each.block.home for each in args if isinstance(each, DeviceTensor)]
        if not homes:
            return function(*args, **options)
        plain = tuple(map(unwrapped, args))
        reads, writes = list[Range](), list[Range]()
        for name, value in zip(names, args, strict=False):
            if isinstance(value, torch.Tensor):
                (writes if name in written else reads).extend(ranges(value))
        if waits:
            return _synchronised(
                homes[0], function.__name__, lambda: function(*plain, **options), reads, writes
            )
        homes[0].current().launch(function.__name__, lambda: function(*plain, **options), reads, writes)
        return None

    return launch
