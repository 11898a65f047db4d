"""Draw k of n positions without replacement: torch reference, CPU kernel, launcher.

The n values form a circle with a random start, which is cut into k parts with lengths that differ by at most
one; one position of each part is drawn. Without the random start, values in shorter parts would be drawn more
often; with it, each value has the same probability k / n. Both draws multiply 32 random bits, so the relative
error of probabilities is at most length / 2^32.

There is no Triton kernel: on a GPU the torch reference computes the few positions.
"""

from __future__ import annotations

import numpy as np
import torch

from mcr_plus.kernels import counter, cpu


def positions_reference(numel: int, count: int, key: counter.Key, device: torch.device) -> torch.Tensor:
    """Run `positions` in plain torch."""
    part = torch.arange(count, device=device)
    length, longer = divmod(numel, count)
    drawn = counter.draw_reference(part, key) * (length + (part < longer).long()) >> 32
    at = part * length + part.clamp(max=longer) + drawn + _beginning(numel, key)
    return torch.where(at >= numel, at - numel, at)


@cpu.compiled
def _positions(numel, beginning, first, second, out, lo, hi):  # type: ignore[no-untyped-def]
    length, longer = numel // out.size, numel % out.size
    for part in range(lo, hi):
        random = np.int64(counter.draw(np.uint32(part), first, second))
        drawn = (random * (length + (part < longer))) >> 32
        at = part * length + min(part, longer) + drawn + beginning
        out[part] = at - numel if at >= numel else at


def positions(numel: int, count: int, key: counter.Key, device: torch.device) -> torch.Tensor:
    """Return `count` different int64 positions below `numel`; `count` < 2³², numel / count < 2³¹."""
    if device.type == "cuda":
        return positions_reference(numel, count, key, device)
    out = torch.empty(count, dtype=torch.int64, device="cpu")
    cpu.spread(_positions, count, out.nbytes, numel, _beginning(numel, key), *key, out.numpy())
    return out


def _beginning(numel: int, key: counter.Key) -> int:
    """Return a uniform number below `numel`, from 64 bits that no part uses."""
    high, low = counter.key_of("beginning", *map(int, key))
    return (int(high) << 32 | int(low)) * numel >> 64
