"""Calls of c10d that the backend `mcr` does not offer: queries return False, other calls are refused.

Otherwise torch would look for a C++ backend under the group, which a Python group does not have, and raise an
error about that. `tests/jobs/torch_backend/test_torch_names.py` finds calls defined neither here nor in the
group.
"""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from mcr_plus.core.c10d import ProcessGroup
from mcr_plus.errors import Unsupported
from mcr_plus.torch_backend.arguments import NAME

REFUSED: Final = {
    "_backend_id": "",
    "_end_time_estimate": "; mcr_plus.explain predicts the time of an operation",
    "_enable_collectives_timing": "; mcr_plus.record times operations",
    "_register_on_completion_hook": "; mcr_plus.record has the time of each operation",
    "_set_group_uid": "",
    "_start_time_estimate": "; mcr_plus.explain predicts the time of an operation",
    "allocate_tensor": "; it takes tensors from any memory",
    "memory_stats": "",
    "merge": "; reconfigure makes a world of other processes",
    "merge_remote_group": "; reconfigure makes a world of other processes",
    "mergeRemoteGroup": "; reconfigure makes a world of other processes",
    "new_window": "",
    "register_abort_hook": "; mcr_plus writes its dumps at an error by itself",
    "resume": "",
    "setUsePgForSymmMemRendezvous": "",
    "split": "; split_group makes a group of some ranks",
    "suspend": "",
    "unregister_abort_hook": "; it has none",
}
"""Refused methods of torch's `ProcessGroup` and `Backend`, each with a hint for the error text."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise Unsupported(f"{name}: the backend {NAME} does not support it{REFUSED.get(name, '')}")

    refuse.__name__ = name
    return refuse


class RefusingGroup(ProcessGroup):
    """Process group that refuses unsupported calls with clear errors."""

    supports_window = supports_abort_hooks = supports_completion_hooks = False
    supports_time_estimate = _supports_time_estimate = False
    supports_coalescing = False
    mem_allocator: Any = property(_refusal("mem_allocator"))
    use_pg_for_symm_mem_rendezvous: Any = property(
        lambda _: False, _refusal("use_pg_for_symm_mem_rendezvous")
    )

    def supports_tensor_alloc(self, device: object) -> bool:  # noqa: ARG002 - torch's signature
        """Return False: the group allocates no tensors."""
        return False

    def eager_connect_single_device(self, device: object) -> None:
        """Do nothing: the group is already connected when torch calls this."""


for _name in REFUSED:
    setattr(RefusingGroup, _name, _refusal(_name))
