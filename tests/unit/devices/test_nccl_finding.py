"""Places of NCCL: their order, and the line of doctor that names the place."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import mcr_plus
from unit.devices.fake_nccl import Simulator

from mcr_plus.backends.nccl import abi, finding

Make = Callable[[str], str]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes an empty library in a folder; no others are found, and packages are imported from this folder."""
    for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUPY_CUDA_LIB_PATH", str(tmp_path / "cuda_lib"))
    monkeypatch.setattr(finding, "torch", SimpleNamespace(__file__=str(tmp_path / "first/torch/__init__.py")))
    monkeypatch.setattr(finding, "_loaded", lambda: iter(()))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "second")])

    def make(place: str) -> str:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        importlib.invalidate_caches()
        return str(path)

    abi.load.cache_clear()
    yield make
    abi.load.cache_clear()


def test_the_order(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new place comes before the earlier ones."""
    assert finding.library() is None
    places = (
        ("cuda_lib/12.x/nccl/2.9.1/lib/libnccl.so.2", "install_library"),
        ("cuda_lib/12.x/nccl/2.16.5/lib/libnccl.so.2", "install_library"),
        ("second/cupy/.data/lib/libnccl.so.2", "the wheel of CuPy"),
        ("second/nvidia/nccl/lib/libnccl.so.2", "a wheel nvidia-nccl"),
        ("first/nvidia/nccl/lib/libnccl.so.2", "beside torch"),
    )
    make("second/cupy/__init__.py")
    for place, how in places:
        path = make(place)
        found = finding.library()
        assert found is not None
        assert found.path == path
        assert how in found.how
    monkeypatch.setattr(finding, "_loaded", lambda: iter(["/a/libnccl.so.2.27"]))
    assert finding.library() == ("/a/libnccl.so.2.27", "loaded in this process")
    monkeypatch.setenv("LD_PRELOAD", "/a/libother.so:/b/libnccl.so.2.32 /c/libnccl.so.2")
    assert finding.library() == ("/b/libnccl.so.2.32", "LD_PRELOAD")
    monkeypatch.setenv("LD_PRELOAD", "/a/libother.so")
    assert finding.library() == ("/a/libnccl.so.2.27", "loaded in this process")


def test_what_cupy_has_installed_counts_only_with_cupy(make: Make) -> None:
    make("cuda_lib/12.x/nccl/2.16.5/lib/libnccl.so.2")
    assert finding.library() is None


@pytest.mark.parametrize(
    ("variable", "how"), [("/x:/a/", "LD_LIBRARY_PATH"), ("/x", "the system's loader"), ("", "the system's")]
)
def test_the_loader_of_the_system(
    variable: str, how: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", variable)
    asked: list[str] = []

    def opened(name: str) -> Any:
        asked.append(name)
        monkeypatch.setattr(finding, "_loaded", lambda: iter(["/a/libnccl.so.2"]))
        return Simulator().library()

    monkeypatch.setattr(ctypes, "CDLL", opened)
    place = abi.load().place
    assert asked == ["libnccl.so.2"]
    assert place.startswith("/a/libnccl.so.2 (")
    assert how in place


def test_the_place_of_a_library(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Simulator().library())
    path = make("first/nvidia/nccl/lib/libnccl.so.2")
    assert abi.load().place == f"{path} (the wheel nvidia-nccl beside torch)"
    assert abi.load("/my/library.so").place == "/my/library.so"


def test_doctor_says_which_was_found_and_how_to_get_what_is_not() -> None:
    answer = mcr_plus("doctor")
    assert answer.returncode == 0, answer.stderr
    assert "for GPUs" in answer.stdout
    for package, extra in (("cupy", "mcr_plus[cuda"), ("triton", "mcr_plus[gpu]"), ("nccl", "nvidia-nccl")):
        line = next(line for line in answer.stdout.splitlines() if line.split()[:1] == [package])
        assert "not found" not in line or extra in line
