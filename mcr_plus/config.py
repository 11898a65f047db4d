"""Configuration: what a job's pipeline file may say, checked before the first operation.

    load("run.yaml")            a Config: frozen, checked, every name in it known
    config.rule_for(...)        the first of its rules that matches an operation
    fingerprint(config)         what ranks compare at start: equal on all, or they would choose differently

`document.py` reads the YAML, `environment.py` the environment.

A mistake in a file is a `ConfigError` whose text is `file:line: path: what, what was expected, what is
known`, a line for each if there are several, for example

    run.yaml:7: pipeline[1].compress.codec: unknown codec 'int9'; known: bf16, fp16, none

and `<dict>` stands for `file:line` when the configuration is a dict.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    SerializationInfo,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from mcr_plus import environment, registry
from mcr_plus.document import (
    Document,
    Keys,
    Mistakes,
    check_keys,
    check_version,
    dict_document,
    list_at,
    mapping_at,
    parse_document,
    path_text,
    read_bytes,
    read_document,
)
from mcr_plus.errors import ConfigError, Unsupported, short, unknown
from mcr_plus.message import ALIASES, DTYPES, KINDS, dtype_name
from mcr_plus.units import (
    Range,
    format_size,
    format_span,
    parse_count,
    parse_duration,
    parse_range,
    parse_size,
)

if TYPE_CHECKING:
    from mcr_plus.compression.codec import Codec

FUSIBLE: tuple[str, ...] = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
"""Kinds of which several can travel as one."""
HIERARCHICAL: tuple[str, ...] = ("all_reduce", "all_to_all", "broadcast")
"""Kinds that can go through the nodes of a job in steps."""
STAGE_ORDER: tuple[str, ...] = ("fuse", "hierarchical", "compress", "select", "dispatch")
DTYPE_NAMES: tuple[str, ...] = tuple(dtype_name(dtype) for dtype in DTYPES)

M = TypeVar("M", bound=BaseModel)


def kind_name(name: str) -> str:
    """Return the kind that a name in a rule or table stands for: `all_to_all` for `all_to_all_single`."""
    return ALIASES.get(name, name)


def kind_matches(pattern: str, kind: str) -> bool:
    """Tell whether a kind named in a rule or table covers the kind of an operation.

    A kind covers its vector form (`all_gather` covers `all_gather_v`, not the other way round), `send` covers
    `recv` (both ends of a message take the same way), and "*" covers everything.
    """
    return pattern == "*" or kind in (pattern, f"{pattern}_v") or (pattern, kind) == ("send", "recv")


def refuse_recv(name: str) -> str:
    """Raise ValueError for the kind of a rule that would part the ends of a message."""
    if name == "recv":
        raise ValueError("a recv takes the way of its send; write 'send', which means both")
    return name


# --- Options of stages ----------------------------------------------------------------------------------


def _size(value: object) -> int | None:
    return None if value is None else parse_size(value)


def _size_text(value: int | None, info: SerializationInfo) -> int | str | None:
    return format_size(value) if info.context and value is not None else value


def _duration_text(value: float, info: SerializationInfo) -> float | str:
    return f"{value!r}s".replace(".0s", "s") if info.context else value


# With any context they are written with units, as people write them.
Seconds = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(_duration_text)]
Bytes = Annotated[int, BeforeValidator(parse_size), PlainSerializer(_size_text)]
BytesOrNone = Annotated[int | None, BeforeValidator(_size), PlainSerializer(_size_text)]


@dataclass(frozen=True)
class _Context:
    """Where the mapping that a model validates was written."""

    document: Document
    keys: Keys


_NOWHERE: Final = dict_document({})


@dataclass(frozen=True)
class TableRef:
    """A table file as it is named in a configuration, relative to the folder of that configuration.

    Equal when the texts are equal: the folder and the place are where it was read, not what it says.
    """

    text: str
    folder: Path = field(default=Path(), compare=False)
    place: str = field(default="<dict>: select.table", compare=False)

    def resolve(self) -> Path:
        """Return the path of the file; raises `ConfigError` when there is none."""
        path = self.folder / self.text
        if not path.is_file():
            raise ConfigError(f"{self.place}: no table file {self.text!r}; looked for {str(path)!r}")
        return path

    def digest(self) -> str:
        """Return the SHA-256 of the file's content, in hex."""
        return hashlib.sha256(read_bytes(self.resolve(), self.place)).hexdigest()


@dataclass(frozen=True)
class AlgorithmsRef:
    """An algorithm file, or a folder of them, as it is named in a configuration; see `TableRef`."""

    text: str
    folder: Path = field(default=Path(), compare=False)
    place: str = field(default="<dict>: algorithms", compare=False)

    def resolve(self) -> list[Path]:
        """Return the file, or the folder's files `*.xml`; raises `ConfigError` when there is none."""
        path = self.folder / self.text
        among = sorted(path.glob("*.xml")) if path.is_dir() else [path]
        found = [each for each in among if each.is_file()]
        if not found:
            what = "algorithm file, or folder with *.xml,"
            raise ConfigError(f"{self.place}: no {what} {self.text!r}; looked for {str(path)!r}")
        return found

    def digests(self) -> list[str]:
        """Return the name and the SHA-256 of the content of every file."""
        try:
            return [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in self.resolve()]
        except OSError as error:
            raise ConfigError(f"{self.place}: cannot read {error.filename!r}: {error.strerror}") from None


