"""MPI's datatypes and reduce operations for torch's, with operations of this package where MPI has none."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, Final

import torch

from mcr_plus.core.kinds import ReduceOp, dtype_name
from mcr_plus.errors import BackendUnavailable, Unsupported
from mcr_plus.kernels.compiling import compiling
from mcr_plus.rendezvous.mpi_library import load_mpi

HALVES: Final = (torch.float16, torch.bfloat16)
_HALF_OPS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
SATURATED: Final = (torch.int8, torch.int16, torch.uint8)  # by Open MPI's vectorised SUM

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
}
_OPS: Final = {
    "SUM": "SUM",
    "AVG": "SUM",
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
    """The MPI_Datatype of a torch dtype."""
    return getattr(load_mpi(), _DATATYPES[dtype])


def mpi_op(op: ReduceOp, dtype: torch.dtype) -> Any:
    """The MPI_Op of a reduction; SUM for AVG, whose result is divided afterwards.

    Compiles an operation of this package where MPI lacks one. Raises `Unsupported` for one that nobody has.
    """
    if dtype in HALVES:
        if op not in _HALF_OPS:
            raise Unsupported(f"reduce op {op} on {dtype_name(dtype)}; known: {', '.join(_HALF_OPS)}")
        return _half_op(op, dtype)
    if dtype in SATURATED and op == "SUM":
        return _wrapping_op(dtype)
    if dtype is torch.bool:
        return getattr(load_mpi(), _BOOL_OPS.get(op, "LXOR"))
    return getattr(load_mpi(), _OPS[op])


@cache
def _half_op(name: str, dtype: torch.dtype) -> Any:
    """Return the MPI_Op of a reduction of float16 or bfloat16, which MPI lacks."""
    from mcr_plus.kernels.half_reduce import reducer

    with compiling(f"{name} on {dtype_name(dtype)}"):
        return _own_op(reducer("SUM" if name == "AVG" else name, dtype))


@cache
def _wrapping_op(dtype: torch.dtype) -> Any:
    """Return the MPI_Op for SUM of small integers that wraps around."""
    from mcr_plus.kernels.wrapping_sum import wrapping_sum

    with compiling(f"SUM on {dtype_name(dtype)}"):
        return _own_op(wrapping_sum(dtype))


def _own_op(function: Any) -> Any:
    """Return an MPI_Op of a function compiled by numba; a Python callback would take the GIL per segment."""
    mpi = load_mpi()
    op = mpi.Op()
    status = _libmpi().MPI_Op_create(
        ctypes.c_void_p(function.address), ctypes.c_int(1), ctypes.c_void_p(mpi._addressof(op))
    )
    if status != 0:
        raise BackendUnavailable(f"backend mpi: MPI_Op_create failed with code {status}")
    return op


@cache
def _libmpi() -> ctypes.CDLL:
    """Return the MPI library that mpi4py has loaded into this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libmpi" in line}
    for path in sorted(paths, key=len):
        if os.path.basename(path).startswith(("libmpi.so", "libmpich.so", "libmpi_abi.so")):
            return ctypes.CDLL(path)
    raise BackendUnavailable("backend mpi: the loaded MPI library was not found in this process")
