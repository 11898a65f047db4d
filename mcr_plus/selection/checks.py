"""What can be said of a configuration's tables and algorithms before anything runs."""

from __future__ import annotations

from mcr_plus.config import Config
from mcr_plus.errors import ConfigError
from mcr_plus.selection.online import check_target
from mcr_plus.selection.table import Table, load_table


def checked_tables(config: Config) -> list[Table]:
    """The tables that a configuration names, each once.

    Raises `ConfigError` for what is wrong in one, and for rules that name a backend which the configuration
    does not have.
    """
    tables = [load_table(ref.resolve()) for ref in {ref.digest(): ref for ref in config.tables}.values()]
    for table in tables:
        for rule in table.rules:
            name = rule.backend.partition(":")[0]
            if config.backends is not None and name not in (*config.backends, "local"):
                raise ConfigError(
                    f"{rule.place}: backend '{name}' is not in the configuration's backends "
                    f"({', '.join(config.backends)}); add it there, or tune with --backends"
                )
    return tables


def use_algorithms(config: Config) -> None:
    """Read and verify the algorithm files that a configuration names, for `msccl:NAME` in this process.

    Raises `ConfigError` for what is wrong in one.
    """
    from mcr_plus.backends.msccl.catalog import use

    use(path for ref in config.algorithms for path in ref.resolve())


def check_targets(config: Config) -> None:
    """Raise `ConfigError` if what online refinement will learn could not be written here."""
    for options in config.select_options:
        check_target(options)
