#!/bin/bash
# gloo's all_reduce of bfloat16 gives different sums of the same numbers within one tensor.
#
# Guess: every element of the sum of three constant tensors (256, 1 and 1 on ranks 0, 1 and 2) is the same:
# 256 if each addition is rounded to bfloat16 (257 is no bfloat16, and rounds to 256), or 258 with one rounding.
# Seen: torch 2.13.0, 3 ranks: 258 in some elements and 256 in the others of one tensor of 5 elements, equal on
# all ranks: gloo cuts the tensor into segments, which add up from different ranks on.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
cat > "$folder/program.py" <<'PYTHON'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.full((5,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
dist.all_reduce(x)
print(f"torch {torch.__version__}, rank {rank}: {x.tolist()}", flush=True)
assert set(x.tolist()) == {256.0, 258.0}, "not as described"
dist.destroy_process_group()
PYTHON
"$folder/env/bin/torchrun" --standalone --nproc-per-node 3 "$folder/program.py"
