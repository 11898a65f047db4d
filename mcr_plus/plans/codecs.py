"""Codecs of a plan's transfers and sums, and their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from mcr_plus.compression.codec import PayloadCodec
from mcr_plus.compression.options import codec_of
from mcr_plus.compression.policy import options_from_call, refusal_of_any_shape
from mcr_plus.compression.scheme_bytes import as_all_reduces, wire_bytes
from mcr_plus.compression.schemes import GatherReduce, scheme_of
from mcr_plus.compression.stage import prepare
from mcr_plus.config.document import parse_document
from mcr_plus.config.options import stage_options
from mcr_plus.core.message import Signature, frozen, thawed
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.plan import keeps_replicas
from mcr_plus.layout.program import programs
from mcr_plus.layout.regions import Ints, as_ints

if TYPE_CHECKING:
    from mcr_plus.core.kinds import Kind, ReduceOp, Sums
    from mcr_plus.plans.proof import ProvedPlan

_VALUES: Final = 1 << 18  # to measure a codec

CodecChoice = str | Mapping[str, object]
"""A codec as in `compress=`."""


class TransferCodec(NamedTuple):
    """A codec of transfers, and seconds to encode and to decode a value, measured in this process."""

    codec: PayloadCodec
    itemsize: int
    encode: float
    decode: float

    def wire(self, nbytes: int) -> int:
        """Return the bytes of a payload for `nbytes` bytes of values."""
        return self.codec.wire_nbytes(-(-nbytes // self.itemsize))


def parse_codec(text: str) -> CodecChoice:
    """Return a codec by its name, or by YAML with its options: `{codec: topk, ratio: 0.1}`.

    Raises:
        ConfigError: the text is no mapping; the codec is unknown, or its options are.
    """
    data = parse_document(text, "codec", Path(), versioned=False).data if text.startswith("{") else text
    stage_options("compress", {"codec": data} if isinstance(data, str) else data, name="codec")
    return data


def payload_codec(choice: CodecChoice, dtype: str, sums: Sums | None = None) -> PayloadCodec:
    """Return a codec for transfers of a dtype; for sums of gradients, if the order of additions is given.

    Raises:
        InvalidArgument: it is unknown, or its options are; it does not take the dtype, or its payloads have
            no fixed size.
    """
    compress = frozen(choice) if isinstance(choice, Mapping) else choice
    kind: Kind = "all_to_all_v" if sums is None else "all_reduce"
    op: ReduceOp | None = None if sums is None else "SUM"
    what = Signature(
        kind, getattr(torch, dtype), (), None, "plan", 2, reduce_op=op, tag="plan", compress=compress,
        sums=sums,
    )  # fmt: skip
    options = options_from_call(what)
    codec = None if options.codec == "none" else codec_of(options)
    reason = None if codec is None else refusal_of_any_shape(codec, options, what)
    if not isinstance(codec, PayloadCodec) or not codec.traits.fixed_rate or reason is not None:
        why = reason or "its payloads have no fixed size"
        raise InvalidArgument(f"codec {choice!r}, of a plan: {why}; expected one such as int8_block")
    return codec


@lru_cache(maxsize=1024)
def _lossy(made: Layout, needed: Layout, nodes: tuple[int, ...] | None) -> list[bool]:
    hosts = None if nodes is None else as_ints(nodes)
    if hosts is not None and len(np.unique(hosts[[*made.ranks, *needed.ranks]])) == 1:
        hosts = None
    found = programs(made, needed, 4, hosts)
    return [each.native is None for each in found if keeps_replicas(each)]


def can_encode(choice: CodecChoice, made: Layout, needed: Layout, nodes: Ints | None) -> bool:
    """Return whether a transfer can use a codec: replicas must stay equal, and feedback needs messages.

    `nodes`: of each rank of the job; None if there is one.
    """
    found = _lossy(made, needed, None if nodes is None else tuple(nodes.tolist()))
    return all(found) and bool(found) if is_fed_back(choice) else bool(found)


def check_codecs(proved: ProvedPlan, nodes: Ints | None) -> None:
    """Raise `Unsupported` if a transfer cannot use the codec that a plan names; see `can_encode`."""
    plan = proved.plan
    for each in proved.transfers if plan.codecs else ():
        codec = plan.codecs.get(each.tensor)
        if codec and not can_encode(codec, each.made, each.needed, nodes):
            name, what = plan.blocks[each.tensor - 1].name, "gradient" if each.gradient else "output"
            raise Unsupported(
                f"{name}: codec {codec!r}: replicas of its {what} would differ, or it goes to ranks by a "
                "collective without feedback"
            )


def compressed_sum(choice: CodecChoice, kind: Kind, nbytes: int, ranks: int) -> tuple[int, float]:
    """Return what a sum of gradients takes with a codec.

    Returns the bytes of an uncompressed sum of that kind that takes as long, and the seconds of a rank to
    encode and decode.
    """
    codec = transfer_codec(choice, "float32", "fast")
    what = Signature(kind, torch.float32, (nbytes // 4,), nbytes, "plan", ranks, reduce_op="SUM")
    wire = wire_bytes(codec.codec, what) if kind != "all_reduce" else as_all_reduces(codec.codec, what)[1]
    assert wire is not None
    decodes = ranks if scheme_of(codec.codec, what) is GatherReduce else 2
    return wire, nbytes / codec.itemsize * (codec.encode + decodes * codec.decode)


def is_fed_back(choice: CodecChoice | None) -> bool:
    """Return whether a codec keeps what it loses, for the next values."""
    kept = ("error_feedback", "momentum_correction", "ef21")
    return isinstance(choice, Mapping) and any(choice.get(name) for name in kept)


def transfer_codec(choice: CodecChoice, dtype: str, sums: Sums | None = None) -> TransferCodec:
    """Return a codec with its times. Arguments and errors are those of `payload_codec`."""
    return _measured(frozen(choice) if isinstance(choice, Mapping) else choice, dtype, sums)


@cache
def _measured(compress: str | tuple[tuple[str, object], ...], dtype: str, sums: Sums | None) -> TransferCodec:
    codec = payload_codec(thawed(compress) if isinstance(compress, tuple) else compress, dtype, sums)
    values = torch.linspace(-1.0, 1.0, _VALUES, dtype=getattr(torch, dtype), device="cpu")
    prepare(codec, values.dtype)
    wire = torch.empty(codec.wire_numel(_VALUES), dtype=codec.wire_dtype, device="cpu")
    seconds = (_seconds(lambda: codec.encode(values, wire)), _seconds(lambda: codec.decode(wire, values)))
    return TransferCodec(codec, values.itemsize, *seconds)


def _seconds(run: Callable[[], object]) -> float:
    """Return the least seconds of a value."""
    best = float("inf")
    for _ in range(3):
        begin = perf_counter()
        run()
        best = min(best, perf_counter() - begin)
    return best / _VALUES
