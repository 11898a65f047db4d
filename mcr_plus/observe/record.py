"""Recording of operations, without additional synchronisation."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import finalize

import numpy as np

from mcr_plus.board.shared import arrival_times
from mcr_plus.core.collector import collector_paused
from mcr_plus.core.environment import host_name
from mcr_plus.core.kinds import bus_factor, dtype_name
from mcr_plus.core.stacks import site_at
from mcr_plus.engine.hook import OperationHook
from mcr_plus.job.init import current
from mcr_plus.observe.clocks import TOGETHER
from mcr_plus.observe.cross_host_stragglers import AcrossHosts
from mcr_plus.observe.idle_time import IdleTime
from mcr_plus.observe.stragglers import ArrivalCollector, Stragglers, site_text

if TYPE_CHECKING:
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Signature
    from mcr_plus.core.stacks import Position, Site
    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.group_state import GroupState
    from mcr_plus.engine.work import IssuedWork

_log = logging.getLogger("mcr_plus")


@dataclass(frozen=True)
class Record:
    """One operation. Times are `time.perf_counter()` seconds.

    `t_done` is when completion was noticed: at the wait, or earlier if another call drove progress. For
    operations on a CUDA stream that is the host's next poll. `bytes` and `wire_bytes` are this rank's own if
    sizes differ between ranks. `waited` is the time, in seconds, that a thread spent waiting: the exposed
    cost of the operation; the rest overlapped with other work. `site` is the line of the program that issued
    the operation, `file:line, in function`. `skew` is the time, in seconds, from the median of the ranks'
    arrivals to the last arrival; None if arrivals are unknown, see `Log.stragglers`. `dtype` is the dtype of
    the data given to the library, `none` without data. `sums`: the order of additions, see `Signature`.
    """

    sequence: int
    kind: str
    tag: str | None
    group: str
    backend: str
    codec: str | None
    bytes: int
    wire_bytes: int
    fused: int
    t_issue: float
    t_done: float
    waited: float
    ranks: int
    error: str | None
    dtype: str = "none"
    is_async: bool = False
    site: str = ""
    skew: float | None = None
    sums: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of a summary; `size_class` is the smallest power of two ≥ the operations' bytes."""

    kind: str
    backend: str
    size_class: int
    count: int
    bytes: int
    p50_us: float
    p95_us: float
    algbw_GBps: float  # noqa: N815 - the field's unit
    busbw_GBps: float  # noqa: N815
    ranks: int
    codec: str | None = None
    wire_bytes: int = 0

    @property
    def p50(self) -> float:
        """Return the median time in seconds."""
        return self.p50_us / 1e6

    @property
    def p95(self) -> float:
        """Return the 95th percentile of the times in seconds."""
        return self.p95_us / 1e6

    @property
    def algbw(self) -> float:
        """Return `algbw_GBps`."""
        return self.algbw_GBps

    @property
    def busbw(self) -> float:
        """Return `busbw_GBps`."""
        return self.busbw_GBps

    def __getitem__(self, name: str) -> Any:
        if name not in (*(field.name for field in fields(self)), "p50", "p95", "algbw", "busbw"):
            raise KeyError(name)
        return getattr(self, name)


class Summary(list[Row]):
    """The rows of `Log.summary`; prints as a table."""

    def __str__(self) -> str:
        from mcr_plus.observe.record_table import summary_text  # at module level the import would be circular

        return summary_text(self)


def size_class(nbytes: int) -> int:
    """Return the smallest power of two that is at least `nbytes`; 0 for none."""
    return 0 if nbytes == 0 else 1 << (nbytes - 1).bit_length()


_Noted = tuple[Any, ...]
"""Arguments of `Log._record`."""


