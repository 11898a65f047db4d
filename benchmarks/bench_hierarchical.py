"""Collectives of two hosts with several ranks each: the flat way on each library, and in steps by the nodes.

    python benchmarks/bench_hierarchical.py --rate 1gbit --per-host 2

Two network namespaces joined by a link of that rate, with half of the cores each. All ways take turns in one
job, in rounds; a time is that of the slowest rank, and of the rounds the median. Results are verified first.
The report goes to benchmarks/results/hierarchical_<hardware>-two-hosts_<yyyymm>.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from two_hosts import TwoHosts, why_not

import mcr_plus as mcr
from mcr_plus.environment import cores
from mcr_plus.message import ReduceOp
from mcr_plus.selection.fingerprint import cpu_name
from mcr_plus.units import format_size

RESULTS = Path(__file__).parent / "results"
KINDS: Final = ("all_reduce", "broadcast", "all_to_all")
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
WAYS: Final = (*FLAT, *STEPS, CODEC)
CONFIG: Final[dict[str, Any]] = {
    "version": 1,
    "backends": ["mpi", "gloo", "msccl"],
    "pipeline": [{"hierarchical": {"min": 0}}, {"compress": {}}, {"select": {}}, {"dispatch": {}}],
    "rules": [
        *({"match": {"tag": way}, "hierarchical": options} for way, options in STEPS.items()),
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
    comm: mcr.Communicator, kind: str, nbytes: int, way: str
) -> tuple[Callable[[], Any], torch.Tensor, torch.Tensor]:
    """What runs an operation once, the tensor that it leaves its result in, and the result."""
    numel = nbytes // 4
    named: Mapping[str, Any] = {"backend": way} if way in FLAT else {"tag": way}
    values = torch.full((numel,), float(comm.rank + 1))
    if kind == "all_reduce":
        # The largest value, so that it stays what it is when it is done again; codecs sum.
        op: ReduceOp = mcr.AVG if way == CODEC else mcr.MAX
        expected = (comm.size + 1) / 2 if way == CODEC else comm.size
        return partial(comm.all_reduce, values, op, **named), values, torch.full((numel,), float(expected))
    if kind == "broadcast":
        return partial(comm.broadcast, values, 0, **named), values, torch.ones(numel)
    result = torch.empty(numel)
    blocks = torch.arange(1.0, comm.size + 1).repeat_interleave(numel // comm.size)
    return partial(comm.all_to_all_single, result, values, **named), result, blocks


def measure(target: Path, rounds: int, seconds: float, kinds: Sequence[str]) -> None:
    """On ranks: rows of kind, bytes, way and the median microseconds of the slowest rank."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with mcr.init(CONFIG) as comm:
        for kind in kinds:
            for nbytes in SIZES:
                found = {way: operation(comm, kind, nbytes, way) for way in WAYS}
                for way, (run, result, expected) in found.items():
                    run()
                    if not torch.allclose(result, expected, rtol=0.01):
                        raise SystemExit(f"{way}: {kind} of {nbytes} bytes is wrong")
                times: dict[str, list[float]] = {way: [] for way in WAYS}
                for _ in range(rounds):
                    for way, (run, _, _) in found.items():
                        comm.barrier()
                        began, count = time.perf_counter(), 0
                        run()
                        spent = max(comm.all_gather_object(time.perf_counter() - began))
                        count = max(1, min(20, int(seconds / spent)))
                        comm.barrier()
                        began = time.perf_counter()
                        for _ in range(count):
                            run()
                        spent = (time.perf_counter() - began) / count
                        times[way].append(max(comm.all_gather_object(spent)))
                rows += [
                    {"kind": kind, "bytes": nbytes, "way": way, "us": 1e6 * median(each)}
                    for way, each in times.items()
                ]
                if comm.rank == 0:
                    print(
                        kind,
                        nbytes,
                        {way: f"{1e6 * median(each):.4g}" for way, each in times.items()},
                        flush=True,
                    )
        if comm.rank == 0:
            target.write_text(json.dumps({"rows": rows, "libraries": libraries(), "ranks": comm.size}))


def libraries() -> str:
    """What is behind the backends."""
    from mcr_plus.selection.fingerprint import library_versions

    return ", ".join(library_versions(list(FLAT)).values())


def text_of(document: Mapping[str, Any], options: argparse.Namespace, line: str) -> str:
    """The report as Markdown."""
    rows = document["rows"]
    lines = [
        f"# Collectives in steps over a link of {options.rate} ({date.today():%Y-%m-%d})",
        "",
        f"    {line}",
        "",
        f"{cpu_name()}, {cores()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{document['libraries']}; two network namespaces with {options.per_host} ranks and half of the "
        "cores each, float32. Microseconds of the slowest rank, medians of rounds in which ways take turns. "
        "`mpi` and `gloo` are the flat way; `steps a, b` is library a in the nodes and b between them.",
        "",
    ]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        ways = [way for way in WAYS if any(row["way"] == way for row in rows)]
        lines += [
            f"### {kind}",
            "",
            f"| bytes | {' | '.join(ways)} | best flat / best in steps |",
            f"|---|{'---|' * (len(ways) + 1)}",
        ]
        for nbytes in dict.fromkeys(row["bytes"] for row in rows):
            times = {row["way"]: row["us"] for row in rows if (row["kind"], row["bytes"]) == (kind, nbytes)}
            ratio = min(times[way] for way in FLAT) / min(times[way] for way in STEPS)
            figures = " | ".join(f"{times[way]:.4g}" for way in ways)
            lines.append(f"| {format_size(nbytes)} | {figures} | {ratio:.2f} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure on two hosts, or be one of the ranks."""
    if sys.argv[1:2] == ["--rank"]:
        file, rounds, seconds, kinds = sys.argv[2:6]
        measure(Path(file), int(rounds), float(seconds), kinds.split(","))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    parser.add_argument("--per-host", type=int, default=2, help="ranks on each host")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn, about")
    parser.add_argument(
        "--hardware", default=f"{platform.machine()}-{cores()}core", help="for the file's name"
    )
    parser.add_argument("--output", type=Path, help="another file than the dated one")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(f"skipped: {reason}")
    with TwoHosts(options.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        words = ["--rank", str(found), str(options.rounds), str(options.seconds), ",".join(options.kinds)]
        hosts.mpirun([sys.executable, __file__, *words], per_host=options.per_host)
        document = json.loads(found.read_text())
    target = options.output or RESULTS / f"hierarchical_{options.hardware}-two-hosts_{date.today():%Y%m}.md"
    line = f"python benchmarks/bench_hierarchical.py {shlex.join(sys.argv[1:])}".rstrip()
    target.write_text(text_of(document, options, line))
    print(target)


if __name__ == "__main__":
    main()
