"""Digests of the input and output of every operation of the program, written to a file of each rank.

The hook takes part where a call is bound to its chain of stages, so it sees what the program passes and gets:
neither the pieces nor the encoded values that stages make of it, and compiled calls and persistent operations
too, which take the way of Python meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mcr_plus.core.kinds import collective, dtype_name
from mcr_plus.core.stacks import position_of, site_at
from mcr_plus.engine.hook import OperationHook
from mcr_plus.engine.issue import Issue
from mcr_plus.job.hooks import JobHook
from mcr_plus.kernels import checksum, digest
from mcr_plus.observe.files import check_writable
from mcr_plus.observe.options import DigestOptions, observed, operations_in
from mcr_plus.rendezvous.heartbeats import job_id
from mcr_plus.reproducible.digest_file import (
    BUCKETS,
    DONE,
    INPUT,
    OUTPUT,
    About,
    CallOfProgram,
    World,
    about_line,
    chunk,
    file_of,
    kept_file,
)

if TYPE_CHECKING:
    from types import FrameType

    from mcr_plus.config.schema import Config
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Message
    from mcr_plus.core.work import Work
    from mcr_plus.engine.operation import BoundOperation
    from mcr_plus.engine.work import IssuedWork
    from mcr_plus.job.runtime import Runtime

_log = logging.getLogger("mcr_plus")
_EVERY: Final = 1.0  # seconds between two writes
_MOST: Final = 4096  # rows between two writes
_OBJECTS: Final = ("all_gather_object", "broadcast_object")  # their bytes are signed anew in each job
_OWN_TAGS: Final = ("elastic", "horovod.negotiation", "local.check", "local.warmup", "plan")
"""Tags of operations of mcr_plus itself, which exchange times and answers; never compressed."""


class DigestHook(JobHook):
    """Job hook that writes digests, if the configuration names a folder for them."""

    def __init__(self) -> None:
        self._writer: DigestWriter | None = None
        self._jobs = 0

    def check(self, config: Config) -> None:
        """Check that the folder can be written; see `JobHook`."""
        if (options := observed(config).digests) is not None:
            check_writable(options.folder, f"{config.name}: observe.digests")
            host_digest(torch.zeros(1, device="cpu"))  # compiles the kernels, or loads them

    def begin(self, runtime: Runtime) -> None:
        """See `JobHook`."""
        self.closing()
        options, world, processes = observed(runtime.config).digests, runtime.world, runtime.engine.peers
        self._jobs += world.roster is None  # else a later epoch of the same job
        if options is None:
            return
        epoch = 0 if world.roster is None else world.roster.epoch
        path = file_of(Path(options.folder).absolute(), World(max(self._jobs - 1, 0), epoch), world.rank)
        about = About(job=job_id(processes.processes), rank=world.rank, size=world.size)
        self._writer = DigestWriter(path, about, options)
        runtime.add_hook(self._writer)

    def closing(self) -> None:
        """See `JobHook`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def abandon(self) -> None:
        """See `JobHook`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.stop()


class _Row:
    """An operation of the program. `outputs`: its results, until their digest is taken."""

    __slots__ = ("call", "elements", "flags", "index", "input", "number", "output", "outputs", "stream")

    def __init__(self, call: int, index: int, stream: str, number: int) -> None:
        self.call, self.index, self.stream, self.number = call, index, stream, number
        self.flags = self.elements = 0
        self.input: int | _OnDevice = 0
        self.output: int | _OnDevice = 0
        self.outputs: tuple[torch.Tensor, ...] = ()

    def plain(self, deadline: float) -> tuple[int, ...]:
        """Return the row's numbers, without digests that a device has not computed until the deadline."""
        flags, found = self.flags, []
        for flag, value in ((INPUT, self.input), (OUTPUT, self.output)):
            number = value if isinstance(value, int) else value.known(deadline)
            found.append(number or 0)
            flags &= ~flag if number is None else ~0
        return self.call, flags, self.index, self.number, self.elements, *found


