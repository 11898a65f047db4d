"""The `mcr-plus` command line."""
