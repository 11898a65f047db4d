"""Components of UCC and the names of their algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Component:
    """A transport (TL) or collective (CL) layer, with its default score and its algorithms by collective."""

    layer: str
    score: int
    algorithms: Mapping[str, tuple[str, ...]]


_CUDA: Final = ("auto", "ring", "linear", "nvls")
_ONE_BY_ONE: Final = ("p2p", "bcopy", "bcast")
COMPONENTS: Final = {
    "ucp": Component(
        "TL",
        10,
        {
            "allreduce": ("knomial", "sra_knomial", "dbt", "sliding_window", "ring"),
            "allgather": ("knomial", "ring", "neighbor", "bruck", "sparbit", "linear", "batched"),
            "allgatherv": ("ring", "knomial"),
            "alltoall": ("pairwise", "bruck", "onesided"),
            "alltoallv": ("pairwise", "hybrid", "onesided"),
            "bcast": ("knomial", "sag_knomial", "dbt"),
            "reduce": ("knomial", "dbt", "srg"),
            "reduce_scatter": ("ring", "knomial"),
            "reduce_scatterv": ("ring",),
            **dict.fromkeys(("barrier", "fanin", "fanout", "gather"), ("knomial",)),
            **dict.fromkeys(("gatherv", "scatterv"), ("linear",)),
        },
    ),
    "nccl": Component("TL", 20, {"allgatherv": _ONE_BY_ONE}),
    "rccl": Component("TL", 20, {"allgatherv": _ONE_BY_ONE}),
    "cuda": Component(
        "TL",
        40,
        {
            "allgather": _CUDA[:3], "allgatherv": _CUDA, "allreduce": ("nvls", "auto"),
            "bcast": ("linear",), "reduce_scatter": _CUDA, "reduce_scatterv": _CUDA[:3],
        },
    ),
    "sharp": Component("TL", 30, {}),
    "mlx5": Component("TL", 1, {}),
    "self": Component("TL", 50, {}),
    "basic": Component("CL", 10, {}),
    "hier": Component(
        "CL",
        50,
        {
            "allgatherv": ("gab",), "allreduce": ("rab", "split_rail"), "bcast": ("2step",),
            "reduce": ("2step",), **dict.fromkeys(("alltoall", "alltoallv"), ("node_split",)),
        },
    ),
    "doca_urom": Component("CL", 100, {}),
}  # fmt: skip
"""Components with all named algorithms that UCC registers (`ucc_info -A`), in `src/components` of
v1.1.0, v1.2.0, v1.3.0, v1.4.4, v1.5.1, v1.6.0, v1.7.0, v1.8.0 and v1.9.0-rc1."""
LISTED_ONLY: Final = {
    "ucp": ("barrier", "fanin", "fanout", "gather", "gatherv", "scatterv"),
    "cuda": ("reduce_scatter", "reduce_scatterv"),
}
"""Collectives whose algorithms `ucc_info -A` lists by names that no TUNE string may have (`alg_id_from_str`,
in tl_ucp_coll.c and tl_cuda_coll.c): UCC refuses the whole string."""
COMPONENT_OF: Final = {
    "": "ucp",  # a string alone
    **{f"UCC_{about.layer}_{name.upper()}_TUNE": name for name, about in COMPONENTS.items()},
}
"""The component of a variable."""
