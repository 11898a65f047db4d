"""Which codecs give the same bits again, and on what their bits depend: the list in docs/reproducible.md."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

import pytest
import torch
from codec_exam import CASES, Case
from jobs.reproducible.test_sums import LIBRARIES, values
from ranks import run_ranks

import mcr_plus as mcr

NUMEL: Final = 96 * 64
CUTS: Final = (1130, 3000, NUMEL - 4130)
BY_LIBRARY: Final = {"bf16", "fp16", "randk", "powersgd"}
"""The library adds encoded values, which are no integers."""
IN_PIECES: Final = {"bf16", "fp16", "delta"}
"""A value's bits depend on that value of each rank alone."""
SEEDED: Final = {"bf16 stochastic", "fp16 stochastic", "randk", "powersgd"}
"""The codec draws numbers, which depend on the seed and on the number of earlier calls."""
FED_BACK: Final[list[dict[str, Any]]] = [
    {"codec": "int4_block", "error_feedback": True}, {"codec": "topk", "ef21": True},
]  # fmt: skip
ALL: Final = [*CASES, *(Case(config, None) for config in FED_BACK)]


def name_of(case: Case) -> str:
    return " ".join(str(case.config[key]) for key in ("codec", "rounding") if key in case.config)


def hash_of(*tensors: torch.Tensor) -> str:
    return blake2b(b"".join(each.numpy().tobytes() for each in tensors), digest_size=8).hexdigest()


def results(library: str, sums: str, threads: int) -> dict[str, list[str]]:
    """Return hashes of a call; with `fixed`, of a second one, one of another tag and seed, and pieces."""
    torch.set_num_threads(threads)
    found = {}
    stages: list[Any] = [{"compress": {}}, {"select": {}}, {"dispatch": {}}]
    config: Any = {"version": 1, "backends": [library], "numerics": {"sums": sums}, "pipeline": stages}
    with mcr.init(config) as comm:
        for number, case in enumerate(ALL):

            def call(x: torch.Tensor, tag: str, **options: Any) -> torch.Tensor:
                how: Any = {"compress": {**case.config, **options}, "tag": f"{number} {tag}"}  # noqa: B023
                if case.config["codec"] == "delta":  # noqa: B023
                    mcr.broadcast(x, 1, **how)
                else:
                    mcr.all_reduce(x, **how)
                return x

            def in_pieces(x: torch.Tensor) -> str:
                if case.config["codec"] == "powersgd":  # noqa: B023 - called at once
                    return ""  # it is for matrices
                parts = x.view(-1).split(CUTS)
                return hash_of(*(call(part.clone(), f"part {at}") for at, part in enumerate(parts)))

            x = values(comm.rank, NUMEL, torch.float32).view(96, 64)
            seed = {"seed": 11} if name_of(case) in SEEDED else {}
            key = f"{number} {case.name}"
            found[key] = [hash_of(call(x.clone(), "x"))]
            if sums == "fixed":
                again = hash_of(call(x.clone(), "x"))
                found[key] += [again, hash_of(call(x.clone(), "y", **seed)), in_pieces(x)]
    return found


def every_job(libraries: list[str]) -> dict[str, dict[str, list[str]]]:
    jobs = [(library, sums, 1) for library in libraries for sums in ("fixed", "fast")]
    return {" ".join(map(str, job)): results(*job) for job in [*jobs, ("msccl", "fixed", 2)]}


@pytest.mark.long
def test_codecs_give_the_same_bits_again() -> None:
    via: Any = "mpi" if "mpi" in LIBRARIES else "torch"
    first, *others = (result.value for result in run_ranks(every_job, 3, args=[LIBRARIES], via=via))
    assert all(other == first for other in others)  # the bits of every rank
    again = first["msccl fixed 1"]
    assert first["msccl fixed 2"] == again
    by_library = set()
    for number, case in enumerate(ALL):
        key, name = f"{number} {case.name}", name_of(case)
        for library in LIBRARIES:
            assert first[f"{library} fixed 1"][key] == again[key], key
            if first[f"{library} fast 1"][key] != first["msccl fast 1"][key]:
                by_library.add(case.config["codec"])
        once, later, other, pieces = again[key]
        assert (once == later) == (name not in SEEDED and case.config not in FED_BACK), key
        assert (once == other) == (name not in SEEDED), key
        assert (once == pieces) == (name in IN_PIECES), key
    assert by_library
    assert by_library <= BY_LIBRARY
