"""Files of digests: one for each rank and world, with a row for each operation.

A line of JSON about the rank is followed by chunks. A chunk is the lengths of its two parts, JSON of the
calls that its rows are the first to name, and the rows. An empty chunk is the end, so a file without one is of
a job that was killed or goes on; its last chunk may be cut off.
"""

from __future__ import annotations

import json
import re
import stat
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mcr_plus.errors import ConfigError, short

FORMAT: Final = 1
MAGIC: Final = b"mcr_plus digests "
DONE, INPUT, OUTPUT = 1, 2, 4
"""Flags of a row: the operation has succeeded; the row has a digest of its input; of its output."""
ROW: Final = np.dtype(
    [("call", "<u4"), ("flags", "<u4"), ("index", "<u8"), ("number", "<u8"), ("elements", "<u8"),
     ("input", "<u8"), ("output", "<u8")]
)  # fmt: skip
"""`call`: index of its description. `index`: number in the process. `number`: in its stream, from 1."""
BUCKETS: Final = " buckets"
"""End of the name of a group's stream of gradient buckets, whose cut may differ between runs."""
LENGTHS: Final = np.dtype([("calls", "<u4"), ("rows", "<u4")])
_NAME: Final = re.compile(r"job(\d{1,9})-epoch(\d{1,9})-rank(\d{1,9})\.digests")
_EXPECTED: Final = "expected a folder that `observe: {digests: FOLDER}` has written"
_LONGEST: Final = 1 << 16  # bytes of the first line


class World(NamedTuple):
    """A world of a job: the number of the job in its processes, and the epoch (see `mcr.elastic`)."""

    job: int
    epoch: int

    def __str__(self) -> str:
        later = f"job {self.job} of its processes, " if self.job else ""
        return f"{later}epoch {self.epoch}"


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class About(_Model):
    """Facts about a rank. `job`: a name that is equal on all ranks of the world."""

    job: str
    rank: int = Field(ge=0)
    size: int = Field(ge=1)


class CallOfProgram(_Model):
    """What rows have in common. `stream`: the group, or its gradient buckets, whose operations are numbered.

    `how`: the library and the order of additions, where they are known. `site`: the line of the program.
    """

    stream: str
    kind: str
    text: str
    dtype: str
    ranks: int
    how: str
    site: str

    def named(self, number: int, elements: int) -> str:
        """Name an operation in one line."""
        return f"operation {number} of '{self.stream}' ({self.text}, {elements:,} elements)"


_CALLS: Final = TypeAdapter(list[CallOfProgram])


@dataclass(frozen=True)
class RankDigests:
    """The content of a file; rows are in the order of their issue. `ended`: the job has closed it."""

    path: Path
    about: About
    calls: list[CallOfProgram]
    rows: NDArray[Any]
    ended: bool


def file_of(folder: Path, world: World, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"job{world.job}-epoch{world.epoch}-rank{rank}.digests"


def kept_file(path: Path, stream: str, number: int, part: str) -> Path:
    """Return the file of the elements of an operation's input or output, beside the file of digests."""
    return path.with_name(f"{path.stem}.{quote(stream, safe='')}.{number}.{part}")


def worlds_in(folder: Path) -> dict[World, dict[int, Path]]:
    """Return the files of a folder by world and rank; raise `ConfigError` if there are none."""
    found: dict[World, dict[int, Path]] = defaultdict(dict)
    try:
        for path in folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                job, epoch, rank = map(int, match.groups())
                found[World(job, epoch)][rank] = path
    except OSError as error:
        raise ConfigError(f"{folder}: cannot read: {error.strerror}; {_EXPECTED}") from None
    if not found:
        raise ConfigError(f"{folder}: has no files of digests (jobN-epochN-rankN.digests); {_EXPECTED}")
    return {world: dict(sorted(found[world].items())) for world in sorted(found)}


def load(path: Path) -> RankDigests:
    """Read a file. Raises `ConfigError` if it is unreadable, of another version, or malformed."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO without a writer would hang
            raise ConfigError(f"{path}: not a regular file; {_EXPECTED}")
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    first = content[:_LONGEST].partition(b"\n")[0]
    version, _, about = first.removeprefix(MAGIC).partition(b" ")
    if not first.startswith(MAGIC) or not version.isdigit():
        raise ConfigError(f"{path}: empty, or of another kind; {_EXPECTED}")
    if int(version) != FORMAT:
        text = short(version.decode())
        raise ConfigError(f"{path}: of another version of mcr_plus: format {text}; expected {FORMAT}")
    try:
        calls: list[CallOfProgram] = []
        rows, ended = _chunks(memoryview(content)[len(first) + 1 :], calls)
        found = RankDigests(path, About.model_validate_json(about), calls, rows, ended)
    except (ValidationError, ValueError) as error:
        what = "calls or the first line are malformed" if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"{path}: {what}; {_EXPECTED}") from None
    return found


def _chunks(content: memoryview, calls: list[CallOfProgram]) -> tuple[NDArray[Any], bool]:
    """Return the rows of all whole chunks, and whether the last one is the end; add to `calls`."""
    parts, at = [np.empty(0, ROW)], 0
    while at + LENGTHS.itemsize <= len(content):
        lengths = np.frombuffer(content, LENGTHS, 1, at)[0]
        begin = at + LENGTHS.itemsize + int(lengths["calls"])
        end = begin + int(lengths["rows"]) * ROW.itemsize
        if end == at + LENGTHS.itemsize:
            return _in_order(parts), True
        if end > len(content):
            break
        calls += _CALLS.validate_json(bytes(content[at + LENGTHS.itemsize : begin]))
        parts.append(np.frombuffer(content, ROW, int(lengths["rows"]), begin))
        if len(parts[-1]) and int(parts[-1]["call"].max()) >= len(calls):
            raise ValueError("has operations without a description")
        at = end
    return _in_order(parts), False


def _in_order(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Return rows in the order of issue; of several rows of an operation in flight, the last."""
    rows = np.concatenate(parts)[::-1]
    return rows[np.unique(rows["index"], return_index=True)[1]]


def about_line(about: About) -> bytes:
    """Return the first line of a file."""
    return MAGIC + f"{FORMAT} {about.model_dump_json()}\n".encode()


def chunk(calls: list[CallOfProgram], rows: list[tuple[int, ...]]) -> bytes:
    """Return a chunk; an empty one is the end."""
    if not calls and not rows:
        return np.zeros(1, LENGTHS).tobytes()
    text = json.dumps([call.model_dump() for call in calls]).encode()
    return np.array([(len(text), len(rows))], LENGTHS).tobytes() + text + np.array(rows, ROW).tobytes()
