"""Kinds of operations, reduce ops and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, get_args

import torch

from mcr_plus.errors import Unsupported

Kind = Literal[
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_v",
    "reduce_scatter",
    "reduce_scatter_v",
    "all_to_all",
    "all_to_all_v",
    "gather",
    "gather_v",
    "scatter",
    "scatter_v",
    "send",
    "recv",
    "barrier",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Sums = Literal["fast", "fixed", "exact"]
"""Order of additions: any; a tree over the ranks, the same for every element; or none, rounded once."""
SUMS: Final[tuple[Sums, ...]] = get_args(Sums)


def _one(ranks: int) -> float:  # noqa: ARG001
    return 1.0


Parts = Literal["none", "one", "each"]
"""Number of parts of a rank's input or output: none, one, or one for each rank of the group."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Properties of every operation of a kind, independent of the library.

    Attributes:
        sends, receives: the parts of a rank's input and output.
        sends_elsewhere, receives_elsewhere: the parts of ranks other than the root, if they differ.
        rooted: the call names one rank. reduces: the call takes a reduce op.
        in_place: the input is the output. same_result: all ranks hold equal tensors afterwards.
        bus_factor: busbw / algbw on n ranks (nccl-tests, doc/PERFORMANCE.md).
        msccl: name in algorithm files, where the result follows from the other columns; empty otherwise.
        mpi: name of the MPI call, after `MPI_` and without its `I`; empty without an equivalent.
        nccl: name of the NCCL function, after `nccl`; empty without an equivalent.
        torch: the function of `torch.distributed` on a tensor in and a tensor out.
        op_type: number of c10d's `OpType`, whose names are not available in Python.
        vector: the kind's form with sizes that differ between ranks; empty without one.
    """

    kind: Kind
    sends: Parts = "one"
    receives: Parts = "one"
    sends_elsewhere: Parts | None = None
    receives_elsewhere: Parts | None = None
    rooted: bool = False
    reduces: bool = False
    in_place: bool = False
    same_result: bool = False
    bus_factor: Callable[[int], float] = _one
    msccl: str = ""
    mpi: str = ""
    nccl: str = ""
    torch: str = ""
    op_type: int = 100
    vector: Kind | None = None

    def buffers(self, *, root: bool = True) -> tuple[Parts, Parts]:
        """Return the parts of a rank's input and output; `root`: whether it is the rank named in the call."""
        sends = self.sends if root or self.sends_elsewhere is None else self.sends_elsewhere
        receives = self.receives if root or self.receives_elsewhere is None else self.receives_elsewhere
        return sends, receives

    def parts(self, ranks: int, *, root: bool = True) -> tuple[int, int]:
        """Return the result of `buffers` as numbers of parts in a group of `ranks` ranks."""
        sends, receives = self.buffers(root=root)
        count = {"none": 0, "one": 1, "each": ranks}
        return count[sends], count[receives]

    @property
    def is_shared(self) -> bool:
        """True if the payload belongs to all ranks together, so that each rank has one part of it."""
        return "each" in (self.sends, self.receives)

    @property
    def c10d(self) -> str:
        """Method of c10d's `ProcessGroup` on lists of tensors; in capitals, its name in hooks."""
        return self.kind.replace("all_", "all").replace("to_", "to")

    @property
    def divides(self) -> bool:
        """True if each rank receives one part of an input that has a part for each rank."""
        return (self.sends, self.receives) == ("each", "one")


def _by_links(ranks: int) -> float:
    return (ranks - 1) / ranks


COLLECTIVES: Final[Mapping[str, Collective]] = {
    row.kind: row
    for row in (
        Collective(
            "all_reduce", reduces=True, in_place=True, same_result=True, msccl="allreduce",
            bus_factor=lambda n: 2 * _by_links(n), mpi="allreduce", nccl="AllReduce", torch="all_reduce",
            op_type=1,
        ),
        Collective(
            "broadcast", sends_elsewhere="none", rooted=True, in_place=True, same_result=True,
            msccl="broadcast", mpi="bcast", nccl="Broadcast", torch="broadcast", op_type=0,
        ),
        Collective(
            "reduce", receives_elsewhere="none", rooted=True, reduces=True, in_place=True,
            msccl="reduce", mpi="reduce", nccl="Reduce", torch="reduce", op_type=3,
        ),
        Collective(
            "all_gather", receives="each", same_result=True, bus_factor=_by_links, vector="all_gather_v",
            msccl="allgather", mpi="allgather", nccl="AllGather", torch="all_gather_into_tensor", op_type=4,
        ),
        Collective(
            "reduce_scatter", sends="each", reduces=True, bus_factor=_by_links, vector="reduce_scatter_v",
            msccl="reducescatter", mpi="reduce_scatter_block", nccl="ReduceScatter",
            torch="reduce_scatter_tensor", op_type=9,
        ),
        Collective(
            "all_to_all", sends="each", receives="each", bus_factor=_by_links, vector="all_to_all_v",
            msccl="alltoall", mpi="alltoall", torch="all_to_all_single", op_type=11,
        ),
        Collective(
            "gather", receives="each", receives_elsewhere="none", rooted=True, bus_factor=_by_links,
            vector="gather_v", msccl="gather", mpi="gather", torch="gather", op_type=7,
        ),
        Collective(
            "scatter", sends="each", sends_elsewhere="none", rooted=True, bus_factor=_by_links,
            vector="scatter_v", msccl="scatter", mpi="scatter", torch="scatter", op_type=8,
        ),
        Collective("send", receives="none", mpi="send", nccl="Send", torch="isend", op_type=12),
        Collective("recv", sends="none", mpi="recv", nccl="Recv", torch="irecv", op_type=13),
        Collective("barrier", sends="none", receives="none", mpi="barrier", torch="barrier", op_type=15),
    )
}  # fmt: skip
"""Rows of all kinds of one size. A vector form has its plain kind's properties, except for sizes."""