def _table_ref(value: object, info: ValidationInfo) -> TableRef | None:
    if value is None or isinstance(value, TableRef):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"expected the path of a table file, got {short(value)}")
    if not isinstance(info.context, _Context):
        return TableRef(value)
    document, keys = info.context.document, (*info.context.keys, info.field_name or "")
    return TableRef(value, document.folder, f"{document.place(keys)}: {path_text(keys)}")


def _table_text(table: TableRef | None) -> str | None:
    return table.text if table else None


class StageOptions(BaseModel):
    """Base of option models: frozen, unknown keys refused, no conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ErrorFeedbackOptions(StageOptions):
    """Options of `error_feedback`. `decay`: what a residual is multiplied with before it is used again."""

    decay: Annotated[float, Field(gt=0, le=1)] = 1.0


class MomentumOptions(StageOptions):
    """Options of `momentum_correction`. `momentum`: the one that the optimizer would have used."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9


def _as_tuple(value: object) -> object:
    """A list, or one name, as the tuple that strict validation wants."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


class ExemptOptions(StageOptions):
    """What travels uncompressed although there is a codec.

    `params`: globs of names of parameters. `max_ndim`: parameters of at most so many dimensions, such as
    biases and norms with 1. `below`: operations, and gradients of parameters, of fewer bytes.
    """

    params: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    max_ndim: Annotated[int, Field(ge=0)] | None = None
    below: Bytes = 0

    def covers(self, param: str, ndim: int, nbytes: int) -> bool:
        """Whether the gradient of a parameter is exempt."""
        named = any(fnmatchcase(param, glob) for glob in self.params)
        return named or nbytes < self.below or (self.max_ndim is not None and ndim <= self.max_ndim)


def _switch(value: object) -> object:
    """Options of a wrapper, of which `true` means the default and `false` none."""
    if value is None or isinstance(value, (bool, Mapping, BaseModel)):
        return {} if value is True else None if value is False else value
    raise ValueError(f"expected true, false or a mapping of options, got {short(value)}")


class CompressOptions(StageOptions):
    """Options of `compress`: a codec by name; the codec's own options stand beside it in the file.

    `error_feedback`, `ef21`, `momentum_correction`: what becomes of what the codec loses, at most one of
    them. `warmup`: calls of an operation that travel uncompressed before the first that does not.
    `exempt`: what always travels uncompressed. `never_slower`: measure on a few calls what the codec
    gains, and do without where it loses. `audit_every`: compare the ranks' results at every so many
    calls.
    """

    codec: str = "none"
    codec_options: SerializeAsAny[BaseModel] | None = None
    error_feedback: Annotated[ErrorFeedbackOptions | None, BeforeValidator(_switch)] = None
    ef21: bool = False
    momentum_correction: Annotated[MomentumOptions | None, BeforeValidator(_switch)] = None
    warmup: Annotated[int, BeforeValidator(parse_count), Field(ge=0)] = 0
    exempt: ExemptOptions | None = None
    never_slower: bool = False
    audit_every: Annotated[int, Field(gt=0)] | None = None

    @property
    def feedback(self) -> str | None:
        """Which wrapper keeps what the codec loses; None if it is lost."""
        named = ("error_feedback", "ef21", "momentum_correction")
        return next((name for name in named if getattr(self, name)), None)


FEEDBACKS = ("error_feedback", "ef21", "momentum_correction")
WRAPPERS = tuple(name for name in CompressOptions.model_fields if name not in ("codec", "codec_options"))


def _some_of(known: tuple[str, ...]) -> Callable[[object], tuple[str, ...]]:
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


class FuseOptions(StageOptions):
    """Options of `fuse`. Sizes in bytes.

    `bucket`: what a bucket holds at most, counting the larger of an operation's input and output.
    `first_bucket`: the same for the first one after a flush, so that sending begins early; None for no other
    limit. `kinds`: what is fused. `memory`: what buckets may take together that have not been waited for;
    beyond it operations go by themselves.

    `order`: which of several open buckets is sent first: `ready`, the one opened first, or `priority`, the
    one opened last, such as the gradients of the first layer, which the next forward pass needs first. (Hooks
    such as `mcr.wrap` wait for all of their buckets together; to them it makes no difference.) `plan`: how
    hooks make buckets of gradients: by `size`, or `exact`, so that by the times at which gradients become
    ready and the table's costs the last operation is done first; `bucket` then limits nothing.
    """

    bucket: Annotated[Bytes, Field(gt=0)] = 25 << 20
    first_bucket: Annotated[
        Annotated[int, Field(gt=0)] | None, BeforeValidator(_size), PlainSerializer(_size_text)
    ] = 1 << 20
    kinds: Annotated[tuple[str, ...], BeforeValidator(_some_of(FUSIBLE))] = ("all_reduce",)
    memory: Annotated[Bytes, Field(gt=0)] = 256 << 20
    order: Literal["ready", "priority"] = "ready"
    plan: Literal["size", "exact"] = "size"


def _nodes(value: object) -> tuple[tuple[int, ...], ...] | None:
    """Ranks by node, every rank of the job once."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(node, (list, tuple)) for node in value):
        raise ValueError(f"expected a list of ranks for every node, got {short(value)}")
    ranks = [rank for node in value for rank in node]
    if not ranks or not all(value):
        raise ValueError("a node without ranks; expected at least one")
    for place, rank in enumerate(ranks):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ValueError(f"expected ranks, which are integers from 0, got {short(rank)}")
        if rank in ranks[:place]:
            raise ValueError(f"rank {rank} is written twice; expected every rank once")
    missing = sorted(set(range(max(ranks))) - set(ranks))
    if missing:
        raise ValueError(f"rank {missing[0]} is missing; expected every rank from 0 to {max(ranks)} once")
    return tuple(tuple(node) for node in value)


