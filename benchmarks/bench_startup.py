"""What a job costs before it computes: import, `mcr.init`, the first all_reduce.

    python benchmarks/bench_startup.py [--rounds 9] [--beside CHECKOUT] [--cold 1]

Every round starts fresh processes of each kind in turn: one process, two ranks by `mcr-plus run`, two ranks
in the environment that torchrun gives. Each of them times its own steps; ranks wait for each other before
`init`, so that the start of another process is not counted. *import* is `import mcr_plus` and the modules of
`mcr.init`, after `import torch`; *first* is the first all_reduce, of 4 values; *second*, of 1 MiB. Of two
ranks the slower one counts. One round before the others is not counted: it compiles the kernels that numba's
cache lacks. `--cold N`: N more rounds with an empty cache.

`--beside`: another checkout, measured in turns with this one. The report goes to
benchmarks/results/startup_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
STEPS: Final = ("torch", "import", "init", "first", "second")
LAUNCHES: Final = {"one process": 1, "mcr-plus run -n 2": 2, "torchrun's environment, 2 ranks": 2}
LIMIT_S: Final = 300


def rank(folder: Path, size: int) -> None:
    """On a rank: time the steps, and write them to a file."""
    clock = time.perf_counter
    times = [clock()]
    import torch

    times.append(clock())
    import mcr_plus as mcr

    mcr.init  # noqa: B018 - what it needs is imported when it is first asked for
    times.append(clock())
    folder.joinpath(f"ready{os.getpid()}").touch()
    while len(list(folder.glob("ready*"))) < size:
        time.sleep(0.001)
    waited = clock() - times[-1]
    comm = mcr.init()
    times.append(clock() - waited)
    for numel in (4, 1 << 18):
        mcr.all_reduce(torch.ones(numel))
        times.append(clock() - waited)
    steps = [1e3 * (after - before) for before, after in pairwise(times)]
    folder.joinpath(f"rank{comm.rank}").write_text(json.dumps(steps))
    mcr.finalize()


def start(name: str, tree: Path, cache: str | None = None) -> dict[str, float]:
    """One job; milliseconds of each step on the slower rank, and `all` from the outside."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(tree)
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = cache
    with tempfile.TemporaryDirectory(prefix="mcr-startup-") as folder:
        words = [str(Path(__file__).resolve()), "--rank", folder, str(LAUNCHES[name])]
        began = time.perf_counter()
        if name.startswith("mcr-plus"):
            line = [sys.executable, "-m", "mcr_plus.cli.main", "run", "-n", "2", *words]
            jobs = [subprocess.Popen(line, env=environment, cwd=tree)]
        else:
            if LAUNCHES[name] > 1:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    port = str(probe.getsockname()[1])
                environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks = [{"RANK": str(each), "LOCAL_RANK": str(each)} for each in range(LAUNCHES[name])]
            line = [sys.executable, *words]
            own = ranks if LAUNCHES[name] > 1 else [{}]
            jobs = [subprocess.Popen(line, env={**environment, **each}, cwd=tree) for each in own]
        for job in jobs:
            if job.wait(LIMIT_S):
                raise SystemExit(f"{name} in {tree}: exit code {job.returncode}")
        whole = 1e3 * (time.perf_counter() - began)
        steps = [json.loads(path.read_text()) for path in Path(folder).glob("rank*")]
    slowest = map(max, zip(*steps, strict=True))
    return {**dict(zip(STEPS, slowest, strict=True)), "all": whole}


def cells(rounds: list[dict[str, float]]) -> list[str]:
    """Median and quartiles of each step."""
    found = []
    for step in (*STEPS, "all"):
        values = [each[step] for each in rounds]
        low, median, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        )
        found.append(f"{median:.0f} ({low:.0f} to {high:.0f})")
    return found


def main(rounds: int = 9, beside: Path | None = None, cold: int = 0) -> None:
    from harness import HARDWARE, command, markdown, page, write

    trees = [ROOT] if beside is None else [beside.resolve(), ROOT]
    times: dict[tuple[Path, str], list[dict[str, float]]] = defaultdict(list)
    for turn in range(rounds + 1):
        for name in LAUNCHES:
            for tree in trees:
                found = start(name, tree)
                if turn:
                    times[tree, name].append(found)
    for _ in range(cold):
        for tree in trees:
            with tempfile.TemporaryDirectory(prefix="mcr-kernels-") as cache:
                times[tree, "mcr-plus run -n 2, no kernels yet"].append(
                    start("mcr-plus run -n 2", tree, cache)
                )
    note = f"milliseconds, median and quartiles of {rounds} rounds; *all* is the whole job from the outside."
    head = ["checkout", "job", *STEPS, "all"]
    rows = [
        ["this one" if tree == ROOT else tree.name, name, *cells(each)]
        for (tree, name), each in times.items()
    ]
    text = page("Starting a job", command(), note, markdown(head, rows))
    print(text)
    write(text, None, f"startup_{HARDWARE}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        from harness import program

        program(main)()
