"""The recordings of all ranks of a job as one table, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mcr_plus.core.kinds import MESSAGES
from mcr_plus.errors import ConfigError
from mcr_plus.observe.clocks import TOGETHER, Clock, Key, Span, align, spans
from mcr_plus.observe.record_file import NUMBERS, TEXTS, Recording, load_recording

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_ENDING: Final = ".npz"


@dataclass(frozen=True)
class RankSpan:
    """Begin and end of a rank's recording, in seconds since the first rank's begin, and its step ends."""

    began: float
    ended: float
    steps: Floats

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.ended - self.began


@dataclass(frozen=True)
class RecordedJob:
    """All operations of a job, with its ranks and clocks.

    Attributes:
        columns: the columns of a `Recording` for all operations, and `rank`; times are in seconds since the
            first rank began. Texts are indices into `names`, -1 for none.
        ranks: the span of each rank's recording. missing: ranks without a file.
        clocks: the clock of each host. choices: see `expectations`.
    """

    columns: Mapping[str, NDArray[Any]]
    names: Mapping[str, list[str]]
    ranks: Mapping[int, RankSpan]
    missing: tuple[int, ...]
    hosts: tuple[str, ...]
    clocks: Mapping[str, Clock]
    choices: list[dict[str, Any]]
    versions: Mapping[str, str]

    @property
    def count(self) -> int:
        """Return the number of operations of all ranks."""
        return len(self.columns["t_issue"])

    @cached_property
    def good(self) -> NDArray[np.bool_]:
        """Return a mask of the operations that have not failed."""
        found: NDArray[np.bool_] = self.columns["error"] < 0
        return found

    @cached_property
    def collectives(self) -> list[Ints]:
        """Return the collectives that all of their ranks have recorded: a matrix per number of ranks, one
        collective per row, as positions in the columns.
        """
        columns = self.columns
        messages = [number for number, kind in enumerate(self.names["kind"]) if kind in MESSAGES]
        rows = np.flatnonzero(
            ~np.isin(columns["kind"], messages) & (columns["ranks"] > 1) & (columns["sequence"] > 0)
        )
        codes = np.stack([columns[name][rows] for name in ("kind", "sequence", "group")])
        order = np.lexsort(codes)
        rows, codes = rows[order], codes[:, order]
        changes = (codes[:, 1:] != codes[:, :-1]).any(axis=0)
        firsts = np.concatenate([np.zeros(min(1, len(rows)), np.int64), np.flatnonzero(changes) + 1])
        sizes = np.diff(np.append(firsts, len(rows)))
        whole = sizes == columns["ranks"][rows[firsts]]
        return [
            rows[firsts[whole & (sizes == size)][:, None] + np.arange(size)]
            for size in np.unique(sizes[whole])
        ]

    @property
    def seconds(self) -> float:
        """Return the duration of the longest recording."""
        return max(span.seconds for span in self.ranks.values())

    def name(self, column: str, index: int) -> str:
        """Return a text of a column; empty for none."""
        return self.names[column][index] if index >= 0 else ""


def load_job(folder: Path) -> RecordedJob:
    """Read the files of all ranks that `mcr.record(path)` has written into a folder.

    Raises `ConfigError` without files, for an unreadable file, and for two files of one rank or of different
    jobs.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; expected one that mcr.record(path) has written")
    paths = sorted(each for each in folder.iterdir() if each.name.endswith(_ENDING))
    if not paths:
        raise ConfigError(
            f"{folder}: no recording in this folder; expected rank0.npz, which mcr.record(path) writes"
        )
    recordings = sorted(map(load_recording, paths), key=lambda each: each.rank)
    first = recordings[0]
    seen: dict[int, Path] = {}
    for each in recordings:
        if each.rank in seen:
            raise ConfigError(f"{each.path}: rank {each.rank} is in {seen[each.rank]} too; expected it once")
        seen[each.rank] = each.path
        if each.about["size"] != first.about["size"]:
            raise ConfigError(
                f"{each.path}: of a job of {each.about['size']} ranks, but {first.path} of one of "
                f"{first.about['size']}; expected one job"
            )
        if each.about["job"] != first.about["job"]:
            raise ConfigError(
                f"{each.path}: of job {each.about['job']}, but {first.path} of job {first.about['job']}; "
                "expected one job: remove the file that an earlier one has left"
            )
    return _joined(recordings)


