#!/usr/bin/env bash
# torch: conversions from float64 to bfloat16 and float16 round twice.
#
# A good guess: a conversion gives the nearest value, so 1 + 2^-8 + 2^-40 becomes 1 + 2^-7 as bfloat16: it lies
# above the middle of 1 and 1 + 2^-7. NumPy converts float64 to float16 so.
# What happens (torch 2.13.0, CPU): it becomes 1. The value is first rounded to float32, which is the middle, and
# then to the even neighbour. float16 does the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$folder/venv/bin/python" - <<'PROGRAM'
import sys
import numpy as np
import torch

print("torch", torch.__version__, "numpy", np.__version__)
twice = []
for dtype, step in ((torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)):
    value = torch.tensor([1 + step / 2 + 2.0**-40], dtype=torch.float64)
    found = value.to(dtype).item()
    print(f"{dtype}: {value.item()!r} becomes {found!r}; the nearest is {1 + step!r}")
    twice.append(found == 1.0)
half = np.float16(1 + 2.0**-11 + 2.0**-40)
print("numpy's float16:", float(half))
sys.exit(0 if all(twice) and half == np.float16(1 + 2.0**-10) else 1)
PROGRAM