class _OnDevice:
    """A digest that a device computes, in the order of the stream that was current."""

    def __init__(self, values: torch.Tensor) -> None:
        from mcr_plus.kernels.gpu import digest as on_gpu  # imported here: needs Triton

        self._shape = values.numel(), values.itemsize
        self._hashes = on_gpu.hashes_of(values.view(-1).view(torch.uint8))
        self._event = torch.Event(values.device)
        self._event.record()

    def known(self, deadline: float) -> int | None:
        """Return the digest; None if the device has not computed it until the deadline."""
        while not self._event.query():
            if time.monotonic() > deadline:
                return None
            time.sleep(1e-3)
        return digest.folded(self._hashes.cpu().numpy().view(np.uint64), *self._shape)


def host_digest(values: torch.Tensor) -> int:
    """Return the digest of contiguous values in host memory: a fold of the checksums of their blocks."""
    return digest.folded(checksum.of_blocks(values).numpy().view(np.uint64), values.numel(), values.itemsize)


class _Watched(Issue):
    """An issue with other functions; `operation` stays that of the chain, which online trials change."""

    __slots__ = ("_of",)

    def __init__(self, of: Issue, start: Callable[[Message], Work], run: Callable[[Message], None]) -> None:
        self._of = of
        super().__init__(start, run)

    @property  # type: ignore[override]
    def operation(self) -> BoundOperation | None:
        """See `Issue`."""
        return self._of.operation

    @operation.setter
    def operation(self, value: BoundOperation | None) -> None:
        """Ignore the value that the constructor of `Issue` sets."""


