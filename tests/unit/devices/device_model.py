"""A device simulated in this process: streams, events and memory, watched by torch's race detector.

Kernels are torch's own operations on `DeviceTensor`, whose values lie in host memory. A stream runs its
entries in order; entries that the host enqueues run later, when the model decides (`Machine.run`), so a
result that is read too early is wrong. Also, every launch, record, wait, allocation and release goes to
`torch.cuda._sanitizer.EventHandler` (vector clocks), which needs no device: two unordered accesses to memory
are a race, whether or not this run had them in the wrong order.

To the detector each thread of the host is one more stream: the entries that a thread enqueues come after its
earlier work, and a query that returns true orders the thread after the event. Memory is compared by byte, not
by tensor. Freed memory belongs at once to the next allocation on its stream, as in torch's caching allocator:
use by another stream without `record_stream` is a race.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from unit.devices.race_detector import Detector, Range

Place = tuple[Hashable, int]
"""In a stream or another sequence: its name, the same in every run, and how much it had by then."""


@dataclass(frozen=True)
class Shared:
    """An object that several ranks may read or change; `ranks`: the ranks that ever may, None for all."""

    name: Hashable
    ranks: frozenset[int] | None = field(default=None, compare=False)


@dataclass(eq=False)
class Entry:
    """Something in a stream. `run` is done when the stream gets there; None for a wait."""

    stream: FakeStream
    run: Callable[[], None] | None = None
    other: Entry | None = None  # the entry that a wait waits for
    done: bool = False
    seen: bool = False  # its host knows that it is done
    before: Entry | None = None  # in its stream
    name: Hashable = None  # its stream and place there, the same in every run


class FakeStream:
    """An in-order queue of one device.

    `digest`: of its entries, each with the host's order at that time; `shape`: of its entries alone. Neither
    depends on the times of other ranks' actions.
    """

    def __init__(self, machine: Machine, name: str, label: Hashable = None) -> None:
        self.machine = machine
        self.name = name
        self.label = label
        self.count = 0  # of entries and records
        self.digest = self.shape = hash(label)
        self.entries: list[Entry] = []
        self.at = 0  # the first entry that is not done
        self.number = machine.detector.new(name)
        self.cuda_stream = machine.add_stream(self)

    @property
    def head(self) -> Entry | None:
        entries = self.entries
        while self.at < len(entries) and entries[self.at].done:
            self.at += 1
        return entries[self.at] if self.at < len(entries) else None

    @property
    def place(self) -> Place:
        """Return the end of the enqueued entries."""
        return self.label, self.count

    def _grows(self, what: Hashable) -> None:
        self.count += 1
        self.shape = hash((self.shape, what))
        self.digest = hash((self.digest, what, self.machine.clock()))

    def add(self, entry: Entry, what: Hashable) -> None:
        machine = self.machine
        machine.detector.order(self.number, machine.host())
        entry.before = self.entries[-1] if self.entries else None
        entry.name = self.label, len(self.entries)
        self._grows(what)
        self.entries.append(entry)
        machine.changed()

    def launch(
        self, name: str, run: Callable[[], None], reads: Iterable[Range], writes: Iterable[Range]
    ) -> Entry:
        entry = Entry(self, run)
        self.machine.detector.order(self.number, self.machine.host())
        self.machine.detector.launch(self.number, name, reads, writes)
        self.add(entry, name)
        return entry

    def wait_event(self, event: FakeEvent) -> None:
        machine = self.machine
        machine.trace.append(f"{self.name} waits")
        machine.detector.waits += 1
        if event.number:
            machine.detector.wait(event.number, self.number)
        self.add(Entry(self, other=event.entry), event.place)

    def recorded(self) -> None:
        self._grows("record")

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
        self.place: Place | None = None

    def record(self, stream: FakeStream) -> None:
        machine = self.machine
        machine.trace.append(f"{stream.name} records")
        machine.detector.records += 1
        machine.detector.order(stream.number, machine.host())
        self.number = self.number or machine.detector.new()
        machine.detector.record(self.number, stream.number)
        self.entry = stream.entries[-1] if stream.entries else None
        stream.recorded()
        self.place = stream.place

    def query(self) -> bool:
        entry, place = self.entry, self.place
        done = entry is None or place is None or self.machine.observe(entry, place)
        if done and place is not None:
            self.machine.reached(place)
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
        self._name = "call", machine.number()
        machine.note(self._name)
        machine.waiting.append(self)

    def pass_time(self) -> None:
        """Do the work of a poll when no rank polls."""
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
                return False
            self._is_made = True
            if self in machine.waiting:
                machine.waiting.remove(self)
            with machine.background():
                try:
                    self._result = self._call()
                except Exception as error:
                    self._result = error
            machine.note((*self._name, "made"))
        return True

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

    `device` is the number of its tensors' device; -1 (CPU tensors) serves tests without tensors of a device.
    """

    def __init__(self, machine: Machine, device: int = -1) -> None:
        self.machine = machine
        self.device = device
        self.streams: list[FakeStream] = []
        self.caller = self._made("caller")
        self.kept: list[torch.Tensor] = []
        self.hosts: list[int] = []  # the threads of the rank
        self._thread = threading.local()

    def _made(self, name: str) -> FakeStream:
        self.streams.append(FakeStream(self.machine, name, (self.device, len(self.streams))))
        return self.streams[-1]

    def create(self) -> FakeStream:
        return self._made("comm" if self.device < 0 else f"stream {len(self.machine.streams)}")

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
        from unit.devices.device_tensors import uploaded

        return uploaded(self, zero)


