"""Rows of tokens, from tensors to the messages of expert parallelism and back: torch reference, CPU kernels.

A message is bytes in which a row of `width` values begins at an address of its own, a multiple of 4. Formats:

    plain      the values as they are
    bf16       rounded to bfloat16, to nearest even
    fp8_block  a payload of `fp8_block` per row: a float32 scale for each 256 values, then their codes (e4m3)

Sums of rows are made in float32 (of float64: in float64), products of two rows in float64; both are rounded
once. The CPU kernels are for float32 and bfloat16; other dtypes and devices take the reference, with the same
results but for the order of additions.
"""

from __future__ import annotations

from functools import cache
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
"""Of tensors that CPU kernels take."""

_numba: Any = numba  # annotated in part, which type checkers take for a mistake of ours
_E4M3: Final = fp8_block.FORMATS["e4m3"]


class Lists(NamedTuple):
    """For each of some sums, which rows are its addends: `items[firsts[i] : firsts[i + 1]]`."""

    firsts: Ints
    items: Ints


class Wire(NamedTuple):
    """Rows in the bytes of messages.

    Attributes:
        bytes: uint8 [nbytes], a multiple of 16.
        at: [rows] the address of each.
        format: of all of them.
    """

    bytes: torch.Tensor
    at: Ints
    format: Format


def nbytes(width: int, dtype: torch.dtype, form: Format) -> int:
    """Length of a row, a multiple of 4."""
    if form == "fp8_block":
        return fp8_block.nbytes(width, "float32")
    return -(-width * (dtype.itemsize if form == "plain" else 2) // 4) * 4


# --- torch: what the kernels are tested against, and what other dtypes and devices take ---------------------


def _encoded(rows: torch.Tensor, form: Format) -> torch.Tensor:
    """[rows, bytes]."""
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
    """[rows, width], in the dtype in which sums are made, from [rows, bytes] of rows of `dtype`."""
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
    """The index of every byte of every row: [rows, size]."""
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
    """Weighted sums of rows, in the dtype in which sums are made."""
    items = _index(lists.items, rows)
    addends = rows[items].to(_summing(rows.dtype))
    if weights is not None:
        addends *= weights[items].to(addends.dtype)[:, None]
    counts = _index(np.diff(lists.firsts), rows)
    which = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
    return addends.new_zeros(len(counts), rows.shape[1]).index_add_(0, which, addends)


def pack_reference(values: torch.Tensor, rows: Ints, wire: Wire) -> None:
    """`pack` in plain torch."""
    _put(values[_index(rows, values)], wire)


def unpack_reference(own: torch.Tensor, wire: Wire, sources: Ints, out: torch.Tensor) -> None:
    """`unpack` in plain torch."""
    out.copy_(_come(own, wire, sources))


def _come(own: torch.Tensor, wire: Wire, sources: Ints) -> torch.Tensor:
    """What `unpack` brings, in the dtype in which sums are made."""
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
    """`unpack_gradient` in plain torch."""
    exact = _come(own, wire, sources)
    weight_gradient.copy_((exact.double() * answers.double()).sum(1))
    out.copy_(exact * weights[:, None])


def pack_sums_reference(values: torch.Tensor, weights: torch.Tensor | None, lists: Lists, wire: Wire) -> None:
    """`pack_sums` in plain torch."""
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
    """`unpack_sums` in plain torch."""
    come = _taken(wire, values.shape[1], values.dtype)
    out.copy_(_sums(values, weights, own) + _sums(come, None, rows))


# --- CPU ----------------------------------------------------------------------------------------------------
# Rows are bytes, whose format is a number: kernels for each pair of formats would be compiled apart.

_PLAIN, _BF16, _FP8 = 0, 1, 2
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

_encode_fp8: Final = fp8_block.encode_block_at


@cpu.embedded
def _float(half):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(half) << _16).view(np.float32)


@cpu.embedded
def _bfloat16(value):  # type: ignore[no-untyped-def]
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> _16) & _1)
    rounded = np.uint32(np.uint32(np.uint32(bits + _ROUND) + odd) >> _16)
    return _NAN if np.uint32(bits & _MAGNITUDE) > _INFINITE else np.uint16(rounded)


@cpu.linked
def _load(row, form, numbers):  # type: ignore[no-untyped-def]
    """Float32 `numbers` become those of the row."""
    if form == _PLAIN:
        cpu.put(row.view(np.float32), numbers)
    elif form == _BF16:
        halves = row.view(np.uint16)
        for i in range(numbers.size):
            numbers[i] = _float(halves[i])
    else:
        blocks = (numbers.size + _BLOCK - 1) // _BLOCK
        scales, codes = row[: 4 * blocks].view(np.float32), row[4 * blocks :]
        for block in range(blocks):
            part = slice(block * _BLOCK, min(block * _BLOCK + _BLOCK, numbers.size))
            fp8_block.set_values(codes[part], scales[block], numbers[part], _DECODING)