def _step_backend(value: object) -> object:
    known = registry.names("backends")
    if value is not None and backend_name(value) not in known:
        raise ValueError(unknown("backend", value, known))
    if names_no_algorithm(value):
        raise ValueError(f"{value!r} names no algorithm; expected name or name:algorithm")
    return value


def _step_codec(value: object, info: ValidationInfo) -> object:
    if value is None or isinstance(value, CompressOptions):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping such as {{codec: int8_block}}, got {short(value)}")
    context = info.context
    document, keys = (context.document, context.keys) if isinstance(context, _Context) else (_NOWHERE, ())
    return _compress_options(dict(value), {}, document, (*keys, "inter", "compress"))


StepBackend = Annotated[str | None, BeforeValidator(_step_backend)]


class LocalOptions(StageOptions):
    """What `hierarchical` does inside a node.

    `backend`: of its steps; None to choose as for any operation.
    """

    backend: StepBackend = None


def _codec_options(options: CompressOptions | None, info: SerializationInfo) -> dict[str, Any] | None:
    return None if options is None else plain_options(options, units=bool(info.context))


class InterOptions(StageOptions):
    """What `hierarchical` does between nodes.

    `backend`: as in `LocalOptions`. `compress`: the options of `compress` for this step, before those of the
    stage and of rules; None for theirs.
    """

    backend: StepBackend = None
    compress: Annotated[
        CompressOptions | None,
        BeforeValidator(_step_codec),
        PlainSerializer(_codec_options),
    ] = None


class HierarchicalOptions(StageOptions):
    """Options of `hierarchical`.

    `kinds`: which operations go through the nodes in steps; an all_to_all gains nothing by them where
    nodes have few ranks. `min`: smaller ones, in bytes, go the flat way. `nodes`: the ranks of every
    node, by their numbers in the job, or `ranks_per_node`: so many consecutive ones; by default a host
    is a node. `local`, `inter`: the steps inside a node, and between nodes.
    """

    kinds: Annotated[tuple[str, ...], BeforeValidator(_some_of(HIERARCHICAL))] = (
        "all_reduce",
        "broadcast",
    )
    min: Bytes = 64 << 10
    nodes: Annotated[tuple[tuple[int, ...], ...] | None, BeforeValidator(_nodes)] = None
    ranks_per_node: Annotated[int, Field(gt=0)] | None = None
    local: LocalOptions = LocalOptions()
    inter: InterOptions = InterOptions()

    @model_validator(mode="after")
    def _one_of_them(self) -> HierarchicalOptions:
        if self.nodes is not None and self.ranks_per_node is not None:
            raise ValueError("nodes and ranks_per_node exclude each other; expected one of them")
        return self


class SelectOptions(StageOptions):
    """Options of `select`.

    `table`: a table file, or None for the built-in one. `vector_size`: the size in bytes by which vector
    collectives are looked up, since their own differs between ranks; None for the largest sizes. `online`:
    whether to go on measuring while the job runs; `refined` is the file that what was learnt is written to.
    """

    table: Annotated[
        InstanceOf[TableRef] | None, BeforeValidator(_table_ref), PlainSerializer(_table_text)
    ] = None
    vector_size: BytesOrNone = None
    online: bool = False
    refined: str | None = None


class DispatchOptions(StageOptions):
    """Options of `dispatch`: the deadline in seconds, when ranks compare signatures, how a wait idles.

    `progress`: who advances operations in flight on libraries that need the host (MPI): the `caller`,
    whenever it issues or waits, or a `thread`, also while the program computes.
    """

    timeout: Seconds = 300.0
    check: Literal["first", "every"] = "first"
    wait: Literal["auto", "spin", "yield", "sleep"] = "auto"
    progress: Literal["caller", "thread"] = "caller"


class NoOptions(StageOptions):
    """The model of a stage or codec that declares none: every key is refused."""


OPTIONS: dict[str, type[StageOptions]] = {
    "fuse": FuseOptions,
    "hierarchical": HierarchicalOptions,
    "compress": CompressOptions,
    "select": SelectOptions,
    "dispatch": DispatchOptions,
}


def stage_options(stage: str, data: Mapping[str, Any], name: str = "<dict>") -> BaseModel:
    """Check the options of one stage, as `compress={"codec": ...}` of a call gives them.

    Raises `ConfigError` that begins with `name`.
    """
    return _options(stage, {}, dict_document({stage: data}, name), (stage,))


def codec_names() -> tuple[str, ...]:
    """Return the names that `compress: {codec: ...}` takes, sorted; `none` among them."""
    return tuple(sorted({"none", *registry.names("codecs")}))


def plain_options(options: BaseModel, *, units: bool = False) -> dict[str, Any]:
    """Write options as the mapping they are read from; JSON-able.

    Of `compress` only what differs from the default, beside the codec's options. `units`: sizes and durations
    as people write them (`25MiB`, `300s`).
    """
    data = options.model_dump(mode="json", by_alias=True, context={"units": True} if units else None)
    if isinstance(options, CompressOptions):
        for name in WRAPPERS:
            if data[name] == CompressOptions.model_fields[name].default:
                del data[name]
        data |= data.pop("codec_options") or {}
    return data


