"""Broadcast of tensors, and of nested state such as an optimizer's, from one rank to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Literal, NamedTuple

import torch

from mcr_plus.communicator.calls import Compress
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.compression.options import codec_of
from mcr_plus.compression.policy import refusal, resolve_options
from mcr_plus.config.options import plain_options
from mcr_plus.core.kinds import DTYPES
from mcr_plus.core.message import Signature
from mcr_plus.hierarchy.policy import between_nodes

STATE: Final = "state"
"""Tag of the operations that send state to new ranks."""
Has = Literal["all", "parts", "nothing"]
"""Share of a state that a rank holds."""
_PIECE: Final = 64 << 20  # bytes per broadcast: its tensors are copied into a flat tensor
_BLOCK: Final = 1 << 20  # bytes per compared digest


class _TensorPlace(NamedTuple):
    """Placeholder of a tensor in an outlined state; tensors are sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], comm: Communicator, src: int | None = None, *, tag: str | None = None
) -> None:
    """Broadcast tensors from rank `src` of the job (None: the group's first rank), in large pieces.

    All ranks hold the same bits afterwards. With a `tag`, which rules match, the pipeline's codec is used if
    it is lossless. Otherwise tensors are sent as they are, because lossy codecs are for gradients, not for
    parameters. Tensors may have any dense dtype.
    """
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
        # Weights may have dtypes that operations do not support, such as torch's bits8.
        sent = flat if flat.dtype in DTYPES else flat.view(torch.uint8)
        comm.broadcast(sent, root, compress=False if tag is None else _lossless(sent, comm, tag), tag=tag)
        offset = 0
        for tensor in batch:
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()


def _lossless(flat: torch.Tensor, comm: Communicator, tag: str) -> Compress:
    """Return the pipeline's codec for a broadcast if it is lossless, False otherwise; equal on all ranks."""
    signature = Signature(
        "broadcast",
        flat.dtype,
        tuple(flat.shape),
        flat.nbytes,
        comm.name,
        comm.size,
        flat.device.type,
        tag=tag,
    )
    options = between_nodes(comm.config, signature) or resolve_options(comm.config, signature)
    codec = None if options is None else codec_of(options)
    if codec is None or options is None or not codec.traits.lossless or flat.device.type != "cpu":
        return False  # `exp_window`, the only lossless codec, has no GPU kernel
    if flat.numel() < codec.traits.min_numel or refusal(codec, options, signature) is not None:
        return False
    return plain_options(options)


def broadcast_state(
    state: Any,
    comm: Communicator,
    src: int,
    beside: Sequence[torch.Tensor] = (),
    has: Sequence[Has] | None = None,
) -> Any:
    """Return the state of rank `src` of the group: nested dicts, lists and tuples that hold tensors.

    Collective. Tensors are sent losslessly through the pipeline, with the tag `state`; the rest is pickled
    and signed. Other ranks get new tensors on the same type of device. `beside`: tensors of every rank that
    are also broadcast, in place. `has`: the share of the state that each rank holds; None to send everything.
    If some ranks pass parts, only missing pieces are sent: see `broadcast_differences`.
    """
    tensors: list[torch.Tensor] = []
    root = comm.ranks[src]
    plain = comm.broadcast_object(outline(state, tensors) if comm.rank == src else None, root)
    received = state if comm.rank == src else rebuilt(plain, tensors)
    if has is None or "parts" not in has:
        broadcast_tensors([*beside, *tensors], comm, root, tag=STATE)
        return received
    if has[comm.rank] == "parts":
        own: list[torch.Tensor] = []
        outline(state, own)
        for new, old in zip(tensors, own, strict=False):
            if new.shape == old.shape and new.dtype == old.dtype:
                new.copy_(old)
    broadcast_differences([*beside, *tensors], comm, root, has)
    return received


def broadcast_differences(
    tensors: Sequence[torch.Tensor], comm: Communicator, src: int, has: Sequence[Has]
) -> int:
    """Broadcast the pieces of tensors that differ from rank `src` of the job; return the bytes sent.

    Collective. Ranks with `parts` compare digests of 1 MiB pieces with the digests of `src`. Ranks with `all`
    are not checked, and ranks with `nothing` get everything. `has`: the share of each rank.
    """
    # Imported here: mcr.shrink must load this module fast, and digests import the kernel compiler.
    from mcr_plus.kernels.digest import digest, to_signed

    def digest_of(piece: torch.Tensor) -> int:
        return to_signed(digest(piece.cpu().reshape(-1).view(torch.uint8)))

    pieces = [piece for tensor in tensors for piece in _pieces(tensor)]
    root, mine = comm.ranks.index(src), has[comm.rank]
    compares = comm.rank == root or mine == "parts"
    digests = torch.tensor([digest_of(piece) if compares else 0 for piece in pieces], device="cpu")
    theirs = digests.clone()
    comm.broadcast(theirs, src, compress=False, tag=STATE)
    lacks = torch.zeros(len(pieces), dtype=torch.uint8, device="cpu")
    if comm.rank != root and mine != "all":
        lacks = (digests != theirs).to(torch.uint8) if compares else torch.ones_like(lacks)
    comm.all_reduce(lacks, "MAX", compress=False, tag=STATE)
    wanted = [piece for piece, lack in zip(pieces, lacks.tolist(), strict=True) if lack]
    broadcast_tensors(wanted, comm, src, tag=STATE)
    return sum(piece.nbytes for piece in wanted)


def _pieces(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return views of a tensor's pieces, one per digest; a non-contiguous tensor is one piece."""
    whole = tensor.detach()
    if not whole.is_contiguous():
        return (whole,)
    return whole.view(-1).split(max(1, _BLOCK // whole.element_size())) if whole.numel() else ()


def outline(
    state: Any, tensors: list[torch.Tensor], taken: Callable[[torch.Tensor], torch.Tensor] = lambda each: each
) -> Any:
    """Return the state with placeholders instead of tensors; append `taken(tensor)` to `tensors`."""
    if isinstance(state, torch.Tensor):
        tensors.append(taken(state))
        return _TensorPlace(tuple(state.shape), state.dtype, tensors[-1].device.type)
    if isinstance(state, Mapping):
        return {key: outline(value, tensors, taken) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(outline(value, tensors, taken) for value in state)
    return state


def rebuilt(plain: Any, tensors: list[torch.Tensor]) -> Any:
    """Rebuild an outlined state, with new tensors in place of the placeholders."""
    if isinstance(plain, _TensorPlace):
        tensors.append(torch.empty(plain.shape, dtype=plain.dtype, device=plain.device))
        return tensors[-1]
    if isinstance(plain, dict):
        return {key: rebuilt(value, tensors) for key, value in plain.items()}
    if type(plain) in (list, tuple):
        return type(plain)(rebuilt(value, tensors) for value in plain)
    return plain
