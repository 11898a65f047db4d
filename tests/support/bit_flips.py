"""Flips of one bus line in several words; checksums and digests must detect all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch


def missed(of: Callable[[torch.Tensor], object], raw: torch.Tensor, lanes: int) -> list[tuple[object, ...]]:
    """Return the flips of uint8 `raw` that `of(raw)` misses; its words go to `lanes` chains in turn."""
    found, unseen = of(raw), []
    for what, flipped, bit in _flips(raw.numel() // 8, lanes):
        raw[flipped] ^= bit
        if of(raw) == found:
            unseen.append(what)
        raw[flipped] ^= bit
    assert of(raw) == found
    return unseen


def _flips(words: int, lanes: int) -> Iterator[tuple[tuple[object, ...], list[int], int]]:
    """Yield the name of a flip, its bytes, and the bits flipped in each byte."""
    # In the last row, after which chains meet, flip two words, and one of the two 32-bit values in each.
    for one, other in itertools.combinations(range((words - 1) // lanes * lanes, words), 2):
        for byte, bit in ((7, 0x80), (7, 0x40), (7, 0x20), (3, 0x80)):
            yield (one, other, byte, bit), [8 * one + byte, 8 * other + byte], bit
    # In one row, add any number of flips of that line in the chain's next word.
    for width in (1, 2, 4, 8) if words > lanes else ():
        line = range(width - 1, 8, width)
        for many in range(1, len(line) + 1):
            for after in itertools.combinations(line, many):
                yield (width, after), [7, *(8 * lanes + byte for byte in after)], 0x80