class Machine:
    """All streams, and the hosts. `lazy`: nothing runs before it is observed, see `observe`."""

    def __init__(self) -> None:
        self.detector = Detector()
        self.streams: list[FakeStream] = []
        self.trace: list[str] = []
        self.lazy = False
        self.decide: Callable[[Hashable], bool] = lambda _: True  # whether a host finds possible entries done
        self.behind: Callable[[Place], bool] = lambda _: False  # whether it has
        self.note: Callable[[Hashable], None] = lambda _: None  # a host's action or finding
        self.reached: Callable[[Place], None] = lambda _: None  # a place that the host comes after
        self.clock: Callable[[], Hashable] = lambda: None  # all places that the host comes after
        self.number: Callable[[], int] = lambda: 0  # of its notes
        self.touch: Callable[[Shared], None] = lambda _: None  # the order with other ranks' turns matters
        self.look: Callable[[Shared], None] = lambda _: None  # a look in vain
        self.here: Callable[[], int] = lambda: -1  # the rank whose turn it is
        self.lacking = Shared("anything")  # the calls that `matched` lacks
        self.sleep: Callable[[], None] = lambda: None  # of a host, until something changes
        self._hosts = threading.local()
        self._held: list[torch.Tensor] = []
        self.lock = threading.RLock()
        self.version = 0  # changes when anything does
        self.common = 0  # changes when all hosts shall look again
        self.changes = Counter[Shared]()  # of shared objects
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
        """Return the calling thread, as a stream of the detector."""
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

    def share(self, what: Shared) -> None:
        """Note a change of an object that several hosts may read."""
        self.version += 1
        self.changes[what] += 1

    def changed(self) -> None:
        self.version += 1
        if not self.lazy:
            self.run()

    def observe(self, entry: Entry, place: Place) -> bool:
        """Return whether the host finds a stream done up to a place; `entry` is the last entry there.

        The model decides this for every entry that may be done, even if another rank has found it done: so
            the answer depends on the entries of other ranks, not on the answers that they got.
        """
        if not self.lazy or entry.seen or self.behind(place):
            return entry.done or self.lazy
        if not (self.can_finish(entry) and self.decide(place)):
            return False
        self.finish(entry)
        return True

    # -- running ----------------------------------------------------------------------------------

    def matched(self, entry: Entry) -> Sequence[Entry] | None:
        """Return the entries that run together with one: for a collective, the entries of all ranks.

        None if some are missing; then `lacking` is their source.
        """
        return (entry,)

    def execute(self, entries: Sequence[Entry]) -> None:
        """Run entries that are first on all their streams."""
        for entry in entries:
            if entry.run is not None:
                entry.run()
            entry.done = True
        self.version += 1

    def ready(self, entry: Entry) -> bool:
        return not entry.done and (entry.other is None or entry.other.done)

    def steps(self) -> list[Sequence[Entry]]:
        """Return the entries that can run now."""
        found: list[Sequence[Entry]] = []
        for stream in self.streams:
            head = stream.head
            if head is not None and self.ready(head):
                together = self.matched(head)
                if together is not None and together[0] is head and all(e.stream.head is e for e in together):
                    found.append(together)
        return found

    def run(self, pick: Callable[[int], int] = lambda _: 0) -> None:
        """Run all entries that can run; `pick` chooses the next one."""
        with self.lock:
            while steps := self.steps():
                self.execute(steps[pick(len(steps))])

    def pass_time(self) -> None:
        """Run entries without the hosts."""
        self.run()
        for each in list(self.waiting):
            each.pass_time()
        self.common = self.common + 1  # all look again

    def _needed(self, entry: Entry, seen: set[int], order: list[Sequence[Entry]]) -> bool:
        """Collect an entry and its predecessors in an order; return False if one is missing."""
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
        order: list[Sequence[Entry]] = []
        if self._needed(entry, set(), order):
            return True
        self.look(self.lacking)
        return False

    def finish(self, entry: Entry) -> None:
        """Run an entry and its predecessors, nothing else."""
        order: list[Sequence[Entry]] = []
        assert self._needed(entry, set(), order)
        for together in order:
            if not together[0].done:
                self.execute(together)
        behind = [entry]
        while behind:
            each = behind.pop()
            if not each.seen:
                each.seen = True
                behind += filter(None, (each.before, each.other))

    @property
    def stuck(self) -> bool:
        """Return whether an entry waits for an entry that has not come."""
        return any(stream.head is not None for stream in self.streams)
