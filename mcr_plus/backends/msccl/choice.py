"""What `msccl` is in this process: shared memory, or the GPU library that MCR_MSCCL_LIBRARY names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcr_plus.environment import msccl_library

if TYPE_CHECKING:
    from mcr_plus.interfaces import Backend


def chosen() -> type[Backend]:
    """The class of the backend."""
    if msccl_library() is None:
        from mcr_plus.backends.msccl.backend import MscclBackend

        return MscclBackend
    from mcr_plus.backends.msccl.library import MscclLibraryBackend

    return MscclLibraryBackend


backend = chosen()
