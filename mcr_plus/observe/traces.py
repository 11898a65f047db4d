"""Merging of traces of several ranks into one file with one clock."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from mcr_plus.config.document import read_bytes, write_text
from mcr_plus.errors import ConfigError, phrase_ranks
from mcr_plus.observe.clocks import TOGETHER, Clock, Key, Span, align, spans
from mcr_plus.observe.hta import write_for_hta

FORMAT: Final = 1
"""Version of the files that `Log.save` writes."""
_SAME_CLOCK_US: Final = 1e6  # µs; a larger difference of one host's clocks means different boots
_MOST_BYTES: Final = 1 << 30
_ROOM: Final = 1 << 25
_MOST_TIMES: Final = 64  # ratio: traces compress to a tenth or a thirtieth, but other texts to a thousandth
_LARGEST: Final = 1e18  # microseconds: 30,000 years
_EXPECTED: Final = "expected a trace that log.save() or torch's profiler wrote"
_ENDINGS: Final = (".json", ".json.gz")
_NUMBERS: Final = ("sequence", "bytes", "t_issue", "t_done")
_FLOWS: Final = "stf"  # phases of arrows, which connect events with equal numbers


@dataclass(frozen=True)
class _Trace:
    """The trace of one rank. `epoch_us`: time of day at 0 of its times. `is_log`: from `Log.save`."""

    path: Path
    rank: int
    host: str | None
    epoch_us: float
    is_log: bool
    size: int | None
    events: list[dict[str, Any]]


@dataclass(frozen=True)
class Merged:
    """Content of a merged file: events, ranks, missing ranks, and the clock of each host."""

    events: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    clocks: dict[str, Clock] = field(default_factory=dict)


def files_of(paths: Sequence[Path], *, but: Path | None = None) -> list[Path]:
    """Return the files among `paths`, and the trace files in the folders among them, except `but`.

    Raises `ConfigError` for a folder without any.
    """
    found = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(each for each in path.iterdir() if each.name.endswith(_ENDINGS))
        inside = [each for each in inside if but is None or each.absolute() != but.absolute()]
        if not inside:
            raise ConfigError(
                f"{path}: no trace in this folder; expected files that end with .json or .json.gz"
            )
        found += inside
    return found


def merge_traces(paths: Sequence[Path], output: Path, *, hta: Path | None = None) -> Merged:
    """Merge traces of several ranks into one for Perfetto or chrome://tracing: a process for each rank.

    `paths` are files of `Log.save`, of torch's profiler, or both for a rank, and folders of these. Ranks of
    one host share a clock. Clocks of hosts are compared by the operations that all ranks complete together;
    the shift and the error are in the file (`otherData.clocks`). Hosts without such operations in their logs
    are placed by their times of day, which are as accurate as the hosts' time synchronisation.

    `hta`: a folder for one file per rank, see `write_for_hta`.

    Raises:
        ConfigError: a file is no trace, a rank has two files of one sort, or `output` cannot be
            written.
    """
    traces = sorted((_read(path) for path in files_of(paths, but=output)), key=lambda trace: trace.rank)
    seen: dict[tuple[int, bool], Path] = {}
    for trace in traces:
        before = seen.setdefault((trace.rank, trace.is_log), trace.path)
        if before is not trace.path:
            raise ConfigError(f"{trace.path}: rank {trace.rank} is in {before} too; expected it once")
    # A profiler may not name the host: take it from the log of the same rank.
    logged = {trace.rank: trace.host for trace in traces if trace.is_log}
    placed = [(logged.get(trace.rank) or trace.host or "unknown", trace) for trace in traces]
    epochs: dict[str, float] = {}
    for host, trace in sorted(placed, key=lambda each: not each[1].is_log):
        epochs.setdefault(host, trace.epoch_us)
    # Only logs number their operations, so only they relate the clocks of hosts.
    hosts = {
        host: spans(
            each
            for there, trace in placed
            if there == host and trace.is_log
            for each in _together(trace.events)
        )
        for host, _ in placed
    }
    clocks = align(hosts, epochs)
    ranks = tuple(sorted({trace.rank for trace in traces}))
    size = max((trace.size for trace in traces if trace.size is not None), default=0)
    missing = tuple(rank for rank in range(size) if rank not in ranks)
    by_rank: dict[int, list[dict[str, Any]]] = {rank: [] for rank in ranks}
    for host, trace in placed:
        by_rank[trace.rank] += _moved(trace, clocks[host], epochs[host])
    events = [event for of_rank in by_rank.values() for event in of_rank]
    about = {
        "clocks": {host: asdict(clock) for host, clock in clocks.items()},
        "ranks": {str(trace.rank): host for host, trace in placed},
        "missing": list(missing),
    }
    write_text(output, json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}))
    if hta is not None:
        write_for_hta(hta, by_rank, {rank: rank in logged for rank in ranks}, max(size, len(ranks)))
    return Merged(len(events), ranks, missing, clocks)


def described(merged: Merged) -> list[str]:
    """Return lines about a merged file, for people: compared clocks and missing ranks."""
    lines = [
        f"clock of {host}: shifted by {clock.shift_us / 1e6:.6f} s, "
        + (f"± {clock.error_us:,.0f} µs" if clock.error_us is not None else "error unknown")
        + f" (by {clock.by})"
        for host, clock in list(merged.clocks.items())[1:]
    ]
    if merged.missing:
        lines.append(f"no trace of {phrase_ranks(merged.missing)}")
    return lines


# -- reading ------------------------------------------------------------------------------------------------


def _read(path: Path) -> _Trace:
    """Read a trace. Errors do not quote the file: a wrong path may name a confidential file."""
    content = read_bytes(path, str(path), most=_MOST_BYTES)
    try:
        document = json.loads(_unpacked(content) if path.name.endswith(".gz") else content)
    except OverflowError:
        raise ConfigError(f"{path}: unpacks to far more than a trace of its size; {_EXPECTED}") from None
    except (OSError, EOFError, zlib.error):
        raise ConfigError(f"{path}: truncated, or no gzip file; {_EXPECTED}") from None
    except (ValueError, RecursionError):  # invalid JSON or UTF-8
        raise ConfigError(f"{path}: not JSON, or truncated; {_EXPECTED}") from None
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise ConfigError(f"{path}: {_EXPECTED}")
    for index, event in enumerate(events):
        if not isinstance(event, dict) or not _is_number(event.get("ts", 0)):
            raise ConfigError(
                f"{path}: traceEvents[{index}]: not an event with a time in microseconds; {_EXPECTED}"
            )
    if "distributedInfo" in document:
        return _of_profiler(path, document, events)
    if "schemaVersion" in document:
        raise ConfigError(
            f"{path}: distributedInfo: missing: torch's profiler writes it in jobs of torch.distributed; in "
            'others, call add_metadata_json("distributedInfo", \'{"rank": 0, "world_size": 2}\') of the '
            "profiler with the rank and the number of ranks"
        )
    return _of_log(path, document, events)


def _unpacked(content: bytes) -> bytes:
    """Unpack a gzip file; raises `EOFError` if it ends too early, `OverflowError` if it is too large."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16: with the header of gzip
    most = min(_MOST_BYTES, _ROOM + _MOST_TIMES * len(content))
    unpacked = unpacker.decompress(content, most)
    if not unpacker.eof:
        raise OverflowError if len(unpacked) == most else EOFError
    return unpacked


