"""The job hook of digests. It imports kernels, and with them numba, only for jobs with digests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from mcr_plus.job.hooks import JobHook
from mcr_plus.observe.files import check_writable
from mcr_plus.observe.options import observed
from mcr_plus.rendezvous.heartbeats import job_id

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config
    from mcr_plus.job.runtime import Runtime
    from mcr_plus.reproducible.digests import DigestWriter


class DigestHook(JobHook):
    """Job hook that writes digests, if the configuration names a folder for them."""

    def __init__(self) -> None:
        self._writer: DigestWriter | None = None
        self._jobs = 0

    def check(self, config: Config) -> None:
        """Check that the folder can be written, and load the kernels; see `JobHook`."""
        if (options := observed(config).digests) is not None:
            from mcr_plus.reproducible.digests import prepare

            check_writable(options.folder, f"{config.name}: observe.digests")
            prepare()

    def begin(self, runtime: Runtime) -> None:
        """See `JobHook`."""
        self.closing()
        options, world = observed(runtime.config).digests, runtime.world
        self._jobs += world.roster is None  # otherwise the world is a later epoch of the same job
        if options is not None:
            from mcr_plus.reproducible import digest_file as files
            from mcr_plus.reproducible.digests import DigestWriter

            number = max(self._jobs - 1, 0), 0 if world.roster is None else world.roster.epoch
            about = files.About(job_id(runtime.engine.peers.processes), world.rank, world.size, time.time())
            path = files.file_of(Path(options.folder).absolute(), number, world.rank)
            self._writer = DigestWriter(path, about, options)
            runtime.add_hook(self._writer)

    def closing(self) -> None:
        """See `JobHook`."""
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        """See `JobHook`."""
        if self._writer is not None:
            self._writer.stop()