@cpu.linked
def _add(row, form, numbers, factor):  # type: ignore[no-untyped-def]
    """Add the row times a factor."""
    if form == _PLAIN:
        plain = row.view(np.float32)
        for i in range(numbers.size):
            numbers[i] += plain[i] * factor
    elif form == _BF16:
        halves = row.view(np.uint16)
        for i in range(numbers.size):
            numbers[i] += _float(halves[i]) * factor
    else:
        blocks = (numbers.size + _BLOCK - 1) // _BLOCK
        scales, codes = row[: 4 * blocks].view(np.float32), row[4 * blocks :]
        for block in range(blocks):
            part = slice(block * _BLOCK, min(block * _BLOCK + _BLOCK, numbers.size))
            fp8_block.add_values(codes[part], scales[block] * factor, numbers[part], _DECODING)


@cpu.linked
def _store(numbers, row, form):  # type: ignore[no-untyped-def]
    """Write the row."""
    if form == _PLAIN:
        cpu.put(numbers, row.view(np.float32))
    elif form == _BF16:
        halves = row.view(np.uint16)
        for i in range(numbers.size):
            halves[i] = _bfloat16(numbers[i])
    else:
        blocks, bits = (numbers.size + _BLOCK - 1) // _BLOCK, numbers.view(np.uint32)
        scales, codes = row[: 4 * blocks].view(np.float32), row[4 * blocks : 4 * blocks + numbers.size]
        marks = scales.view(np.uint32)
        for block in range(blocks):
            _encode_fp8(block, numbers, bits, scales, marks, codes, _STEP, _TOP, _ENCODING)


# `reassoc` for vector instructions; NaN and infinity stay what they are.
@_numba.njit(fastmath={"reassoc"}, nogil=True, error_model="numpy", no_cpython_wrapper=True)
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
def _pack(own, own_form, wire, wire_form, at, size, width, rows, lo, hi):  # type: ignore[no-untyped-def]
    numbers = np.empty(width, np.float32)
    for i in range(lo, hi):
        _load(own[rows[i]], own_form, numbers)
        _store(numbers, wire[at[i] : at[i] + size], wire_form)


@cpu.compiled
def _unpack(own, own_form, wire, wire_form, at, size, width, sources, out, lo, hi):  # type: ignore[no-untyped-def]
    numbers = np.empty(width, np.float32)
    for i in range(lo, hi):
        source = sources[i]
        if source < 0:
            cpu.put(own[-1 - source], out[i])
        else:
            _load(wire[at[source] : at[source] + size], wire_form, numbers)
            _store(numbers, out[i], own_form)


@cpu.compiled
def _unpack_gradient(  # type: ignore[no-untyped-def]
    own, own_form, wire, wire_form, at, size, width, sources, weights, answers, out, dots, lo, hi
):
    numbers, others = np.empty(width, np.float32), np.empty(width, np.float32)
    for i in range(lo, hi):
        source = sources[i]
        if source < 0:
            _load(own[-1 - source], own_form, numbers)
        else:
            _load(wire[at[source] : at[source] + size], wire_form, numbers)
        _load(answers[i], own_form, others)
        dots[i] = _dot(numbers, others)
        for c in range(numbers.size):
            numbers[c] *= weights[i]
        _store(numbers, out[i], own_form)


@cpu.compiled
def _pack_sums(  # type: ignore[no-untyped-def]
    own, own_form, wire, wire_form, at, size, width, weights, weighted, firsts, items, lo, hi
):
    numbers = np.empty(width, np.float32)
    for i in range(lo, hi):
        _clear(numbers)
        for j in range(firsts[i], firsts[i + 1]):
            item = items[j]
            _add(own[item], own_form, numbers, weights[item] if weighted else _ONE)
        _store(numbers, wire[at[i] : at[i] + size], wire_form)


@cpu.compiled
def _unpack_sums(  # type: ignore[no-untyped-def]
    own, own_form, wire, wire_form, at, size, width, weights, weighted, firsts, items, row_firsts, rows, out,
    lo, hi,
):  # fmt: skip
    numbers = np.empty(width, np.float32)
    for i in range(lo, hi):
        _clear(numbers)
        for j in range(firsts[i], firsts[i + 1]):
            item = items[j]
            _add(own[item], own_form, numbers, weights[item] if weighted else _ONE)
        for j in range(row_firsts[i], row_firsts[i + 1]):
            row = at[rows[j]]
            _add(wire[row : row + size], wire_form, numbers, _ONE)
        _store(numbers, out[i], own_form)


