"""Compute the bytes sent by a compressed operation before it is bound."""

from __future__ import annotations

from mcr_plus.compression.codec import Codec, PayloadCodec
from mcr_plus.compression.schemes import AdditiveRounds, GatherReduce, NativeScheme, TwoShot, scheme_of
from mcr_plus.core.kinds import collective
from mcr_plus.core.message import Signature


def payload_bytes(codec: Codec, signature: Signature) -> int | None:
    """Return the payload bytes of all values of an operation; the maximum if the codec's rate is not fixed.

    Returns None for vector kinds.
    """
    if signature.nbytes is None or signature.dtype is None:
        return None
    if isinstance(codec, PayloadCodec):
        return codec.wire_nbytes(signature.nbytes // signature.dtype.itemsize, signature.dtype)
    rounds = codec.rounds(signature.parts or (signature.shape,), signature.ranks)
    return sum(reduction.numel * reduction.dtype.itemsize for reduction in rounds)


def as_all_reduces(codec: Codec, signature: Signature) -> tuple[int, int]:
    """Return the number of operations that replace an all_reduce, and the bytes of equivalent all_reduces.

    By the convention of `Signature.nbytes`, an all_gather of payloads from n ranks, or an exchange of their
    parts, moves as much as an all_reduce of half the bytes.
    """
    chosen, nbytes = scheme_of(codec, signature), wire_bytes(codec, signature)
    assert nbytes is not None
    if chosen is AdditiveRounds:
        return len(codec.rounds(signature.parts or (signature.shape,), signature.ranks)), nbytes
    return (2 if chosen is TwoShot else 1), (nbytes if chosen is NativeScheme else nbytes // 2)


def wire_bytes(codec: Codec, signature: Signature) -> int | None:
    """Return the bytes that a rank passes to libraries for one call, by the convention of `Signature.nbytes`.

    Returns None for vector kinds.
    """
    if signature.nbytes is None or signature.dtype is None:
        return None
    numel, ranks = signature.nbytes // signature.dtype.itemsize, signature.ranks
    chosen = scheme_of(codec, signature)
    if chosen is AdditiveRounds:
        return payload_bytes(codec, signature)
    assert isinstance(codec, PayloadCodec)
    if chosen is TwoShot:
        alignment = 1 if signature.kind == "reduce_scatter" else codec.traits.alignment
        chunk = -(-numel // (ranks * alignment)) * alignment
        return codec.wire_nbytes(chunk) * ranks * (1 if signature.kind == "reduce_scatter" else 2)
    if chosen is GatherReduce:
        return codec.wire_nbytes(numel) * ranks
    row = collective(signature.kind)
    parts = ranks if row.is_shared and not row.reduces else 1
    return codec.wire_nbytes(numel // parts, signature.dtype) * parts
