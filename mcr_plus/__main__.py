"""Run the `mcr-plus` command by `python -m mcr_plus`."""

from mcr_plus.cli.main import main

main()
