"""Determine the compression of an operation before the compress stage binds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

from mcr_plus.compression.codec import ENCODED, Codec
from mcr_plus.compression.options import CompressOptions, codec_of
from mcr_plus.config.names import kind_matches
from mcr_plus.config.options import stage_options
from mcr_plus.config.schema import Config, Rule
from mcr_plus.core.kinds import REDUCING, VECTOR, dtype_name
from mcr_plus.core.message import Signature, thawed
from mcr_plus.errors import ConfigError, InvalidArgument

_SUMS = ("SUM", "AVG")
_FED_BACK = {
    "error_feedback": ("all_reduce", "reduce", "reduce_scatter", "send", "recv"),
    "ef21": ("all_reduce",),
    "momentum_correction": ("all_reduce",),
}


def options_from_call(signature: Signature) -> CompressOptions:
    """Return the checked options of a call's `compress=`. Raises `InvalidArgument` for invalid options."""
    compress = signature.compress
    data: dict[str, Any] = (
        thawed(compress)
        if isinstance(compress, tuple)
        else {"codec": "none" if compress is False else compress}
    )
    if "codec" not in data:
        raise InvalidArgument(f"{signature.kind}: compress={data}: no codec; expected the key 'codec'")
    try:
        return cast("CompressOptions", stage_options("compress", data, name=signature.kind))
    except ConfigError as error:
        raise InvalidArgument(str(error)) from None


def resolve_options(config: Config, signature: Signature) -> CompressOptions | None:
    """Return the options for an operation from the call, a rule or the stage; None without compression."""
    stage = config.options("compress")
    if stage is None:
        return None
    if signature.compress is not None:
        options = options_from_call(signature)
    else:
        dtype, ranks = dtype_name(signature.dtype), signature.ranks
        rule = config.rule_for(signature.kind, signature.nbytes, dtype, signature.tag, ranks=ranks)
        options = cast("CompressOptions", config.options("compress", rule))
    return None if options.codec == "none" else options


def refusal(codec: Codec, options: CompressOptions, signature: Signature) -> str | None:
    """Return the reason why an operation cannot be compressed; None if it can."""
    reason = refusal_of_any_shape(codec, options, signature)
    if reason is not None or signature.kind in VECTOR:
        return reason
    return codec.refusal(signature.parts or (signature.shape,))


def refusal_of_any_shape(codec: Codec, options: CompressOptions, signature: Signature) -> str | None:
    """Return the reason why such operations cannot be compressed in any shape; None if they can."""
    traits, kind = codec.traits, signature.kind
    if kind not in ENCODED:
        return f"{kind} has no compressed form"
    if signature.dtype not in traits.dtypes:
        known = ", ".join(map(dtype_name, traits.dtypes))
        return f"codec {codec.name} takes {known}, not {dtype_name(signature.dtype)}"
    if traits.cpu_only and signature.device != "cpu":
        return f"codec {codec.name} is for tensors on the CPU"
    if traits.needs_triton and signature.device != "cpu" and not _has_triton():
        return f"kernels of codec {codec.name} for GPUs need Triton; pip install 'mcr_plus[gpu]' installs it"
    if traits.kinds is not None and kind not in traits.kinds:
        return f"codec {codec.name} is for {', '.join(sorted(traits.kinds))}"
    if signature.is_p2p and not (traits.fixed_rate or traits.keeps_received):
        return f"payloads of codec {codec.name} differ in length, so a receiver cannot size its buffer"
    if kind in REDUCING and (reason := _refused_sum(codec, signature)):
        return reason
    # Messages are identified by peer and integer tag, so they need no name.
    if traits.keeps_received and not signature.is_p2p and signature.key is None and signature.tag is None:
        return f"codec {codec.name} needs the tensor's identity from call to call; expected tag="
    feedback = options.feedback
    if feedback is not None:
        # Tokens of experts differ from call to call, so a rule for gradients must not apply to them.
        named = kind == "all_to_all_v" and signature.compress is not None and feedback == "error_feedback"
        if kind not in _FED_BACK[feedback] and not named:
            return f"{feedback} is for {', '.join(_FED_BACK[feedback])}"
        if not signature.is_p2p and signature.key is None and signature.tag is None:
            return f"{feedback} needs the tensor's identity from call to call; expected tag="
    return None


