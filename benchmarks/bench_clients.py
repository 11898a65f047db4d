"""Steps of other libraries' trainers on the backend `mcr`, and on gloo, two ranks of this host.

    python benchmarks/bench_clients.py [--program with_torchtitan with_trl] [--busy 0 2] [--rounds 3]

The programs are those of `make clients`, which trains small models and has installed the libraries. A round
starts each program on both backends in turn; a client's figure is the median time between two steps of its
optimizer on the slower rank, without the first quarter. Losses are compared, too. The report goes to
benchmarks/results/clients_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Annotated, Any, Final

import numpy as np
import typer
from bench_beside import busy as processes
from harness import (
    HARDWARE,
    ROOT,
    Dated,
    Rounds,
    chosen,
    command,
    in_turns,
    markdown,
    page,
    program,
    show,
    write,
)

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from clients.test_clients import CLIENTS, EXACT, NEEDS, launch

RANKS: Final = 2
BACKENDS: Final = ("gloo", "mcr")


def turn(name: str, backend: str) -> dict[str, tuple[float, list[float]]]:
    """Milliseconds of a step and the losses of rank 0, by client; without clients that make no steps."""
    said, printed = launch(name, backend, list(CLIENTS[name]), RANKS)
    found = {}
    for client in CLIENTS[name]:
        ranks: list[Any] = [said.get((client, rank)) for rank in range(RANKS)]
        if None in ranks:
            raise SystemExit(f"{name} {client} on {backend}:\n{printed}")
        if len(ranks[0]["ended"]) > 4:
            found[client] = max(map(step, ranks)), ranks[0]["losses"]
    return found


def step(said: Any) -> float:
    """Milliseconds between two steps of one rank's optimizer, median."""
    ended = said["ended"][len(said["ended"]) // 4 :]
    return float(1e3 * median(after - before for before, after in pairwise(ended)))


def compared(
    name: str, client: str, turns: dict[str, list[dict[str, tuple[float, list[float]]]]]
) -> list[str]:
    """Return the figures of a client. Raises `SystemExit` if its losses differ."""
    (theirs, losses), (ours, same) = (
        zip(*(each[client] for each in turns[name]), strict=True) for name in BACKENDS
    )
    apart = float(np.max(np.abs(np.array(losses) / np.array(same) - 1)))
    if apart > (0 if name in EXACT else 1e-6):
        raise SystemExit(f"{name} {client}: losses differ by {apart:.1e} of their value")
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    figures = [f"{value:.2f}" for value in (median(theirs), median(ours), median(ratios))]
    return [*figures, spread, f"{apart:.0e}" if apart else "0"]


def main(
    programs: Annotated[list[str] | None, typer.Option("--program", help="All that are installed.")] = None,
    steps: Annotated[int, typer.Option(min=8, help="Steps of a client.")] = 40,
    rounds: Rounds = 3,
    busy: Annotated[list[int] | None, typer.Option(help="So many busy processes beside; 0 and 2.")] = None,
    output: Dated = None,
) -> None:
    """Measure and write the report."""
    os.environ["CLIENT_STEPS"] = str(steps)
    names = chosen(programs or NEEDS, NEEDS, "program")
    missing = {
        name: [each for each in NEEDS[name] if importlib.util.find_spec(each) is None] for name in names
    }
    rows = []
    for name in names:
        if missing[name]:
            print(f"left out, {name}: {', '.join(missing[name])} not installed")
            continue
        for beside in busy or (0, 2):
            with processes(beside):
                turns = in_turns({each: each for each in BACKENDS}, rounds, partial(turn, name))
            clients = [(client, compared(name, client, turns)) for client in turns["mcr"][0]]
            rows += [[name.removeprefix("with_"), client, str(beside), *found] for client, found in clients]
    head = [
        "example",
        "what",
        "busy",
        "gloo, ms",
        "mcr, ms",
        "mcr / gloo",
        "of single rounds",
        "losses apart",
    ]
    show(head, rows)
    note = f"{RANKS} ranks of one host with one thread each, {steps} steps, {rounds} rounds in turns; medians"
    text = page("Steps of other libraries on the backend", command(), note, markdown(head, rows))
    write(text, output, f"clients_{HARDWARE}")


if __name__ == "__main__":
    program(main)()
