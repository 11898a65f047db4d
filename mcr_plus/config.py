"""Configuration: the only reader of YAML files and of the environment.

    load("run.yaml")            a Config: frozen, checked, every name in it known
    rule_for(...)               the first of its rules that matches an operation
    fingerprint(config)         what ranks compare at start: equal on all, or they would choose differently
    launch_environment()        who this process is, whichever launcher started it

A mistake in a file is a `ConfigError` whose text is `file:line: path: what, what was expected, what is
known`, for example

    run.yaml:7: pipeline[1].compress.codec: unknown codec 'int9'; known: bf16, fp16, none

and `<dict>` stands for `file:line` when the configuration is a dict.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
)

from mcr_plus import registry
from mcr_plus.errors import ConfigError, LaunchError, Unsupported
from mcr_plus.message import DTYPES, KINDS, dtype_name

SIZE_UNITS: dict[str, int] = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
DURATION_UNITS: dict[str, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0}
STAGE_ORDER: tuple[str, ...] = ("fuse", "compress", "select", "dispatch")
DTYPE_NAMES: tuple[str, ...] = tuple(dtype_name(dtype) for dtype in DTYPES)
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_INTEGER = (1 << 63) - 1

Keys = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)


def kind_matches(pattern: str, kind: str) -> bool:
    """Tell whether a kind named in a rule or table covers the kind of an operation.

    A kind covers its vector form (`all_gather` covers `all_gather_v`, not the other way round), and "*"
    covers everything.
    """
    return pattern == "*" or kind in (pattern, f"{pattern}_v")


# --- Names, sizes, durations, ranges --------------------------------------------------------------------


def unknown(what: str, value: object, known: Sequence[str]) -> str:
    """Phrase an unknown name: the bad value, the known ones, and the one that was probably meant."""
    close = difflib.get_close_matches(value, known, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {_short(value)}; known: {', '.join(known)}{hint}"


def parse_size(value: object) -> int:
    """Read a size in bytes: an int, or a text such as "64KiB"; raises ValueError saying what was expected."""
    if isinstance(value, str):
        found = re.fullmatch(r"(\d{1,19}) ?([A-Za-z]*)", value.strip(), re.ASCII)
        if found is None:
            raise ValueError(f"expected a size such as 64KiB or a number of bytes, got {_short(value)}")
        number, unit = found.groups()
        if unit and unit not in SIZE_UNITS:
            raise ValueError(f"wrong unit {unit!r}; expected bytes or {', '.join(SIZE_UNITS)}")
        value = int(number) * SIZE_UNITS[unit or "B"]
    return _whole(value, "a size such as 64KiB or a number of bytes")


def format_size(nbytes: int) -> str:
    """Write a size in the largest unit that holds it exactly, so that `parse_size` gives it back."""
    unit = max((u for u in SIZE_UNITS if nbytes % SIZE_UNITS[u] == 0), key=SIZE_UNITS.__getitem__)
    return f"{nbytes // SIZE_UNITS[unit]}{unit}" if nbytes and unit != "B" else str(nbytes)


def parse_duration(value: object) -> float:
    """Read a duration in seconds: a number, or a text such as "5ms"; ValueError says what was expected."""
    seconds = _seconds(value)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"expected a duration that is finite and more than 0, got {_short(value)}")
    return seconds


def _seconds(value: object) -> float:
    expected = f"expected a duration such as 300s or a number of seconds, got {_short(value)}"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(expected)
    if isinstance(value, str):
        found = re.fullmatch(r"(-?\d{1,19}(?:\.\d+)?) ?([A-Za-z]*)", value.strip(), re.ASCII)
        if found is None:
            raise ValueError(expected)
        number, unit = found.groups()
        if unit and unit not in DURATION_UNITS:
            raise ValueError(f"wrong unit {unit!r}; expected seconds or {', '.join(DURATION_UNITS)}")
        return float(number) * DURATION_UNITS[unit or "s"]
    return float(value) if abs(value) <= MAX_INTEGER else math.inf


def parse_count(value: object) -> int:
    """Read a plain whole number, as an int or as text; raises ValueError saying what was expected."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,19}", value.strip(), re.ASCII):
        value = int(value)
    return _whole(value, "a whole number")


def _whole(value: object, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"expected {expected}, got {_short(value)}")
    return value


