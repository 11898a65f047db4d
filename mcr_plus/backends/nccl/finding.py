"""Search for the NCCL library that a process uses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import torch

_NAME: Final = "libnccl.so"
LOADER: Final = f"{_NAME}.2"
"""Name passed to the system's loader, which searches LD_LIBRARY_PATH first."""


class FoundLibrary(NamedTuple):
    """A library: path, and how it was found, as text."""

    path: str
    how: str


def library() -> FoundLibrary | None:
    """Return the NCCL of this process; None if only the system's loader may find one. The first of:

    1. the library in LD_PRELOAD;
    2. a library that this process has loaded, as the imports of torch and CuPy do;
    3. the wheel nvidia-nccl beside torch, which torch loads, then a wheel elsewhere on Python's path;
    4. the library included with CuPy (`cupy/.data/lib`) or installed by it (`python -m
       cupyx.tools.install_library --library nccl`, in CUPY_CUDA_LIB_PATH or ~/.cupy/cuda_lib).

    Otherwise the system's loader searches LD_LIBRARY_PATH, then its own folders. Two NCCL libraries in one
    process would each keep their own state and GPU memory, so a loaded library comes first; torch calls the
    one in LD_PRELOAD too.
    """
    return next(_candidates(), None)


def loaded() -> FoundLibrary | None:
    """Return the library that the system's loader has loaded, and how it was found."""
    path = next(_loaded(), None)
    if path is None:
        return None
    folders = [folder.rstrip("/") for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    by_variable = str(Path(path).parent) in folders
    return FoundLibrary(path, "LD_LIBRARY_PATH" if by_variable else "the system's loader")


def _candidates() -> Iterator[FoundLibrary]:
    preloaded = re.split("[ :]+", os.environ.get("LD_PRELOAD", ""))
    yield from (FoundLibrary(name, "LD_PRELOAD") for name in preloaded if _is_library(name))
    yield from (FoundLibrary(path, "loaded in this process") for path in _loaded())
    beside = Path(torch.__file__).parents[1] / "nvidia" / "nccl"
    yield from _in(sorted(beside.glob(f"lib/{_NAME}*")), "the wheel nvidia-nccl beside torch")
    for folder in _package("nvidia"):
        yield from _in(sorted(folder.glob(f"nccl/lib/{_NAME}*")), "a wheel nvidia-nccl")
    for folder in _package("cupy"):
        yield from _in(sorted(folder.glob(f".data/lib/{_NAME}*")), "the wheel of CuPy")
    installed = Path(os.environ.get("CUPY_CUDA_LIB_PATH") or "~/.cupy/cuda_lib").expanduser()
    newest = sorted(installed.glob(f"*/nccl/*/lib*/{_NAME}*"), key=_version, reverse=True)
    yield from _in(newest if _package("cupy") else (), "CuPy's install_library")


def _in(paths: Iterable[Path], how: str) -> Iterator[FoundLibrary]:
    yield from (FoundLibrary(str(path), how) for path in paths if path.is_file())


def _is_library(path: str) -> bool:
    return Path(path).name.startswith(_NAME)


def _loaded() -> Iterator[str]:
    """Yield the paths of the NCCL libraries that this process has loaded."""
    try:
        with open("/proc/self/maps") as maps:
            fields = [line.split(maxsplit=5) for line in maps if "libnccl" in line]
    except OSError:
        return
    yield from sorted({row[5].strip() for row in fields if len(row) > 5 and _is_library(row[5].strip())})


def _package(name: str) -> list[Path]:
    """Yield the folders of an importable package, without importing it."""
    try:
        spec = find_spec(name)
    except ValueError:  # a module object created by hand
        return []
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def _version(path: Path) -> tuple[list[int], str]:
    """Return the versions in .../CUDA version/nccl/version/lib/libnccl.so.2, for comparisons."""
    of_cuda, _, of_nccl = path.parts[-5:-2]
    return [int(number) for number in re.findall(r"\d+", f"{of_cuda} {of_nccl}")], path.name
