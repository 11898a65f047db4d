"""Sizes of checksums, separate from the functions, which import a compiler."""

from typing import Final

BLOCK: Final = 64 << 10
"""Bytes of a block."""
LANES: Final = 64
CHAIN_BYTES: Final = 8 * LANES
"""Bytes of the chains of a block under way, and of a row."""
