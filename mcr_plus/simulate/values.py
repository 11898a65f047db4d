"""Values that simulated collectives give: those of a job in which all ranks have the same data."""

from __future__ import annotations

import torch

from mcr_plus.core.kinds import collective
from mcr_plus.core.message import Message


def fill(message: Message, rank: int, known: torch.Tensor | None) -> None:
    """Give the outputs of an operation their values, where only data of this rank is known.

    Sums are this rank's value times the number of ranks, gathered parts are copies. `known`: the value that
    another rank sent at this place of the program; without it, what a sender or the root of a scatter would
    send is zero, and a broadcast leaves this rank's values: parameters, which every rank initialises.
    """
    signature, outputs = message.signature, message.outputs
    row, size = collective(signature.kind), signature.ranks
    sends, receives = row.buffers(root=signature.root in (None, rank))
    if not outputs or receives == "none":
        return
    if sends == "none":
        (target,) = outputs
        if known is not None and known.nbytes == target.nbytes:
            target.view(-1).copy_(known.reshape(-1).view(target.dtype))
        elif not row.in_place:
            target.zero_()
        return
    if not message.inputs:
        return
    parts = [each.reshape(-1) for each in message.inputs]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    if sends == "each":  # this rank's block of the input
        counts = message.input_counts or (flat.numel() // size,) * size
        begin = sum(counts[:rank])
        flat = flat[begin : begin + counts[rank]]
    if signature.reduce_op == "SUM" and flat.dtype != torch.bool:
        flat = flat * size
    for target in outputs:
        _repeat(flat, target.view(-1))


def _repeat(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` into `target`, as often as it fits."""
    count = source.numel()
    if source.data_ptr() == target.data_ptr() and count == target.numel():
        return
    if not count or not target.numel():
        target.zero_()
    elif target.numel() % count == 0:
        target.view(-1, count).copy_(source)
    else:
        target.copy_(source.repeat(-(-target.numel() // count))[: target.numel()])
