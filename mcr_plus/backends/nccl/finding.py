"""Where the NCCL library is that a process uses."""

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
"""What the loader of the system is asked for, which looks in LD_LIBRARY_PATH first."""


class FoundLibrary(NamedTuple):
    """A library: its path, and in words how it was found."""

    path: str
    how: str


def library() -> FoundLibrary | None:
    """The NCCL of this process; None if only the system's loader may know one. The first of:

    1. the one in LD_PRELOAD;
    2. one that this process has loaded, as torch or CuPy do when they are imported;
    3. the wheel nvidia-nccl beside torch, which torch loads, then that of another folder of Python's path;
    4. the one that CuPy has with it (`cupy/.data/lib`), or has installed (`python -m
       cupyx.tools.install_library --library nccl`, in CUPY_CUDA_LIB_PATH or ~/.cupy/cuda_lib).

    If there is none of these, the loader of the system is asked: LD_LIBRARY_PATH, then its own folders. Two
    NCCL libraries in one process would each keep their own state and GPU memory, which is why one that is
    there already comes first: torch calls that of LD_PRELOAD, too.
    """
    return next(_candidates(), None)


def loaded() -> FoundLibrary | None:
    """What the loader of the system has found, after it has loaded it."""
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
    """The paths of those that this process has loaded."""
    try:
        with open("/proc/self/maps") as maps:
            fields = [line.split(maxsplit=5) for line in maps if "libnccl" in line]
    except OSError:
        return
    yield from sorted({row[5].strip() for row in fields if len(row) > 5 and _is_library(row[5].strip())})


def _package(name: str) -> list[Path]:
    """The folders of a package that can be imported, without importing it."""
    try:
        spec = find_spec(name)
    except ValueError:  # a module that has been made by hand
        return []
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def _version(path: Path) -> tuple[list[int], str]:
    """For comparisons: of .../CUDA version/nccl/version/lib/libnccl.so.2, the versions."""
    of_cuda, _, of_nccl = path.parts[-5:-2]
    return [int(number) for number in re.findall(r"\d+", f"{of_cuda} {of_nccl}")], path.name
