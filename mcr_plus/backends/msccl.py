"""Backend `msccl`: shared memory, or the GPU library named by MCR_MSCCL_LIBRARY."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcr_plus.core.environment import msccl_library

if TYPE_CHECKING:
    from mcr_plus.backends.base import Backend


def chosen() -> type[Backend]:
    """Return the backend's class in this process."""
    if msccl_library() is None:
        from mcr_plus.backends.shm.backend import MscclBackend

        return MscclBackend
    from mcr_plus.backends.nccl.msccl_library import MscclLibraryBackend

    return MscclLibraryBackend


backend = chosen()
