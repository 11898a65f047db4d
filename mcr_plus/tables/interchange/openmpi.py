"""Rules of Open MPI's `coll_tuned`, in the text format of Open MPI 4 and 5 (6 also reads JSON).

    mpirun --mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_dynamic_rules_filename FILE

    1                # collectives
    2                # allreduce, by number
    1                # communicator sizes
    0                # from 0 ranks on
    2                # message sizes
    0 3 0 0          # bytes, algorithm, fan in and out, segment size
    65536 4 0 0

A row applies from its bytes up to the next row's, and a communicator size up to the next one's; the first one
also applies to smaller communicators. Numbers of algorithms are those of Open MPI 5.0 (`ompi_info --param
coll tuned --level 9`); 0 leaves the choice to Open MPI. A file with `rule-file-version-2` as its first line
may have a fifth number in a row, the maximum number of requests.

Choices are `mpi:algorithm`, followed by the numbers that are not 0:
`mpi:binary_tree/fanout=2/segment=64KiB/requests=4`.

Only blocking collectives of MPI use these rules. Barriers and alltoallv are looked up with 0 bytes. Scatter
needs one choice for all sizes: only its root has the size, and ranks with different choices hang. Allgatherv
counts one rank's average share; all others count bytes as tables do. Open MPI's own parser skips all text
except numbers, and silently drops an invalid file; both are errors here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from mcr_plus.core.units import MAX_INTEGER, Range, format_size, parse_count, parse_size
from mcr_plus.errors import short
from mcr_plus.tables.areas import intersection
from mcr_plus.tables.interchange.exchange import (
    Exported,
    Exporter,
    ForeignCollective,
    Imported,
    TableFormat,
    algorithm_of,
    imported,
    mistake,
    rank_cells,
)
from mcr_plus.tables.table import Basis, Table, TableKey, TableRule

_LIBRARY: Final = "Open MPI"
COLLECTIVES: Final = {
    "all_reduce": ForeignCollective("allreduce"),
    "broadcast": ForeignCollective("bcast"),
    "reduce": ForeignCollective("reduce"),
    "all_gather": ForeignCollective("allgather"),
    "all_gather_v": ForeignCollective("allgatherv", basis="per_rank"),
    "reduce_scatter": ForeignCollective("reduce_scatter_block"),
    "reduce_scatter_v": ForeignCollective("reduce_scatter"),
    "all_to_all": ForeignCollective("alltoall"),
    "all_to_all_v": ForeignCollective("alltoallv", sized=False),
    "gather": ForeignCollective("gather"),
    "scatter": ForeignCollective("scatter", sized=False),
    "barrier": ForeignCollective("barrier", sized=False),
}
NUMBERS: Final = {
    "allgather": 0, "allgatherv": 1, "allreduce": 2, "alltoall": 3, "alltoallv": 4, "alltoallw": 5,
    "barrier": 6, "bcast": 7, "exscan": 8, "gather": 9, "gatherv": 10, "reduce": 11, "reduce_scatter": 12,
    "reduce_scatter_block": 13, "scan": 14, "scatter": 15, "scatterv": 16, "neighbor_allgather": 17,
    "neighbor_allgatherv": 18, "neighbor_alltoall": 19, "neighbor_alltoallv": 20, "neighbor_alltoallw": 21,
}  # fmt: skip
"""Open MPI's numbers of collectives."""
ALGORITHMS: Final[Mapping[str, tuple[str, ...]]] = {
    "allreduce": (
        "ignore", "basic_linear", "nonoverlapping", "recursive_doubling", "ring", "segmented_ring",
        "rabenseifner",
    ),
    "alltoall": ("ignore", "linear", "pairwise", "modified_bruck", "linear_sync", "two_proc"),
    "allgather": (
        "ignore", "linear", "bruck", "recursive_doubling", "ring", "neighbor", "two_proc", "sparbit",
    ),
    "allgatherv": ("ignore", "default", "bruck", "ring", "neighbor", "two_proc", "sparbit"),
    "alltoallv": ("ignore", "basic_linear", "pairwise"),
    "barrier": (
        "ignore", "linear", "double_ring", "recursive_doubling", "bruck", "two_proc", "tree",
    ),
    "bcast": (
        "ignore", "basic_linear", "chain", "pipeline", "split_binary_tree", "binary_tree", "binomial",
        "knomial", "scatter_allgather", "scatter_allgather_ring",
    ),
    "reduce": (
        "ignore", "linear", "chain", "pipeline", "binary", "binomial", "in-order_binary", "rabenseifner",
    ),
    "reduce_scatter": ("ignore", "non-overlapping", "recursive_halving", "ring", "butterfly"),
    "reduce_scatter_block": (
        "ignore", "basic_linear", "recursive_doubling", "recursive_halving", "butterfly",
    ),
    "gather": ("ignore", "basic_linear", "binomial", "linear_sync"),
    "scatter": ("ignore", "basic_linear", "binomial", "linear_nb"),
}  # fmt: skip
"""Algorithms of Open MPI 5.0 by their numbers; 4.1 has all but `sparbit`."""
_TWO: Final = Range(2, 3)
_FOR_TWO: Final = "two_proc"
"""An algorithm that raises MPI_ERR_UNSUPPORTED_OPERATION on communicators of other sizes than 2."""
_INSTEAD: Final[Mapping[tuple[str, str], tuple[str, str, Callable[[int], bool]]]] = {
    ("allgather", "recursive_doubling"): ("bruck", "that are no power of two", lambda n: not n & (n - 1)),
    ("allgather", "neighbor"): ("ring", "that are odd", lambda n: not n % 2),
    ("allgatherv", "neighbor"): ("ring", "that are odd", lambda n: not n % 2),
}
"""What runs instead on some numbers of ranks (coll_base_allgather.c and coll_base_allgatherv.c of 4.1.8 and
5.0.10): the other algorithm, these numbers in words, and a test for the numbers on which it runs as named.
"""
_FEW: Final[Mapping[tuple[str, str], str]] = {
    ("allreduce", "ring"): "recursive_doubling",
    ("allreduce", "rabenseifner"): "basic_linear",
    ("reduce", "rabenseifner"): "linear",
    ("bcast", "scatter_allgather"): "basic_linear",
    ("bcast", "scatter_allgather_ring"): "basic_linear",
}
"""What runs instead with fewer elements than ranks (coll_base_*.c of 4.1.8 and 5.0.10)."""
_SHORT: Final[Mapping[tuple[str, str], str]] = {
    ("allreduce", "segmented_ring"): "ring",
    ("bcast", "split_binary_tree"): "chain",
}
"""What runs instead with less than one segment for each rank, or for each half of a split tree."""
_ELEMENT: Final = 16  # bytes of the largest dtype; rules files have no dtypes
_MANY_RANKS: Final = 256  # where a rule names no number of ranks

