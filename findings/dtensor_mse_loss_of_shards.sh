#!/bin/bash
# The mean squared error of a sharded DTensor has a gradient that is too large by the number of ranks.
#
# Guess: `mse_loss` of tensors that are sharded alike gives the loss and the gradient of the whole tensors; or
# raises an error where it cannot.
# Seen: torch 2.13.0 over gloo, 2 ranks, values 0, 1, … against zeros. 4 rows: the loss is right (3.5), the
# gradient is twice the right one. 5 rows, in shards of 3 and 2: the loss is 7.08 in place of 6.0, the mean of
# the ranks' means, and the gradient is another one on each rank. The loss is `Partial(avg)`; no error, no
# warning. (That uneven shards change the value was not expected even after the gradient had been seen.)
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
cat > "$folder/program.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import mse_loss

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for rows, factors in ((4, (2.0,) * 4), (5, (5 / 3,) * 3 + (5 / 2,) * 2)):
    x, zeros = torch.arange(float(rows)), torch.zeros(rows)
    whole = x.clone().requires_grad_()
    right = mse_loss(whole, zeros)
    right.backward()
    shards = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    loss = mse_loss(shards, distribute_tensor(zeros, mesh, [Shard(0)]))
    loss.backward()
    value, grad = loss.full_tensor().item(), shards.grad.full_tensor()
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {rows} rows: loss {value:.3f}, right {right.item():.3f}; "
              f"gradient {grad.tolist()}, right {whole.grad.tolist()}", flush=True)
    assert (abs(value - right.item()) < 1e-6) is (rows == 4), "not as described"
    assert torch.allclose(grad, whole.grad * torch.tensor(factors)), "not as described"
dist.destroy_process_group()
PYTHON
"$folder/env/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py"
