"""The `mcr-plus` command.

Exit status: 0 success, 2 bad usage or configuration, 1 failure. `--json` prints exactly one JSON document on
stdout; errors go to stderr, one line each.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mcr_plus.cli.bench import bench
from mcr_plus.cli.diagnose import diagnose
from mcr_plus.cli.doctor import doctor
from mcr_plus.cli.explain import explain
from mcr_plus.cli.layout import layout
from mcr_plus.cli.msccl import app as msccl
from mcr_plus.cli.output import print_error
from mcr_plus.cli.plan import plan
from mcr_plus.cli.replay import replay
from mcr_plus.cli.report import report
from mcr_plus.cli.run import run
from mcr_plus.cli.table import app as table
from mcr_plus.cli.top import top
from mcr_plus.cli.trace import app as trace
from mcr_plus.cli.tune import tune
from mcr_plus.cli.validate import validate
from mcr_plus.cli.warmup import warmup
from mcr_plus.core.environment import package_version
from mcr_plus.errors import ConfigError, McrError

_FAILED = 1
_BAD_USAGE = 2

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(doctor)
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(validate)
app.command()(explain)
app.command()(layout)
app.command()(tune)
app.command()(bench)
app.command()(plan)
app.command()(replay)
app.command()(diagnose)
app.command()(report)
app.command()(warmup)
app.command()(top)
app.add_typer(table, name="table")
app.add_typer(msccl, name="msccl")
app.add_typer(trace, name="trace")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"mcr-plus {package_version()}")
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Communication for distributed deep learning: start ranks, check configurations, explain and tune."""


def main() -> None:
    """Run the command line; an `McrError` is printed on stderr without a traceback."""
    try:
        app(prog_name="mcr-plus")
    except McrError as error:
        print_error(str(error))
        sys.exit(_BAD_USAGE if isinstance(error, ConfigError) else _FAILED)


if __name__ == "__main__":
    main()
