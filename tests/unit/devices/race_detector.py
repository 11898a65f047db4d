"""torch's race detector of streams (`torch.cuda._sanitizer`, vector clocks), given byte ranges and hosts."""

from __future__ import annotations

import bisect
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, Final

from torch.cuda import _sanitizer

Range = tuple[int, int]
_FRAMES: Final = 14  # of a stack that the detector keeps for its messages


def _short_stack(frame: Any) -> Iterator[Any]:
    for number, each in enumerate(traceback.walk_stack(frame)):
        if number == _FRAMES:
            return
        yield each


_sanitizer.traceback = SimpleNamespace(  # type: ignore[attr-defined, assignment]
    StackSummary=traceback.StackSummary, walk_stack=_short_stack
)


class Detector:
    """torch's detector, given byte ranges and hosts. `races` are its findings, as text."""

    def __init__(self) -> None:
        self.handler = _sanitizer.EventHandler()
        self.races: list[str] = []
        self.launches = self.records = self.waits = 0
        self._ids = 0
        self._busy = False
        self._delayed: list[Callable[[], None]] = []
        self._names: dict[int, str] = {}
        self._starts: list[int] = []  # of atoms: disjoint ranges of memory that have been accessed alike
        self._ends: dict[int, int] = {}

    def new(self, name: str = "") -> int:
        """Return a number for a stream or an event."""
        self._ids += 1
        self._names[self._ids] = name
        return self._ids

    def record(self, event: int, stream: int) -> None:
        self.handler._handle_event_record(event, stream)

    def wait(self, event: int, stream: int) -> None:
        self.handler._handle_event_wait(event, stream)

    def order(self, after: int, before: int) -> None:
        """Order the future work of stream `after` behind the present work of `before`."""
        state = self.handler.syncs
        state._ensure_stream_exists(after)
        state._ensure_stream_exists(before)
        state._state_wait_for_other(state.current_sync_states[after], state.current_sync_states[before])

    def when_idle(self, function: Callable[[], None]) -> None:
        """Call it when no launch is being judged: garbage is collected at any time."""
        self._delayed.append(function)
        self._catch_up()

    def _catch_up(self) -> None:
        while not self._busy and self._delayed:
            self._delayed.pop()()

    def launch(self, stream: int, name: str, reads: Iterable[Range], writes: Iterable[Range]) -> None:
        """A kernel on a stream, or an access of the host or of a library."""
        self._catch_up()
        self._busy = True
        try:
            self._judge(stream, name, reads, writes)
        finally:
            self._busy = False

    def _judge(self, stream: int, name: str, reads: Iterable[Range], writes: Iterable[Range]) -> None:
        written = {atom for each in writes for atom in self._atoms(*each)}
        read = {atom for each in reads for atom in self._atoms(*each)} - written
        self.launches += 1
        aliases: dict[int, list[str]] = {atom: [] for atom in written | read}
        for error in self.handler._handle_kernel_launch(stream, read, written, set(), name, aliases):
            assert isinstance(error, _sanitizer.UnsynchronizedAccessError)
            now, before = error.current_access, error.previous_access
            places = [
                f"{each.operator} on {self._names[each.stream]}, {_place(each)}" for each in (now, before)
            ]
            self.races.append(" races with ".join(places))

    def forget(self, lo: int, hi: int) -> None:
        """Forget memory that is not used again."""
        for atom in self._atoms(lo, hi):
            self.handler._handle_memory_deallocation(atom)
            del self._ends[atom]
            del self._starts[bisect.bisect_left(self._starts, atom)]

    def _atoms(self, lo: int, hi: int) -> list[int]:
        """Return the atoms of a range; split the atoms across its ends."""
        if lo >= hi:
            return []
        self._split(lo)
        self._split(hi)
        starts, found, at = self._starts, [], lo
        index = bisect.bisect_left(starts, lo)
        while at < hi:
            if index < len(starts) and starts[index] == at:
                end = self._ends[at]
            else:  # a gap: an atom of its own
                end = min(hi, starts[index]) if index < len(starts) else hi
                starts.insert(index, at)
                self._ends[at] = end
                self.handler.tensors_accessed.create_tensor(at, None)
            found.append(at)
            at, index = end, index + 1
        return found

    def _split(self, at: int) -> None:
        index = bisect.bisect_left(self._starts, at) - 1
        if index < 0 or self._ends[self._starts[index]] <= at:
            return
        first = self._starts[index]
        known = self.handler.tensors_accessed.accesses
        known[at] = _sanitizer.TensorInfo(None, list(known[first].reads), known[first].write)
        self._ends[at], self._ends[first] = self._ends[first], at
        self._starts.insert(index + 1, at)


def _place(access: Any) -> str:
    """Return the innermost lines of the library in a stack."""
    frames = [f for f in access.stack_trace if "/mcr_plus/" in f.filename or "/tests/" in f.filename]
    own = [f for f in frames if "/mcr_plus/" in f.filename or "/test_" in f.filename] or frames
    return " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(own[-3:]))
