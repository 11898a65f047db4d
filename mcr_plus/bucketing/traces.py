"""Read steps from traces of torch's profiler: Kineto's JSON, optionally with execution traces.

    step = load_step(["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"])

A trace contains the ready times of gradients, the issued operations, and their durations. Other data are
inferred:

- A step is a range `ProfilerStep`, or lasts from the end of one `Optimizer.step` to the end of the next.
- With kernels, times are those of the GPU: an event of the host is placed at the end of all kernels launched
  before it.
- The program waits for an operation if it is idle until the operation ends. If the operation ended while the
  program computed, the wait is placed where it is visible in other steps or on other ranks; otherwise at the
  next visible wait, or before `Optimizer.step`.
- An operation carries the first or the last unsent gradients to become ready, if these have as many bytes in
  total as the operation.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from mcr_plus.bucketing.one_rank import of_all, ranks_of_job
from mcr_plus.bucketing.step import (
    MOST_RANKS,
    CapturedStep,
    IssueEvent,
    RankStep,
    ReadyEvent,
    Source,
    model_hash,
)
from mcr_plus.bucketing.trace_files import Graph, Notes, Trace, read_file
from mcr_plus.bucketing.trace_steps import Reader, usual_places
from mcr_plus.errors import ConfigError, InvalidArgument

_log = logging.getLogger("mcr_plus")


def load_step(paths: str | Path | Sequence[str | Path], ranks: int | None = None) -> CapturedStep:
    """Read a step: a file of `CapturedStep.save`, or the traces of all ranks of a job, or of one rank.

    `paths`: a file, a folder of files that end with `.json` or `.json.gz`, or a list of these. Each rank
    needs one Kineto trace, with recorded shapes (`record_shapes=True`) or together with the execution trace
    of the same run. Files are read incrementally, and only times of kernels and calls are stored. Limits are
    1,048,576 ranks, and the same number of steps, gradients, operations, modules and threads together in a
    trace. Inexact data is reported in `CapturedStep.notes`, and logged.

    With the trace of a single rank, the other ranks are assumed to do the same. `ranks`: number of the job's
    ranks, if that trace does not contain it.

    Raises:
        ConfigError: a file cannot be read, is truncated or not a trace; a field has a wrong type or exceeds
            its limits; times are negative or steps overlap; ranks are missing or duplicate, or their number
            is unknown; there is no backward pass. The text has the file and the byte offset.
    """
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files = [file for path in listed for file in _files(Path(path))]
    if not files:
        raise ConfigError(
            f"{', '.join(map(str, listed)) or 'no files'}: no trace; expected .json or .json.gz"
        )
    traces: list[Trace] = []
    graphs: list[Graph] = []
    for file in files:
        found = read_file(file)
        if found is None:
            if len(files) > 1:
                raise ConfigError(f"{file}: a step among traces; expected only this file: it has all ranks")
            return CapturedStep.load(file)
        (traces if isinstance(found, Trace) else graphs).append(found)  # type: ignore[arg-type]
    notes = Notes()
    _join_graphs(traces, graphs)
    _number_ranks(traces, notes)
    source: Source = "et" if graphs else "kineto"
    if len(traces) > 1:
        _check_all_are_there(traces)
        step = _merged(traces, len(traces), source, notes)
    else:
        world = ranks_of_job(traces[0], ranks, notes)
        step = _merged(traces, world, source, notes)
        step = of_all(step, traces[0], world) if world > 1 else step
    for text in step.notes:
        _log.warning("%s: %s", traces[0].path, text)
    return step


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    inside = list(path.iterdir())
    found = [file for file in inside if file.name.endswith((".json", ".json.gz"))]
    found = found or [file for file in inside if file.suffix == ".et"]  # to report them as execution traces
    return sorted(
        found, key=lambda file: [int(part) if part.isdecimal() else part for part in _parts(file.name)]
    )


def _parts(name: str) -> list[str]:
    return re.split(r"(\d+)", name)  # so that 10 comes after 9


def _join_graphs(traces: Sequence[Trace], graphs: Sequence[Graph]) -> None:
    """Add the arguments of execution traces to the events of the Kineto traces of the same processes."""
    if not traces:
        raise ConfigError(
            f"{graphs[0].path}: an execution trace has no times; expected the Kineto trace of the "
            "same run beside it"
        )
    for graph in graphs:
        same = [trace for trace in traces if trace.pid == graph.pid]
        ids = {
            args.get("Record function id")
            for trace in same
            for each in (trace.communication, trace.gradients)
            for *_, args in each
        }
        if len(same) != 1 or not ids & graph.args.keys():
            raise ConfigError(
                f"{graph.path}: no Kineto trace of this run (process {graph.pid}, the same rf_id); expected "
                "both traces of one profile, whose events have a 'Record function id'"
            )
        (trace,) = same
        trace.groups, trace.world = trace.groups or graph.groups, trace.world or graph.world
        for each in (trace.communication, trace.gradients):
            each[:] = [
                found._replace(args=graph.args.get(found.args.get("Record function id", -1), {}) | found.args)
                for found in each
            ]


def _number_ranks(traces: list[Trace], notes: Notes) -> None:
    """Set the rank of each trace. Raises `ConfigError` if two traces have the same rank."""
    for index, trace in enumerate(traces):
        in_name = re.search(r"(?:rank|worker)[_\-.]?(\d+)", trace.path.name, re.IGNORECASE)
        if trace.rank < 0 and in_name and int(in_name[1]) < MOST_RANKS:  # otherwise it is a time
            trace.rank = int(in_name[1])
        elif trace.rank < 0:
            trace.rank = index
            if len(traces) > 1:
                notes.add("a trace does not contain its rank; its position in the order of files is used")
    seen: dict[int, Trace] = {}
    for trace in traces:
        if trace.rank in seen:
            raise ConfigError(
                f"{trace.path}: rank {trace.rank} is in {seen[trace.rank].path} too; expected it once"
            )
        seen[trace.rank] = trace
    traces.sort(key=lambda trace: trace.rank)


def _check_all_are_there(traces: Sequence[Trace]) -> None:
    """Raise `ConfigError` if ranks are missing."""
    seen = {trace.rank for trace in traces}
    world = max(*(trace.world for trace in traces), max(seen) + 1)
    if missing := list(islice((rank for rank in range(world) if rank not in seen), 9)):
        named = ", ".join(map(str, missing[:8])) + ", …" * (len(missing) > 8)
        raise ConfigError(
            f"{traces[0].path}: no trace of rank {named}; expected one of each of the job's {world} ranks, "
            "or one trace alone, which counts for all"
        )


def _merged(traces: Sequence[Trace], world: int, source: Source, notes: Notes) -> CapturedStep:
    drafts = {trace.rank: Reader(trace, world, notes).drafts() for trace in traces}
    places = usual_places([draft for of_rank in drafts.values() for draft in of_rank])
    per_rank = {rank: [draft.step(places) for draft in of_rank] for rank, of_rank in drafts.items()}
    least = min(len(steps) for steps in per_rank.values())
    if any(len(steps) != least for steps in per_rank.values()):
        notes.add(f"ranks have traced different numbers of steps; the last {least} of each count")
        per_rank = {rank: steps[len(steps) - least :] for rank, steps in per_rank.items()}
    if least < 3:
        notes.add(
            f"only {least} step{'s are' if least > 1 else ' is'} in the traces; times are of few samples"
        )
    _check_models(per_rank, traces)
    hosts = {trace.host for trace in traces}
    params = [
        (mark.event.param, (mark.event.nbytes,), mark.event.like)
        for step in per_rank[traces[0].rank][-1:]
        for mark in step.marks
        if isinstance(mark.event, ReadyEvent)
    ]
    ours = any(each.name.startswith("mcr:") for trace in traces for each in trace.communication)
    try:
        return CapturedStep.merged(
            per_rank, nodes=len(hosts), model=model_hash(params), source=source, by_caller=ours, least=1,
            notes=notes.texts(),
        )  # fmt: skip
    except InvalidArgument as error:
        raise ConfigError(f"{traces[0].path}: {error}") from None


def _check_models(per_rank: Mapping[int, Sequence[RankStep]], traces: Sequence[Trace]) -> None:
    """Raise `ConfigError` if ranks have different models although all ranks form one group.

    If all operations involve all ranks, gradients are averaged over all. A rank may lack gradients, but no
    two ranks may each have a gradient that the other lacks. Gradients without a shape match any shape.
    """
    last = {rank: steps[-1].marks for rank, steps in per_rank.items() if steps}
    groups = {
        mark.event.group for marks in last.values() for mark in marks if isinstance(mark.event, IssueEvent)
    }
    ready = {
        rank: [mark.event for mark in marks if isinstance(mark.event, ReadyEvent)]
        for rank, marks in last.items()
    }
    unknown = any("[" not in each.param for events in ready.values() for each in events)
    if unknown or groups != {tuple(range(len(traces)))}:
        return
    shapes = {
        rank: Counter(f"{each.like} [{each.param.partition('[')[2]}" for each in events)
        for rank, events in ready.items()
    }
    (first, own), *others = shapes.items()
    for rank, other in others:
        if (more := other - own) and (less := own - other):
            raise ConfigError(
                f"{traces[rank].path}: rank {rank} has a gradient {next(iter(more))}, and rank {first} has "
                f"{next(iter(less))} instead; expected traces of one model"
            )