_KINDS: Final = {collective.name: kind for kind, collective in COLLECTIVES.items()}
_NAMES: Final = {number: name for name, number in NUMBERS.items()}


class Setting(NamedTuple):
    """The settings in a row; algorithm 0 leaves the choice to Open MPI."""

    algorithm: int = 0
    fanout: int = 0
    segment: int = 0
    requests: int = 0


Rows = list[tuple[int, Setting]]
Block = tuple[int, Rows]
"""The smallest number of ranks, and settings by smallest size."""


# --- Out ------------------------------------------------------------------------------------------------


def export(table: Table, backend: str) -> Exported:
    """Write the rules of a table that the format can express, and report the others."""
    out = Exporter(table, backend, _LIBRARY, COLLECTIVES, ("ranks",))
    blocks = {kind: _blocks(out, kind) for kind in COLLECTIVES if out.rules(kind)}
    written = {kind: of_kind for kind, of_kind in blocks.items() if _is_needed(out, kind, blocks)}
    settings = [setting for of_kind in written.values() for _, rows in of_kind for _, setting in rows]
    version_2 = any(setting.requests for setting in settings)
    lines = ["rule-file-version-2"] if version_2 else []
    lines.append(f"{len(written)}  # collectives; algorithms are numbered as in Open MPI 5.0")
    for kind in sorted(written, key=lambda kind: NUMBERS[COLLECTIVES[kind].name]):
        lines += _lines(COLLECTIVES[kind].name, written[kind], version_2=version_2)
    return out.exported(lines)


