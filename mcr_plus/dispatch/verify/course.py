"""The course of a verified operation: its steps, and the digests that are taken between them.

Operations that move data run as they are. Reductions are made of such: values are exchanged, each rank
reduces its part in the order of ranks, and sums are gathered. So everything that travels has a digest of all
its bits, while no digest of floating-point values leads to that of their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import torch

from mcr_plus.backends.base import Poll
from mcr_plus.backends.emulation import LocalReduce, local_reduce
from mcr_plus.core.kinds import REDUCING, plain_kind
from mcr_plus.core.message import Message, Signature
from mcr_plus.dispatch.verify.flows import Flows
from mcr_plus.kernels.digest import block_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Extras
    from mcr_plus.dispatch.failover.second import SecondLibrary
    from mcr_plus.dispatch.verify.flows import Hashes

Course = Iterator[Poll]
"""An operation under way: each poll has to be true before the next one is taken."""
Compare = Callable[[Signature, "Sequence[Flows]"], Course]
"""Compares what ranks have sent and got; raises `DataCorrupted`."""
Begin = Callable[[Message], Course]
"""Begins an operation, whose tensors may be damaged from then on."""

_LINE: Final = 64  # bytes
_PIECE: Final = 1 << 15  # elements
_WHOLE: Final = 8192  # bytes of an all_reduce up to which every rank gets all values, and reduces them itself


class Courses:
    """How operations run on a library of a group."""

    def __init__(self, library: SecondLibrary, group: Group, compare: Compare) -> None:
        self._library, self._compare = library, compare
        self._rank, self._size = group.rank, group.size
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def bind(self, signature: Signature) -> Begin:
        """How operations of a signature begin: digests of what is sent are taken at once."""
        if signature.kind not in REDUCING:
            return lambda message: self._moved(message, self._sent(message))
        if signature.kind == "all_reduce":
            whole = (signature.nbytes or 0) <= _WHOLE
            return self._all_reduce_whole(signature) if whole else self._all_reduce(signature)
        return self._reduce(signature) if signature.kind == "reduce" else self._reduce_scatter(signature)

    def _through(self, message: Message) -> Course:
        """One operation of the library."""
        yield self._library.gate(message)
        yield self._library.poll(message)

    # -- data movement ----------------------------------------------------------------------------------

    def _moved(self, message: Message, sent: Hashes) -> Course:
        signature = message.signature
        inner = message.with_tensors(message.inputs, message.outputs, signature, after=None, prepare=None)
        outputs = message.outputs  # the message lets go of its tensors
        yield from self._through(inner)
        yield from self._compare(signature, [Flows(sent, self._got(inner, outputs))])

    def _sent(self, message: Message) -> Hashes:
        """Hashes of what this rank sends, by receiver."""
        signature, everybody = message.signature, range(self._size)
        kind, is_root = plain_kind(signature.kind), signature.root == self._rank
        if kind in ("broadcast", "scatter") and not is_root:
            return {}
        value = message.inputs[0] if message.inputs else message.outputs[0]
        if kind in ("broadcast", "all_gather"):
            return dict.fromkeys(everybody, block_hashes(value))
        if kind == "gather":
            return {signature.root or 0: block_hashes(value)}
        return self._of_parts(value, message.input_counts)

    def _got(self, message: Message, outputs: Sequence[torch.Tensor]) -> Hashes:
        """Hashes of what has arrived here, by sender."""
        signature = message.signature
        kind = plain_kind(signature.kind)
        if kind in ("broadcast", "scatter"):
            return {signature.root or 0: block_hashes(outputs[0])}
        if kind == "gather" and signature.root != self._rank:
            return {}
        return self._of_parts(outputs[0], message.output_counts)

    def _of_parts(self, value: torch.Tensor, counts: Sequence[int] | None) -> Hashes:
        flat = value.view(-1)
        parts = flat.split(list(counts) if counts is not None else max(1, flat.numel() // self._size))
        return {rank: block_hashes(part) for rank, part in enumerate(parts)}

    # -- reductions -------------------------------------------------------------------------------------

    def _memory(self, like: torch.Tensor, *numels: int) -> tuple[torch.Tensor, ...]:
        """Tensors of these sizes for one operation, of which there is one at a time."""
        sizes = [-(-numel * like.element_size() // _LINE) * _LINE for numel in numels]
        if self._scratch.numel() < sum(sizes):  # fresh pages cost more than the values in them
            self._scratch = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        tensors, at = [], 0
        for numel, nbytes in zip(numels, sizes, strict=True):
            tensors.append(self._scratch[at : at + numel * like.element_size()].view(like.dtype))
            at += nbytes
        return tuple(tensors)

    def _all_reduce_whole(self, signature: Signature) -> Begin:
        reduce_parts, size = _reduction(signature), self._size
        gathering = _derived(signature, "all_gather", nbytes=size * (signature.nbytes or 0))

        def begin(message: Message) -> Course:
            value, out = message.inputs[0].view(-1), message.outputs[0].view(-1)
            return run(value, out, dict.fromkeys(range(size), block_hashes(value)))

        def run(value: torch.Tensor, out: torch.Tensor, sent: Hashes) -> Course:
            (parts,) = self._memory(value, size * value.numel())
            yield from self._through(Message(gathering, (value,), (parts,)))
            got = self._of_parts(parts, None)
            reduce_parts(parts.view(size, -1), out)
            result = dict.fromkeys(range(size), block_hashes(out))  # equal on all ranks
            yield from self._compare(signature, [Flows(sent, got), Flows(result, result)])

        return begin

    def _all_reduce(self, signature: Signature) -> Begin:
        reduce_parts, size, rank = _reduction(signature), self._size, self._rank
        assert signature.dtype is not None
        numel = (signature.nbytes or 0) // signature.dtype.itemsize
        counts = tuple(numel * (each + 1) // size - numel * each // size for each in range(size))
        own = (counts[rank],) * size
        exchange_extras: Extras = {"input_counts": counts, "output_counts": own}
        gathering_extras: Extras = {"output_counts": counts}
        if numel % size:
            exchange, gathering = (_derived(signature, kind) for kind in ("all_to_all_v", "all_gather_v"))
        else:  # libraries copy less
            exchange, gathering = (
                _derived(signature, kind, nbytes=signature.nbytes) for kind in ("all_to_all", "all_gather")
            )
            exchange_extras = gathering_extras = {}

        def begin(message: Message) -> Course:
            value, out = message.inputs[0].view(-1), message.outputs[0].view(-1)
            return run(value, out, self._of_parts(value, counts))

        def run(value: torch.Tensor, out: torch.Tensor, sent: Hashes) -> Course:
            parts, mine = self._memory(value, size * counts[rank], counts[rank])
            yield from self._through(Message(exchange, (value,), (parts,), **exchange_extras))
            first = Flows(sent, self._of_parts(parts, own))
            reduce_parts(parts.view(size, counts[rank]), mine)
            sums = dict.fromkeys(range(size), block_hashes(mine))
            yield from self._through(Message(gathering, (mine,), (out,), **gathering_extras))
            yield from self._compare(signature, [first, Flows(sums, self._of_parts(out, counts))])

        return begin

    def _reduce_scatter(self, signature: Signature) -> Begin:
        reduce_parts, size, rank = _reduction(signature), self._size, self._rank
        uneven = signature.kind == "reduce_scatter_v"
        exchange = (
            _derived(signature, "all_to_all_v", counts_agreed=signature.counts_agreed)
            if uneven
            else _derived(signature, "all_to_all", nbytes=signature.nbytes)
        )

        def begin(message: Message) -> Course:
            value, out, counts = message.inputs[0].view(-1), message.outputs[0].view(-1), message.input_counts
            return run(value, out, counts, self._of_parts(value, counts))

        def run(
            value: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...] | None, sent: Hashes
        ) -> Course:
            own = None if counts is None else (counts[rank],) * size
            (parts,) = self._memory(value, size * out.numel())
            yield from self._through(
                Message(exchange, (value,), (parts,), input_counts=counts, output_counts=own)
            )
            got = self._of_parts(parts, own)
            reduce_parts(parts.view(size, out.numel()), out)
            yield from self._compare(signature, [Flows(sent, got)])

        return begin

    def _reduce(self, signature: Signature) -> Begin:
        reduce_parts, size = _reduction(signature), self._size
        root = signature.root or 0
        is_root = root == self._rank
        gathering = _derived(signature, "gather", nbytes=size * (signature.nbytes or 0), root=root)

        def begin(message: Message) -> Course:
            value = message.inputs[0].view(-1)
            return run(value, message.outputs[0].view(-1) if is_root else None, {root: block_hashes(value)})

        def run(value: torch.Tensor, out: torch.Tensor | None, sent: Hashes) -> Course:
            got: Hashes = {}
            if out is None:
                yield from self._through(Message(gathering, (value,)))
            else:
                (parts,) = self._memory(value, size * value.numel())
                yield from self._through(Message(gathering, (value,), (parts,)))
                got = self._of_parts(parts, None)
                reduce_parts(parts.view(size, -1), out)
            yield from self._compare(signature, [Flows(sent, got)])

        return begin


def _reduction(signature: Signature) -> LocalReduce:
    """The reduction of `[ranks, n]` values, in pieces that stay in the caches."""
    assert signature.reduce_op is not None
    assert signature.dtype is not None
    reduce_parts = local_reduce(signature.reduce_op, signature.dtype)

    def in_pieces(parts: torch.Tensor, out: torch.Tensor) -> None:
        for piece, target in zip(parts.split(_PIECE, dim=1), out.split(_PIECE), strict=True):
            reduce_parts(piece, target)

    return in_pieces


def _derived(signature: Signature, kind: str, **changes: object) -> Signature:
    """The signature of a step; that of the operation is in it, so libraries keep different ones apart."""
    fields: dict[str, object] = {
        "kind": kind, "nbytes": None, "reduce_op": None, "root": None, "algorithm": None, "parts": None,
        "key": None, "call": signature.as_call(), "counts_agreed": True,
    }  # fmt: skip
    if kind.endswith("_v"):
        fields["shape"] = ()
    return signature.replace(**{**fields, **changes})
