"""How an operation is made of a codec's payloads: the compositions, chosen by the codec's traits.

    native      elementwise codecs: the library works on encoded values
    exchanged   other additive codecs: the library sums in rounds what the codec makes of the values
    moved       values that arrive as they were sent: encode, move, decode
    two_shot    reductions: parts to the rank that sums them in float32, and the sums, encoded again, back
    summed      everyone gathers all payloads and adds them up: sparse codecs, and where it sends no more

Everybody decodes the same bytes, the owner of a part and the root of a broadcast too, so that all ranks
have the same bits. Only what goes into a sum on the rank that has it is not encoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import torch

from mcr_plus.compression.codec import Codec, PayloadCodec
from mcr_plus.compression.memory import Memory
from mcr_plus.compression.pool import Loan, Pool
from mcr_plus.compression.transport import MOVED, Transport, plain_kind
from mcr_plus.dispatch.work import JointWork, Work
from mcr_plus.interfaces import Issue, Next
from mcr_plus.message import VECTOR, Message, Signature, dtype_name

Remember = Callable[[torch.device, int], Memory]
"""The memory of the operation, made when the first call tells where its values are, and how many."""

_BACK: Final = {"all_reduce": "all_gather", "reduce": "gather"}  # how sums get to those who want them
_OWN: Final = ("inputs", "outputs", "signature", "prepare", "after", "input_counts", "output_counts")


class Composition(ABC):
    """What all compositions know: the codec, and the operation as it was asked for."""

    def __init__(self, codec: Codec, signature: Signature, rank: int, remember: Remember, pool: Pool) -> None:
        self.codec, self.signature, self.rank = codec, signature, rank
        self.ranks = signature.ranks
        self.scale = 1 / signature.ranks if signature.reduce_op == "AVG" else 1.0
        self._remember, self._pool = remember, pool
        self._memory: Memory | None = None

    @property
    @abstractmethod
    def says(self) -> str:
        """What becomes of the operation, for people."""

    @abstractmethod
    def bind(self, next: Next) -> Issue:
        """Bind the operations that it is made of; returns what starts one call."""

    # -- for subclasses ---------------------------------------------------------------------------

    @property
    def payloads(self) -> PayloadCodec:
        """The codec, for compositions of payloads."""
        assert isinstance(self.codec, PayloadCodec)
        return self.codec

    @property
    def numel(self) -> int:
        """Values in the payload of the operation, by the convention of `Signature.nbytes`."""
        assert self.signature.nbytes is not None
        assert self.signature.dtype is not None
        return self.signature.nbytes // self.signature.dtype.itemsize

    def transport(self, kind: str, numel: int | None, next: Next) -> Transport:
        """What moves payloads of `numel` values by operations of `kind`."""
        return Transport(kind, self.signature, numel, self.payloads, self.rank, next)

    def memory(self, like: torch.Tensor, numel: int) -> Memory:
        """What earlier calls have left."""
        if self._memory is None:
            self._memory = self._remember(like.device, numel)
        return self._memory

    def begin(self, message: Message) -> tuple[Loan, dict[str, Any]]:
        """Where to borrow space for a call, and what its messages say beside tensors."""
        rest = {key: value for key, value in vars(message).items() if key not in _OWN}
        rest.setdefault(
            "origin", message.own_bytes() if self.signature.nbytes is None else self.signature.nbytes
        )
        rest["codec"] = self.codec.name
        if self.signature.kind in VECTOR:
            rest["values"] = message.flows(self.rank)
        return self._pool.lend(torch.device(self.signature.device)), rest

    def following(self, message: Message, memory: Memory) -> Work | None:
        """What a call must wait for before it begins.

        Where a call starts from the result of the one before it, ranks would start from different ones
        if that were a matter of time.
        """
        last = memory.last if memory.one_at_a_time else None
        if last is None or message.after is None:
            return message.after or last
        return JointWork([message.after, last], self.signature.kind, nbytes=0)

    def handle(self, works: Sequence[Work], rest: Mapping[str, Any]) -> Work:
        """One handle for the operations of a call."""
        if self._memory is not None and self._memory.one_at_a_time:
            self._memory.last = works[-1]
        if len(works) == 1:
            return works[0]
        kind, tag, codec = self.signature.kind, self.signature.tag, self.codec
        legs = isinstance(codec, PayloadCodec)  # other codecs' rounds move different things
        return JointWork(works, kind, nbytes=rest["origin"], tag=tag, codec=codec.name, legs=legs)


class Native(Composition):
    """Elementwise codecs: the same operation on encoded values."""

    @property
    def says(self) -> str:  # noqa: D102
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
            # The mean is taken before the sum: fp16 would overflow at a fraction of the range otherwise.
            self._inner = self._inner.replace(reduce_op="SUM")
        self._issue = next(self._inner)
        return self.issue

    def issue(self, message: Message) -> Work:  # noqa: D102
        loan, rest = self.begin(message)
        dtype, scale = self.payloads.wire_dtype, self.scale
        spaces = {id(t): loan.tensor(t.numel(), dtype) for t in (*message.inputs, *message.outputs)}
        first = (*message.inputs, *message.outputs)[0]
        memory = self.memory(first, first.numel())
        earlier = message.prepare

        def encode() -> None:
            if earlier is not None:
                earlier()
            for tensor in message_inputs:
                memory.send(tensor.view(-1), 0, spaces[id(tensor)], scale)

        def decode() -> None:
            for tensor in message_outputs:
                memory.receive(spaces[id(tensor)], 0, tensor.view(-1))

        message_inputs, message_outputs = message.inputs, message.outputs
        encoded = Message(
            self._inner,
            tuple(spaces[id(tensor)] for tensor in message.inputs),
            tuple(spaces[id(tensor)] for tensor in message.outputs),
            **rest,
            **{k: v for k in ("input_counts", "output_counts") if (v := getattr(message, k)) is not None},
            after=self.following(message, memory),
            prepare=encode,
        )
        return self.handle([self._issue(encoded).then(loan.then_back(decode))], rest)


class Exchanged(Composition):
    """Additive codecs that are not elementwise: native all_reduces of what they make of the values."""

    @property
    def says(self) -> str:  # noqa: D102
        rounds = self.codec.rounds(self._shapes, self.ranks)
        return "all_reduce of " + " and ".join(f"{each.numel} × {dtype_name(each.dtype)}" for each in rounds)

    def bind(self, next: Next) -> Issue:  # noqa: D102
        signature, rounds = self.signature, self.codec.rounds(self._shapes, self.ranks)
        self._rounds = rounds
        like = signature.replace(parts=None, key=None)
        self._signatures = [
            like.replace(
                dtype=each.dtype,
                shape=(each.numel,),
                nbytes=each.numel * each.dtype.itemsize,
                reduce_op=each.op,
            )
            for each in rounds
        ]
        self._issues = [next(wanted) for wanted in self._signatures]
        return self.issue

    @property
    def _shapes(self) -> Sequence[tuple[int, ...]]:
        return self.signature.parts or (self.signature.shape,)

    def issue(self, message: Message) -> Work:  # noqa: D102
        loan, rest = self.begin(message)
        values = message.outputs[0].view(-1)
        if message.inputs[0] is not message.outputs[0]:
            values.copy_(message.inputs[0].view(-1))
        wires = [loan.tensor(each.numel, each.dtype) for each in self._rounds]
        memory = self.memory(values, values.numel())
        memory.one_at_a_time = True
        earlier = message.prepare
        program: Iterator[None] = iter(())

        def begin() -> None:
            nonlocal program
            if earlier is not None:
                earlier()
            left = memory.offer(values)
            program = self.codec.exchange(values, self._shapes, wires, self.ranks, left)
            next(program)

        def go_on() -> None:
            next(program)

        def end() -> None:
            next(program, None)
            if self.scale != 1.0:
                values.mul_(self.scale)

        works: list[Work] = []
        after, prepare = self.following(message, memory), begin
        for signature, issue, wire in zip(self._signatures, self._issues, wires, strict=True):
            step = Message(signature, (wire,), (wire,), **rest, after=after, prepare=prepare)
            works.append(issue(step))
            after, prepare = works[-1], go_on
        works[-1].then(loan.then_back(end))
        return self.handle(works, rest)


class Moved(Composition):
    """Kinds whose values arrive as they were sent."""

    @property
    def says(self) -> str:  # noqa: D102
        return "encoded, moved, decoded"

    def bind(self, next: Next) -> Issue:  # noqa: D102
        kind, vector = self.signature.kind, self.signature.kind in VECTOR
        parts = self.ranks if kind in ("all_gather", "gather", "scatter", "all_to_all") else 1
        self._transport = self.transport(kind, None if vector else self.numel // parts, next)
        return self.issue

    def issue(self, message: Message) -> Work:  # noqa: D102
        loan, rest = self.begin(message)
        sources, given = _parts(message.inputs, message.input_counts, self._many(message.inputs, sends=True))
        targets, taken = _parts(message.outputs, message.output_counts, self._many(message.outputs))
        memory = self.memory((*message.inputs, *message.outputs)[0], 0)

        def write(index: int, wire: torch.Tensor) -> int:
            return memory.send(sources[index], 0, wire)

        sent = self._transport.send(
            write, loan, rest, before=message.prepare, after=message.after, given=given, taken=taken
        )

        def decode() -> None:
            for wire, target in zip(sent.received, targets, strict=True):
                memory.receive(wire, 0, target)

        sent.works[-1].then(loan.then_back(decode))
        return self.handle(sent.works, rest)

    def _many(self, tensors: Sequence[torch.Tensor], *, sends: bool = False) -> int:
        """Into how many parts a rank's input or output falls, where they are equal."""
        kind = plain_kind(self.signature.kind)
        many = ("scatter", "all_to_all") if sends else ("all_gather", "gather", "all_to_all")
        return self.ranks if tensors and kind in many else 1