def _blocks(out: Exporter, kind: str) -> list[Block]:
    blocks: list[Block] = []
    for cell in _cells(out.rules(kind)):
        pieces = [
            (sizes.lo, _setting(out, kind, rule, cell, sizes.lo))
            for sizes, rule in out.pieces(kind, ranks=cell)
        ]
        rows = [next(run) for _, run in groupby(pieces, key=lambda row: row[1])]
        if not blocks or blocks[-1][1] != rows:
            blocks.append((0 if cell is None else cell.lo, rows))
    return blocks


def _cells(rules: Sequence[TableRule]) -> list[Range | None]:
    """Return the ranges of ranks with the same rules; that of 2 ranks alone if an algorithm is for these."""
    cells = rank_cells(rules)
    if not any(_name_of(algorithm_of(rule.backend)) == _FOR_TWO for rule in rules):
        return cells
    bounds = {0, 2, 3, *(cell.lo for cell in cells if cell is not None)}
    return [Range(lo, hi) for lo, hi in pairwise([*sorted(bounds), None]) if lo is not None]


def _name_of(algorithm: str) -> str:
    return algorithm.partition("/")[0]


def _setting(out: Exporter, kind: str, rule: TableRule | None, ranks: Range | None, smallest: int) -> Setting:
    algorithm = algorithm_of(rule.backend) if rule is not None else ""
    if rule is None or not algorithm:
        return Setting()
    collective, name = COLLECTIVES[kind].name, _name_of(algorithm)
    try:
        found = setting(collective, algorithm)
    except ValueError as error:
        out.report(rule, f"{error}; left to {_LIBRARY}")
        return Setting()
    if name == _FOR_TWO and ranks != _TWO:
        if ranks is None or ranks.hi is None or ranks.hi > _TWO.lo:
            out.report(rule, f"{name} raises on other numbers of ranks than 2; these are left to {_LIBRARY}")
        return Setting()
    if (collective, name) in _INSTEAD:
        other, numbers, runs = _INSTEAD[collective, name]
        lo, hi = (0, None) if ranks is None else (max(ranks.lo, 2), ranks.hi)
        if hi is None or not all(map(runs, range(lo, min(hi, lo + 3)))):
            out.report(rule, f"on numbers of ranks {numbers} {_LIBRARY} runs {other} instead of {name}")
    most = _MANY_RANKS if ranks is None or ranks.hi is None else ranks.hi - 1
    if few := _FEW.get((collective, name)):
        halves = name == "rabenseifner"
        least = 1 << (most.bit_length() - 1) if halves else most
        what = "the largest power of two up to the number of ranks" if halves else "ranks"
        if smallest < least * _ELEMENT:
            out.report(rule, f"with fewer elements than {what} {_LIBRARY} runs {few} instead of {name}")
    if short_one := _SHORT.get((collective, name)):
        parts, part = (2, "half") if collective == "bcast" else (most, "rank")
        least = parts * (found.segment or _ELEMENT)
        tiny = found.segment < _ELEMENT and collective == "allreduce"
        if smallest < least or tiny:
            what = "with segments shorter than an element" if tiny else f"without a segment for each {part}"
            what = what if found.segment else "without segments"
            what = "with one element" if not found.segment and collective == "bcast" else what
            out.report(rule, f"{what} {_LIBRARY} runs {short_one} instead of {name}")
    return found


def setting(collective: str, text: str) -> Setting:
    """Read the algorithm of a choice, `ring` or `pipeline/segment=64KiB`; raises `ValueError`."""
    name, *options = text.split("/")
    known = ALGORITHMS[collective]
    if name not in known[1:]:
        raise ValueError(
            f"{_LIBRARY} has no {collective} algorithm {short(name)}; known: {', '.join(known[1:])}"
        )
    values: dict[str, int] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in Setting._fields[1:] or key in values:
            expected = ", ".join(f"{field}=…" for field in Setting._fields[1:])
            raise ValueError(f"unknown option {short(option)}; expected {expected}, each once")
        values[key] = parse_size(value) if key == "segment" else parse_count(value)
    return Setting(known.index(name), **values)