def _joined(recordings: list[Recording]) -> RecordedJob:
    size = int(recordings[0].about["size"])
    names, columns = _one_table(recordings)
    hosts: dict[str, list[Recording]] = {}
    for each in recordings:
        hosts.setdefault(each.about["host"], []).append(each)
    compared = len(hosts) > 1  # the ranks of one host share a clock
    operations = {
        host: spans(operation for each in some for operation in _together(each)) if compared else {}
        for host, some in hosts.items()
    }
    clocks = align(operations, {host: some[0].about["epoch_us"] for host, some in hosts.items()})
    shifts = {each.rank: clocks[each.about["host"]].shift_us / 1e6 for each in recordings}
    began = min(each.about["began"] + shifts[each.rank] for each in recordings)
    shift = np.concatenate([np.full(each.count, shifts[each.rank] - began) for each in recordings])
    for name in ("t_issue", "t_done"):
        columns[name] = columns[name] + shift
    ranks = {
        each.rank: RankSpan(
            each.about["began"] + shifts[each.rank] - began,
            each.about["ended"] + shifts[each.rank] - began,
            each.steps + (shifts[each.rank] - began),
        )
        for each in recordings
    }
    return RecordedJob(
        columns=columns,
        names=names,
        ranks=ranks,
        missing=tuple(rank for rank in range(size) if rank not in ranks),
        hosts=tuple(recordings[0].about["hosts"]),
        clocks=clocks,
        choices=next((each.about["choices"] for each in recordings if each.about["choices"]), []),
        versions=recordings[0].about["versions"],
    )


def _one_table(recordings: list[Recording]) -> tuple[dict[str, list[str]], dict[str, NDArray[Any]]]:
    """Return the columns of all ranks end to end, with common names."""
    columns: dict[str, NDArray[Any]] = {
        name: np.concatenate([each.columns[name] for each in recordings]) for name in NUMBERS
    }
    names: dict[str, list[str]] = {}
    for name in TEXTS:
        known: dict[str, int] = {}
        parts = []
        for each in recordings:
            own = [known.setdefault(text, len(known)) for text in each.about["names"].get(name, [])]
            parts.append(np.array([*own, -1], np.int64)[each.columns[name]])  # the last entry serves index -1
        names[name] = list(known)
        columns[name] = np.concatenate(parts)
    columns["rank"] = np.concatenate([np.full(each.count, each.rank) for each in recordings])
    return names, columns


def _together(recording: Recording) -> Iterator[tuple[Key, Span]]:
    """Yield the operations that all ranks complete together, in microseconds of the host's clock."""
    names, columns = recording.about["names"], recording.columns
    wanted = [number for number, kind in enumerate(names["kind"]) if kind in TOGETHER]
    barrier = names["kind"].index("barrier") if "barrier" in names["kind"] else -1
    chosen = np.isin(columns["kind"], wanted) & (columns["error"] < 0)
    chosen &= (columns["bytes"] > 0) | (columns["kind"] == barrier)
    rows = np.flatnonzero(chosen)
    parts = [
        columns[name][rows].tolist() for name in ("group", "sequence", "kind", "bytes", "t_issue", "t_done")
    ]
    for group, sequence, kind, nbytes, issued, done in zip(*parts, strict=True):
        key = names["group"][group], sequence, names["kind"][kind], nbytes
        yield key, Span(issued * 1e6, done * 1e6)
