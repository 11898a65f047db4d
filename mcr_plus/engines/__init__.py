"""Inference engines that take weights from `mcr.sync`. Imported by name only; each needs its own extra."""
