"""Parsing and formatting of sizes, durations, counts and ranges.

    parse_size("64KiB")        65536
    parse_duration("5ms")      0.005
    parse_range("64KiB..1MiB") a Range, half-open; also `1MiB..`, `>=1MiB`, `<4KiB`, one number

Any other text raises a `ValueError` with the expected form.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import SupportsIndex, cast

from mcr_plus.errors import short

SIZE_UNITS: dict[str, int] = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
DURATION_UNITS: dict[str, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0}
MAX_INTEGER = (1 << 63) - 1


def parse_size(value: object) -> int:
    """Read a size in bytes: an int, or a text such as "64KiB"; raise `ValueError` with the expected form."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d{1,19}) ?([A-Za-z]*)", value.strip(), re.ASCII)
        if match is None:
            raise ValueError(f"expected a size such as 64KiB or a number of bytes, whole, got {short(value)}")
        number, unit = match.groups()
        if unit and unit not in SIZE_UNITS:
            raise ValueError(f"wrong unit {unit!r}; expected bytes or {', '.join(SIZE_UNITS)}")
        value = int(number) * SIZE_UNITS[unit or "B"]
    return _whole(value, "a size such as 64KiB or a number of bytes")


def format_size(nbytes: int) -> str:
    """Format a size in the largest unit that is exact, so that `parse_size` returns it."""
    unit = max((u for u in SIZE_UNITS if nbytes % SIZE_UNITS[u] == 0), key=SIZE_UNITS.__getitem__)
    return f"{nbytes // SIZE_UNITS[unit]}{unit}" if nbytes and unit != "B" else str(nbytes)


def size_words(nbytes: int) -> str:
    """Format a size for people, always with its unit: `96 B`, `64 KiB`."""
    text = format_size(nbytes)
    number = text.rstrip("".join(SIZE_UNITS))
    return f"{number} {text[len(number) :] or 'B'}"


def about(nbytes: int) -> str:
    """Format a size for people with about three digits: `96 B`, `40.3 MiB`, `1,000 KiB`."""
    unit = max(
        (name for name, size in SIZE_UNITS.items() if nbytes >= size), key=SIZE_UNITS.__getitem__, default="B"
    )
    number = nbytes / SIZE_UNITS[unit]
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def format_span(lo: int, hi: int | None) -> str:
    """Format a range of sizes as in files: `0..64KiB`, `96B..38KiB`, `1MiB..`.

    Plain bytes get their unit beside another unit, or they would seem to have that unit.
    """
    ends = [format_size(lo), "" if hi is None else format_size(hi)]
    if any(end and not end.isdigit() for end in ends):
        ends = [f"{end}B" if end.isdigit() and end != "0" else end for end in ends]
    return "..".join(ends)


def parse_duration(value: object) -> float:
    """Read a duration in seconds: a number, or "5ms"; raise `ValueError` with the expected form."""
    seconds = _seconds(value)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"expected a duration that is finite and more than 0, got {short(value)}")
    return seconds


def _seconds(value: object) -> float:
    expected = f"expected a duration such as 300s or a number of seconds, got {short(value)}"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(expected)
    if isinstance(value, str):
        match = re.fullmatch(r"(-?\d{1,19}(?:\.\d+)?) ?([A-Za-z]*)", value.strip(), re.ASCII)
        if match is None:
            raise ValueError(expected)
        number, unit = match.groups()
        if unit and unit not in DURATION_UNITS:
            raise ValueError(f"wrong unit {unit!r}; expected seconds or {', '.join(DURATION_UNITS)}")
        return float(number) * DURATION_UNITS[unit or "s"]
    return float(value) if abs(value) <= MAX_INTEGER else math.inf


def parse_count(value: object) -> int:
    """Read a plain whole number, as an int or as text; raise `ValueError` with the expected form."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,19}", value.strip(), re.ASCII):
        value = int(value)
    return _whole(value, "a whole number")


def _whole(value: object, expected: str) -> int:
    number = whole_number(value)
    if number is None or not 0 <= number <= MAX_INTEGER:
        raise ValueError(f"expected {expected}, got {short(value)}")
    return number


def whole_number(value: object) -> int | None:
    """Return an integer, also NumPy's, as an int; None for anything else, and for a bool."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(cast("SupportsIndex", value))
    except TypeError:
        return None


def whole_numbers(values: object) -> list[int] | None:
    """Return integers as ints; None if a value is not an integer, or `values` is not iterable."""
    try:
        found = [whole_number(each) for each in cast("Iterable[object]", values)]
    except TypeError:
        return None
    numbers = [each for each in found if each is not None]
    return numbers if len(numbers) == len(found) else None


@dataclass(frozen=True)
class Range:
    """Whole numbers from `lo` up to, not including, `hi`; no end if `hi` is None."""

    lo: int
    hi: int | None = None

    def covers(self, number: int | None) -> bool:
        """Return whether a number is in the range.

        None is the size of an operation with sizes that differ between ranks and must not affect decisions;
        it counts as large, so ranges without an end cover it.
        """
        if number is None:
            return self.hi is None
        return self.lo <= number and (self.hi is None or number < self.hi)

    def __str__(self) -> str:
        """Return the range as in files: `64..1024`, `64..` without an end, `64` if it is one number."""
        if self.hi == self.lo + 1:
            return str(self.lo)
        return f"{self.lo}..{'' if self.hi is None else self.hi}"


def parse_range(value: object, parse: Callable[[object], int] = parse_size) -> Range:
    """Read a range: `64KiB..1MiB` (half-open), `1MiB..`, `>=1MiB`, `>`, `<=`, `<`, `==`, or one number.

    `parse` reads its numbers. Raises ValueError for anything else, and for an empty range.
    """
    if isinstance(value, Range):
        return value
    text = value.strip() if isinstance(value, str) else ""
    bounds = _bounds(text, parse) if text else None
    lo, hi = bounds if bounds is not None else (parse(value), parse(value) + 1)
    if hi is not None and hi <= lo:
        raise ValueError(f"empty range {short(value)}; expected a lower end below the upper one")
    return Range(lo, hi)


def _bounds(text: str, parse: Callable[[object], int]) -> tuple[int, int | None] | None:
    """Return the ends of a range written as `a..b` or as a comparison; None for other forms."""
    if ".." in text:
        lo, _, hi = text.partition("..")
        return parse(lo), parse(hi) if hi.strip() else None
    match = re.match(r"(>=|<=|==|>|<)", text)
    if match is None:
        return None
    number = parse(text[match.end() :])
    ends: dict[str, tuple[int, int | None]] = {
        ">=": (number, None),
        ">": (number + 1, None),
        "<=": (0, number + 1),
        "<": (0, number),
        "==": (number, number + 1),
    }
    return ends[match.group()]
