"""Traces of CPU jobs in the form that HolisticTraceAnalysis reads.

HolisticTraceAnalysis reads GPU kernels by stream and takes kernels named `^nccl.*Kernel` for communication.
A CPU job has no kernels, so its operations are written as such kernels, and the outermost torch operators as
compute kernels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mcr_plus.config.document import write_text
from mcr_plus.core.kinds import collective

_COMPUTING: Final = 7  # stream of the first thread's operators; further threads have the next numbers
_COMMUNICATING: Final = 1000  # first stream of operations
_RANGE: Final = re.compile("^(mcr|gloo|nccl|mpi|ucc):[^:]")
_NO_COMPUTING: Final = ("c10d::", "record_param_comms")


def write_for_hta(
    folder: Path, events: Mapping[int, Sequence[Mapping[str, Any]]], logged: Mapping[int, bool], size: int
) -> list[Path]:
    """Write a file per rank, `rank0.json` and so on, into `folder`, which is created if it is missing.

    `events`: the trace events of each rank, on one clock. `logged`: whether a log is among the rank's traces;
    operations are then taken from the log, not from the profiler's ranges. `size`: number of ranks. Raises
    `ConfigError` if a file cannot be written.
    """
    written = []
    for rank, of_rank in events.items():
        communicating = _logged(of_rank) if logged[rank] else _profiled(of_rank)
        kernels = [*_computing(of_rank), *_on_streams(communicating)]
        own = [event for event in of_rank if event.get("ph") in ("X", "M")]
        for number, kernel in enumerate(kernels):
            kernel["args"] |= {"device": rank, "context": 1, "correlation": number + 1}
            kernel["pid"] = rank
        document = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": size},
            "traceEvents": [*own, *kernels],
        }
        path = folder / f"rank{rank}.json"
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(document))
        written.append(path)
    return written


def _kernel(name: str, begin: float, duration: float, stream: int, args: Mapping[str, Any]) -> dict[str, Any]:
    # Use whole microseconds: the analyses round begins up and ends down, so durations could be negative.
    start = round(begin)
    return {
        "ph": "X", "cat": "kernel", "name": name, "tid": stream, "ts": start,
        "dur": round(begin + duration) - start, "args": {**args, "stream": stream},
    }  # fmt: skip


def _on_streams(kernels: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield kernels, each on the first free stream: kernels of one stream never overlap."""
    ends: list[int] = []
    for kernel in sorted(kernels, key=lambda each: int(each["ts"])):
        stream = next((at for at, end in enumerate(ends) if end <= kernel["ts"]), len(ends))
        ends[stream : stream + 1] = [kernel["ts"] + kernel["dur"]]
        kernel["tid"] = kernel["args"]["stream"] = _COMMUNICATING + stream
        yield kernel


def _computing(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the outermost operators of each thread, except communication."""
    operators = [event for event in events if event.get("ph") == "X" and event.get("cat") == "cpu_op"]
    ends: dict[Any, float] = {}
    for event in sorted(operators, key=lambda each: (each["ts"], -each.get("dur", 0))):
        thread, name, end = event.get("tid"), str(event.get("name")), event["ts"] + event.get("dur", 0)
        stream = _COMPUTING + list(ends).index(thread) if thread in ends else _COMPUTING + len(ends)
        if thread in ends and event["ts"] < ends[thread]:
            continue
        ends[thread] = end
        if not _RANGE.match(name) and not name.startswith(_NO_COMPUTING):
            yield _kernel(name, event["ts"], event.get("dur", 0), stream, {})


def _profiled(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield communication from the ranges of a profiler."""
    for event in events:
        name = str(event.get("name"))
        if event.get("ph") == "X" and event.get("cat") != "kernel" and _RANGE.match(name):
            kernel = f"ncclDevKernel_{name.partition(':')[2]}"
            yield _kernel(kernel, event["ts"], event.get("dur", 0), _COMMUNICATING, event.get("args") or {})


def _logged(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield communication from the records of a log: from the issue until completion was noticed."""
    for event in events:
        record = event.get("args")
        if event.get("ph") == "b" and isinstance(record, dict) and "t_done" in record:
            kind, ranks, nbytes = record["kind"], record["ranks"], record["bytes"]
            part = nbytes // max(ranks, 1)
            sends, receives = collective(kind).buffers()
            args = {
                "Collective name": kind,
                "In msg nelems": part if collective(kind).is_shared and sends == "one" else nbytes,
                "Out msg nelems": part if collective(kind).is_shared and receives == "one" else nbytes,
                "Group size": ranks,
                "dtype": "Byte",
                "Process Group Name": record["group"],
            }
            duration = max(0.0, (record["t_done"] - record["t_issue"]) * 1e6)
            yield _kernel(f"ncclDevKernel_{kind}", event["ts"], duration, _COMMUNICATING, args)
