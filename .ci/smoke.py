"""One rank of the wheel's smoke test: both CPU backends add up what two ranks hold."""

import sys
from pathlib import Path

import torch

import mcr_plus as mcr

assert Path(mcr.__file__).is_relative_to(sys.argv[1]), f"{mcr.__file__} is not the wheel's"
with mcr.init():
    for backend in ("gloo", "mpi"):
        values = torch.full((4,), float(mcr.get_rank() + 1))
        mcr.all_reduce(values, backend=backend)
        assert values.tolist() == [3.0] * 4, f"{backend}: {values}"
print("both backends work", flush=True)
