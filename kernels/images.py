"""Kernels as shared objects on disk, which the system's loader loads without numba.

Importing numba and LLVM takes 0.2 s and 90 MiB, even if all kernels come from numba's cache. So the kernels
of the most common operations are linked once, by a C compiler, into images beside that cache. Where there is
no C compiler, or no folder from which code may run, numba compiles and loads them like all others.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from mcr_plus.kernels import sources
from mcr_plus.kernels.compiling import cache_folder, compiler, compiling

_FAST_CALL: Final = 0x80  # METH_FASTCALL
_LINKERS: Final = ("cc", "gcc", "clang")
_LIMIT_S: Final = 60.0


class Image(NamedTuple):
    """A kernel as a C function.

    Attributes:
        address: of the function.
        call: the same for Python, without a check of its arguments: int64 arrays for addresses, integers.
        keep: what both belong to.
    """

    address: int
    call: Any
    keep: object


class _Method(ctypes.Structure):
    """PyMethodDef of CPython."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@cache
def image(module: str, name: str, *arguments: object) -> Image | None:
    """Return the C function that `module.name(*arguments)` describes: its signature, and a Python function.

    The module, which imports numba, is imported only if there is no image yet. None: no image can be made.
    """
    path = _path(module, name, arguments)
    if path is None:
        return None
    if not _is_current(path):
        linker = next(filter(shutil.which, _LINKERS), None)
        if linker is None:
            return None
        with compiling(module.rpartition(".")[2]):
            _make(path, linker, module, *getattr(import_module(module), name)(*arguments))
    with suppress(OSError, AttributeError):  # it was not linked, or code may not run from this folder
        return _loaded(path)
    return None


def has_image(module: str, name: str, *arguments: object) -> bool:
    """Return whether `image` has nothing to compile."""
    path = _path(module, name, arguments)
    return path is not None and _is_current(path)


@cache
def c_kernel(module: str, name: str, *arguments: object) -> Any:
    """Return the C function as `image` does, or compiled by numba; other code calls its `address`."""
    made = image(module, name, *arguments)
    if made is not None:
        return made
    from mcr_plus.kernels.cpu import c_function

    return c_function(*getattr(import_module(module), name)(*arguments))


def _path(module: str, name: str, arguments: tuple[object, ...]) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    text = f"{module} {name} {arguments} {sys.implementation.cache_tag} {compiler()}"
    return folder / f"mcr_plus-{name}-{blake2b(text.encode(), digest_size=8).hexdigest()}.so"


def _is_current(path: Path) -> bool:
    """Return whether an image exists that was made of the present sources."""
    try:
        listed: dict[str, str] = json.loads(path.read_bytes().rpartition(b"\n")[2])
        return all(sources.digest(file) == digest for file, digest in listed.items())
    except (OSError, ValueError, AttributeError):  # missing, or no image
        return False


def _make(path: Path, linker: str, module: str, signature: Any, function: Any) -> None:
    """Link the image of a function. If that fails, write one that cannot be loaded, to fail only once."""
    from mcr_plus.kernels.cpu import object_code

    listed = json.dumps(sources.files(module)).encode()
    with suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        code, made = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        with suppress(OSError, RuntimeError, subprocess.SubprocessError):
            code.write_bytes(object_code(signature, function))
            command = [linker, "-shared", "-o", str(made), str(code)]
            subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT_S)
        with made.open("ab") as file:
            file.write(b"\n" + listed)
        os.replace(made, path)


def _loaded(path: Path) -> Image:
    library = ctypes.CDLL(str(path))
    run, call = (ctypes.cast(each, ctypes.c_void_p).value for each in (library.run, library.call))
    assert run is not None
    method = _Method(b"kernel", call, _FAST_CALL, None)
    function: Any = ctypes.pythonapi.PyCFunction_NewEx
    function.restype, function.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
    return Image(run, function(ctypes.addressof(method), None, None), (library, method))
