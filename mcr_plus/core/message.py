"""One communication operation as plain data: the data to move, never the method."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict, cast

import torch

from mcr_plus.core.kinds import MESSAGES, VECTOR, Kind, ReduceOp, dtype_name

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from mcr_plus.core.work import Work


_SIZES_TEXT: Final = 24  # characters

Codec = str | tuple[tuple[str, object], ...]
"""A codec override: a name, or sorted (key, value) pairs of name and options."""


def frozen(options: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """A call's `compress` mapping as signatures hold it: hashable, sorted by key."""
    return tuple(sorted((key, _hashable(value)) for key, value in options.items()))


def thawed(pairs: tuple[tuple[str, object], ...]) -> dict[str, object]:
    """The mapping that `frozen` has made hashable."""
    return {key: _mutable(value) for key, value in pairs}


def _hashable(value: object) -> object:
    if isinstance(value, Mapping):
        return ("mapping", *frozen(value))
    return ("list", *map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _mutable(value: object) -> object:
    if not isinstance(value, tuple):
        return value
    return thawed(value[1:]) if value[0] == "mapping" else [_mutable(each) for each in value[1:]]


def bucket_text(numels: Iterable[int]) -> str:
    """The sizes of the tensors in a bucket, for people and for comparison: `4+8`, short for many."""
    sizes = list(numels)
    text = "+".join(map(str, sizes))
    if len(text) <= _SIZES_TEXT:
        return text
    return f"{len(sizes)} tensors ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"


class Signature(NamedTuple):
    """Everything all ranks of a group share about an operation; the only thing a decision may read.

    `shape` is the shape of the tensor each rank passes, without dim 0 for vector collectives, whose
    sizes differ between ranks. `nbytes` is the payload in bytes by the convention of nccl-tests (the
    larger of a rank's input and output), or None for vector collectives. `root` is a group rank, and
    `root_in_job` the same rank in the job, for texts (None where no other numbering exists).
    `backend` is the caller's choice (`name` or `name:algorithm`) until the select stage splits it into
    `backend` and `algorithm`. `parts` are the shapes of the tensors that lie end to end in a bucket, and
    `key` identifies the bucket, for codecs with state between calls; both are None for operations on
    anything but a model's buckets. `encoding` names the codec and options of values that are encoded
    already. `call` describes the call that a stage derived this operation from: ranks compare their
    programs' calls, because a sum and a mean of encoded values, for one, are the same on the wire.
    `counts_agreed`: of a vector collective whose counts follow from `call`: ranks have compared them already,
    so they are not compared in every call.
    """

    kind: Kind
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    nbytes: int | None
    group: str
    ranks: int
    device: str = "cpu"
    reduce_op: ReduceOp | None = None
    root: int | None = None
    tag: str | None = None
    backend: str | None = None
    compress: Codec | bool | None = None
    async_op: bool = False
    algorithm: str | None = None
    parts: tuple[tuple[int, ...], ...] | None = None
    key: str | None = None
    encoding: str | None = None
    call: str | None = None
    counts_agreed: bool = False
    root_in_job: int | None = None

    def replace(self, **changes: object) -> Self:
        """The same signature with some fields changed: a stage describes the operation it issues by this."""
        return self._replace(**changes)  # type: ignore[arg-type]

    @property
    def choice(self) -> str:
        """The backend, with the algorithm if one is named: `msccl:ring`; empty before one is chosen."""
        return ":".join(name for name in (self.backend, self.algorithm) if name)

    @property
    def is_p2p(self) -> bool:
        """Whether only two ranks take part."""
        return self.kind in MESSAGES

    def describe(self) -> str:
        """One line for people and for the board: `all_reduce SUM float32[4] tag=mlp`.

        An operation derived by a stage: `broadcast float32[8] as scatter float32[4] root=0`, or
        `all_reduce SUM float32[8] compressed with bf16 as all_reduce SUM bfloat16[8]`.
        """
        parts: list[str] = [self.kind] if self.call is None else [self.call, "as", self.kind]
        if self.reduce_op:
            parts.append(self.reduce_op)
        if self.dtype is not None:
            dims = ",".join(map(str, self.shape))
            parts.append(f"{dtype_name(self.dtype)}[{'*,' * (self.kind in VECTOR)}{dims}]".replace(",]", "]"))
        if self.root is not None:
            parts.append(f"root={self.root if self.root_in_job is None else self.root_in_job}")
        for name in ("tag", "key", "encoding", "backend", "algorithm", "compress"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name}={value}")
        if self.device != "cpu":
            parts.append(self.device)
        # Encoded values always travel asynchronously, also for a synchronous call.
        if self.async_op and (self.call is None or self.encoding is None):
            parts.append("async")
        return " ".join(parts)

    def as_call(self) -> str | None:
        """The `call` of the operations that a stage derives from this one.

        It contains only facts that ranks must agree on: neither the library nor `async_op`. None for sends
        and receives, which peers match by tag.
        """
        if self.is_p2p:
            return None
        plain = self.replace(backend=None, algorithm=None, compress=None, encoding=None, async_op=False)
        sizes = "" if self.parts is None else f" of {bucket_text(map(math.prod, self.parts))}"
        codec = "" if self.encoding is None else f" compressed with {self.encoding.partition(':')[0]}"
        return plain.describe() + sizes + codec

    def digest(self) -> int:
        """32 bits that are equal on ranks with equal signatures (never Python's salted `hash`)."""
        data = repr(tuple(self)).encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big")


class Extras(TypedDict, total=False):
    """Optional fields of a message besides its signature and tensors; `Message` describes each."""

    input_counts: tuple[int, ...] | None
    output_counts: tuple[int, ...] | None
    peer: int | None
    match_tag: int
    after: Work | None
    prepare: Callable[[], None] | None
    fused: int
    already_bucketed: bool
    counts_known: bool
    values: tuple[Sequence[int], Sequence[int]] | None
    codec: str | None
    uncompressed_bytes: int | None
    released_bytes: int


_EXTRAS: Final = frozenset(Extras.__annotations__)


class Message:
    """One operation on its way through the pipeline: the shared signature and this rank's own part.

    Tensors are contiguous and flat sizes fit the signature; `outputs` are the inputs themselves when the
    op works in place. They stay referenced until the op is done and must not be touched before that.

    Attributes:
        inputs, outputs: empty on ranks that pass none (non-root ranks of gather and scatter).
        input_counts, output_counts: elements per rank, for vector collectives.
        peer, match_tag: source or destination group rank (None: any source) and integer tag of send/recv.
        after: the op starts only once this is done; the calling thread does not wait for it.
        prepare: local work run just before the op starts, once `after` is done.
        fused: how many members were packed into this op.
        counts_known: whether counts are given when the op is issued, so that ranks can compare them.
        values: `flows` of the values before they were encoded, which ranks compare in place of these.
        already_bucketed: it is a bucket already, and must not wait for others to be fused with.
        codec: name of the codec that encoded the payload, for records.
        uncompressed_bytes: bytes before encoding, for records; None when not encoded.
        released_bytes: `own_bytes` of tensors that have been let go.
    """

    # Defaults of the fields of `Extras`.
    input_counts: tuple[int, ...] | None = None
    output_counts: tuple[int, ...] | None = None
    peer: int | None = None
    match_tag: int = 0
    after: Work | None = None
    prepare: Callable[[], None] | None = None
    fused: int = 1
    already_bucketed: bool = False
    counts_known: bool = True
    values: tuple[Sequence[int], Sequence[int]] | None = None
    codec: str | None = None
    uncompressed_bytes: int | None = None
    released_bytes: int = 0

    # Slots for the fields of every message; the rest has its defaults on the class, and is rarely set.
    __slots__ = ("__dict__", "inputs", "outputs", "signature")

    def __init__(
        self,
        signature: Signature,
        inputs: tuple[torch.Tensor, ...] = (),
        outputs: tuple[torch.Tensor, ...] = (),
        **extras: Unpack[Extras],
    ) -> None:
        """Raises `TypeError` for an extra of an unknown name."""
        self.signature = signature
        self.inputs = inputs
        self.outputs = outputs
        if extras:
            if not extras.keys() <= _EXTRAS:
                raise TypeError(f"a message has no {', '.join(sorted(extras.keys() - _EXTRAS))}")
            self.__dict__.update(extras)

    @property
    def extras(self) -> Extras:
        """A copy of the fields besides its signature and tensors that are not at their defaults."""
        return cast("Extras", vars(self).copy())

    def with_tensors(
        self,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        signature: Signature | None = None,
        **changes: Unpack[Extras],
    ) -> Message:
        """The same message for other tensors, with some extras changed."""
        extras = self.extras
        extras.update(changes)
        return Message(signature or self.signature, inputs, outputs, **extras)

    @property
    def compares_counts(self) -> bool:
        """Whether ranks compare counts: those of a vector collective, given at its issue, not agreed yet."""
        signature = self.signature
        known = self.counts_known or self.values is not None
        return signature.kind in VECTOR and known and not signature.counts_agreed

    def flows(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """Elements that this rank, number `rank` of its group, sends to and expects from each of the others.

        Of a vector collective.
        """
        signature, size = self.signature, self.signature.ranks
        none = [0] * size
        sent, expected = self.input_counts or none, self.output_counts or none
        mine = sum(tensor.numel() for tensor in self.inputs)
        if signature.kind == "all_gather_v":
            sent = [mine] * size
        elif signature.kind == "gather_v":
            sent = [mine if peer == signature.root else 0 for peer in range(size)]
        elif signature.kind == "reduce_scatter_v":
            expected = [sent[rank]] * size
        elif signature.kind == "scatter_v":
            mine = sum(tensor.numel() for tensor in self.outputs)
            expected = [mine if peer == signature.root else 0 for peer in range(size)]
        return sent, expected

    def compared_flows(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """The flows that must fit those of the other ranks."""
        return self.flows(rank) if self.values is None else self.values

    def own_bytes(self) -> int:
        """The larger of the bytes that this rank sends and receives; kept once the tensors are released."""
        sent, received = (sum(tensor.nbytes for tensor in part) for part in (self.inputs, self.outputs))
        return max(sent, received, self.released_bytes)
