"""The one job on several libraries: the model's `Comms`, over mcr_plus and over torch.distributed alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from model import Comms, Handle
from torch import Tensor
from torch import distributed as dist

import mcr_plus as mcr


class Record(Protocol):
    """What mcr_plus notes of an operation, as far as it is shown here."""

    @property
    def kind(self) -> str: ...
    @property
    def tag(self) -> str | None: ...
    @property
    def backend(self) -> str: ...
    @property
    def bytes(self) -> int: ...  # this rank's, where the ranks' sizes differ
    @property
    def t_issue(self) -> float: ...
    @property
    def t_done(self) -> float: ...
    @property
    def waited(self) -> float: ...


class Log(Protocol):
    @property
    def records(self) -> Sequence[Record]: ...

    def save(self, path: str) -> None: ...


class Transport(Comms, Protocol):
    """The model's `Comms`, and what the job around it needs."""

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, on every rank."""
        ...

    def record(self) -> AbstractContextManager[Log | None]:
        """Note all operations inside, if the library can."""
        ...

    def close(self) -> None: ...


class McrTransport:
    """mcr_plus: the libraries are chosen by `config`, or are just `backends`."""

    def __init__(self, config: Path | None = None, backends: list[str] | None = None) -> None:
        mcr.init(None if config is None else str(config), backends=backends)
        self.rank = mcr.get_rank()
        self.world_size = mcr.get_world_size()

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        tag: str,
    ) -> None:
        mcr.all_to_all_single(output, input, output_split_sizes, input_split_sizes, tag=tag)

    def all_reduce(self, tensor: Tensor, tag: str) -> Handle:
        return cast(Handle, mcr.all_reduce(tensor, tag=tag, async_op=True))

    def gather(self, value: Any) -> list[Any]:
        return list(mcr.all_gather_object(value))

    def record(self) -> AbstractContextManager[Log]:
        return mcr.record()

    def close(self) -> None:
        mcr.finalize()


class TorchTransport:
    """torch.distributed with gloo, which mcr_plus is measured against."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if "MASTER_ADDR" in os.environ:  # torchrun
            dist.init_process_group("gloo")
        else:
            self._join_through_mcr()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def _join_through_mcr(self) -> None:
        """mpirun gives torch no address to meet at; mcr_plus finds the ranks, and they agree on a file."""
        with mcr.init():
            rank, size = mcr.get_rank(), mcr.get_world_size()
            if rank == 0:
                self._folder = tempfile.TemporaryDirectory(prefix="dlrm-")
            folder = mcr.broadcast_object(self._folder.name if self._folder else None, src=0)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        tag: str,  # noqa: ARG002
    ) -> None:
        dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes)

    def all_reduce(self, tensor: Tensor, tag: str) -> Handle:  # noqa: ARG002
        return cast(Handle, dist.all_reduce(tensor, async_op=True))

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def record(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        dist.destroy_process_group()
        if self._folder:
            self._folder.cleanup()


TransportName = Literal["torch", "gloo", "mpi", "mix"]
TITLES: dict[TransportName, str] = {
    "torch": "torch.distributed gloo",
    "gloo": "mcr_plus gloo",
    "mpi": "mcr_plus mpi",
    "mix": "mcr_plus mix",
}


def open_transport(name: TransportName, config: Path) -> Transport:
    """Join the other ranks; raises McrError when the library is not there."""
    if name == "torch":
        return TorchTransport()
    return McrTransport(config) if name == "mix" else McrTransport(backends=[name])
