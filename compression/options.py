"""Options of the stage `compress`, and the codec named in them."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny

from mcr_plus import registry
from mcr_plus.config.document import Document, Keys, Mistakes, mapping_at
from mcr_plus.config.options import (
    Bytes,
    NoOptions,
    Scope,
    StageOptions,
    as_tuple,
    declared_options,
    options_marked,
    validate,
)
from mcr_plus.core.units import parse_count
from mcr_plus.errors import short, unknown

if TYPE_CHECKING:
    from mcr_plus.compression.codec import Codec


class ErrorFeedbackOptions(StageOptions):
    """Options of `error_feedback`. `decay`: factor applied to a residual before it is used again."""

    decay: Annotated[float, Field(gt=0, le=1)] = 1.0


class MomentumOptions(StageOptions):
    """Options of `momentum_correction`. `momentum`: the momentum that the optimizer would have used."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9


class ExemptOptions(StageOptions):
    """Operations that are sent uncompressed although a codec is set.

    `params`: globs of parameter names. `max_ndim`: parameters with at most this number of dimensions are
    exempt; 1 covers biases and norms. `below`: operations and gradients with fewer bytes are exempt.
    """

    params: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
    max_ndim: Annotated[int, Field(ge=0)] | None = None
    below: Bytes = 0

    def covers(self, param: str, ndim: int, nbytes: int) -> bool:
        """Return True if the gradient of a parameter is exempt."""
        named = any(fnmatchcase(param, glob) for glob in self.params)
        return named or nbytes < self.below or (self.max_ndim is not None and ndim <= self.max_ndim)


def _switch(value: object) -> object:
    """Accept `true` (defaults) or `false` (off) instead of options."""
    if value is None or isinstance(value, (bool, Mapping, BaseModel)):
        return {} if value is True else None if value is False else value
    raise ValueError(f"expected true, false or a mapping of options, got {short(value)}")


class CompressOptions(StageOptions):
    """Options of `compress`: the name of a codec; the codec's own options are at the same level of the file.

    `error_feedback`, `ef21`, `momentum_correction`: compensation of the compression error, at most one.
    `warmup`: the number of first calls of an operation sent uncompressed. `exempt`: operations that are
    always sent uncompressed. `never_slower`: True to measure the gain of the codec in a few calls, and omit
    the codec while it is slower. `audit_every`: compare the ranks' results every n calls.

    Each option is marked `Scope.WIRE` or `Scope.LOCAL`: ranks compare the options that change payloads.
    """

    codec: Annotated[str, Scope.WIRE] = "none"
    codec_options: Annotated[SerializeAsAny[BaseModel] | None, Scope.WIRE] = None
    error_feedback: Annotated[ErrorFeedbackOptions | None, BeforeValidator(_switch), Scope.WIRE] = None
    ef21: Annotated[bool, Scope.WIRE] = False
    momentum_correction: Annotated[MomentumOptions | None, BeforeValidator(_switch), Scope.WIRE] = None
    warmup: Annotated[int, BeforeValidator(parse_count), Field(ge=0), Scope.LOCAL] = 0
    exempt: Annotated[ExemptOptions | None, Scope.LOCAL] = None
    never_slower: Annotated[bool, Scope.LOCAL] = False
    audit_every: Annotated[Annotated[int, Field(gt=0)] | None, Scope.LOCAL] = None

    @classmethod
    def read(cls, document: Document, keys: Keys, base: Mapping[str, Any]) -> CompressOptions:
        """Read the options of the stage and of the codec from one mapping, see `StageOptions.read`."""
        given = mapping_at(document, keys, example="{codec: int8_block}")
        return checked_compression(given, document, keys, base)

    def plain(self, *, units: bool = False) -> dict[str, Any]:
        """Return the non-default options and the codec's options, see `StageOptions.plain`."""
        data = super().plain(units=units)
        for name in WRAPPERS:
            if data[name] == type(self).model_fields[name].default:
                del data[name]
        return data | (data.pop("codec_options") or {})

    @property
    def feedback(self) -> str | None:
        """Name of the wrapper that compensates the compression error, if any."""
        named = ("error_feedback", "ef21", "momentum_correction")
        return next((name for name in named if getattr(self, name)), None)


FEEDBACKS = ("error_feedback", "ef21", "momentum_correction")


