"""Blocks of 256 values as signed bytes times a float32 scale: torch reference, CPU kernel, GPU launcher.

Payload of n values in b = ceil(n / 256) blocks, little endian:

    b float32 scales | n int8 codes | up to 3 bytes of padding

value = code × scale, scale = max(amax / 127, 2^-126), code = value / scale rounded to nearest even. A block
with a NaN or an infinity has the scale NaN and codes of 0, so all its values decode to NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from mcr_plus.kernels import cpu

BLOCK: Final = 256
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITE: Final = np.uint32(0x7F800000)
_NAN: Final = np.uint32(0x7FC00000)
_STEP: Final = np.float32(1 / 127)
_TINIEST: Final = np.float32(2.0**-126)
_ONE: Final = np.float32(1)


def blocks_of(numel: int) -> int:
    """Return the number of blocks; the last may be shorter."""
    return -(-numel // BLOCK)


def nbytes(numel: int) -> int:
    """Return the length of a payload, a multiple of 4."""
    return blocks_of(numel) * 4 + -(-numel // 4) * 4


def split(wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and the codes of a payload, as views."""
    scales = blocks_of(numel) * 4
    return wire[:scales].view(torch.float32), wire[scales : scales + numel].view(torch.int8)


# --- torch: reference for tests of the other kernels --------------------------------------------------------


def encode_reference(values: torch.Tensor, wire: torch.Tensor) -> None:
    """Run `encode` in plain torch."""
    scales, codes = split(wire, values.numel())
    padded = torch.zeros(scales.numel() * BLOCK, device="cpu")
    padded[: values.numel()] = values
    rows = padded.view(-1, BLOCK)
    amax = rows.abs().amax(1)
    scales.copy_((amax * float(_STEP)).clamp(min=float(_TINIEST)))
    scales[~rows.isfinite().all(1)] = torch.nan
    units = torch.nan_to_num(rows * (1 / scales)[:, None], nan=0.0)
    codes.copy_(units.round().view(-1)[: values.numel()].to(torch.int8))


def decode_reference(wire: torch.Tensor, out: torch.Tensor) -> None:
    """Run `decode` in plain torch."""
    scales, codes = split(wire, out.numel())
    out.copy_(codes.to(torch.float32) * scales.repeat_interleave(BLOCK)[: out.numel()])


# --- CPU ----------------------------------------------------------------------------------------------------


@cpu.inlined
def _encode_block(values, bits, scales, marks, codes, block):  # type: ignore[no-untyped-def]
    # The largest magnitude is computed on integers, which sort like floats, with NaN and infinity on top.
    # Unlike a maximum of floats, this becomes vector instructions.
    largest = np.uint32(0)
    for i in range(values.size):
        largest = max(largest, np.uint32(bits[i] & _MAGNITUDE))  # otherwise numba widens it to 64 bits
    if largest >= _INFINITE:
        marks[block] = _NAN
        for i in range(values.size):
            codes[i] = 0
    else:
        marks[block] = largest
        scales[block] = max(scales[block] * _STEP, _TINIEST)
        per_unit = _ONE / scales[block]
        for i in range(values.size):
            codes[i] = np.int8(np.rint(values[i] * per_unit))


@cpu.compiled
def _encode(values, bits, scales, marks, codes, lo, hi):  # type: ignore[no-untyped-def]
    whole = min(hi, values.size // BLOCK)
    for block in range(lo, whole):  # constant slice lengths give vector instructions
        at = block * BLOCK
        part = slice(at, at + BLOCK)
        _encode_block(values[part], bits[part], scales, marks, codes[part], block)
    for block in range(whole, hi):
        part = slice(block * BLOCK, values.size)
        _encode_block(values[part], bits[part], scales, marks, codes[part], block)


@cpu.compiled
def _decode(scales, codes, out, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        at = block * BLOCK
        end = min(at + BLOCK, out.size)
        scale, source, target = scales[block], codes[at:end], out[at:end]
        for i in range(target.size):
            target[i] = np.float32(source[i]) * scale


@cpu.compiled
def _accumulate(scales, codes, total, factor, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        at = block * BLOCK
        end = min(at + BLOCK, total.size)
        scale, source, target = scales[block] * factor, codes[at:end], total[at:end]
        for i in range(target.size):
            target[i] += np.float32(source[i]) * scale


@cpu.compiled
def _reduce(all_scales, all_codes, skip, factor, total, bits, scales, marks, codes, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        at = block * BLOCK
        end = min(at + BLOCK, total.size)
        target = total[at:end]
        for row in range(all_scales.shape[0]):
            if row != skip:
                scale, source = all_scales[row, block] * factor, all_codes[row, at:end]
                for i in range(target.size):
                    target[i] += np.float32(source[i]) * scale
        _encode_block(target, bits[at:end], scales, marks, codes[at:end], block)


# --- launchers ----------------------------------------------------------------------------------------------


def encode(values: torch.Tensor, wire: torch.Tensor) -> None:
    """Write the payload of flat float32 `values` to `wire`."""
    scales, codes = split(wire, values.numel())
    if values.is_cuda:
        _gpu().encode(values, scales, codes)
        return
    x, s = values.numpy(), scales.numpy()
    marks = s.view(np.uint32)
    cpu.spread(_encode, s.size, values.nbytes, x, x.view(np.uint32), s, marks, codes.numpy())


def decode(wire: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrite flat float32 `out` with the values of a payload."""
    scales, codes = split(wire, out.numel())
    if out.is_cuda:
        _gpu().decode(scales, codes, out)
        return
    cpu.spread(_decode, scales.numel(), out.nbytes, scales.numpy(), codes.numpy(), out.numpy())


def accumulate(wire: torch.Tensor, total: torch.Tensor, factor: float) -> None:
    """Add `factor` times the values of a payload to flat float32 `total`."""
    scales, codes = split(wire, total.numel())
    if total.is_cuda:
        _gpu().accumulate(scales, codes, total, factor)
        return
    arrays = (scales.numpy(), codes.numpy(), total.numpy(), np.float32(factor))
    cpu.spread(_accumulate, scales.numel(), total.nbytes, *arrays)


def reduce(wires: torch.Tensor, skip: int, total: torch.Tensor, wire: torch.Tensor, factor: float) -> None:
    """Add `factor` × every row of `wires` but `skip` to `total`, and encode `total`, in one pass over memory.

    Args:
        wires: one payload per rank, in rows of at least `nbytes(total.numel())` bytes, at multiples of 4
            bytes.
        skip: the row to omit, -1 for none.
        total: flat float32; contains the sum afterwards.
        wire: receives the payload of `total`.
        factor: factor of decoded values.
    """
    if total.is_cuda:
        for row in range(len(wires)):
            if row != skip:
                accumulate(wires[row], total, factor)
        encode(total, wire)
        return
    scales, codes = split(wire, total.numel())
    many = wires.numpy()
    all_scales = many[:, : scales.nbytes].view(np.float32)
    all_codes = many[:, scales.nbytes : scales.nbytes + total.numel()].view(np.int8)
    x, s = total.numpy(), scales.numpy()
    arrays = (all_scales, all_codes, skip, np.float32(factor), x, x.view(np.uint32))
    cpu.spread(_reduce, s.size, total.nbytes, *arrays, s, s.view(np.uint32), codes.numpy())


def _gpu() -> Any:
    from mcr_plus.kernels.gpu import int8_block

    return int8_block
