#!/usr/bin/env bash
# Triton's interpreter computes with bfloat16 and float8 as no GPU does, without a word.
#
# A good guess: TRITON_INTERPRET=1 is slow but right. numpy has no bfloat16, so the interpreter widens bfloat16 and
#   float8 to float32, computes, and rounds to nearest, or else refuses these dtypes.
# What happens (triton 3.9.0, torch 2.13.0, on the CPU):
#   - bfloat16 values are added as the 16-bit integers that represent them: 1 + 1 is 1.7e38.
#   - float32 -> bfloat16 truncates: 1.06 becomes 1.0546875, where rounding to nearest gives 1.0625.
#   - float32 -> float8_e4m3fn: infinity becomes 256, and 500 becomes 256 too; 1e6 becomes NaN.
#   - float32 -> float8_e5m2: 500 becomes 256, where rounding to nearest gives 512.
#   A test of a kernel that runs in the interpreter says nothing about these dtypes. Casting to float32 in the kernel
#   before arithmetic, and comparing casts on a device alone, avoids it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 triton==3.9.0 numpy==2.4.6

cat >"$work/kernels.py" <<'PY'
import math
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


@triton.jit
def cast(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


print("triton", triton.__version__, "torch", torch.__version__)
one = torch.ones(4, dtype=torch.bfloat16)
total = torch.empty_like(one)
add[(1,)](one, one, total, 4)
print("bfloat16 1 + 1 =", total[0].item())
as_bits = torch.full((4,), 0x3F80 * 2, dtype=torch.int16).view(torch.bfloat16)
same = torch.equal(total, as_bits)

values = torch.tensor([1.06, 500.0, 1e6, math.inf])
for dtype, expected in (
    (torch.bfloat16, [1.0546875, 500.0, 999424.0, math.inf]),
    (torch.float8_e4m3fn, [1.0, 256.0, math.nan, 256.0]),
    (torch.float8_e5m2, [1.0, 256.0, math.inf, math.inf]),
):
    out = torch.empty(4, dtype=dtype)
    cast[(1,)](values, out, 4)
    print(dtype, "of", values.tolist(), "interpreter:", out.float().tolist(), "torch:", values.to(dtype).float().tolist())
    same &= torch.equal(out.float().nan_to_num(nan=-1), torch.tensor(expected).nan_to_num(nan=-1))
sys.exit(not same)
PY
TRITON_INTERPRET=1 "$work/venv/bin/python" "$work/kernels.py"
