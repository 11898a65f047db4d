"""Publication of a rank's metrics while the job runs, by a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from mcr_plus.core.environment import slurm_job
from mcr_plus.observe.metrics import Family, Metrics
from mcr_plus.observe.options import ObserveOptions
from mcr_plus.observe.sinks import Sink, open_sinks

if TYPE_CHECKING:
    from mcr_plus.dispatch.engine import Engine
    from mcr_plus.rendezvous.world import World

_LAST: Final = 1.0  # seconds that the end of a job waits for the last publication
_log = logging.getLogger("mcr_plus")


class Publisher:
    """Sums up operations of an engine, and publishes the sums every few seconds until it is closed.

    A place that cannot be reached is logged once. The job never waits for it, but for up to a second at its
    end if that place has been reached before.
    """

    def __init__(self, metrics: Metrics, sinks: Sequence[Sink], every: float) -> None:
        """`every`: seconds between two publications."""
        self._metrics = metrics
        self._sinks = list(sinks)
        self._every = every
        self._failed: set[str] = set()  # names of those whose failure has been logged
        self._silent: set[str] = set()  # names of those that could not be reached the last time
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._engine: Engine | None = None

    def start(self, engine: Engine) -> None:
        """Begin with the operations of an engine."""
        self._engine = engine
        engine.record_to((*engine.recorders, self._metrics.add))
        self._thread = threading.Thread(target=self._run, name="mcr_plus metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish a last time, and let go of everything."""
        self._ends.set()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.record_to(tuple(each for each in engine.recorders if each != self._metrics.add))
        if self._thread is not None:
            self._thread.join(_LAST)
        for sink in self._sinks:
            sink.close()

    def abandon(self) -> None:
        """In a forked child, in which the thread does not run."""
        for sink in self._sinks:
            sink.abandon()

    def _run(self) -> None:
        while not self._ends.wait(self._every):
            self._publish(self._sinks)
        self._publish([sink for sink in self._sinks if not (sink.waits and sink.name in self._silent)])

    def _publish(self, sinks: Sequence[Sink]) -> None:
        metrics = self._metrics.take()
        for sink in sinks:
            self._publish_to(sink, metrics)

    def _publish_to(self, sink: Sink, metrics: Sequence[Family]) -> None:
        try:
            sink.publish(metrics)
            self._silent.discard(sink.name)
        except Exception as error:  # of any library below: the job goes on
            self._silent.add(sink.name)
            if sink.name not in self._failed:
                self._failed.add(sink.name)
                text = "%s: not published: %s; the job goes on, and further failures are not logged"
                _log.warning(text, sink.name, error)


def open_publisher(options: ObserveOptions, world: World, version: str) -> Publisher | None:
    """The publisher of a rank, with everything open; None if the options name no place.

    `version`: of mcr_plus. Raises `ConfigError` if a place cannot be opened.
    """
    if options.prometheus is None and options.otlp is None:
        return None
    local = world.hosts[: world.rank].count(world.hosts[world.rank])
    sinks = open_sinks(options.prometheus, options.otlp, rank=world.rank, local=local)
    return Publisher(Metrics(world, version=f"mcr_plus {version}", job=slurm_job()), sinks, options.every)
