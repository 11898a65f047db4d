"""Digests of the input and output of every operation of the program, written to a file of each rank.

The hook takes part where a call is bound to its chain of stages, so it sees what the program passes and gets:
neither the pieces nor the encoded values that stages make of it, and compiled calls and persistent operations
too, which take the way of Python meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from mcr_plus.kernels import checksum, digest
from mcr_plus.observe.options import operations_in
from mcr_plus.reproducible import digest_file as files

if TYPE_CHECKING:
    from types import FrameType

    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Message
    from mcr_plus.core.work import Work
    from mcr_plus.engine.work import IssuedWork
    from mcr_plus.observe.options import DigestOptions

_log = logging.getLogger("mcr_plus")
_EVERY: Final = 1.0  # seconds between two writes
_MOST: Final = 4096  # rows between two writes
_OBJECTS: Final = ("all_gather_object", "broadcast_object")  # their bytes are signed anew in each job
_OWN_TAGS: Final = ("elastic", "horovod.negotiation", "local.check", "local.warmup", "plan")
"""Tags of operations of mcr_plus itself, which exchange times and answers; never compressed."""


@dataclass(eq=False, slots=True)
class _DigestRow:
    """An operation of the program. `receives`: whether this rank gets a result."""

    call: int
    stream: str
    index: int
    number: int
    elements: int
    receives: bool
    flags: int = 0
    input: int = 0
    output: int = 0

    def plain(self) -> tuple[int, ...]:
        return self.call, self.flags, self.index, self.number, self.elements, self.input, self.output


def prepare() -> None:
    """Compile the kernels, or load them from disk."""
    digest_of(torch.zeros(1, device="cpu"))


def digest_of(values: torch.Tensor) -> int:
    """Return the digest of contiguous values in host memory: a fold of the checksums of their blocks."""
    return digest.folded(checksum.of_blocks(values).numpy().view(np.uint64), values.numel(), values.itemsize)


class DigestWriter(OperationHook):
    """Takes digests of the operations of one world, and writes them to this rank's file."""

    def __init__(self, path: Path, about: files.About, options: DigestOptions) -> None:
        self._path = path
        self._kept, self._numbers_kept = operations_in(options.keep or "#0") or ("", range(0))
        self._calls: dict[files.CallOfProgram, int] = {}
        self._written = 0  # calls that the file has
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(1))
        self._indices = count()
        self._rows: deque[_DigestRow] = deque()
        self._in_flight: dict[int, _DigestRow] = {}
        self._naming, self._writing = threading.Lock(), threading.Lock()
        self._flushed = time.monotonic()
        self._is_on, self._has_warned = True, False
        self._file: Any = None
        self._guarded(self._open, files.about_line(about))

    def _open(self, line: bytes) -> None:
        for earlier in self._path.parent.glob(f"{self._path.stem}.*"):  # its kept elements, too
            earlier.unlink()
        self._file = self._path.open("wb")
        self._file.write(line)
        self._file.flush()  # of a job that is killed at once, this is known

    # -- the engine's reports ---------------------------------------------------------------------

    def bound(self, group: Group, issue: Issue) -> Issue:
        """Take digests around the operations of a bound call; see `OperationHook`."""
        known: dict[tuple[int, int, int | None], tuple[Any, str, int]] = {}
        begun = partial(self._guarded, self._begun, group, issue, known)

        def start(message: Message) -> Work:
            row, outputs = begun(message, sys._getframe(1)), message.outputs
            work = issue.start(message)
            return work if row is None else work.then(partial(self._guarded, self._ended, row, outputs))

        def run(message: Message) -> None:
            row, outputs = begun(message, sys._getframe(1)), message.outputs
            issue.run(message.with_tensors(message.inputs, outputs))  # a handle drops its tensors
            if row is not None:
                self._guarded(self._ended, row, outputs)

        return Issue(start, run)

    def waits_long(self, work: IssuedWork) -> None:  # noqa: ARG002
        """Write all rows, since the job may be killed; see `OperationHook`."""
        self._guarded(self._flush, in_flight=True)

    def fails(self, work: IssuedWork, error: BaseException) -> None:  # noqa: ARG002
        """Write all rows; see `OperationHook`."""
        self._guarded(self._flush, in_flight=True)

    def close(self) -> None:
        """Write the end of the file."""
        self._guarded(self._flush, in_flight=True, end=files.END)
        self.stop()

    def stop(self) -> None:
        """Take no more digests, and close the file."""
        self._is_on = False
        self._rows.clear()
        self._in_flight.clear()
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()

    def _guarded(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function of this object; an error ends the digests, but not the program."""
        try:
            return function(*arguments, **options) if self._is_on else None
        except Exception as error:
            what = "the file has no more digests, and the job goes on"
            _log.warning("observe.digests: %s: %s: %s; %s", self._path, type(error).__name__, error, what)
            self.stop()

    # -- operations -------------------------------------------------------------------------------

    def _begun(
        self,
        group: Group,
        issue: Issue,
        known: dict[tuple[int, int, int | None], tuple[Any, str, int]],
        message: Message,
        frame: FrameType | None,
    ) -> _DigestRow | None:
        signature = message.signature
        if signature.compress is False and signature.tag in _OWN_TAGS:
            return None
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("mcr_plus."):
            if frame.f_code.co_name in _OBJECTS:
                return None
            frame = frame.f_back
        position = position_of(frame)
        key = (*((0, 0) if position is None else (id(position[0]), position[1])), message.peer)
        if (found := known.get(key)) is None:
            site = "" if position is None else "{}:{}, in {}".format(*site_at(position))
            call = _described(group, issue, message, site)
            with self._naming:
                number = self._calls.setdefault(call, len(self._calls))
            found = known[key] = position, call.stream, number  # the position keeps its code alive
        _, stream, number = found
        sends, receives = collective(signature.kind).buffers(root=signature.root in (None, group.rank))
        elements = max((each.numel() for each in (*message.inputs, *message.outputs)), default=0)
        row = _DigestRow(
            number, stream, next(self._indices), next(self._numbers[stream]), elements, receives != "none"
        )
        self._in_flight[row.index] = row
        if sends != "none" and message.inputs:
            take = partial(self._guarded, self._take, row, "input", files.INPUT, message.inputs[0])
            if message.after is None and message.prepare is None:
                take()
            else:  # what it reads is there only when it starts
                message.prepare = partial(_in_turn, message.prepare, take)
        return row

    def _ended(self, row: _DigestRow, outputs: tuple[torch.Tensor, ...]) -> None:
        if row.receives and outputs:
            self._take(row, "output", files.OUTPUT, outputs[0])
        row.flags |= files.DONE
        self._in_flight.pop(row.index, None)
        self._rows.append(row)
        if len(self._rows) >= _MOST or time.monotonic() > self._flushed + _EVERY:
            self._flush()

    def _take(self, row: _DigestRow, part: str, flag: int, values: torch.Tensor) -> None:
        """Take the digest of one part of an operation."""
        if not values.is_cpu:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("observe.digests: tensors on %s have no digests", values.device.type)
            return
        setattr(row, part, digest_of(values))
        row.flags |= flag
        if row.stream == self._kept and row.number in self._numbers_kept:
            content = values.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
            files.kept_file(self._path, row.stream, row.number, part).write_bytes(content)

    # -- the file ---------------------------------------------------------------------------------

    def _flush(self, *, in_flight: bool = False, end: bytes = b"") -> None:
        """Write rows, of operations in flight too, and the end."""
        if not self._writing.acquire(timeout=_EVERY if in_flight else 0):
            return  # another thread is writing
        try:
            self._flushed = time.monotonic()
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            rows += list(self._in_flight.values()) if in_flight else ()
            calls = list(self._calls)[self._written :]
            if rows:
                self._written += len(calls)
                end = files.chunk(calls, [row.plain() for row in rows]) + end
            self._file.write(end)
            self._file.flush()
        finally:
            self._writing.release()


def _in_turn(first: Callable[[], None] | None, second: Callable[[], None]) -> None:
    if first is not None:
        first()
    second()


def _described(group: Group, issue: Issue, message: Message, site: str) -> files.CallOfProgram:
    signature, peer = message.signature, message.peer
    root = signature.root if signature.root_in_job is None else signature.root_in_job
    named = {"root": root, "peer": None if peer is None else group.ranks[peer], "tag": signature.tag}
    dtype = dtype_name(signature.dtype)
    words = [signature.kind, signature.reduce_op or "", "" if signature.dtype is None else dtype]
    words += [f"{name}={value}" for name, value in named.items() if value is not None]
    words += [signature.device] if signature.device != "cpu" else []
    library = "" if issue.operation is None else issue.operation.backend
    return files.CallOfProgram(
        group.name + files.BUCKETS * message.already_bucketed, signature.kind, " ".join(filter(None, words)),
        dtype, group.size, " ".join(filter(None, (library, signature.sums))), site,
    )  # fmt: skip
