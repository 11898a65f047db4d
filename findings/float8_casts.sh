#!/usr/bin/env bash
# torch's cast to float8_e4m3fn saturates, infinity included; its casts to the three other float8 formats do not.
#
# A good guess: a value beyond the range becomes NaN in formats without infinity (e4m3fn, e4m3fnuz, e5m2fnuz), as in
#   ml_dtypes, so that an overflow stays visible; or else all formats saturate alike.
# What happens (torch 2.13.0 on the CPU; ml_dtypes 0.6.0):
#                     torch     ml_dtypes
#   e4m3fn   500      448       NaN          e4m3fn of infinity: 448 in torch, NaN in ml_dtypes
#   e4m3fnuz 500      NaN       NaN
#   e5m2     70000    inf       inf
#   e5m2fnuz 70000    NaN       NaN
#   e8m0fnu  -2       2         NaN          the sign is dropped in torch
#   e8m0fnu  0        2**-127   NaN
#   A gradient that has overflowed passes through torch's e4m3fn as the finite number 448.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0

cat >"$work/casts.py" <<'PY'
import math
import sys

import ml_dtypes
import numpy as np
import torch

nan, inf = math.nan, math.inf
expected = {
    ("e4m3fn", 500.0): (448.0, nan),
    ("e4m3fn", inf): (448.0, nan),
    ("e4m3fn", nan): (nan, nan),
    ("e4m3fnuz", 500.0): (nan, nan),
    ("e4m3fnuz", inf): (nan, nan),
    ("e5m2", 70000.0): (inf, inf),
    ("e5m2fnuz", 70000.0): (nan, nan),
    ("e5m2fnuz", inf): (nan, nan),
    ("e8m0fnu", -2.0): (2.0, nan),
    ("e8m0fnu", 0.0): (2.0**-127, nan),
}
print("torch", torch.__version__, "ml_dtypes", ml_dtypes.__version__)
same = True
for (name, value), wanted in expected.items():
    ours = torch.tensor(value).to(getattr(torch, f"float8_{name}")).float().item()
    theirs = float(np.float32(value).astype(getattr(ml_dtypes, f"float8_{name}")))
    print(f"{name:9} {value:8}  torch {ours}  ml_dtypes {theirs}")
    same &= repr((ours, theirs)) == repr(wanted)
sys.exit(not same)
PY
"$work/venv/bin/python" "$work/casts.py"