@dataclass(frozen=True)
class Range:
    """Whole numbers from `lo` up to, not including, `hi`; `hi` None has no end."""

    lo: int
    hi: int | None = None

    def covers(self, number: int | None) -> bool:
        """Tell whether a number is in the range.

        None is the size of an operation whose size differs between ranks, which therefore must not
        decide by it; it counts as large, so the ranges without an end cover it.
        """
        if number is None:
            return self.hi is None
        return self.lo <= number and (self.hi is None or number < self.hi)

    def __str__(self) -> str:
        """Write the range as a file does: `64..1024`, or `64..` without an end."""
        return f"{self.lo}..{'' if self.hi is None else self.hi}"


def parse_range(value: object, parse: Callable[[object], int] = parse_size) -> Range:
    """Read a range: `64KiB..1MiB` (half-open), `1MiB..`, `>=1MiB`, `>`, `<=`, `<`, `==`, or one number.

    `parse` reads the numbers in it. Raises ValueError for anything else, and for a range that is empty.
    """
    if isinstance(value, Range):
        return value
    text = value.strip() if isinstance(value, str) else ""
    found = _bounds(text, parse) if text else None
    lo, hi = found if found is not None else (parse(value), parse(value) + 1)
    if hi is not None and hi <= lo:
        raise ValueError(f"empty range {_short(value)}; expected a lower end below the upper one")
    return Range(lo, hi)


def _bounds(text: str, parse: Callable[[object], int]) -> tuple[int, int | None] | None:
    """Return the ends of a range written as `a..b` or as a comparison; None if it is written as neither."""
    if ".." in text:
        lo, _, hi = text.partition("..")
        return parse(lo), parse(hi) if hi.strip() else None
    found = re.match(r"(>=|<=|==|>|<)", text)
    if found is None:
        return None
    number = parse(text[found.end() :])
    ends: dict[str, tuple[int, int | None]] = {
        ">=": (number, None),
        ">": (number + 1, None),
        "<=": (0, number + 1),
        "<": (0, number),
        "==": (number, number + 1),
    }
    return ends[found.group()]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- Documents: plain data that remembers its lines -----------------------------------------------------


@dataclass(frozen=True)
class Document:
    """Plain data (dict, list, str, int, float, bool, None) and where each part of it was written.

    `folder` is what relative paths in the document are relative to.
    """

    data: dict[str, Any]
    name: str
    folder: Path
    lines: Mapping[Keys, int] | None = None

    def place(self, keys: Keys) -> str:
        """Return `file:line` of the entry at `keys`, or of the closest one around it; `<dict>` for a dict."""
        if self.lines is None:
            return self.name
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.name}:{self.lines.get(keys, 1)}"

    def error(self, keys: Keys, what: str) -> ConfigError:
        """Return an error that begins with the place of the entry at `keys`."""
        return ConfigError(f"{self.place(keys)}: {_path(keys)}: {what}")


def _path(keys: Keys) -> str:
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".") or "document"


def read_document(path: str | Path) -> Document:
    """Read a YAML file of at most 1 MiB; raises `ConfigError` for everything that is not plain data."""
    name = str(path)
    return parse_document(_read_text(Path(path), f"{name}:1: document"), name, Path(path).parent)


