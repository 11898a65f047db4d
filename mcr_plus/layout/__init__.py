"""Layouts of tensors over ranks, and redistribution between any two of them.

from mcr_plus.layout import Layout
"""

from mcr_plus.layout.layout import Layout as Layout
