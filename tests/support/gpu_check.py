"""Check of everything that needs a GPU: tests, kernels, calls and two examples; ends with a table.

    python tests/support/gpu_check.py [--bundle FOLDER] [--output FILE]

`--bundle`: output of `make gpu-bundle`, for a machine without a network: its wheels are installed, and its
NCCL, which allows two ranks on one GPU, precedes torch's. The parts run one after another, so that none
waits for another's GPU; ranks of NCCL that share a GPU take turns on it, some milliseconds each.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Final

import typer

ROOT: Final = Path(__file__).resolve().parents[2]
RANKS: Final = ["-m", "mcr_plus.cli.main", "run", "-n", "2"]
PYTEST: Final = ["-m", "pytest", "-q", "--tb=short", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
SHARED_GPU: Final = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
LIBRARY: Final = "libnccl.so.2.xz"


@dataclass
class Part:
    """One line of the table."""

    name: str
    words: list[str]
    result: str = "not run"
    seconds: float = 0.0
    last: str = ""
    env: dict[str, str] = field(default_factory=dict)

    def run(self, env: dict[str, str], limit: float, folder: Path) -> None:
        """Run it; its output goes to a file of its name."""
        began, log = time.monotonic(), folder / f"{re.sub('[^a-zA-Z]+', '-', self.name)}.txt"
        with log.open("wb") as out:
            try:
                words = [sys.executable, *self.words]
                done = subprocess.run(
                    words, cwd=ROOT, env=env | self.env, stdout=out, stderr=out, timeout=limit, check=False
                )
                self.result = "passed" if done.returncode == 0 else f"failed ({done.returncode})"
            except subprocess.TimeoutExpired:
                self.result = f"not done in {limit:.0f} s"
        self.seconds = time.monotonic() - began
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if re.search(r"\d+ (passed|failed|skipped)|held out|AUC", line)]
        self.last = (told or lines or [""])[-1].strip(" =")[:90]


def parts(folder: Path) -> list[Part]:
    """Return the parts, ordered so that a failure makes the following parts doubtful."""
    kernels = sorted(str(path) for path in (ROOT / "tests" / "unit").glob("test_kernels_*.py"))
    jobs = "tests/jobs/devices/test_gpu_jobs.py"
    return [
        Part("kernels, bit for bit", [*PYTEST, "-k", "triton", *kernels]),
        Part("NCCL by itself", [*PYTEST, "-m", "gpu", "tests/unit/devices/test_nccl.py"]),
        Part("two ranks, gloo", [*PYTEST, "-m", "gpu", "-k", "gloo", jobs]),
        Part("two ranks, shared memory", [*PYTEST, "-m", "gpu", "-k", "msccl", jobs]),
        Part("two ranks, MPI", [*PYTEST, "-m", "gpu", "-k", "mpi", jobs]),
        Part("two ranks, NCCL", [*PYTEST, "-m", "gpu", "-k", "nccl", jobs]),
        Part("DLRM", [*RANKS, "examples/dlrm/train.py", "--device", "cuda"], env=SHARED_GPU),
        Part("MoE", [*RANKS, "examples/moe/train.py", "--device", "cuda", "--steps", "60"], env=SHARED_GPU),
        Part("bench_kernels", ["benchmarks/bench_kernels.py", "--output", str(folder / "kernels.md")]),
        Part(
            "bench_gpu_calls",
            [*RANKS, "benchmarks/bench_gpu_calls.py", "--output", str(folder / "gpu-calls.md")],
            env=SHARED_GPU,
        ),
    ]


def unpack(bundle: Path) -> dict[str, str]:
    """Install the wheels of a bundle; return the environment in which its NCCL is used."""
    wheels = sorted(str(path) for path in bundle.rglob("*.whl"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    if wheels and subprocess.run([*pip, *wheels], check=False).returncode != 0:
        raise SystemExit(f"gpu_check: the wheels of {bundle} could not be installed")
    packed = next(bundle.rglob(LIBRARY), None)
    if packed is None:
        return {}
    library = Path(tempfile.gettempdir(), LIBRARY.removesuffix(".xz"))
    with lzma.open(packed) as source, library.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 22)
    return {"LD_PRELOAD": str(library)}


def main(
    bundle: Annotated[Path | None, typer.Option(help="what make gpu-bundle has made")] = None,
    output: Annotated[Path | None, typer.Option(help="another file than the dated one")] = None,
    logs: Annotated[Path | None, typer.Option(help="a folder for what the parts print")] = None,
    limit: Annotated[float, typer.Option(help="seconds that a part may take")] = 600.0,
    only: Annotated[list[str] | None, typer.Option(help="parts by the beginning of their names")] = None,
) -> None:
    """Check all that needs a GPU; status 1 if a part fails."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if bundle is not None:
        env |= unpack(bundle)
    folder = logs or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    folder.mkdir(parents=True, exist_ok=True)
    raise typer.Exit(run(env, folder, output, limit, only or [""]))


def run(env: dict[str, str], folder: Path, output: Path | None, limit: float, only: list[str]) -> int:
    """Run the parts, print and write the table; return 1 if one has failed."""
    facts = (
        "import torch; from mcr_plus.backends.nccl.abi import load; from platform import python_version as p;"
        "print(torch.cuda.get_device_name(), f'{torch.cuda.device_count()} of them, Python {p()}, torch"
        " {torch.__version__}, NCCL {load().version_text}', sep=', ')"
    )
    found = subprocess.run(
        [sys.executable, "-c", facts], env=env, capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        print(f"gpu-check skipped: no CUDA device with NCCL\n{found.stderr[-400:]}")
        return 0
    machine = found.stdout.strip()
    print(machine)
    chosen = [part for part in parts(folder) if part.name.startswith(tuple(only))]
    for part in chosen:
        part.run(env, limit, folder)
        print(f"{part.name:26}{part.result:18}{part.seconds:6.0f} s  {part.last}", flush=True)
    rows = [f"| {p.name} | {p.result} | {p.seconds:.0f} | {p.last.replace('|', '/')} |" for p in chosen]
    lines = [
        f"# All that needs a GPU ({date.today():%Y-%m-%d})",
        "    make gpu-check",
        machine,
        "\n".join(["| what | result | s | its last line |", "| --- | --- | --- | --- |", *rows]),
    ]
    card = machine.partition(",")[0].lower().replace(" ", "-")
    target = output or ROOT / "benchmarks" / "results" / f"gpu-check_{card}_{date.today():%Y%m}.md"
    target.write_text("\n\n".join(lines) + "\n")
    print(f"{target}; what they printed: {folder}")
    return int(any(part.result != "passed" for part in chosen))


if __name__ == "__main__":
    typer.run(main)