class TwoShot(Composition):
    """Reductions by codecs whose payloads cannot be summed: parts to their owners, sums back."""

    @property
    def says(self) -> str:  # noqa: D102
        text = "all_to_all of encoded parts, summed in float32"
        back = _BACK.get(self.signature.kind)
        return text if back is None else f"{text}, encoded again, {back}"

    def bind(self, next: Next) -> Issue:  # noqa: D102
        signature, codec = self.signature, self.payloads
        self._back: Transport | None = None
        if signature.kind == "reduce_scatter_v":
            self._chunk = None
        elif signature.kind == "reduce_scatter":
            self._chunk = self.numel // self.ranks
        else:
            alignment = codec.traits.alignment
            self._chunk = -(-self.numel // (self.ranks * alignment)) * alignment
        self._out = self.transport(
            "all_to_all" if self._chunk is not None else "all_to_all_v", self._chunk, next
        )
        if signature.kind in _BACK:
            self._back = self.transport(_BACK[signature.kind], self._chunk, next)
        return self.issue

    def issue(self, message: Message) -> Work:  # noqa: D102
        loan, rest = self.begin(message)
        values, me, scale, codec = message.inputs[0].view(-1), self.rank, self.scale, self.payloads
        counts = self._counts(message, values.numel())
        begins = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
        memory = self.memory(values, values.numel())
        mine = values[begins[me] : begins[me] + counts[me]]
        total = loan.tensor(counts[me], torch.float32)

        def write(index: int, wire: torch.Tensor) -> int:
            if index == me or not counts[index]:
                return 0
            at = begins[index]
            return memory.send(values[at : at + counts[index]], at, wire)

        out = self._out.send(
            write,
            loan,
            rest,
            before=message.prepare,
            after=self.following(message, memory),
            given=counts,
            taken=[counts[me]] * self.ranks,
        )
        if self._back is None:
            target = message.outputs[0].view(-1)

            def add() -> None:
                memory.keep(mine, begins[me], total, scale)
                for rank, wire in enumerate(out.received):
                    if rank != me:
                        codec.decode_accumulate(wire, total, scale)
                target.copy_(total)

            out.works[-1].then(loan.then_back(add))
            return self.handle(out.works, rest)

        def encode_sum(_: int, wire: torch.Tensor) -> int:
            memory.keep(mine, begins[me], total, scale)
            return memory.reduce(out.received, total, wire, skip=me, scale=scale)

        back = self._back.send(encode_sum, loan, rest, after=out.works[-1])
        result = message.outputs[0].view(-1)

        def decode() -> None:
            for wire, at, count in zip(back.received, begins, counts, strict=False):
                if count:
                    memory.receive(wire, at, result[at : at + count])

        back.works[-1].then(loan.then_back(decode))
        return self.handle([*out.works, *back.works], rest)

    def _counts(self, message: Message, numel: int) -> Sequence[int]:
        """How many of the values each rank sums."""
        chunk = self._chunk
        if chunk is None:
            assert message.input_counts is not None
            return message.input_counts
        return [max(0, min(chunk, numel - rank * chunk)) for rank in range(self.ranks)]


class Summed(Composition):
    """all_reduce and reduce of whole payloads: all of them to everyone, or to the root."""

    @property
    def says(self) -> str:  # noqa: D102
        return f"{_BACK[self.signature.kind]} of payloads, added up in the order of the ranks"

    def bind(self, next: Next) -> Issue:  # noqa: D102
        self._transport = self.transport(_BACK[self.signature.kind], self.numel, next)
        return self.issue

    def issue(self, message: Message) -> Work:  # noqa: D102
        loan, rest = self.begin(message)
        values, out = message.inputs[0].view(-1), message.outputs[0].view(-1)
        memory = self.memory(values, values.numel())

        def write(_: int, wire: torch.Tensor) -> int:
            return memory.send(values, 0, wire)

        after = self.following(message, memory)
        sent = self._transport.send(write, loan, rest, before=message.prepare, after=after)
        total = out if out.dtype is torch.float32 else loan.tensor(out.numel(), torch.float32)

        def add() -> None:
            if out.numel():  # none on ranks that are not the root
                memory.gathered(sent.received, total, out, self.scale)

        sent.works[-1].then(loan.then_back(add))
        return self.handle(sent.works, rest)


def composition(codec: Codec, signature: Signature) -> type[Composition]:
    """The composition for an operation that the codec does not refuse."""
    traits = codec.traits
    if traits.additive:
        return Native if traits.elementwise else Exchanged
    if signature.kind in MOVED:
        return Moved
    # Two ranks send as much in one shot as in two, wait once and not twice, and encode no sum.
    one_shot = traits.sparse or signature.ranks == 2
    return Summed if one_shot and signature.kind in _BACK else TwoShot


def payload_bytes(codec: Codec, signature: Signature) -> int | None:
    """Bytes that all values of an operation become; at most, if the codec's rate is not fixed.

    None for vector kinds.
    """
    if signature.nbytes is None or signature.dtype is None:
        return None
    if isinstance(codec, PayloadCodec):
        return codec.wire_nbytes(signature.nbytes // signature.dtype.itemsize)
    rounds = codec.rounds(signature.parts or (signature.shape,), signature.ranks)
    return sum(each.numel * each.dtype.itemsize for each in rounds)


def wire_bytes(codec: Codec, signature: Signature) -> int | None:
    """Bytes that a rank hands to libraries for one call, by the convention of `Signature.nbytes`.

    None for vector kinds.
    """
    if signature.nbytes is None or signature.dtype is None:
        return None
    numel, ranks = signature.nbytes // signature.dtype.itemsize, signature.ranks
    chosen = composition(codec, signature)
    if chosen is Exchanged:
        return payload_bytes(codec, signature)
    assert isinstance(codec, PayloadCodec)
    if chosen is TwoShot:
        alignment = 1 if signature.kind == "reduce_scatter" else codec.traits.alignment
        chunk = -(-numel // (ranks * alignment)) * alignment
        return codec.wire_nbytes(chunk) * ranks * (1 if signature.kind == "reduce_scatter" else 2)
    if chosen is Summed:
        return codec.wire_nbytes(numel) * ranks
    parts = ranks if signature.kind in ("all_gather", "gather", "scatter", "all_to_all") else 1
    return codec.wire_nbytes(numel // parts) * parts


def _parts(
    tensors: Sequence[torch.Tensor], counts: Sequence[int] | None, many: int
) -> tuple[list[torch.Tensor], list[int]]:
    """The parts of a rank's input or output, and how many values each has."""
    if not tensors:
        return [], []
    flat = tensors[0].view(-1)
    sizes = list(counts) if counts else [flat.numel() // many] * many
    return list(flat.split(sizes)), sizes