def _refused_sum(codec: Codec, signature: Signature) -> str:
    if signature.reduce_op not in _SUMS:
        return f"codec {codec.name} allows the reduce ops {', '.join(_SUMS)}"
    if signature.sums == "exact":
        why = "adds in float32" if codec.traits.lossless else "changes the values"
        return f"codec {codec.name} {why}; the sum is to be exact (`sums: exact`)"
    return ""


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def is_stateful(codec: Codec, options: CompressOptions) -> bool:
    """Return True if the result of a call depends on earlier calls of the same operation."""
    traits = codec.traits
    own = traits.keeps_received or (traits.additive and not traits.elementwise)
    return options.feedback is not None or own


def gradient_compression(
    config: Config, param: str, nbytes: int, dtype: str, tag: str, ranks: int
) -> tuple[Rule | None, CompressOptions | None]:
    """Return the rule for the gradient of a parameter, and its compression.

    A rule with a `param` glob uses the gradient's size. Other rules use the bucket's size, which is not known
    yet and is taken as large. The compression is None if the pipeline lacks the stage.
    """
    sizes = (None if rule.match.param is None else nbytes for rule in config.rules)
    covering = (
        rule
        for rule, size in zip(config.rules, sizes, strict=True)
        if rule.match.covers("all_reduce", size, dtype, tag, param, ranks)
    )
    rule = next(covering, None)
    options = config.options("compress", rule)
    return rule, options if isinstance(options, CompressOptions) else None


def cautions(config: Config) -> list[str]:
    """Return known losses of quality for the codecs that a configuration sets for gradients.

    This includes codecs of steps between nodes. Rules that cannot match gradients of `mcr.wrap`, such as
    rules for the tag `outer.*`, are ignored.
    """
    stages = [
        (f"{spec.place}: pipeline[{at}].{spec.name}", spec.name, spec.options)
        for at, spec in enumerate(config.pipeline)
    ]
    for rule in config.rules:
        anywhere = rule.match.model_copy(update=dict.fromkeys(("param", "bytes", "dtype", "ranks")))
        if anywhere.covers("all_reduce", None, "float32", "gradients"):
            stages += [(rule.place, override.stage, override.options) for override in rule.overrides]
    found = []
    for place, name, options in stages:
        inter = getattr(options, "inter", None) if name == "hierarchical" else None
        used = options if inter is None else inter.compress
        if isinstance(used, CompressOptions) and used.codec != "none":
            caution = codec_of(used).caution(used.feedback)
            found += [f"{place}: codec {used.codec}: {caution}"] if caution else []
    return found


def unusable(config: Config) -> list[str]:
    """Return the rules whose codec supports none of the kinds of operations in the rule."""
    found = []
    for rule in config.rules:
        for override in rule.overrides:
            options = override.options
            if not isinstance(options, CompressOptions) or options.codec == "none" or not rule.match.kind:
                continue
            kinds = codec_of(options).traits.kinds
            if kinds is not None and not any(
                kind_matches(pattern, kind) for pattern in rule.match.kind for kind in kinds
            ):
                known, named = ", ".join(sorted(kinds)), ", ".join(rule.match.kind)
                found.append(
                    f"{rule.place}: codec {options.codec} is for {known}, so it is never used for {named}"
                )
    return found


def largest_alignment(config: Config, others: Sequence[str] = ()) -> int:
    """Return the largest block, in values, of the codecs in a configuration; tensors are aligned to it.

    `others`: names of further codecs.
    """
    codecs = [options for options in config.all_options if isinstance(options, CompressOptions)]
    codecs += [CompressOptions(codec=name) for name in others]
    return math.lcm(*(codec_of(each).traits.alignment for each in codecs if each.codec != "none"))