class Log(OperationHook):
    """Records in the order in which completion was noticed.

    `print(log)` shows times and waits by kind, tag and backend.
    """

    def __init__(self, rank: int, size: int | None = None, across: AcrossHosts | None = None) -> None:
        """Create the log of `rank` among `size` ranks, if known. `across`: for groups across hosts."""
        self._records: list[Record] = []
        self._noted: list[_Noted] = []
        self._lock = threading.RLock()
        self._rank = rank
        self._size = size
        self._began = time.perf_counter()
        self._ended: float | None = None
        self._arrivals = ArrivalCollector(across)
        self._sites: dict[tuple[int, int], tuple[Position, Site, str]] = {}

    @property
    def records(self) -> list[Record]:
        """Return the records so far. Operations noted since the last access become records now."""
        self._take_in()
        return self._records

    def _take_in(self) -> None:
        # Nothing here is garbage; collecting among so many new objects would take most of the time.
        with self._lock, collector_paused():
            count = len(self._noted)
            noted = self._noted[:count]
            del self._noted[:count]  # first: a signal handler may look at the records meanwhile
            self._records += [self._record(*each) for each in noted]

    @property
    def seconds(self) -> float:
        """Return the duration of the recording, until now if it has not ended."""
        return (time.perf_counter() if self._ended is None else self._ended) - self._began

    def stop(self) -> None:
        """Note the end of recording."""
        self._ended = time.perf_counter()

    def publish(self) -> None:
        """Publish this rank's arrivals at operations, for ranks of other hosts."""
        if (across := self._arrivals.across) is not None:
            across.publish()

    def __str__(self) -> str:
        """Return the table of this rank's operations."""
        from mcr_plus.observe.record_table import communication, table_text  # a circular import otherwise

        seconds = self.seconds
        title = f"Communication of rank {self._rank} in {seconds:.3g} s"
        good = [record for record in self.records if record.error is None]
        failed = len(self.records) - len(good)
        if failed:
            title += f", without {failed} operation{'' if failed == 1 else 's'} that failed"
        return table_text(title, communication(good, seconds)) if good else f"{title}: nothing was recorded"

    def plot(self, path: str | Path) -> None:
        """Draw a timeline of this rank's operations, as .png, .svg or .pdf.

        Raises:
            Unsupported: matplotlib is not installed.
            InvalidArgument: the ending is unknown, the folder is missing, or the log is empty.
        """
        from mcr_plus.observe.record_plot import plot_records

        plot_records(self.records, f"Communication of rank {self._rank}", Path(path))

    def ended(self, work: IssuedWork) -> None:
        """Note a finished operation; `records` makes a record of it later. Called by the engine."""
        if not work.t_issue:
            return  # issued before recording began
        operation, message, number, error = work.operation, work.message, work.sequence, work.error
        signature, state = operation.signature, operation.state
        times = work.t_issue, work.t_done or work.t_issue, work.t_wait
        words, apart = None, None
        if number and error is None and state.group.size > 1:
            words = state.board.arrival_words(number)
            across = self._arrivals.across
            if words is None and work.idle is not None and across is not None:
                apart = state, (times[0], work.idle, times[1])
                across.note(state, number, apart[1])
        self._noted.append(
            (
                signature,
                state.group,
                number,
                work.ran_on or operation.backend,
                message.codec,
                message.uncompressed_bytes,
                message.own_bytes() if signature.nbytes is None else signature.nbytes,
                message.fused,
                times,
                None if error is None else str(error),
                work.site,
                words,
                apart,
            )
        )

    def _record(
        self,
        signature: Signature,
        group: Group,
        number: int,
        ran_on: str,
        codec: str | None,
        uncompressed: int | None,
        nbytes: int,
        fused: int,
        times: tuple[float, float, float],
        error: str | None,
        position: Position | None,
        words: tuple[list[int], list[int]] | None,
        apart: tuple[GroupState, tuple[float, float, float]] | None,
    ) -> Record:
        issued, done, began_wait = times
        site, site_name = (None, "") if position is None else self._site(position)
        skew = None
        if apart is not None and self._arrivals.across is not None:
            together = signature.kind in TOGETHER and (nbytes > 0 or signature.kind == "barrier")
            key = self._arrivals.key(signature, site)
            self._arrivals.across.add(apart[0], number, key, together, apart[1])
        elif number and error is None and group.size > 1:
            known = None if words is None else arrival_times(words, number)
            skew = self._arrivals.add(group, signature, number, known, site)
        library = ran_on.partition(":")[0]
        values = {
            "sequence": number,
            "kind": signature.kind,
            "tag": signature.tag,
            "group": signature.group,
            "backend": signature.choice if library == (signature.backend or "") else library,
            "codec": codec,
            "bytes": nbytes if uncompressed is None else uncompressed,
            "wire_bytes": nbytes,
            "fused": fused,
            "t_issue": issued,
            "t_done": done,
            "waited": max(0.0, done - began_wait),
            "ranks": signature.ranks,
            "error": error,
            "dtype": dtype_name(signature.dtype),
            "is_async": signature.async_op,
            "site": site_name,
            "skew": skew,
            "sums": signature.sums,
        }
        # Set one by one, so that records share keys. The constructor of a frozen class takes ten times as
        # long.
        record = Record.__new__(Record)
        attributes = vars(record)
        for name, value in values.items():
            attributes[name] = value
        return record

    def _site(self, position: Position) -> tuple[Site, str]:
        """Return the line of a position, also as text. Code is compared by identity: hashing it is slow."""
        key = id(position[0]), position[1]
        found = self._sites.get(key)
        if found is None:
            site = site_at(position)
            found = self._sites[key] = position, site, site_text(site)
        return found[1:]

    def stragglers(self) -> Stragglers:
        """Return the ranks that persistently delay others, the latest first; an empty list if none does.

        Uses operations that all ranks of a group have recorded. A rank counts as a straggler if its own delay
        is 5 % of the time, occurs in at least four of five equal parts of the recording, and is three times
        the delay of the others. `print` shows the delay of each rank, by kind, tag and line of the program.

        For groups on one host, no communication is needed. For those across hosts, the arrivals of the other
        ranks are read from the job's store, to which each rank publishes when its recording ends. Call it
        before `mcr.finalize`; it waits up to five seconds for ranks that still record.

        Example:
            ```python
            with mcr.init() as comm:
                with mcr.record() as log:
                    for _ in range(20):
                        time.sleep(0.02 * (comm.rank == 1))
                        comm.all_reduce(torch.ones(1000))
                if comm.rank == 0:
                    print([each.rank for each in log.stragglers()])  # [1]
            ```
        """
        with self._lock:
            self._take_in()
            if self._ended is None:
                self.publish()
            return self._arrivals.stragglers(self._began, self.seconds)

    def summary(self) -> Summary:
        """Return one row per kind, backend, size class, ranks and codec, sorted, without failed operations.

        The list prints as a table. Bandwidths are bytes over the summed time of the row, busbw by the
        formulas of nccl-tests.
        """
        groups: dict[_Key, list[Record]] = defaultdict(list)
        for record in self.records:
            if record.error is None:
                size = size_class(record.bytes)
                key = (record.kind, record.backend, size, record.ranks, record.codec or "")
                groups[key].append(record)
        return Summary(_row(key, records) for key, records in sorted(groups.items()))

    def save(self, path: str | Path) -> None:
        """Write a trace that Perfetto and chrome://tracing read: one row per group and backend.

        Creates a missing folder. `mcr-plus trace merge` merges the traces of several ranks.

        Raises `OSError` if the file cannot be written.
        """
        lanes = sorted({(record.group, record.backend) for record in self.records})
        events: list[dict[str, Any]] = [
            {
                "ph": "M",
                "name": "process_name",
                "pid": self._rank,
                "tid": 0,
                "args": {"name": f"rank {self._rank}"},
            }
        ]
        for index, (group, backend) in enumerate(lanes):
            name = {"name": f"{group} {backend}"}
            events.append({"ph": "M", "name": "thread_name", "pid": self._rank, "tid": index, "args": name})
        for record in self.records:
            events.extend(_events(record, self._rank, lanes.index((record.group, record.backend))))
        epoch = time.time() - time.perf_counter()
        about = {
            "format": 1,
            "rank": self._rank,
            "size": self._size,
            "host": host_name(),
            "epoch_us": epoch * 1e6,
        }
        document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(document))


