"""Features that some supported versions of torch lack."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from mcr_plus.core.c10d import TCPStore

FSDP2_ON_CPU: Final = hasattr(torch.cpu.Stream, "record_event")
"""True if models of `fully_shard` run without a GPU; torch 2.6 cannot run them."""
FSDP_HOOKS: Final = hasattr(FSDPModule, "set_custom_all_gather")
"""True if `mcr.fsdp` works; from torch 2.8 on."""
needs_list_keys: Final = pytest.mark.skipif(
    not hasattr(TCPStore, "list_keys"), reason="this torch does not list the keys of a store"
)


def runs(program: str) -> bool:
    """Return whether this torch has all features of an example in the documents."""
    return FSDP_HOOKS or "mcr.fsdp(" not in program
