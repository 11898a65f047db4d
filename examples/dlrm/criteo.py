"""Criteo click logs: a streaming reader sharded by rank, and a generator of rows like them.

A row is a label, 13 integers (I1 to I13) and 26 categories (C1 to C26, each 8 hex digits), separated
by tabs. A missing value is an empty field, and a row whose last values are missing may end early.
The real data is the Criteo Display Advertising Challenge; `python criteo.py out.tsv.gz --rows 100000`
writes rows with the same form, a similar skew, and a signal that can be learned.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import torch
import typer
from numpy.typing import NDArray

DENSE = 13
SPARSE = 26
COLUMNS = 1 + DENSE + SPARSE
MIN_COLUMNS = 37  # C24 to C26 may be missing at the end; a shorter row has been cut off
MAX_FIELD = 11  # bytes: no integer of the data is longer, and a category has 8
MAX_LINE = 4096  # bytes: a file that is no TSV must not be read into memory as one line
HEX_DIGITS = 8

Row = tuple[int, bytes]  # line number in the file, from 1, and the line

_PADDING = [b""] * COLUMNS
_DIGIT = np.full(256, -1, dtype=np.int64)
for _character in "0123456789abcdefABCDEF":
    _DIGIT[ord(_character)] = int(_character, 16)


class DataError(Exception):
    """A data file cannot be read; the message begins with `file:line:` where there is a line."""


# --- reading ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch."""

    dense: torch.Tensor  # float32 [rows, 13]: log(1 + x), 0 where missing
    sparse: torch.Tensor  # int64 [rows, 26]: 0 where missing, else 1 to table_rows - 1
    labels: torch.Tensor  # float32 [rows]
    sizes: tuple[int, ...]  # rows of the global batch on every rank, in rank order


