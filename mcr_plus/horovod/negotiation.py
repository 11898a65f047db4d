"""Negotiate the order of operations that ranks announce by name, in any order.

A communicator needs the same operations in the same order from all ranks, but Horovod programs start named
operations as gradients become ready. Rounds solve this: each round is an all_gather of every rank's
announcements. All ranks see all announcements and so make the same decisions: an operation announced by every
rank is launched, in the order in which names become complete. Requests that do not match raise an error on
all ranks, before anything is sent, and the job continues.

Rounds need no thread: a rank contributes when it starts an operation, polls or waits. A rank without
announcements contributes only while it waits for an operation that others have not announced.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Final

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.deadline import Deadline
from mcr_plus.core.work import Work
from mcr_plus.errors import InvalidArgument, McrError
from mcr_plus.horovod.handle import Handle
from mcr_plus.horovod.request import HorovodInternalError, OperationRequest, disagreement

_ROW: Final = 1024  # bytes per rank and round; longer texts need a second all_gather
_LENGTH: Final = 4  # bytes of the text length at the start of a row
_KNOWN: Final = 4096  # maximum number of requests that ranks abbreviate by a number
_CYCLE_S: Final = 1e-3  # pause between rounds, so that small operations share a round
_AT_ONCE: Final = 4 << 20  # bytes of queued operations above which a round starts early
_NAP_S: Final = 50e-6
_TAG: Final = "horovod.negotiation"


@dataclass(frozen=True)
class Agreed:
    """Operation announced by all ranks; `handle` is None on a rank that has joined.

    `requests`: by rank of the job, without ranks that have joined. `problem`: the error text if the requests
    do not match, else empty.
    """

    name: str
    handle: Handle | None
    requests: Mapping[int, OperationRequest]
    problem: str


@dataclass
class _Row:
    """One rank's contribution to a round."""

    joined: bool
    leaving: bool
    waiting: str
    requests: list[OperationRequest] = field(default_factory=list)


