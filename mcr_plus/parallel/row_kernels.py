"""Pack rows of tokens into messages of expert parallelism, and unpack them: torch reference, CPU kernels.

In a message, each row of `width` values begins at a multiple of 4 bytes. Formats:

    plain      the values unchanged
    bf16       rounded to bfloat16, to nearest even
    fp8_block  a payload of `fp8_block` per row: a float32 scale for each 256 values, then their codes (e4m3)

Sums of rows are computed in float32 (for float64 in float64), products of two rows in float64; both are
rounded once. The CPU kernels handle float32 and bfloat16; other dtypes and devices use the reference, with
equal results except for the order of additions.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import numba
import numba.extending
import numpy as np
import torch

from mcr_plus.kernels import cpu, fp8_block
from mcr_plus.kernels.compiling import preparing
from mcr_plus.parallel.routing_kernels import Ints

Format = Literal["plain", "bf16", "fp8_block"]
FORMATS: Final[tuple[Format, ...]] = ("plain", "bf16", "fp8_block")
DTYPES: Final = (torch.float32, torch.bfloat16)
"""Dtypes of tensors that the CPU kernels accept."""

_numba: Any = numba  # its partial annotations make type checkers report errors here
_E4M3: Final = fp8_block.FORMATS["e4m3"]


class Lists(NamedTuple):
    """Addends of each sum: sum i adds the rows `items[firsts[i] : firsts[i + 1]]`."""

    firsts: Ints
    items: Ints


class Wire(NamedTuple):
    """Rows in the bytes of messages.

    Attributes:
        bytes: uint8 [nbytes], a multiple of 16.
        at: [rows] address of each row.
        format: format of all rows.
    """

    bytes: torch.Tensor
    at: Ints
    format: Format


def nbytes(width: int, dtype: torch.dtype, form: Format) -> int:
    """Return the length of a row, a multiple of 4."""
    if form == "fp8_block":
        return fp8_block.nbytes(width, "float32")
    return -(-width * (dtype.itemsize if form == "plain" else 2) // 4) * 4


# --- torch: reference for the kernels' tests, and implementation for other dtypes and devices ---------------


def _encoded(rows: torch.Tensor, form: Format) -> torch.Tensor:
    """Return encoded rows, [rows, bytes]."""
    count, width = rows.shape
    size = nbytes(width, rows.dtype, form)
    out = torch.zeros(count, size, dtype=torch.uint8, device=rows.device)
    if not rows.numel():
        return out
    if form != "fp8_block":
        values = rows.contiguous() if form == "plain" else rows.to(torch.bfloat16)
        raw = values.view(torch.uint8)
        out[:, : raw.shape[1]] = raw
        return out
    blocks = -(-width // fp8_block.CHUNK)
    padded = torch.zeros(count, blocks * fp8_block.CHUNK, device=rows.device)
    padded[:, :width] = rows
    wire = torch.empty(fp8_block.nbytes(padded.numel(), "float32"), dtype=torch.uint8, device=rows.device)
    fp8_block.encode(padded.view(-1), wire, _E4M3, "float32")
    scales, codes = fp8_block.split(wire, padded.numel(), "float32")
    out[:, : 4 * blocks] = scales.view(torch.uint8).view(count, -1)
    out[:, 4 * blocks : 4 * blocks + width] = codes.view(count, -1)[:, :width]
    return out


def _decoded(raw: torch.Tensor, width: int, dtype: torch.dtype, form: Format) -> torch.Tensor:
    """Return decoded rows, [rows, width], in the dtype of sums, from [rows, bytes] of rows of `dtype`."""
    count, exact = len(raw), _summing(dtype)
    if form != "fp8_block":
        stored = dtype if form == "plain" else torch.bfloat16
        return raw[:, : width * stored.itemsize].contiguous().view(stored).view(count, width).to(exact)
    blocks = -(-width // fp8_block.CHUNK)
    codes = torch.zeros(count, blocks * fp8_block.CHUNK, dtype=torch.uint8, device=raw.device)
    codes[:, :width] = raw[:, 4 * blocks : 4 * blocks + width]
    wire = torch.cat([raw[:, : 4 * blocks].reshape(-1), codes.view(-1)])
    values = torch.empty(codes.numel(), device=raw.device)
    if codes.numel():
        fp8_block.decode(wire, values, _E4M3, "float32")
    return values.view_as(codes)[:, :width].to(exact)


def _bytes_of(wire: Wire, size: int) -> torch.Tensor:
    """Return the index of every byte of every row, [rows, size]."""
    at = _index(wire.at, wire.bytes)
    return at[:, None] + torch.arange(size, device=at.device)


def _put(rows: torch.Tensor, wire: Wire) -> None:
    raw = _encoded(rows, wire.format)
    wire.bytes[_bytes_of(wire, raw.shape[1])] = raw


def _taken(wire: Wire, width: int, dtype: torch.dtype) -> torch.Tensor:
    raw = wire.bytes[_bytes_of(wire, nbytes(width, dtype, wire.format))]
    return _decoded(raw, width, dtype, wire.format)


def _index(numbers: Ints, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(numbers).to(like.device)


def _summing(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sums(rows: torch.Tensor, weights: torch.Tensor | None, lists: Lists) -> torch.Tensor:
    """Return weighted sums of rows, in the dtype of sums."""
    items = _index(lists.items, rows)
    addends = rows[items].to(_summing(rows.dtype))
    if weights is not None:
        addends *= weights[items].to(addends.dtype)[:, None]
    counts = _index(np.diff(lists.firsts), rows)
    which = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
    return addends.new_zeros(len(counts), rows.shape[1]).index_add_(0, which, addends)


def pack_reference(values: torch.Tensor, rows: Ints, wire: Wire) -> None:
    """Run `pack` in plain torch."""
    _put(values[_index(rows, values)], wire)


def unpack_reference(own: torch.Tensor, wire: Wire, sources: Ints, out: torch.Tensor) -> None:
    """Run `unpack` in plain torch."""
    out.copy_(_come(own, wire, sources))


def _come(own: torch.Tensor, wire: Wire, sources: Ints) -> torch.Tensor:
    """Return the unpacked rows, in the dtype of sums."""
    rows = torch.cat([_taken(wire, own.shape[1], own.dtype), own.to(_summing(own.dtype))])
    return rows[_index(np.where(sources < 0, len(wire.at) - 1 - sources, sources), own)]


def unpack_gradient_reference(
    own: torch.Tensor,
    wire: Wire,
    sources: Ints,
    weights: torch.Tensor,
    answers: torch.Tensor,
    out: torch.Tensor,
    weight_gradient: torch.Tensor,
) -> None:
    """Run `unpack_gradient` in plain torch."""
    exact = _come(own, wire, sources)
    weight_gradient.copy_((exact.double() * answers.double()).sum(1))
    out.copy_(exact * weights[:, None])


def pack_sums_reference(values: torch.Tensor, weights: torch.Tensor | None, lists: Lists, wire: Wire) -> None:
    """Run `pack_sums` in plain torch."""
    sums = _sums(values, weights, lists)
    _put(sums.to(values.dtype) if wire.format == "plain" else sums, wire)


def unpack_sums_reference(
    values: torch.Tensor,
    weights: torch.Tensor | None,
    own: Lists,
    wire: Wire,
    rows: Lists,
    out: torch.Tensor,
) -> None:
    """Run `unpack_sums` in plain torch."""
    come = _taken(wire, values.shape[1], values.dtype)
    out.copy_(_sums(values, weights, own) + _sums(come, None, rows))


# --- CPU ----------------------------------------------------------------------------------------------------
# The array's dtype encodes its row format: float32 for plain, uint16 for bfloat16, uint8 for fp8_block.

_OPTIONS: Final = {"nogil": True, "error_model": "numpy"}
_16: Final = np.uint32(16)
_1: Final = np.uint32(1)
_ROUND: Final = np.uint32(0x7FFF)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITE: Final = np.uint32(0x7F800000)
_NAN: Final = np.uint16(0x7FC0)
_BLOCK: Final = fp8_block.CHUNK
_DECODING: Final = fp8_block.decoding_of(_E4M3)
_ENCODING: Final = (np.uint32(_E4M3.shift), np.uint32(_E4M3.lowest))
_STEP: Final = np.float32(_E4M3.step)
_TOP: Final = np.uint32(_E4M3.top)
_ONE: Final = np.float32(1)

_set_fp8: Final = fp8_block.set_values
_add_fp8: Final = fp8_block.add_values
_encode_fp8: Final = fp8_block.encode_block_at


def _by_dtype(position: int, **implementations: Any) -> Any:
    """Return a function for kernels, dispatched on the dtype of an argument."""

    def stub(*_: Any) -> None:
        raise NotImplementedError

    by_type = {_numba.types.float32: "plain", _numba.types.uint16: "bf16", _numba.types.uint8: "fp8"}

    def choose(a, b, c):  # type: ignore[no-untyped-def]
        return implementations[by_type[(a, b, c)[position].dtype]]

    _numba.extending.overload(stub, jit_options=_OPTIONS)(choose)
    return stub


def _load_plain(a, b, c):  # type: ignore[no-untyped-def]  # noqa: ARG001
    for i in range(b.size):
        b[i] = a[i]


def _load_bf16(a, b, c):  # type: ignore[no-untyped-def]  # noqa: ARG001
    for i in range(b.size):
        b[i] = np.uint32(np.uint32(a[i]) << _16).view(np.float32)


def _load_fp8(a, b, c):  # type: ignore[no-untyped-def]  # noqa: ARG001
    blocks = (b.size + _BLOCK - 1) // _BLOCK
    scales, codes = a[: 4 * blocks].view(np.float32), a[4 * blocks :]
    for block in range(blocks):
        at = block * _BLOCK
        end = min(at + _BLOCK, b.size)
        _set_fp8(codes[at:end], scales[block], b[at:end], _DECODING)


def _add_plain(a, b, c):  # type: ignore[no-untyped-def]
    for i in range(b.size):
        b[i] += a[i] * c


def _add_bf16(a, b, c):  # type: ignore[no-untyped-def]
    for i in range(b.size):
        b[i] += np.uint32(np.uint32(a[i]) << _16).view(np.float32) * c


def _add_blocks(a, b, c):  # type: ignore[no-untyped-def]
    blocks = (b.size + _BLOCK - 1) // _BLOCK
    scales, codes = a[: 4 * blocks].view(np.float32), a[4 * blocks :]
    for block in range(blocks):
        at = block * _BLOCK
        end = min(at + _BLOCK, b.size)
        _add_fp8(codes[at:end], scales[block] * c, b[at:end], _DECODING)


def _store_plain(a, b, c):  # type: ignore[no-untyped-def]  # noqa: ARG001
    for i in range(a.size):
        b[i] = a[i]


def _store_bf16(a, b, c):  # type: ignore[no-untyped-def]  # noqa: ARG001
    for i in range(a.size):
        bits = np.float32(a[i]).view(np.uint32)
        odd = np.uint32(np.uint32(bits >> _16) & _1)
        rounded = np.uint32(np.uint32(np.uint32(bits + _ROUND) + odd) >> _16)
        b[i] = _NAN if np.uint32(bits & _MAGNITUDE) > _INFINITE else np.uint16(rounded)


def _store_fp8(a, b, c):  # type: ignore[no-untyped-def]  # noqa: ARG001
    blocks = (a.size + _BLOCK - 1) // _BLOCK
    scales, codes = b[: 4 * blocks].view(np.float32), b[4 * blocks : 4 * blocks + a.size]
    for block in range(blocks):
        _encode_fp8(
            block, a, a.view(np.uint32), scales, scales.view(np.uint32), codes, _STEP, _TOP, _ENCODING
        )


_load = _by_dtype(0, plain=_load_plain, bf16=_load_bf16, fp8=_load_fp8)
"""`_load(row, numbers, None)`: decodes the row into float32 `numbers`."""
_add = _by_dtype(0, plain=_add_plain, bf16=_add_bf16, fp8=_add_blocks)
"""`_add(row, numbers, factor)`: adds the row times a factor to `numbers`."""
_store = _by_dtype(1, plain=_store_plain, bf16=_store_bf16, fp8=_store_fp8)
"""`_store(numbers, row, None)`: encodes `numbers` into the row."""


@_numba.njit(fastmath={"reassoc"}, **_OPTIONS)  # allows vector instructions; NaN and infinity stay intact
def _dot(a, b):  # type: ignore[no-untyped-def]
    total = np.float64(0)
    for i in range(a.size):
        total += np.float64(a[i]) * np.float64(b[i])
    return total


@cpu.inlined
def _clear(numbers):  # type: ignore[no-untyped-def]
    for i in range(numbers.size):
        numbers[i] = 0


@cpu.compiled
def _pack(values, rows, wire, at, size, lo, hi):  # type: ignore[no-untyped-def]
    numbers = np.empty(values.shape[1], np.float32)
    for i in range(lo, hi):
        _load(values[rows[i]], numbers, None)
        _store(numbers, wire[at[i] : at[i] + size], None)


@cpu.compiled
def _unpack(own, wire, at, size, sources, out, lo, hi):  # type: ignore[no-untyped-def]
    numbers = np.empty(out.shape[1], np.float32)
    for i in range(lo, hi):
        source = sources[i]
        if source < 0:
            cpu.put(own[-1 - source], out[i])
        else:
            _load(wire[at[source] : at[source] + size], numbers, None)
            _store(numbers, out[i], None)


@cpu.compiled
def _unpack_gradient(own, wire, at, size, sources, weights, answers, out, dots, lo, hi):  # type: ignore[no-untyped-def]
    numbers, others = np.empty(out.shape[1], np.float32), np.empty(out.shape[1], np.float32)
    for i in range(lo, hi):
        source = sources[i]
        if source < 0:
            _load(own[-1 - source], numbers, None)
        else:
            _load(wire[at[source] : at[source] + size], numbers, None)
        _load(answers[i], others, None)
        dots[i] = _dot(numbers, others)
        for c in range(numbers.size):
            numbers[c] *= weights[i]
        _store(numbers, out[i], None)


@cpu.compiled
def _pack_sums(values, weights, weighted, firsts, items, wire, at, size, lo, hi):  # type: ignore[no-untyped-def]
    numbers = np.empty(values.shape[1], np.float32)
    for i in range(lo, hi):
        _clear(numbers)
        for j in range(firsts[i], firsts[i + 1]):
            item = items[j]
            _add(values[item], numbers, weights[item] if weighted else _ONE)
        _store(numbers, wire[at[i] : at[i] + size], None)


@cpu.compiled
def _unpack_sums(  # type: ignore[no-untyped-def]
    values, weights, weighted, firsts, items, wire, at, size, row_firsts, rows, out, lo, hi
):
    numbers = np.empty(values.shape[1], np.float32)
    for i in range(lo, hi):
        _clear(numbers)
        for j in range(firsts[i], firsts[i + 1]):
            item = items[j]
            _add(values[item], numbers, weights[item] if weighted else _ONE)
        for j in range(row_firsts[i], row_firsts[i + 1]):
            row = at[rows[j]]
            _add(wire[row : row + size], numbers, _ONE)
        _store(numbers, out[i], None)


# --- launcher -----------------------------------------------------------------------------------------------


def pack(values: torch.Tensor, rows: Ints, wire: Wire) -> None:
    """Write row `rows[i]` of `values` [n, width] to address i of `wire`."""
    if not _by_kernel(values):
        pack_reference(values, rows, wire)
        return
    array = _rows(values)
    cpu.spread(_pack, len(rows), len(rows) * array.strides[0], array, rows, *_places(array, wire))


def unpack(own: torch.Tensor, wire: Wire, sources: Ints, out: torch.Tensor) -> None:
    """Copy row `sources[i]` of `wire`, or row -1 - `sources[i]` of `own`, to row i of `out` [m, width].

    `own`: [n, width], with the dtype of `out`.
    """
    if not _by_kernel(own):
        unpack_reference(own, wire, sources, out)
        return
    array = _rows(own)
    cpu.spread(_unpack, len(sources), out.nbytes, array, *_places(array, wire), sources, _rows(out))


def unpack_gradient(
    own: torch.Tensor,
    wire: Wire,
    sources: Ints,
    weights: torch.Tensor,
    answers: torch.Tensor,
    out: torch.Tensor,
    weight_gradient: torch.Tensor,
) -> None:
    """Unpack gradients: row i of `out` becomes `weights[i]` × the received row g.

    `weight_gradient[i]` becomes the dot product of g and row i of `answers`. `weights`, `weight_gradient`:
    [m], float32, or float64 if a dtype is float64.
    """
    if not _by_kernel(own, answers) or weights.dtype != torch.float32:
        unpack_gradient_reference(own, wire, sources, weights, answers, out, weight_gradient)
        return
    array = _rows(own)
    cpu.spread(
        _unpack_gradient, len(sources), 2 * out.nbytes, array, *_places(array, wire), sources,
        weights.detach().numpy(), _rows(answers), _rows(out), weight_gradient.numpy(),
    )  # fmt: skip


def pack_sums(values: torch.Tensor, weights: torch.Tensor | None, lists: Lists, wire: Wire) -> None:
    """Write to address i of `wire` the sum of rows in list i of `values` [m, width] × `weights` [m]."""
    if not _by_kernel(values) or not _usual(weights):
        pack_sums_reference(values, weights, lists, wire)
        return
    array = _rows(values)
    cpu.spread(
        _pack_sums, len(wire.at), len(lists.items) * array.strides[0], array, *_weights(weights), *lists,
        *_places(array, wire),
    )  # fmt: skip


def unpack_sums(
    values: torch.Tensor,
    weights: torch.Tensor | None,
    own: Lists,
    wire: Wire,
    rows: Lists,
    out: torch.Tensor,
) -> None:
    """Write the sum of two weighted sums to each row i of `out` [n, width], in one pass.

    The first adds the rows of list i of `own` in `values` [m, width], times `weights` [m], the second the
    rows of list i of `rows` in `wire`. `out` has the dtype of `values`.
    """
    if not _by_kernel(values) or not _usual(weights):
        unpack_sums_reference(values, weights, own, wire, rows, out)
        return
    array = _rows(values)
    cpu.spread(
        _unpack_sums, len(out), out.nbytes, array, *_weights(weights), *own, *_places(array, wire), *rows,
        _rows(out),
    )  # fmt: skip


def prepare(dtype: torch.dtype, form: Format) -> None:
    """Compile, or load from disk, the kernels for rows of a dtype in a format."""
    if dtype not in DTYPES:
        return
    with preparing(f"expert rows of {dtype} as {form}"):
        one, none = torch.zeros(1, 1, dtype=dtype, device="cpu"), np.zeros(1, np.int64)
        wire = Wire(torch.zeros(16, dtype=torch.uint8, device="cpu"), none, form)
        lists, weights = Lists(np.array([0, 1]), none), torch.ones(1, device="cpu")
        pack(one, none, wire)
        unpack(one, wire, none, torch.empty_like(one))
        unpack_gradient(one, wire, none, weights, one, torch.empty_like(one), torch.empty(1, device="cpu"))
        pack_sums(one, weights, lists, wire)
        unpack_sums(one, weights, lists, wire, lists, torch.empty_like(one))


def _by_kernel(*tensors: torch.Tensor) -> bool:
    first = tensors[0]
    return first.dtype in DTYPES and all(
        each.device.type == "cpu" and each.dtype == first.dtype for each in tensors
    )


def _usual(weights: torch.Tensor | None) -> bool:
    return weights is None or weights.dtype == torch.float32


def _rows(values: torch.Tensor) -> Any:
    """Return a contiguous tensor as an array whose dtype encodes its format."""
    plain = values.detach()
    return (plain.view(torch.uint16) if values.dtype == torch.bfloat16 else plain).numpy()


def _weights(weights: torch.Tensor | None) -> tuple[Any, bool]:
    return (np.empty(0, np.float32), False) if weights is None else (weights.detach().numpy(), True)


def _places(values: Any, wire: Wire) -> tuple[Any, Ints, int]:
    """Return the message as an array whose dtype encodes the format, and row offsets and row size in
    elements."""
    units: dict[Format, type] = {"plain": values.dtype, "bf16": np.uint16, "fp8_block": np.uint8}
    array: Any = wire.bytes.numpy().view(units[wire.format])
    width = values.shape[1]
    size = fp8_block.nbytes(width, "float32") if wire.format == "fp8_block" else width
    at = wire.at if array.itemsize == 1 else wire.at // array.itemsize
    return array, at, size
