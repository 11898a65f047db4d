"""Block hashes of `mcr_plus.kernels.digest` in Triton, with the same results."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from mcr_plus.kernels.digest import BLOCK, FACTOR, FOLD, SEED, blocks_of, to_signed

_PER: Final = 16  # blocks per program: their chains fill the lanes of four warps
_FACTOR: Final = tl.constexpr(to_signed(int(FACTOR)))
_SEED: Final = tl.constexpr(to_signed(SEED))
_FOLD: Final = tl.constexpr(FOLD)
_BELOW: Final = tl.constexpr((1 << 64 - FOLD) - 1)


@triton.jit
def _mix(left, right):  # type: ignore[no-untyped-def]
    product = (left ^ right) * _FACTOR
    return product ^ ((product >> _FOLD) & _BELOW)


@triton.jit
def _hash(words, tail, hashes, whole, total, blocks, rows, most, per: tl.constexpr):  # type: ignore[no-untyped-def]
    """Hash `whole` words, and one word of remaining bytes if `total` is larger; `rows` of eight per block.

    `most`: number of rows in the longest block.
    """
    block = tl.program_id(0).to(tl.int64) * per + tl.arange(0, per)
    lane = tl.arange(0, 8)
    chains = (tl.zeros([per, 8], tl.int64) + (2 * lane + 1)[None, :]) * _SEED
    rest = tl.load(tail)
    for row in range(most):
        begin = (block * rows + row) * 8
        at = begin[:, None] + lane[None, :]
        word = tl.load(words + at, at < whole, 0)
        word = tl.where((at == whole) & (total > whole), rest, word)
        chains = tl.where((begin < total)[:, None], _mix(chains, word), chains)
    found = tl.zeros([per], tl.int64)
    for k in tl.static_range(8):
        found = _mix(found, tl.sum(tl.where((lane == k)[None, :], chains, 0), 1))
    tl.store(hashes + block, found, block < blocks)


def hashes_of(values: torch.Tensor) -> torch.Tensor:
    """Return the hash of each block of flat `values`, on their device, as int64 with the same bits."""
    raw = values.detach().view(torch.uint8)
    whole, device = raw.numel() // 8, values.device
    blocks = blocks_of(values.numel())
    tail = torch.zeros(8, dtype=torch.uint8, device=device)
    tail[: raw.numel() - 8 * whole] = raw[8 * whole :]
    # Fewer than 8 bytes have no word, but a pointer must be passed.
    words = raw[: 8 * whole].view(torch.int64) if whole else tail.view(torch.int64)
    hashes = torch.empty(blocks, dtype=torch.int64, device=device)
    total, rows = -(-raw.numel() // 8), BLOCK * values.element_size() // 64
    most = min(rows, -(-total // 8))
    grid = (-(-blocks // _PER),)
    _hash[grid](words, tail.view(torch.int64), hashes, whole, total, blocks, rows, most, per=_PER)
    return hashes
