"""MIN and MAX of floating-point values in gloo: of integers in the order of the values, in place of these.

gloo's own take the first or the second of two zeros, and of a NaN and a number, by the place of an element in
the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mcr_plus.backends.base import Poll, Start
from mcr_plus.core.buffers import Pool
from mcr_plus.core.kinds import FLOATS, dtype_name
from mcr_plus.core.message import Message, Signature
from mcr_plus.kernels.compiling import compiling


def compares_keys(signature: Signature) -> bool:
    """Whether gloo gets keys in place of the values."""
    return signature.dtype in FLOATS and signature.reduce_op in ("MIN", "MAX")


def keyed(
    signature: Signature,
    pool: Pool,
    reduce: Callable[[torch.Tensor, Callable[[], None]], Poll],
    *,
    wanted: bool = True,
) -> Start:
    """Return the start of a MIN or MAX of keys.

    `reduce`: starts it on keys, in place, and calls a function when it is done. `wanted`: of a rank that gets
    the result.
    """
    from mcr_plus.backends.shm.reduce_kernels import convert, keys_for  # numba, for these alone

    dtype, op = signature.dtype, signature.reduce_op
    assert dtype is not None
    assert op is not None
    with compiling(f"{op} on {dtype_name(dtype)}"):
        of_values, to_values, key = keys_for(dtype, op)
    fits = wanted and key.itemsize == dtype.itemsize  # in the memory of the result

    def start(message: Message) -> Poll:
        value, lease = message.inputs[0], None
        out, count = message.outputs[0] if wanted else value, value.numel()
        if fits:
            keys = out.view(-1).view(key)
        else:
            lease = pool.lease(value.device)
            keys = lease.tensor(count, key)
        convert(of_values, keys.data_ptr(), value.data_ptr(), count)

        def finish() -> None:
            if wanted:
                convert(to_values, out.data_ptr(), keys.data_ptr(), count)
            if lease is not None:
                lease.release()

        return reduce(keys, finish)

    return start
