"""Reading the dumps of a job's ranks. Only JSON files are read: pickles of other users must not be loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mcr_plus.config.document import read_bytes
from mcr_plus.core.stacks import Frame, call_site
from mcr_plus.core.units import MAX_INTEGER
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.observe.flight_record import OURS

_MOST_BYTES: Final = 1 << 30


@dataclass
class DumpedOperation:
    """An operation in a dump. `number` is 0 for sends and receives; `peer` is a group rank.

    `issued` is in `time.time_ns()` of the rank's host, `waited` in seconds. `waits`: the rank waited for the
    operation when the dump was written.
    """

    number: int
    kind: str
    text: str
    reduce_op: str | None
    root: int | None
    tag: str | None
    backend: str
    shape: tuple[int, ...]
    dtype: str
    state: str
    issued: int
    waited: float
    waits: bool
    error: str
    peer: int | None
    match_tag: int
    frames: list[Frame]

    @property
    def done(self) -> bool:
        """True if the operation is complete."""
        return self.state == "completed"

    @property
    def holds_up(self) -> bool:
        """True if the operation blocks its rank, which waits for it or has given up."""
        return not self.done and (self.waits or bool(self.error))


@dataclass
class DumpedGroup:
    """A group in a dump. `ranks`: the members' ranks in the job. `peers`: collectives by group rank."""

    name: str
    ranks: tuple[int, ...]
    issued: int
    peers: dict[int, int]
    failed: str
    operations: dict[int, DumpedOperation] = field(default_factory=dict)
    messages: list[DumpedOperation] = field(default_factory=list)


@dataclass
class Dump:
    """The dump of one rank, written by itself or on its behalf by another rank (`written_by`)."""

    path: Path
    job: str
    rank: int
    world_size: int
    host: str
    written_by: int
    time: int
    reason: str
    error: dict[str, Any] | None
    processes: dict[int, str]
    threads: list[tuple[str, list[Frame]]]
    groups: dict[str, DumpedGroup]

    @property
    def place(self) -> Frame | None:
        """The place of the program's main thread."""
        return call_site(self.threads[0][1]) if self.threads else None


@dataclass
class Folder:
    """The dumps of a folder, and the problems with other files there."""

    path: Path
    dumps: dict[int, Dump]
    problems: list[str]

    @property
    def size(self) -> int:
        """Number of ranks of the job."""
        return next(iter(self.dumps.values())).world_size

    @property
    def absent(self) -> list[int]:
        """Ranks without a dump."""
        return [rank for rank in range(self.size) if rank not in self.dumps]


def read_folder(path: Path) -> Folder:
    """Read the dumps in a folder.

    Files that are truncated, of another version or of another job are skipped and listed in `problems`.
    Raises `InvalidArgument` if the folder is missing or has no dumps, or if a rank has two files.
    """
    if not path.is_dir():
        raise InvalidArgument(f"{str(path)!r}: no such folder; expected one with dumps of `mcr.dump`")
    dumps: dict[int, Dump] = {}
    problems: list[str] = []
    for file in sorted(path.glob("*.json")):
        try:
            dump = read_dump(file)
        except InvalidArgument as error:
            problems.append(str(error))
            continue
        if (other := dumps.get(dump.rank)) is not None:
            raise InvalidArgument(
                f"{file}: a second dump of rank {dump.rank}, beside {other.path.name}; expected one per rank"
            )
        dumps[dump.rank] = dump
    dumps = _of_one_job(dumps, problems)
    if not dumps:
        found = "; ".join(problems) or "it has no JSON files"
        raise InvalidArgument(f"{str(path)!r}: no dumps, such as rank.0.json of `mcr.dump`: {found}")
    return Folder(path, dumps, problems)


def _of_one_job(dumps: dict[int, Dump], problems: list[str]) -> dict[int, Dump]:
    """Return the dumps of the most recently dumped job."""
    if not dumps:
        return dumps
    last = max(dumps.values(), key=lambda dump: dump.time)
    others = (dump for dump in dumps.values() if dump.job != last.job)
    problems += (f"{dump.path}: of another job than {last.path.name}, which is newer" for dump in others)
    return {rank: dump for rank, dump in sorted(dumps.items()) if dump.job == last.job}


