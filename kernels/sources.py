"""Sources of kernels, for the caches of compiled kernels on disk.

numba compiles functions and constants of other modules into a kernel, but its cache compares only the file of
the kernel. `stamp` covers the other files as well.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Final

_PACKAGE: Final = Path(__file__).parent.parent
_IMPORTED: Final = re.compile(rb"^(?:from|import) ([\w.]+)", re.MULTILINE)
"""Imports at the top of a module. Those in functions and for types bring nothing that a kernel could use."""


@cache
def stamp(name: str) -> str:
    """Return a digest of the files of `modules(name)`, in hex. `name`: an imported module."""
    digest = blake2b(digest_size=16)
    for each in sorted(modules(name)):
        digest.update(_source(each)[0])
    return digest.hexdigest()


def files(name: str) -> dict[str, str]:
    """Return the files of `modules(name)`, which are modules of this package, with their digests."""
    found = {each: getattr(sys.modules[each], "__file__", None) for each in modules(name)}
    return {
        str(Path(file).relative_to(_PACKAGE)): _source(each)[0].hex() for each, file in found.items() if file
    }


@cache
def digest(file: str) -> str:
    """Return the present digest of one of `files`, in hex."""
    return _digest((_PACKAGE / file).read_bytes()).hex()


def modules(name: str) -> set[str]:
    """Return the names of a module and of all modules of its package that it imports, even indirectly."""
    found, left = {name}, [name]
    while left:
        new = _source(left.pop())[1] - found
        found |= new
        left += new
    return found


@cache
def _source(name: str) -> tuple[bytes, frozenset[str]]:
    """Return the digest of an imported module's file, and the modules of its package that it imports."""
    module = sys.modules[name]
    file = getattr(module, "__file__", None)
    text = Path(file).read_bytes() if file else b""  # a folder without `__init__.py` has no text
    named = {each.decode() for each in _IMPORTED.findall(text)}
    if not hasattr(module, "__path__"):  # a package has all imported submodules as attributes
        named |= {each.__name__ for each in vars(module).values() if isinstance(each, ModuleType)}
    package = name.partition(".")[0] + "."
    imported = frozenset(each for each in named if each.startswith(package) and each in sys.modules)
    return _digest(text), imported


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()