def _options(stage: str, base: Mapping[str, Any], document: Document, keys: Keys) -> BaseModel:
    """Check the options at `keys`, which override those of `base`."""
    data = {**base, **mapping_at(document, keys)}
    if stage == "compress":
        return _compress_options(data, base, document, keys)
    model = OPTIONS[stage] if stage in OPTIONS else _declared_options("stages", stage, document, keys)
    return validate(model, data, document, keys)


def _compress_options(
    data: dict[str, Any], base: Mapping[str, Any], document: Document, keys: Keys
) -> CompressOptions:
    codec = data.get("codec", "none")
    if not isinstance(codec, str) or codec not in codec_names():
        raise document.error((*keys, "codec"), unknown("codec", codec, codec_names()))
    given = data
    if codec != base.get("codec", codec):
        # Another codec: the options of the first one mean nothing to it, nor what made up for its losses.
        kept = {key: base[key] for key in WRAPPERS if key in base and key not in FEEDBACKS}
        given = {**kept, **mapping_at(document, keys)}
    own = {key: value for key, value in given.items() if key in WRAPPERS}
    rest = {key: value for key, value in given.items() if key not in ("codec", *WRAPPERS)}
    none = codec == "none"
    model = NoOptions if none else _declared_options("codecs", codec, document, (*keys, "codec"))
    mistakes = Mistakes()
    beside = ("codec", *WRAPPERS)
    options = mistakes.kept(lambda: validate(model, rest, document, keys, beside=beside), None)
    wrappers = mistakes.kept(lambda: validate(CompressOptions, own, document, keys), CompressOptions())
    mistakes.tell()
    checked = wrappers.model_copy(
        update={"codec": codec, "codec_options": options if model.model_fields else None}
    )
    if (reason := _impossible(checked)) is not None:
        raise document.error(keys, reason)
    return checked


def _impossible(options: CompressOptions) -> str | None:
    """Why these options of `compress` do not go together."""
    named = [name for name in FEEDBACKS if getattr(options, name)]
    if len(named) > 1:
        return f"{' and '.join(named)} exclude each other; expected one of them"
    if named and options.codec == "none":
        return f"{named[0]} without a codec; expected a codec beside it"
    if options.momentum_correction and (options.warmup or options.never_slower):
        other = "warmup" if options.warmup else "never_slower"
        return f"momentum_correction and {other} exclude each other: without it, calls have another scale"
    if options.ef21:
        traits = codec_of(options).traits
        if traits.additive and not traits.elementwise:
            return f"ef21 with codec {options.codec!r}, whose sums the library makes; expected error_feedback"
    if options.ef21 and options.never_slower:
        return "ef21 and never_slower exclude each other: ef21 cannot leave out calls"
    if options.momentum_correction:
        traits = codec_of(options).traits
        if traits.additive or not traits.sparse:
            return f"momentum_correction with codec {options.codec!r}; known: topk, which sends the largest"
    return None


def codec_of(options: CompressOptions) -> Codec:
    """A new codec object, with the options given beside its name."""
    factory: Any = registry.get("codecs", options.codec)
    return cast("Codec", factory(options.codec_options or factory.Options()))


def _declared_options(kind: str, name: str, document: Document, keys: Keys) -> type[BaseModel]:
    """Return the pydantic model that a stage or codec declares as its attribute `Options`."""
    try:
        declared = getattr(registry.get(kind, name), "Options", NoOptions)
    except Unsupported as error:
        raise document.error(keys, f"{error}") from None
    if not (isinstance(declared, type) and issubclass(declared, BaseModel)):
        what = f"{name!r} declares {short(declared)} as its Options; expected a pydantic model"
        raise document.error(keys, what)
    return declared


def validate(
    model: type[M], data: Mapping[str, Any], document: Document, keys: Keys, beside: tuple[str, ...] = ()
) -> M:
    """Validate `data` with a model; `beside` are further known keys, for the message only."""
    try:
        return model.model_validate(dict(data), context=_Context(document, keys))
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


# --- The configuration ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageSpec:
    """One stage of a pipeline: its registered name and its checked options."""

    name: str
    options: BaseModel
    place: str = field(default="<dict>", compare=False)


@dataclass(frozen=True)
class Override:
    """What a rule changes of one stage: the options that result, and which of them it names."""

    stage: str
    options: BaseModel
    named: tuple[str, ...]


def _one_or_more(value: Any, what: str, known: tuple[str, ...]) -> tuple[str, ...] | None:
    if value is None:
        return None
    items: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
    if not items:
        raise ValueError(f"empty list; expected at least one {what}")
    for item in items:
        if item not in known:
            raise ValueError(unknown(what, item, known))
    return tuple(items)


def _kinds(value: object) -> tuple[str, ...] | None:
    names = _one_or_more(value, "kind", (*KINDS, *ALIASES))
    return None if names is None else tuple(kind_name(refuse_recv(name)) for name in names)


def _dtypes(value: object) -> tuple[str, ...] | None:
    return _one_or_more(value, "dtype", DTYPE_NAMES)


def _size_range(value: object) -> Range | None:
    return None if value is None else parse_range(value)


def _count_range(value: object) -> Range | None:
    return None if value is None else parse_range(value, parse_count)


def _range_text(value: Range | None) -> str | None:
    return None if value is None else str(value)


