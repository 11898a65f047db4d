"""Memory layout of bells and the number of the futex call, shared by Python and compiled code."""

from __future__ import annotations

import platform
from typing import Final

LINE: Final = 128
"""Bytes of a rank's line: two cache lines, because cores fetch them in pairs."""
WANTED: Final = 8
"""Offset in a line of the bytes in which peers request to be woken."""
BYTES: Final = 8
"""Number of these bytes."""
SYSTEM_CALL: Final = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98}.get(
    platform.machine(), 0
)
"""System call number of futex(2); 0 if it is unknown, and bells are not used."""
WAIT: Final = 0
WAKE: Final = 1
EVERYBODY: Final = 0x7FFFFFFF
