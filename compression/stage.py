"""compress: rewrites an operation into one on encoded values, which flows on like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from mcr_plus import registry
from mcr_plus.config import CompressOptions, stage_options
from mcr_plus.dispatch.work import Work
from mcr_plus.errors import ConfigError, InvalidArgument, Unsupported
from mcr_plus.interfaces import Codec, Context, Issue, Next
from mcr_plus.message import REDUCING, Message, Signature, dtype_name

_SUMS = ("SUM", "AVG")


class CompressStage:
    """Chooses a codec by, in this order: the call's `compress=`, a rule, the stage's own option.

    A codec asked for by the call that cannot take the dtype or reduce op is an error; one that comes from
    the configuration leaves such operations as they are, and says so.
    """

    def __init__(self, options: CompressOptions, context: Context) -> None:  # noqa: ARG002 - a Stage
        self._options = options

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Bind to the operation on encoded values, or to the operation itself."""
        wanted = signature.compress
        plain = signature.replace(compress=None)
        options = self._options if wanted is None else _wanted(signature)
        name = options.codec
        if name == "none":
            if wanted is not None:
                next.note("off, by the call")
            return next(plain)
        if signature.ranks == 1:
            next.note(f"codec {name} not used: a group of one rank sends nothing")
            return next(plain)
        codec = _codec(options)
        reason = _refusal(codec, signature)
        if reason is None:
            next.note(
                f"codec {name}: {dtype_name(signature.dtype)} travels as {dtype_name(codec.wire_dtype)}"
            )
            return _encoded(codec, plain, next)
        if wanted is not None:
            raise Unsupported(f"compress={wanted!r} on {plain.describe()}: {reason}")
        next.note(f"codec {name} not used: {reason}")
        return next(plain)


def _wanted(signature: Signature) -> CompressOptions:
    """Check what the call asked for as if a configuration had."""
    wanted = signature.compress
    data: dict[str, Any]
    if isinstance(wanted, tuple):
        data = dict(wanted)
        if "codec" not in data:
            raise InvalidArgument(f"{signature.kind}: compress={data}: no codec; expected the key 'codec'")
    else:
        data = {"codec": wanted or "none"}
    try:
        return cast("CompressOptions", stage_options("compress", data, name=signature.kind))
    except ConfigError as error:
        raise InvalidArgument(str(error)) from None


def _codec(options: CompressOptions) -> Codec:
    entry: Any = registry.get("codecs", options.codec)
    if (declared := getattr(entry, "Options", None)) is not None:
        entry = entry(declared() if options.codec_options is None else options.codec_options)
    return cast("Codec", entry)


def _refusal(codec: Codec, signature: Signature) -> str | None:
    if signature.dtype not in codec.dtypes:
        return f"codec {codec.name} takes {', '.join(map(dtype_name, codec.dtypes))}"
    if signature.kind in REDUCING and signature.reduce_op not in _SUMS:
        return f"codec {codec.name} allows the reduce ops {', '.join(_SUMS)}"
    return None


def _encoded(codec: Codec, signature: Signature, next: Next) -> Issue:
    assert signature.dtype is not None
    nbytes = (
        None if signature.nbytes is None else _scaled(signature.nbytes, signature.dtype, codec.wire_dtype)
    )
    inner = signature.replace(dtype=codec.wire_dtype, nbytes=nbytes)
    divide = signature.reduce_op == "AVG"
    if divide:
        # The mean is taken before the sum: fp16 would overflow at a fraction of the range otherwise.
        inner = inner.replace(reduce_op="SUM")
    issue = next(inner)
    ranks, name = signature.ranks, codec.name

    def run(message: Message) -> Work:
        sources = tuple(torch.empty_like(tensor, dtype=codec.wire_dtype) for tensor in message.inputs)
        in_place = {id(tensor): source for tensor, source in zip(message.inputs, sources, strict=True)}
        targets = tuple(
            in_place[id(tensor)]
            if id(tensor) in in_place
            else torch.empty_like(tensor, dtype=codec.wire_dtype)
            for tensor in message.outputs
        )
        rest = {
            key: value
            for key, value in vars(message).items()
            if key not in ("signature", "inputs", "outputs")
        }
        earlier: Callable[[], None] | None = rest.pop("prepare", None)
        values = message.inputs

        def prepare() -> None:
            if earlier is not None:
                earlier()
            for tensor, payload in zip(values, sources, strict=True):
                codec.encode(tensor / ranks if divide else tensor, payload)

        rest.setdefault("origin", message.own_bytes() if signature.nbytes is None else signature.nbytes)
        encoded = Message(inner, sources, targets, **rest, codec=name, prepare=prepare)
        outputs = message.outputs

        def decode() -> None:
            for payload, tensor in zip(targets, outputs, strict=True):
                codec.decode(payload, tensor)

        return issue(encoded).then(decode)

    return run


def _scaled(nbytes: int, wide: torch.dtype, narrow: torch.dtype) -> int:
    return nbytes // wide.itemsize * narrow.itemsize
