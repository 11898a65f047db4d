"""Tensors of a simulated device: torch's operations on them are kernels on the current stream."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from device_model import FakeStream, FakeStreams, Range
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map


class Block:
    """A piece of a device's memory, freed when the last tensor that lies in it goes."""

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
        detector.order(owner, machine.host())
        detector.launch(owner, "free", (), (self.range,))
        detector.forget(*self.range)


class DeviceTensor(torch.Tensor):
    """A tensor of a device. `plain` is its memory, `block` what it is part of."""

    __torch_function__ = torch._C._disabled_torch_function_impl
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

    def record_stream(self, stream: Any) -> None:
        self.block.users.append(stream)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """A copy on the host, which waits for the current stream."""
        out = self.block.home.machine.held(torch.empty_like(self.plain))
        source = self.plain
        _synchronised(self.block.home, "to host", lambda: out.copy_(source), ranges(source), ranges(out))
        return out

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor of a device has no numpy array")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """The bytes of a tensor, which may have strides."""
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
    while not home.machine.can_finish(entry):
        home.machine.sleep()
    home.machine.finish(entry)
    home.machine.detector.order(home.machine.host(), stream.number)
    return results[0]


def _kernel(func: Any, args: Any, kwargs: Any) -> Any:
    """One of torch's operations, as a kernel on the current stream."""
    home = next(each.block.home for each in tree_leaves((args, kwargs)) if isinstance(each, DeviceTensor))
    plain_args, plain_kwargs = tree_map(unwrapped, args), tree_map(unwrapped, kwargs)
    schema = func._schema

    def run() -> Any:
        return func(*plain_args, **plain_kwargs)

    reads, writes, given = [], [], []
    named = [*zip(schema.arguments, args, strict=False)]
    named += [(each, kwargs[each.name]) for each in schema.arguments[len(args) :] if each.name in kwargs]
    for argument, value in named:
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                given.append(tensor)
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                (writes if is_written else reads).extend(ranges(tensor))
                if not isinstance(tensor, DeviceTensor):
                    home.machine.held(tensor)
    if schema.is_mutable:
        on_host = any(not isinstance(t, DeviceTensor) and t.dim() for t in given)
        if schema.name == "aten::copy_" and on_host and not (args[2:] or [kwargs.get("non_blocking")])[0]:
            _synchronised(home, schema.name, run, reads, writes)
        else:
            home.current().launch(schema.name, run, reads, writes)
        if not schema.returns:
            return None
        return args[0] if "out" not in kwargs else kwargs["out"]
    if schema.name in _SCALARS:
        return _synchronised(home, schema.name, run, reads, ())
    made = run()  # for the shapes, and the memory; the values come later
    storages = {t.untyped_storage().data_ptr(): t for t in given if isinstance(t, DeviceTensor)}

    def wrap(out: Any) -> Any:
        if not isinstance(out, torch.Tensor):
            return out
        source = storages.get(out.untyped_storage().data_ptr())
        return _wrapped(out, source.block if source is not None else Block(home, home.machine.held(out)))

    fresh = [o for o in tree_leaves(made) if isinstance(o, torch.Tensor)]
    fresh = [o for o in fresh if o.untyped_storage().data_ptr() not in storages]
    if fresh and schema.name not in _EMPTY:
        for out in fresh:
            home.machine.held(out)

        def again() -> None:
            for out, value in zip(fresh, tree_leaves(run()), strict=True):
                out.copy_(value)

        home.current().launch(schema.name, again, reads, [each for out in fresh for each in ranges(out)])
    return tree_map(wrap, made)


class OnDevice(TorchFunctionMode):
    """Makes the tensors that are asked for on a device there; a thread belongs to one rank."""

    def __init__(self, home: FakeStreams) -> None:
        self.home = home

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "cpu" or func is torch.device:
            return func(*args, **kwargs)
        kwargs["device"] = "cpu"
        made = func(*tree_map(unwrapped, args), **kwargs)
        plain = self.home.machine.held(made)
        if func is torch.empty:
            plain.view(torch.uint8).fill_(77)
            return _wrapped(plain, Block(self.home, plain))
        return uploaded(self.home, plain)


def launched(function: Callable[..., Any], written: Sequence[str]) -> Callable[..., Any]:
    """A kernel's launcher that also takes tensors of a device; `written` are the arguments it writes to."""
    names = list(inspect.signature(function).parameters)

    def launch(*args: Any) -> Any:
        homes = [each.block.home for each in tree_leaves(args) if isinstance(each, DeviceTensor)]
        if not homes:
            return function(*args)
        plain = tree_map(unwrapped, args)
        reads, writes = [], []
        for name, value in zip(names, args, strict=False):
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    (writes if name in written else reads).extend(ranges(tensor))
        homes[0].current().launch(function.__name__, lambda: function(*plain), reads, writes)
        return None

    return launch
