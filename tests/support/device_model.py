"""A device that is simulated in this process: streams, events and memory, watched by torch's race detector.

Kernels are torch's own operations on `DeviceTensor`, whose values lie in host memory. A stream runs its
entries in order; what the host enqueues is done later, when the model decides (`Machine.run`), so that a
result that is read too early is wrong. Beside that, every launch, record, wait, allocation and release goes
to `torch.cuda._sanitizer.EventHandler` (vector clocks), which needs no device: two accesses to memory that
nothing orders are a race, whether or not this run had them in the wrong order.

The host is one more stream to the detector, each thread of it: what it enqueues comes after what it has done,
and a query that returns true orders it after the event. Memory is compared by byte, not by tensor. Memory
that is freed belongs to the next allocation on its stream at once, as in torch's caching allocator: a stream
that may still use it, and was not noted by `record_stream`, is a race.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
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
        """A number for a stream or an event."""
        self._ids += 1
        self._names[self._ids] = name
        return self._ids

    def record(self, event: int, stream: int) -> None:
        self.handler._handle_event_record(event, stream)

    def wait(self, event: int, stream: int) -> None:
        self.handler._handle_event_wait(event, stream)

    def order(self, after: int, before: int) -> None:
        """Order what comes on stream `after` behind all that `before` has."""
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
        """Memory that is not used again."""
        for atom in self._atoms(lo, hi):
            self.handler._handle_memory_deallocation(atom)
            del self._ends[atom]
            del self._starts[bisect.bisect_left(self._starts, atom)]

    def _atoms(self, lo: int, hi: int) -> list[int]:
        """The atoms of a range, which is split off those that lie across its ends."""
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
    """The innermost lines of the library in a stack."""
    frames = [f for f in access.stack_trace if "/mcr_plus/" in f.filename or "/tests/" in f.filename]
    own = [frame for frame in frames if "/tests/support/" not in frame.filename] or frames
    return " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(own[-3:]))


# -- streams ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Entry:
    """Something in a stream. `run` is done when the stream gets there; None for a wait."""

    stream: FakeStream
    run: Callable[[], None] | None = None
    other: Entry | None = None  # what a wait waits for
    done: bool = False
    before: Entry | None = None  # in its stream


class FakeStream:
    """An in-order queue of one device."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        self.entries: list[Entry] = []
        self.at = 0  # the first that is not done
        self.number = machine.detector.new(name)
        self.cuda_stream = machine.add_stream(self)

    @property
    def head(self) -> Entry | None:
        entries = self.entries
        while self.at < len(entries) and entries[self.at].done:
            self.at += 1
        return entries[self.at] if self.at < len(entries) else None

    def add(self, entry: Entry) -> None:
        machine = self.machine
        machine.detector.order(self.number, machine.host())
        entry.before = self.entries[-1] if self.entries else None
        self.entries.append(entry)
        machine.changed()

    def launch(
        self, name: str, run: Callable[[], None], reads: Iterable[Range], writes: Iterable[Range]
    ) -> Entry:
        entry = Entry(self, run)
        self.machine.detector.order(self.number, self.machine.host())
        self.machine.detector.launch(self.number, name, reads, writes)
        self.add(entry)
        return entry

    def wait_event(self, event: FakeEvent) -> None:
        machine = self.machine
        machine.trace.append(f"{self.name} waits")
        machine.detector.waits += 1
        if event.number:
            machine.detector.wait(event.number, self.number)
        self.add(Entry(self, other=event.entry))

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent(self.machine)
        event.record(other)
        self.wait_event(event)


