"""Options: the models of stages and codecs, and how they are read, written and explained."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
)

from mcr_plus import registry
from mcr_plus.config.document import Document, Keys, dict_document, mapping_at
from mcr_plus.config.names import kind_name
from mcr_plus.core.units import format_size, parse_duration, parse_size
from mcr_plus.errors import Unsupported, short, unknown

if TYPE_CHECKING:
    from typing_extensions import Self

    from mcr_plus.config.schema import TableRef

M = TypeVar("M", bound=BaseModel)


def size_or_none(value: object) -> int | None:
    """Bytes of a size as configurations write it; None for none."""
    return None if value is None else parse_size(value)


def size_text(value: int | None, info: SerializationInfo) -> int | str | None:
    """A size as a number, or with its unit where options are written for people."""
    return format_size(value) if info.context and value is not None else value


def _duration_text(value: float, info: SerializationInfo) -> float | str:
    return f"{value!r}s".replace(".0s", "s") if info.context else value


# With any context they are written with units, as people write them.
Seconds = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(_duration_text)]


Bytes = Annotated[int, BeforeValidator(parse_size), PlainSerializer(size_text)]


BytesOrNone = Annotated[int | None, BeforeValidator(size_or_none), PlainSerializer(size_text)]


@dataclass(frozen=True)
class ReadContext:
    """Where the mapping that a model validates was written."""

    document: Document
    keys: Keys


NOWHERE: Final = dict_document({})


class StageOptions(BaseModel):
    """The options of a stage or of a codec: frozen, unknown keys refused, no conversion between types.

    A stage declares its own as the class attribute `Options`, which may be any pydantic model; one that
    derives from this may also say how it is read, written and checked.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def read(cls, document: Document, keys: Keys, base: Mapping[str, Any]) -> Self:
        """Check the options at `keys` of `document`, which override those of `base`. Raises `ConfigError`."""
        return validate(cls, {**base, **mapping_at(document, keys)}, document, keys)

    def plain(self, *, units: bool = False) -> dict[str, Any]:
        """Return the mapping that these options are read from; see `plain_options`."""
        return self.model_dump(mode="json", by_alias=True, context={"units": True} if units else None)

    def by_content(self) -> dict[str, Any]:
        """Return what ranks compare: as `plain`, with the digests of files in place of their paths."""
        return self.plain()

    def files(self) -> Sequence[TableRef]:
        """Return the files that these options name."""
        return ()

    def problem(
        self,
        stages: Collection[str] | None,  # noqa: ARG002 - for those that override it
        backends: Sequence[str] | None,  # noqa: ARG002
    ) -> tuple[Keys, str] | None:
        """Return what does not go with the rest of the configuration: the keys in these options, and why.

        `stages`: of the pipeline; None where they do not matter. `backends`: None for all that are found.
        """
        return None


