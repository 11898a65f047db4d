"""The search for an MPI library, and the settings before MPI is initialised."""

from __future__ import annotations

import importlib.machinery
import os
import site
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcr_plus.backends import backend_class
from mcr_plus.rendezvous import mpi_library

VARIABLE = "OMPI_MCA_threads_pthreads_yield_strategy"


@pytest.mark.parametrize(
    ("ranks", "given", "expected"),
    [(2, None, None), (3, None, "nanosleep"), (3, "sched_yield", "sched_yield")],
)
def test_ranks_that_share_cores_sleep_in_open_mpi(
    monkeypatch: pytest.MonkeyPatch, ranks: int, given: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(mpi_library, "cores", lambda: 2)
    for name, value in {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": f"{ranks}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{ranks}",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(VARIABLE, given or "")  # so that it is restored
    if given is None:
        monkeypatch.delenv(VARIABLE)
    mpi_library._have_idle_ranks_sleep()
    assert os.environ.get(VARIABLE) == expected


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An environment with an mpi4py that any library can be given to, and no library; its folder."""
    pytest.importorskip("mpi4py")
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '4'")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setattr(site, "PREFIXES", [])
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    for name in ("MPI4PY_LIBMPI", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    sys.modules.pop("mpi4py", None)


def library(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "libmpi.so.12").touch()
    return folder


def test_a_library_is_looked_for_where_mpi4py_looks(monkeypatch: pytest.MonkeyPatch, nothing: Path) -> None:
    assert mpi_library.missing_library() == "mpi4py is installed, but no MPI library"
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{library(nothing / 'module')}")
    assert not mpi_library.missing_library()
    monkeypatch.delenv("LD_LIBRARY_PATH")
    monkeypatch.setattr(site, "USER_BASE", str(library(nothing / "user/lib").parent))
    assert mpi_library.missing_library()
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    assert not mpi_library.missing_library()


@pytest.mark.parametrize("given", ["{0}/libmpi.so.12", "{0}", "/no:{0}", "$HERE/libmpi.so.12", "libmpi.so"])
def test_a_library_that_is_named(monkeypatch: pytest.MonkeyPatch, nothing: Path, given: str) -> None:
    folder = library(nothing / "elsewhere")
    monkeypatch.setenv("HERE", str(folder))
    monkeypatch.setenv("MPI4PY_LIBMPI", given.format(folder))
    assert not mpi_library.missing_library()
    assert backend_class("mpi").availability().available


def test_a_named_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, nothing: Path) -> None:
    """mpi4py then loads no other one."""
    library(nothing / "environment/lib")
    assert not mpi_library.missing_library()
    monkeypatch.setenv("MPI4PY_LIBMPI", "/no/libmpi.so")
    assert mpi_library.missing_library() == (
        "MPI4PY_LIBMPI names no MPI library: /no/libmpi.so (without it, mpi4py takes that of the environment)"
    )


def test_an_mpi4py_that_was_built_for_one_library(nothing: Path) -> None:
    (nothing / f"mpi4py/MPI.mpich{importlib.machinery.EXTENSION_SUFFIXES[0]}").touch()
    assert mpi_library.missing_library()
    (nothing / f"mpi4py/MPI{importlib.machinery.EXTENSION_SUFFIXES[0]}").touch()
    assert not mpi_library.missing_library()
