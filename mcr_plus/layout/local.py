"""Checks of the local tensors passed to a redistribution: shapes, dtypes, disjoint memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from mcr_plus.communicator.tensors import as_tensor, check_apart, is_plain, plain
from mcr_plus.core.kinds import dtype_name
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import Flags, Ints, as_ints

State = Mapping[str, Any]
Given = Mapping[str, "tuple[torch.Tensor | None, torch.Tensor | None]"]
"""Local tensors passed by the caller, by name: (in the source, in the target)."""


class Local(NamedTuple):
    """A tensor on this rank.

    `source`: contiguous tensor to send. `output`: contiguous tensor to receive into. `final`: destination of
    a copy of `output`, None if not needed. `given`: result for the caller.
    """

    source: torch.Tensor | None
    output: torch.Tensor | None
    final: torch.Tensor | None
    given: torch.Tensor | None


class Expected(NamedTuple):
    """Expected dtype and shapes of a tensor; a shape is None if this rank has no part."""

    name: str
    dtype: torch.dtype
    before: tuple[int, ...] | None
    after: tuple[int, ...] | None


class KnownLocals:
    """Checks tensors quickly by comparing them with the tensors of the last call.

    `names`: names with layouts. `device`: device of all tensors, including new ones.
    """

    def __init__(self, names: Set[str], device: torch.device, expected: Sequence[Expected]) -> None:
        self._names = names
        self._device = device
        self._expected = expected
        sizes = [
            [0 if shape is None else int(np.prod(shape)) * each.dtype.itemsize for shape in each[2:]]
            for each in expected
        ]
        self._sizes = as_ints(sizes).reshape(-1, 2)
        self._single: list[int] = self._sizes[0].tolist() if len(expected) == 1 else []
        self._apart: list[int] = []
        """Addresses in the last call, whose tensors were found to be disjoint in memory."""

    def rows(self, source: State, target: State | None) -> dict[str, Local] | None:
        """Return the tensors if they are disjoint and match the last call; None if a full check is needed."""
        if type(source) is not dict or not (target is None or type(target) is dict):
            return None
        if target is not None and not target.keys() <= self._names:
            return None
        found = {}
        addresses = []
        for name, dtype, before, after in self._expected:
            x = source.get(name)
            out = None if target is None else target.get(name)
            if not (self._fits(x, dtype, before) and (out is None or self._fits(out, dtype, after))):
                return None
            addresses.append(0 if x is None else x.data_ptr())
            addresses.append(0 if out is None else out.data_ptr())
            if out is None and after is not None:
                out = torch.empty(after, dtype=dtype, device=self._device)
            found[name] = Local(x, out, None, out)
        if addresses != self._apart:
            if not self._are_apart(addresses):
                return None
            self._apart = addresses
        return found

    def _fits(self, value: Any, dtype: torch.dtype, shape: tuple[int, ...] | None) -> bool:
        if shape is None:
            return value is None
        return (
            type(value) is torch.Tensor
            and value.dtype is dtype
            and value.shape == shape
            and value.device == self._device
            and value.layout is torch.strided
            and is_plain(value)
            and not value.requires_grad
        )

    def _are_apart(self, addresses: list[int]) -> bool:
        if len(addresses) == 2:  # NumPy would dominate the time of the check
            x, out = addresses
            read, written = self._single
            return not (x and out and x < out + written and out < x + read)
        lows = as_ints(addresses).reshape(-1, 2)
        sizes = np.where(lows == 0, 0, self._sizes)
        spans = np.stack([lows, lows + sizes], axis=2)
        meets = _meeting(spans[:, 0], spans[:, 1])
        return meets is not None and not meets.any()


def checked(source: State, target: State, layouts: Mapping[str, tuple[Layout, Layout]], rank: int) -> Given:
    """Return the tensors with layouts. Raises `InvalidArgument` or `Unsupported` for an invalid tensor."""
    for what, state in (("source", source), ("target", target)):
        if not isinstance(state, Mapping):
            raise InvalidArgument(
                f"{what}: expected a mapping of names to tensors, got {type(state).__name__}"
            )
    unknown = sorted(target.keys() - layouts.keys(), key=str)
    if unknown:
        raise InvalidArgument(
            f"target: there are no layouts for {short(unknown[0])}, so nothing would be written to it"
        )
    given = {}
    for name, (before, after) in layouts.items():
        x = _checked_local(source.get(name), before, rank, name, "source")
        out = _checked_local(target.get(name), after, rank, name, "target")
        if x is not None and out is not None and x.dtype != out.dtype:
            raise InvalidArgument(
                f"{prefix(name)}the target's tensor has dtype {dtype_name(out.dtype)}, "
                f"the source's {dtype_name(x.dtype)}"
            )
        given[name] = (x, out)
    _check_outputs({name: out for name, (_, out) in given.items() if out is not None})
    return given


def made_apart(rows: dict[str, Local]) -> dict[str, Local]:
    """Return the tensors; sources that share memory with an output are replaced by copies."""
    reads = _spans(row.source for row in rows.values())
    meets = _meeting(reads, _spans(row.output for row in rows.values()))
    assert meets is not None  # outputs have been checked
    return {
        name: row._replace(source=row.source.clone()) if meet and row.source is not None else row
        for (name, row), meet in zip(rows.items(), meets.tolist(), strict=True)
    }


def local(
    shape: tuple[int, ...] | None,
    x: torch.Tensor | None,
    out: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Local:
    """Return the tensors to send and to receive. `shape`: local shape in the target, None without a part."""
    result = out
    if shape is not None and (out is None or not is_plain(out)):
        result = torch.empty(shape, dtype=dtype, device=device if out is None else out.device)
    if x is not None:
        x = plain(x)
    return Local(x, result, out if out is not result else None, out if out is not None else result)


def prefix(name: str) -> str:
    """Return the prefix of an error text about a tensor."""
    return f"{name}: " if name else ""


def _checked_local(value: Any, layout: Layout, rank: int, name: str, what: str) -> torch.Tensor | None:
    """Return the local tensor, of the right shape; None if the rank has no part in the layout.

    `what`: "source" or "target".
    """
    shape = layout.local_shape(rank)
    where = f"{prefix(name)}{what}"
    if value is None:
        if shape is not None and what == "source":
            raise InvalidArgument(
                f"{where} {layout}: expected this rank's local tensor of shape {list(shape)}, got None"
            )
        return None
    if shape is None:
        raise InvalidArgument(
            f"{where} {layout}: this rank has no part in it; expected None, got {_described(value)}"
        )
    if hasattr(value, "to_local"):
        raise InvalidArgument(
            f"{where} {layout}: expected this rank's local tensor, got a {type(value).__name__}; pass its "
            "to_local()"
        )
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{where} {layout}: the tensor requires gradients; use mcr_plus.autograd.redistribute, or pass "
            "tensor.detach()"
        )
    tensor = as_tensor(value, where)
    if tuple(tensor.shape) != shape:
        raise InvalidArgument(
            f"{where} {layout}: expected a local tensor of shape {list(shape)}, got {_described(tensor)}"
        )
    if what == "target":
        try:
            check_apart(tensor)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where} {layout}: {error}") from None
    return tensor


def _described(value: Any) -> str:
    return f"one of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


# -- memory ---------------------------------------------------------------------------------------


def _check_outputs(outputs: dict[str, torch.Tensor]) -> None:
    """Raise `InvalidArgument` if two outputs overlap in memory.

    For tensors that are not contiguous, only the first element is compared: two such tensors may overlap in
    address range without sharing an element.
    """
    found = [(name, out) for name, out in outputs.items() if out.numel()]
    ends = [out.nbytes if is_plain(out) else out.element_size() for _, out in found]
    order = sorted(range(len(found)), key=lambda index: found[index][1].data_ptr())
    for one, other in pairwise(order):
        if found[one][1].data_ptr() + ends[one] > found[other][1].data_ptr():
            first, second = sorted((one, other))
            raise InvalidArgument(
                f"target: the tensors of '{found[first][0]}' and '{found[second][0]}' share memory, so that "
                "one would overwrite the other"
            )


def _spans(tensors: Iterable[torch.Tensor | None]) -> Ints:
    """Return the start and end addresses of contiguous tensors, [n, 2]."""
    found = [(0, 0) if each is None else (each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
    return as_ints(found).reshape(-1, 2)


def _meeting(reads: Ints, writes: Ints) -> Flags | None:
    """Return a mask of `reads`: spans that overlap any of `writes`; None if `writes` are not disjoint."""
    writes = writes[writes[:, 0] < writes[:, 1]]
    lows, highs = writes[np.argsort(writes[:, 0])].T
    if (lows[1:] < highs[:-1]).any():
        return None
    if not len(lows):
        return np.zeros(len(reads), bool)
    first = np.searchsorted(highs, reads[:, 0], side="right")
    inside = first < len(lows)
    meets: Flags = inside & (lows[np.where(inside, first, 0)] < reads[:, 1]) & (reads[:, 0] < reads[:, 1])
    return meets
