"""Payloads of `kernels/delta.py` in plain torch: the reference for tests of its kernels."""

from __future__ import annotations

from typing import Final

import torch

from mcr_plus.kernels.delta import DELTA, HEADER, put_header
from mcr_plus.kernels.delta_lists import RAW
from mcr_plus.kernels.digest import BLOCK, reference_digest, to_signed

_SIGNED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reference_encode(values: torch.Tensor, base: torch.Tensor, versions: tuple[int, int]) -> torch.Tensor:
    """Return the payload of changes from flat `base` to `values`, in plain torch; never an anchor."""
    width = values.element_size()
    new, old = _wide(values), _wide(base)
    heads, bodies = [], []
    for at in range(0, new.numel(), BLOCK):
        here, there = new[at : at + BLOCK], old[at : at + BLOCK]
        (where,) = torch.nonzero(here != there, as_tuple=True)
        body = _list(where, here, there, width)
        head = (where.numel(), body.numel() // 2)
        if body.numel() >= here.numel() * width:
            body, head = here.to(_SIGNED[width]).view(torch.uint8), (RAW, 0)
        heads.append(head)
        bodies.append(body)
    lists = torch.tensor(heads, dtype=torch.int32, device="cpu").view(-1).to(torch.int16).view(torch.uint8)
    payload = torch.cat([torch.zeros(HEADER, dtype=torch.uint8, device="cpu"), lists, *bodies])
    fields = (reference_digest(base), reference_digest(values), payload.numel())
    payload = torch.nn.functional.pad(payload, (0, -payload.numel() % 4))
    put_header(payload, DELTA, width, values.numel(), *versions, *fields)
    return payload


def _list(where: torch.Tensor, here: torch.Tensor, there: torch.Tensor, width: int) -> torch.Tensor:
    """Return the list of a block; the elements at `where` have changed."""
    count = where.numel()
    if not count:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    gaps = torch.diff(where, prepend=torch.tensor([-1], device="cpu")) - 1
    low = max(0, ((here.numel() - count) * 11 // (16 * count)).bit_length() - 1)
    ones = torch.zeros(int((gaps >> low).sum()) + count, dtype=torch.int64, device="cpu")
    ones[(gaps >> low).cumsum(0) + torch.arange(count, device="cpu")] = 1
    steps = _ordered(here[where], width) - _ordered(there[where], width)
    if width < 8:
        half = 1 << (8 * width - 1)
        steps = (steps + half) % (2 * half) - half
    # The smallest int64 has no positive counterpart, so `abs` leaves it negative.
    near = (steps.abs() <= 9) & (steps.abs() > 0)
    kinds = torch.where(steps.abs() == 1, (steps < 0).long(), torch.where(near, 2, 3))
    short = steps[kinds == 2]
    body = torch.cat([
        _packed(gaps & (1 << low) - 1, low),
        _packed(kinds, 2),
        _packed(short.abs() - 2 | (short < 0).long() << 3, 4),
        here[where][kinds == 3].to(_SIGNED[width]).view(torch.uint8),
        _packed(ones, 1),
    ])  # fmt: skip
    return torch.nn.functional.pad(body, (0, body.numel() % 2))


def _packed(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """Pack numbers of `width` bits, without gaps, into bytes."""
    bits = (numbers[:, None] >> torch.arange(width, device="cpu") & 1).view(-1)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, device="cpu")).sum(1).to(torch.uint8)


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return the bits as int64, non-negative except for elements of 8 bytes."""
    width = values.element_size()
    bits = values.view(_SIGNED[width]).to(torch.int64)
    return bits if width == 8 else bits & ((1 << 8 * width) - 1)


def _ordered(bits: torch.Tensor, width: int) -> torch.Tensor:
    sign = to_signed(1 << 63) if width == 8 else 1 << (8 * width - 1)
    full = -1 if width == 8 else (1 << 8 * width) - 1
    return torch.where((bits & sign) != 0, bits ^ full, bits ^ sign)