def _size_range_text(value: Range | None, info: SerializationInfo) -> str | None:
    if value is None or not info.context:
        return _range_text(value)
    return format_size(value.lo) if value.hi == value.lo + 1 else format_span(value.lo, value.hi)


Glob = Annotated[str, Field(min_length=1)]


class Match(StageOptions):
    """Which operations a rule is for; what is None does not restrict it.

    `tag` and `param` are globs, matched with case. An operation without a tag is matched by no `tag` glob,
    one outside a model by no `param` glob.
    """

    kind: Annotated[tuple[str, ...] | None, BeforeValidator(_kinds)] = None
    tag: Glob | None = None
    param: Glob | None = None
    bytes: Annotated[
        InstanceOf[Range] | None, BeforeValidator(_size_range), PlainSerializer(_size_range_text)
    ] = None
    dtype: Annotated[tuple[str, ...] | None, BeforeValidator(_dtypes)] = None
    ranks: Annotated[
        InstanceOf[Range] | None, BeforeValidator(_count_range), PlainSerializer(_range_text)
    ] = None

    def covers(
        self,
        kind: str,
        nbytes: int | None,
        dtype: str,
        tag: str | None = None,
        param: str | None = None,
        ranks: int | None = None,
    ) -> bool:
        """Tell whether an operation is one of those meant."""
        return (
            (self.kind is None or any(kind_matches(pattern, kind) for pattern in self.kind))
            and (self.bytes is None or self.bytes.covers(nbytes))
            and (self.dtype is None or dtype in self.dtype)
            and (self.ranks is None or (ranks is not None and self.ranks.covers(ranks)))
            and _glob_matches(self.tag, tag)
            and _glob_matches(self.param, param)
        )


def _glob_matches(glob: str | None, name: str | None) -> bool:
    return glob is None or (name is not None and fnmatchcase(name, glob))


@dataclass(frozen=True)
class Rule:
    """What is different for the operations that `match` covers; what it does not name stays as it is.

    `place` (`run.yaml:8: rules[0]`) is another for every rule of a configuration.
    """

    match: Match
    backend: str | None = None
    overrides: tuple[Override, ...] = ()
    place: str = field(default="<dict>", compare=False)

    def options(self, stage: str) -> BaseModel | None:
        """Return the options of a stage under this rule; None when the rule does not touch the stage."""
        return next((o.options for o in self.overrides if o.stage == stage), None)


def _default_pipeline() -> tuple[StageSpec, ...]:
    # Without fuse: it makes waits a part of the program's order, which must be asked for. Without
    # hierarchical: every group would be several.
    asked_for = ("fuse", "hierarchical")
    return tuple(StageSpec(name, model()) for name, model in OPTIONS.items() if name not in asked_for)


@dataclass(frozen=True)
class Config:
    """A checked configuration. Equal configurations decide alike, wherever they were read.

    `backends` is the fallback order; None means every backend that is found.
    """

    version: int = 1
    backends: tuple[str, ...] | None = None
    pipeline: tuple[StageSpec, ...] = field(default_factory=_default_pipeline)
    rules: tuple[Rule, ...] = ()
    algorithms: tuple[AlgorithmsRef, ...] = ()
    name: str = field(default="<dict>", compare=False)

    def rule_for(
        self,
        kind: str,
        nbytes: int | None,
        dtype: str,
        tag: str | None = None,
        param: str | None = None,
        ranks: int | None = None,
    ) -> Rule | None:
        """Return the first rule that covers an operation, None if there is none.

        `nbytes` is None when sizes differ between ranks; it then counts as large. `dtype` is a name such
        as "float32".
        """
        for rule in self.rules:
            if rule.match.covers(kind, nbytes, dtype, tag, param, ranks):
                return rule
        return None

    def gradient_way(
        self, param: str, nbytes: int, dtype: str, tag: str, ranks: int
    ) -> tuple[Rule | None, CompressOptions | None]:
        """Return the rule for the gradient of a parameter, and the compression that it is to get.

        A rule with a `param` glob goes by the gradient's own size; one without is for the bucket, whose
        size is not known yet and counts as large. Compression is None without the stage.
        """
        sizes = (None if rule.match.param is None else nbytes for rule in self.rules)
        covering = (
            rule
            for rule, size in zip(self.rules, sizes, strict=True)
            if rule.match.covers("all_reduce", size, dtype, tag, param, ranks)
        )
        rule = next(covering, None)
        options = self.options("compress", rule)
        return rule, options if isinstance(options, CompressOptions) else None

    @property
    def alignment(self) -> int:
        """Values in a block of any codec that the configuration names, so that tensors begin with a block."""
        named = [*(s.options for s in self.pipeline), *(o.options for r in self.rules for o in r.overrides)]
        codecs = [options for options in named if isinstance(options, CompressOptions)]
        return math.lcm(*(codec_of(each).traits.alignment for each in codecs if each.codec != "none"))

    def options(self, stage: str, rule: Rule | None = None) -> BaseModel | None:
        """Return the options of a stage, as `rule` changes them; None when it is not in the pipeline."""
        changed = rule.options(stage) if rule else None
        return changed or next((s.options for s in self.pipeline if s.name == stage), None)

    def below(self, stage: str) -> Config:
        """Return this configuration with only those stages that come after one of them."""
        names = [spec.name for spec in self.pipeline]
        return replace(self, pipeline=self.pipeline[names.index(stage) + 1 :])

    @property
    def select_options(self) -> tuple[SelectOptions, ...]:
        """The options of `select`, and as rules change them."""
        named = [*(s.options for s in self.pipeline), *(o.options for r in self.rules for o in r.overrides)]
        return tuple(options for options in named if isinstance(options, SelectOptions))

    @property
    def tables(self) -> tuple[TableRef, ...]:
        """The table files named by `select` and by the rules that change it; they have not been read yet."""
        return tuple(options.table for options in self.select_options if options.table is not None)

    def with_backends(self, backends: Sequence[str]) -> Config:
        """Return this configuration with another list of backends, checked as if the file held it."""
        names = _backends(dict_document({"backends": list(backends)}))
        for rule in self.rules:
            if rule.backend is not None and names is not None and backend_name(rule.backend) not in names:
                what = f"backend {rule.backend!r} is not in backends; known: {', '.join(names)}"
                raise ConfigError(f"{rule.place}.backend: {what}")
        named = [(s.options, s.place) for s in self.pipeline]
        named += [(override.options, rule.place) for rule in self.rules for override in rule.overrides]
        for options, place in named:
            if (found := _foreign_step(options, names)) is not None:
                step, what = found
                raise ConfigError(f"{place}: hierarchical.{step}.backend: {what}")
        return replace(self, backends=names)

    def with_timeout(self, seconds: float) -> Config:
        """Return this configuration with another deadline, unless its dispatch stage names one itself.

        It holds for rules that change other options of that stage too.
        """
        own = self.options("dispatch")
        if own is None or "timeout" in own.model_fields_set:
            return self

        def changed(options: BaseModel) -> BaseModel:
            if not isinstance(options, DispatchOptions):
                return options
            return stage_options("dispatch", {**plain_options(options), "timeout": seconds})

        def kept(each: Override) -> Override:
            return each if "timeout" in each.named else replace(each, options=changed(each.options))

        return replace(
            self,
            pipeline=tuple(replace(spec, options=changed(spec.options)) for spec in self.pipeline),
            rules=tuple(replace(r, overrides=tuple(map(kept, r.overrides))) for r in self.rules),
        )


