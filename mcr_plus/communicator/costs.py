"""Expected times of a group's operations by its tuning table, computed without communication."""

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
    dense: bool = False,
) -> float | None:
    """Return the microseconds that a synchronous operation should take by the tuning table; None if unknown.

    `numel`: the payload in elements (see `Signature.nbytes`). `dense`: ignore codecs of the pipeline. Each
    rank may call this for any operation.
    """
    signature = Signature(
        kind, dtype, (numel,), numel * dtype.itemsize, comm.name, comm.size, device, op, None, tag,
        compress=False if dense else None,
    )  # fmt: skip
    return comm.pipeline.expected_us(signature)
