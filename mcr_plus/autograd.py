"""Differentiable collectives; see `api.autograd` and `layout.autograd`."""

from importlib import import_module
from typing import TYPE_CHECKING

from mcr_plus.api.autograd import all_gather, all_reduce, all_to_all_single, reduce_scatter, replicate
from mcr_plus.core.foreign_module_names import no_attribute

if TYPE_CHECKING:
    from mcr_plus.layout.autograd import halo_exchange, redistribute

__all__ = [
    "all_gather", "all_reduce", "all_to_all_single", "halo_exchange", "redistribute", "reduce_scatter",
    "replicate",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in ("halo_exchange", "redistribute"):
        return getattr(import_module("mcr_plus.layout.autograd"), name)
    raise no_attribute(__name__, name, __all__)
