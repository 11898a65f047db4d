#!/bin/bash
# DTensor loses rows of uneven shards once the mesh's dimensions have been flattened.
#
# Guess: `mesh["a", "b"]._flatten("ab")` only makes another mesh; redistributing 5 rows from [Shard(0), Shard(0)]
# to [Replicate(), Replicate()] on the 2x2 mesh gives the 5 rows with it as without it.
# Seen: torch 2.13.0 over gloo, 4 ranks: right before the flattening; after it one gather over "ab" replaces two,
# cuts off padding where a flat cut of 5 rows would have it, and rows 0, 1, 2, none, 3 come out: row 4 is
# lost, a row of zeros is in its place, no error. 4 rows are right in both cases. (pytorch issue 194457)
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
cat > "$folder/program.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def gathered(rows):
    x = torch.arange(1.0, rows + 1).view(rows, 1)
    y = distribute_tensor(x, mesh, [Shard(0), Shard(0)]).redistribute(mesh, [Replicate(), Replicate()])
    return y.to_local().flatten().tolist()


before = gathered(5)
mesh["a", "b"]._flatten("ab")
after = gathered(5)
if dist.get_rank() == 0:
    print(f"torch {torch.__version__}: before {before}, after {after}, of 4 rows {gathered(4)}", flush=True)
else:
    gathered(4)
assert before == [1, 2, 3, 4, 5], "not as described"
assert after == [1, 2, 3, 0, 4], "not as described"
dist.destroy_process_group()
PYTHON
"$folder/env/bin/torchrun" --standalone --nproc-per-node 4 "$folder/program.py"
