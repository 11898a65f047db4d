#!/bin/bash
# FSDP2 averages the gradients of two different parameters, without an error.
#
# Guess: ranks whose forward passes take different branches of one `fully_shard` module get an error, a hang,
# or, as under DDP with find_unused_parameters, the mean of each parameter's own gradient (0.5 and 50).
# Seen: torch 2.13.0 over gloo, 2 ranks: parameters `a` (used by rank 0) and `b` (used by rank 1) have the same
# size, so their gradients meet in one reduce_scatter: 50.5 in rank 0's rows of `a` and in rank 1's rows of `b`,
# None elsewhere. Exit status 0, no warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
cat > "$folder/program.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.a(x) if rank == 0 else self.b(x)


model = Branches()
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
model(torch.full((1, 4), 100.0**rank)).sum().backward()
found = [None if p.grad is None else p.grad.to_local().flatten()[0].item() for p in model.parameters()]
print(f"torch {torch.__version__}, rank {rank}: gradients of a, b: {found}", flush=True)
assert found == ([50.5, None] if rank == 0 else [None, 50.5]), "not as described"
dist.destroy_process_group()
PYTHON
"$folder/env/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py"
