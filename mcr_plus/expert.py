"""Expert parallelism: tokens to the ranks of their experts, answers back; see `mcr_plus.api.expert`."""

from typing import NoReturn

from mcr_plus.api.expert import Dispatched, Pending, Routing, combine, dispatch
from mcr_plus.core.other_names import no_attribute

__all__ = ["Dispatched", "Pending", "Routing", "combine", "dispatch"]


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, __all__)