def shares(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` consecutive shares of `total` things, as even as can be.

    >>> shares(26, 4)
    (7, 7, 6, 6)
    """
    size, extra = divmod(total, parts)
    return tuple(size + (part < extra) for part in range(parts))


def parse(
    rows: Sequence[Row], table_rows: int, source: str
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Dense features, table indices and labels of `rows`; `source` is the file's name for messages."""
    fields = _fields(rows, source)
    numbers = [number for number, _ in rows]
    return (
        _dense(fields[:, 1 : 1 + DENSE], numbers, source),
        _sparse(fields[:, 1 + DENSE :], table_rows, numbers, source),
        _labels(fields[:, 0], numbers, source),
    )


def _fields(rows: Sequence[Row], source: str) -> NDArray[np.bytes_]:
    table = []
    for number, line in rows:
        fields = line.rstrip(b"\r\n").split(b"\t")
        if not MIN_COLUMNS <= len(fields) <= COLUMNS:
            expected = f"{MIN_COLUMNS} to {COLUMNS} columns separated by tabs"
            raise DataError(f"{source}:{number}: expected {expected}, got {len(fields)}")
        if max(map(len, fields)) > MAX_FIELD:
            column = next(i for i, field in enumerate(fields) if len(field) > MAX_FIELD)
            _refuse(source, number, column, f"at most {MAX_FIELD} characters", fields[column])
        table.append(fields + _PADDING[len(fields) :])
    return np.array(table, dtype=f"S{MAX_FIELD}").reshape(-1, COLUMNS)


def _labels(text: NDArray[np.bytes_], numbers: Sequence[int], source: str) -> NDArray[np.float32]:
    positive: NDArray[np.bool_] = text == b"1"
    bad = np.flatnonzero(~positive & (text != b"0"))
    if bad.size:
        _refuse(source, numbers[bad[0]], 0, "label 0 or 1", text[bad[0]])
    return positive.astype(np.float32)


def _dense(text: NDArray[np.bytes_], numbers: Sequence[int], source: str) -> NDArray[np.float32]:
    filled = np.where(text == b"", b"0", text)
    try:
        values = filled.astype(np.int64)
    except ValueError:
        row, column = next(place for place, field in np.ndenumerate(filled) if not _is_integer(field))
        _refuse(source, numbers[row], 1 + column, "an integer or nothing", text[row, column])
    dense: NDArray[np.float32] = np.log1p(np.maximum(values, 0)).astype(np.float32)
    return dense


def _is_integer(text: bytes) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _sparse(
    text: NDArray[np.bytes_], table_rows: int, numbers: Sequence[int], source: str
) -> NDArray[np.int64]:
    """Hash categories into table rows; row 0 of a table is kept for missing values."""
    characters = np.ascontiguousarray(text).view(np.uint8).reshape(*text.shape, MAX_FIELD)
    missing = ~characters.any(axis=2)
    digits = _DIGIT[characters[:, :, :HEX_DIGITS]]
    valid = (digits >= 0).all(axis=2) & ~characters[:, :, HEX_DIGITS:].any(axis=2)
    bad = np.argwhere(~valid & ~missing)
    if bad.size:
        row, column = bad[0]
        _refuse(source, numbers[row], 1 + DENSE + column, "8 hex digits or nothing", text[row, column])
    values = digits @ (16 ** np.arange(HEX_DIGITS - 1, -1, -1))
    return np.where(missing, 0, 1 + values % (table_rows - 1))


def _refuse(
    source: str, number: int, column: int, expected: str, got: bytes | NDArray[np.bytes_]
) -> NoReturn:
    name = "label" if column == 0 else f"I{column}" if column <= DENSE else f"C{column - DENSE}"
    shown = bytes(got)[:40].decode("ascii", "backslashreplace")
    raise DataError(f"{source}:{number}: column {column + 1} ({name}): expected {expected}, got {shown!r}")


class Reader:
    """Streams a Criteo TSV, plain or gzipped: each rank parses its own share of every global batch.

    Every k-th row (k = 1 / holdout) is held out of training, by its number alone, so that any number
    of ranks trains and tests on the same rows.
    """

    def __init__(
        self,
        path: Path,
        *,
        batch_size: int,
        table_rows: int,
        holdout: float = 0.1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.path = path
        self.batch_size = batch_size
        self.table_rows = table_rows
        self.every = round(1 / holdout) if holdout else 0
        self.rank = rank
        self.world_size = world_size
        self.fraction_read = 0.0  # of the file, in the pass that is running

    def train(self) -> Iterator[Batch]:
        """One pass over the rows that are not held out."""
        with self._rows() as rows:
            yield from self._batches(row for row in rows if not self._is_held_out(row))

    def held_out(self, limit: int | None = None) -> Iterator[Batch]:
        """One pass over the first `limit` rows that are held out."""
        with self._rows() as rows:
            yield from self._batches(islice(filter(self._is_held_out, rows), limit))

    def _is_held_out(self, row: Row) -> bool:
        return bool(self.every) and row[0] % self.every == 0

    @contextmanager
    def _rows(self) -> Iterator[Iterator[Row]]:
        try:
            with self.path.open("rb") as raw:
                size = self.path.stat().st_size or 1
                lines = iter(partial(_decompressed(raw).readline, MAX_LINE), b"")
                yield self._counted(lines, raw, size)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self.path}: {error}") from error

    def _counted(self, lines: Iterator[bytes], raw: io.BufferedReader, size: int) -> Iterator[Row]:
        for number, line in enumerate(lines, 1):
            if number % 64 == 1:
                self.fraction_read = raw.tell() / size
            yield number, line
        self.fraction_read = 1.0

    def _batches(self, rows: Iterator[Row]) -> Iterator[Batch]:
        while batch := list(islice(rows, self.batch_size)):
            yield self._share(batch)

    def _share(self, rows: list[Row]) -> Batch:
        sizes = shares(len(rows), self.world_size)
        start = sum(sizes[: self.rank])
        mine = rows[start : start + sizes[self.rank]]
        dense, sparse, labels = map(torch.from_numpy, parse(mine, self.table_rows, str(self.path)))
        return Batch(dense, sparse, labels, sizes)


def _decompressed(raw: io.BufferedReader) -> io.BufferedReader:
    if raw.peek(2)[:2] == b"\x1f\x8b":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    return raw


# --- generating -------------------------------------------------------------------------------------

CHUNK = 4096  # rows drawn together; each chunk has a seed of its own, so a prefix never depends on the rest
SKEW = 1.4  # exponent of the power law of every category column
# How many values each category column of the Kaggle training set takes.
CARDINALITIES = np.array(
    [
        *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
        *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
    ],
    dtype=np.float64,
)
# Typical values of the integer columns.
MEDIANS = np.array([1, 3, 6, 4, 2500, 35, 4, 8, 40, 1, 2, 1, 5], dtype=np.float64)
# Columns that are missing together, and how often.
MISSING: tuple[tuple[float, tuple[int, ...]], ...] = (
    (0.46, (1, 10)),
    (0.23, (3,)),
    (0.21, (4, 13)),
    (0.04, (5, 7, 9, 11)),
    (0.25, (6,)),
    (0.78, (12,)),
    (0.03, (16, 17, 25, 29, 34, 37)),
    (0.12, (19,)),
    (0.50, (32, 33, 38, 39)),
    (0.82, (35,)),
)
PAIRS = ((1, 5), (8, 13), (16, 22))  # category columns whose combination matters, not only each alone


def generate(rows: int, seed: int = 0) -> Iterator[bytes]:
    """`rows` lines of TSV. The same seed gives the same lines, and fewer rows give the first of them."""
    for chunk, start in enumerate(range(0, rows, CHUNK)):
        yield from islice(_chunk(np.random.default_rng([seed, chunk])), rows - start)


def _chunk(random: np.random.Generator) -> Iterator[bytes]:
    ranks = _category_ranks(random)
    spread = random.standard_normal((CHUNK, DENSE))
    missing = _missing(random)
    logits = _logits(ranks, spread, missing)
    labels = random.random(CHUNK) < 1 / (1 + np.exp(-logits))
    integers = np.floor(MEDIANS * np.exp(1.2 * spread)).astype(np.int64)
    categories = _mix(ranks, salt=0) & np.uint64(0xFFFFFFFF)
    for row in range(CHUNK):
        hexadecimal = (f"{value:08x}" for value in categories[row])
        fields = (str(int(labels[row])), *map(str, integers[row]), *hexadecimal)
        kept = ("" if gone else field for field, gone in zip(fields, missing[row], strict=True))
        yield "\t".join(kept).rstrip("\t").encode() + b"\n"


def _category_ranks(random: np.random.Generator) -> NDArray[np.uint64]:
    """Draw by popularity, 1 being the most frequent value of a column: a power law, inverted."""
    power = 1 - SKEW
    uniform = random.random((CHUNK, SPARSE))
    return np.floor((1 + uniform * (CARDINALITIES**power - 1)) ** (1 / power)).astype(np.uint64)


def _missing(random: np.random.Generator) -> NDArray[np.bool_]:
    missing = np.zeros((CHUNK, COLUMNS), dtype=np.bool_)
    for probability, columns in MISSING:
        missing[:, columns] = (random.random(CHUNK) < probability)[:, None]
    return missing


def _logits(
    ranks: NDArray[np.uint64], spread: NDArray[np.float64], missing: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The signal: what each present value says, plus what some pairs of categories say together."""
    single = _effect(ranks, salt=1) * ~missing[:, 1 + DENSE :]
    hidden = np.sign(_effect(ranks, salt=2))
    pairs = sum(hidden[:, left] * hidden[:, right] for left, right in PAIRS)
    dense = (spread * ~missing[:, 1 : 1 + DENSE]) @ np.linspace(1, -1, DENSE)
    logits: NDArray[np.float64] = -1.5 + 0.5 * single.sum(axis=1) + 0.3 * pairs + dense
    return logits


def _effect(ranks: NDArray[np.uint64], salt: int) -> NDArray[np.float64]:
    """A fixed number in [-1, 1) for every value of every column."""
    effect: NDArray[np.float64] = (_mix(ranks, salt) >> np.uint64(11)).astype(np.float64) / 2**52 - 1
    return effect


def _mix(ranks: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    """Hash (column, rank, salt) to 64 bits with the finaliser of splitmix64."""
    x: NDArray[np.uint64] = (
        ranks + (np.arange(SPARSE, dtype=np.uint64) << np.uint64(40)) + np.uint64(salt << 50)
    )
    x *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def write(path: Path, rows: int, seed: int = 0) -> None:
    """Write generated rows, gzipped if the name ends in `.gz`; the bytes depend on rows and seed only."""
    with path.open("wb") as raw:
        if path.suffix != ".gz":
            raw.writelines(generate(rows, seed))
            return
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as compressed:
            compressed.writelines(generate(rows, seed))


def main(
    path: Annotated[Path, typer.Argument(help="file to write; gzipped if it ends in .gz")],
    rows: Annotated[int, typer.Option(min=1)] = 4000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Generate rows like Criteo's, with a signal that can be learned."""
    write(path, rows, seed)


if __name__ == "__main__":
    typer.run(main)
