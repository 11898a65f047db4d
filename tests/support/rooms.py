"""Check that the core works without each capability: remove it from a copy of the package, and test.

    python tests/support/rooms.py [NAME…]

Capabilities that use a removed one are removed too (`tests/unit/test_import_order.py` lists them). Then a job
of two ranks runs under torchrun, through mcr_plus and through torch.distributed, and the tests of the core.
Exits with 1 if anything fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
UNIT: Final = ROOT / "tests" / "unit"
sys.path.insert(0, str(ROOT / "tests"))

from unit.test_import_order import CAPABILITIES  # noqa: E402 - of the folder that has just been added

TESTS: Final = (
    "agreement", "board", "buffers", "config", "cost", "deadline", "membership_rules",
    "message", "pausing", "peer_lost", "pipeline", "registry", "relay", "watched_store",
)  # fmt: skip
"""Tests in `tests/unit` that import no capability, without the long ones."""
JOB: Final = """
import os
import torch
import torch.distributed as dist
import mcr_plus as mcr

stages = [{"fuse": {}}, {"compress": {}}, {"select": {}}, {"dispatch": {}}]
with mcr.init({"version": 1, "pipeline": stages}) as comm:
    rank, size = comm.rank, comm.size
    x = torch.full((100_001,), 1.0 + rank)
    works = [mcr.all_reduce(part, async_op=True) for part in x.split(1000)]
    for work in works:
        work.wait()
    assert x.eq(size * (size + 1) / 2).all()
    mcr.all_reduce(x, compress="int8_block")
    out = torch.empty(2 * size)
    mcr.all_gather_into_tensor(out, torch.full((2,), float(rank)))
    assert out.tolist() == [float(each) for each in range(size) for _ in range(2)]
    mcr.send(torch.ones(3), 1 - rank) if rank else mcr.recv(out[:3], 1 - rank)
    group = mcr.new_group([1, 0])
    assert group.all_gather_object(rank) == [1, 0]
    mcr.load_state_dict(mcr.state_dict())
dist.init_process_group("mcr")
dist.all_reduce(x := torch.ones(7))
assert x.eq(size).all()
dist.destroy_process_group()
print("fine", flush=True)
"""


def taken_out(name: str) -> set[str]:
    """Return a capability and all that use it."""
    out = {name}
    while more := {each for each, uses in CAPABILITIES.items() if uses & out} - out:
        out |= more
    return out


def copy_without(folder: Path, names: set[str]) -> None:
    """Copy the package without some folders, and link what its tests need."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mcr_plus", folder / "mcr_plus", ignore=ignored)
    for name in names:
        shutil.rmtree(folder / "mcr_plus" / name)
    for name in ("tests", "examples", "benchmarks", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "job.py").write_text(JOB)


def works_without(name: str, cache: str) -> bool:
    """Run the job and the tests without a capability; print failures."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        names = taken_out(name)
        copy_without(Path(folder), names)
        environment = {**os.environ, "PYTHONPATH": folder, "NUMBA_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        job = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "job.py"]
        tests = [str(path.relative_to(ROOT)) for each in TESTS for path in UNIT.rglob(f"test_{each}.py")]
        commands = [job, [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]]
        for command in commands:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode or (command is job and done.stdout.count("fine") != 2):
                print(f"{name}: {' '.join(command[2:4])} failed without {', '.join(sorted(names))}")
                print((done.stdout + done.stderr)[-4000:], flush=True)
                return False
    others = f" (and {', '.join(sorted(names - {name}))})" if len(names) > 1 else ""
    print(f"{name}{others}: fine, {time.monotonic() - began:.0f} s", flush=True)
    return True


def main() -> int:
    """Check all capabilities, or the named ones."""
    with tempfile.TemporaryDirectory() as cache:
        results = [works_without(name, cache) for name in sys.argv[1:] or CAPABILITIES]
    print(f"{sum(results)} of {len(results)} capabilities can be taken out")
    return not all(results)


if __name__ == "__main__":
    sys.exit(main())
