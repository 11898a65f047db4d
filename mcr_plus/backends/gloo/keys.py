"""MIN and MAX of floating-point values in gloo, by integer keys that sort like the values.

gloo's own MIN and MAX of two zeros, or of a NaN and a number, depend on an element's place in the tensor. Two
ranks exchange their values, which sends as much as gloo's all_reduce, and compare them locally: one pass over
the values instead of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mcr_plus.backends.base import Poll, Start
from mcr_plus.core.buffers import Pool
from mcr_plus.core.kinds import FLOATS, dtype_name
from mcr_plus.core.message import Message, Signature
from mcr_plus.kernels.compiling import compiling


def compares_keys(signature: Signature) -> bool:
    """Return whether gloo reduces keys instead of values."""
    return signature.dtype in FLOATS and signature.reduce_op in ("MIN", "MAX")


def keyed(
    signature: Signature,
    pool: Pool,
    reduce: Callable[[torch.Tensor], Any],
    poll: Callable[[Any, Callable[[], None]], Poll],
    *,
    wanted: bool = True,
) -> Start:
    """Return the start of a MIN or MAX of keys.

    `reduce`: starts the reduction of keys, in place, and returns gloo's work. `poll`: makes a poll of that
    work, which calls a function at the end. `wanted`: True if this rank gets the result.
    """
    from mcr_plus.backends.shm.reduce_kernels import apply  # imported here: needs numba
    from mcr_plus.backends.shm.reductions import keys_for

    dtype, op = signature.dtype, signature.reduce_op
    assert dtype is not None
    assert op is not None
    with compiling(f"{op} on {dtype_name(dtype)}"):
        of_values, to_values, key = keys_for(dtype, op)
    fits = wanted and key.itemsize == dtype.itemsize  # keys fit into the result's memory

    def start(message: Message) -> Poll:
        value, lease = message.inputs[0], None
        out, count = message.outputs[0] if wanted else value, value.numel()
        # Keys that fit replace the values in the result's memory, which saves a buffer.
        if fits:
            keys = out.view(-1).view(key)
        else:
            lease = pool.lease(value.device)
            keys = lease.tensor(count, key)
        apply(of_values, keys.data_ptr(), value.data_ptr(), count, 0)

        def finish() -> None:
            if wanted:
                apply(to_values, out.data_ptr(), keys.data_ptr(), count, 0)
            if lease is not None:
                lease.release()

        return poll(reduce(keys), finish)

    return start


def exchanged(
    signature: Signature,
    rank: int,
    pool: Pool,
    exchange: Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], Any],
    poll: Callable[[Any, Callable[[], None]], Poll],
) -> Start:
    """Return the start of a MIN or MAX between two ranks.

    `exchange`: starts all_to_all from its second into its first argument, by counts; `poll` as in `keyed`.
    """
    from mcr_plus.backends.shm.reduce_kernels import apply  # imported here: needs numba
    from mcr_plus.backends.shm.reductions import kernels_for

    dtype, op = signature.dtype, signature.reduce_op
    assert dtype is not None
    assert op is not None
    with compiling(f"{op} on {dtype_name(dtype)}"):
        combine = kernels_for(dtype, op).combine

    def start(message: Message) -> Poll:
        value, out, lease = message.inputs[0], message.outputs[0], pool.lease(message.inputs[0].device)
        other = lease.tensor(value.numel(), dtype)

        def finish() -> None:
            operands = (other, value) if rank else (value, other)  # same order on both ranks
            apply(combine, out.data_ptr(), *(each.data_ptr() for each in operands), value.numel())
            lease.release()

        counts = [value.numel(), 0] if rank else [0, value.numel()]
        return poll(exchange(other, value, counts, counts), finish)

    return start
