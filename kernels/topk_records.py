"""Records of topk in chunks: number of bits and offsets of places and values.

Payload of n values: a record for each of the n // N whole chunks, then a record for the remaining values, if
any, as for a chunk of that length. A record consists of little-endian 32-bit words; its length depends only
on the options and the chunk's length. It has four parts, each padded to whole words:

    levels    two bfloat16, the lower one in the low half; only for values of 4 or 2 bits
    upper     upper bits of places, see below
    lower     k × l bits: l lower bits of each place
    codes     k × 32, 16, 4 or 2 bits: values

Places ascend. With l lower bits, the upper part has bit (place >> l) + j set for the j-th place. This is the
coding of Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", 1974, and Fano,
1971, with at most 2 + l bits per place, within half a bit of the minimum. For 64 of 4096 values it takes 8
bits per place instead of 12. If one bit per value is shorter, `upper` has one bit per value, and there are no
lower bits. The shortest form follows from N and k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

LARGEST: Final = 1 << 16
"""The longest chunk, whose places have 16 bits."""


@dataclass(frozen=True)
class Chunking:
    """Options that determine a payload: of `chunk` values, the share `ratio` is sent, in `bits` bits each."""

    chunk: int
    ratio: float
    bits: int

    def sent(self, numel: int) -> int:
        """Return the number of values sent of `numel`."""
        whole, rest = divmod(numel, self.chunk)
        return whole * self.sent_of(self.chunk) + (self.sent_of(rest) if rest else 0)

    def sent_of(self, length: int) -> int:
        """Return the number of values sent of one chunk."""
        return min(length, max(1, math.ceil(self.ratio * length)))

    def forms(self, numel: int) -> Iterator[tuple[RecordForm, int]]:
        """Yield the forms of records, each with the number of records."""
        whole, rest = divmod(numel, self.chunk)
        if whole:
            yield form_of(self.chunk, self.sent_of(self.chunk), self.bits), whole
        if rest:
            yield form_of(rest, self.sent_of(rest), self.bits), 1


@dataclass(frozen=True)
class RecordForm:
    """Form of a record: `sent` of `length` values, in `bits` bits each; parts begin at the words `upper`, …

    `low`: number of lower bits of a place. `spread`: 1 if the j-th place is moved by j, 0 for one bit per
    value.
    """

    length: int
    sent: int
    bits: int
    low: int
    spread: int
    upper: int
    lower: int
    codes: int
    words: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the fields in this order, for kernels."""
        head = (self.length, self.sent, self.bits, self.low, self.spread)
        return (*head, self.upper, self.lower, self.codes, self.words)


@cache
def form_of(length: int, sent: int, bits: int) -> RecordForm:
    """Return the shortest form."""
    places = [(_words(length), 0, -1)]  # one bit per value
    for low in range(length.bit_length()):
        upper = _words(sent + ((length - 1) >> low))
        places.append((upper + _words(sent * low), upper, low))
    total, upper, low = min(places)
    head = 1 if bits < 16 else 0
    upper = total if low < 0 else upper
    at = (head, head + upper, head + total)
    return RecordForm(length, sent, bits, max(low, 0), int(low >= 0), *at, head + total + _words(sent * bits))


def _words(bits: int) -> int:
    return -(-bits // 32)


def nbytes(numel: int, how: Chunking) -> int:
    """Return the length of a payload, a multiple of 4."""
    return 4 * sum(form.words * count for form, count in how.forms(numel))


def split(
    wire: torch.Tensor, values: torch.Tensor, how: Chunking
) -> Iterator[tuple[RecordForm, torch.Tensor, torch.Tensor]]:
    """Yield each form with its records (int32, chunks × words) and values (chunks × length), as views."""
    at = word = 0
    words = wire.view(torch.int32)
    for form, count in how.forms(values.numel()):
        end, last = at + form.length * count, word + form.words * count
        yield form, words[word:last].view(count, form.words), values[at:end].view(count, form.length)
        at, word = end, last
