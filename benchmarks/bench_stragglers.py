"""Whether `log.stragglers()` names a rank that is late in the backward pass, and nobody where none is.

A wrapped model trains on two ranks. In a run with a delay, one rank, another one from run to run, sleeps in
the backward pass of every step; in a run without, none does. Runs of both kinds take turns in one job. Every
rank is asked after each run, from what it has recorded itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import HARDWARE, Dated, Hardware

import mcr_plus as mcr

WIDTH: Final = 512
BATCH: Final = 256


class Delay:
    """A hook that sleeps in the backward pass of a model, for `seconds`."""

    seconds = 0.0

    def __call__(self, *_: Any) -> None:
        if self.seconds:
            time.sleep(self.seconds)


def trained(steps: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()


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
                    trained(steps, model, optimizer)
                stragglers = log.stragglers()
                mine = [each.rank for each in stragglers], [each.share for each in stragglers], log.seconds
                answers = comm.all_gather_object(mine)
                found.append({"victim": victim, "answers": answers})
        return found if comm.rank == 0 else None


def counted(found: list[dict[str, Any]], steps: int, right: Callable[[dict[str, Any]], bool]) -> list[str]:
    """Runs, those in which all ranks were right, those in which any was not, the median step in ms."""
    good = sum(map(right, found))
    times = [seconds / steps for each in found for _, _, seconds in each["answers"]]
    return [str(len(found)), str(good), str(len(found) - good), f"{1e3 * median(times):.0f}"]


@harness.program
def main(
    runs: Annotated[int, typer.Option(min=1, help="With a delay, and as many without.")] = 100,
    steps: Annotated[int, typer.Option(min=5, help="Of each run.")] = 10,
    delay: Annotated[float, typer.Option(min=0.0, help="Seconds.")] = 0.2,
    library: str = "msccl",
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    output: Dated = None,
    hardware: Hardware = HARDWARE,
) -> None:
    found = harness.on_ranks(harness.here(ranks), rank, runs, steps, delay, library)
    late = [each for each in found if each["victim"] is not None]
    calm = [each for each in found if each["victim"] is None]
    named = counted(late, steps, lambda each: all(who == [each["victim"]] for who, _, _ in each["answers"]))
    nobody = counted(calm, steps, lambda each: not any(who for who, _, _ in each["answers"]))
    for each in found:
        expected = [] if each["victim"] is None else [each["victim"]]
        if any(who != expected for who, _, _ in each["answers"]):
            print(f"expected {expected}: {each['answers']}")
    rows = [[f"{1e3 * delay:.0f} ms late on one rank", *named], ["none late", *nobody]]
    head = ["what", "runs", "right on all ranks", "wrong", "median step, ms"]
    harness.show(head, rows)
    note = (
        f"{ranks} ranks over {library}, {steps} steps a run; right: the late rank alone, or nobody, is named."
    )
    text = harness.page("Ranks that are late", harness.command(), note, harness.markdown(head, rows))
    harness.write(text, output, f"stragglers_{hardware}")


if __name__ == "__main__":
    main()
