#!/usr/bin/env bash
# torch.distributed.all_reduce(MAX) over gloo, of a vector that is NaN on one of three ranks.
#
# A good guess: torch.maximum gives NaN if either side is NaN, so the maximum over ranks is NaN everywhere; or else
# 1.0 everywhere.
# What happens (torch 2.13.0, CPU): some elements in one run are NaN and the others 1.0 (4, 4 and 1 of 9); which
# ones depends on the rank that has the NaN. The sign of zero is decided likewise. All ranks get the same result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank(number, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=3)
    wrong = 0
    for owner in range(3):
        x = torch.full((9,), float("nan") if number == owner else 1.0)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        zeros = torch.full((9,), -0.0 if number == owner else 0.0)
        dist.all_reduce(zeros, dist.ReduceOp.MIN)
        if number == 0:
            print(f"NaN on rank {owner}:", x.tolist(), flush=True)
            print(f"-0 on rank {owner}, MIN:", zeros.tolist(), flush=True)
        wrong += 0 < int(x.isnan().sum()) < 9
    dist.destroy_process_group()
    if wrong == 0:
        sys.exit(1)


if __name__ == "__main__":
    print("torch", torch.__version__)
    mp.spawn(rank, (os.path.dirname(os.path.abspath(__file__)),), 3)
PROGRAM
GLOO_SOCKET_IFNAME=lo "$folder/venv/bin/python" "$folder/program.py"
