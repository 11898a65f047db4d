"""Hooks before and after the operations of a process group, and torch's NaN check (torch 2.14 on).

Torch calls hooks in its dispatcher, but operations of a Python group bypass the dispatcher. The first hook
turns a group into an instance of a subclass whose operations call the hooks; removing the last hook restores
the group's own class. So operations cost nothing extra without hooks.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cache, wraps
from inspect import signature
from itertools import count
from typing import Any, Final, NoReturn

import torch
from torch._C import _distributed_c10d as bindings
from torch.distributed import distributed_c10d

from mcr_plus.core.c10d import ProcessGroup
from mcr_plus.core.kinds import COLLECTIVES, Collective
from mcr_plus.errors import Unsupported
from mcr_plus.torch_backend.arguments import NAME, rooted
from mcr_plus.torch_backend.refusals import RefusingGroup
from mcr_plus.torch_backend.work import flat, untraced

Hook = Callable[[Any], object]

_TORCH: Any = bindings  # untyped: older versions lack these members
_HAS_HOOKS: Final = hasattr(_TORCH, "PreHookArgs")


def _parameters(row: Collective) -> tuple[str, str]:
    """Return the names of the parameters that hold a method's inputs and outputs."""
    if row.is_shared:
        return "inputs", "outputs"
    sends, receives = row.sends != "none", row.receives != "none"
    return "tensors" * sends, "tensors" * (receives and not sends)


_OPERATIONS: Final = {
    **{row.c10d: (row.c10d.upper(), *_parameters(row)) for row in COLLECTIVES.values()},
    "allreduce_sparse": ("ALLREDUCE", "tensors", ""),
    "allreduce_coalesced": ("ALLREDUCE_COALESCED", "tensors", ""),
    "reduce_scatter_single": ("REDUCE_SCATTER_BASE", "input", "output"),
    "_reduce_scatter_base": ("REDUCE_SCATTER_BASE", "input", "output"),
    "reduce_scatter_single_coalesced": ("REDUCE_SCATTER_TENSOR_COALESCED", "inputs", "outputs"),
    "reduce_scatter_tensor_coalesced": ("REDUCE_SCATTER_TENSOR_COALESCED", "inputs", "outputs"),
    **dict.fromkeys(("all_gather_single", "_allgather_base"), ("ALLGATHER_BASE", "input", "output")),
    "all_gather_single_coalesced": ("ALLGATHER_INTO_TENSOR_COALESCED", "inputs", "outputs"),
    "allgather_into_tensor_coalesced": ("ALLGATHER_INTO_TENSOR_COALESCED", "inputs", "outputs"),
    "allgather_coalesced": ("ALLGATHER_COALESCED", "inputs", "output_lists"),
    **dict.fromkeys(("gather_single", "gather_into_tensor"), ("GATHER", "input", "output")),
    **dict.fromkeys(("all_to_all_single", "alltoall_base"), ("ALLTOALL_BASE", "input", "output")),
    **dict.fromkeys(("recv_anysource", "recvAnysource"), ("RECV", "", "tensors")),
}
"""Method → its name in torch's hooks, and its parameters that hold inputs and outputs."""
_ROOTED: Final = frozenset(row.c10d.upper() for row in COLLECTIVES.values() if row.rooted)


class HookableGroup(RefusingGroup):
    """Process group that calls hooks around its operations; before torch 2.14, without the hook methods."""

    _before: Mapping[int, Hook] = {}
    _after: Mapping[int, Hook] = {}
    _numbers: count[int] | None = None  # numbers of the operations with hooks

    def register_pre_hook(self, hook_id: int, hook: Hook) -> None:
        """Call `hook` with a `PreHookArgs` before each operation; its error stops the operation.

        Hooks are called in the order of their numbers. A new hook replaces the hook of the same number.
        """
        self._set_hooks({**self._before, int(hook_id): _callable(hook)}, self._after)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove the hook of this number, if any."""
        self._set_hooks({key: hook for key, hook in self._before.items() if key != hook_id}, self._after)

    def register_post_hook(self, hook_id: int, hook: Hook) -> None:
        """Call `hook` with a `PostHookArgs` after each operation that was issued without an error."""
        self._set_hooks(self._before, {**self._after, int(hook_id): _callable(hook)})

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove the hook of this number, if any."""
        self._set_hooks(self._before, {key: hook for key, hook in self._after.items() if key != hook_id})

    def _set_hooks(self, before: Mapping[int, Hook], after: Mapping[int, Hook]) -> None:
        # New mappings each time, because a hook may register hooks while an operation iterates over these.
        self._before, self._after = dict(sorted(before.items())), dict(sorted(after.items()))
        if self._numbers is None:
            self._numbers = count()
        plain: Any = getattr(type(self), "_plain", type(self))
        chosen: Any = _hooked(plain) if before or after else plain
        self.__class__ = chosen


