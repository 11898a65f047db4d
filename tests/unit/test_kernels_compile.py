"""The Triton kernels of codecs compile for a GPU: Triton's interpreter takes more than its compiler does."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

import mcr_plus.kernels

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no triton")

PROGRAM: Final = Path(__file__).with_name("compile_kernels.py")
KERNELS: Final = {
    "cast": ("_encode",),
    "delta": ("_apply", "_classify", "_copy", "_find", "_pack", "_rank", "_unpack"),
    "digest": ("_hash",),
    "fp8_block": ("_decode", "_encode"),
    "int2_block": ("_decode", "_encode"),
    "int4_block": ("_decode", "_encode"),
    "int8_block": ("_decode", "_encode"),
    "int_shared": ("_amax", "_decode", "_encode"),
    "sign1": ("_decode", "_encode"),
    "sums": ("_exact", "_tree"),
}


def test_every_module_takes_part() -> None:
    (folder,) = mcr_plus.kernels.__path__
    assert sorted(KERNELS) == sorted(path.stem for path in Path(folder, "gpu").glob("*.py"))


@pytest.mark.short("cast")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(name: str, tmp_path: Path) -> None:
    settings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    settings |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), name], env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(KERNELS[name])
