"""Collectives that gradients flow back through; see `mcr_plus.api.autograd`."""

from mcr_plus.api.autograd import (
    all_gather,
    all_reduce,
    all_to_all_single,
    halo_exchange,
    redistribute,
    reduce_scatter,
    replicate,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "halo_exchange",
    "redistribute",
    "reduce_scatter",
    "replicate",
]
