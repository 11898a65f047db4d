"""Sends tensors, and nested state such as an optimizer's, from one rank to the others."""

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
"""The tag of what newcomers get."""
Has = Literal["all", "parts", "nothing"]
"""What a rank has of a state."""
_PIECE: Final = 64 << 20  # bytes of one broadcast, which copies its tensors into a flat tensor
_BLOCK: Final = 1 << 20  # bytes of which one digest is compared


class _TensorPlace(NamedTuple):
    """Where a tensor is in a state; the tensors themselves are sent by themselves."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], comm: Communicator, src: int | None = None, *, tag: str | None = None
) -> None:
    """Broadcast tensors from rank `src` of the job (None: the group's first rank), in large pieces.

    Ranks have the same bits afterwards. With a `tag`, by which rules find them, they are encoded as the
    pipeline says if that is without loss; otherwise, and without a tag, they travel as they are: other codecs
    are for gradients, not for parameters. Tensors are of any dense dtype.
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
        # Weights may have dtypes that operations have not, such as torch's bits8.
        sent = flat if flat.dtype in DTYPES else flat.view(torch.uint8)
        comm.broadcast(sent, root, compress=False if tag is None else _lossless(sent, comm, tag), tag=tag)
        offset = 0
        for tensor in batch:
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()


def _lossless(flat: torch.Tensor, comm: Communicator, tag: str) -> Compress:
    """The codec that the pipeline has for a broadcast, if it is one without loss; the same on all ranks."""
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
        return False  # `exp_window`, the only one, has no kernel for GPUs
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
    """Return the state of rank `src` of the group: nested dicts, lists and tuples, with tensors in them.

    Collective. Tensors are sent through the pipeline, without loss, with the tag `state`; the rest is pickled
    and signed. On other ranks tensors are new, on the same type of device. `beside`: tensors of every rank,
    which are sent as well, in place. `has`: by rank, how much of it the ranks have; None if that does not
    matter. If some have parts, which they pass, only what is lacking is sent, see `broadcast_differences`.
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
    """Broadcast those parts of tensors that differ on some rank from rank `src` of the job; returns bytes.

    Collective. Ranks that have parts compare digests of pieces of 1 MiB with those of `src`. Ranks that have
    `all` are believed, and those that have `nothing` get everything. `has`: by rank of the group.
    """
    # mcr.shrink needs this module in a hurry, and no digests: these import the compiler of kernels.
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
    """Views of a tensor's parts, of which each has a digest; the whole where its memory has holes."""
    whole = tensor.detach()
    if not whole.is_contiguous():
        return (whole,)
    return whole.view(-1).split(max(1, _BLOCK // whole.element_size())) if whole.numel() else ()


def outline(
    state: Any, tensors: list[torch.Tensor], taken: Callable[[torch.Tensor], torch.Tensor] = lambda each: each
) -> Any:
    """The state with places instead of tensors; `taken` of each of them is appended to `tensors`."""
    if isinstance(state, torch.Tensor):
        tensors.append(taken(state))
        return _TensorPlace(tuple(state.shape), state.dtype, tensors[-1].device.type)
    if isinstance(state, Mapping):
        return {key: outline(value, tensors, taken) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(outline(value, tensors, taken) for value in state)
    return state


def rebuilt(plain: Any, tensors: list[torch.Tensor]) -> Any:
    """The opposite of `outline`, with new tensors."""
    if isinstance(plain, _TensorPlace):
        tensors.append(torch.empty(plain.shape, dtype=plain.dtype, device=plain.device))
        return tensors[-1]
    if isinstance(plain, dict):
        return {key: rebuilt(value, tensors) for key, value in plain.items()}
    if type(plain) in (list, tuple):
        return type(plain)(rebuilt(value, tensors) for value in plain)
    return plain
