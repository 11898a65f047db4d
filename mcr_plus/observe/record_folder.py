"""Recordings of `mcr.record(path)`: optimizer steps besides records, written at the end of the block."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from mcr_plus.config.reader import dump
from mcr_plus.core.environment import package_version
from mcr_plus.observe.expectations import expectations
from mcr_plus.observe.record_file import file_of, prepare_folder, save_recording
from mcr_plus.rendezvous.heartbeats import job_id
from mcr_plus.rendezvous.identity import own_process

if TYPE_CHECKING:
    import torch

    from mcr_plus.job.runtime import Runtime
    from mcr_plus.observe.record import Log

_log = logging.getLogger("mcr_plus")


@contextmanager
def collecting(log: Log, runtime: Runtime, path: str | os.PathLike[str]) -> Iterator[None]:
    """Write the file of this rank when the block ends, also after an exception; write errors are logged.

    The recorded steps are those of the first torch optimizer that calls `step`. Raises `InvalidArgument` on
    entry if `path` is not a folder's path or cannot be written.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    folder = prepare_folder(path)
    steps: list[float] = []
    first: list[int] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not first:
            first.append(id(optimizer))
        if id(optimizer) == first[0]:
            steps.append(time.perf_counter())

    began = time.perf_counter()
    hook = register_optimizer_step_post_hook(note)
    try:
        yield
    finally:
        ended = time.perf_counter()
        hook.remove()
        world = runtime.world
        # The same job id on all ranks: the report refuses files of different jobs.
        processes = runtime.engine.peers.processes or [own_process(world.hosts[world.rank], world.rank)]
        about = {
            "job": job_id(processes),
            "rank": world.rank,
            "size": world.size,
            "host": world.hosts[world.rank],
            "hosts": list(world.hosts),
            "epoch_us": (time.time() - time.perf_counter()) * 1e6,
            "began": began,
            "ended": ended,
            # Tables are equal on all ranks, so only rank 0 evaluates them.
            "choices": expectations(log.records, runtime.config, len(set(world.hosts)))
            if not world.rank
            else [],
            "config": dump(runtime.config),
            "versions": {"mcr_plus": package_version(), "torch": version("torch")},
        }
        file = file_of(folder, world.rank)
        try:
            save_recording(file, log.records, steps, about)
        except OSError as error:
            _log.error(
                "record: cannot write %s: %s; the log itself is complete", file, error.strerror or error
            )
