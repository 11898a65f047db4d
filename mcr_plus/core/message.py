"""One communication operation as plain data: the data to move, without the method."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict, cast

import torch

from mcr_plus.core.kinds import MESSAGES, VECTOR, Kind, ReduceOp, Sums, dtype_name

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from mcr_plus.core.work import Work


_SIZES_TEXT: Final = 24  # characters

Codec = str | tuple[tuple[str, object], ...]
"""A codec override: a name, or sorted (key, value) pairs of name and options."""


def frozen(options: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """Return a call's `compress` mapping in the form of signatures: hashable, sorted by key."""
    return tuple(sorted((key, _hashable(value)) for key, value in options.items()))


def thawed(pairs: tuple[tuple[str, object], ...]) -> dict[str, object]:
    """Return the mapping from which `frozen` made `pairs`."""
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
    """Return the tensor sizes of a bucket for people and for comparison: `4+8`, shortened if many."""
    sizes = list(numels)
    text = "+".join(map(str, sizes))
    if len(text) <= _SIZES_TEXT:
        return text
    return f"{len(sizes)} tensors ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"


class Signature(NamedTuple):
    """Properties of an operation that all ranks of a group share; decisions may read nothing else.

    `shape` is the shape of the tensor each rank passes, without dim 0 for vector collectives, whose
    sizes differ between ranks. `nbytes` is the payload in bytes by the convention of nccl-tests (the
    larger of a rank's input and output), or None for vector collectives. `root` is a group rank, and
    `root_in_job` the same rank in the job, for texts (None if the numbers are the same).
    `backend` is the caller's choice (`name` or `name:algorithm`) until the select stage splits it into
    `backend` and `algorithm`. `parts` are the shapes of the contiguous tensors in a bucket, and `key`
    identifies the bucket, for codecs with state between calls; both are None outside a model's buckets.
    `encoding` names the codec and options of values that are already encoded. `call` describes the call from
    which a stage derived this operation: ranks compare their programs' calls, because, for example, a sum and
    a mean of encoded values are the same on the wire. `counts_agreed`: counts of a vector collective follow
    from `call`: ranks have compared them already and do not compare them in every call. `sums`: the order of
    additions, also of steps that only move; None if it is the library's, or does not matter.
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
    sums: Sums | None = None

    def replace(self, **changes: object) -> Self:
        """Return the signature with some fields changed; stages describe their operations this way."""
        return self._replace(**changes)  # type: ignore[arg-type]

    @property
    def choice(self) -> str:
        """The backend, with the algorithm if one is named: `msccl:ring`; empty before the choice."""
        return ":".join(name for name in (self.backend, self.algorithm) if name)

    @property
    def adds_in_order(self) -> bool:
        """True if the operation adds in an order that `sums` names, and is not a step of one that does."""
        return self.sums is not None and self.reduce_op is not None

    @property
    def is_p2p(self) -> bool:
        """True if only two ranks take part."""
        return self.kind in MESSAGES

    def describe(self) -> str:
        """Describe the operation in one line, for people and the board: `all_reduce SUM float32[4] tag=mlp`.

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
        for name in ("tag", "key", "encoding", "backend", "algorithm", "compress", "sums"):
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
        """Return the `call` of the operations that a stage derives from this one.

        It contains only facts on which ranks must agree: neither the library nor `async_op`. None for sends
        and receives, which peers match by tag.
        """
        if self.is_p2p:
            return None
        plain = self.replace(backend=None, algorithm=None, compress=None, encoding=None, async_op=False)
        sizes = "" if self.parts is None else f" of {bucket_text(map(math.prod, self.parts))}"
        codec = "" if self.encoding is None else f" compressed with {self.encoding.partition(':')[0]}"
        return plain.describe() + sizes + codec

    def digest(self) -> int:
        """Return 32 bits that are equal on ranks with equal signatures (never Python's salted `hash`)."""
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
    """One operation in the pipeline: the shared signature and this rank's part.

    Tensors are contiguous and flat sizes fit the signature; `outputs` are the inputs themselves when the
    op works in place. They stay referenced until the op is done; do not touch them before.

    Attributes:
        inputs, outputs: empty on ranks that pass none (non-root ranks of gather and scatter).
        input_counts, output_counts: elements per rank, for vector collectives.
        peer, match_tag: source or destination group rank (None: any source) and integer tag of send/recv.
        after: the op starts only once this is done; the calling thread does not wait for it.
        prepare: local work run just before the op starts, once `after` is done.
        fused: how many members were packed into this op.
        counts_known: counts are given when the op is issued, so that ranks can compare them.
        values: `flows` of the values before encoding; ranks compare them instead of the encoded sizes.
        already_bucketed: the op is a bucket already and must not wait for fusion.
        codec: name of the codec that encoded the payload, for records.
        uncompressed_bytes: bytes before encoding, for records; None when not encoded.
        released_bytes: `own_bytes` of tensors that have been released.
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

    # Slots for the fields that every message sets; rarely set fields have class-level defaults.
    __slots__ = ("__dict__", "inputs", "outputs", "signature")

    def __init__(
        self,
        signature: Signature,
        inputs: tuple[torch.Tensor, ...] = (),
        outputs: tuple[torch.Tensor, ...] = (),
        **extras: Unpack[Extras],
    ) -> None:
        """Create a message; raise `TypeError` on an unknown extra."""
        self.signature = signature
        self.inputs = inputs
        self.outputs = outputs
        if extras:
            if not extras.keys() <= _EXTRAS:
                raise TypeError(f"a message has no {', '.join(sorted(extras.keys() - _EXTRAS))}")
            self.__dict__.update(extras)

    @property
    def extras(self) -> Extras:
        """Return a copy of the extra fields that differ from their defaults."""
        return cast("Extras", vars(self).copy())

    def with_tensors(
        self,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        signature: Signature | None = None,
        **changes: Unpack[Extras],
    ) -> Message:
        """Return the same message for other tensors, with some extras changed."""
        extras = self.extras
        extras.update(changes)
        return Message(signature or self.signature, inputs, outputs, **extras)

    @property
    def compares_counts(self) -> bool:
        """True if ranks compare the counts of a vector collective: known at issue, and not agreed yet."""
        signature = self.signature
        known = self.counts_known or self.values is not None
        return signature.kind in VECTOR and known and not signature.counts_agreed

    def flows(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the elements that rank `rank` of the group sends to and expects from each other rank.

        For vector collectives.
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
        """Return the flows that must match the flows of the other ranks."""
        return self.flows(rank) if self.values is None else self.values

    def own_bytes(self) -> int:
        """Return the larger of the bytes sent and received here; valid after the tensors are released."""
        sent, received = (sum(tensor.nbytes for tensor in part) for part in (self.inputs, self.outputs))
        return max(sent, received, self.released_bytes)
