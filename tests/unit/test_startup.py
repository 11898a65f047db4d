"""Imports at the start of a job, by `sys.modules` of new processes, not by time."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import house
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.config import parsing
from mcr_plus.config.document import Document
from mcr_plus.core.collector import collector_paused
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

ROOT = Path(__file__).parents[2]
HEAVY = ("numba", "typer", "rich", "matplotlib", "yaml")
PROGRAM = """
import sys, torch, mcr_plus as mcr
comm = mcr.init()
x = torch.full((5,), comm.rank + 1.0)
mcr.all_reduce(x)
assert x.tolist() == [comm.size * (comm.size + 1) / 2] * 5
print("LOADED", [name for name in {names!r} if name in sys.modules])
mcr.finalize()
"""


def loaded(command: list[str]) -> list[str]:
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return [line.partition("LOADED ")[2] for line in shown.stdout.splitlines() if "LOADED" in line]


def test_one_process_pays_for_no_kernels_files_or_tables_and_still_lists_all_backends() -> None:
    program = PROGRAM.format(names=HEAVY) + "mcr.init(); print('LOADED', mcr.get_backends())"
    heavy, backends = loaded([sys.executable, "-c", program])
    assert heavy == "[]"
    assert "gloo" in backends
    assert backends.endswith("'local']")


@pytest.mark.long
def test_a_shrink_compiles_nothing() -> None:
    """Ranks wait for each other in a shrink, and ranks on busy cores would come seconds later."""
    shrinks = "import sys, mcr_plus as mcr; mcr.init(); mcr.shrink; "
    program = f"{shrinks}print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    assert loaded([sys.executable, "-c", program]) == ["[]"]


@pytest.mark.long
def test_a_default_job_loads_a_part_of_the_package() -> None:
    """A capability that it does not use is imported by its first use."""
    counts = house.counted(house.JOB, "torch.distributed.run", "--nproc-per-node", "2")
    assert counts["modules"] <= 156
    assert counts["lines"] <= 24_500
    assert counts["first collective, calls"] <= 500
    assert counts["next new signature, calls"] <= 350


def test_a_command_imports_no_other() -> None:
    program = """
import sys
from mcr_plus.cli.main import main
sys.argv = ["mcr-plus", "top", "--help"]
try:
    main()
finally:
    print("LOADED", sorted(name for name in sys.modules if name.startswith("mcr_plus.cli.")))
"""
    names = ["main", "output", "top"]
    assert loaded([sys.executable, "-c", program]) == [str([f"mcr_plus.cli.{name}" for name in names])]


def add_up() -> None:
    """Run the work of `PROGRAM` on ranks."""
    with mcr.init() as comm:
        x = torch.full((5,), comm.rank + 1.0)
        comm.all_reduce(x)


@pytest.mark.long
@pytest.mark.parametrize("fast", ["0", "1"])
def test_kernels_from_the_cache_need_none_of_the_compiler(
    fast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job compiles the missing kernels; the second loads them without numba."""
    monkeypatch.setenv("MCR_FAST_CALLS", fast)
    (tmp_path / "program.py").write_text(PROGRAM.format(names=("numba", "llvmlite")))
    command = [sys.executable, "-m", "mcr_plus.cli.main", "run", "-n", "2", str(tmp_path / "program.py")]
    run_ranks(add_up, 2, via="mpi" if mpi_usable() else "torch")
    assert loaded(command) == ["[]"] * 2


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_paused_and_left_as_it_was(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


# -- both parsers of YAML ------------------------------------------------------------------------------


def parsed(text: str, loader: Any) -> object:
    lines: dict[tuple[str | int, ...], int] = {}
    document = Document({}, "file", Path(), lines)
    return parsing._mapping(loader(text).get_single_node(), (), document, lines), lines


@pytest.mark.parametrize(
    "path", sorted((ROOT / "mcr_plus" / "tables" / "builtin").glob("*.yaml")), ids=lambda path: path.stem
)
def test_both_parsers_read_a_table_alike(path: Path) -> None:
    text = path.read_text()
    assert parsed(text, parsing._FastLoader) == parsed(text, parsing._Loader)


TEXTS = st.text("ab01_.:-#~ {}[]'\"éß", max_size=8)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
def test_both_parsers_read_plain_data_alike(data: dict[str, Any]) -> None:
    text = json.dumps(data)  # which is YAML, too
    assert parsed(text, parsing._FastLoader) == parsed(text, parsing._Loader)


@pytest.mark.parametrize(
    "text", ["a:\t1\n\tb: 2\n", "a: [mpi, glo?o]\n", "a: [1\n", "a: b: c\n", "a: \x07\n"]
)
def test_both_parsers_refuse_the_same(text: str) -> None:
    from mcr_plus.config.document import parse_document
    from mcr_plus.errors import ConfigError

    with pytest.raises(ConfigError, match=r"^file:\d+: document: not valid YAML: "):
        parse_document(text, "file", Path(), versioned=False)


@pytest.mark.long
def test_the_sources_work_without_being_installed() -> None:
    """A machine with a bare copy of the repository has no metadata of the package."""
    program = """
import importlib.metadata
known = importlib.metadata.version

def version(name):
    if name == "mcr_plus":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)

importlib.metadata.version = version
import sys, torch, mcr_plus as mcr
from mcr_plus.cli.main import main
with mcr.init():
    mcr.all_reduce(torch.ones(3))
sys.argv[1:] = ["doctor"]
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "unknown" in done.stdout
