"""What operations of a group should cost by its tuning table; nothing is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcr_plus.core.message import Signature

if TYPE_CHECKING:
    import torch

    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.core.kinds import Kind, ReduceOp


def expected_us(
    comm: Communicator,
    kind: Kind,
    dtype: torch.dtype,
    numel: int,
    *,
    op: ReduceOp | None = None,
    device: str = "cpu",
    tag: str | None = None,
) -> float | None:
    """Microseconds that a synchronous operation should take by the tuning table; None if unknown.

    `numel`: its payload in elements, as in `Signature.nbytes`. Each rank may ask about any operation.
    """
    signature = Signature(
        kind, dtype, (numel,), numel * dtype.itemsize, comm.name, comm.size, device, op, None, tag
    )
    return comm.pipeline.expected_us(signature)