def load(source: str | Path | Mapping[str, Any] | None) -> Config:
    """Return a configuration from the path of a YAML file or from a dict of the same shape.

    None reads the file that MCR_CONFIG names, and gives the default when it names none. Relative table
    paths are relative to the file's folder, or to the working directory for a dict. Raises `ConfigError`.
    """
    if source is None:
        source = environment.config_file() or {}
    if isinstance(source, Mapping):
        return _config(dict_document(source))
    return _config(read_document(source))


def loads(text: str, name: str = "<text>") -> Config:
    """Return a configuration from YAML text; `name` stands for the file in errors and gives its folder."""
    return _config(parse_document(text, name, Path(name).parent))


def dump(config: Config, *, units: bool = False) -> dict[str, Any]:
    """Return a configuration as plain, JSON-able data; `load(dump(config)) == config`.

    `units`: sizes and durations as people write them.
    """
    return _dump(config, partial(plain_options, units=units))


def fingerprint(config: Config) -> str:
    """Return a SHA-256 in hex that is equal for configurations that decide alike.

    Tables and algorithms count by their content, not by their path. Raises `ConfigError` when one cannot be
    read.
    """
    data = _dump(config, _options_by_content)
    data["algorithms"] = [each.digests() for each in config.algorithms]
    content = json.dumps(data, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _options_by_content(options: BaseModel) -> dict[str, Any]:
    data = plain_options(options)
    if isinstance(options, SelectOptions) and options.table is not None:
        data["table"] = options.table.digest()
    return data


def _dump(config: Config, write: Callable[[BaseModel], dict[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {"version": config.version}
    if config.backends is not None:
        data["backends"] = list(config.backends)
    if config.algorithms:
        data["algorithms"] = [each.text for each in config.algorithms]
    data["pipeline"] = [{s.name: write(s.options)} for s in config.pipeline]
    data["rules"] = [_dump_rule(rule, write) for rule in config.rules]
    return data


def _dump_rule(rule: Rule, write: Callable[[BaseModel], dict[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "match": {name: value for name, value in write(rule.match).items() if value is not None}
    }
    if rule.backend is not None:
        data["backend"] = rule.backend
    for override in rule.overrides:
        options = write(override.options)
        data[override.stage] = {key: options[key] for key in override.named}
    return data


def _config(document: Document) -> Config:
    if is_table(document):
        what = "this is a tuning table; expected a configuration, which names it by `select: {table: FILE}`"
        raise document.error((), what)
    mistakes = Mistakes()
    known = ("version", "backends", "algorithms", "pipeline", "rules")
    mistakes.kept(lambda: check_keys(document, (), known), None)
    mistakes.kept(lambda: _check_version(document), None)
    backends = mistakes.kept(lambda: _backends(document), None)
    pipeline, sound = _pipeline(document, mistakes)
    for index, spec in enumerate(pipeline if sound else ()):
        keys = ("pipeline", index, spec.name)
        mistakes.kept(partial(_check_steps, spec.options, document, keys, pipeline, backends), None)
    rules = _rules(document, pipeline, sound, backends, mistakes)
    algorithms = mistakes.kept(lambda: _algorithms(document), ())
    config = Config(1, backends, pipeline, rules, algorithms, document.name)
    if len(mistakes):  # whoever reads the files of the configuration later does not come to it
        for ref in config.tables:
            mistakes.kept(ref.digest, None)
        for files in algorithms:
            mistakes.kept(files.digests, None)
    mistakes.tell()
    return config


def is_table(document: Document) -> bool:
    """Whether a document is a tuning table, where a configuration may have been expected."""
    rules = document.data.get("rules")
    of_table = isinstance(rules, list) and any(
        isinstance(rule, dict) and "kind" in rule and "match" not in rule for rule in rules
    )
    return "pipeline" not in document.data and ("fingerprint" in document.data or of_table)


def _algorithms(document: Document) -> tuple[AlgorithmsRef, ...]:
    paths = list_at(document, "algorithms")
    for index, path in enumerate(paths or ()):
        if not isinstance(path, str) or not path or "\0" in path:
            what = f"expected the path of an algorithm file or of a folder of them, got {short(path)}"
            raise document.error(("algorithms", index), what)
    return tuple(
        AlgorithmsRef(path, document.folder, f"{document.place(keys)}: {path_text(keys)}")
        for path, keys in ((path, ("algorithms", index)) for index, path in enumerate(paths or ()))
    )


def _check_steps(
    options: BaseModel,
    document: Document,
    keys: Keys,
    pipeline: tuple[StageSpec, ...],
    backends: tuple[str, ...] | None,
) -> None:
    """Refuse steps of `hierarchical` for which the rest of the configuration has no backend or stage."""
    if (found := _foreign_step(options, backends)) is not None:
        step, what = found
        raise document.error((*keys, step, "backend"), what)
    compressed = isinstance(options, HierarchicalOptions) and options.inter.compress is not None
    if compressed and all(spec.name != "compress" for spec in pipeline):
        what = "a codec needs the stage 'compress'; add '- compress: {}' after this one"
        raise document.error((*keys, "inter", "compress"), what)


def _foreign_step(options: BaseModel, backends: Sequence[str] | None) -> tuple[str, str] | None:
    """The step of `hierarchical` whose backend is not one of the job's, and what to say about it."""
    if isinstance(options, HierarchicalOptions) and backends is not None:
        for step, named in (("local", options.local.backend), ("inter", options.inter.backend)):
            if named is not None and backend_name(named) not in backends:
                return step, f"backend {named!r} is not in backends; known: {', '.join(backends)}"
    return None


def _check_version(document: Document) -> None:
    version = document.data.get("version", None if document.lines is not None else 1)
    check_version(version, document)


def _backends(document: Document) -> tuple[str, ...] | None:
    names = list_at(document, "backends")
    if names is None:
        return None
    if not names:
        raise document.error(("backends",), "empty list; expected at least one, or no such key for all")
    for index, name in enumerate(names):
        check_backend(name, document, ("backends", index))
        if name != backend_name(name):
            what = (
                f"expected a backend without an algorithm, got {short(name)}; rules and calls name algorithms"
            )
            raise document.error(("backends", index), what)
        if name in names[:index]:
            raise document.error(("backends", index), f"backend {name!r} is written twice; expected it once")
    return tuple(names)


def backend_name(choice: object) -> object:
    """Return the backend's part of `name` or `name:algorithm`; what is no text comes back as it is."""
    return choice.partition(":")[0] if isinstance(choice, str) else choice


def names_no_algorithm(choice: object) -> bool:
    """Whether it is `name:` with nothing behind it."""
    return isinstance(choice, str) and choice.partition(":")[1:] == (":", "")


def check_backend(name: object, document: Document, keys: Keys) -> None:
    """Refuse the name of a backend that is not registered; `name:algorithm` chooses one of its algorithms."""
    known = registry.names("backends")
    if backend_name(name) not in known:
        raise document.error(keys, unknown("backend", name, known))
    if names_no_algorithm(name):
        raise document.error(keys, f"{name!r} names no algorithm; expected name or name:algorithm")


def _pipeline(document: Document, mistakes: Mistakes) -> tuple[tuple[StageSpec, ...], bool]:
    """The stages, and whether they are without mistakes; a stage with one is there without its options."""
    before = len(mistakes)
    names = mistakes.kept(lambda: _stage_names(document, mistakes), [])
    if names is None:
        return _default_pipeline(), True
    found = []
    for index, name in enumerate(names):
        if name is not None:
            keys = ("pipeline", index, name)
            found.append(mistakes.kept(partial(_stage, name, document, keys), StageSpec(name, NoOptions())))
    if None not in names and names:
        mistakes.kept(lambda: _check_order([spec.name for spec in found], document), None)
    return tuple(found), len(mistakes) == before


def _stage_names(document: Document, mistakes: Mistakes) -> list[str | None] | None:
    """The name of every stage, None where it is none; None altogether without a pipeline."""
    items = list_at(document, "pipeline")
    if items is None:
        return None
    if not items:
        raise document.error(("pipeline",), "empty pipeline; expected at least select and dispatch")
    return [mistakes.kept(partial(_stage_name, document, index), None) for index in range(len(items))]


def _stage(name: str, document: Document, keys: Keys) -> StageSpec:
    return StageSpec(name, _options(name, {}, document, keys), document.place(keys))


def _stage_name(document: Document, index: int) -> str:
    keys = ("pipeline", index)
    item = document.data["pipeline"][index]
    if not isinstance(item, dict) or len(item) != 1:
        what = "expected one stage with its options, such as `select: {}`"
        raise document.error(keys, f"{what}, got {short(item)}")
    name = next(iter(item))
    known = registry.names("stages")
    if name not in known:
        raise document.error((*keys, name), unknown("stage", name, known))
    return str(name)


def _check_order(names: Sequence[str], document: Document) -> None:
    for index, name in enumerate(names):
        keys = ("pipeline", index, name)
        if name in names[:index]:
            first = names.index(name)
            what = f"cyclic pipeline: stage {name!r} is already pipeline[{first}]"
            raise document.error(keys, f"{what}; expected each stage once")
        late = next((n for n in names[:index] if _rank(n) > _rank(name)), None)
        if late is not None:
            what = f"stage {name!r} stands after {late!r}"
            raise document.error(keys, f"{what}; expected the order {', '.join(STAGE_ORDER)}")
    for required in ("select", "dispatch"):
        if required not in names:
            raise document.error(("pipeline",), f"no stage {required!r}; add '- {required}: {{}}'")
    if names[-1] != "dispatch":
        what = f"stage {names[-1]!r} stands after 'dispatch'; expected dispatch last"
        raise document.error(("pipeline", len(names) - 1, names[-1]), what)


def _rank(stage: str) -> float:
    """Order our stages among themselves; NaN, neither before nor after, for an outside one."""
    return STAGE_ORDER.index(stage) if stage in STAGE_ORDER else math.nan


def _rules(
    document: Document,
    pipeline: tuple[StageSpec, ...],
    sound: bool,
    backends: tuple[str, ...] | None,
    mistakes: Mistakes,
) -> tuple[Rule, ...]:
    items = mistakes.kept(lambda: list_at(document, "rules"), None) or []
    found = [
        mistakes.kept(partial(_rule, document, ("rules", index), pipeline, sound, backends, mistakes), None)
        for index in range(len(items))
    ]
    return tuple(rule for rule in found if rule is not None)


def _rule(
    document: Document,
    keys: Keys,
    pipeline: tuple[StageSpec, ...],
    sound: bool,
    backends: tuple[str, ...] | None,
    mistakes: Mistakes,
) -> Rule:
    data = mapping_at(document, keys)
    if sound:  # else every rule would repeat the pipeline's mistakes
        mistakes.kept(lambda: _check_rule_keys(document, keys, pipeline), None)
    match = Match()
    if "match" in data:
        match = mistakes.kept(lambda: _match(document, (*keys, "match")), match)
    if data.get("backend") is not None:
        at = (*keys, "backend")
        mistakes.kept(lambda: _check_rule_backend(document, at, data["backend"], backends), None)
    overrides = []
    for spec in pipeline if sound else _assumed(pipeline, data):
        if spec.name in data:
            read = partial(_override, spec, document, (*keys, spec.name), pipeline, backends)
            overrides.append(mistakes.kept(read, Override(spec.name, spec.options, ())))
    place = f"{document.place(keys)}: {path_text(keys)}"
    return Rule(match, data.get("backend"), tuple(overrides), place)


def _assumed(pipeline: tuple[StageSpec, ...], rule: Mapping[str, Any]) -> tuple[StageSpec, ...]:
    """The stages that a rule can be checked against although there are mistakes in the pipeline.

    Those without one as they are, ours with the default options, but `compress` only if the rule itself names
    a codec: its other options are right or wrong by the codec.
    """
    own = rule.get("compress")
    names_codec = isinstance(own, Mapping) and "codec" in own
    known = {spec.name: spec for spec in pipeline if not isinstance(spec.options, NoOptions)}
    defaults = {
        name: StageSpec(name, model())
        for name, model in OPTIONS.items()
        if name not in known and (name != "compress" or names_codec)
    }
    return tuple({**known, **defaults}.values())


def _match(document: Document, keys: Keys) -> Match:
    match = validate(Match, mapping_at(document, keys), document, keys)
    if match == Match():
        expected = ", ".join(Match.model_fields)
        raise document.error(keys, f"empty match; expected at least one of {expected}")
    return match


def _check_rule_keys(document: Document, keys: Keys, pipeline: tuple[StageSpec, ...]) -> None:
    data = mapping_at(document, keys)
    here = [s.name for s in pipeline]
    for key in data:
        if key in registry.names("stages") and key not in here:
            what = f"stage {key!r} is not in the pipeline, so a rule cannot change it"
            raise document.error((*keys, key), f"{what}; known: {', '.join(here)}")
    check_keys(document, keys, ("match", "backend", *here))
    if "match" not in data:
        raise document.error(keys, "no match; expected a mapping `match` naming the operations meant")
    if data.get("backend") is None and not any(data.get(name) for name in here):
        raise document.error(keys, f"changes nothing; expected at least one of backend, {', '.join(here)}")


def _check_rule_backend(
    document: Document, keys: Keys, name: object, backends: tuple[str, ...] | None
) -> None:
    check_backend(name, document, keys)
    if backends is not None and backend_name(name) not in backends:
        raise document.error(keys, f"backend {name!r} is not in backends; known: {', '.join(backends)}")


def _override(
    spec: StageSpec,
    document: Document,
    keys: Keys,
    pipeline: tuple[StageSpec, ...],
    backends: tuple[str, ...] | None,
) -> Override:
    named = tuple(sorted(mapping_at(document, keys)))
    for name in ("nodes", "ranks_per_node"):
        if spec.name == "hierarchical" and name in named:
            raise document.error((*keys, name), "the nodes of a job are the same for all its operations")
    options = _options(spec.name, plain_options(spec.options), document, keys)
    _check_steps(options, document, keys, pipeline, backends)
    return Override(spec.name, options, named)
