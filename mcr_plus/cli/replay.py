"""`mcr-plus replay`: run the communication of a captured step."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcr_plus.cli.measuring import rank_here
from mcr_plus.cli.output import print_json, print_table
from mcr_plus.cli.run import ViaChoice, choose_via
from mcr_plus.launch.run import launch

if TYPE_CHECKING:
    from mcr_plus.bucketing.step import CapturedStep


class ComputeChoice(str, Enum):
    """Replacement of computation."""

    sleep = "sleep"
    spin = "spin"


def replay(
    step: Annotated[Path, typer.Argument(help="A step.json of `mcr.capture`.")],
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", min=1, help="Number of ranks on this host; omit it under a launcher."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Pipeline YAML.")] = None,
    compute: Annotated[ComputeChoice, typer.Option(help="Replacement of computation.")] = ComputeChoice.sleep,
    steps: Annotated[int, typer.Option(min=3, help="Number of timed steps.")] = 10,
    via: Annotated[ViaChoice, typer.Option(help="Launcher of the ranks.")] = ViaChoice.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run the communication of a captured step through a pipeline, without its model and data.

    Under mpirun, torchrun or srun, on any number of hosts, every process is a rank, and rank 0 prints.
    """
    from mcr_plus.bucketing.step import CapturedStep
    from mcr_plus.config.reader import load
    from mcr_plus.tuning.replay import ReplayRequest, run

    captured = CapturedStep.load(step)
    backends = load({"version": 1} if config is None else config).backends
    with tempfile.TemporaryDirectory(prefix="mcr-replay-") as folder:
        answer, request = Path(folder) / "answer.json", Path(folder) / "request.json"
        named = None if config is None else str(config.absolute())
        wanted = ReplayRequest(str(step.absolute()), str(answer), named, compute.value, steps)
        if ranks is None:
            rank = rank_here()
            run(wanted)
            if rank != 0:
                return
        else:
            request.write_text(json.dumps(asdict(wanted)))
            command = [sys.executable, "-m", "mcr_plus.tuning.replay", str(request)]
            status = launch(command, ranks, via=choose_via(via, backends))
            if status != 0:
                raise typer.Exit(status)  # the launcher has printed the error
        document: dict[str, Any] = json.loads(answer.read_text())
    if as_json:
        print_json(document)
    else:
        _print(document, captured)


def _print(document: dict[str, Any], captured: CapturedStep) -> None:
    measured = (f"{document[key]:.1f}" for key in ("step_ms", "fastest_ms", "slowest_ms"))
    rows = [
        ("this replay", str(document["ranks"]), *measured),
        ("captured", str(captured.ranks), f"{document['captured_ms']:.1f}", "", ""),
        ("computing alone", "", f"{document['compute_ms']:.1f}", "", ""),
    ]
    print_table("step", ("", "ranks", "median ms", "fastest", "slowest"), rows)
    typer.echo(f"{document['cpu_share']:.0%} of a core per rank; computing replaced by {document['compute']}")
