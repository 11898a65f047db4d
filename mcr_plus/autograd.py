"""Collectives that gradients flow back through; see `mcr_plus.api.autograd`."""

from typing import NoReturn

from mcr_plus.api.autograd import (
    all_gather,
    all_reduce,
    all_to_all_single,
    halo_exchange,
    redistribute,
    reduce_scatter,
    replicate,
)
from mcr_plus.core.other_names import no_attribute

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "halo_exchange",
    "redistribute",
    "reduce_scatter",
    "replicate",
]


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, __all__)
