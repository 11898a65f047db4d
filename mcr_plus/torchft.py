"""Process group of torchft over mcr_plus.

from mcr_plus.torchft import ProcessGroupMcr
from torchft import Manager

manager = Manager(pg=ProcessGroupMcr(timeout=timedelta(seconds=30)), min_replica_size=2, ...)
"""

from mcr_plus.torch_backend.torchft_group import ProcessGroupMcr

__all__ = ["ProcessGroupMcr"]