if not _HAS_HOOKS:
    for _kind in ("pre", "post"):
        delattr(HookableGroup, f"register_{_kind}_hook")
        delattr(HookableGroup, f"unregister_{_kind}_hook")


def _callable(hook: Hook) -> Hook:
    if not callable(hook):
        raise TypeError(f"hook: expected a function of one argument, got {hook!r}")
    return hook


@cache
def _hooked(plain: type[HookableGroup]) -> type[HookableGroup]:
    """Return a subclass whose operations call the group's hooks."""
    methods = {name: _with_hooks(name, getattr(plain, name)) for name in _OPERATIONS if hasattr(plain, name)}
    kind = type(plain.__name__, (plain,), {**methods, "_plain": plain, "__module__": plain.__module__})
    return untraced(kind)


def _with_hooks(method: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method `usual` with calls of the hooks before and after."""
    operation, sent, received = _OPERATIONS[method]
    while not hasattr(_TORCH.HookOpName, operation):  # torch 2.14 uses ALLGATHER for ALLGATHER_BASE too
        operation = operation.rpartition("_")[0]
    name, bind = getattr(_TORCH.HookOpName, operation), signature(usual).bind

    @wraps(usual)
    def call(self: HookableGroup, *positional: Any, **keywords: Any) -> Any:
        assert self._numbers is not None
        number, given = next(self._numbers), bind(self, *positional, **keywords).arguments
        opts = given.get("opts")
        before = _TORCH.PreHookArgs()
        before.name, before.op_id, before.async_op = name, number, getattr(opts, "asyncOp", True)
        before.input_tensors, before.output_tensors = _tensors(given.get(sent)), _tensors(given.get(received))
        if operation in _ROOTED:
            before.root = rooted(opts, given.get("root"))[0]
        else:
            before.root = given.get("dstRank", given.get("srcRank", -1))
        for hook in self._before.values():
            hook(before)
        work = usual(self, *positional, **keywords)
        if self._after:
            after = _TORCH.PostHookArgs()
            after.name, after.op_id, after.async_op, after.work = name, number, before.async_op, work
            for hook in self._after.values():
                hook(after)
        return work

    return call


def _tensors(given: Any) -> list[torch.Tensor]:
    return [] if given is None else flat(given if isinstance(given, (list, tuple)) else [given])


class GroupNanCheck:
    """Counterpart of torch's `NanCheckHook` for the backend `mcr`: refuses to send floats with a NaN."""

    _numbers = count(0x4E414E43)  # torch's own start, unlikely to clash with numbers chosen by programs

    def __init__(self, group: HookableGroup) -> None:
        self._number = next(self._numbers)
        self._group = weakref.ref(group)  # the group holds this object
        group.register_pre_hook(self._number, self._check)

    def remove(self) -> None:
        """Stop checking."""
        group = self._group()
        if group is not None:
            group.unregister_pre_hook(self._number)

    def _check(self, operation: Any) -> None:
        group = self._group()
        names = _TORCH.HookOpName
        if group is None or (
            operation.name in (names.BROADCAST, names.SCATTER) and operation.root != group.rank()
        ):
            return  # only the root sends in these operations
        for tensor in operation.input_tensors:
            if tensor.is_floating_point():
                torch.ops.c10d.check_for_nan(tensor._values() if tensor.is_sparse else tensor)


def _recorder(_group: HookableGroup, *_: object, **__: object) -> NoReturn:
    raise Unsupported(
        f"FlightRecorderHook: the backend {NAME} records its operations itself; mcr_plus.dump writes them in "
        "torch's format"
    )


def let_torch_attach() -> None:
    """Replace torch's C++ hooks for groups of this backend, or refuse them (torch 2.14 on)."""
    _attach("NanCheckHook", GroupNanCheck)
    _attach("FlightRecorderHook", _recorder)
    usual = getattr(distributed_c10d, "_maybe_attach_flight_recorder", None)
    if usual is None:
        return

    def attach(pg: ProcessGroup, *others: Any, **keywords: Any) -> None:
        if not isinstance(pg, HookableGroup):
            usual(pg, *others, **keywords)

    distributed_c10d._maybe_attach_flight_recorder = attach  # type: ignore[attr-defined]


def _attach(name: str, ours: Callable[..., Any]) -> None:
    kind = getattr(_TORCH, name, None)
    if kind is None:
        return
    usual = kind.attach

    def attach(pg: ProcessGroup, *others: Any, **keywords: Any) -> Any:
        return (ours if isinstance(pg, HookableGroup) else usual)(pg, *others, **keywords)

    kind.attach = staticmethod(attach)
