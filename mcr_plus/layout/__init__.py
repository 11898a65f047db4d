"""Layouts of tensors over ranks, and redistribution between any two of them.

from mcr_plus.layout import Layout
"""

from typing import NoReturn

from mcr_plus.core.foreign_module_names import no_attribute
from mcr_plus.layout.layout import Layout as Layout


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, ("Layout",))