def _is_needed(out: Exporter, kind: str, blocks: Mapping[str, list[Block]]) -> bool:
    """Return whether a collective must be written: it has an algorithm, or a rule has its kind."""
    if any(setting != Setting() for _, rows in blocks[kind] for _, setting in rows):
        return True
    base = kind.removesuffix("_v")
    implied = base != kind and base in blocks and _is_needed(out, base, blocks)  # an import adds this one
    return out.has_rule_for(kind) and not implied


def _lines(collective: str, blocks: Sequence[Block], *, version_2: bool) -> Iterator[str]:
    yield f"{NUMBERS[collective]}  # {collective}"
    yield f"{len(blocks)}  # communicator sizes"
    for first, rows in blocks:
        yield f"{first}  # ranks and more"
        yield f"{len(rows)}  # message sizes"
        for lo, setting in rows:
            numbers = [lo, *(setting if version_2 else setting[:-1])]
            name = ALGORITHMS[collective][setting.algorithm] if setting.algorithm else "Open MPI's choice"
            yield f"{' '.join(map(str, numbers))}  # {format_size(lo)} and more: {name}"


# --- In -------------------------------------------------------------------------------------------------


class _FileToken(NamedTuple):
    line: int
    text: str


class _Numbers:
    """The numbers of a file, with their lines."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        lines = [line.partition("#")[0] for line in text.splitlines()]
        self.version = 1
        if lines and (match := re.fullmatch(r"rule-file-version-(\d{1,3})\s*", lines[0], re.ASCII)):
            self.version = int(match.group(1))
            lines[0] = ""
        self._tokens = [
            _FileToken(line, word) for line, words in enumerate(lines, 1) for word in words.split()
        ]
        self._next = 0

    @property
    def line(self) -> int:
        """The line of the last number read."""
        return self._tokens[self._next - 1].line if self._next else 1

    def more(self, *, here: bool = False) -> bool:
        """Return whether another number follows; `here`: in the same line."""
        if self._next == len(self._tokens):
            return False
        return not here or self._tokens[self._next].line == self.line

    def read(self, what: str, most: int = MAX_INTEGER) -> int:
        """Return the next number, in C's notation."""
        if not self.more():
            raise mistake(self._name, self.line, f"the file ends here; expected {what}")
        line, text = self._tokens[self._next]
        self._next += 1
        value = _c_integer(text)
        if value is None or value > most:
            limit = f" up to {most}" if most < MAX_INTEGER else ""
            limit = f", a whole number{limit}" if most >= 0 else ""  # -1: no number at all
            raise mistake(self._name, line, f"expected {what}{limit}, got {short(text)}")
        return value


def _c_integer(text: str) -> int | None:
    for pattern, base in ((r"[1-9]\d{0,18}|0", 10), (r"0[0-7]{1,21}", 8), (r"0[xX][0-9a-fA-F]{1,16}", 16)):
        if re.fullmatch(pattern, text, re.ASCII):
            return int(text, base)
    return None


def import_(text: str, name: str, backend: str) -> Imported:
    """Read a rules file into a table; raises `ConfigError` for text that Open MPI would skip or drop."""
    numbers = _Numbers(text, name)
    if numbers.version not in (1, 2):
        raise mistake(name, 1, f"unknown version {numbers.version}; known: 1, 2")
    rules: list[TableRule] = []
    lost: list[str] = []
    seen: dict[int, int] = {}
    for _ in range(numbers.read("the number of collectives", len(NUMBERS))):
        collective = numbers.read("the number of a collective", len(NUMBERS) - 1)
        if collective in seen:
            what = f"collective {collective} ({_NAMES[collective]}) is also in line {seen[collective]}"
            raise mistake(name, numbers.line, f"{what}; expected it once")
        seen[collective] = numbers.line
        rules += _collective(_NAMES[collective], numbers, name, backend, lost)
    if numbers.more():
        numbers.read("the end of the file", -1)
    return imported(rules, lost, backend, name)


