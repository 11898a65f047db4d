#!/bin/bash
# DTensor puts rows in the wrong places on a mesh whose ranks are not in ascending order.
#
# Guess: `DeviceMesh("cpu", [3, 1, 0, 2])` gives the first shard to rank 3; redistributing 4 rows from [Shard(0)] to
# [Replicate()] gives the rows in their order, or the mesh is refused.
# Seen: torch 2.13.0 over gloo, 4 ranks: the shards follow the mesh, but its process group lists ranks in ascending
# order and the gather joins the shards in that order: rows 3, 2, 4, 1, no error. On [0, 1, 2, 3] they are right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
cat > "$folder/program.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

dist.init_process_group("gloo")


def gathered(ranks):
    mesh = DeviceMesh("cpu", ranks)
    row = torch.tensor([[1.0 + mesh.get_coordinate()[0]]])  # the row of this rank's place in the mesh
    whole = DTensor.from_local(row, mesh, [Shard(0)], run_check=False).redistribute(mesh, [Replicate()])
    return whole.to_local().flatten().tolist(), dist.get_process_group_ranks(mesh.get_group())


plain, permuted = gathered([0, 1, 2, 3]), gathered([3, 1, 0, 2])
if dist.get_rank() == 0:
    print(f"torch {torch.__version__}: rows and group of 0, 1, 2, 3: {plain}; of 3, 1, 0, 2: {permuted}", flush=True)
assert plain == ([1, 2, 3, 4], [0, 1, 2, 3]), "not as described"
assert permuted == ([3, 2, 4, 1], [0, 1, 2, 3]), "not as described"
dist.destroy_process_group()
PYTHON
"$folder/env/bin/torchrun" --standalone --nproc-per-node 4 "$folder/program.py"
