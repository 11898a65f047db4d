"""Which compression an operation gets, for those who must know before the compress stage sees it."""

from __future__ import annotations

from typing import Any, cast

from mcr_plus.compression.codec import Codec
from mcr_plus.config import CompressOptions, Config, codec_of, stage_options
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.message import Signature, dtype_name, thawed


def asked_for(signature: Signature) -> CompressOptions:
    """What a call's `compress=` says, checked as if a configuration had said it."""
    wanted = signature.compress
    data: dict[str, Any] = thawed(wanted) if isinstance(wanted, tuple) else {"codec": wanted or "none"}
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