class FakeEvent:
    """A position in a stream. `number` is its number for the detector, 0 if it was never recorded."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.entry: Entry | None = None
        self.number = 0

    def record(self, stream: FakeStream) -> None:
        machine = self.machine
        machine.trace.append(f"{stream.name} records")
        machine.detector.records += 1
        machine.detector.order(stream.number, machine.host())
        self.number = self.number or machine.detector.new()
        machine.detector.record(self.number, stream.number)
        self.entry = stream.entries[-1] if stream.entries else None

    def query(self) -> bool:
        done = self.machine.tell(self.entry is None or self.machine.observe(self.entry))
        if done and self.number:
            self.machine.detector.wait(self.number, self.machine.host())
        return done


class Later:
    """A call in the background: it is made when it has been asked for often enough."""

    def __init__(self, machine: Machine, call: Callable[[], Any]) -> None:
        self._machine = machine
        self._call = call
        self._polls = machine.slow
        self._result: Any = None
        self._is_made = False
        machine.waiting.append(self)

    def pass_time(self) -> None:
        """What a poll does, when nobody polls."""
        if self._polls:
            self._polls -= 1
        else:
            self._machine.waiting.remove(self)
        self._machine.version += 1

    @property
    def done(self) -> bool:
        machine = self._machine
        if not self._is_made:
            machine.version += 1
            if self._polls:
                self._polls -= 1
                return machine.tell(False)
            self._is_made = True
            if self in machine.waiting:
                machine.waiting.remove(self)
            with machine.background():
                try:
                    self._result = self._call()
                except Exception as error:
                    self._result = error
        return machine.tell(True)

    def result(self) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def follow(self, function: Callable[[], object]) -> None:
        if self._is_made:
            function()

    def abandon(self, discard: Callable[[Any], object]) -> None:
        if self._is_made and not isinstance(self._result, Exception):
            discard(self._result)


class FakeStreams:
    """`mcr_plus.core.streams.Streams` of one rank.

    Number `device` is that of its tensors; -1, of CPU tensors, for tests that need no device's tensors.
    """

    def __init__(self, machine: Machine, device: int = -1) -> None:
        self.machine = machine
        self.device = device
        self.caller = FakeStream(machine, "caller")
        self.kept: list[torch.Tensor] = []
        self.hosts: list[int] = []  # the threads of the rank
        self._thread = threading.local()

    def create(self) -> FakeStream:
        return FakeStream(self.machine, "comm" if self.device < 0 else f"stream {len(self.machine.streams)}")

    def current(self) -> FakeStream:
        stream: FakeStream = getattr(self._thread, "now", self.caller)
        return stream

    def external(self, handle: int | None) -> FakeStream:
        return self.caller if handle is None else self.machine.streams[handle - 1]

    def event(self) -> FakeEvent:
        return FakeEvent(self.machine)

    @contextlib.contextmanager
    def under(self, stream: FakeStream) -> Iterator[None]:
        before, self._thread.now = self.current(), stream
        try:
            yield
        finally:
            self._thread.now = before

    def selected(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def background(self, call: Callable[[], Any]) -> Any:
        return Later(self.machine, call)

    def keep(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        if (block := getattr(tensor, "block", None)) is not None:
            block.users.append(stream)
        else:
            self.kept.append(tensor)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        return self.machine.held(torch.full(like.shape, 77, dtype=like.dtype))

    def memory(self) -> int:
        return 1 << 30

    def scratch(self) -> torch.Tensor:
        zero = torch.zeros(1, dtype=torch.int32)
        if self.device < 0:
            return zero
        from device_tensors import uploaded

        return uploaded(self, zero)


class Machine:
    """All streams, and the hosts. `lazy`: nothing runs before it is observed, see `observe`."""

    def __init__(self) -> None:
        self.detector = Detector()
        self.streams: list[FakeStream] = []
        self.trace: list[str] = []
        self.lazy = False
        self.decide: Callable[[Entry], bool] = lambda _: True  # whether a query finds an entry done
        self.tell: Callable[[bool], bool] = lambda answer: answer  # notes what a host is told
        self.sleep: Callable[[], None] = lambda: None  # of a host, until something changes
        self._hosts = threading.local()
        self._held: list[torch.Tensor] = []
        self.lock = threading.RLock()
        self.version = 0  # changes when anything does
        self.slow = 0  # polls until calls in the background are made
        self.in_background = False
        self.waiting: list[Later] = []

    @contextlib.contextmanager
    def background(self) -> Iterator[None]:
        with self.lock:
            before, self.in_background = self.in_background, True
            try:
                yield
            finally:
                self.in_background = before

    def host(self) -> int:
        """The calling thread, as a stream of the detector."""
        number: int | None = getattr(self._hosts, "number", None)
        if number is None:
            number = self._hosts.number = self.detector.new(f"host {threading.current_thread().name}")
        return number

    def held(self, plain: torch.Tensor) -> torch.Tensor:
        """Keep memory to the end, so that no address comes twice."""
        self._held.append(plain)
        return plain

    def add_stream(self, stream: FakeStream) -> int:
        self.streams.append(stream)
        return len(self.streams)

    def changed(self) -> None:
        self.version += 1
        if not self.lazy:
            self.run()

    def observe(self, entry: Entry) -> bool:
        """Whether the host finds an entry done; if it is not, the model may decide that it is by now."""
        if not entry.done and self.lazy and self.can_finish(entry) and self.decide(entry):
            self.finish(entry)
        return entry.done

    # -- running ----------------------------------------------------------------------------------

    def matched(self, entry: Entry) -> Sequence[Entry] | None:
        """The entries that run together with one: of a collective, those of all ranks. None if some lack."""
        return (entry,)

    def execute(self, entries: Sequence[Entry]) -> None:
        """Run entries whose turn has come on all their streams."""
        for entry in entries:
            if entry.run is not None:
                entry.run()
            entry.done = True
        self.version += 1

    def ready(self, entry: Entry) -> bool:
        return not entry.done and (entry.other is None or entry.other.done)

    def steps(self) -> list[Sequence[Entry]]:
        """What can run now."""
        found: list[Sequence[Entry]] = []
        for stream in self.streams:
            head = stream.head
            if head is not None and self.ready(head):
                together = self.matched(head)
                if together is not None and together[0] is head and all(e.stream.head is e for e in together):
                    found.append(together)
        return found

    def run(self, pick: Callable[[int], int] = lambda _: 0) -> None:
        """Run what can run; `pick` chooses among what can."""
        with self.lock:
            while steps := self.steps():
                self.execute(steps[pick(len(steps))])

    def pass_time(self) -> None:
        """Go on without the hosts."""
        self.run()
        for each in list(self.waiting):
            each.pass_time()

    def _needed(self, entry: Entry, seen: set[int], order: list[Sequence[Entry]]) -> bool:
        """Collect all that must run before an entry and itself, in an order; False if that is not there."""
        if entry.done or id(entry) in seen:
            return True
        together = self.matched(entry)
        if together is None:
            return False
        seen.update(map(id, together))
        for each in together:
            for earlier in (each.before, each.other):
                if earlier is not None and not self._needed(earlier, seen, order):
                    return False
        order.append(together)
        return True

    def can_finish(self, entry: Entry) -> bool:
        return self._needed(entry, set(), [])

    def finish(self, entry: Entry) -> None:
        """Run an entry and what must run before it, nothing else."""
        order: list[Sequence[Entry]] = []
        assert self._needed(entry, set(), order)
        for together in order:
            if not together[0].done:
                self.execute(together)

    @property
    def stuck(self) -> bool:
        """Whether something waits for what has not come."""
        return any(stream.head is not None for stream in self.streams)
