"""The `mcr-plus` command.

Exit status: 0 success, 2 bad usage or configuration, 1 failure. `--json` prints exactly one JSON document on
stdout; errors go to stderr, one line each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from mcr_plus.cli.output import print_error
from mcr_plus.core.environment import package_version
from mcr_plus.errors import ConfigError, McrError

_FAILED: Final = 1
_BAD_USAGE: Final = 2
_COMMANDS: Final = (
    "doctor", "run", "validate", "explain", "layout", "tune", "bench", "plan", "replay", "simulate",
    "diagnose", "compare", "report", "warmup", "top", "table", "msccl", "trace",
)  # fmt: skip
"""Each is a module of `mcr_plus.cli` with a function of that name, or with an `app` of subcommands."""


def _print_version(requested: bool) -> None:
    if requested:
        print(f"mcr-plus {package_version()}")
        raise typer.Exit


def _common(
    _version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Communication for distributed deep learning: start ranks, check configurations, explain and tune."""


def app(names: Iterable[str] = _COMMANDS) -> typer.Typer:
    """Return the command line with these commands."""
    words_for_help = {"help_option_names": ["--help", "-h"]}  # commands inherit it
    made = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=words_for_help)
    made.callback()(_common)
    for name in names:
        module: Any = import_module(f"mcr_plus.cli.{name}")
        if hasattr(module, "app"):
            made.add_typer(module.app, name=name)
        else:
            words = {"allow_interspersed_args": False} if name in ("run", "simulate") else None
            made.command(context_settings=words)(getattr(module, name))
    return made


def main() -> None:
    """Run the command line; print an `McrError` on stderr without a traceback."""
    # Import only the command that is called: importing all of them takes three times as long.
    named = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    try:
        app([named] if named in _COMMANDS else _COMMANDS)(prog_name="mcr-plus")
    except McrError as error:
        print_error(str(error))
        sys.exit(_BAD_USAGE if isinstance(error, ConfigError) else _FAILED)


if __name__ == "__main__":
    main()
