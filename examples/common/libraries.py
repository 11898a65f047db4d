"""The libraries that an example's job runs on: mcr_plus in three ways, and torch.distributed alone.

An example derives from `McrTransport` and `TorchTransport` what its own communication needs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

import mcr_plus as mcr
from mcr_plus.core.c10d import PrefixStore
from mcr_plus.observe.record import Log

OursT = TypeVar("OursT")
TorchsT = TypeVar("TorchsT")


class JobError(Exception):
    """A job cannot be done as it was asked for. Raised by all ranks alike."""


class Transport(Protocol):
    """What every job needs of a library, whatever its model communicates."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, on every rank."""
        ...

    def record(self, folder: Path | None = None) -> AbstractContextManager[Log | None]:
        """Note all operations inside, if the library can; in a folder, too, if one is given."""
        ...

    def close(self) -> None: ...


class McrTransport:
    """mcr_plus: the libraries are chosen by `config`, or are just `backends`."""

    def __init__(self, config: Path | None = None, backends: list[str] | None = None) -> None:
        mcr.init(None if config is None else str(config), backends=backends)
        self.rank = mcr.get_rank()
        self.world_size = mcr.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        return list(mcr.all_gather_object(value))

    def record(self, folder: Path | None = None) -> AbstractContextManager[Log]:
        return mcr.record() if folder is None else mcr.record(folder)

    def close(self) -> None:
        mcr.finalize()


class TorchTransport:
    """torch.distributed with gloo, which mcr_plus is measured against."""

    _jobs = count()  # this process has joined, one after the other

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if "MASTER_ADDR" in os.environ:  # torchrun
            self._join_at_the_agent()
        else:
            self._join_through_mcr()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def _join_at_the_agent(self) -> None:
        """Every job meets under keys of its own: those of the one before are still in the store."""
        store, rank, size = next(rendezvous("env://"))
        store = PrefixStore(f"job {next(self._jobs)}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def _join_through_mcr(self) -> None:
        """mpirun gives torch no address to meet at; mcr_plus finds the ranks, and they agree on a file."""
        with mcr.init():
            rank, size = mcr.get_rank(), mcr.get_world_size()
            if rank == 0:
                self._folder = tempfile.TemporaryDirectory(prefix="example-")
            folder = mcr.broadcast_object(self._folder.name if self._folder else None, src=0)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def record(self, folder: Path | None = None) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def close(self) -> None:
        dist.destroy_process_group()
        if self._folder:
            self._folder.cleanup()


TransportName = Literal["torch", "gloo", "mpi", "msccl", "mix"]
TITLES: dict[TransportName, str] = {
    "torch": "torch.distributed gloo",
    "gloo": "mcr_plus gloo",
    "mpi": "mcr_plus mpi",
    "msccl": "mcr_plus msccl",
    "mix": "mcr_plus pipeline",
}


def open_as(
    name: TransportName,
    config: Path | None,
    over_mcr: Callable[..., OursT],
    over_torch: Callable[[], TorchsT],
) -> OursT | TorchsT:
    """Join the other ranks through the constructor that fits; McrError when the library is not there."""
    if name == "torch":
        return over_torch()
    return over_mcr(config=config) if name == "mix" else over_mcr(backends=[name])


def device_of(name: str) -> torch.device:
    """The device to train on; `cuda` is one for each rank of a host, as far as there are so many.

    Call it before a library is opened, which takes the current device. Raises `JobError` without one.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise JobError("--device cuda: torch sees no CUDA device")
    of_launchers = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    rank = next((int(os.environ[each]) for each in of_launchers if each in os.environ), 0)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def share_the_cores(ranks: int) -> None:
    """Ranks of one machine that each start a thread per core get in each other's way."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
