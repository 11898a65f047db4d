"""Run Horovod's own tests of horovod.torch on mcr_plus.horovod.

    python tests/clients/horovod_suite.py HOROVOD/test/parallel/test_torch.py -n 2

The file of a checkout of Horovod is used unchanged; Horovod need not be installed. torch's optimizer Muon,
which is newer than the file, is hidden from tests that try every optimizer with vectors. With more than two
ranks, `-k "not prescale"` leaves out three tests that want sums of float16 to be exact.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

RUN = """
import sys
import types

import pytest
import torch

import mcr_plus.horovod

package = types.ModuleType("horovod")
package.torch = mcr_plus.horovod
sys.modules.update({"horovod": package, "horovod.torch": mcr_plus.horovod})
known = [kind for kind in torch.optim.Optimizer.__subclasses__() if kind.__name__ != "Muon"]
torch.optim.Optimizer.__subclasses__ = staticmethod(lambda: known)
words = ["-q", "--disable-warnings", "-p", "no:cacheprovider", "parallel/test_torch.py"]
sys.exit(pytest.main([*words, *sys.argv[1:]]))
"""
COMMON = """
import contextlib
import os
import shutil
import tempfile


def mpi_env_rank_and_size():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def skip_or_fail_gpu_test(test, message):
    test.skipTest(message)


@contextlib.contextmanager
def temppath():
    folder = tempfile.mkdtemp()
    yield os.path.join(folder, "file")
    shutil.rmtree(folder)
"""


def main(
    file: Annotated[Path, typer.Argument(exists=True, help="test/parallel/test_torch.py of Horovod")],
    ranks: Annotated[int, typer.Option("-n", min=2)] = 2,
    select: Annotated[str, typer.Option("-k", help="as of pytest")] = "",
) -> None:
    """Run the tests on ranks; return pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "parallel").mkdir()
        (work / "utils").mkdir()
        shutil.copy(file, work / "parallel" / "test_torch.py")
        (work / "utils" / "common.py").write_text(COMMON)
        (work / "run.py").write_text(RUN)
        command = ["mcr-plus", "run", "-n", str(ranks), "run.py", *(["-k", select] if select else [])]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        done = subprocess.run(command, cwd=work, env={**os.environ, "PATH": path}, check=False)
    raise typer.Exit(done.returncode)


if __name__ == "__main__":
    typer.run(main)
