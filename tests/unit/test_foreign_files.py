"""Files that others have written or damaged, for every reader: refused with their name, in little memory."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from pathlib import Path

import pytest
from command import mcr_plus
from foreign_files import READERS, fault_of, faults

from mcr_plus.config.document import read_bytes
from mcr_plus.errors import ConfigError
from mcr_plus.observe import traces


@pytest.mark.parametrize("reader", READERS)
def test_damaged_files_are_read_or_refused_by_name(reader: str, tmp_path: Path) -> None:
    """A few of the mutants that `python tests/support/foreign_files.py` makes."""
    for fault in faults(reader, range(4), 42, tmp_path):
        pytest.fail(f"{fault.number}: {fault.what}")


@pytest.mark.long
@pytest.mark.parametrize("reader", READERS)
def test_more_damaged_files(reader: str, tmp_path: Path) -> None:
    for fault in faults(reader, range(200), 43, tmp_path):
        pytest.fail(f"{fault.number}: {fault.what}")


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_or_an_empty_file_in_place_of_a_file(reader: str, tmp_path: Path) -> None:
    about = READERS[reader]
    path = tmp_path / "in" / about.file
    path.parent.mkdir()
    about.content(path.parent)
    for make in (path.write_bytes, lambda _: path.mkdir()):
        path.unlink(missing_ok=True)
        make(b"")
        fault = fault_of(about, path)
        assert not fault


def test_the_size_of_a_file_decides_what_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"abc")
    tracemalloc.start()
    try:
        assert read_bytes(path, "small", most=1 << 30) == b"abc"
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    path.write_bytes(b"x" * (3 << 20))
    assert len(read_bytes(path, "small", most=3 << 20)) == 3 << 20
    with pytest.raises(ConfigError, match=r"small: .* is larger than 2 MiB"):
        read_bytes(path, "small", most=2 << 20)
    assert read_bytes(Path(f"/proc/{os.getpid()}/status"), "status").startswith(b"Name:")  # states no size


def test_a_file_that_unpacks_to_far_more_than_a_trace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_ROOM", 1000)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b" " * 100_000))
    answer = mcr_plus("trace", "merge", path, "-o", tmp_path / "out.json")
    assert answer.returncode == 2
    assert f"{path}: unpacks to far more than a trace of its size" in answer.stderr
