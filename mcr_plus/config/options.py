"""Options of stages and codecs: pydantic models, and functions to read, write and check options."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
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
from mcr_plus.config.document import NO_FILE, Document, Keys, dict_document, mapping_at
from mcr_plus.config.names import kind_name
from mcr_plus.core.units import format_size, parse_duration, parse_size
from mcr_plus.errors import Unsupported, short, unknown

if TYPE_CHECKING:
    from typing_extensions import Self

    from mcr_plus.config.schema import TableRef

M = TypeVar("M", bound=BaseModel)


def size_or_none(value: object) -> int | None:
    """Parse a size such as `64KiB` into bytes; None stays None."""
    return None if value is None else parse_size(value)


def size_text(value: int | None, info: SerializationInfo) -> int | str | None:
    """Serialize a size: a number of bytes, or text with a unit when a context is given."""
    return format_size(value) if info.context and value is not None else value


def duration_text(value: float | str, info: SerializationInfo) -> float | str:
    """Serialize a duration: a number, or text with a unit when a context is given; words are unchanged."""
    return f"{value!r}s".replace(".0s", "s") if info.context and not isinstance(value, str) else value


# Serialized with any context, these types become text with units, for people to read.
Seconds = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(duration_text)]


Bytes = Annotated[int, BeforeValidator(parse_size), PlainSerializer(size_text)]


BytesOrNone = Annotated[int | None, BeforeValidator(size_or_none), PlainSerializer(size_text)]


@dataclass(frozen=True)
class ReadContext:
    """Place of the mapping that a model validates."""

    document: Document
    keys: Keys


NOWHERE: Final = dict_document({})


class Scope(Enum):
    """Mark in the annotation of an option: `warmup: Annotated[int, Scope.LOCAL] = 0`."""

    WIRE = "changes what travels"
    LOCAL = "does not change what travels"
    JOB = "equal in all groups of a job"
    GROUP = "of each group by itself"


def options_marked(model: type[BaseModel], scope: Scope) -> tuple[str, ...]:
    """Return the names of a model's options with a mark, in the model's order."""
    return tuple(name for name, field in model.model_fields.items() if scope in field.metadata)


class StageOptions(BaseModel):
    """Options of a stage or codec: immutable, without unknown keys or conversions between types.

    A stage declares its options as the class attribute `Options`, which may be any pydantic model. A subclass
    of this class may also override reading, writing and checking.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def read(cls, document: Document, keys: Keys, base: Mapping[str, Any]) -> Self:
        """Check the options at `keys` of `document`, which override those of `base`; raise `ConfigError`."""
        return validate(cls, {**base, **mapping_at(document, keys)}, document, keys)

    def plain(self, *, units: bool = False) -> dict[str, Any]:
        """Return the mapping from which these options can be read, see `plain_options`."""
        return self.model_dump(mode="json", by_alias=True, context={"units": True} if units else None)

    def by_content(self) -> dict[str, Any]:
        """Return the data that ranks compare: like `plain`, with digests of files instead of paths."""
        return self.plain()

    def files(self) -> Sequence[TableRef]:
        """Return the files that these options name."""
        return ()

    def problem(
        self,
        stages: Collection[str] | None,  # noqa: ARG002 - for classes that override it
        backends: Sequence[str] | None,  # noqa: ARG002
    ) -> tuple[Keys, str] | None:
        """Return the first conflict with the rest of the configuration, as (keys in these options, reason).

        `stages`: names of the pipeline's stages, None to skip checks against them. `backends`: the
        configuration's backends, None for all available ones.
        """
        return None

    def named_backends(self) -> Mapping[str, str]:
        """Return the backends, or `backend:algorithm`, in these options, by key."""
        return {}


