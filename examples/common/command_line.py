"""The command line of an example."""

from __future__ import annotations

from collections.abc import Callable

import typer


def run(main: Callable[..., None]) -> None:
    """Run `main` with options that are its parameters.

    `typer.run` would replace the hook of uncaught exceptions, by which `mcr-plus run` reports how a rank has
    ended.
    """
    app = typer.Typer(add_completion=False)
    app.command()(main)
    typer.main.get_command(app)()