def read_dump(path: Path) -> Dump:
    """Read one JSON file; raise `InvalidArgument` unless it is a complete dump of this version."""
    try:
        data = json.loads(read_bytes(path, str(path), most=_MOST_BYTES))
    except ConfigError as error:
        raise InvalidArgument(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path}: cut off or damaged: {error}") from None
    own = data.get("mcr") if isinstance(data, dict) else None
    if not isinstance(own, dict):
        raise InvalidArgument(f"{path}: no dump of mcr_plus, which has an entry 'mcr'")
    if own.get("format") != OURS:
        raise InvalidArgument(f"{path}: format {own.get('format')!r} of another version; expected {OURS}")
    try:
        return _dump(path, data, own)
    except KeyError as error:
        raise InvalidArgument(f"{path}: not a complete dump: no {error}") from None
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise InvalidArgument(f"{path}: not a dump: {error}") from None


def _dump(path: Path, data: dict[str, Any], own: dict[str, Any]) -> Dump:
    groups = {
        str(name): DumpedGroup(
            str(name),
            tuple(_integer(rank) for rank in group["ranks"]),
            _integer(group["issued"]),
            {_integer(rank): _integer(issued) for rank, issued in group["peers"].items()},
            str(group["failed"]),
            messages=[_operation(0, each, each["frames"]) for each in group["messages"]],
        )
        for name, group in own["groups"].items()
    }
    for entry in data["entries"]:
        if not entry["is_p2p"]:
            number = _integer(entry["collective_seq_id"])
            operation = _operation(number, entry["mcr"], entry["frames"])
            groups[entry["process_group"][0]].operations[number] = operation
    rank, size = _integer(own["rank"]), _integer(own["world_size"])
    if size != len(own["hosts"]):
        raise ValueError(f"{size} ranks on {len(own['hosts'])} hosts")
    _check(rank, size, groups)
    return Dump(
        path,
        str(own["job"]),
        rank,
        size,
        str(own["host"]),
        _integer(own["written_by"]),
        _integer(own["time_ns"]),
        str(own["reason"]),
        _error(own["error"]),
        {_integer(rank): str(status) for rank, status in own["processes"].items()},
        [(str(thread["name"]), _frames(thread["frames"])) for thread in own["threads"]],
        groups,
    )


def _check(rank: int, size: int, groups: Mapping[str, DumpedGroup]) -> None:
    """Raise `ValueError` for ranks outside the job or group."""
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}")
    for group in groups.values():
        if not all(0 <= each < size for each in group.ranks):
            raise ValueError(f"a group of ranks {list(group.ranks)} of {size}")
        for each in group.messages:
            peer = 0 if each.peer is None else each.peer
            if rank not in group.ranks or not 0 <= peer < len(group.ranks):
                raise ValueError(f"a message of ranks that are not in group '{group.name}'")


def _error(own: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if own is None else {**own, "ranks": [_integer(rank) for rank in own.get("ranks", ())]}


def _operation(number: int, own: dict[str, Any], frames: Sequence[dict[str, Any]]) -> DumpedOperation:
    reduce_op, root, tag, peer = own["reduce_op"], own["root"], own["tag"], own["peer"]
    return DumpedOperation(
        number,
        str(own["kind"]),
        str(own["operation"]),
        None if reduce_op is None else str(reduce_op),
        None if root is None else _integer(root),
        None if tag is None else str(tag),
        str(own["backend"]),
        tuple(_integer(length) for length in own["shape"]),
        str(own["dtype"]),
        str(own["state"]),
        _integer(own["issued_ns"]),
        float(own["waited"]),
        bool(own["waits"]),
        str(own["error"]),
        None if peer is None else _integer(peer),
        _integer(own["match_tag"]),
        _frames(frames),
    )


def _integer(value: Any) -> int:
    """Convert a number or a text; raise the errors of `int`, and `OverflowError` beyond 64 bits."""
    number = int(value)
    if abs(number) > MAX_INTEGER:
        raise OverflowError(f"a number of {number.bit_length()} bits")
    return number


def _frames(frames: Sequence[dict[str, Any]]) -> list[Frame]:
    return [Frame(str(frame["name"]), str(frame["filename"]), _integer(frame["line"])) for frame in frames]
