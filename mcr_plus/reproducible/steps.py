"""Reductions in a fixed order over libraries that have an order of their own.

Each rank gets all ranks' values of one part, reduces them by our kernels, and sends the result back: as many
bytes as by a ring. Small operations are gathered whole and reduced by every rank, in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version

from mcr_plus.backends.shm.reductions import SumTable
from mcr_plus.core.buffers import Pool
from mcr_plus.core.kinds import VECTOR, Kind, collective
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import JointWork, Work
from mcr_plus.engine.issue import Issue
from mcr_plus.reproducible.torch_sums import TorchSum

SMALL: Final = 64 << 10
"""Most bytes of all ranks' values together that are gathered whole: a step costs more than these bytes."""
SLICE: Final = 16 << 20
"""Most bytes of an all_reduce at a time, so that caches still have values when they are added up."""
_OWN: Final = ("prepare", "after", "input_counts", "output_counts")


class OrderedSum:
    """An operation with `Signature.sums`, composed of others, which `bind` binds. `pool`: for its buffers."""

    def __init__(
        self, signature: Signature, rank: int, pool: Pool, bind: Callable[[Signature], Issue]
    ) -> None:
        assert signature.sums is not None
        assert signature.dtype is not None
        assert signature.reduce_op is not None
        self._signature, self._rank, self._pool = signature, rank, pool
        kind_of_sum = SumTable if signature.device == "cpu" else TorchSum
        self._table = kind_of_sum(signature.sums, signature.dtype, signature.reduce_op, signature.ranks)
        ranks, numel = signature.ranks, (signature.nbytes or 0) // signature.dtype.itemsize
        row = collective(signature.kind)
        back: Kind = "gather" if row.rooted else "all_gather"
        self._is_small = not row.divides and ranks * (signature.nbytes or 0) <= SMALL
        self._chunk = numel if self._is_small else -(-numel // ranks)  # values that this rank reduces
        out: Kind = "all_to_all_v" if signature.kind in VECTOR else back if self._is_small else "all_to_all"
        steps: list[Kind] = [out] if row.divides or self._is_small else [out, back]
        self._steps = [self._step(kind) for kind in steps]
        self._issues = [bind(step) for step in self._steps]

    @property
    def description(self) -> str:
        """Return the steps, for `explain`."""
        how = {"fixed": "added by a tree over the ranks", "exact": "added exactly"}[str(self._signature.sums)]
        return ", ".join([self._steps[0].kind, how, *(step.kind for step in self._steps[1:])])

    def _step(self, kind: Kind) -> Signature:
        signature = self._signature
        assert signature.dtype is not None
        numel = self._chunk * signature.ranks
        shape = (numel,) if kind == "all_to_all" else () if kind in VECTOR else (self._chunk,)
        nbytes = None if kind in VECTOR else numel * signature.dtype.itemsize
        roots = {} if kind == "gather" else {"root": None, "root_in_job": None}
        return signature.replace(
            kind=kind, shape=shape, nbytes=nbytes, reduce_op=None, compress=False, parts=None,
            key=None, call=signature.as_call(), **roots,
        )  # fmt: skip

    def start(self, message: Message) -> Work:
        """Issue the steps; return their handle."""
        signature, ranks, chunk, table = self._signature, self._signature.ranks, self._chunk, self._table
        lease = self._pool.lease(message.inputs[0].device)
        extras: Any = {name: value for name, value in vars(message).items() if name not in _OWN}
        given, counts, dtype = message.inputs[0].view(-1), message.input_counts, message.inputs[0].dtype
        first: Any = {**extras, "after": message.after, "prepare": message.prepare}
        if counts is not None:
            chunk = counts[self._rank]
            first |= {"input_counts": counts, "output_counts": (chunk,) * ranks}
        elif not self._is_small and given.numel() < chunk * ranks:
            given, first["prepare"] = self._padded(message, lease.tensor(chunk * ranks, dtype))
        # The result's rank, or all: the others of a `reduce` get nothing in its last step.
        result = message.outputs[0].view(-1) if signature.root in (None, self._rank) else None
        is_last = len(self._issues) == 1
        parts = None if is_last and result is None else lease.tensor(chunk * ranks, dtype)
        received = () if parts is None else (parts,)
        works = [self._issues[0].start(Message(self._steps[0], (given,), received, **first))]

        def add() -> None:
            if parts is not None and result is not None:
                table.reduce(parts, result)

        if is_last:
            return works[0].then(lease.release_after(add))
        total, wide = lease.tensor(chunk, dtype), None
        if result is not None:
            wide = result if result.numel() == chunk * ranks else lease.tensor(chunk * ranks, dtype)
        gathered = () if wide is None else (wide,)

        def add_part() -> None:
            assert parts is not None
            table.reduce(parts, total)
            increment_version(total)  # failover keeps earlier steps' tensors, of the same memory

        second = Message(self._steps[1], (total,), gathered, **extras, after=works[0], prepare=add_part)
        works.append(self._issues[1].start(second))

        def end() -> None:
            if result is not None and wide is not None and wide is not result:
                result.copy_(wide[: result.numel()])

        works[1].then(lease.release_after(end))
        return JointWork(works, signature.kind, nbytes=signature.nbytes or 0, tag=signature.tag, legs=True)

    @staticmethod
    def _padded(message: Message, space: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return memory for the values and zeros, and what fills it when the operation starts."""
        values, earlier = message.inputs[0].view(-1), message.prepare

        def fill() -> None:
            if earlier is not None:
                earlier()
            space[: values.numel()].copy_(values)
            space[values.numel() :].zero_()

        return space, fill


class SlicedSum:
    """An all_reduce of more than `SLICE` bytes, in slices; arguments are those of `OrderedSum`."""

    def __init__(self, signature: Signature, *arguments: Any) -> None:
        width, nbytes = (signature.dtype or torch.uint8).itemsize, signature.nbytes or 0
        most = SLICE // (width * signature.ranks) * signature.ranks  # no slice but the last is padded
        self._sizes = [min(most, nbytes // width - begin) for begin in range(0, nbytes // width, most)]
        like, self._signature = signature.replace(call=signature.as_call()), signature
        self._sums = {
            size: OrderedSum(like.replace(shape=(size,), nbytes=size * width), *arguments)
            for size in dict.fromkeys(self._sizes)
        }
        self.description = f"{len(self._sizes)} slices: {self._sums[self._sizes[0]].description}"

    def start(self, message: Message) -> Work:
        """Issue the slices; return their handle."""
        extras: Any = {name: value for name, value in vars(message).items() if name not in _OWN}
        inputs, outputs = (each[0].view(-1).split(self._sizes) for each in (message.inputs, message.outputs))
        signature, works = self._signature, list[Work]()
        first: Any = {"after": message.after, "prepare": message.prepare}
        for pair in zip(inputs, outputs, strict=True):
            part = Message(signature, pair[:1], pair[1:], **extras, **first)
            works.append(self._sums[pair[0].numel()].start(part))
            first = {} if message.after is None and message.prepare is None else {"after": works[0]}
        return JointWork(works, signature.kind, nbytes=signature.nbytes or 0, tag=signature.tag)


def ordered_sum(signature: Signature, *arguments: Any) -> OrderedSum | SlicedSum:
    """Return an operation with `Signature.sums`."""
    is_large = signature.kind == "all_reduce" and (signature.nbytes or 0) > SLICE
    return (SlicedSum if is_large else OrderedSum)(signature, *arguments)
