"""Traces of several ranks in one file, on one clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcr_plus.errors import ConfigError, short

_SAME_CLOCK_US = 1e6  # clocks of one host that differ by more were read in different boots


@dataclass(frozen=True)
class _Trace:
    path: Path
    rank: int
    host: str
    epoch_us: float
    events: list[dict[str, Any]]


def merge_traces(paths: Sequence[Path], output: Path) -> int:
    """Write the traces that `Log.save` wrote on several ranks as one; returns the number of events.

    Ranks of one host share a clock. Those of other hosts are shifted by what their times of day say, which is
    as good as the synchronisation of the hosts. Raises `ConfigError` for a file that is no such trace, for a
    rank that is in two files, and if `output` cannot be written.
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
    try:
        output.write_text(json.dumps(document))
    except OSError as error:
        raise ConfigError(f"{output}: cannot write: {error.strerror}") from None
    return len(events)


def _read(path: Path) -> _Trace:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except ValueError:  # of JSON or of UTF-8
        raise ConfigError(f"{path}: not JSON; expected a trace that log.save() wrote") from None
    events = found.get("traceEvents") if isinstance(found, dict) else None
    about = found.get("otherData") if isinstance(found, dict) else None
    if not isinstance(events, list) or not isinstance(about, Mapping):
        raise ConfigError(f"{path}: expected a trace that log.save() wrote, got {short(found)}")
    kinds = {"rank": int, "host": str, "epoch_us": (int, float)}
    for name, kind in kinds.items():
        if not isinstance(about.get(name), kind):  # type: ignore[arg-type]  # a type or several
            raise ConfigError(f"{path}: otherData.{name}: missing; expected a trace that log.save() wrote")
    return _Trace(path, about["rank"], about["host"], float(about["epoch_us"]), events)


def _shifted(trace: _Trace, first: _Trace) -> list[dict[str, Any]]:
    shift = trace.epoch_us - first.epoch_us
    if trace.host == first.host and abs(shift) < _SAME_CLOCK_US:
        shift = 0.0
    return [{**event, "ts": event["ts"] + shift} if "ts" in event else event for event in trace.events]
