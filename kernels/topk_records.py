"""The records of topk in chunks: how many bits places and values take, and where they begin.

Payload of n values: a record for each of the n // N whole chunks, then one for the rest, if there is one,
as for a chunk of that length. A record is words of 32 bits, little endian, of a length that follows from
the lengths alone, and has four parts, each filled up to whole words:

    levels    two bfloat16, the lower in the low half; only for values of 4 or 2 bits
    upper     the upper bits of places, as below
    lower     k × l bits: the l lower bits of each place
    codes     k × 32, 16, 4 or 2 bits: the values

Places ascend. With l lower bits, the upper part has bit (place >> l) + j set for the j-th place: the coding
of Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", 1974, and Fano, 1971, of
2 + l bits a place or less, within half a bit of the least. For 64 of 4096 values it takes 8 bits where a
place by itself has 12. Where one bit for every value is shorter, `upper` is that, and there are no lower
bits. What is shortest follows from N and k.
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
    """The options that determine a payload: of `chunk` values `ratio` are sent, in `bits` bits each."""

    chunk: int
    ratio: float
    bits: int

    def sent(self, numel: int) -> int:
        """Number of values sent of `numel`."""
        whole, rest = divmod(numel, self.chunk)
        return whole * self.sent_of(self.chunk) + (self.sent_of(rest) if rest else 0)

    def sent_of(self, length: int) -> int:
        """Number of values sent of one chunk."""
        return min(length, max(1, math.ceil(self.ratio * length)))

    def forms(self, numel: int) -> Iterator[tuple[RecordForm, int]]:
        """The forms of records, and how many have them."""
        whole, rest = divmod(numel, self.chunk)
        if whole:
            yield form_of(self.chunk, self.sent_of(self.chunk), self.bits), whole
        if rest:
            yield form_of(rest, self.sent_of(rest), self.bits), 1


@dataclass(frozen=True)
class RecordForm:
    """What a record is made of: `sent` of `length` values in `bits` bits; parts begin at the words `upper`, …

    `low`: the lower bits of a place. `spread`: 1 where the j-th place is moved by j, 0 for a bit a value.
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
        """The fields in this order, for kernels."""
        head = (self.length, self.sent, self.bits, self.low, self.spread)
        return (*head, self.upper, self.lower, self.codes, self.words)


@cache
def form_of(length: int, sent: int, bits: int) -> RecordForm:
    """The shortest form."""
    places = [(_words(length), 0, -1)]  # a bit for every value
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
    """Length of a payload, a multiple of 4."""
    return 4 * sum(form.words * count for form, count in how.forms(numel))


def split(
    wire: torch.Tensor, values: torch.Tensor, how: Chunking
) -> Iterator[tuple[RecordForm, torch.Tensor, torch.Tensor]]:
    """Each form with its records, as int32, and its values, chunks × words and chunks × length; views."""
    at = word = 0
    words = wire.view(torch.int32)
    for form, count in how.forms(values.numel()):
        end, last = at + form.length * count, word + form.words * count
        yield form, words[word:last].view(count, form.words), values[at:end].view(count, form.length)
        at, word = end, last
