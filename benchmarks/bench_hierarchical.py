"""Collectives of two hosts with several ranks each: flat on each library, and in hierarchical steps.

    python benchmarks/bench_hierarchical.py --rate 1gbit --per-host 2

Two network namespaces joined by a link of that rate, with half of the cores each. All candidates take turns
in one job, in rounds; a time is that of the slowest rank, and of the rounds the median. Results are verified
first.
The report goes to benchmarks/results/hierarchical_<hardware>-two-hosts_<yyyymm>.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import HARDWARE, Call, Dated, Hardware, Rate, Rounds
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.backends import library_versions
from mcr_plus.core.kinds import ReduceOp
from mcr_plus.core.units import format_size
from mcr_plus.hierarchy.options import HIERARCHICAL

KINDS: Final = HIERARCHICAL
SIZES: Final = tuple(kib << 10 for kib in (4, 16, 32, 64, 256, 1024, 4096, 16384, 65536))
FLAT: Final = ("mpi", "gloo")
# What differs in the options of the stage, by the tag that the rules match.
STEPS: Final[dict[str, dict[str, Any]]] = {
    "steps mpi, mpi": {"local": {"backend": "mpi"}, "inter": {"backend": "mpi"}},
    "steps mpi, gloo": {"local": {"backend": "mpi"}, "inter": {"backend": "gloo"}},
    "steps msccl, mpi": {"local": {"backend": "msccl"}, "inter": {"backend": "mpi"}},
    "steps msccl, gloo": {"local": {"backend": "msccl"}, "inter": {"backend": "gloo"}},
}
CODEC: Final = "steps msccl, gloo int8"
CANDIDATES: Final = (*FLAT, *STEPS, CODEC)
CONFIG: Final[dict[str, Any]] = {
    "version": 1,
    "backends": ["mpi", "gloo", "msccl"],
    "pipeline": [
        {"hierarchical": {"min": 0, "kinds": list(KINDS)}},
        {"compress": {}},
        {"select": {}},
        {"dispatch": {}},
    ],
    "rules": [
        *({"match": {"tag": candidate}, "hierarchical": options} for candidate, options in STEPS.items()),
        {
            "match": {"tag": CODEC},
            "hierarchical": {
                "local": {"backend": "msccl"},
                "inter": {"backend": "gloo", "compress": {"codec": "int8_block"}},
            },
        },
    ],
}


def operation(
    comm: mcr.Communicator, kind: str, nbytes: int, candidate: str
) -> tuple[Call, torch.Tensor, torch.Tensor]:
    """What runs an operation once, the tensor that it leaves its result in, and the result."""
    numel = nbytes // 4
    named: Mapping[str, Any] = {"backend": candidate} if candidate in FLAT else {"tag": candidate}
    values = torch.full((numel,), float(comm.rank + 1))
    # The largest value, so that it stays what it is when it is done again; codecs sum.
    op: ReduceOp = mcr.AVG if candidate == CODEC else mcr.MAX
    reduced = float((comm.size + 1) / 2 if candidate == CODEC else comm.size)
    if kind == "all_reduce":
        return partial(comm.all_reduce, values, op, **named), values, torch.full((numel,), reduced)
    if kind == "broadcast":
        return partial(comm.broadcast, values, 0, **named), values, torch.ones(numel)
    if kind == "reduce_scatter":
        block = torch.empty(numel // comm.size)
        reduce_scatter = partial(comm.reduce_scatter_tensor, block, values, op, **named)
        return reduce_scatter, block, torch.full_like(block, reduced)
    result = torch.empty(numel)
    blocks = torch.arange(1.0, comm.size + 1).repeat_interleave(numel // comm.size)
    if kind == "all_gather":
        own = values[: numel // comm.size]
        return partial(comm.all_gather_into_tensor, result, own, **named), result, blocks
    return partial(comm.all_to_all_single, result, values, **named), result, blocks


def measure(rounds: int, turn_s: float, kinds: Sequence[str]) -> dict[str, Any] | None:
    """On ranks: rows of kind, bytes, candidate and the median microseconds of the slowest rank."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with mcr.init(CONFIG) as comm:
        for kind in kinds:
            for nbytes in SIZES:
                found = {candidate: operation(comm, kind, nbytes, candidate) for candidate in CANDIDATES}
                for candidate, (run, result, expected) in found.items():
                    run()
                    if not torch.allclose(result, expected, rtol=0.01):
                        raise SystemExit(f"{candidate}: {kind} of {nbytes} bytes is wrong")
                times = harness.slowest(
                    {candidate: run for candidate, (run, _, _) in found.items()},
                    rounds,
                    comm.barrier,
                    lambda spent: max(comm.all_gather_object(spent)),
                    turn_s=turn_s,
                    most=20,
                )
                middle = {candidate: median(each) for candidate, each in times.items()}
                rows += [
                    {"kind": kind, "bytes": nbytes, "way": candidate, "us": us}
                    for candidate, us in middle.items()
                ]
                if comm.rank == 0:
                    print(
                        kind, nbytes, {candidate: f"{us:.4g}" for candidate, us in middle.items()}, flush=True
                    )
    return {"rows": rows, "libraries": libraries(), "ranks": comm.size} if comm.rank == 0 else None


def libraries() -> str:
    """What is behind the backends."""
    return ", ".join(library_versions(list(FLAT)).values())


def text_of(document: Mapping[str, Any], rate: str, per_host: int) -> str:
    """The report as Markdown."""
    rows = document["rows"]
    note = (
        f"{document['libraries']}; two network namespaces with {per_host} ranks and half of the cores each, "
        "float32. Microseconds of the slowest rank, medians of rounds in which candidates take turns. `mpi` "
        "and `gloo` are flat collectives; `steps a, b` is library a in the nodes and b between them."
    )
    parts: list[str] = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        lines = []
        for nbytes in dict.fromkeys(row["bytes"] for row in rows):
            times = {row["way"]: row["us"] for row in rows if (row["kind"], row["bytes"]) == (kind, nbytes)}
            ratio = min(times[candidate] for candidate in FLAT) / min(times[candidate] for candidate in STEPS)
            lines.append(
                [
                    format_size(nbytes),
                    *(f"{times[candidate]:.4g}" for candidate in CANDIDATES),
                    f"{ratio:.2f}",
                ]
            )
        parts += [f"### {kind}", harness.markdown(["bytes", *CANDIDATES, "best flat / best in steps"], lines)]
    return harness.page(f"Collectives in steps over a link of {rate}", harness.command(), note, *parts)


@harness.program
def main(
    kinds: Annotated[list[str], typer.Option(default_factory=lambda: list(KINDS))],
    rate: Rate = "1gbit",
    per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 2,
    rounds: Rounds = 5,
    seconds: Annotated[float, typer.Option(help="Of each turn, about.")] = 0.3,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    harness.chosen(kinds, KINDS, "kind")
    need_two_hosts()
    with TwoHosts(rate) as hosts:
        launch = harness.on_both(hosts, per_host=per_host, stdout=None)
        document = harness.on_ranks(launch, measure, rounds, seconds, kinds)
    harness.write(text_of(document, rate, per_host), output, f"hierarchical_{hardware}-two-hosts")


if __name__ == "__main__":
    main()
