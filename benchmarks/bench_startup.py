"""What a job costs before it computes: import, `mcr.init`, the first all_reduce, and memory; beside gloo.

    python benchmarks/bench_startup.py [--rounds 9] [--beside CHECKOUT] [--cold 1]

Every round starts fresh processes of each kind in turn: one process, two and four ranks by `mcr-plus run`,
two ranks in the environment that torchrun gives, and two and four ranks of torch.distributed with gloo. Each
of them times its own steps; ranks wait for each other before `init`, so that the start of another process is
not counted. *import* is `import mcr_plus` and the modules of `mcr.init`, after `import torch`; *first* is the
first all_reduce, of 4 values; *second*, of 1 MiB. *resident* is what the process has more in memory after
*first* than after `import torch`, in MiB, shared pages included (Rss in /proc/self/smaps_rollup);
*private* is the part that each rank has for itself. Of several ranks the slowest or largest one counts. One
round before the others is not counted: it compiles the kernels that the cache lacks. `--cold N`: N more
rounds with an empty cache.

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
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
STEPS: Final = ("torch", "import", "init", "first", "second")
MEMORY: Final = ("resident", "private")
LAUNCHES: Final = {
    "one process": 1,
    "mcr-plus run -n 2": 2,
    "mcr-plus run -n 4": 4,
    "torchrun's environment, 2 ranks": 2,
    "torch + gloo, 2 ranks": 2,
    "torch + gloo, 4 ranks": 4,
}
GLOO: Final = "torch + gloo"
LIMIT_S: Final = 300


def memory() -> tuple[float, float]:
    """Resident MiB of this process, and those that no other process has mapped."""
    with open("/proc/self/smaps_rollup") as file:
        kib = {line.split()[0]: int(line.split()[1]) for line in file if line.endswith("kB\n")}
    return kib["Rss:"] / 1024, (kib["Private_Clean:"] + kib["Private_Dirty:"]) / 1024


def rank(folder: Path, size: int, name: str) -> None:
    """On a rank: time the steps, and write them to a file."""
    clock = time.perf_counter
    steps, since = [], clock()

    def step() -> None:
        nonlocal since
        steps.append(1e3 * (clock() - since))
        since = clock()

    import torch

    step()
    before = memory()
    since = clock()
    module: Any
    if name.startswith(GLOO):
        import torch.distributed as module

        begin, end = partial(module.init_process_group, "gloo"), module.destroy_process_group
    else:
        import mcr_plus as module

        begin, end = module.init, module.finalize  # what it needs is imported when it is first asked for
    step()
    folder.joinpath(f"ready{os.getpid()}").touch()
    while len(list(folder.glob("ready*"))) < size:
        time.sleep(0.001)
    since = clock()
    begin()
    step()
    module.all_reduce(torch.ones(4))
    step()
    added = [after - first for first, after in zip(before, memory(), strict=True)]
    since = clock()
    module.all_reduce(torch.ones(1 << 18))
    step()
    folder.joinpath(f"rank{os.getpid()}").write_text(json.dumps([*steps, *added]))
    end()


def start(name: str, tree: Path, cache: str | None = None) -> dict[str, float]:
    """One job; milliseconds of each step on the slowest rank, MiB, and `all` from the outside."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(tree)
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = cache
    with tempfile.TemporaryDirectory(prefix="mcr-startup-") as folder:
        words = [str(Path(__file__).resolve()), "--rank", folder, str(LAUNCHES[name]), name]
        began = time.perf_counter()
        if name.startswith("mcr-plus"):
            line = [sys.executable, "-m", "mcr_plus.cli.main", "run", "-n", str(LAUNCHES[name]), *words]
            jobs = [subprocess.Popen(line, env=environment, cwd=tree)]
        else:
            if LAUNCHES[name] > 1:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    port = str(probe.getsockname()[1])
                environment |= {
                    "WORLD_SIZE": str(LAUNCHES[name]),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
            ranks = [{"RANK": str(each), "LOCAL_RANK": str(each)} for each in range(LAUNCHES[name])]
            line = [sys.executable, *words]
            own = ranks if LAUNCHES[name] > 1 else [{}]
            jobs = [subprocess.Popen(line, env={**environment, **each}, cwd=tree) for each in own]
        for job in jobs:
            if job.wait(LIMIT_S):
                raise SystemExit(f"{name} in {tree}: exit code {job.returncode}")
        whole = 1e3 * (time.perf_counter() - began)
        steps = [json.loads(path.read_text()) for path in Path(folder).glob("rank*")]
    largest = map(max, zip(*steps, strict=True))
    return {**dict(zip((*STEPS, *MEMORY), largest, strict=True)), "all": whole}


def cells(rounds: list[dict[str, float]]) -> list[str]:
    """Median and quartiles of each step."""
    found = []
    for step in (*STEPS, "all", *MEMORY):
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
            for tree in trees if not name.startswith(GLOO) else [ROOT]:
                found = start(name, tree)
                if turn:
                    times[tree, name].append(found)
    for _ in range(cold):
        for tree in trees:
            with tempfile.TemporaryDirectory(prefix="mcr-kernels-") as cache:
                times[tree, "mcr-plus run -n 2, no kernels yet"].append(
                    start("mcr-plus run -n 2", tree, cache)
                )
    note = f"milliseconds, median and quartiles of {rounds} rounds; *all* is the whole job from the outside. "
    note += "*resident* and *private*: MiB added to `import torch` by import, init and the first all_reduce."
    head = ["checkout", "job", *STEPS, "all", *MEMORY]
    rows = [
        ["" if name.startswith(GLOO) else "this one" if tree == ROOT else tree.name, name, *cells(each)]
        for (tree, name), each in times.items()
    ]
    text = page("Starting a job", command(), note, markdown(head, rows))
    print(text)
    write(text, None, f"startup_{HARDWARE}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        from harness import program

        program(main)()
