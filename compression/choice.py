"""Which compression an operation gets, for those who must know before the compress stage sees it."""

from __future__ import annotations

from typing import Any, cast

from mcr_plus.compression.codec import Codec
from mcr_plus.config import (
    CompressOptions,
    Config,
    HierarchicalOptions,
    codec_of,
    plain_options,
    stage_options,
)
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.message import REDUCING, VECTOR, Signature, dtype_name, frozen, thawed

NOT_CHOSEN = (("codec", "none"),)
"""`compress` of a bucket for whose operations nobody chose a codec; for the hierarchical stage's own."""

_SUMS = ("SUM", "AVG")
_FED_BACK = {
    "error_feedback": ("all_reduce", "reduce", "reduce_scatter"),
    "ef21": ("all_reduce",),
    "momentum_correction": ("all_reduce",),
}


def asked_for(signature: Signature) -> CompressOptions:
    """What a call's `compress=` says, checked as if a configuration had said it."""
    wanted = signature.compress
    data: dict[str, Any] = (
        thawed(wanted) if isinstance(wanted, tuple) else {"codec": "none" if wanted is False else wanted}
    )
    if "codec" not in data:
        raise InvalidArgument(f"{signature.kind}: compress={data}: no codec; expected the key 'codec'")
    try:
        return cast("CompressOptions", stage_options("compress", data, name=signature.kind))
    except ConfigError as error:
        raise InvalidArgument(str(error)) from None


def chosen(config: Config, signature: Signature) -> CompressOptions | None:
    """The options for an operation: of the call, a rule, or the stage; None if nothing is compressed."""
    stage = config.options("compress")
    if stage is None:
        return None
    if signature.compress is not None:
        options = asked_for(signature)
    else:
        dtype, ranks = dtype_name(signature.dtype), signature.ranks
        rule = config.rule_for(signature.kind, signature.nbytes, dtype, signature.tag, ranks=ranks)
        options = cast("CompressOptions", config.options("compress", rule))
    return None if options.codec == "none" else options


def between_nodes(config: Config, signature: Signature) -> CompressOptions | None:
    """The codec that the hierarchical stage has for its step between nodes; None if it has none."""
    dtype, ranks = dtype_name(signature.dtype), signature.ranks
    rule = config.rule_for(signature.kind, signature.nbytes, dtype, signature.tag, ranks=ranks)
    return codec_between(config.options("hierarchical", rule))


def codec_between(options: object) -> CompressOptions | None:
    """The codec in the options of the hierarchical stage."""
    compress = options.inter.compress if isinstance(options, HierarchicalOptions) else None
    return None if compress is None or compress.codec == "none" else compress


def refusal(codec: Codec, options: CompressOptions, signature: Signature) -> str | None:
    """Why an operation cannot be compressed; None if it can."""
    traits, kind = codec.traits, signature.kind
    if signature.dtype not in traits.dtypes:
        return f"codec {codec.name} takes {', '.join(map(dtype_name, traits.dtypes))}"
    if traits.kinds is not None and kind not in traits.kinds:
        return f"codec {codec.name} is for {', '.join(sorted(traits.kinds))}"
    if signature.is_p2p and not traits.fixed_rate:
        return f"payloads of codec {codec.name} differ in length, which a receiver must know beforehand"
    if kind in REDUCING and signature.reduce_op not in _SUMS:
        return f"codec {codec.name} allows the reduce ops {', '.join(_SUMS)}"
    feedback = options.feedback
    if feedback is not None:
        if kind not in _FED_BACK[feedback]:
            return f"{feedback} is for {', '.join(_FED_BACK[feedback])}"
        if signature.key is None and signature.tag is None:
            return f"{feedback} must know which tensor it is, call by call; expected tag="
    return None if kind in VECTOR else codec.refusal(signature.parts or (signature.shape,))


def in_a_bucket(config: Config, signature: Signature) -> str | tuple[tuple[str, object], ...] | bool | None:
    """What a fused operation passes as `compress`, decided for it by itself and not for its bucket."""
    if signature.compress is not None or config.options("compress") is None:
        return signature.compress
    options = chosen(config, signature)
    if options is None and between_nodes(config, signature) is not None:
        return NOT_CHOSEN
    if options is None or refusal(codec_of(options), options, signature) is not None:
        return False
    if options.exempt is not None and (signature.nbytes or 0) < options.exempt.below:
        return False
    return frozen(plain_options(options))


def keeps_something(codec: Codec, options: CompressOptions) -> bool:
    """Whether what a call does depends on earlier calls of the same operation."""
    return options.feedback is not None or (codec.traits.additive and not codec.traits.elementwise)


def alignment(config: Config, signature: Signature) -> int:
    """Values in a block of any codec that operations like this one may get, whatever their size."""
    if signature.compress is False or signature.dtype is None or not signature.dtype.is_floating_point:
        return 1
    if signature.compress is None:
        return config.alignment
    options = chosen(config, signature)
    return 1 if options is None else codec_of(options).traits.alignment