LOCAL = options_marked(CompressOptions, Scope.LOCAL)
"""Options of `compress` that may differ between ranks in a call."""


WRAPPERS = tuple(name for name in CompressOptions.model_fields if name not in ("codec", "codec_options"))


def codec_names() -> tuple[str, ...]:
    """Return the valid names in `compress: {codec: ...}`, sorted, including `none`."""
    return tuple(sorted({"none", *registry.names("codecs")}))


def _impossible(options: CompressOptions) -> str | None:
    """Return the reason why these options of `compress` exclude each other; None if they are compatible."""
    named = [name for name in FEEDBACKS if getattr(options, name)]
    if len(named) > 1:
        return f"{' and '.join(named)} exclude each other; expected one of them"
    if named and options.codec == "none":
        return f"{named[0]} without a codec; expected a codec beside it"
    if options.momentum_correction and (options.warmup or options.never_slower):
        other = "warmup" if options.warmup else "never_slower"
        return f"momentum_correction and {other} exclude each other: uncompressed calls have another scale"
    if options.ef21:
        traits = codec_of(options).traits
        if traits.additive and not traits.elementwise:
            return f"ef21 with codec {options.codec!r}, which the library sums; expected error_feedback"
    if options.ef21 and options.never_slower:
        return "ef21 and never_slower exclude each other: ef21 cannot leave out calls"
    if options.momentum_correction:
        traits = codec_of(options).traits
        if traits.additive or not traits.sparse:
            return f"momentum_correction with codec {options.codec!r}; known: topk, which sends the largest"
    return None


def codec_of(options: CompressOptions) -> Codec:
    """Return a new codec object with its options."""
    factory: Any = registry.get("codecs", options.codec)
    return cast("Codec", factory(options.codec_options or factory.Options()))


def _preset(written: Mapping[str, Any], codec: str, document: Document, keys: Keys) -> Mapping[str, Any]:
    """Return the options set by a codec's preset, without error compensation if `written` names one."""
    name, keys = written["preset"], (*keys, "preset")
    presets: Mapping[str, Mapping[str, Any]] = {}
    if codec != "none":
        presets = getattr(registry.get("codecs", codec), "presets", presets)
    if not presets:
        raise document.error(keys, f"codec {codec!r} has no presets; expected its options")
    if not isinstance(name, str) or name not in presets:
        raise document.error(keys, unknown("preset", name, tuple(sorted(presets))))
    feeds_back = any(written.get(key) for key in FEEDBACKS)
    return {key: value for key, value in presets[name].items() if not (feeds_back and key in FEEDBACKS)}


def checked_compression(
    written: Mapping[str, Any], document: Document, keys: Keys, base: Mapping[str, Any]
) -> CompressOptions:
    """Check the options of a codec and of the stage, written in one mapping.

    `written`: the mapping at `keys` of `document`, which overrides `base`. A codec `preset` in it sets
    several options; other options override the preset. Raises `ConfigError` with all mistakes.
    """
    data = {**base, **written}
    codec = data.get("codec", "none")
    if not isinstance(codec, str) or codec not in codec_names():
        raise document.error((*keys, "codec"), unknown("codec", codec, codec_names()))
    if codec != base.get("codec", codec):
        # The options and error feedback of the base codec do not apply to another codec.
        base = {key: base[key] for key in WRAPPERS if key in base and key not in FEEDBACKS}
        data = {**base, **written}
    if "preset" in written:
        data = {**base, **_preset(written, codec, document, keys), **written}
        del data["preset"]
    own = {key: value for key, value in data.items() if key in WRAPPERS}
    rest = {key: value for key, value in data.items() if key not in ("codec", *WRAPPERS)}
    none = codec == "none"
    model = NoOptions if none else declared_options("codecs", codec, document, (*keys, "codec"))
    mistakes = Mistakes()
    beside = ("codec", *WRAPPERS)
    options = mistakes.collect(lambda: validate(model, rest, document, keys, beside=beside), None)
    wrappers = mistakes.collect(lambda: validate(CompressOptions, own, document, keys), CompressOptions())
    mistakes.raise_all()
    checked = wrappers.model_copy(
        update={"codec": codec, "codec_options": options if model.model_fields else None}
    )
    if (reason := _impossible(checked)) is not None:
        raise document.error(keys, reason)
    return checked
