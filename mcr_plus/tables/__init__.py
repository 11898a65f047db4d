"""Tuning tables: rules, cost, fingerprints, files, and formats of other libraries."""

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).with_name("builtin")
"""Folder of the built-in tables."""
BUILT_IN: Final = "built-in"
"""The `backend` of rules that leave their operations to the built-in preference."""
EAGER: Final = 64 * 1024
"""Bytes up to which MPI sends a message between hosts at once; larger ones move only while both ends poll."""
