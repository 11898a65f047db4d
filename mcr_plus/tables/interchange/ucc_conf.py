"""Lines and sections of `ucc.conf`, as UCC reads them (`ini.c` and `ucc_parser.c` in its `src/utils`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from mcr_plus.core.units import Range
from mcr_plus.errors import short
from mcr_plus.tables.areas import single
from mcr_plus.tables.interchange.exchange import Assignment, assignments

HEADER: Final = "["
"""The `variable` of a line that begins a section; its `value` is the section's name."""
_KEYS: Final = ("vendor", "model", "team_size", "nnodes", "ppn", "sock")
_SPACE: Final = " \t\r\v\f"
_CONF: Final = re.compile(  # a header, but no test of a shell script; or a separator that no shell takes
    r"^[ \t]*(?:\[(?!.*\][ \t]*(?:&&|\|\|))|\w*UCC_\w+(?:[ \t]*:|[ \t]+=))", re.ASCII | re.MULTILINE
)
_RANKS_FIRST: Final = re.compile(r"^[ \t]*\[[\d,inf-]*\]:", re.ASCII | re.MULTILINE)
_LONGEST_NAME: Final = 127  # of a section


class Section(NamedTuple):
    """A section: its name, processor and numbers, and what a table cannot express of it.

    `refused` is the reason why UCC refuses the section, if it does.
    """

    text: str = ""
    processor: str = ""
    ranks: Range | None = None
    nodes: Range | None = None
    more: tuple[str, ...] = ()
    refused: str = ""


def split(text: str, separator: str) -> list[str]:
    """Split as `ucc_str_split` does: empty pieces are none."""
    return [piece for piece in text.split(separator) if piece]


def lines(text: str, indented: list[int]) -> Iterator[Assignment]:
    """Yield the lines of a `ucc.conf`, or of an environment or TUNE strings alone.

    Lines that UCC takes for more of the variable before them, and refuses, are added to `indented`.
    """
    if not _CONF.search(text if "UCC_" in text else _RANKS_FIRST.sub("", text)):
        for each in assignments(text):
            first, *more = each.value.split(";") if each.variable else [each.value]
            if each.variable or not first.startswith(";"):
                yield each._replace(value=first)
            for other in assignments("\n".join(more)):  # commands of a shell
                if other.value != "export":  # its variable comes next
                    yield other._replace(line=each.line)
        return
    follows = False
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip(_SPACE)
        if line[:1] in ("", ";", "#"):
            continue
        if follows and raw[0] in _SPACE:
            indented.append(number)
        line = re.split(r"\s;", line, maxsplit=1, flags=re.ASCII)[0]
        follows = line[0] != "["
        if follows:
            variable = re.split("[=:]", line, maxsplit=1)[0]
            value = line[len(variable) + 1 :]
            yield Assignment(number, variable.rstrip(_SPACE), value.strip(_SPACE))
        else:
            name, closed, _ = line[1:].partition("]")
            yield Assignment(number, HEADER, name[:_LONGEST_NAME] if closed else line)


def section_of(text: str) -> Section:
    """Read the name of a section."""
    try:
        return _section(text)
    except ValueError as error:
        return Section(text, refused=str(error))


def _section(text: str) -> Section:
    words: dict[str, str] = {}
    numbers: dict[str, Range] = {}
    for word in split(text, " "):
        key, value, *_ = *split(word, "="), "", ""
        key = "vendor" if key.lower() == "vendor" else key
        if key not in _KEYS or not value:
            raise ValueError(f"expected key=value with {', '.join(_KEYS)}, got {short(word)}")
        if key not in _KEYS[:2]:
            numbers[key] = _range(value)
        words[key] = value
    processor = " ".join(f"{key}={words.pop(key).lower()}" for key in ("vendor", "model") if key in words)
    ranks, nodes, per_node, _ = (numbers.get(key) for key in _KEYS[2:])
    more = [f"sock={words['sock']}"] if "sock" in words else []
    if per_node is not None:
        known = (single(nodes) or 0) * (single(per_node) or 0)
        ranks = ranks or (Range(known, known + 1) if known else None)
        if not known or single(ranks) != known:
            more.append(f"ppn={per_node}")
    return Section(text, processor, ranks, nodes, tuple(more))


def _range(text: str) -> Range:
    """Read `4` or `2-8` as `strtol` does."""
    pieces = split(text, "-")
    numbers = [each for each in pieces if re.fullmatch(r"\s*\+?\d{1,18}", each, re.ASCII)]
    if not 1 <= len(pieces) == len(numbers) <= 2:
        raise ValueError(f"expected a number or a range such as 2-8, got {short(text)}")
    lo, hi = (int(numbers[at]) % (1 << 32) for at in (0, -1))
    if hi < max(lo, 1):
        raise ValueError(f"empty range {short(text)}; expected the smaller number first")
    return Range(lo, hi + 1)