def _read_bytes(path: Path, place: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte in it
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{place}: cannot read {str(path)!r}: {reason}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{place}: {str(path)!r} is larger than 1 MiB; expected a small YAML file")
    return content


def _read_text(path: Path, place: str) -> str:
    try:
        return _read_bytes(path, place).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 at byte {error.start}; expected YAML text") from None


def parse_document(text: str, name: str, folder: Path) -> Document:
    """Parse YAML text: one document, a mapping at the root, no tags, anchors, aliases or duplicate keys."""
    try:
        node = _Loader(text).get_single_node()
    except _Refused as error:
        raise ConfigError(f"{name}:{error.line}: document: {error.what}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise _yaml_error(name, mark.line + 1 if mark else 1, what) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise _yaml_error(name, line, f"character {error.character!r} is not allowed") from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}:1: document: expected a mapping at the root, got {_node_kind(node)}")
    lines: dict[Keys, int] = {}
    return Document(_mapping(node, (), Document({}, name, folder, lines), lines), name, folder, lines)


def _yaml_error(name: str, line: int, what: str) -> ConfigError:
    # A plain comparison such as `bytes: >=1MiB` is what sends people here most often.
    hint = "; put a text that begins with > in quotes" if "chomping" in what else ""
    return ConfigError(f"{name}:{line}: document: not valid YAML: {what}{hint}")


def _node_kind(node: yaml.Node | None) -> str:
    if node is None:
        return "an empty document"
    if isinstance(node, yaml.ScalarNode):
        return f"the text {_short(node.value)}"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


class _Refused(yaml.YAMLError):
    """Valid YAML, but more than plain data."""

    def __init__(self, event: yaml.Event, what: str) -> None:
        self.line = event.start_mark.line + 1 if event.start_mark else 1
        self.what = what


class _Loader(yaml.SafeLoader):
    """Composes nodes only; refuses what lets a short file mean something large, hidden or executable."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        self._refuse(event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _refuse(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(event, "aliases are refused; put a text that begins with * in quotes")
        if getattr(event, "anchor", None) is not None:
            raise _Refused(event, "anchors are refused; put a text that begins with & in quotes")
        if (tag := getattr(event, "tag", None)) is not None:
            raise _Refused(event, f"tag {tag!r} is refused; expected plain data")
        if self.depth == MAX_DEPTH:
            raise _Refused(event, f"nested more than {MAX_DEPTH} levels deep")


def _plain(node: yaml.Node, keys: Keys, document: Document, lines: dict[Keys, int]) -> Any:
    """Turn a node into plain data, noting the line of every entry in `lines`."""
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, keys, document, lines)
    if isinstance(node, yaml.SequenceNode):
        lines.update({(*keys, i): item.start_mark.line + 1 for i, item in enumerate(node.value)})
        return [_plain(item, (*keys, i), document, lines) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    try:
        return _scalar(node)
    except ValueError as error:
        raise document.error(keys, f"{error}") from None


def _mapping(
    node: yaml.MappingNode, keys: Keys, document: Document, lines: dict[Keys, int]
) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if _scalar_type(key_node) != "str":
            got = _short(key_node.value) if isinstance(key_node, yaml.ScalarNode) else _node_kind(key_node)
            raise ConfigError(f"{document.name}:{line}: {_path(keys)}: expected a name as key, got {got}")
        key = key_node.value
        here = (*keys, key)
        if key in data:
            first = lines[here]
            lines[here] = line
            raise document.error(here, f"written twice, first at line {first}; expected every key once")
        lines[here] = line
        data[key] = _plain(value_node, here, document, lines)
    return data


def _scalar_type(node: yaml.Node) -> str:
    """Return "str", "null", "bool", "int", "float" for a scalar; dates and base-60 numbers are text."""
    name = node.tag.removeprefix("tag:yaml.org,2002:")
    if name not in ("null", "bool", "int", "float"):
        return "str" if isinstance(node, yaml.ScalarNode) else name
    return "str" if ":" in node.value else name


_SCALARS = yaml.constructor.SafeConstructor()


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """Return the value YAML 1.1 gives a scalar; raises ValueError for a number that Python cannot read."""
    text: str = node.value
    match _scalar_type(node):
        case "null":
            return None
        case "bool":
            return text.lower() in ("yes", "true", "on")
        case "int":
            return _SCALARS.construct_yaml_int(node)
        case "float":
            return _SCALARS.construct_yaml_float(node)
        case _:
            return text


def dict_document(data: Mapping[str, Any], name: str = "<dict>", folder: Path | None = None) -> Document:
    """Copy a mapping into plain data; raises `ConfigError` for what a YAML file could not hold."""
    place = Document({}, name, folder or Path())
    copied = _copy(data, (), place)
    if not isinstance(copied, dict):
        raise place.error((), f"expected a mapping at the root, got {_short(data)}")
    return replace(place, data=copied)


def _copy(value: object, keys: Keys, document: Document) -> Any:
    if len(keys) > MAX_DEPTH:
        raise document.error(keys[:2], f"nested more than {MAX_DEPTH} levels deep, or holds itself")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise document.error(keys, f"expected a name as key, got {_short(key)}")
        return {key: _copy(item, (*keys, key), document) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item, (*keys, i), document) for i, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise document.error(keys, f"expected plain data, got {_short(value)}")


# --- Options of stages ----------------------------------------------------------------------------------

Bytes = Annotated[int, BeforeValidator(parse_size)]
Seconds = Annotated[float, BeforeValidator(parse_duration)]


@dataclass(frozen=True)
class _Context:
    """Where the mapping that a model validates was written."""

    document: Document
    keys: Keys


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
        return hashlib.sha256(_read_bytes(self.resolve(), self.place)).hexdigest()


def _table_ref(value: object, info: ValidationInfo) -> TableRef | None:
    if value is None or isinstance(value, TableRef):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"expected the path of a table file, got {_short(value)}")
    if not isinstance(info.context, _Context):
        return TableRef(value)
    document, keys = info.context.document, (*info.context.keys, info.field_name or "")
    return TableRef(value, document.folder, f"{document.place(keys)}: {_path(keys)}")


def _table_text(table: TableRef | None) -> str | None:
    return table.text if table else None


class StageOptions(BaseModel):
    """Base of option models: frozen, unknown keys refused, no conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CompressOptions(StageOptions):
    """Options of `compress`: a codec by name; the codec's own options stand beside it in the file."""

    codec: str = "none"
    codec_options: SerializeAsAny[BaseModel] | None = None


class SelectOptions(StageOptions):
    """Options of `select`: a table file, or None for the built-in table."""

    table: Annotated[
        InstanceOf[TableRef] | None, BeforeValidator(_table_ref), PlainSerializer(_table_text)
    ] = None


class DispatchOptions(StageOptions):
    """Options of `dispatch`: the deadline in seconds, when ranks compare signatures, how a wait idles."""

    timeout: Seconds = 300.0
    check: Literal["first", "every"] = "first"
    wait: Literal["auto", "spin", "yield", "sleep"] = "auto"


class NoOptions(StageOptions):
    """The model of a stage or codec that declares none: every key is refused."""


OPTIONS: dict[str, type[StageOptions]] = {
    "compress": CompressOptions,
    "select": SelectOptions,
    "dispatch": DispatchOptions,
}
PLAIN_CODECS = ("none", "bf16", "fp16")  # known to have no options, so checking them imports no codec


def stage_options(stage: str, data: Mapping[str, Any], name: str = "<dict>") -> BaseModel:
    """Check the options of one stage, as `compress={"codec": ...}` of a call gives them.

    Raises `ConfigError` that begins with `name`.
    """
    return _options(stage, {}, dict_document({stage: data}, name), (stage,))


def codec_names() -> tuple[str, ...]:
    """Return the names that `compress: {codec: ...}` takes, sorted; `none` among them."""
    return tuple(sorted({"none", *registry.names("codecs")}))


def plain_options(options: BaseModel) -> dict[str, Any]:
    """Write options as the mapping they are read from; JSON-able."""
    data = options.model_dump(mode="json", by_alias=True)
    if isinstance(options, CompressOptions):
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
        given = mapping_at(document, keys)  # another codec: the options of the first one mean nothing to it
    rest = {key: value for key, value in given.items() if key != "codec"}
    plain = codec in PLAIN_CODECS
    model = NoOptions if plain else _declared_options("codecs", codec, document, (*keys, "codec"))
    options = validate(model, rest, document, keys, beside=("codec",))
    return CompressOptions(codec=codec, codec_options=options if model.model_fields else None)


def _declared_options(kind: str, name: str, document: Document, keys: Keys) -> type[BaseModel]:
    """Return the pydantic model that a stage or codec declares as its attribute `Options`."""
    try:
        declared = getattr(registry.get(kind, name), "Options", NoOptions)
    except Unsupported as error:
        raise document.error(keys, f"{error}") from None
    if not (isinstance(declared, type) and issubclass(declared, BaseModel)):
        what = f"{name!r} declares {_short(declared)} as its Options; expected a pydantic model"
        raise document.error(keys, what)
    return declared


def validate(
    model: type[M], data: Mapping[str, Any], document: Document, keys: Keys, beside: tuple[str, ...] = ()
) -> M:
    """Validate `data` with a model; `beside` are further known keys, for the message only."""
    try:
        return model.model_validate(dict(data), context=_Context(document, keys))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at: Keys = tuple(first["loc"])
        known = tuple(sorted({*beside, *(f.alias or name for name, f in model.model_fields.items())}))
        raise document.error((*keys, *at), _explain(dict(first), known)) from None


def _explain(error: Mapping[str, Any], known: tuple[str, ...]) -> str:
    """Phrase a pydantic error as the rest of this module does."""
    value, loc, context = error["input"], error["loc"], error.get("ctx", {})
    if error["type"] == "extra_forbidden" and len(loc) == 1:
        return unknown("key", loc[0], known or ("none, it takes no options",))
    if error["type"] == "literal_error":
        return unknown("value", value, re.findall(r"'([^']*)'", context["expected"]))
    if error["type"] == "value_error":
        return str(context["error"])
    if error["type"] == "missing":
        return "missing; expected a value"
    return f"{error['msg'].replace('Input should be', 'expected')}, got {_short(value)}"


def mapping_at(document: Document, keys: Keys) -> dict[str, Any]:
    """Return the mapping at `keys`; nothing written there (null) is an empty one."""
    value: Any = document.data
    for key in keys:
        value = value[key]
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise document.error(keys, f"expected a mapping, got {_short(value)}")
    return value


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
    return _one_or_more(value, "kind", KINDS)


def _dtypes(value: object) -> tuple[str, ...] | None:
    return _one_or_more(value, "dtype", DTYPE_NAMES)


def _size_range(value: object) -> Range | None:
    return None if value is None else parse_range(value)


def _count_range(value: object) -> Range | None:
    return None if value is None else parse_range(value, parse_count)


def _range_text(value: Range | None) -> str | None:
    return None if value is None else str(value)


RangeField = Annotated[InstanceOf[Range] | None, PlainSerializer(_range_text)]
Glob = Annotated[str, Field(min_length=1)]


class Match(StageOptions):
    """Which operations a rule is for; what is None does not restrict it.

    `tag` and `param` are globs, matched with case. An operation without a tag is matched by no `tag` glob,
    one outside a model by no `param` glob.
    """

    kind: Annotated[tuple[str, ...] | None, BeforeValidator(_kinds)] = None
    tag: Glob | None = None
    param: Glob | None = None
    bytes: Annotated[RangeField, BeforeValidator(_size_range)] = None
    dtype: Annotated[tuple[str, ...] | None, BeforeValidator(_dtypes)] = None
    ranks: Annotated[RangeField, BeforeValidator(_count_range)] = None

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
    return tuple(StageSpec(name, model()) for name, model in OPTIONS.items())


@dataclass(frozen=True)
class Config:
    """A checked configuration. Equal configurations decide alike, wherever they were read.

    `backends` is the fallback order; None means every backend that is found.
    """

    version: int = 1
    backends: tuple[str, ...] | None = None
    pipeline: tuple[StageSpec, ...] = field(default_factory=_default_pipeline)
    rules: tuple[Rule, ...] = ()
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

    def options(self, stage: str, rule: Rule | None = None) -> BaseModel | None:
        """Return the options of a stage, as `rule` changes them; None when it is not in the pipeline."""
        changed = rule.options(stage) if rule else None
        return changed or next((s.options for s in self.pipeline if s.name == stage), None)

    def with_backends(self, backends: Sequence[str]) -> Config:
        """Return this configuration with another list of backends, checked as if the file held it."""
        names = _backends(dict_document({"backends": list(backends)}))
        for rule in self.rules:
            if rule.backend is not None and names is not None and backend_name(rule.backend) not in names:
                what = f"backend {rule.backend!r} is not in backends; known: {', '.join(names)}"
                raise ConfigError(f"{rule.place}.backend: {what}")
        return replace(self, backends=names)

    def with_timeout(self, seconds: float) -> Config:
        """Return this configuration with another deadline, unless its dispatch stage names one itself."""

        def changed(spec: StageSpec) -> StageSpec:
            options = spec.options
            if not isinstance(options, DispatchOptions) or "timeout" in options.model_fields_set:
                return spec
            return replace(
                spec, options=stage_options("dispatch", {**plain_options(options), "timeout": seconds})
            )

        return replace(self, pipeline=tuple(changed(spec) for spec in self.pipeline))


def load(source: str | Path | Mapping[str, Any] | None) -> Config:
    """Return a configuration from the path of a YAML file or from a dict of the same shape.

    None reads the file that MCR_CONFIG names, and gives the default when it names none. Relative table
    paths are relative to the file's folder, or to the working directory for a dict. Raises `ConfigError`.
    """
    if source is None:
        source = os.environ.get("MCR_CONFIG") or {}
    if isinstance(source, Mapping):
        return _config(dict_document(source))
    return _config(read_document(source))


def loads(text: str, name: str = "<text>") -> Config:
    """Return a configuration from YAML text; `name` stands for the file in errors and gives its folder."""
    return _config(parse_document(text, name, Path(name).parent))


def dump(config: Config) -> dict[str, Any]:
    """Return a configuration as plain, JSON-able data; `load(dump(config)) == config`."""
    return _dump(config, plain_options)


def fingerprint(config: Config) -> str:
    """Return a SHA-256 in hex that is equal for configurations that decide alike.

    Tables count by their content, not by their path. Raises `ConfigError` when a table cannot be read.
    """
    content = json.dumps(_dump(config, _options_by_content), sort_keys=True)
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
    data["pipeline"] = [{s.name: write(s.options)} for s in config.pipeline]
    data["rules"] = [_dump_rule(rule, write) for rule in config.rules]
    return data


def _dump_rule(rule: Rule, write: Callable[[BaseModel], dict[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {"match": rule.match.model_dump(mode="json", exclude_none=True)}
    if rule.backend is not None:
        data["backend"] = rule.backend
    for override in rule.overrides:
        options = write(override.options)
        data[override.stage] = {key: options[key] for key in override.named}
    return data


def _config(document: Document) -> Config:
    check_keys(document, (), ("version", "backends", "pipeline", "rules"))
    _check_version(document)
    backends = _backends(document)
    pipeline = _pipeline(document)
    return Config(1, backends, pipeline, _rules(document, pipeline, backends), document.name)


def check_keys(document: Document, keys: Keys, known: Sequence[str]) -> None:
    """Refuse a mapping that has other keys than the known ones."""
    for key in mapping_at(document, keys):
        if key not in known:
            raise document.error((*keys, key), unknown("key", key, known))


def _check_version(document: Document) -> None:
    version = document.data.get("version", None if document.lines is not None else 1)
    check_version(version, document)


def check_version(version: object, document: Document) -> None:
    """Refuse a document whose `version` is not the one that this release reads."""
    if version is None:
        raise document.error(("version",), "missing; expected version: 1")
    if isinstance(version, bool) or not isinstance(version, int) or version != 1:
        raise document.error(("version",), f"unknown version {_short(version)}; known: 1")


def list_at(document: Document, key: str) -> list[Any] | None:
    """Return the list under a key of the root, None if there is none; anything else is refused."""
    value = document.data.get(key)
    if value is not None and not isinstance(value, list):
        raise document.error((key,), f"expected a list, got {_short(value)}")
    return value


def _backends(document: Document) -> tuple[str, ...] | None:
    names = list_at(document, "backends")
    if names is None:
        return None
    if not names:
        raise document.error(("backends",), "empty list; expected at least one, or no such key for all")
    for index, name in enumerate(names):
        check_backend(name, document, ("backends", index))
        if name in names[:index]:
            raise document.error(("backends", index), f"backend {name!r} is written twice; expected it once")
    return tuple(names)


def backend_name(choice: object) -> object:
    """Return the backend's part of `name` or `name:algorithm`; what is no text comes back as it is."""
    return choice.partition(":")[0] if isinstance(choice, str) else choice


def check_backend(name: object, document: Document, keys: Keys) -> None:
    """Refuse the name of a backend that is not registered; `name:algorithm` chooses one of its algorithms."""
    known = registry.names("backends")
    if backend_name(name) not in known:
        raise document.error(keys, unknown("backend", name, known))


def _pipeline(document: Document) -> tuple[StageSpec, ...]:
    items = list_at(document, "pipeline")
    if items is None:
        return _default_pipeline()
    if not items:
        raise document.error(("pipeline",), "empty pipeline; expected at least select and dispatch")
    names = [_stage_name(document, index) for index in range(len(items))]
    _check_order(names, document)
    return tuple(_stage(name, document, ("pipeline", index, name)) for index, name in enumerate(names))


def _stage(name: str, document: Document, keys: Keys) -> StageSpec:
    return StageSpec(name, _options(name, {}, document, keys), document.place(keys))


def _stage_name(document: Document, index: int) -> str:
    keys = ("pipeline", index)
    item = document.data["pipeline"][index]
    if not isinstance(item, dict) or len(item) != 1:
        what = "expected one stage with its options, such as `select: {}`"
        raise document.error(keys, f"{what}, got {_short(item)}")
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
            raise document.error(("pipeline",), f"no stage {required!r}; expected select, and dispatch last")
    if names[-1] != "dispatch":
        what = f"stage {names[-1]!r} stands after 'dispatch'; expected dispatch last"
        raise document.error(("pipeline", len(names) - 1, names[-1]), what)


def _rank(stage: str) -> float:
    """Order our stages among themselves; NaN, neither before nor after, for an outside one."""
    return STAGE_ORDER.index(stage) if stage in STAGE_ORDER else math.nan


def _rules(
    document: Document, pipeline: tuple[StageSpec, ...], backends: tuple[str, ...] | None
) -> tuple[Rule, ...]:
    items = list_at(document, "rules") or []
    return tuple(_rule(document, ("rules", index), pipeline, backends) for index in range(len(items)))


def _rule(
    document: Document, keys: Keys, pipeline: tuple[StageSpec, ...], backends: tuple[str, ...] | None
) -> Rule:
    data = mapping_at(document, keys)
    _check_rule_keys(document, keys, pipeline)
    match = validate(Match, mapping_at(document, (*keys, "match")), document, (*keys, "match"))
    if match == Match():
        expected = ", ".join(Match.model_fields)
        raise document.error((*keys, "match"), f"empty match; expected at least one of {expected}")
    if data.get("backend") is not None:
        _check_rule_backend(document, (*keys, "backend"), data["backend"], backends)
    overrides = tuple(_override(s, document, (*keys, s.name)) for s in pipeline if s.name in data)
    return Rule(match, data.get("backend"), overrides, f"{document.place(keys)}: {_path(keys)}")


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


def _override(spec: StageSpec, document: Document, keys: Keys) -> Override:
    named = tuple(sorted(mapping_at(document, keys)))
    return Override(spec.name, _options(spec.name, plain_options(spec.options), document, keys), named)


# --- The launch environment -----------------------------------------------------------------------------

Launcher = Literal["torchrun", "openmpi", "mpich", "slurm", "mcr-plus", "env", "single"]

# Slurm numbers the steps that are no srun of the user's (batch script, interactive shell) from here on.
SLURM_SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True)
class LaunchEnvironment:
    """Who this process is among the ranks of its job.

    `master_addr` and `master_port` are None unless the launcher gave a rendezvous; `agent_store` tells
    that torchrun's agent already listens there. `launcher` tells who gave the numbers: under
    `mcr-plus run` that is "mcr-plus" for its elastic agent, but the MPI for its mpiexec.
    `job_id` is equal on all ranks, None if there is none.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = "single"
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    job_id: str | None = None


@dataclass(frozen=True)
class _Variables:
    """Names of the variables in which a launcher tells a rank who it is."""

    rank: str
    size: str
    local_rank: str
    local_size: str


TORCH = _Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPENMPI = _Variables(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
HYDRA = _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
HYDRA_PMIX = replace(HYDRA, rank="PMIX_RANK")


def launch_environment(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Find rank, size and rendezvous in the environment; a process that no launcher started is single.

    Recognised are torchrun and env://, Open MPI, MPICH and Intel MPI (hydra), and srun. Raises
    `LaunchError` naming the variable when values are malformed or contradict each other.
    """
    given = os.environ if environ is None else environ
    env = {key: value.strip() for key, value in given.items() if value.strip()}
    launcher, (rank, size, local_rank, local_size) = _recognise(env)
    return LaunchEnvironment(
        rank,
        size,
        local_rank,
        local_size,
        "mcr-plus" if _started_by_us(env) and launcher in ("torchrun", "env") else launcher,
        env.get("MASTER_ADDR"),
        _integer(env, "MASTER_PORT", highest=65535),
        env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        _job_id(env, launcher),
    )


def host_name() -> str:
    """Return this host's name; ranks with equal names are taken to share memory and loopback."""
    return socket.gethostname()


def cores() -> int:
    """Return how many processor cores this process may run on."""
    return len(os.sched_getaffinity(0))


def socket_interface(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the network interface that GLOO_SOCKET_IFNAME names, the first of several; None if unset."""
    names = (os.environ if environ is None else environ).get("GLOO_SOCKET_IFNAME", "")
    return names.split(",")[0].strip() or None


def _started_by_us(env: Mapping[str, str]) -> bool:
    name = env.get("MCR_LAUNCHER", "mcr-plus")
    if name != "mcr-plus":
        raise LaunchError(f"MCR_LAUNCHER={name!r}: expected mcr-plus, which `mcr-plus run` sets")
    return "MCR_LAUNCHER" in env


def _recognise(env: Mapping[str, str]) -> tuple[Launcher, tuple[int, int, int, int]]:
    """Ask from the most explicit to the most inherited.

    RANK and WORLD_SIZE come first: nobody sets them but for this purpose, and mpirun may start one
    torchrun per host. Slurm's come last: an mpirun inside an allocation starts its helpers by srun, and
    ranks then inherit the numbers of the helper.
    """
    if TORCH.rank in env or TORCH.size in env:
        return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "env", _ranks(env, TORCH)
    if OPENMPI.rank in env or OPENMPI.size in env:
        return "openmpi", _ranks(env, OPENMPI)
    if _by_hydra(env):
        return "mpich", _ranks(env, HYDRA if HYDRA.rank in env else HYDRA_PMIX)
    if _slurm_step(env):
        return "slurm", _slurm_ranks(env)
    return "single", (0, 1, 0, 1)


def _by_hydra(env: Mapping[str, str]) -> bool:
    # srun --mpi=pmi2 or pmix sets PMI_RANK or PMIX_RANK as well, but never hydra's local numbers.
    named = HYDRA.rank in env or (HYDRA_PMIX.rank in env and HYDRA.size in env)
    return named and (HYDRA.local_rank in env or not _slurm_step(env))


def _slurm_step(env: Mapping[str, str]) -> bool:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too, yet it is one process and no rank.
    step = _integer(env, "SLURM_STEP_ID", highest=0xFFFFFFFF)
    return step is not None and step < SLURM_SPECIAL_STEPS


def _slurm_ranks(env: Mapping[str, str]) -> tuple[int, int, int, int]:
    # SLURM_NTASKS is the allocation's when the step was started with fewer tasks than that.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    found = dict(env)
    if "SLURM_STEP_TASKS_PER_NODE" in env:
        found["SLURM_NTASKS_PER_NODE"] = str(_tasks_on_node(env))
    return _ranks(found, _Variables("SLURM_PROCID", size, "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"))


def _tasks_on_node(env: Mapping[str, str]) -> int:
    """Read Slurm's `2(x3),1`: two tasks on each of three nodes, then one."""
    text = env["SLURM_STEP_TASKS_PER_NODE"]
    counts: list[int] = []
    for item in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", item, re.ASCII)
        if found is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected counts such as 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    node = _integer(env, "SLURM_NODEID") or 0
    if node >= len(counts):
        raise LaunchError(f"SLURM_NODEID={node}: SLURM_STEP_TASKS_PER_NODE={text!r} has {len(counts)} nodes")
    return counts[node]


def _ranks(env: Mapping[str, str], names: _Variables) -> tuple[int, int, int, int]:
    """Read and check rank, size, local rank, local size; without local numbers all ranks are on one host."""
    rank = _required(env, names.rank, names.size)
    size = _required(env, names.size, names.rank, lowest=1)
    _check_below(names.rank, rank, names.size, size)
    local_rank = _integer(env, names.local_rank)
    local_size = _integer(env, names.local_size, lowest=1)
    local_size = size if local_size is None else local_size
    local_rank = rank % local_size if local_rank is None else local_rank
    _check_below(names.local_rank, local_rank, names.local_size, local_size)
    if local_size > size:
        raise LaunchError(f"{names.local_size}={local_size}: expected at most {names.size}={size}")
    return rank, size, local_rank, local_size


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise LaunchError(f"{name}={value}: expected a number below {limit_name}={limit}")


def _required(env: Mapping[str, str], name: str, other: str, lowest: int = 0) -> int:
    value = _integer(env, name, lowest)
    if value is None:
        raise LaunchError(f"{name} is not set, but {other} is; set both or neither")
    return value


def _integer(env: Mapping[str, str], name: str, lowest: int = 0, highest: int = 10**9) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not lowest <= int(text) <= highest:
        raise LaunchError(f"{name}={text!r}: expected a whole number from {lowest} to {highest}")
    return int(text)


def _job_id(env: Mapping[str, str], launcher: Launcher) -> str | None:
    if "MCR_JOB_ID" in env:
        return env["MCR_JOB_ID"]
    if launcher == "slurm":
        return f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"
    if launcher in ("openmpi", "mpich"):
        return env.get("PMIX_NAMESPACE")
    # "none" is what torchrun calls every job that was given no name.
    if env.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return env["TORCHELASTIC_RUN_ID"]
    if launcher in ("torchrun", "env") and "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    return None
