"""Error of a codec, measured on normally distributed values."""

from __future__ import annotations

from typing import Final

import torch

from mcr_plus.compression.codec import PayloadCodec, make
from mcr_plus.errors import McrError

_VALUES: Final = 1 << 16


def relative_error(codec: str) -> float | None:
    """Return a codec's root mean square error with default options, relative to the values.

    Measured on 65,536 normal values in float32. None for codecs of packages that are not installed, and for
    codecs that cannot encode values alone (`powersgd`, `int_shared`).
    """
    try:
        found = make({"codec": codec})
    except McrError:
        return None
    if not isinstance(found, PayloadCodec) or found.traits.keeps_received:
        return 0.0 if found.traits.lossless else None
    values = torch.randn(_VALUES, generator=torch.Generator().manual_seed(0), device="cpu")
    wire = torch.zeros(found.wire_numel(_VALUES), dtype=found.wire_dtype, device="cpu")
    decoded = torch.empty_like(values)
    found.decode(wire[: found.encode(values, wire)], decoded)
    return float((decoded - values).norm() / values.norm())
