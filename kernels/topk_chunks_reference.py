"""topk in chunks in plain torch: reference for tests of the CPU kernels, and implementation for GPUs."""

from __future__ import annotations

from typing import Final

import torch

from mcr_plus.kernels.topk_records import Chunking, RecordForm, split

TAIL: Final = 1.594
UNITS: Final = 36
LARGEST_LEVEL: Final = 0x7F7F
"""The largest finite bfloat16, as bits."""


def _pack(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """Pack numbers of `width` bits (chunks × numbers) into 32-bit words (chunks × words)."""
    bits = numbers[:, :, None] >> torch.arange(width, device=numbers.device) & 1
    flat = torch.nn.functional.pad(bits.flatten(1), (0, -numbers.shape[1] * width % 32))
    words = flat.view(flat.shape[0], -1, 32) << torch.arange(32, device=numbers.device)
    return words.sum(2).to(torch.int32)  # modulo 2^32


def _unpack(words: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Unpack the result of `_pack`: `count` numbers of each chunk, int64."""
    if not width:
        return torch.zeros(words.shape[0], count, dtype=torch.int64, device=words.device)
    bits = words.to(torch.int64)[:, :, None] >> torch.arange(32, device=words.device) & 1
    rows = bits.flatten(1)[:, : count * width].view(-1, count, width)
    return (rows << torch.arange(width, device=words.device)).sum(2)


def _ranks_found(flags: torch.Tensor, sent: int) -> torch.Tensor:
    """Return the places of the first `sent` set flags of each row; `nonzero` would wait for the device."""
    ranks = torch.arange(1, sent + 1, device=flags.device).expand(flags.shape[0], sent)
    return torch.searchsorted(flags.cumsum(1), ranks.contiguous())


def _bfloat16_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of the nearest bfloat16 of float32 values, as int32; one bit pattern for all NaN."""
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return torch.where(values.isnan(), 0x7FC0, rounded).to(torch.int32)


def _levels_reference(magnitudes: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of the levels (chunks × 2), and the level number of each (finite) magnitude."""
    most, least = magnitudes.amax(1, keepdim=True), magnitudes.amin(1, keepdim=True)
    if bits == 4:
        levels = _bfloat16_bits(torch.cat([least, most], 1)).clamp(max=LARGEST_LEVEL)
        lower, higher = (levels << 16).view(torch.float32).split(1, 1)
        step = (higher - lower) / 7
        numbers = ((magnitudes - lower) / step.where(step > 0, 1.0)).round().clamp(0, 7)
        return levels, numbers.where(step > 0, 0.0).to(torch.int64)
    wide = magnitudes.to(torch.float64)
    _, exponent = torch.frexp(most.to(torch.float64))
    unit = torch.ldexp(torch.ones_like(wide[:, :1]), exponent - UNITS)
    units = (wide / unit).to(torch.int64)
    mean = units.sum(1, keepdim=True).to(torch.float64) / magnitudes.shape[1] * unit
    above = wide > least.to(torch.float64) + (mean - least.to(torch.float64)) * TAIL
    means = []
    for part in (~above, above):
        many = part.sum(1, keepdim=True).clamp(min=1)
        means.append((units * part).sum(1, keepdim=True).to(torch.float64) / many * unit)
    levels = _bfloat16_bits(torch.cat(means, 1).to(torch.float32)).clamp(max=LARGEST_LEVEL)
    return levels, above.to(torch.int64)


def _codes_reference(chosen: torch.Tensor, bits: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the word with the levels, and the codes of values (chunks × sent)."""
    raw = chosen.view(torch.int32)
    if bits == 32:
        return None, raw
    if bits == 16:
        return None, _pack(_bfloat16_bits(chosen), 16)
    magnitudes = chosen.abs()
    finite = magnitudes.isfinite().all(1, keepdim=True)
    levels, numbers = _levels_reference(magnitudes.where(finite, 0.0), bits)
    levels = levels.where(finite, 0x7FC0)
    codes = torch.where(finite, (raw < 0).to(torch.int64) | numbers << 1, 0)
    return (levels[:, :1] | levels[:, 1:] << 16), _pack(codes, bits)


def encode_reference(values: torch.Tensor, wire: torch.Tensor, how: Chunking) -> None:
    """Run `encode` in plain torch."""
    for form, records, rows in split(wire, values, how):
        magnitudes = rows.view(torch.int32) & 0x7FFFFFFF
        threshold = magnitudes.topk(form.sent, 1, sorted=False).values.amin(1, keepdim=True)
        above, equal = magnitudes > threshold, magnitudes == threshold
        taken = above | (equal & (equal.cumsum(1) <= form.sent - above.sum(1, keepdim=True)))
        places = _ranks_found(taken, form.sent)
        levels, codes = _codes_reference(rows.gather(1, places), form.bits)
        if levels is not None:
            records[:, :1] = levels
        upper = torch.zeros(len(rows), 32 * (form.lower - form.upper), dtype=torch.int64, device=rows.device)
        spread = form.spread * torch.arange(form.sent, device=rows.device)
        upper.scatter_(1, (places >> form.low) + spread, 1)
        records[:, form.upper : form.lower] = _pack(upper, 1)
        if form.low:
            records[:, form.lower : form.codes] = _pack(places & (1 << form.low) - 1, form.low)
        records[:, form.codes :] = codes


def contents_reference(records: torch.Tensor, form: RecordForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places (int64) and the values (float32) of records, chunks × sent."""
    flags = _unpack(records[:, form.upper : form.lower], 32 * (form.lower - form.upper), 1)
    spread = form.spread * torch.arange(form.sent, device=records.device)
    lower = _unpack(records[:, form.lower : form.codes], form.sent, form.low)
    places = (_ranks_found(flags, form.sent) - spread << form.low) | lower
    places = places.clamp(max=form.length - 1)  # of an invalid payload, which is not detected on a GPU
    codes = records[:, form.codes :].contiguous()
    if form.bits == 32:
        return places, codes.view(torch.float32)
    if form.bits == 16:
        return places, (_unpack(codes, form.sent, 16) << 16).to(torch.int32).view(torch.float32)
    numbers = _unpack(codes, form.sent, form.bits)
    head = records[:, :1].contiguous()
    lowest, highest = (head << 16).view(torch.float32), (head & -65536).view(torch.float32)
    if form.bits == 4:
        step = (highest - lowest) / 7
        levels = lowest + (numbers >> 1).to(torch.float32) * step
    else:
        levels = torch.where((numbers >> 1).bool(), highest, lowest)
    return places, torch.where((numbers & 1).bool(), -levels, levels)
