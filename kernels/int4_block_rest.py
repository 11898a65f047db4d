"""int4_block with error feedback: sum, payload and residual in one pass over memory, on the CPU."""

from __future__ import annotations

import numpy as np
import torch

from mcr_plus.kernels import cpu, int4_block
from mcr_plus.kernels.int4_block import BLOCK, CHUNK, NAN, STRIP, TOGETHER

_MINUS: np.float32 = np.float32(-1)


@cpu.compiled
def _encode_rest(values, decay, rest, scales, codes, lo, hi):  # type: ignore[no-untyped-def]
    for first in range(lo, hi, STRIP):
        end = min(first + STRIP, hi)
        at = first * CHUNK
        part = rest[at : min(end * CHUNK, rest.size)]
        given = values[at : at + part.size]
        for i in range(part.size):
            part[i] = np.float32(decay * part[i]) + given[i]
        int4_block.encode_chunks(rest, scales, codes, first, end)
        int4_block.decode_chunks(scales, codes, _MINUS, True, rest, first, end)
        for block in range(first * TOGETHER, min(end * TOGETHER, scales.size)):
            if scales[block] == NAN:
                rest[block * BLOCK : block * BLOCK + BLOCK] = 0


def encode_rest(values: torch.Tensor, decay: float, rest: torch.Tensor, wire: torch.Tensor) -> None:
    """Encode `decay` × `rest` + `values`, and write the encoding error to `rest`.

    All tensors are flat float32 on the CPU; without `hadamard`. Non-finite errors become zero in `rest`. The
    result has the same bits as separate operations.
    """
    scales, codes = int4_block.split(wire, values.numel())
    arrays = (rest.numpy(), scales.numpy().view(np.uint16), codes.numpy())
    chunks = int4_block.chunks_of(values)
    cpu.spread(_encode_rest, chunks, values.nbytes, values.numpy(), np.float32(decay), *arrays)
