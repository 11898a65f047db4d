"""The payloads of `kernels/delta.py` in plain torch, which its kernels are tested against."""

from __future__ import annotations

from typing import Final

import torch

from mcr_plus.kernels.delta import DELTA, FAR, HEADER, RAW, put_header
from mcr_plus.kernels.digest import BLOCK, reference_digest, to_signed

_SIGNED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reference_encode(values: torch.Tensor, base: torch.Tensor, versions: tuple[int, int]) -> torch.Tensor:
    """The payload of changes from flat `base` to `values`, block by block in plain torch; never an anchor."""
    width = values.element_size()
    full = (1 << 8 * width) - 1
    new, old = _wide(values), _wide(base)
    heads, bodies = [], []
    for at in range(0, new.numel(), BLOCK):
        here, there = new[at : at + BLOCK], old[at : at + BLOCK]
        (where,) = torch.nonzero(here != there, as_tuple=True)
        gaps = torch.diff(where, prepend=torch.tensor([-1])) - 1
        codes = (_ordered(here[where], width) - _ordered(there[where], width) + 7) & full
        beyond = (codes < 0) | (codes > 15)
        nibbles = torch.where(beyond, 7, codes)
        nibbles = torch.nn.functional.pad(nibbles, (0, -nibbles.numel() % 2)).view(-1, 2)
        body = torch.cat([
            gaps.clamp(max=FAR).to(torch.uint8),
            gaps[gaps >= FAR].to(torch.int16).view(torch.uint8),
            (nibbles[:, 0] | nibbles[:, 1] << 4).to(torch.uint8),
            here[where][beyond].to(_SIGNED[width]).view(torch.uint8),
        ])  # fmt: skip
        head = (where.numel(), int((gaps >= FAR).sum()), int(beyond.sum()))
        if body.numel() >= here.numel() * width:
            body, head = here.to(_SIGNED[width]).view(torch.uint8), (RAW, 0, 0)
        heads.append(head)
        bodies.append(body)
    lists = torch.tensor(heads, dtype=torch.int32).view(-1).to(torch.int16).view(torch.uint8)
    payload = torch.cat([torch.zeros(HEADER, dtype=torch.uint8), lists, *bodies])
    fields = (reference_digest(base), reference_digest(values), payload.numel())
    payload = torch.nn.functional.pad(payload, (0, -payload.numel() % 4))
    put_header(payload.numpy(), DELTA, width, values.numel(), *versions, *fields)
    return payload


def _wide(values: torch.Tensor) -> torch.Tensor:
    """The bits as non-negative int64, except for those of 8 bytes."""
    width = values.element_size()
    bits = values.view(_SIGNED[width]).to(torch.int64)
    return bits if width == 8 else bits & ((1 << 8 * width) - 1)


def _ordered(bits: torch.Tensor, width: int) -> torch.Tensor:
    sign = to_signed(1 << 63) if width == 8 else 1 << (8 * width - 1)
    full = -1 if width == 8 else (1 << 8 * width) - 1
    return torch.where((bits & sign) != 0, bits ^ full, bits ^ sign)