def as_tuple(value: object) -> object:
    """A list, or one name, as the tuple that strict validation wants."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


def some_of(known: tuple[str, ...]) -> Callable[[object], tuple[str, ...]]:
    """Kinds out of those known, as a list or one name; none of them in a rule that switches off."""

    def kinds(value: object) -> tuple[str, ...]:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)):
            raise ValueError(f"expected a list of kinds, got {short(value)}; known: {', '.join(known)}")
        for name in names:
            if not isinstance(name, str) or kind_name(name) not in known:
                raise ValueError(unknown("kind", name, known))
        return tuple(dict.fromkeys(kind_name(name) for name in names))

    return kinds


class NoOptions(StageOptions):
    """The model of a stage or codec that declares none: every key is refused."""


def validate(
    model: type[M], data: Mapping[str, Any], document: Document, keys: Keys, beside: tuple[str, ...] = ()
) -> M:
    """Validate `data` with a model; `beside` are further known keys, for the message only."""
    try:
        return model.model_validate(dict(data), context=ReadContext(document, keys))
    except ValidationError as error:
        found = error.errors(include_url=False)
        known = tuple(sorted({*beside, *(f.alias or name for name, f in model.model_fields.items())}))
        strange = [each for each in found if each["type"] == "extra_forbidden"]
        # A key that is misspelt is missing too: say the former.
        others = [
            each for each in found if each not in strange and not (strange and each["type"] == "missing")
        ]
        told: dict[Keys, str] = {}  # of the forms that an option may have, the first one's
        for each in (*strange, *others):
            at: Keys = tuple(each["loc"])
            told.setdefault((*keys, *at), _explain(dict(each), _known(model, at) or known))
        raise document.errors(told.items()) from None


def _known(model: type[BaseModel], at: Keys) -> tuple[str, ...]:
    """The keys of a model inside a model, at whose entry `at` something is wrong; else none."""
    for key in at[:-1]:
        field = model.model_fields.get(str(key))
        inside = [] if field is None else [field.annotation, *get_args(field.annotation)]
        models = [each for each in inside if isinstance(each, type) and issubclass(each, BaseModel)]
        if not models:
            return ()
        model = models[0]
    return tuple(sorted(model.model_fields)) if len(at) > 1 else ()


def _explain(error: Mapping[str, Any], known: tuple[str, ...]) -> str:
    """Phrase a pydantic error as the rest of this module does."""
    value, loc, context = error["input"], error["loc"], error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        return unknown("key", loc[-1], known or ("none, it takes no options",))
    if error["type"] == "literal_error":
        return unknown("value", value, re.findall(r"'([^']*)'", context["expected"]))
    if error["type"] == "value_error":
        return str(context["error"])
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"expected a mapping of options, got {short(value)}; known: {', '.join(known)}"
    if error["type"] == "missing":
        return "missing; expected a value"
    if error["type"] in _EXPECTED:
        return f"expected {_EXPECTED[error['type']].format(**context)}, got {short(value)}"
    return f"{error['msg'].replace('Input should be', 'expected')}, got {short(value)}"


_WHOLE = "a whole number"


_EXPECTED: Final = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "int_from_float": _WHOLE,
    "int_parsing": _WHOLE,
    "int_type": _WHOLE,
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "list_type": "a list",
    "string_too_short": "a text of at least {min_length} characters",
    "string_type": "a text",
    "tuple_type": "a list",
}
"""What pydantic's errors mean in this module's words."""


def stage_options(stage: str, data: Mapping[str, Any], name: str = "<dict>") -> BaseModel:
    """Check the options of one stage, as `compress={"codec": ...}` of a call gives them.

    Raises `ConfigError` that begins with `name`.
    """
    return read_options(stage, dict_document({stage: data}, name), (stage,))


def plain_options(options: BaseModel, *, units: bool = False) -> dict[str, Any]:
    """Write options as the mapping they are read from; JSON-able.

    `units`: sizes and durations as people write them (`25MiB`, `300s`).
    """
    if isinstance(options, StageOptions):
        return options.plain(units=units)
    return options.model_dump(mode="json", by_alias=True)


def options_by_content(options: BaseModel) -> dict[str, Any]:
    """Return what ranks compare of options: see `StageOptions.by_content`."""
    return options.by_content() if isinstance(options, StageOptions) else plain_options(options)


def read_options(
    stage: str, document: Document, keys: Keys, base: Mapping[str, Any] = MappingProxyType({})
) -> BaseModel:
    """Check the options of a stage at `keys`, which override those of `base`."""
    model = declared_options("stages", stage, document, keys)
    if issubclass(model, StageOptions):
        return model.read(document, keys, base)
    return validate(model, {**base, **mapping_at(document, keys)}, document, keys)


def declared_options(kind: str, name: str, document: Document = NOWHERE, keys: Keys = ()) -> type[BaseModel]:
    """Return the pydantic model that a stage or codec declares as its attribute `Options`."""
    try:
        declared = getattr(registry.get(kind, name), "Options", NoOptions)
    except Unsupported as error:
        raise document.error(keys, f"{error}") from None
    if not (isinstance(declared, type) and issubclass(declared, BaseModel)):
        what = f"{name!r} declares {short(declared)} as its Options; expected a pydantic model"
        raise document.error(keys, what)
    return declared


def problem(
    options: BaseModel, stages: Collection[str] | None, backends: Sequence[str] | None
) -> tuple[Keys, str] | None:
    """Return what of options does not go with the rest: see `StageOptions.problem`."""
    return options.problem(stages, backends) if isinstance(options, StageOptions) else None