def as_tuple(value: object) -> object:
    """Convert a list or a single name to a tuple, which strict validation requires."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


def some_of(known: tuple[str, ...]) -> Callable[[object], tuple[str, ...]]:
    """Return a validator for kinds among `known`, a list or one name; an empty list disables the stage."""

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
    """Options of a stage or codec without options: every key is refused."""


def validate(
    model: type[M], data: Mapping[str, Any], document: Document, keys: Keys, beside: tuple[str, ...] = ()
) -> M:
    """Validate `data` with a model. `beside`: further known keys, for the message only."""
    try:
        return model.model_validate(dict(data), context=ReadContext(document, keys))
    except ValidationError as error:
        details = error.errors(include_url=False)
        known = tuple(sorted({*beside, *(f.alias or name for name, f in model.model_fields.items())}))
        strange = [detail for detail in details if detail["type"] == "extra_forbidden"]
        # A misspelt key is also reported as missing; report only the unknown key.
        others = [
            detail
            for detail in details
            if detail not in strange and not (strange and detail["type"] == "missing")
        ]
        problems: dict[Keys, str] = {}  # a union has one error per member; the first is used
        for detail in (*strange, *others):
            at: Keys = tuple(detail["loc"])
            # Where a mapping is expected, suggest its keys; elsewhere the keys beside the entry.
            inside = (*at, "") if detail["type"] in _NO_MAPPING else at
            problems.setdefault((*keys, *at), _explain(dict(detail), _known(model, inside) or known))
        raise document.errors(problems.items()) from None


def _known(model: type[BaseModel], at: Keys) -> tuple[str, ...]:
    """Return the keys of the nested model that contains entry `at`; empty for entries of `model` itself."""
    for key in at[:-1]:
        field = model.model_fields.get(str(key))
        types = [] if field is None else [field.annotation, *get_args(field.annotation)]
        models = [nested for nested in types if isinstance(nested, type) and issubclass(nested, BaseModel)]
        if not models:
            return ()
        model = models[0]
    return tuple(sorted(model.model_fields)) if len(at) > 1 else ()


def _explain(error: Mapping[str, Any], known: tuple[str, ...]) -> str:
    """Return a pydantic error in the style of other errors of configurations."""
    value, loc, context = error["input"], error["loc"], error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        return unknown("key", loc[-1], known or ("none, it takes no options",))
    if error["type"] == "literal_error":
        return unknown("value", value, re.findall(r"'([^']*)'", context["expected"]))
    if error["type"] == "value_error":
        return str(context["error"])
    if error["type"] in _NO_MAPPING:
        return f"expected a mapping of options, got {short(value)}; known: {', '.join(known)}"
    if error["type"] == "missing":
        return "missing; expected a value"
    if error["type"] in _EXPECTED:
        return f"expected {_EXPECTED[error['type']].format(**context)}, got {short(value)}"
    return f"{error['msg'].replace('Input should be', 'expected')}, got {short(value)}"


_NO_MAPPING = ("model_type", "model_attributes_type")
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
    "string_too_short": "a string of at least {min_length} characters",
    "string_type": "a string",
    "tuple_type": "a list",
}
"""Expected values by pydantic's type of error."""


def stage_options(stage: str, data: Mapping[str, Any], name: str = NO_FILE) -> BaseModel:
    """Check the options of one stage given as a mapping, as in `compress={"codec": ...}` of a call.

    Raises a `ConfigError` that begins with `name`.
    """
    return read_options(stage, dict_document({stage: data}, name), (stage,))


def plain_options(options: BaseModel, *, units: bool = False) -> dict[str, Any]:
    """Return the mapping from which options are read; JSON-serializable.

    `units`: write sizes and durations with units (`25MiB`, `300s`).
    """
    if isinstance(options, StageOptions):
        return options.plain(units=units)
    return options.model_dump(mode="json", by_alias=True)


def options_by_content(options: BaseModel) -> dict[str, Any]:
    """Return the data of options that ranks compare, see `StageOptions.by_content`."""
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
        text = f"{name!r} declares {short(declared)} as its Options; expected a pydantic model"
        raise document.error(keys, text)
    return declared


def problem(
    options: BaseModel, stages: Collection[str] | None, backends: Sequence[str] | None
) -> tuple[Keys, str] | None:
    """Return the first conflict of options with the rest of a configuration; see `StageOptions.problem`."""
    return options.problem(stages, backends) if isinstance(options, StageOptions) else None