class Negotiator:
    """Negotiation of one process set, in rounds."""

    def __init__(
        self,
        negotiations: Negotiations,
        comm: Communicator,
        launch: Callable[[Negotiator, Sequence[Agreed]], None],
    ) -> None:
        self.negotiations = negotiations
        self.comm = comm
        self.joined = False  # this rank has called `join`
        self.last_joined = -1
        self.left = False  # all ranks are leaving
        self.closed_by: int | None = None
        self.error: BaseException | None = None
        self._launch = launch
        self._queue: list[Handle] = []
        self._open: dict[str, Handle] = {}  # this rank's operations that have not been launched
        self._announced: dict[str, dict[int, OperationRequest]] = {}
        self._known: dict[str, int] = {}
        self._known_requests: list[OperationRequest] = []
        self._joined_since: dict[int, int] = {}
        self._counts: dict[str, int] = {}
        self._era = 0
        self._number = 0  # rounds so far
        self._round: Work | None = None
        self._text = b""
        self._buffers = _buffers(_ROW, comm.size)
        self._rows = self._buffers[1]
        self._posted_at = 0.0
        self._flush = comm.flush if comm.stage_options("fuse") is not None else _nothing
        for opened in comm.opened.all:
            opened.state.own_handles = True

    # -- starting operations --------------------------------------------------------------------------

    def auto_name(self, kind: str) -> str:
        """Return a name for an unnamed operation: its number among unnamed operations of its kind."""
        number = self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}.noname.{self._era}.{number}"

    def check_name(self, name: str) -> None:
        """Raise an error unless an operation of that name may be started."""
        if self.error is not None:
            raise HorovodInternalError(str(self.error)) from self.error
        if self.closed_by is not None:
            raise HorovodInternalError(f"Horovod has been shut down by rank {self.closed_by}")
        if name in self._open:
            raise InvalidArgument(
                f"name: an operation named '{name}' is pending already; names of pending "
                "operations must differ"
            )

    def enqueue(self, handle: Handle) -> Handle:
        """Queue an operation for announcement.

        The operation is never launched here, so a second operation of its name raises an error regardless of
        the progress of other ranks.
        """
        with self.negotiations.lock:
            self.negotiations.progress()
            self._open[handle.request.name] = handle
            self._queue.append(handle)
            if self._round is None and self._due() and self.error is None:
                self._attempt(self._post, "")
        return handle

    def _attempt(self, function: Callable[..., bool], *arguments: Any) -> bool:
        """Call `function` and return its result; an `McrError` ends the negotiation and returns True."""
        try:
            return function(*arguments)
        except McrError as error:
            self.break_off(error)
            return True

    # -- rounds ---------------------------------------------------------------------------------------

    @property
    def concerned(self) -> bool:
        """True if this rank depends on further rounds, so that it contributes to them while it waits."""
        return bool(self._open) or self._round is not None or self.joined or self.negotiations.leaving

    @property
    def round(self) -> Work | None:
        """The round to which this rank has contributed, if its result has not been read."""
        return self._round

    def _due(self) -> bool:
        if not self._queue:
            return False
        late = time.monotonic() - self._posted_at >= _CYCLE_S
        return late or sum(handle.nbytes for handle in self._queue) >= _AT_ONCE

    def step(self, *, insist: bool, waiting: str = "") -> bool:
        """Read a complete round, and contribute to the next if it is due; return True if a round was read.

        `insist`: contribute even without an announcement. `waiting`: the operation that blocks this rank.
        """
        if self.error is not None:
            return False
        read = self._attempt(self._read)
        if (read and waiting) or self.error is not None:
            return read  # the operation may have been launched
        if self._round is None and not self.left and (insist or self._due()):
            read |= self._attempt(self._post, waiting)
        return read

    def break_off(self, error: BaseException) -> None:
        """End the negotiation after an error, and fail all pending operations."""
        self.error = error
        self._round = None
        self._fail_open(f"{error}", error)

    def _fail_open(self, text: str, cause: BaseException | None = None) -> None:
        for handle in self._open.values():
            failure = HorovodInternalError(f"{handle.request.kind} '{handle.request.name}': {text}")
            failure.__cause__ = cause
            handle.fail(failure)
        self._open.clear()
        self._queue.clear()

    def _post(self, waiting: str) -> bool:
        header: list[Any] = [int(self.joined), int(self.negotiations.leaving), waiting]
        numbers, lines = [], []
        for handle in self._queue:
            number = self._known.get(handle.request.text) if handle.request.recurring else None
            if number is None:
                lines.append(handle.request.text)
            else:
                numbers.append(number)
        self._queue.clear()
        self._text = "\n".join([json.dumps([*header, numbers]), *lines]).encode()
        self._posted_at = time.monotonic()
        self._gather(_ROW)
        return False

    def _gather(self, width: int) -> None:
        row, self._rows = self._buffers if width == _ROW else _buffers(width, self.comm.size)
        values = row.numpy()
        values[:_LENGTH] = list(len(self._text).to_bytes(_LENGTH, "little"))
        if len(self._text) <= width - _LENGTH:
            values[_LENGTH : _LENGTH + len(self._text)] = memoryview(self._text)
        self._round = self.comm.all_gather_into_tensor(
            self._rows, row, async_op=True, compress=False, tag=_TAG
        )
        self._flush()

    def _read(self) -> bool:
        """Evaluate the round if it is complete; return True if it was."""
        work = self._round
        if work is None or not work.is_completed():
            return False
        work.wait()  # raises the operation's error
        self._round = None
        content = bytes(self._rows.numpy().data)
        width = len(content) // self.comm.size
        rows = [content[index * width : (index + 1) * width] for index in range(self.comm.size)]
        lengths = [int.from_bytes(row[:_LENGTH], "little") for row in rows]
        longest = _LENGTH + max(lengths)
        if longest > width:
            self._gather(1 << (longest - 1).bit_length())
            return self._read()
        self._conclude([row[_LENGTH : _LENGTH + length] for row, length in zip(rows, lengths, strict=True)])
        return True

    def _parsed(self, text: bytes) -> _Row:
        header, *lines = text.decode().split("\n")
        joined, leaving, waiting, numbers = json.loads(header)
        row = _Row(bool(joined), bool(leaving), waiting, [self._known_requests[number] for number in numbers])
        for line in lines:
            request = OperationRequest.read(line)
            if request.recurring and line not in self._known and len(self._known) < _KNOWN:
                self._known[line] = len(self._known)
                self._known_requests.append(request)
            row.requests.append(request)
        return row

    def _conclude(self, texts: Sequence[bytes]) -> None:
        """Evaluate a round; all ranks reach the same result."""
        self._number += 1
        rows = dict(zip(self.comm.ranks, map(self._parsed, texts), strict=True))
        for rank, row in rows.items():
            for request in row.requests:
                self._announced.setdefault(request.name, {})[rank] = request
            if row.joined:
                self._joined_since.setdefault(rank, self._number)
        agreed = self._complete({rank for rank, row in rows.items() if row.joined})
        if agreed:
            self._launch(self, agreed)
            self._flush()
        leaving = [rank for rank, row in rows.items() if row.leaving]
        if all(row.joined for row in rows.values()):
            self._all_joined()
        elif leaving:
            self._closing(leaving)
        elif not agreed and all(row.waiting for row in rows.values()):
            self._stalled({rank: row.waiting for rank, row in rows.items()})

    def _complete(self, joined: set[int]) -> list[Agreed]:
        """Return the operations that all ranks have announced, in the order of their first announcement."""
        everyone = set(self.comm.ranks)
        agreed = []
        for name in [name for name, by in self._announced.items() if by.keys() | joined >= everyone]:
            by = self._announced.pop(name)
            requests = {rank: by[rank] for rank in self.comm.ranks if rank in by}
            problem = disagreement(requests)
            kinds = {request.kind for request in requests.values()}
            if len(requests) < len(everyone) and not problem and kinds - {"allreduce", "sparse", "barrier"}:
                gone = sorted(everyone - requests.keys())
                problem = f"{min(kinds)} '{name}': ranks {gone} have joined, which allows only allreduce"
            agreed.append(Agreed(name, self._open.pop(name, None), requests, problem))
        return agreed

    def _all_joined(self) -> None:
        self.joined = False
        self.last_joined = max(self._joined_since, key=lambda rank: (self._joined_since[rank], rank))
        self._joined_since.clear()
        self._counts.clear()  # reset, because ranks that joined early have counted fewer operations
        self._era += 1

    def _closing(self, leaving: list[int]) -> None:
        if len(leaving) == self.comm.size:
            self.left = True
        elif self.closed_by is None:
            self.closed_by = leaving[0]
        self._announced.clear()
        self._fail_open(f"Horovod has been shut down by rank {leaving[0]}")

    def missing(self, name: str) -> str:
        """Return a text that names the ranks that have not announced an operation."""
        announced = {*self._announced.get(name, ()), *self._joined_since, self.comm.ranks[self.comm.rank]}
        ranks = [rank for rank in self.comm.ranks if rank not in announced]
        return f"ranks {ranks}" if ranks else "all ranks"

    def _stalled(self, waiting: Mapping[int, str]) -> None:
        """Fail all pending operations: every rank waits for an operation that another has not started."""
        started = "; ".join(
            f"'{name}' has been started by ranks {list(by)} only" for name, by in self._announced.items()
        )
        waits = ", ".join(f"rank {rank} for '{name}'" for rank, name in waiting.items())
        self._announced.clear()
        self._fail_open(
            f"all ranks wait for operations that others have not started: {started} ({waits} waits)"
        )


