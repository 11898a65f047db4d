"""Algorithm files of other projects, run on their number of ranks, if MCR_ALGORITHM_FILES names a folder.

    MCR_ALGORITHM_FILES=~/algorithms pytest tests/jobs/operations/test_msccl_files.py

Files that the verifier refuses, files for more than eight ranks, and files of gather and scatter do not run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.core.kinds import Kind, ReduceOp
from mcr_plus.errors import AlgorithmError
from mcr_plus.msccl.algorithm import Algorithm
from mcr_plus.msccl.catalog import COLLECTIVES
from mcr_plus.msccl.reader import read_algorithm
from mcr_plus.msccl.verifier import verify_all

FOLDER: Final = os.environ.get("MCR_ALGORITHM_FILES", "")
MOST_RANKS: Final = 8
KINDS: Final[dict[str, Kind]] = {collective: kind for kind, collective in COLLECTIVES.items()}

pytestmark = pytest.mark.skipif(not FOLDER, reason="MCR_ALGORITHM_FILES names no folder of algorithm files")


def files() -> list[Path]:
    return sorted(Path(FOLDER).glob("*.xml")) if FOLDER else []


def values(rank: int, count: int, salt: int) -> np.ndarray:
    """Small integers, exact in every type, other ones on every rank."""
    return np.random.default_rng([rank, salt]).integers(-3, 4, count).astype(np.float64)


def expected_of(kind: Kind, parts: list[np.ndarray], rank: int, op: ReduceOp, root: int) -> np.ndarray | None:
    """Return the expected output of a rank, in numpy; None without one."""
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        whole: np.ndarray = np.sum(parts, axis=0) if op == "SUM" else np.max(parts, axis=0)
        if kind == "reduce_scatter":
            return np.split(whole, len(parts))[rank]
        return whole if kind == "all_reduce" or rank == root else None
    if kind == "all_to_all":
        return np.concatenate([np.split(part, len(parts))[rank] for part in parts])
    return np.concatenate(parts) if kind == "all_gather" else parts[root]


def result_of(
    comm: mcr.Communicator, kind: Kind, mine: torch.Tensor, op: ReduceOp, root: int, backend: str
) -> torch.Tensor:
    ranks, count = comm.size, mine.numel()
    if kind == "all_reduce":
        comm.all_reduce(mine, op, backend=backend)
    elif kind == "reduce":
        comm.reduce(mine, root, op, backend=backend)
    elif kind == "broadcast":
        comm.broadcast(mine, root, backend=backend)
    else:
        sizes = {"all_gather": count * ranks, "all_to_all": count, "reduce_scatter": count // ranks}
        result = mine.new_empty(sizes[kind])
        if kind == "all_gather":
            comm.all_gather_into_tensor(result, mine, backend=backend)
        elif kind == "all_to_all":
            comm.all_to_all_single(result, mine, backend=backend)
        else:
            comm.reduce_scatter_tensor(result, mine, op, backend=backend)
        return result
    return mine


def sizes_of(algorithm: Algorithm, width: int) -> list[int]:
    """Return sizes of the whole buffer in the file's range; one does not divide by the number of chunks."""
    most = min(algorithm.most or 1 << 22, 1 << 22)
    least = max(algorithm.least, min(4096, most))
    ranks = algorithm.ranks
    wanted = {least, min(least + 37 * width * ranks, most), most}
    fewest = max(1, -(-algorithm.least // (width * ranks)))
    return sorted({max(size // (width * ranks), fewest) * ranks for size in wanted})


def runs(file: str) -> list[str]:
    """Return the failures, and at the end the number of compared calls."""
    algorithm = read_algorithm(Path(file))
    kind, name, root = KINDS[algorithm.collective], f"msccl:{Path(file).stem}", algorithm.root
    found, calls = [], 0
    with mcr.init({"version": 1, "backends": ["msccl"], "algorithms": [file]}) as comm:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for whole in sizes_of(algorithm, dtype.itemsize):
                count = whole // comm.size if kind == "all_gather" else whole
                ops: tuple[ReduceOp, ...] = ("SUM", "MAX") if "reduce" in kind else ("SUM",)
                for op in ops:
                    parts = [values(rank, count, calls) for rank in range(comm.size)]
                    mine = torch.from_numpy(parts[comm.rank]).to(dtype)
                    calls += 1
                    result = result_of(comm, kind, mine, op, root, name)
                    right = expected_of(kind, parts, comm.rank, op, root)
                    if right is not None and not np.array_equal(result.double().numpy(), right):
                        found.append(f"{kind} {op} {dtype} of {whole}")
    return [*found, f"{calls} compared"]


@pytest.mark.parametrize("file", files(), ids=lambda file: file.stem)
def test_a_file_gives_the_right_results(file: Path) -> None:
    algorithm = read_algorithm(file)
    try:
        verify_all(algorithm)
    except AlgorithmError as error:
        pytest.skip(f"refused: {error}")
    if algorithm.ranks > MOST_RANKS or algorithm.collective in ("gather", "scatter"):
        pytest.skip(f"{algorithm.collective} of {algorithm.ranks} ranks")
    for result in run_ranks(runs, algorithm.ranks, args=[str(file)], via="torch", timeout=300):
        *wrong, compared = result.value
        assert not wrong, f"{wrong}, {compared}"