class DigestWriter(OperationHook):
    """Takes digests of the operations of one world, and writes them to this rank's file."""

    def __init__(self, path: Path, about: About, options: DigestOptions) -> None:
        self._path = path
        self._keep = None if options.keep is None else operations_in(options.keep)
        self._calls: dict[CallOfProgram, int] = {}
        self._named = 0  # calls that the file has
        self._naming = threading.Lock()
        self._numbers: dict[str, Any] = {}
        self._indices = count()
        self._rows: deque[_Row] = deque()
        self._in_flight: dict[int, _Row] = {}
        self._lock = threading.Lock()  # of the file
        self._flushed = time.monotonic()
        self._is_on = True
        self._file: Any = None
        self._guarded(self._open, about_line(about))

    def _open(self, line: bytes) -> None:
        self._file = self._path.open("wb", buffering=0)
        self._write(line)

    # -- the engine's reports ---------------------------------------------------------------------

    def bound(self, group: Group, issue: Issue) -> Issue:
        """Take digests around the operations of a bound call; see `OperationHook`."""
        known: dict[tuple[Any, ...], tuple[Any, str, int]] = {}  # the first keeps the key's code alive

        def start(message: Message) -> Work:
            row = self._guarded(self._begun, group, issue, message, known, sys._getframe(1))
            work = issue.start(message)
            return work if row is None else work.then(partial(self._guarded, self._ended, row))

        def run(message: Message) -> None:
            row = self._guarded(self._begun, group, issue, message, known, sys._getframe(1))
            issue.run(message)
            if row is not None:
                self._guarded(self._ended, row)

        return _Watched(issue, start, run)

    def waits_long(self, work: IssuedWork) -> None:  # noqa: ARG002
        """Write all rows: the job may be killed; see `OperationHook`."""
        self._guarded(self._flush, 0.0, in_flight=True)

    def fails(self, work: IssuedWork, error: BaseException) -> None:  # noqa: ARG002
        """Write all rows; see `OperationHook`."""
        self._guarded(self._flush, 0.0, in_flight=True)

    def close(self) -> None:
        """Write the end of the file."""
        self._guarded(self._flush, time.monotonic() + _EVERY, in_flight=True)
        self._guarded(self._write, chunk([], []))
        self.stop()

    def stop(self) -> None:
        """Take no more digests, and close the file."""
        self._is_on = False
        self._rows.clear()
        self._in_flight.clear()
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()

    def _guarded(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function of this object; an error ends the digests, but not the program."""
        if not self._is_on:
            return None
        try:
            return function(*arguments, **options)
        except Exception as error:
            why = (error.strerror if isinstance(error, OSError) else None) or f"{error}"
            what = "no more digests are written, and the job goes on"
            _log.warning("observe.digests: %s: %s: %s; %s", self._path, type(error).__name__, why, what)
            self.stop()

    # -- operations -------------------------------------------------------------------------------

    def _begun(
        self,
        group: Group,
        issue: Issue,
        message: Message,
        known: dict[tuple[Any, ...], tuple[Any, str, int]],
        frame: FrameType | None,
    ) -> _Row | None:
        signature = message.signature
        if signature.compress is False and signature.tag in _OWN_TAGS:
            return None
        while frame is not None and frame.f_globals.get("__name__", "").startswith("mcr_plus."):
            if frame.f_code.co_name in _OBJECTS:
                return None
            frame = frame.f_back
        position = position_of(frame)
        key = (None, 0, message.peer) if position is None else (id(position[0]), position[1], message.peer)
        found = known.get(key)
        if found is None:
            call = self._call(
                group, issue, message, "" if position is None else _site_text(*site_at(position))
            )
            found = known[key] = position, call.stream, self._number_of(call)
        _, stream, number = found
        if (numbers := self._numbers.get(stream)) is None:
            numbers = self._numbers[stream] = count(1)
        row = _Row(number, next(self._indices), stream, next(numbers))
        sends, receives = collective(signature.kind).buffers(root=signature.root in (None, group.rank))
        row.elements = max((each.numel() for each in (*message.inputs, *message.outputs)), default=0)
        if receives != "none":
            row.outputs = message.outputs
        self._in_flight[row.index] = row
        if sends != "none" and message.inputs:
            if message.after is None and message.prepare is None:
                self._take(row, message.inputs[0], INPUT)
            else:  # what it reads is there only when it starts
                message.prepare = partial(self._prepared, row, message.inputs[0], message.prepare)
        return row

    def _prepared(self, row: _Row, values: torch.Tensor, prepare: Callable[[], None] | None) -> None:
        if prepare is not None:
            prepare()
        self._guarded(self._take, row, values, INPUT)

    def _ended(self, row: _Row) -> None:
        if row.outputs:
            self._take(row, row.outputs[0], OUTPUT)
            row.outputs = ()
        row.flags |= DONE
        self._in_flight.pop(row.index, None)
        self._rows.append(row)
        if len(self._rows) >= _MOST or time.monotonic() > self._flushed + _EVERY:
            self._flush(0.0)

    def _take(self, row: _Row, values: torch.Tensor, part: int) -> None:
        """Take the digest of one part of an operation."""
        found = host_digest(values) if values.is_cpu or not values.numel() else _OnDevice(values)
        if part == INPUT:
            row.input = found
        else:
            row.output = found
        row.flags |= part
        if self._keep is not None and row.stream == self._keep[0] and row.number in self._keep[1]:
            path = kept_file(self._path, row.stream, row.number, "input" if part == INPUT else "output")
            path.write_bytes(values.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())

    def _call(self, group: Group, issue: Issue, message: Message, site: str) -> CallOfProgram:
        signature = message.signature
        root = signature.root if signature.root_in_job is None else signature.root_in_job
        peer = None if message.peer is None else group.ranks[message.peer]
        words = (
            signature.kind, signature.reduce_op, dtype_name(signature.dtype),
            "" if root is None else f"root={root}",
            "" if peer is None else f"peer={peer}", f"tag={signature.tag}" if signature.tag else "",
            "" if signature.device == "cpu" else signature.device,
        )  # fmt: skip
        library = "" if issue.operation is None else issue.operation.backend
        return CallOfProgram(
            stream=group.name + BUCKETS * message.already_bucketed,
            kind=signature.kind, text=" ".join(filter(None, words)), dtype=dtype_name(signature.dtype),
            ranks=group.size, how=" ".join(filter(None, (library, signature.sums))), site=site,
        )  # fmt: skip

    def _number_of(self, call: CallOfProgram) -> int:
        with self._naming:
            return self._calls.setdefault(call, len(self._calls))

    # -- the file ---------------------------------------------------------------------------------

    def _flush(self, deadline: float, *, in_flight: bool = False) -> None:
        """Write rows. `deadline`: until when to wait for digests on devices."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is writing
        try:
            self._flushed = time.monotonic()
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            rows += list(self._in_flight.values()) if in_flight else ()
            calls = list(self._calls)[self._named :]
            if rows or calls:
                self._write(chunk(calls, [row.plain(deadline) for row in rows]))
                self._named += len(calls)
        finally:
            self._lock.release()

    def _write(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]


def _site_text(file: str, line: int, function: str) -> str:
    return f"{os.path.relpath(file) if file.startswith(os.getcwd()) else file}:{line}, in {function}"
