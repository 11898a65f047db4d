"""The model's `Comms` over mcr_plus and over torch.distributed alone."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

import libraries
from libraries import TransportName
from model import Comms, Handle
from torch import Tensor
from torch import distributed as dist

import mcr_plus as mcr


class Transport(Comms, libraries.Transport, Protocol):
    """The model's `Comms`, and what the job around it needs."""


class McrTransport(libraries.McrTransport):
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


class TorchTransport(libraries.TorchTransport):
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


def open_transport(name: TransportName, config: Path | None) -> Transport:
    """Join the other ranks; raises McrError when the library is not there."""
    return libraries.open_as(name, config, McrTransport, TorchTransport)
