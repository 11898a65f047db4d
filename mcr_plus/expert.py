"""Expert parallelism: tokens to the ranks of their experts, answers back; see `mcr_plus.api.expert`."""

from mcr_plus.api.expert import Dispatched, Pending, Routing, combine, dispatch

__all__ = ["Dispatched", "Pending", "Routing", "combine", "dispatch"]