def _of_log(path: Path, document: Mapping[str, Any], events: list[dict[str, Any]]) -> _Trace:
    about = document.get("otherData")
    if not isinstance(about, dict):
        raise ConfigError(f"{path}: {_EXPECTED}")
    if about.get("format", FORMAT) != FORMAT:
        raise ConfigError(f"{path}: otherData.format: of another version of mcr_plus; expected {FORMAT}")
    rank, host, epoch, size = (about.get(name) for name in ("rank", "host", "epoch_us", "size"))
    valid = {
        "rank": _is_number(rank) and isinstance(rank, int),
        "host": isinstance(host, str),
        "epoch_us": _is_number(epoch),
        "size": size is None or (_is_number(size) and isinstance(size, int)),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            raise ConfigError(f"{path}: otherData.{name}: missing or malformed; {_EXPECTED}")
    return _Trace(path, about["rank"], about["host"], float(about["epoch_us"]), True, size, events)


def _of_profiler(path: Path, document: Mapping[str, Any], events: list[dict[str, Any]]) -> _Trace:
    """Return a trace of torch's profiler: times of day, minus `baseTimeNanoseconds` if present."""
    about = document["distributedInfo"]
    rank, size = (
        (about.get(name) for name in ("rank", "world_size")) if isinstance(about, dict) else (None, None)
    )
    if not (_is_number(rank) and isinstance(rank, int)):
        raise ConfigError(f"{path}: distributedInfo.rank: missing or malformed; {_EXPECTED}")
    base, host = document.get("baseTimeNanoseconds", 0), document.get("host_name")
    if not isinstance(base, (int, float)) or not _is_number(base / 1e3):
        raise ConfigError(f"{path}: baseTimeNanoseconds: malformed; {_EXPECTED}")
    size = size if _is_number(size) and isinstance(size, int) else None
    host = host if isinstance(host, str) else None
    return _Trace(path, rank, host, float(base) / 1e3, False, size, events)


def _is_number(value: object) -> bool:
    """Return whether `value` is a number within the range of times."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


# -- clocks -------------------------------------------------------------------------------------------------


def _together(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Key, Span]]:
    """Yield the operations of a log that all ranks complete together, in microseconds of its clock."""
    for event in events:
        args = event.get("args")
        if event.get("ph") != "b" or not isinstance(args, dict) or args.get("error") is not None:
            continue
        kind, numbers = args.get("kind"), [args.get(name) for name in _NUMBERS]
        if not isinstance(kind, str) or not all(map(_is_number, numbers)):
            continue
        sequence, nbytes, issued, done = map(float, numbers)  # type: ignore[arg-type]  # they are numbers
        if kind in TOGETHER and (nbytes or kind == "barrier"):
            yield (str(args.get("group")), int(sequence), kind, int(nbytes)), Span(issued * 1e6, done * 1e6)


def _moved(trace: _Trace, clock: Clock, epoch_us: float) -> Iterator[dict[str, Any]]:
    """Yield a trace's events on the common clock; a profiler's processes and arrows get new numbers.

    `epoch_us`: the time of day at 0 of the host's clock.
    """
    apart = trace.epoch_us - epoch_us
    shift = clock.shift_us + (0.0 if trace.is_log and abs(apart) < _SAME_CLOCK_US else apart)
    for event in trace.events:
        moved: dict[str, Any] = {**event, "ts": event["ts"] + shift} if "ts" in event else event
        if not trace.is_log:
            moved = {**moved, "pid": f"rank {trace.rank}: {event.get('pid', '')}"}
            if str(event.get("ph")) in _FLOWS and "id" in event:
                moved["id"] = f"{trace.rank}/{event['id']}"
        yield moved
