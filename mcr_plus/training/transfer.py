"""Sends tensors, and nested state such as an optimizer's, from one rank to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import torch

from mcr_plus.communicator.communicator import Communicator

_PIECE: Final = 64 << 20  # bytes of one broadcast, which copies its tensors into a flat tensor


class _Place(NamedTuple):
    """Where a tensor is in a state; the tensors themselves are sent by themselves."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_tensors(tensors: Sequence[torch.Tensor], comm: Communicator, src: int | None = None) -> None:
    """Broadcast tensors, uncompressed, from rank `src` of the job (None: the group's first rank)."""
    if comm.size == 1:
        return
    alike: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for tensor in tensors:
        pieces = alike.setdefault((tensor.dtype, tensor.device), [[]])
        if sum(piece.nbytes for piece in pieces[-1]) >= _PIECE:
            pieces.append([])
        pieces[-1].append(tensor.detach())
    root = comm.ranks[0] if src is None else src
    for batch in chain.from_iterable(alike.values()):
        flat = torch.cat([tensor.reshape(-1) for tensor in batch])
        comm.broadcast(flat, root, compress=False)  # codecs are for gradients, not for parameters
        offset = 0
        for tensor in batch:
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()


def broadcast_state(state: Any, comm: Communicator, src: int) -> Any:
    """Return the state of rank `src` of the group: nested dicts, lists and tuples, with tensors in them.

    Collective. Tensors are sent as they are, uncompressed, through the pipeline; the rest is pickled and
    signed. On other ranks `state` is ignored, and tensors are new, on the same type of device.
    """
    tensors: list[torch.Tensor] = []
    root = comm.ranks[src]
    plain = comm.broadcast_object(outline(state, tensors) if comm.rank == src else None, root)
    received = state if comm.rank == src else rebuilt(plain, tensors)
    broadcast_tensors(tensors, comm, root)
    return received


def outline(state: Any, tensors: list[torch.Tensor]) -> Any:
    """The state with places instead of tensors, which are appended to `tensors`."""
    if isinstance(state, torch.Tensor):
        tensors.append(state)
        return _Place(tuple(state.shape), state.dtype, state.device.type)
    if isinstance(state, Mapping):
        return {key: outline(value, tensors) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(outline(value, tensors) for value in state)
    return state


def rebuilt(plain: Any, tensors: list[torch.Tensor]) -> Any:
    """The opposite of `outline`, with new tensors."""
    if isinstance(plain, _Place):
        tensors.append(torch.empty(plain.shape, dtype=plain.dtype, device=plain.device))
        return tensors[-1]
    if isinstance(plain, dict):
        return {key: rebuilt(value, tensors) for key, value in plain.items()}
    if type(plain) in (list, tuple):
        return type(plain)(rebuilt(value, tensors) for value in plain)
    return plain
