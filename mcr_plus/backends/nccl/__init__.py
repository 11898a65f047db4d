"""NCCL, through its C ABI: any library with this ABI can be loaded."""

from __future__ import annotations

from mcr_plus.backends.nccl.backend import NcclBackend

__all__ = ["NcclBackend"]
