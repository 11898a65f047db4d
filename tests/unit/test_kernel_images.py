"""Images of kernels: made once, loaded without numba, made again for other sources; and without a linker."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mcr_plus.backends.shm import collectives, reductions
from mcr_plus.kernels import compiling, images, sources

MODULE = "mcr_plus.backends.shm.reduce_kernels"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for images, and no memory of those that were loaded."""
    monkeypatch.setattr(images, "cache_folder", lambda: tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for each in (images.image, images.c_kernel, sources.digest, reductions.kernels_for):
        each.cache_clear()


def added() -> list[float]:
    """The sum of two arrays by the kernel of float32."""
    kernels = reductions.kernels_for(torch.float32, "SUM")
    left, right = np.arange(37, dtype=np.float32), np.full(37, 0.5, np.float32)
    add = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernels.combine)
    add(left.ctypes.data, left.ctypes.data, right.ctypes.data, left.size)
    return [float(each) for each in left]


SUM = [index + 0.5 for index in range(37)]


def test_an_image_is_made_once_and_then_loaded(folder: Path) -> None:
    arguments = ("kernel", torch.float32, "SUM")
    assert not images.has_image(MODULE, *arguments)
    assert added() == SUM
    (made,) = folder.iterdir()
    before = made.stat()
    forget()
    assert images.has_image(MODULE, *arguments)
    assert added() == SUM
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_an_image_of_other_sources_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added()
    (made,) = folder.iterdir()
    old = made.read_bytes()
    assert old.count(sources.files(MODULE)["backends/shm/atomics.py"].encode()) == 1
    made.unlink()  # the old contents are mapped
    made.write_bytes(old.replace(sources.files(MODULE)["backends/shm/atomics.py"].encode(), b"0" * 32))
    forget()
    assert added() == SUM
    assert made.read_bytes().rpartition(b"\n")[2] == old.rpartition(b"\n")[2]
    monkeypatch.setattr(images, "compiler", lambda: "another processor")
    forget()
    assert added() == SUM
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("fails", ["no compiler", "compiler fails", "no folder", "damaged"])
def test_numba_compiles_where_no_image_can_be_made(
    fails: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fails == "no compiler":
        monkeypatch.setattr(images, "_LINKERS", ("no-such-compiler",))
    elif fails == "compiler fails":
        monkeypatch.setattr(images, "_LINKERS", ("false",))
    elif fails == "no folder":
        monkeypatch.setattr(images, "cache_folder", lambda: None)
    else:
        made = images._path(MODULE, "kernel", (torch.float32, "SUM"))
        assert made is not None
        made.write_bytes(b"\x7fELF" + bytes(100) + b"\n" + json.dumps(sources.files(MODULE)).encode())
    assert added() == SUM
    assert images.image(MODULE, "kernel", torch.float32, "SUM") is None
    if fails == "compiler fails":  # it is noted, and not tried in every process
        assert images.has_image(MODULE, "kernel", torch.float32, "SUM")


def test_both_ways_give_begin_and_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_LINKERS", ())
    begin, advance = map(vars, collectives.begin_and_advance.__wrapped__())
    assert (begin["__name__"], advance["__name__"]) == ("begin", "advance")


def test_a_process_loads_them_without_numba() -> None:
    program = """
import sys
from mcr_plus.backends.shm.collectives import addresses, begin_and_advance
begin_and_advance()
addresses()
print([name for name in ("numba", "llvmlite") if name in sys.modules])
"""
    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True)  # it may compile them
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_text_of_the_compiler_changes_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiling.compiler.__wrapped__()
    assert compiling.compiler.__wrapped__() == before
    monkeypatch.setenv("NUMBA_OPT", "1")
    assert compiling.compiler.__wrapped__() != before
    assert os.environ["NUMBA_OPT"] in compiling.compiler.__wrapped__()
