#!/bin/sh
# A guess: an operation that changes a DTensor in place raises its version, as it does for plain tensors, so
# that `tensor._version` tells whether the values may have changed.
# What happens in torch 2.13.0: `mul_` raises the version of the DTensor, and not that of its local tensor;
# `torch._foreach_mul_` changes the values and raises neither.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/versions.py" <<'PY'
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("torch", torch.__version__)


def seen(plain, sharded):
    return plain._version, sharded._version, sharded._local_tensor._version


plain = torch.ones(4)
sharded = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
found = [seen(plain, sharded)]
for each in (plain, sharded):
    each.mul_(2)
found.append(seen(plain, sharded))
for each in (plain, sharded):
    torch._foreach_mul_([each], 2)
found.append(seen(plain, sharded))
print("versions of a plain tensor, a DTensor, its local tensor:", found)
print("values:", plain.tolist(), sharded.to_local().tolist())
assert plain.tolist() == sharded.to_local().tolist() == [4.0] * 4
changes = [tuple(b - a for a, b in zip(*pair)) for pair in zip(found, found[1:])]
print("raised by mul_:", changes[0], " by _foreach_mul_:", changes[1])
dist.destroy_process_group()
assert changes[0] == (1, 1, 0), "mul_ behaves differently now"
assert changes[1] == (1, 0, 0), "_foreach_mul_ behaves differently now"
PY
"$folder/venv/bin/python" "$folder/versions.py"
