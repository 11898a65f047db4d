"""Merging of traces of several ranks into one file with one clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mcr_plus.config.document import read_bytes, write_text
from mcr_plus.errors import ConfigError

_SAME_CLOCK_US: Final = 1e6  # clocks of one host that differ by more were read in different boots
_MOST_BYTES: Final = 1 << 30
_LARGEST: Final = 1e18  # microseconds: 30,000 years
_EXPECTED: Final = "expected a trace that log.save() wrote"


@dataclass(frozen=True)
class _Trace:
    path: Path
    rank: int
    host: str
    epoch_us: float
    events: list[dict[str, Any]]


def merge_traces(paths: Sequence[Path], output: Path) -> int:
    """Merge the traces that `Log.save` wrote on several ranks into one; returns the number of events.

    Ranks of one host share a clock. Traces of other hosts are shifted by the difference of the hosts' times
    of day, so they are as accurate as the synchronisation of these clocks.

    Raises:
        ConfigError: a file is no such trace, a rank is in two files, or `output` cannot be written.
    """
    traces = sorted((_read(path) for path in paths), key=lambda trace: trace.rank)
    seen: dict[int, Path] = {}
    for trace in traces:
        if trace.rank in seen:
            raise ConfigError(
                f"{trace.path}: rank {trace.rank} is in {seen[trace.rank]} too; expected it once"
            )
        seen[trace.rank] = trace.path
    events = [event for trace in traces for event in _shifted(trace, traces[0])]
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    write_text(output, json.dumps(document))
    return len(events)


def _read(path: Path) -> _Trace:
    """Read a trace. Errors do not quote the file, which may be a confidential one named by mistake."""
    content = read_bytes(path, str(path), most=_MOST_BYTES)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):  # of JSON or of UTF-8
        raise ConfigError(f"{path}: not JSON; {_EXPECTED}") from None
    events = document.get("traceEvents") if isinstance(document, dict) else None
    about = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(events, list) or not isinstance(about, dict):
        raise ConfigError(f"{path}: {_EXPECTED}")
    rank, host, epoch = (about.get(name) for name in ("rank", "host", "epoch_us"))
    valid = {"rank": _is_number(rank) and isinstance(rank, int), "host": isinstance(host, str)}
    for name, is_valid in {**valid, "epoch_us": _is_number(epoch)}.items():
        if not is_valid:
            raise ConfigError(f"{path}: otherData.{name}: missing or malformed; {_EXPECTED}")
    for index, event in enumerate(events):
        if not isinstance(event, dict) or not _is_number(event.get("ts", 0)):
            raise ConfigError(
                f"{path}: traceEvents[{index}]: not an event with a time in microseconds; {_EXPECTED}"
            )
    return _Trace(path, about["rank"], about["host"], float(about["epoch_us"]), events)


def _is_number(value: object) -> bool:
    """Whether `value` is a number within the range of times."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _shifted(trace: _Trace, first: _Trace) -> list[dict[str, Any]]:
    shift = trace.epoch_us - first.epoch_us
    if trace.host == first.host and abs(shift) < _SAME_CLOCK_US:
        shift = 0.0
    return [{**event, "ts": event["ts"] + shift} if "ts" in event else event for event in trace.events]
