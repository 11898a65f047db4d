"""Configuration as data: stages, rules and conditions of rules."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    SerializationInfo,
    ValidationInfo,
    model_validator,
)

from mcr_plus import registry
from mcr_plus.config.document import NO_FILE, dict_document, path_text, read_bytes
from mcr_plus.config.names import (
    DTYPE_NAMES,
    backend_name,
    kind_matches,
    kind_name,
    read_backends,
    refuse_recv,
)
from mcr_plus.config.options import (
    ReadContext,
    StageOptions,
    declared_options,
    plain_options,
    problem,
    stage_options,
)
from mcr_plus.core.kinds import ALIASES, KINDS, Sums, dtype_name
from mcr_plus.core.message import Signature
from mcr_plus.core.units import Range, format_size, format_span, parse_count, parse_range
from mcr_plus.errors import ConfigError, short, unknown


@dataclass(frozen=True)
class TableRef:
    """A table or plan file named in a configuration, relative to the configuration's folder.

    References are equal if their texts are equal, wherever the configuration was read.
    """

    text: str
    folder: Path = field(default=Path(), compare=False)
    place: str = field(default=f"{NO_FILE}: select.table", compare=False)
    what: str = field(default="table", compare=False)

    def resolve(self) -> Path:
        """Return the path of the file; raises `ConfigError` if it does not exist."""
        path = self.folder / self.text
        if not path.is_file():
            raise ConfigError(f"{self.place}: no {self.what} file {self.text!r}; looked for {str(path)!r}")
        return path

    def digest(self) -> str:
        """Return the SHA-256 of the file's content, in hex."""
        return hashlib.sha256(read_bytes(self.resolve(), self.place)).hexdigest()


def file_ref(value: object, info: ValidationInfo, what: str) -> TableRef:
    """Return the file that an option names; a validator of pydantic."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"expected the path of a {what} file, got {short(value)}")
    if not isinstance(info.context, ReadContext):
        return TableRef(value, what=what)
    document, keys = info.context.document, (*info.context.keys, info.field_name or "")
    return TableRef(value, document.folder, f"{document.place(keys)}: {path_text(keys)}", what)


@dataclass(frozen=True)
class AlgorithmsRef:
    """An algorithm file, or a folder of algorithm files, named in a configuration; see `TableRef`."""

    text: str
    folder: Path = field(default=Path(), compare=False)
    place: str = field(default=f"{NO_FILE}: algorithms", compare=False)

    def resolve(self) -> list[Path]:
        """Return the file, or the `*.xml` files of the folder; raises `ConfigError` if there are none."""
        path = self.folder / self.text
        candidates = sorted(path.glob("*.xml")) if path.is_dir() else [path]
        files = [candidate for candidate in candidates if candidate.is_file()]
        if not files:
            what = "algorithm file, or folder with *.xml,"
            raise ConfigError(f"{self.place}: no {what} {self.text!r}; looked for {str(path)!r}")
        return files

    def digests(self) -> list[str]:
        """Return a string per file: name and SHA-256 of the content."""
        try:
            return [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in self.resolve()]
        except OSError as error:
            raise ConfigError(f"{self.place}: cannot read {error.filename!r}: {error.strerror}") from None


@dataclass(frozen=True)
class StageSpec:
    """One stage of a pipeline: registered name and validated options."""

    name: str
    options: BaseModel
    place: str = field(default=NO_FILE, compare=False)


@dataclass(frozen=True)
class Override:
    """Options of one stage under a rule, and the names of the options that the rule sets."""

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
    """Operations to which a rule applies; a field that is None matches everything.

    `tag` and `param` are case-sensitive globs. A `tag` glob matches only operations with a tag, a `param`
    glob only gradients of a model's parameters.
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
        """Return whether the rule applies to an operation."""
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
    """Overrides for operations that `match` covers; for other options the pipeline's values apply.

    `place` (`run.yaml:8: rules[0]`) is unique within a configuration.
    """

    match: Match
    backend: str | None = None
    sums: Sums | None = None
    overrides: tuple[Override, ...] = ()
    place: str = field(default=NO_FILE, compare=False)

    def options(self, stage: str) -> BaseModel | None:
        """Return the options of a stage under this rule; None if the rule does not change the stage."""
        return next((o.options for o in self.overrides if o.stage == stage), None)


class Numerics(StageOptions):
    """Options under `numerics:`. `sums`: order of additions in reductions, see `core.kinds.Sums`."""

    sums: Sums = "fast"


def _as_notice(value: object) -> object:
    return {"sigterm": True} if value == "sigterm" else value


