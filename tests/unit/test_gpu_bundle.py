"""The library for a machine with a GPU has this GPU's machine code and no other."""

from __future__ import annotations

import struct
from pathlib import Path

import gpu_bundle
import pytest

HEADER = 64


def entry(arch: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQIIHHI", 2, 1, HEADER, len(code), 0, 0, 7, 1, arch)
    return head.ljust(HEADER, b"\xee") + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_the_code_of_one_architecture_stays() -> None:
    around = b"host code" * 3
    first = [entry(arch, bytes([arch]) * 40) for arch in (80, 90, 100)]
    second = [entry(90, b"other"), entry(75, b"x" * 7)]
    library = bytearray(around + container(*first) + around + container(*second) + around)
    expected = bytes(library).replace(bytes([80]) * 40, bytes(40)).replace(bytes([100]) * 40, bytes(40))
    assert gpu_bundle.only_for(bytearray(library), 90) == expected.replace(b"x" * 7, bytes(7))
    with pytest.raises(ValueError, match=r"compute capability 12\.0"):
        gpu_bundle.only_for(library, 120)


def test_parts_are_small_and_have_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bundle, "MOST", 100)
    files = []
    for number, size in enumerate((60, 50, 40, 40, 10, 150, 1)):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(bytes(size))
    parts = gpu_bundle.in_parts(files)
    assert sorted(path for part in parts for path in part) == files
    sizes = [[path.stat().st_size for path in part] for part in parts]
    assert sizes == [[150], [60, 40], [50, 40, 10], [1]]
