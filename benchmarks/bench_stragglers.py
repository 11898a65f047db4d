"""Whether `log.stragglers()` names a rank that is late in the backward pass, and nobody where none is.

A wrapped model trains on two ranks. In a run with a delay, one rank, another one from run to run, sleeps in
the backward pass of every step; in a run without, none does. Runs of both kinds take turns in one job. Every
rank is asked after each run.

    python benchmarks/bench_stragglers.py --runs 100
    python benchmarks/bench_stragglers.py --runs 100 --hosts 2 --apart 1000     on network namespaces
    python benchmarks/bench_stragglers.py --runs 100 --hosts 2 --busy 4         beside so many busy processes

`--apart`: seconds by which the clock of the second host is ahead. The report goes to
benchmarks/results/stragglers_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import typer
from bench_beside import busy
from harness import HARDWARE, Dated, Hardware
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr

WIDTH: Final = 512
BATCH: Final = 256


class Delay:
    """A hook that sleeps in the backward pass of a model, for `seconds`."""

    seconds = 0.0

    def __call__(self, *_: Any) -> None:
        if self.seconds:
            time.sleep(self.seconds)


def trained(steps: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train; returns the processor time of the forward passes, in which nothing is waited for."""
    forward = 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        began = time.thread_time()
        loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        forward += time.thread_time() - began
        loss.backward()
        optimizer.step()
    return forward


def rank(runs: int, steps: int, delay: float, library: str) -> list[dict[str, Any]] | None:
    """Runs on ranks; returns of each run what was found on all of them, on rank 0."""
    torch.set_num_threads(1)
    with mcr.init({"version": 1, "backends": [library]}) as comm:
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)]
        late = Delay()
        layers[3].register_full_backward_hook(late)  # in the middle: some gradients are on their way
        model: Any = torch.nn.Sequential(*layers)
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        trained(5, model, optimizer)
        found = []
        for run in range(runs):
            for victim in (run % comm.size, None):
                late.seconds = delay if comm.rank == victim else 0.0
                comm.barrier()
                with mcr.record() as log:
                    forward = trained(steps, model, optimizer)
                stragglers = log.stragglers()
                mine = {
                    "named": [each.rank for each in stragglers],
                    "shares": [each.share for each in stragglers],
                    "compared": stragglers.compared,
                    "left_out": stragglers.left_out,
                    "error": stragglers.error,
                    "seconds": log.seconds,
                    "forward": forward,
                }
                answers = comm.all_gather_object(mine)
                found.append({"victim": victim, "answers": answers})
        return found if comm.rank == 0 else None


def counted(found: list[dict[str, Any]], steps: int, right: Callable[[dict[str, Any]], bool]) -> list[str]:
    """Runs, those in which all ranks were right, those in which any was not, the median step in ms."""
    good = sum(map(right, found))
    times = [answer["seconds"] / steps for each in found for answer in each["answers"]]
    return [str(len(found)), str(good), str(len(found) - good), f"{1e3 * median(times):.0f}"]