def _notice_file(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ValueError(f"expected the absolute path of a file, got {short(value)}")
    if re.search(r"[{}]", re.sub(r"\{(rank|host)\}", "", value)):
        raise ValueError(f"unknown placeholder in {short(value)}; known: {{rank}}, {{host}}")
    return value


class NoticeOptions(StageOptions):
    """Ways to tell a rank that it is to leave, see `mcr_plus.job.notice`.

    `sigterm`: by SIGTERM. `file`: by creating a file; `{rank}` stands for the launcher's number of the rank,
    `{host}` for the name of its host.
    """

    sigterm: bool = False
    file: Annotated[str | None, BeforeValidator(_notice_file)] = None

    @model_validator(mode="after")
    def _check_any(self) -> NoticeOptions:
        if not self.sigterm and self.file is None:
            raise ValueError("tells no rank anything; expected `sigterm: true`, `file: PATH` or both")
        return self


class BuddyOptions(StageOptions):
    """Copies of shards on another rank. `steps`: most steps that may be lost with a rank."""

    steps: Annotated[int, Field(ge=1)]


class Elastic(StageOptions):
    """Options under `elastic:`, for `mcr.elastic` and `mcr.elastic_sharded`."""

    notice: Annotated[NoticeOptions | None, BeforeValidator(_as_notice)] = None
    buddies: BuddyOptions | None = None


_DEFAULT: Final = "the default pipeline"


def default_pipeline() -> tuple[StageSpec, ...]:
    """Return the pipeline of a configuration without one."""
    return tuple(
        StageSpec(name, declared_options("stages", name)(), _DEFAULT) for name in registry.DEFAULT_STAGES
    )


def without_steps(pipeline: tuple[StageSpec, ...]) -> tuple[StageSpec, ...]:
    """Return a pipeline for libraries that the user names: each operation is one of theirs, as it is.

    A stage `hierarchical` that the user writes stays.
    """
    return tuple(spec for spec in pipeline if (spec.name, spec.place) != ("hierarchical", _DEFAULT))


def default_observe() -> BaseModel | None:
    """Return the options under `observe:` of a configuration without them; None without `observe/`."""
    options = registry.observe_options()
    return None if options is None else options()


@dataclass(frozen=True)
class Config:
    """A checked configuration. Equal configurations make equal decisions, wherever they were read.

    `backends` is the fallback order; None means every available backend. `observe` changes the reports about
    a job, never its behaviour, and may differ between ranks.
    """

    version: int = 1
    backends: tuple[str, ...] | None = None
    pipeline: tuple[StageSpec, ...] = field(default_factory=default_pipeline)
    rules: tuple[Rule, ...] = ()
    algorithms: tuple[AlgorithmsRef, ...] = ()
    name: str = field(default=NO_FILE, compare=False)
    observe: BaseModel | None = field(default_factory=default_observe)
    numerics: Numerics = field(default_factory=Numerics)
    elastic: Elastic = field(default_factory=Elastic)

    def rule_for(
        self,
        kind: str,
        nbytes: int | None,
        dtype: str,
        tag: str | None = None,
        param: str | None = None,
        ranks: int | None = None,
    ) -> Rule | None:
        """Return the first rule that covers an operation, or None.

        `nbytes` is None if sizes differ between ranks; then the operation counts as large. `dtype` is a name
        such as "float32".
        """
        for rule in self.rules:
            if rule.match.covers(kind, nbytes, dtype, tag, param, ranks):
                return rule
        return None

    def sums_for(self, signature: Signature) -> Sums:
        """Return the order of additions in an operation that does not name it."""
        dtype = dtype_name(signature.dtype)
        rule = self.rule_for(signature.kind, signature.nbytes, dtype, signature.tag, ranks=signature.ranks)
        return self.numerics.sums if rule is None or rule.sums is None else rule.sums

    def options(self, stage: str, rule: Rule | None = None) -> BaseModel | None:
        """Return the options of a stage under `rule`; None if the stage is not in the pipeline."""
        changed = rule.options(stage) if rule else None
        return changed or next((s.options for s in self.pipeline if s.name == stage), None)

    def below(self, stage: str) -> Config:
        """Return this configuration with only the stages after `stage`."""
        names = [spec.name for spec in self.pipeline]
        return replace(self, pipeline=self.pipeline[names.index(stage) + 1 :])

    @property
    def all_options(self) -> tuple[BaseModel, ...]:
        """Options of all stages, and options that rules override."""
        changed = (override.options for rule in self.rules for override in rule.overrides)
        return (*(spec.options for spec in self.pipeline), *changed)

    @property
    def tables(self) -> tuple[TableRef, ...]:
        """Table files named in the options of stages; the files are not read."""
        named = (options for options in self.all_options if isinstance(options, StageOptions))
        return tuple(ref for options in named for ref in options.files())

    def with_backends(self, backends: Sequence[str]) -> Config:
        """Return this configuration with another list of backends, checked like a list in the file."""
        names = read_backends(dict_document({"backends": list(backends)}))
        for rule in self.rules:
            if rule.backend is not None and names is not None and backend_name(rule.backend) not in names:
                what = f"backend {rule.backend!r} is not in backends; known: {', '.join(names)}"
                raise ConfigError(f"{rule.place}.backend: {what}")
        named = [(s.options, s.place, s.name) for s in self.pipeline]
        named += [(o.options, rule.place, o.stage) for rule in self.rules for o in rule.overrides]
        for options, place, stage in named:
            if (conflict := problem(options, None, names)) is not None:
                keys, what = conflict
                raise ConfigError(f"{place}: {'.'.join(map(str, (stage, *keys)))}: {what}")
        return replace(self, backends=names, pipeline=without_steps(self.pipeline))

    def with_timeout(self, seconds: float) -> Config:
        """Return this configuration with another deadline, unless its dispatch stage sets one.

        The deadline also applies under rules that change other options of that stage.
        """
        dispatch = self.options("dispatch")
        if dispatch is None or "timeout" in dispatch.model_fields_set:
            return self

        def changed(stage: str, options: BaseModel) -> BaseModel:
            if stage != "dispatch":
                return options
            return stage_options("dispatch", {**plain_options(options), "timeout": seconds})

        def with_deadline(override: Override) -> Override:
            if "timeout" in override.named:
                return override
            return replace(override, options=changed(override.stage, override.options))

        return replace(
            self,
            pipeline=tuple(replace(spec, options=changed(spec.name, spec.options)) for spec in self.pipeline),
            rules=tuple(replace(r, overrides=tuple(map(with_deadline, r.overrides))) for r in self.rules),
        )
