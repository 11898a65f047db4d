"""Publication of a rank's metrics while the job runs, in a separate thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from mcr_plus.core.deadline import Deadline
from mcr_plus.core.environment import slurm_job
from mcr_plus.observe.metrics import Family, Metrics
from mcr_plus.observe.options import ObserveOptions
from mcr_plus.observe.sinks import Sink, open_sinks

if TYPE_CHECKING:
    from mcr_plus.engine.engine import Engine
    from mcr_plus.rendezvous.world import World

_LAST: Final = 1.0  # seconds that the end of a job waits for the last publication
_LATE: Final = 10.0  # seconds; a sink that takes longer to answer is logged
_log = logging.getLogger("mcr_plus")


class Publisher:
    """Sums operations of an engine and publishes the sums every few seconds until it is closed.

    A sink that cannot be reached is logged once. A sink that may answer late or never gets a separate thread
    and may miss publications; other sinks are unaffected. The job never waits for a sink, except up to a
    second at its end.
    """

    def __init__(self, metrics: Metrics, sinks: Sequence[Sink], every: float) -> None:
        """Prepare publication to `sinks`, once per `every` seconds."""
        self._metrics = metrics
        self._sinks = list(sinks)
        self._every = every
        self._failed: set[str] = set()  # names of sinks whose failure has been logged
        self._silent: set[str] = set()  # names of sinks that could not be reached the last time
        self._senders = {sink: _Sender(self._send, sink) for sink in self._sinks if sink.waits}
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._engine: Engine | None = None

    def start(self, engine: Engine) -> None:
        """Start counting the operations of an engine, and publishing."""
        self._engine = engine
        engine.add_hook(self._metrics)
        self._thread = threading.Thread(target=self._run, name="mcr_plus metrics", daemon=True)
        for thread in (self._thread, *self._senders.values()):  # Python starts no threads while it exits
            thread.start()

    def close(self) -> None:
        """Publish a last time and release all resources; takes a second if a sink does not answer."""
        self._ends.set()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.remove_hook(self._metrics)
        if self._thread is not None:
            deadline = Deadline(_LAST)
            self._thread.join(deadline.left())
            for sender in self._senders.values():
                sender.join(deadline.left())
        for sink in self._sinks:
            sink.close()

    def abandon(self) -> None:
        """Drop everything in a forked child, in which the threads do not run."""
        for sink in self._sinks:
            sink.abandon()

    def _run(self) -> None:
        while not self._ends.wait(self._every):
            self._publish(is_last=False)
        self._publish(is_last=True)

    def _publish(self, *, is_last: bool) -> None:
        metrics = self._metrics.take()
        for sink in self._sinks:
            sender = self._senders.get(sink)
            if sender is None:
                self._publish_to(sink, metrics)
            elif is_last:
                sender.publish(metrics)
                sender.publish(None)
            elif (since := sender.since) is None:
                sender.publish(metrics)
            elif time.monotonic() - since > _LATE:
                self._note_failure(sink, f"no answer for {_LATE:g} s")

    def _send(self, sink: Sink, metrics: Sequence[Family]) -> None:
        if not (self._ends.is_set() and sink.name in self._silent):
            self._publish_to(sink, metrics)

    def _publish_to(self, sink: Sink, metrics: Sequence[Family]) -> None:
        try:
            sink.publish(metrics)
            self._silent.discard(sink.name)
        except Exception as error:  # any library below may raise anything; the job goes on
            self._silent.add(sink.name)
            self._note_failure(sink, str(error))

    def _note_failure(self, sink: Sink, what: str) -> None:
        if sink.name not in self._failed:
            self._failed.add(sink.name)
            text = "%s: not published: %s; the job goes on, and further failures are not logged"
            _log.warning(text, sink.name, what)


class _Sender(threading.Thread):
    """Sends to one sink that may answer late, one publication after another, until it gets None."""

    def __init__(self, send: Callable[[Sink, Sequence[Family]], None], sink: Sink) -> None:
        super().__init__(name="mcr_plus metrics sender", daemon=True)
        self.since: float | None = None  # start of the current transmission
        self._send, self._sink = send, sink
        self._given: SimpleQueue[Sequence[Family] | None] = SimpleQueue()

    def publish(self, metrics: Sequence[Family] | None) -> None:
        """Send `metrics` after the current transmission."""
        if self.since is None:
            self.since = time.monotonic()
        self._given.put(metrics)

    def run(self) -> None:
        while (metrics := self._given.get()) is not None:
            self._send(self._sink, metrics)
            self.since = None


def open_publisher(options: ObserveOptions, world: World, version: str) -> Publisher:
    """Return the publisher of a rank, with all sinks open.

    `version`: the version of mcr_plus. Raises `ConfigError` if a sink cannot be opened.
    """
    local = world.hosts[: world.rank].count(world.hosts[world.rank])
    sinks = open_sinks(options.sinks, rank=world.rank, local=local)
    return Publisher(Metrics(world, version=f"mcr_plus {version}", job=slurm_job()), sinks, options.every)
