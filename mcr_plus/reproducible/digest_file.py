"""Files of digests: one for each rank and world, with a row for each operation.

A line of JSON about the rank is followed by chunks. A chunk is the lengths of its two parts, JSON of the
calls that its rows are the first to name, and the rows. An empty chunk is the end, so a file without one is
of a job that was killed or goes on; its last chunk may be cut off.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from mcr_plus.errors import ConfigError

MAGIC: Final = b"mcr_plus digests 1 "
DONE, INPUT, OUTPUT = 1, 2, 4
"""Flags of a row: the operation has succeeded; the row has a digest of its input; of its output."""
ROW: Final = np.dtype(
    [("call", "<u4"), ("flags", "<u4"), ("index", "<u8"), ("number", "<u8"), ("elements", "<u8"),
     ("input", "<u8"), ("output", "<u8")]
)  # fmt: skip
"""`call`: index of its description. `index`: number in the process. `number`: in its stream, from 1."""
BUCKETS: Final = " buckets"
"""End of the name of a group's stream of gradient buckets, whose cut may differ between runs."""
_LENGTHS: Final = np.dtype([("calls", "<u4"), ("rows", "<u4")])
_NAME: Final = re.compile(r"job(\d{1,9})-epoch(\d{1,9})-rank(\d{1,9})\.digests")
_EXPECTED: Final = "expected what `observe: {digests: FOLDER}` has written"

World = tuple[int, int]
"""The number of a job in its processes, and the epoch of its world (see `mcr.elastic`)."""


class About(NamedTuple):
    """Facts about a rank. `job`: a name that is equal on all ranks of the world. `began`: Unix time."""

    job: str
    rank: int
    size: int
    began: float = 0.0


class CallOfProgram(NamedTuple):
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


_ABOUT: Final = TypeAdapter(About)
_CALLS: Final = TypeAdapter(list[CallOfProgram])


class RankDigests(NamedTuple):
    """The content of a file; rows are in the order of their issue. `ended`: the job has closed it."""

    about: About
    calls: list[CallOfProgram]
    rows: NDArray[Any]
    ended: bool


def file_of(folder: Path, world: World, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / "job{}-epoch{}-rank{}.digests".format(*world, rank)


def kept_file(path: Path, stream: str, number: int, part: str) -> Path:
    """Return the file of the elements of an operation's input or output, beside the file of digests."""
    return path.with_name(f"{path.stem}.{quote(stream, safe='')}.{number}.{part}")


def worlds_in(folder: Path) -> dict[World, dict[int, Path]]:
    """Return the files of a folder by world and rank.

    Raises `ConfigError` if there are none, or if some are of an earlier run: older than the first world.
    """
    found: dict[World, dict[int, Path]] = defaultdict(dict)
    try:
        for path in folder.iterdir():
            if (match := _NAME.fullmatch(path.name)) and path.is_file():
                job, epoch, rank = map(int, match.groups())
                found[job, epoch][rank] = path
    except OSError as error:
        raise ConfigError(f"{folder}: cannot read: {error.strerror}; {_EXPECTED}") from None
    if not found:
        raise ConfigError(f"{folder}: has no files jobN-epochN-rankN.digests; {_EXPECTED}")
    heads = {path: load(path).about for paths in found.values() for path in paths.values()}
    first = [heads[path] for path in found[min(found)].values()]
    newest = max(first, key=lambda head: head.began).job
    began = min(head.began for head in first if head.job == newest)
    if stale := sorted(path.name for path, head in heads.items() if head.began < began):
        raise ConfigError(
            f"{folder}: of an earlier run: {', '.join(stale)}; each run needs a folder of its own"
        )
    return {world: dict(sorted(found[world].items())) for world in sorted(found)}


def load(path: Path) -> RankDigests:
    """Read a file. Raises `ConfigError` if it is unreadable, of another version, or malformed."""
    try:
        content = path.read_bytes()
        line = content.partition(b"\n")[0]
        if not line.startswith(MAGIC):
            begins = f"begins with {line[: len(MAGIC)]!r}, not with {MAGIC!r}"
            raise ValueError(f"{begins}: empty, of another kind, or of another version of mcr_plus")
        calls: list[CallOfProgram] = []
        rows, ended = _chunks(memoryview(content)[len(line) + 1 :], calls)
        return RankDigests(_ABOUT.validate_json(line.removeprefix(MAGIC)), calls, rows, ended)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except ValueError as error:  # pydantic's errors too, whose text is long
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}; {_EXPECTED}") from None


def _chunks(content: memoryview, calls: list[CallOfProgram]) -> tuple[NDArray[Any], bool]:
    """Return the rows of all whole chunks, and whether the last one is the end; add to `calls`."""
    parts, at, ended = [np.empty(0, ROW)], 0, False
    while not ended and at + _LENGTHS.itemsize <= len(content):
        text, count = map(int, np.frombuffer(content, _LENGTHS, 1, at)[0].item())
        at += _LENGTHS.itemsize
        end, ended = at + text + count * ROW.itemsize, not text
        if not ended and end <= len(content):
            calls += _CALLS.validate_json(bytes(content[at : at + text]))
            parts.append(np.frombuffer(content, ROW, count, at + text))
        at = end
    rows = np.concatenate(parts)[::-1]  # of several rows of an operation in flight, the last counts
    if len(rows) and int(rows["call"].max()) >= len(calls):
        raise ValueError("malformed: operations without a description")
    return rows[np.unique(rows["index"], return_index=True)[1]], ended


def about_line(about: About) -> bytes:
    """Return the first line of a file."""
    return MAGIC + json.dumps(about).encode() + b"\n"


def chunk(calls: Sequence[CallOfProgram], rows: Sequence[tuple[int, ...]]) -> bytes:
    """Return a chunk."""
    text = json.dumps(calls).encode()
    return np.array([(len(text), len(rows))], _LENGTHS).tobytes() + text + np.array(rows, ROW).tobytes()


END: Final = bytes(_LENGTHS.itemsize)
"""The empty chunk."""