def _collective(
    collective: str, numbers: _Numbers, name: str, backend: str, lost: list[str]
) -> Iterator[TableRule]:
    place = f"{name}:{numbers.line}"
    starts: list[int] = []
    blocks: list[list[tuple[int, int, Setting]]] = []
    for _ in range(numbers.read("how many communicator sizes")):
        starts.append(_rising(numbers, "a communicator size", starts, name))
        blocks.append(_rows(collective, numbers, name))
    if collective not in _KINDS:
        lost.append(f"{place}: tables have no {collective}")
        return
    kind = _KINDS[collective]
    for index, rows in enumerate(blocks):
        ends = [0 if index == 0 else starts[index], *starts[index + 1 : index + 2]]
        ranks = Range(ends[0], ends[1] if len(ends) > 1 else None)
        if ranks.hi is not None and ranks.hi <= max(ranks.lo, 1):
            lost.append(f"{place}: no communicator has so few ranks as {ranks}")
        else:
            yield from _rules(kind, None if ranks == Range(0) else ranks, rows, name, backend, lost)


def _rows(collective: str, numbers: _Numbers, name: str) -> list[tuple[int, int, Setting]]:
    """Return line, first size and setting of every row."""
    rows: list[tuple[int, int, Setting]] = []
    known = ALGORITHMS.get(collective)
    for _ in range(numbers.read("how many message sizes")):
        size = _rising(numbers, "a message size", [row[1] for row in rows], name)
        if not rows and size:
            what = f"the first message size is {size}; expected 0, or Open MPI drops the whole file"
            raise mistake(name, numbers.line, what)
        algorithm = numbers.read("an algorithm")
        if known is not None and algorithm >= len(known):
            names = ", ".join(f"{number} {known_name}" for number, known_name in enumerate(known))
            raise mistake(name, numbers.line, f"unknown {collective} algorithm {algorithm}; known: {names}")
        fanout, segment = numbers.read("the fan in and out"), numbers.read("a segment size")
        requests = 0
        if numbers.version > 1 and numbers.more(here=True):
            requests = numbers.read("the most requests")
        rows.append((numbers.line, size, Setting(algorithm, fanout, segment, requests)))
    return rows


def _rising(numbers: _Numbers, what: str, before: Sequence[int], name: str) -> int:
    value = numbers.read(what)
    if before and value <= before[-1]:
        raise mistake(name, numbers.line, f"{what}: {value} after {before[-1]}; expected ascending ones")
    return value


def _rules(
    kind: str,
    ranks: Range | None,
    rows: Sequence[tuple[int, int, Setting]],
    name: str,
    backend: str,
    lost: list[str],
) -> Iterator[TableRule]:
    collective = COLLECTIVES[kind]
    if not collective.sized:
        why = "only the root has the size" if kind == "scatter" else "it is looked up as if of 0 bytes"
        for line, size, _ in rows[1:]:
            lost.append(
                f"{name}:{line}: {collective.name} from {size} bytes on: {why}, the first row applies"
            )
        rows = rows[:1]
    basis: Basis = collective.basis if len(rows) > 1 else "total"
    ends = [*(size for _, size, _ in rows[1:]), None]
    for (line, size, setting), end in zip(rows, ends, strict=bool(rows)):
        text, applies = _text(collective.name, setting) if setting.algorithm else "", ranks
        place = f"{name}:{line}"
        if _name_of(text) == _FOR_TWO and ranks != _TWO:
            has_two = ranks is None or intersection(ranks, _TWO) is not None
            where = "; for these alone" if has_two else ""
            if not has_two or ranks is None or ranks.hi != _TWO.hi:  # a group of one looks nothing up
                lost.append(f"{place}: {_FOR_TWO} raises on other numbers of ranks than 2{where}")
            text, applies = (text, _TWO) if has_two else ("", ranks)
        choice = f"{backend}:{text}" if text else backend
        yield TableRule(choice, size, end, TableKey(kind, ranks=applies, basis=basis), place=place)
        if applies != ranks:
            yield TableRule(backend, size, end, TableKey(kind, ranks=ranks, basis=basis), place=place)


def _text(collective: str, setting: Setting) -> str:
    options = setting._asdict()
    del options["algorithm"]
    written = [
        f"{key}={format_size(value) if key == 'segment' else value}"
        for key, value in options.items()
        if value
    ]
    return "/".join([ALGORITHMS[collective][setting.algorithm], *written])


FORMAT: Final = TableFormat("mpi", COLLECTIVES, export, import_)