class Negotiations:
    """Negotiations of this process, one per process set that contains it."""

    def __init__(self, timeout: float) -> None:
        self.lock = RLock()
        self.leaving = False
        self.negotiators: list[Negotiator] = []
        self._timeout = timeout

    def progress(self, insistent: Negotiator | None = None, waiting: str = "") -> bool:
        """Advance every negotiation without waiting; return True if a round was read.

        `insistent`: the negotiator of the operation that this rank waits for, see `Negotiator.step`.
        """
        read = False
        for negotiator in list(self.negotiators):
            is_awaited = negotiator is insistent
            insist = is_awaited or (bool(waiting) and negotiator.concerned)
            read |= negotiator.step(insist=insist, waiting=waiting if is_awaited else "")
        return read

    def wait(self, negotiator: Negotiator, until: Callable[[], bool], waiting: str) -> None:
        """Contribute to rounds until `until()` is true. Raises `HorovodInternalError` after the deadline."""
        deadline = Deadline(self._timeout)
        idle = 0
        with self.lock:
            while not until():
                if negotiator.error is not None:
                    raise HorovodInternalError(str(negotiator.error)) from negotiator.error
                read = self.progress(negotiator, waiting)
                if until():
                    return
                if deadline.passed():
                    missing = negotiator.missing(waiting)
                    raise HorovodInternalError(
                        f"'{waiting}': not started by {missing} within {self._timeout:g} s"
                    )
                open_rounds = [other for other in self.negotiators if other.round is not None]
                if len(open_rounds) == 1 and negotiator in open_rounds:
                    self._await(negotiator)
                elif not read:
                    idle += 1
                    time.sleep(0 if idle < 100 else _NAP_S)

    @staticmethod
    def _await(negotiator: Negotiator) -> None:
        work = negotiator.round
        try:
            if work is not None:
                work.wait()
        except McrError as error:
            negotiator.break_off(error)

    def synchronize(self, handle: Handle) -> Any:
        """Wait for an operation; return its result or raise its error."""
        if not handle.launched:
            self.wait(handle.negotiator, lambda: handle.launched, handle.request.name)
        handle.complete()
        return handle.value()

    def poll(self, handle: Handle) -> bool:
        """Drive progress; return True if the operation was already complete."""
        if handle.launched:
            done = handle.is_done
            handle.update()
            return done
        with self.lock:
            self.progress(handle.negotiator)
        return False


def _buffers(width: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row, and a buffer for the rows of all ranks."""
    return torch.zeros(width, dtype=torch.uint8, device="cpu"), torch.zeros(
        ranks * width, dtype=torch.uint8, device="cpu"
    )


def _nothing() -> None:
    """Do nothing, as `flush` of a pipeline without fusion."""
