"""Schemes that compose an operation from a codec's payloads, chosen by the codec's traits.

    Native           elementwise codecs: the same operation on encoded values
    AdditiveRounds   other additive codecs: native all_reduces of the codec's rounds
    Relay            operations without a reduction: encode, move, decode
    TwoShot          reductions: each rank sums a part in float32; sums are encoded again and sent back
    GatherReduce     reductions in one shot: every rank, or the root, gathers all payloads and adds them up;
                     for sparse codecs, and if it sends no more than TwoShot

All ranks decode the same bytes, including the rank that sums a part and the root of a broadcast, so that
results are equal bit for bit. A rank's own part of a sum is not encoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import torch

from mcr_plus.compression.codec import MOVED, Codec, PayloadCodec
from mcr_plus.compression.payloads import PayloadExchange
from mcr_plus.compression.state import CompressorState
from mcr_plus.core.buffers import Lease, Pool
from mcr_plus.core.kinds import VECTOR, collective, dtype_name
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import JointWork, Work
from mcr_plus.errors import BackendError
from mcr_plus.pipeline.stage import Issue, Next

MakeState = Callable[[torch.device, int], CompressorState]
"""Function from a device and a number of values, set by the first call, to the operation's state."""

_BACK: Final = {"all_reduce": "all_gather", "reduce": "gather"}  # operation that distributes the sums
_OWN: Final = ("inputs", "outputs", "signature", "prepare", "after", "input_counts", "output_counts")


class Scheme(ABC):
    """Composes a compressed operation (`signature`, as issued by the program) from other operations."""

    def __init__(
        self, codec: Codec, signature: Signature, rank: int, make_state: MakeState, pool: Pool
    ) -> None:
        self.codec, self.signature, self.rank = codec, signature, rank
        self.ranks = signature.ranks
        self.scale = 1 / signature.ranks if signature.reduce_op == "AVG" else 1.0
        self._make_state, self._pool = make_state, pool
        self._state: CompressorState | None = None

    @property
    @abstractmethod
    def description(self) -> str:
        """Description of the operation's steps, for `explain`."""

    @abstractmethod
    def bind(self, next: Next) -> Issue:
        """Bind the operations of the scheme."""

    # -- for subclasses ---------------------------------------------------------------------------

    @property
    def payloads(self) -> PayloadCodec:
        """Codec of a scheme that moves payloads."""
        assert isinstance(self.codec, PayloadCodec)
        return self.codec

    @property
    def numel(self) -> int:
        """Number of values in the operation's payload, by the convention of `Signature.nbytes`."""
        assert self.signature.nbytes is not None
        assert self.signature.dtype is not None
        return self.signature.nbytes // self.signature.dtype.itemsize

    def exchange(self, kind: str, numel: int | None, next: Next) -> PayloadExchange:
        """Bind the operations of `kind` that move payloads of `numel` values."""
        return PayloadExchange(kind, self.signature, numel, self.payloads, self.rank, next)

    def state(self, like: torch.Tensor, numel: int) -> CompressorState:
        """Return the operation's state; the first call creates it, for `numel` values on `like`'s device."""
        if self._state is None:
            self._state = self._make_state(like.device, numel)
        return self._state

    def begin(self, message: Message) -> tuple[Lease, dict[str, Any]]:
        """Return buffers for a call, and the fields of its messages besides tensors."""
        rest = {key: value for key, value in vars(message).items() if key not in _OWN}
        nbytes = self.signature.nbytes
        rest.setdefault("uncompressed_bytes", message.own_bytes() if nbytes is None else nbytes)
        rest["codec"] = self.codec.name
        if self.signature.kind in VECTOR:
            rest["values"] = message.flows(self.rank)
        return self._pool.lease(torch.device(self.signature.device)), rest

    def _channel(self, message: Message) -> int | None:
        """Return a number of a message's peer and tag; None for collectives."""
        return None if message.peer is None else message.match_tag * self.ranks + message.peer

    def following(self, message: Message, state: CompressorState) -> Work | None:
        """Return the work that must be complete before a call begins; None if the call may begin at once.

        A call that starts from the previous call's result waits for that call, on all ranks.
        """
        last = state.last if state.one_at_a_time else None
        if last is None or message.after is None:
            return message.after or last
        return JointWork([message.after, last], self.signature.kind, nbytes=0)

    def handle(self, works: Sequence[Work], rest: Mapping[str, Any]) -> Work:
        """Return one handle for the operations of a call."""
        if self._state is not None and self._state.one_at_a_time:
            self._state.last = works[-1]
        if len(works) == 1:
            return works[0]
        kind, tag, codec = self.signature.kind, self.signature.tag, self.codec
        legs = isinstance(codec, PayloadCodec)  # rounds of other codecs are not steps of one payload
        return JointWork(works, kind, nbytes=rest["uncompressed_bytes"], tag=tag, codec=codec.name, legs=legs)