def launcher(stack: ExitStack, hosts: int, ranks: int, apart: float) -> harness.Launch:
    """Starts so many ranks, here or on two hosts; the clock of the second one is `apart` seconds ahead."""
    if hosts == 1:
        return harness.here(ranks)
    need_two_hosts()
    both = stack.enter_context(TwoHosts(None))
    later = (
        f'case $(hostname) in mcr-b-*) exec unshare --time --monotonic {apart:.0f} "$@" ;; esac; exec "$@"'
    )
    line = ["bash", "-c", later, "rank", sys.executable] if apart else [sys.executable]
    return lambda words: both.torchrun([*line, *words], per_host=ranks // hosts)


def slower(calm: list[dict[str, Any]]) -> str:
    """How much more processor time ranks took for the same forward passes, where none was made late."""
    named: list[float] = []
    others: list[float] = []
    for each in calm:
        forward = [answer["forward"] for answer in each["answers"]]
        late = {rank for answer in each["answers"] for rank in answer["named"]}
        for rank in late or {forward.index(max(forward))}:
            ratio = forward[rank] / median(forward[:rank] + forward[rank + 1 :])
            (named if late else others).append(ratio)
    texts = [
        f"{what} took {median(ratios):.2f} times the processor time of the others for the same forward "
        f"passes ({min(ratios):.2f} to {max(ratios):.2f})"
        for what, ratios in (("ranks that were named", named), ("where nobody was, the slower rank", others))
        if ratios
    ]
    return f". Where none was made late, {'; '.join(texts)}"


def figures(found: list[dict[str, Any]], name: str) -> list[float]:
    """One figure of every rank in every run."""
    return [answer[name] for each in found for answer in each["answers"]]


@harness.program
def main(
    runs: Annotated[int, typer.Option(min=1, help="With a delay, and as many without.")] = 100,
    steps: Annotated[int, typer.Option(min=5, help="Of each run.")] = 10,
    delay: Annotated[float, typer.Option(min=0.0, help="Seconds.")] = 0.2,
    library: Annotated[str | None, typer.Option(help="msccl on one host, gloo on two.")] = None,
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    hosts: Annotated[int, typer.Option(min=1, max=2, help="Network namespaces.")] = 1,
    apart: Annotated[float, typer.Option(min=0.0, help="Seconds between the clocks of the hosts.")] = 0.0,
    busy_processes: Annotated[int, typer.Option("--busy", min=0, help="So many beside the job.")] = 0,
    output: Dated = None,
    hardware: Hardware = HARDWARE,
) -> None:
    if ranks % hosts:
        raise SystemExit(f"--ranks {ranks}: expected a multiple of --hosts {hosts}")
    library = library or ("msccl" if hosts == 1 else "gloo")
    with ExitStack() as stack:
        launch = launcher(stack, hosts, ranks, apart)
        stack.enter_context(busy(busy_processes))
        before = os.getloadavg()[0]
        found = harness.on_ranks(launch, rank, runs, steps, delay, library)
    late = [each for each in found if each["victim"] is not None]
    calm = [each for each in found if each["victim"] is None]
    named = counted(late, steps, lambda each: all(a["named"] == [each["victim"]] for a in each["answers"]))
    nobody = counted(calm, steps, lambda each: not any(a["named"] for a in each["answers"]))
    for each in found:
        expected = [] if each["victim"] is None else [each["victim"]]
        if any(answer["named"] != expected for answer in each["answers"]):
            print(f"expected {expected}: {each['answers']}")
    rows = [[f"{1e3 * delay:.0f} ms late on one rank", *named], ["none late", *nobody]]
    head = ["what", "runs", "right on all ranks", "wrong", "median step, ms"]
    harness.show(head, rows)
    where = "" if hosts == 1 else f" on {hosts} hosts, whose clocks are {apart:.0f} s apart"
    beside = f", beside {busy_processes} busy processes" if busy_processes else ""
    errors, compared, left_out = (figures(found, name) for name in ("error", "compared", "left_out"))
    note = (
        f"{ranks} ranks over {library}{where}, {steps} steps a run{beside}, load {before:.0f} at the "
        f"beginning and {os.getloadavg()[0]:.0f} at the end; right: the late rank alone, or nobody, is "
        f"named. Operations that ranks have compared: {sum(compared):,}, left out: {sum(left_out):,}"
    )
    if hosts > 1:
        note += (
            f"; error of the clocks: median {1e3 * median(errors):.2f} ms, worst {1e3 * max(errors):.2f} ms"
        )
    note += slower(calm)
    text = harness.page("Ranks that are late", harness.command(), f"{note}.", harness.markdown(head, rows))
    harness.write(text, output, f"stragglers_{hardware}")


if __name__ == "__main__":
    main()
