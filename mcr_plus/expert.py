"""Expert parallelism: sends tokens to their experts' ranks and back; see `mcr_plus.parallel.expert`."""

from typing import NoReturn

from mcr_plus.core.foreign_module_names import no_attribute
from mcr_plus.parallel.expert import Dispatched, Pending, Routing, combine, dispatch

__all__ = ["Dispatched", "Pending", "Routing", "combine", "dispatch"]


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, __all__)
