"""Map torch's dtypes and reduce ops to MPI, with operations of this package where MPI's differ.

MPI has no float16 and no bfloat16. MIN and MAX of NaN and of zeros of both signs depend on the library, the
position of an element and the rank: Open MPI 5.0.11 drops NaN of some ranks and keeps NaN of others. Its
vectorised SUM saturates 8- and 16-bit integers (component op/avx); the scalar SUM wraps around. PRODUCT of
complex numbers recovers infinities as in C, unlike every other library used here.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, Final

import torch

from mcr_plus.core.kinds import COMPLEX, FLOATS, MOVED, ReduceOp, check_reducible, dtype_name
from mcr_plus.errors import BackendUnavailable
from mcr_plus.kernels.compiling import compiling
from mcr_plus.rendezvous.mpi_library import load_mpi

_HALVES: Final = (torch.float16, torch.bfloat16)
_SATURATED: Final = (torch.int8, torch.int16, torch.uint8)

_DATATYPES: Final = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.float16: "UINT16_T",  # moved as 16 bits; reduced by an MPI_Op of this package
    torch.bfloat16: "UINT16_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.bool: "C_BOOL",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    **{dtype: f"UINT{8 * dtype.itemsize}_T" for dtype in MOVED},
}
_OPS: Final = {
    "SUM": "SUM",
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
_BOOL_OPS: Final = {
    "SUM": "LOR",
    "MAX": "LOR",
    "BOR": "LOR",
    "PRODUCT": "LAND",
    "MIN": "LAND",
    "BAND": "LAND",
}


def mpi_datatype(dtype: torch.dtype) -> Any:
    """Return the MPI_Datatype of a torch dtype."""
    return getattr(load_mpi(), _DATATYPES[dtype])


def mpi_op(op: ReduceOp, dtype: torch.dtype) -> Any:
    """Return the MPI_Op of a reduction. For AVG it is SUM, and the result is divided afterwards.

    Compiles an operation of this package if MPI's does not suit. Raises `Unsupported` without either.
    """
    check_reducible(op, dtype)
    op = "SUM" if op == "AVG" else op
    if own_reduction(op, dtype):
        return _own_op(op, dtype)
    if dtype is torch.bool:
        return getattr(load_mpi(), _BOOL_OPS.get(op, "LXOR"))
    return getattr(load_mpi(), _OPS[op])


def own_reduction(op: ReduceOp | None, dtype: torch.dtype | None) -> str:
    """Describe how this package's operation differs from MPI's; empty if MPI's own is used."""
    if dtype in _HALVES:
        return "widens to float32"
    if dtype in FLOATS and op in ("MIN", "MAX"):
        return "keeps NaN and orders zeros"
    if dtype in _SATURATED and op in ("SUM", "AVG"):
        return "wraps around"
    return "multiplies complex numbers as torch does" if dtype in COMPLEX and op == "PRODUCT" else ""


@cache
def _own_op(op: ReduceOp, dtype: torch.dtype) -> Any:
    """Return an MPI_Op of a function compiled by numba: a Python callback would take the GIL per segment."""
    from mcr_plus.backends.shm.reductions import mpi_function

    mpi = load_mpi()
    with compiling(f"{op} on {dtype_name(dtype)}"):
        address = mpi_function(dtype, op)
    made = mpi.Op()
    status = _libmpi().MPI_Op_create(
        ctypes.c_void_p(address), ctypes.c_int(1), ctypes.c_void_p(mpi._addressof(made))
    )
    if status != 0:
        raise BackendUnavailable(f"backend mpi: MPI_Op_create failed with code {status}")
    return made


@cache
def _libmpi() -> ctypes.CDLL:
    """Return the MPI library that mpi4py has loaded into this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libmpi" in line}
    for path in sorted(paths, key=len):
        if os.path.basename(path).startswith(("libmpi.so", "libmpich.so", "libmpi_abi.so")):
            return ctypes.CDLL(path)
    raise BackendUnavailable("backend mpi: the loaded MPI library was not found in this process")
