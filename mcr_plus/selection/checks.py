"""Check a configuration's tables and algorithms before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mcr_plus import registry
from mcr_plus.backends import backend_class
from mcr_plus.config.document import Document, Mistakes
from mcr_plus.config.options import StageOptions
from mcr_plus.config.schema import Config
from mcr_plus.errors import ConfigError
from mcr_plus.msccl import FILES
from mcr_plus.selection.options import SelectOptions
from mcr_plus.tables import BUILT_IN

if TYPE_CHECKING:
    from mcr_plus.tables.table import Table


def checked_tables(config: Config) -> list[Table]:
    """Return the tables that a configuration names, each once.

    Tables may name algorithms, so `use_algorithms` must run first. Raises `ConfigError` for errors in a
    table, and for rules that name a backend missing from the configuration or an unknown algorithm.
    """
    files = {ref.digest(): ref for ref in config.tables}.values()
    if not files:
        return []
    from mcr_plus.tables.table import load_table  # imported here: most jobs name no table

    tables = [load_table(ref.resolve()) for ref in files]
    mistakes = Mistakes()
    for table in tables:
        mistakes.collect(partial(_check_backends, table, config), None)
        for rule in table.rules:
            mistakes.collect(partial(check_algorithm, rule.backend, rule.place), None)
    mistakes.raise_all()
    return tables


def named_tables(document: Document) -> Iterator[Path]:
    """Yield the table files that a configuration names, even if the configuration is otherwise invalid."""
    for part in ("pipeline", "rules"):
        entries = document.data.get(part)
        for entry in entries if isinstance(entries, list) else ():
            select = entry.get("select") if isinstance(entry, dict) else None
            text = select.get("table") if isinstance(select, dict) else None
            if isinstance(text, str) and (document.folder / text).is_file():
                yield document.folder / text


def _check_backends(table: Table, config: Config) -> None:
    """Raise `ConfigError` for backends missing from the configuration, each with the first rule."""
    if config.backends is None:
        return
    known = (*config.backends, "local", BUILT_IN)
    places: dict[str, list[str]] = {}
    for rule in table.rules:
        name = rule.backend.partition(":")[0]
        if name not in known:
            places.setdefault(name, []).append(rule.place)
    lines = [
        f"{first}: backend '{name}' is not in the configuration's backends ({', '.join(config.backends)}); "
        f"add it there, or tune with --backends{f' ({len(more)} more rules name it)' if more else ''}"
        for name, (first, *more) in places.items()
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def use_algorithms(config: Config) -> None:
    """Read and verify the algorithm files that a configuration names, for `msccl:NAME` in this process.

    Raises `ConfigError` for errors in a file, and if the configuration names an unknown algorithm.
    """
    if config.algorithms or FILES:
        from mcr_plus.msccl.catalog import use  # imported here: most jobs name no files

        use(path for ref in config.algorithms for path in ref.resolve())
    for choice, place in _choices(config):
        check_algorithm(choice, place)


def check_algorithm(choice: str, place: str, files: str = "`algorithms:` of the configuration") -> None:
    """Raise `ConfigError`, prefixed with `place`, for an algorithm that no operation has.

    Sizes and numbers of ranks are checked later, for each operation. `files`: the setting named in the error
    text as the place to add a file.
    """
    name, _, algorithm = choice.partition(":")
    if not algorithm:
        return
    backend = backend_class(name)
    if not backend.has_algorithms:
        others = ", ".join(name for name in registry.names("backends") if backend_class(name).has_algorithms)
        raise ConfigError(
            f"{place}: backend {choice!r}: {name} has no algorithms to choose from; expected {name!r} alone, "
            f"or a backend that has some: {others}"
        )
    if reason := backend.unknown_algorithm(algorithm):
        raise ConfigError(
            f"{place}: backend {choice!r}: {reason}; if a file defines it, add the file to {files}"
        )


def _choices(config: Config) -> Iterator[tuple[str, str]]:
    """Yield every backend that the configuration names for operations, and the place of the name."""
    named = [(spec.options, spec.place) for spec in config.pipeline]
    for rule in config.rules:
        if rule.backend is not None:
            yield rule.backend, f"{rule.place}.backend"
        named += [(override.options, rule.place) for override in rule.overrides]
    for options, place in named:
        if isinstance(options, StageOptions):
            for where, choice in options.named_backends().items():
                yield choice, f"{place}: {where}"


def check_targets(config: Config) -> None:
    """Raise `ConfigError` if this process could not write the table of online refinement."""
    for options in config.all_options:
        if isinstance(options, SelectOptions) and options.online:
            from mcr_plus.selection.refined_table import check_target

            check_target(options)
