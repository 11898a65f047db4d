"""The `mcr-plus` command line."""

from __future__ import annotations

import sys


def start() -> None:
    """Run the command line; exit with an install hint if rich or typer is missing."""
    try:
        from mcr_plus.cli.main import main
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(f"mcr-plus: the command line needs {error.name}, which is missing: pip install rich typer")
    main()
