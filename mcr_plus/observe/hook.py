"""The job hook of observation: dumps, the status page, metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mcr_plus.core.environment import package_version
from mcr_plus.job.hooks import JobHook
from mcr_plus.job.process import job
from mcr_plus.observe.files import check_folder
from mcr_plus.observe.options import observed
from mcr_plus.observe.recorder import Recorder
from mcr_plus.observe.status import StatusThread
from mcr_plus.rendezvous.heartbeats import job_id

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config
    from mcr_plus.job.runtime import Runtime
    from mcr_plus.observe.publisher import Publisher
    from mcr_plus.rendezvous.world import World


class ObserveHook(JobHook):
    """Job hook that opens and closes dumps, the status page and metrics.

    Attributes:
        recorder: writer of dumps of the present job, or of the last job.
    """

    recorder: Recorder

    def __init__(self) -> None:
        self._publisher: Publisher | None = None
        self._status: StatusThread | None = None

    def check(self, config: Config) -> None:
        """Check that dumps can be written to their folder; see `JobHook`."""
        check_folder(config)

    def prepare(self, config: Config, world: World) -> None:
        """Open the files and ports of metrics; see `JobHook`."""
        self.closing()  # the ports of an earlier job may be the same
        if (options := observed(config)).sinks:
            from mcr_plus.observe.publisher import open_publisher

            self._publisher = open_publisher(options, world, package_version())

    def begin(self, runtime: Runtime) -> None:
        """See `JobHook`."""
        self.recorder = Recorder(runtime.engine, runtime.world, runtime.config)
        self._status = _published(runtime, self.recorder)
        if self._publisher is not None:
            self._publisher.start(runtime.engine)

    def closing(self) -> None:
        """Publish metrics a last time; see `JobHook`."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def closed(self) -> None:
        """See `JobHook`."""
        status, self._status = self._status, None
        if status is not None:
            status.close()
            self.recorder.stop()

    def abandon(self) -> None:
        """See `JobHook`."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.abandon()
        status, self._status = self._status, None
        if status is not None:
            status.abandon()
            self.recorder.abandon()


def current_recorder() -> Recorder:
    """Return the recorder that writes dumps of the present job."""
    return next(hook.recorder for hook in job.hooks if isinstance(hook, ObserveHook))


def _published(runtime: Runtime, recorder: Recorder) -> StatusThread:
    """Start the status thread of this process for `mcr-plus top`; a job of one rank has no page."""
    engine, world, peers = runtime.engine, runtime.world, runtime.engine.peers
    if not peers.processes:
        return StatusThread(engine, None)
    own = peers.processes[world.rank]
    others = [rank for rank, process in enumerate(peers.processes) if process.place != own.place]
    processes = [[process.pid, process.started] for process in peers.processes]
    about = {
        "job": job_id(peers.processes),
        "rank": world.rank,
        "hosts": world.hosts,
        "processes": processes,
        "elsewhere": others,
        "began": time.time(),
    }
    return StatusThread(
        engine,
        about,
        package_version(),
        lambda: {rank: peers.status(rank) for rank in others},
        lambda: recorder.dumped,
    )