class NativeScheme(Scheme):
    """Scheme of elementwise codecs: the same operation on encoded values."""

    @property
    def description(self) -> str:  # noqa: D102
        return f"{dtype_name(self.signature.dtype)} travels as {dtype_name(self.payloads.wire_dtype)}"

    def bind(self, next: Next) -> Issue:  # noqa: D102
        codec, signature = self.payloads, self.signature
        dtype = codec.wire_dtype
        assert signature.dtype is not None
        nbytes = signature.nbytes
        if nbytes is not None:
            nbytes = nbytes // signature.dtype.itemsize * dtype.itemsize
        self._inner = signature.replace(dtype=dtype, nbytes=nbytes, parts=None, key=None)
        if signature.reduce_op == "AVG":
            # Divide before the sum, because a sum in fp16 would overflow at a fraction of the range.
            self._inner = self._inner.replace(reduce_op="SUM")
        self._issue = next(self._inner)
        return Issue(self.start)

    def start(self, message: Message) -> Work:  # noqa: D102
        lease, rest = self.begin(message)
        dtype, scale = self.payloads.wire_dtype, self.scale
        spaces = {id(t): lease.tensor(t.numel(), dtype) for t in (*message.inputs, *message.outputs)}
        first = (*message.inputs, *message.outputs)[0]
        state = self.state(first, 0 if self.signature.is_p2p else first.numel())
        earlier, channel = message.prepare, self._channel(message)

        def encode() -> None:
            if earlier is not None:
                earlier()
            for tensor in message_inputs:
                if channel is None:
                    state.encode(tensor.view(-1), 0, spaces[id(tensor)], scale)
                else:
                    state.encode_part(channel, tensor.view(-1), spaces[id(tensor)])

        def decode() -> None:
            for tensor in message_outputs:
                state.decode(spaces[id(tensor)], 0, tensor.view(-1))

        message_inputs, message_outputs = message.inputs, message.outputs
        encoded = Message(
            self._inner,
            tuple(spaces[id(tensor)] for tensor in message.inputs),
            tuple(spaces[id(tensor)] for tensor in message.outputs),
            **rest,
            **{k: v for k in ("input_counts", "output_counts") if (v := getattr(message, k)) is not None},
            after=self.following(message, state),
            prepare=encode,
        )
        return self.handle([self._issue(encoded).then(lease.release_after(decode))], rest)


class AdditiveRounds(Scheme):
    """Scheme of additive codecs that are not elementwise: native all_reduces of their `rounds`."""

    @property
    def description(self) -> str:  # noqa: D102
        rounds = self.codec.rounds(self._shapes, self.ranks)
        return "all_reduce of " + " and ".join(
            f"{reduction.numel} × {dtype_name(reduction.dtype)}" for reduction in rounds
        )

    def bind(self, next: Next) -> Issue:  # noqa: D102
        signature, rounds = self.signature, self.codec.rounds(self._shapes, self.ranks)
        self._rounds = rounds
        like = signature.replace(parts=None, key=None)
        self._signatures = [
            like.replace(
                dtype=reduction.dtype,
                shape=(reduction.numel,),
                nbytes=reduction.numel * reduction.dtype.itemsize,
                reduce_op=reduction.op,
            )
            for reduction in rounds
        ]
        self._issues = [next(reduction) for reduction in self._signatures]
        return Issue(self.start)

    @property
    def _shapes(self) -> Sequence[tuple[int, ...]]:
        return self.signature.parts or (self.signature.shape,)

    def start(self, message: Message) -> Work:  # noqa: D102
        lease, rest = self.begin(message)
        values = message.outputs[0].view(-1)
        if message.inputs[0] is not message.outputs[0]:
            values.copy_(message.inputs[0].view(-1))
        wires = [lease.tensor(reduction.numel, reduction.dtype) for reduction in self._rounds]
        state = self.state(values, values.numel())
        state.one_at_a_time = True
        earlier = message.prepare
        program: Iterator[None] = iter(())

        def begin() -> None:
            nonlocal program
            if earlier is not None:
                earlier()
            left = state.begin_exchange(values)
            program = self.codec.exchange(values, self._shapes, wires, self.ranks, left)
            next(program)

        def go_on() -> None:
            next(program)

        def end() -> None:
            next(program, None)
            if self.scale != 1.0:
                values.mul_(self.scale)

        works: list[Work] = []
        after, prepare = self.following(message, state), begin
        for signature, issue, wire in zip(self._signatures, self._issues, wires, strict=True):
            step = Message(signature, (wire,), (wire,), **rest, after=after, prepare=prepare)
            works.append(issue(step))
            after, prepare = works[-1], go_on
        works[-1].then(lease.release_after(end))
        return self.handle(works, rest)


