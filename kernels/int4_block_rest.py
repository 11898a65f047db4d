"""int4_block with error feedback: sum, payload, and what the payload lacks, in one pass over memory. CPU."""

from __future__ import annotations

import numpy as np
import torch

from mcr_plus.kernels import cpu, int4_block
from mcr_plus.kernels.int4_block import BLOCK, CHUNK, NAN, TOGETHER

_MINUS: np.float32 = np.float32(-1)


@cpu.inlined
def _add(values, decay, rest):  # type: ignore[no-untyped-def]
    for i in range(rest.size):
        rest[i] = np.float32(decay * rest[i]) + values[i]


@cpu.compiled
def _encode_rest(values, decay, rest, scales, codes, lo, hi):  # type: ignore[no-untyped-def]
    work = int4_block.work_space()
    for chunk in range(lo, hi):  # all of it while the chunk is in the first cache
        at, first = chunk * CHUNK, chunk * TOGETHER
        if at + CHUNK <= rest.size:  # slices of a constant length, or no vector instructions
            _add(values[at : at + CHUNK], decay, rest[at : at + CHUNK])
        else:
            _add(values[at:], decay, rest[at:])
        part, few, room = int4_block.frame(chunk, rest, scales, codes)
        int4_block.encode_chunk(part, few, room, work)
        int4_block.put_back(chunk, rest, few, room, scales, codes)
        end = min(first + TOGETHER, scales.size)
        int4_block.decode_blocks(scales, codes, _MINUS, True, rest, first, end)
        for block in range(first, end):
            if scales[block] == NAN:
                rest[block * BLOCK : block * BLOCK + BLOCK] = 0


def encode_rest(values: torch.Tensor, decay: float, rest: torch.Tensor, wire: torch.Tensor) -> None:
    """Encode `decay` × `rest` + `values`, of which `rest` keeps what the payload lacks.

    All float32 and flat, on the CPU, without `hadamard`. What is not finite in the end becomes zero in
    `rest`. The same bits as one after the other.
    """
    scales, codes = int4_block.split(wire, values.numel())
    arrays = (rest.numpy(), scales.numpy().view(np.uint16), codes.numpy())
    chunks = int4_block.chunks_of(values)
    cpu.spread(_encode_rest, chunks, values.nbytes, values.numpy(), np.float32(decay), *arrays)