def _events(record: Record, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    # Asynchronous events ("b"/"e"): operations of one row overlap.
    unique = f"{pid}/{record.group}#{record.sequence}@{record.t_issue}"  # unique also in a merged trace
    common = {"cat": "communication", "id": unique, "pid": pid}
    name = record.kind if record.tag is None else f"{record.kind} {record.tag}"
    yield {**common, "ph": "b", "name": name, "tid": tid, "ts": record.t_issue * 1e6, "args": asdict(record)}
    yield {**common, "ph": "e", "name": name, "tid": tid, "ts": record.t_done * 1e6}


_Key = tuple[str, str, int, int, str]
"""Key of a row: kind, backend, size class, ranks, codec or the empty string."""


def _row(key: _Key, records: Sequence[Record]) -> Row:
    kind, backend, size, ranks, codec = key
    seconds = np.array([record.t_done - record.t_issue for record in records])
    total = sum(record.bytes for record in records)
    algbw = total / max(float(seconds.sum()), 1e-12) / 1e9
    return Row(
        kind=kind,
        backend=backend,
        size_class=size,
        count=len(records),
        bytes=total,
        p50_us=float(np.percentile(seconds, 50)) * 1e6,
        p95_us=float(np.percentile(seconds, 95)) * 1e6,
        algbw_GBps=algbw,
        busbw_GBps=algbw * bus_factor(kind, ranks),
        ranks=ranks,
        codec=codec or None,
        wire_bytes=sum(record.wire_bytes for record in records),
    )


@contextmanager
def recording(engine: Engine, rank: int, size: int) -> Iterator[Log]:
    """Record every operation whose issue and completion fall inside the block. Blocks may nest."""
    apart = len({process.place for process in engine.peers.processes}) > 1
    log = Log(rank, size, AcrossHosts(engine) if apart else None)
    outer = any(isinstance(each, IdleTime) for each in engine.hooks.all)
    idle = None if outer else IdleTime()
    if idle is not None:
        engine.add_hook(idle)
    engine.add_hook(log)
    try:
        yield log
    finally:
        log.stop()
        engine.remove_hook(log)
        if idle is not None:
            engine.remove_hook(idle)
            idle.close()
        log.publish()


def record(path: str | Path | None = None) -> AbstractContextManager[Log]:
    """Record the operations of this process that are issued and end inside the block.

    Recording synchronises nothing, so the timing of the program stays the same. Records hold sizes in bytes
    and times in seconds, but no tensors.

    Args:
        path: a folder for one file per rank, `rank0.npz` and so on; `mcr-plus report` turns them into a page.
            A missing folder is created. The files are written when the block ends; an error in writing is
            logged.

    Returns:
        A context manager that yields a `Log`: `records`, `summary()`, `save()`, `plot()`, and `print(log)`.

    Raises:
        NotInitialized: there is no job.
        InvalidArgument: `path` cannot be written.

    Example:
        ```python
        with mcr.record() as log:
            mcr.all_reduce(torch.ones(1000), tag="example")
        assert [(each.kind, each.tag, each.bytes) for each in log.records] == [
            ("all_reduce", "example", 4000)
        ]
        ```
    """
    return _Recording(path)


class _Recording(ContextDecorator, AbstractContextManager[Log]):
    def __init__(self, path: str | Path | None) -> None:
        self._path = path
        self._entered: list[AbstractContextManager[Log]] = []
        text = "record: nothing was recorded, because mcr.record() was used without `with`"
        self._unused = finalize(self, _log.warning, text)

    def __call__(self, function: Any) -> Any:
        self._unused.detach()  # some functions are never called
        return super().__call__(function)

    def __enter__(self) -> Log:
        self._unused.detach()
        self._entered.append(_recorded(self._path))
        return self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"record: no {name!r}; `with mcr.record() as log:` begins a block, and gives the log"
        )


@contextmanager
def _recorded(path: str | Path | None) -> Iterator[Log]:
    job = current()
    with recording(job.engine, job.world.rank, job.world.size) as log, ExitStack() as stack:
        if path is not None:
            from mcr_plus.observe.record_folder import collecting  # imports the tables: only if needed

            stack.enter_context(collecting(log, job, path))
        yield log