class RelayScheme(Scheme):
    """Scheme of operations without a reduction: encode, move, decode."""

    @property
    def description(self) -> str:  # noqa: D102
        return "what changed, moved, applied" if self.keeps else "encoded, moved, decoded"

    @property
    def keeps(self) -> bool:
        """True if both ends keep the received values."""
        return self.codec.traits.keeps_received

    def bind(self, next: Next) -> Issue:  # noqa: D102
        kind, vector = self.signature.kind, self.signature.kind in VECTOR
        parts = self.ranks if collective(kind).is_shared else 1
        self._exchange = self.exchange(kind, None if vector else self.numel // parts, next)
        return Issue(self.start)

    def start(self, message: Message) -> Work:  # noqa: D102
        lease, rest = self.begin(message)
        sources, given = _parts(message.inputs, message.input_counts, self._many(message.inputs, sends=True))
        targets, taken = _parts(message.outputs, message.output_counts, self._many(message.outputs))
        state = self.state((*message.inputs, *message.outputs)[0], 0)

        own, refused, channel = self._own, list[BackendError](), self._channel(message)
        # The root's own part is not needed by other ranks, so it is copied without encoding.
        stays = own if self.keeps and collective(self.signature.kind).divides else None

        def write(index: int, wire: torch.Tensor) -> int:
            if index == stays:
                return 0
            return state.encode_part(index if channel is None else channel, sources[index], wire)

        sent = self._exchange.send(
            write,
            lease,
            rest,
            before=message.prepare,
            after=self.following(message, state),
            given=given,
            taken=taken,
            state=state if self.keeps else None,
        )

        def decode() -> None:
            try:
                if stays is not None:
                    targets[0].copy_(sources[stays])
                    return
                for index, (wire, target) in enumerate(zip(sent.received, targets, strict=True)):
                    state.decode_part(index, wire, target, 0 if index == own and self.keeps else None)
            except BackendError as error:
                if not self.keeps:
                    raise
                refused.append(error)
            finally:
                state.end_call()

        def refuse() -> None:
            if refused:
                raise refused[0]

        sent.works[-1].then(lease.release_after(decode))
        handle = self.handle(sent.works, rest)
        # Only the handle raises the error. The next call, which waits for the last operation of this call,
        # requests all values.
        return handle.then(refuse) if self.keeps else handle

    @property
    def _own(self) -> int | None:
        """Index of the part that this rank sends to itself (for a scatter, among the sent parts), or None."""
        is_root = self.signature.root in (None, self.rank)
        if self.signature.kind == "broadcast":
            return 0 if is_root else None
        return self.rank if is_root else None

    def _many(self, tensors: Sequence[torch.Tensor], *, sends: bool = False) -> int:
        """Return the number of equal parts of a rank's input or output."""
        row = collective(self.signature.kind)
        parts = row.sends if sends else row.receives
        return self.ranks if tensors and parts == "each" else 1


class TwoShot(Scheme):
    """Scheme of reductions in two steps: each rank sums a part, and sums are sent back."""

    @property
    def description(self) -> str:  # noqa: D102
        text = "all_to_all of encoded parts, summed in float32"
        back = _BACK.get(self.signature.kind)
        return text if back is None else f"{text}, encoded again, {back}"

    def bind(self, next: Next) -> Issue:  # noqa: D102
        signature, codec = self.signature, self.payloads
        self._back: PayloadExchange | None = None
        if signature.kind == "reduce_scatter_v":
            self._chunk = None
        elif signature.kind == "reduce_scatter":
            self._chunk = self.numel // self.ranks
        else:
            alignment = codec.traits.alignment
            self._chunk = -(-self.numel // (self.ranks * alignment)) * alignment
        self._out = self.exchange(
            "all_to_all" if self._chunk is not None else "all_to_all_v", self._chunk, next
        )
        if signature.kind in _BACK:
            self._back = self.exchange(_BACK[signature.kind], self._chunk, next)
        return Issue(self.start)

    def start(self, message: Message) -> Work:  # noqa: D102
        lease, rest = self.begin(message)
        values, me, scale, codec = message.inputs[0].view(-1), self.rank, self.scale, self.payloads
        counts = self._counts(message, values.numel())
        begins = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
        state = self.state(values, values.numel())
        mine = values[begins[me] : begins[me] + counts[me]]  # summed here, so never encoded

        def write(index: int, wire: torch.Tensor) -> int:
            if index == me or not counts[index]:
                return 0
            at = begins[index]
            return state.encode(values[at : at + counts[index]], at, wire)

        out = self._out.send(
            write,
            lease,
            rest,
            before=message.prepare,
            after=self.following(message, state),
            given=counts,
            taken=[counts[me]] * self.ranks,
        )
        if self._back is None:  # a reduce_scatter: the sum stays on this rank
            target = message.outputs[0].view(-1)
            in_place = target.dtype is torch.float32
            total = target if in_place else lease.tensor(counts[me], torch.float32)

            def add() -> None:
                state.begin_sum(mine, begins[me], total, scale)
                for rank, wire in enumerate(out.received):
                    if rank != me:
                        codec.decode_accumulate(wire, total, scale)
                if not in_place:
                    target.copy_(total)

            out.works[-1].then(lease.release_after(add))
            return self.handle(out.works, rest)

        # The sum is encoded again and also decoded here, so that results are equal bit for bit.
        total = lease.tensor(counts[me], torch.float32)

        def encode_sum(_: int, wire: torch.Tensor) -> int:
            state.begin_sum(mine, begins[me], total, scale)
            return state.reduce(out.received, total, wire, skip=me, scale=scale)

        back = self._back.send(encode_sum, lease, rest, after=out.works[-1])
        result = message.outputs[0].view(-1)

        def decode() -> None:
            for wire, at, count in zip(back.received, begins, counts, strict=False):
                if count:
                    state.decode(wire, at, result[at : at + count])

        back.works[-1].then(lease.release_after(decode))
        return self.handle([*out.works, *back.works], rest)

    def _counts(self, message: Message, numel: int) -> Sequence[int]:
        """Return the number of values that each rank sums."""
        chunk = self._chunk
        if chunk is None:
            assert message.input_counts is not None
            return message.input_counts
        return [max(0, min(chunk, numel - rank * chunk)) for rank in range(self.ranks)]


class GatherReduce(Scheme):
    """Scheme of all_reduce and reduce in one step: send whole payloads to all ranks, or to the root."""

    @property
    def description(self) -> str:  # noqa: D102
        return f"{_BACK[self.signature.kind]} of payloads, added up in the order of the ranks"

    def bind(self, next: Next) -> Issue:  # noqa: D102
        self._exchange = self.exchange(_BACK[self.signature.kind], self.numel, next)
        return Issue(self.start)

    def start(self, message: Message) -> Work:  # noqa: D102
        lease, rest = self.begin(message)
        values, out = message.inputs[0].view(-1), message.outputs[0].view(-1)
        state = self.state(values, values.numel())

        def write(_: int, wire: torch.Tensor) -> int:
            return state.encode(values, 0, wire)

        after = self.following(message, state)
        sent = self._exchange.send(write, lease, rest, before=message.prepare, after=after)
        total = out if out.dtype is torch.float32 else lease.tensor(out.numel(), torch.float32)

        def add() -> None:
            if out.numel():  # empty on ranks that are not the root
                state.sum_payloads(sent.received, total, out, self.scale)

        sent.works[-1].then(lease.release_after(add))
        return self.handle(sent.works, rest)


def scheme_of(codec: Codec, signature: Signature) -> type[Scheme]:
    """Return the scheme of an operation that the codec supports."""
    traits = codec.traits
    if traits.additive:
        return NativeScheme if traits.elementwise else AdditiveRounds
    if signature.kind in MOVED:
        return RelayScheme
    # With two ranks, one shot sends as much as two shots, waits once instead of twice, and encodes no sum.
    one_shot = traits.sparse or signature.ranks == 2
    return GatherReduce if one_shot and signature.kind in _BACK else TwoShot


def _parts(
    tensors: Sequence[torch.Tensor], counts: Sequence[int] | None, many: int
) -> tuple[list[torch.Tensor], list[int]]:
    """Return the parts of a rank's input or output, and the number of values in each part."""
    if not tensors:
        return [], []
    flat = tensors[0].view(-1)
    sizes = list(counts) if counts else [flat.numel() // many] * many
    return list(flat.split(sizes)), sizes
