"""Run a verified operation: its steps, and the checksums taken between steps.

Operations that move data run unchanged. Reductions consist of such operations: ranks exchange values, each
reduces its part in rank order, and they gather the sums. So every transmitted bit is covered by a checksum.
(The checksum of a sum cannot be computed from checksums of floating-point addends.)

A large broadcast, all_reduce or all_gather over gloo between hosts runs in pieces, so that checksums of one
piece are taken while the library moves another. So does a broadcast or all_reduce over shared memory, unless
`checked` supports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import torch

from mcr_plus.backends.base import Poll
from mcr_plus.core.kinds import REDUCING, VECTOR, collective, plain_kind
from mcr_plus.core.message import Message, Signature
from mcr_plus.kernels.checksum_sizes import BLOCK
from mcr_plus.reliability.verify.checksum_table import (
    GOT,
    GOT_SUMS,
    SENT,
    SENT_SUMS,
    ChecksumPlan,
    ChecksumTable,
    Flows,
)
from mcr_plus.reliability.verify.reducing import reduction

if TYPE_CHECKING:
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Extras
    from mcr_plus.reliability.verify.steps import VerifiedStep, VerifiedSteps

VerifiedRun = Iterator[Poll]
"""A running operation: each poll must be true before the next one is taken."""
Compare = Callable[[Signature, ChecksumTable], VerifiedRun]
"""Compares sent and received data of ranks; raises `DataCorrupted`."""
Begin = Callable[[Message], VerifiedRun]
"""Begins an operation, whose tensors may be damaged from then on."""
AtOnce = Callable[[Message], VerifiedRun | None]
"""Runs an operation as far as possible while no other runs; None if it has ended well."""
Judge = Callable[[Signature, ChecksumTable], NoReturn]
"""Raises `DataCorrupted`: ranks do not agree."""


class Begins(NamedTuple):
    """Functions that begin operations of a signature."""

    begin: Begin
    at_once: AtOnce | None = None


PIECE: Final = 4 << 20
"""Approximate bytes of a piece: it stays in a cache of tens of MiB. Smaller pieces would make ranks wait for
each other more often, and each wait costs a time slice where other processes use the cores.
"""
_NO_PIECES: Final = 1 << 62
_LINE: Final = 64  # bytes


class VerifiedRuns:
    """Binds the runs of a library's operations in a group."""

    def __init__(
        self, steps: VerifiedSteps, group: Group, compare: Compare, between_hosts: bool = False
    ) -> None:
        self._steps, self._compare = steps, compare
        self._rank, self._size = group.rank, group.size
        # On one host with busy cores, waiting for each piece costs more than pieces save. Between hosts the
        # link is slower than the wait, but a library that moves data only when polled gains nothing.
        in_pieces = steps.backend.rings or (between_hosts and not steps.backend.host_driven)
        self._piece = PIECE if in_pieces else _NO_PIECES
        self._gathers_in_pieces = in_pieces and not steps.backend.rings
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def bind(self, signature: Signature) -> Begin:
        """Return the function that begins operations; it takes checksums of the data sent first at once."""
        kind, nbytes = signature.kind, signature.nbytes or 0
        if kind not in REDUCING:
            least = 2 * self._piece  # at least two pieces
            if kind == "broadcast" and nbytes >= least:
                return self._broadcast(signature)
            if kind == "all_gather" and self._gathers_in_pieces and nbytes >= least:
                return self._all_gather(signature)
            return self._moved(signature)
        if kind == "all_reduce":
            return self._all_reduce(signature)
        return self._reduce(signature) if kind == "reduce" else self._reduce_scatter(signature)

    # -- data movement ----------------------------------------------------------------------------------

    def _moved(self, signature: Signature) -> Begin:
        step = self._steps.bind(signature)
        kept = _TablePool(signature, partial(movement, self._rank, self._size))

        def begin(message: Message) -> VerifiedRun:
            ledger = kept.ledger(message)
            if SENT in ledger.plan.cuts:
                ledger.take(SENT, (message.inputs or message.outputs)[0].data_ptr())
            return run(message, message.inputs, message.outputs, ledger)

        def run(
            message: Message, inputs: _Tensors, outputs: _Tensors, ledger: ChecksumTable
        ) -> VerifiedRun:  # the message drops its tensor references
            inner = message.with_tensors(inputs, outputs, signature, after=None, prepare=None)
            yield from _through(step, inner)
            if GOT in ledger.plan.cuts:
                ledger.take(GOT, outputs[0].data_ptr())
            yield from self._compare(signature, ledger)
            kept.give_back(ledger)

        return begin

    def _broadcast(self, signature: Signature) -> Begin:
        """Return a run in pieces."""
        assert signature.dtype is not None
        nbytes, root = signature.nbytes or 0, signature.root or 0
        is_root, size = root == self._rank, self._size
        piece_bytes = self._piece
        repeats, rest = _pieces(nbytes, piece_bytes)
        ends = {GOT: Flows.one(root, rest)}
        if is_root:
            ends[SENT] = Flows.one(0, rest, size)
        kept = _TablePool(signature, lambda _: ChecksumPlan(size, ends, repeats, piece_bytes))
        steps = [
            self._steps.bind(derived(signature, "broadcast", nbytes=each, root=root))
            for each in (piece_bytes, rest)
        ]
        step_of = [steps[0]] * repeats + [steps[1]]
        numel = piece_bytes // signature.dtype.itemsize

        def begin(message: Message) -> VerifiedRun:
            ledger, pieces = kept.ledger(message), _cut(message.outputs[0], repeats, numel)
            if is_root:
                ledger.take_piece(SENT, pieces[0].data_ptr(), 0)
            return run(pieces, bool(message.inputs), ledger)

        def run(pieces: list[torch.Tensor], has_inputs: bool, ledger: ChecksumTable) -> VerifiedRun:
            before: Poll | None = None
            for number, piece in enumerate(pieces):
                if is_root and number:
                    ledger.take_piece(SENT, piece.data_ptr(), number)
                step = step_of[number]
                inner = Message(step.signature, (piece,) if has_inputs else (), (piece,))
                if (gate := step.gate(inner)) is not None:
                    yield gate
                poll = step.start(inner)
                # The checksum of the previous piece is taken while the library moves this one.
                if before is not None:
                    yield before
                    ledger.take_piece(GOT, pieces[number - 1].data_ptr(), number - 1)
                before = poll
            assert before is not None
            yield before
            ledger.take_piece(GOT, pieces[-1].data_ptr(), repeats)
            yield from self._compare(signature, ledger)
            kept.give_back(ledger)

        return begin

    def _all_gather(self, signature: Signature) -> Begin:
        """Return a run in pieces; a piece is copied to its place while the library moves the next one."""
        assert signature.dtype is not None
        size, width = self._size, signature.dtype.itemsize
        block = (signature.nbytes or 0) // size
        part = max(1, self._piece // size // BLOCK) * BLOCK
        repeats, rest = _pieces(block, part)
        ends = {
            SENT: Flows.one(0, rest, size),
            GOT: Flows([(each, 1) for each in range(size)], range(0, size * block, block), [rest] * size),
        }
        kept = _TablePool(signature, lambda _: ChecksumPlan(size, ends, repeats, part, block))
        steps = [
            self._steps.bind(derived(signature, "all_gather", nbytes=size * each)) for each in (part, rest)
        ]
        step_of = [steps[0]] * repeats + [steps[1]]

        def begin(message: Message) -> VerifiedRun:
            ledger, value = kept.ledger(message), _cut(message.inputs[0], repeats, part // width)
            ledger.take_piece(SENT, value[0].data_ptr(), 0)
            # Copy as bytes: torch would normalise bools other than 0 and 1.
            return run(value, message.outputs[0].view(-1).view(torch.uint8).view(size, -1), ledger)

        def run(value: list[torch.Tensor], out: torch.Tensor, ledger: ChecksumTable) -> VerifiedRun:
            most = max(each.numel() for each in value) * size
            # Two buffers: the library fills one while the other is copied out.
            memory, before = self._memory(value[0], most, most), None

            def placed(number: int) -> None:
                nbytes, at = value[number].nbytes, number * part
                arrived = memory[number % 2].view(torch.uint8)[: size * nbytes]
                out[:, at : at + nbytes].copy_(arrived.view(size, nbytes))
                ledger.take_piece(GOT, out.data_ptr() + at, number)

            for number, piece in enumerate(value):
                if number:
                    ledger.take_piece(SENT, piece.data_ptr(), number)
                step = step_of[number]
                inner = Message(step.signature, (piece,), (memory[number % 2][: size * piece.numel()],))
                if (gate := step.gate(inner)) is not None:
                    yield gate
                poll = step.start(inner)
                if before is not None:
                    yield before
                    placed(number - 1)
                before = poll
            assert before is not None
            yield before
            placed(repeats)
            yield from self._compare(signature, ledger)
            kept.give_back(ledger)

        return begin

    # -- reductions -------------------------------------------------------------------------------------

    def _memory(self, like: torch.Tensor, *numels: int) -> tuple[torch.Tensor, ...]:
        """Return tensors of these sizes for one operation; only one runs at a time."""
        sizes = [-(-numel * like.element_size() // _LINE) * _LINE for numel in numels]
        if self._scratch.numel() < sum(sizes):  # new pages cost more than the values in them
            self._scratch = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        tensors, at = [], 0
        for numel, nbytes in zip(numels, sizes, strict=True):
            tensors.append(self._scratch[at : at + numel * like.element_size()].view(like.dtype))
            at += nbytes
        return tuple(tensors)

    def _all_reduce(self, signature: Signature) -> Begin:
        """Return a run in pieces; the last piece is the remainder."""
        reduce_parts, size, rank = reduction(signature), self._size, self._rank
        assert signature.dtype is not None
        nbytes, width = signature.nbytes or 0, signature.dtype.itemsize
        part = max(1, self._piece // size // BLOCK) * BLOCK  # bytes of a piece on each rank
        repeats, rest = _pieces(nbytes, size * part)
        numel = rest // width
        counts = tuple(numel * (each + 1) // size - numel * each // size for each in range(size))
        last = _ReducedPiece(self._steps, signature, counts, rank)
        piece_of = [last]
        if repeats:
            piece_of = [
                _ReducedPiece(self._steps, signature, (part // width,) * size, rank)
            ] * repeats + piece_of
        of_parts = Flows.of_parts([width * each for each in counts])
        mine = width * counts[rank]
        ends = {
            SENT: of_parts,
            GOT: Flows.of_parts([mine] * size),
            SENT_SUMS: Flows.one(0, mine, size),
            GOT_SUMS: of_parts,
        }
        kept = _TablePool(signature, lambda _: ChecksumPlan(size, ends, repeats, part))
        numel_piece = size * part // width
        parts_numel = max(size * each.own for each in piece_of)
        own_numel = max(each.own for each in piece_of)

        def begin(message: Message) -> VerifiedRun:
            value, out = (_cut(each[0], repeats, numel_piece) for each in (message.inputs, message.outputs))
            ledger = kept.ledger(message)
            ledger.take_piece(SENT, value[0].data_ptr(), 0)
            return run(value, out, ledger)

        def run(value: list[torch.Tensor], out: list[torch.Tensor], ledger: ChecksumTable) -> VerifiedRun:
            # Two of each: while the sums of one piece are gathered, the values of the next piece are
            # exchanged.
            memory = self._memory(value[0], *(parts_numel,) * 2, *(own_numel,) * 2)
            exchanged: Poll | None = None
            summed: Poll | None = None
            # A pipeline of three steps: exchange piece `number`, reduce and gather the piece before it, and
            # check the sums of the piece before that. All ranks start operations in the same order.
            for number in range(repeats + 2):
                arriving: Poll | None = None
                if number <= repeats:
                    piece, target = piece_of[number], memory[number % 2]
                    if number:
                        ledger.take_piece(SENT, value[number].data_ptr(), number)
                    inner = piece.exchange(value[number], target[: size * piece.own])
                    if (gate := piece.exchanging.gate(inner)) is not None:
                        yield gate
                    arriving = piece.exchanging.start(inner)
                if exchanged is not None:
                    done, piece = number - 1, piece_of[number - 1]
                    yield exchanged
                    parts, sums = memory[done % 2][: size * piece.own], memory[2 + done % 2][: piece.own]
                    ledger.take_piece(GOT, parts.data_ptr(), done)
                    reduce_parts(parts.view(size, piece.own), sums)
                    ledger.take_piece(SENT_SUMS, sums.data_ptr(), done)
                    inner = piece.gather(sums, out[done])
                    if (gate := piece.gathering.gate(inner)) is not None:
                        yield gate
                    gathered = piece.gathering.start(inner)
                    if summed is not None:
                        yield summed
                        ledger.take_piece(GOT_SUMS, out[done - 1].data_ptr(), done - 1)
                    summed = gathered
                exchanged = arriving
            assert summed is not None
            yield summed
            ledger.take_piece(GOT_SUMS, out[repeats].data_ptr(), repeats)
            yield from self._compare(signature, ledger)
            kept.give_back(ledger)

        return begin

    def _reduce_scatter(self, signature: Signature) -> Begin:
        reduce_parts, size, rank = reduction(signature), self._size, self._rank
        uneven = signature.kind == "reduce_scatter_v"
        step = self._steps.bind(
            derived(signature, "all_to_all_v", counts_agreed=signature.counts_agreed)
            if uneven
            else derived(signature, "all_to_all", nbytes=signature.nbytes)
        )
        kept = _TablePool(
            signature,
            lambda message: ChecksumPlan(
                size,
                {
                    SENT: _parts(size, message.inputs[0], message.input_counts),
                    GOT: Flows.of_parts([message.outputs[0].nbytes] * size),
                },
            ),
        )

        def begin(message: Message) -> VerifiedRun:
            ledger, (value,), (out,) = kept.ledger(message), message.inputs, message.outputs
            ledger.take(SENT, value.data_ptr())
            return run(value.view(-1), out.view(-1), message.input_counts, ledger)

        def run(
            value: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...] | None, ledger: ChecksumTable
        ) -> VerifiedRun:
            own = None if counts is None else (counts[rank],) * size
            (parts,) = self._memory(value, size * out.numel())
            inner = Message(step.signature, (value,), (parts,), input_counts=counts, output_counts=own)
            yield from _through(step, inner)
            ledger.take(GOT, parts.data_ptr())
            reduce_parts(parts.view(size, out.numel()), out)
            yield from self._compare(signature, ledger)
            kept.give_back(ledger)

        return begin

    def _reduce(self, signature: Signature) -> Begin:
        reduce_parts, size, nbytes = reduction(signature), self._size, signature.nbytes or 0
        root = signature.root or 0
        is_root = root == self._rank
        step = self._steps.bind(derived(signature, "gather", nbytes=size * nbytes, root=root))
        ends = {SENT: Flows.one(root, nbytes)}
        if is_root:
            ends[GOT] = Flows.of_parts([nbytes] * size)
        kept = _TablePool(signature, lambda _: ChecksumPlan(size, ends))

        def begin(message: Message) -> VerifiedRun:
            ledger, (value,) = kept.ledger(message), message.inputs
            ledger.take(SENT, value.data_ptr())
            return run(value.view(-1), message.outputs[0].view(-1) if is_root else None, ledger)

        def run(value: torch.Tensor, out: torch.Tensor | None, ledger: ChecksumTable) -> VerifiedRun:
            if out is None:
                yield from _through(step, Message(step.signature, (value,)))
            else:
                (parts,) = self._memory(value, size * value.numel())
                yield from _through(step, Message(step.signature, (value,), (parts,)))
                ledger.take(GOT, parts.data_ptr())
                reduce_parts(parts.view(size, -1), out)
            yield from self._compare(signature, ledger)
            kept.give_back(ledger)

        return begin


_Tensors = tuple[torch.Tensor, ...]


def movement(rank: int, size: int, message: Message) -> ChecksumPlan:
    """Return the sent and received data of an operation that moves data, on `rank` of `size`."""
    signature = message.signature
    kind, root = plain_kind(signature.kind), signature.root or 0
    from_root = collective(kind).sends_elsewhere is not None
    is_root, ends = root == rank, dict[int, Flows]()
    sent, got = (message.inputs or message.outputs), message.outputs
    if is_root or not from_root:
        if kind in ("broadcast", "all_gather"):
            ends[SENT] = Flows.one(0, sent[0].nbytes, size)
        elif kind == "gather":
            ends[SENT] = Flows.one(root, sent[0].nbytes)
        else:
            ends[SENT] = _parts(size, sent[0], message.input_counts)
    if from_root:
        ends[GOT] = Flows.one(root, got[0].nbytes)
    elif is_root or kind != "gather":
        ends[GOT] = _parts(size, got[0], message.output_counts)
    return ChecksumPlan(size, ends)


def _parts(size: int, value: torch.Tensor, counts: tuple[int, ...] | None) -> Flows:
    width = value.element_size()
    return Flows.of_parts(
        [value.nbytes // size] * size if counts is None else [width * each for each in counts]
    )


class _TablePool:
    """Ledgers of a signature, one per concurrent operation."""

    def __init__(self, signature: Signature, plan: Callable[[Message], ChecksumPlan]) -> None:
        self._plan = plan
        self._differs = signature.kind in VECTOR  # the plan differs between calls
        self._digest = signature.digest()
        self._known: ChecksumPlan | None = None
        self._free: list[ChecksumTable] = []

    def ledger(self, message: Message) -> ChecksumTable:
        """Return a ledger for an operation."""
        if self._free:
            return self._free.pop()
        if self._known is None or self._differs:
            self._known = self._plan(message)
        return ChecksumTable(self._known, self._digest)

    def give_back(self, ledger: ChecksumTable) -> None:
        """Return the ledger of a successful operation to the pool."""
        if not self._differs:
            self._free.append(ledger)


class _ReducedPiece:
    """The two steps of a piece of an all_reduce. `own`: number of elements that this rank adds."""

    def __init__(
        self, steps: VerifiedSteps, signature: Signature, counts: tuple[int, ...], rank: int
    ) -> None:
        assert signature.dtype is not None
        self.own = counts[rank]
        self._exchange: Extras = {}
        self._gather: Extras = {}
        nbytes = sum(counts) * signature.dtype.itemsize
        if len(set(counts)) > 1:
            exchange, gather = (derived(signature, kind) for kind in ("all_to_all_v", "all_gather_v"))
            self._exchange = {"input_counts": counts, "output_counts": (self.own,) * len(counts)}
            self._gather = {"output_counts": counts}
        else:  # libraries then copy less
            exchange, gather = (
                derived(signature, kind, nbytes=nbytes) for kind in ("all_to_all", "all_gather")
            )
        self.exchanging, self.gathering = steps.bind(exchange), steps.bind(gather)

    def exchange(self, value: torch.Tensor, parts: torch.Tensor) -> Message:
        """Return the message that brings each rank its part of all ranks' values."""
        return Message(self.exchanging.signature, (value,), (parts,), **self._exchange)

    def gather(self, sums: torch.Tensor, out: torch.Tensor) -> Message:
        """Return the message that brings all sums to all ranks."""
        return Message(self.gathering.signature, (sums,), (out,), **self._gather)


def _pieces(nbytes: int, piece: int) -> tuple[int, int]:
    """Return the number of full pieces, and the bytes of the last piece, which may have twice the size."""
    repeats = max(0, nbytes // piece - 1)
    return repeats, nbytes - repeats * piece


def _cut(tensor: torch.Tensor, repeats: int, numel: int) -> list[torch.Tensor]:
    """Return the pieces of a tensor."""
    flat, end = tensor.view(-1), repeats * numel
    return [*(flat[at : at + numel] for at in range(0, end, numel)), flat[end:]]


def _through(step: VerifiedStep, message: Message) -> VerifiedRun:
    """Run one operation of the library."""
    if (gate := step.gate(message)) is not None:
        yield gate
    yield step.start(message)


def derived(signature: Signature, kind: str, **changes: object) -> Signature:
    """Return the signature of a step, which contains the operation's, so that libraries keep steps apart."""
    fields: dict[str, object] = {
        "kind": kind, "nbytes": None, "reduce_op": None, "root": None, "algorithm": None, "parts": None,
        "key": None, "call": signature.as_call(), "counts_agreed": True,
    }  # fmt: skip
    if kind.endswith("_v"):
        fields["shape"] = ()
    return signature.replace(**{**fields, **changes})