PLAIN: Final[tuple[Kind, ...]] = tuple(row.kind for row in COLLECTIVES.values())
"""Kinds without their vector forms."""
_PLAIN: Final[Mapping[str, str]] = {
    **{kind: kind for kind in COLLECTIVES},
    **{row.vector: kind for kind, row in COLLECTIVES.items() if row.vector is not None},
}


def collective(kind: str) -> Collective:
    """Return the row of a kind; for a vector form, the row of its plain kind."""
    return COLLECTIVES[_PLAIN[kind]]


def plain_kind(kind: str) -> Kind:
    """Return `all_to_all` for `all_to_all_v`."""
    return collective(kind).kind


def _where(holds: Callable[[Collective], bool]) -> frozenset[Kind]:
    return frozenset(kind for kind in KINDS if holds(collective(kind)))


ALIASES: Final[Mapping[str, Kind]] = {
    row.torch: row.kind for row in COLLECTIVES.values() if row.torch not in KINDS and row.is_shared
}
"""Kinds as spelled in calls, for operations named in configurations, tables and `explain`."""
VECTOR: Final = frozenset(row.vector for row in COLLECTIVES.values() if row.vector is not None)
ROOTED: Final = _where(lambda row: row.rooted)
REDUCING: Final = _where(lambda row: row.reduces)
IN_PLACE: Final = _where(lambda row: row.in_place)
SHARED: Final = frozenset(kind for kind, row in COLLECTIVES.items() if row.is_shared)
SAME_RESULT: Final = _where(lambda row: row.same_result)


ReduceOp = Literal["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
REDUCE_OPS: Final[tuple[ReduceOp, ...]] = get_args(ReduceOp)

SUM: Final = "SUM"
AVG: Final = "AVG"
PRODUCT: Final = "PRODUCT"
MIN: Final = "MIN"
MAX: Final = "MAX"
BAND: Final = "BAND"
BOR: Final = "BOR"
BXOR: Final = "BXOR"

FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS: Final = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COMPLEX: Final = (torch.complex64, torch.complex128)
ARITHMETIC: Final = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)
_MOVED: Final = (
    "uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
MOVED: Final = tuple(getattr(torch, name) for name in _MOVED if hasattr(torch, name))
"""Dtypes without reductions. Old versions of torch lack the last one."""
DTYPES: Final = (*ARITHMETIC, *MOVED)
"""All dtypes; messages encode a dtype as its index here."""

# On bool, arithmetic means logic: SUM and MAX are OR, PRODUCT and MIN are AND.
REDUCIBLE: Final[Mapping[str, tuple[torch.dtype, ...]]] = {
    "SUM": ARITHMETIC,
    "AVG": (*FLOATS, *INTEGERS, *COMPLEX),
    "PRODUCT": ARITHMETIC,
    "MIN": (*FLOATS, *INTEGERS, torch.bool),
    "MAX": (*FLOATS, *INTEGERS, torch.bool),
    "BAND": (*INTEGERS, torch.bool),
    "BOR": (*INTEGERS, torch.bool),
    "BXOR": (*INTEGERS, torch.bool),
}


MESSAGES: Final = ("send", "recv")
"""Kinds of point-to-point operations."""


SCALAR_TYPES: Final = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long",
    "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
    "complex64": "ComplexFloat", "complex128": "ComplexDouble",
}  # fmt: skip
"""Names of dtypes in torch's C++."""


@cache  # recording asks for every operation
def dtype_name(dtype: torch.dtype | None) -> str:
    """Return `float32` for `torch.float32`; `none` for operations without data."""
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


def check_reducible(op: ReduceOp, dtype: torch.dtype) -> None:
    """Raise `Unsupported` unless `op` has a meaning on `dtype`."""
    known = REDUCIBLE[op]
    if dtype not in known:
        raise Unsupported(
            f"reduce op {op} on {dtype_name(dtype)}; {op} is defined on {', '.join(map(dtype_name, known))}"
        )


def bus_factor(kind: str, ranks: int) -> float:
    """Return busbw / algbw of a kind of operation on `ranks` ranks; 1 for kinds without a formula."""
    row = COLLECTIVES.get(kind.removesuffix("_v"))
    return 1.0 if row is None else row.bus_factor(ranks)
