#!/usr/bin/env bash
# torch: a + b and b + a of complex tensors, one of which has an infinite part.
#
# A good guess: complex numbers are added by their parts, so inf+1j plus 0 is inf+1j, in both orders; NumPy does so.
# What happens (torch 2.13.0, CPU): a + b is inf+1j, and b + a is inf+nanj. The second operand is multiplied by
# alpha = 1+0j as a complex number, and 0 times infinity is NaN. Subtraction is the same, and sums of
# several tensors depend on their order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$folder/venv/bin/python" - <<'PROGRAM'
import sys
import numpy as np
import torch

a = torch.tensor([complex("inf+1j")] * 3)
b = torch.zeros(3, dtype=a.dtype)
print("torch", torch.__version__, "numpy", np.__version__)
print("a + b:", (a + b).tolist()[0])
print("b + a:", (b + a).tolist()[0])
print("b - a:", (b - a).tolist()[0])
print("numpy, b + a:", (b.numpy() + a.numpy())[0])
right = not (a + b).imag.isnan().any() and not np.isnan((b.numpy() + a.numpy()).imag).any()
sys.exit(0 if right and bool((b + a).imag.isnan().all()) else 1)
PROGRAM