# --- launcher -----------------------------------------------------------------------------------------------


def pack(values: torch.Tensor, rows: Ints, wire: Wire) -> None:
    """Write row `rows[i]` of `values` [n, width] to place i of `wire`."""
    if not _by_kernel(values):
        pack_reference(values, rows, wire)
        return
    nbytes = len(rows) * values.shape[1] * values.itemsize
    cpu.spread(_pack, len(rows), nbytes, *_places(values, wire), rows)


def unpack(own: torch.Tensor, wire: Wire, sources: Ints, out: torch.Tensor) -> None:
    """Overwrite row i of `out` [m, width] with row `sources[i]` of `wire`, or row -1 - `sources[i]` of `own`.

    `own`: [n, width], of the dtype of `out`.
    """
    if not _by_kernel(own):
        unpack_reference(own, wire, sources, out)
        return
    cpu.spread(_unpack, len(sources), out.nbytes, *_places(own, wire), sources, _rows(out))


def unpack_gradient(
    own: torch.Tensor,
    wire: Wire,
    sources: Ints,
    weights: torch.Tensor,
    answers: torch.Tensor,
    out: torch.Tensor,
    weight_gradient: torch.Tensor,
) -> None:
    """`unpack` of gradients: row i of `out` becomes `weights[i]` × the row g that comes.

    `weight_gradient[i]` becomes the dot product of g and row i of `answers`. `weights`, `weight_gradient`:
    [m], float32, or float64 where a dtype is that.
    """
    if not _by_kernel(own, answers) or weights.dtype != torch.float32:
        unpack_gradient_reference(own, wire, sources, weights, answers, out, weight_gradient)
        return
    cpu.spread(
        _unpack_gradient, len(sources), 2 * out.nbytes, *_places(own, wire), sources,
        weights.detach().numpy(), _rows(answers), _rows(out), weight_gradient.numpy(),
    )  # fmt: skip


def pack_sums(values: torch.Tensor, weights: torch.Tensor | None, lists: Lists, wire: Wire) -> None:
    """Write to place i of `wire` the sum of rows of `values` [m, width], list i, times `weights` [m]."""
    if not _by_kernel(values) or not _usual(weights):
        pack_sums_reference(values, weights, lists, wire)
        return
    nbytes = len(lists.items) * values.shape[1] * values.itemsize
    cpu.spread(_pack_sums, len(wire.at), nbytes, *_places(values, wire), *_weights(weights), *lists)


def unpack_sums(
    values: torch.Tensor,
    weights: torch.Tensor | None,
    own: Lists,
    wire: Wire,
    rows: Lists,
    out: torch.Tensor,
) -> None:
    """Overwrite row i of `out` [n, width] with two sums in one pass.

    These are the rows of list i of `own` in `values` [m, width], times `weights` [m], and the rows of list i
    of `rows` in `wire`. `out` has the dtype of `values`.
    """
    if not _by_kernel(values) or not _usual(weights):
        unpack_sums_reference(values, weights, own, wire, rows, out)
        return
    places = _places(values, wire)
    cpu.spread(_unpack_sums, len(out), out.nbytes, *places, *_weights(weights), *own, *rows, _rows(out))


@cache
def prepare() -> None:
    """Compile the kernels of rows, or load them from disk."""
    with preparing("expert rows"):
        one, none = torch.zeros(1, 1, device="cpu"), np.zeros(1, np.int64)
        wire = Wire(torch.zeros(16, dtype=torch.uint8, device="cpu"), none, "plain")
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
    """The rows of a contiguous tensor as bytes."""
    return values.detach().view(torch.uint8).numpy()


def _weights(weights: torch.Tensor | None) -> tuple[Any, bool]:
    return (np.empty(0, np.float32), False) if weights is None else (weights.detach().numpy(), True)


def _places(own: torch.Tensor, wire: Wire) -> tuple[Any, int, Any, int, Ints, int, int]:
    """What all kernels take: rows and their format; bytes, their format, places and size; values of a row."""
    width, own_form = own.shape[1], _PLAIN if own.dtype == torch.float32 else _BF16
    forms = {"plain": (own_form, width * own.itemsize), "bf16": (_BF16, 2 * width)}
    wire_form, size = forms.get(wire.format, (_FP8, fp8_block.nbytes(width, "float32")))
    return _rows(own), own_form, wire.bytes.numpy(), wire_form, wire.at, size, width
