"""Read a job's configuration, and check it before the first operation.

    load("run.yaml")            a Config: immutable and checked; every name in it is known
    config.rule_for(...)        the first rule that matches an operation
    fingerprint(config)         a hash that ranks compare at the start: all must decide in the same way

`document.py` reads the YAML, `core/environment.py` the environment.

Mistakes in a file raise a `ConfigError` with one line per mistake: `file:line: path: ` and the problem, with
expected or known values, for example

    run.yaml:7: pipeline[1].compress.codec: unknown codec 'int9'; known: bf16, fp16, none

For a dict, `configuration` replaces `file:line`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from mcr_plus import registry
from mcr_plus.config.document import (
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
    read_document,
)
from mcr_plus.config.names import (
    backend_name,
    read_backend,
    read_backends,
)
from mcr_plus.config.options import (
    NoOptions,
    declared_options,
    options_by_content,
    plain_options,
    problem,
    read_options,
    validate,
)
from mcr_plus.config.schema import (
    AlgorithmsRef,
    Config,
    Elastic,
    Match,
    Numerics,
    Override,
    Rule,
    StageSpec,
    default_observe,
    default_pipeline,
    without_steps,
)
from mcr_plus.core import environment
from mcr_plus.core.kinds import Sums
from mcr_plus.errors import InvalidArgument, short, unknown

OptionsT = TypeVar("OptionsT", bound=BaseModel)


def load(source: str | Path | Mapping[str, Any] | None) -> Config:
    """Return the configuration in a YAML file, given by its path, or in a dict of the same shape.

    None means the file that MCR_CONFIG names, or the default configuration if it is not set. Relative paths
    of tables are relative to the folder of the file, and in a dict to the working directory. Raises
    `ConfigError`, and `InvalidArgument` for other types.
    """
    if source is None:
        source = environment.config_file() or {}
    if isinstance(source, Mapping):
        return _config(dict_document(source))
    if not isinstance(source, (str, os.PathLike)) or not str(source):
        raise InvalidArgument(f"config: expected the path of a file, a dict or None, got {short(source)}")
    return _config(read_document(source))


def loads(text: str, name: str = "<text>") -> Config:
    """Return the configuration in YAML text; errors use `name` as the file, relative paths its folder."""
    return _config(parse_document(text, name, Path(name).parent))


def dump(config: Config, *, units: bool = False) -> dict[str, Any]:
    """Return a configuration as plain, JSON-serializable data; `load(dump(config)) == config`.

    `units`: write sizes and durations with units.
    """
    data = _dump(config, partial(plain_options, units=units))
    if config.observe is not None and config.observe != default_observe():
        data["observe"] = plain_options(config.observe, units=units)
    return data


def fingerprint(config: Config) -> str:
    """Return a SHA-256 in hex, equal for configurations with the same decisions.

    Tables and algorithm files are hashed by content, not by path; `observe` is not hashed. Raises
    `ConfigError` if a file cannot be read.
    """
    data = _dump(config, options_by_content)
    data["algorithms"] = [files.digests() for files in config.algorithms]
    content = json.dumps(data, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _dump(config: Config, write: Callable[[BaseModel], dict[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {"version": config.version}
    if config.backends is not None:
        data["backends"] = list(config.backends)
    if config.algorithms:
        data["algorithms"] = [files.text for files in config.algorithms]
    if config.numerics != Numerics():
        data["numerics"] = write(config.numerics)
    if config.elastic != Elastic():
        data["elastic"] = {name: value for name, value in write(config.elastic).items() if value is not None}
    data["pipeline"] = [{s.name: write(s.options)} for s in config.pipeline]
    data["rules"] = [_dump_rule(rule, write) for rule in config.rules]
    return data


def _dump_rule(rule: Rule, write: Callable[[BaseModel], dict[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "match": {name: value for name, value in write(rule.match).items() if value is not None}
    }
    if rule.backend is not None:
        data["backend"] = rule.backend
    if rule.sums is not None:
        data["sums"] = rule.sums
    for override in rule.overrides:
        options = write(override.options)
        data[override.stage] = {key: options[key] for key in override.named}
    return data


def _config(document: Document) -> Config:
    if is_table(document):
        what = "this is a tuning table; expected a configuration, which names it by `select: {table: FILE}`"
        raise document.error((), what)
    mistakes = Mistakes()
    known = ("version", "backends", "algorithms", "numerics", "elastic", "pipeline", "rules", "observe")
    mistakes.collect(lambda: check_keys(document, (), known), None)
    mistakes.collect(lambda: _check_version(document), None)
    backends = mistakes.collect(lambda: read_backends(document), None)
    pipeline, sound = _pipeline(document, mistakes)
    if backends is not None:
        pipeline = without_steps(pipeline)
    for index, spec in enumerate(pipeline if sound else ()):
        keys = ("pipeline", index, spec.name)
        mistakes.collect(partial(_check_beside, spec.options, document, keys, pipeline, backends), None)
    rules = _rules(document, pipeline, sound, backends, mistakes)
    algorithms = mistakes.collect(lambda: _algorithms(document), ())
    observe = mistakes.collect(partial(_observe, document), None) or default_observe()
    numerics = mistakes.collect(partial(_section, Numerics, "numerics", document), Numerics())
    elastic = mistakes.collect(partial(_section, Elastic, "elastic", document), Elastic())
    config = Config(1, backends, pipeline, rules, algorithms, document.name, observe, numerics, elastic)
    if len(mistakes):  # files are normally read later, but not after this error: report their mistakes now
        for ref in config.tables:
            mistakes.collect(ref.digest, None)
        for files in algorithms:
            mistakes.collect(files.digests, None)
    mistakes.raise_all()
    return config


def _section(options: type[OptionsT], name: str, document: Document) -> OptionsT:
    """Return the options under a key of the document, or the default ones."""
    data = mapping_at(document, (name,)) if name in document.data else {}
    return validate(options, data, document, (name,))


def is_table(document: Document) -> bool:
    """Return whether a document is a tuning table, which may be passed as a configuration by mistake."""
    rules = document.data.get("rules")
    of_table = isinstance(rules, list) and any(
        isinstance(rule, dict) and {"kind", "bytes"} <= set(rule) and "match" not in rule for rule in rules
    )
    return "pipeline" not in document.data and ("fingerprint" in document.data or of_table)


def _observe(document: Document) -> BaseModel | None:
    if "observe" not in document.data:
        return None
    keys: Keys = ("observe",)
    if (known := registry.observe_options()) is None:
        raise document.error(keys, "this installation of mcr_plus has no folder `observe`")
    options: BaseModel = validate(known, mapping_at(document, keys), document, keys)
    _check_beside(options, document, keys, (), None)
    return options


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


def _check_beside(
    options: BaseModel,
    document: Document,
    keys: Keys,
    pipeline: tuple[StageSpec, ...],
    backends: tuple[str, ...] | None,
) -> None:
    """Raise `ConfigError` for options that conflict with the rest of the configuration."""
    if (conflict := problem(options, [spec.name for spec in pipeline], backends)) is not None:
        inside, what = conflict
        raise document.error((*keys, *inside), what)


def _check_version(document: Document) -> None:
    version = document.data.get("version", None if document.lines is not None else 1)
    check_version(version, document)


def _pipeline(document: Document, mistakes: Mistakes) -> tuple[tuple[StageSpec, ...], bool]:
    """Return the stages, and whether all are valid; an invalid stage is included with `NoOptions`."""
    before = len(mistakes)
    names = mistakes.collect(lambda: _stage_names(document, mistakes), [])
    if names is None:
        return default_pipeline(), True
    stages = []
    for index, name in enumerate(names):
        if name is not None:
            keys = ("pipeline", index, name)
            stages.append(
                mistakes.collect(partial(_stage, name, document, keys), StageSpec(name, NoOptions()))
            )
    if None not in names and names:
        mistakes.collect(lambda: _check_order([spec.name for spec in stages], document), None)
        stages = _with_required(stages)
    return tuple(stages), len(mistakes) == before


def _with_required(stages: list[StageSpec]) -> list[StageSpec]:
    """Add required stages that the document omits, with default options."""
    select, dispatch = (
        []
        if any(spec.name == name for spec in stages)
        else [StageSpec(name, declared_options("stages", name)())]
        for name in ("select", "dispatch")
    )
    end = len(stages) if dispatch else -1
    return [*stages[:end], *select, *stages[end:], *dispatch] if select else [*stages, *dispatch]


def _stage_names(document: Document, mistakes: Mistakes) -> list[str | None] | None:
    """Return the name of every stage (None for an invalid one); None without a pipeline."""
    items = list_at(document, "pipeline")
    if items is None:
        return None
    if not items:
        raise document.error(
            ("pipeline",), "empty pipeline; expected at least one stage, or no pipeline for the default one"
        )
    return [mistakes.collect(partial(_stage_name, document, index), None) for index in range(len(items))]


def _stage(name: str, document: Document, keys: Keys) -> StageSpec:
    return StageSpec(name, read_options(name, document, keys), document.place(keys))


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
            what = f"stage {name!r} comes after {late!r}"
            raise document.error(keys, f"{what}; expected the order {', '.join(registry.STAGE_ORDER)}")
    if "dispatch" in names and names[-1] != "dispatch":
        what = f"stage {names[-1]!r} comes after 'dispatch'; expected dispatch last"
        raise document.error(("pipeline", len(names) - 1, names[-1]), what)


def _rank(stage: str) -> float:
    """Return the position of a built-in stage; NaN, which is unordered, for stages of other packages."""
    return registry.STAGE_ORDER.index(stage) if stage in registry.STAGE_ORDER else math.nan


def _rules(
    document: Document,
    pipeline: tuple[StageSpec, ...],
    sound: bool,
    backends: tuple[str, ...] | None,
    mistakes: Mistakes,
) -> tuple[Rule, ...]:
    items = mistakes.collect(lambda: list_at(document, "rules"), None) or []
    rules = [
        mistakes.collect(
            partial(_rule, document, ("rules", index), pipeline, sound, backends, mistakes), None
        )
        for index in range(len(items))
    ]
    return tuple(rule for rule in rules if rule is not None)


def _rule(
    document: Document,
    keys: Keys,
    pipeline: tuple[StageSpec, ...],
    sound: bool,
    backends: tuple[str, ...] | None,
    mistakes: Mistakes,
) -> Rule:
    data = mapping_at(document, keys)
    if sound:  # otherwise every rule would repeat the mistakes of the pipeline
        mistakes.collect(lambda: _check_rule_keys(document, keys, pipeline), None)
    match = Match()
    if "match" in data:
        match = mistakes.collect(lambda: _match(document, (*keys, "match")), match)
    backend: str | None = None
    if data.get("backend") is not None:
        at = (*keys, "backend")
        backend = mistakes.collect(lambda: _rule_backend(document, at, data["backend"], backends), None)
    sums: Sums | None = None
    if data.get("sums") is not None:
        sums = mistakes.collect(lambda: _rule_sums(document, keys, data["sums"], match), sums)
    overrides = []
    for spec in pipeline if sound else _assumed(pipeline, data):
        if spec.name in data:
            read = partial(_override, spec, document, (*keys, spec.name), pipeline, backends)
            overrides.append(mistakes.collect(read, Override(spec.name, spec.options, ())))
    place = f"{document.place(keys)}: {path_text(keys)}"
    return Rule(match, backend, sums, tuple(overrides), place)


def _assumed(pipeline: tuple[StageSpec, ...], rule: Mapping[str, Any]) -> tuple[StageSpec, ...]:
    """Return the stages to check a rule against when the pipeline has mistakes.

    These are the valid stages, and built-in stages with default options instead of invalid ones. `compress`
    is assumed only if the rule names a codec, because the codec determines the other valid options.
    """
    compress = rule.get("compress")
    names_codec = isinstance(compress, Mapping) and "codec" in compress
    known = {spec.name: spec for spec in pipeline if not isinstance(spec.options, NoOptions)}
    defaults = {
        name: StageSpec(name, declared_options("stages", name)())
        for name in registry.STAGE_ORDER
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
    outside = [key for key in data if key in Match.model_fields]
    if outside and "match" not in data:
        inside = ", ".join(f"{key}: {data[key]}" for key in outside)
        raise document.error(keys, f"{outside[0]} is outside of match; expected match: {{{inside}}}")
    check_keys(document, keys, ("match", "backend", "sums", *here))
    if "match" not in data:
        raise document.error(keys, "no match; expected a mapping `match` that selects operations")
    if not any(data.get(name) for name in ("backend", "sums", *here)):
        raise document.error(
            keys, f"changes nothing; expected at least one of backend, sums, {', '.join(here)}"
        )


def _rule_backend(document: Document, keys: Keys, text: object, backends: tuple[str, ...] | None) -> str:
    name = read_backend(text, document, keys)
    if backends is not None and backend_name(name) not in backends:
        raise document.error(keys, f"backend {name!r} is not in backends; known: {', '.join(backends)}")
    return name


def _rule_sums(document: Document, keys: Keys, text: object, match: Match) -> Sums:
    if match.param is not None:
        what = "gradients of several parameters travel together; expected a rule that matches their tag"
        raise document.error((*keys, "sums"), what)
    return validate(Numerics, {"sums": text}, document, keys).sums


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
    options = read_options(spec.name, document, keys, plain_options(spec.options))
    _check_beside(options, document, keys, pipeline, backends)
    if "preset" in named:  # a preset sets several options
        named = tuple(sorted(plain_options(options)))
    return Override(spec.name, options, named)
