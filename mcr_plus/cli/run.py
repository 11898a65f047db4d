"""`mcr-plus run`: start ranks of a program on this host."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mcr_plus.launch.commands import Supervised
from mcr_plus.launch.job import Via
from mcr_plus.launch.run import launch
from mcr_plus.rendezvous.mpi_launcher import mpi_usable


class ViaChoice(str, Enum):
    """Values of `--via`."""

    auto = "auto"
    mpi = "mpi"
    torch = "torch"


def _refuse_hosts(value: str | None) -> None:
    """Raise an error for other launchers' options for hosts, and name launchers for several hosts."""
    if value is not None:
        raise typer.BadParameter(
            f"{value}: mcr-plus run starts ranks on this host alone. On several hosts, start the program by "
            "mpirun -np 4 -host a:2,b:2 python SCRIPT, by srun, or by torchrun --nnodes 2 on each host"
        )


def _refuse_number(value: str | None) -> None:
    """Raise an error for other launchers' options for the number of ranks."""
    if value is not None:
        raise typer.BadParameter(
            f"{value}: mcr-plus run takes the number of ranks on this host by -n {value}"
        )


def run(
    script: Annotated[str, typer.Argument(help="A Python file, or an executable.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Number of ranks.")] = ...,  # type: ignore[assignment]  # required
    config: Annotated[
        Path | None, typer.Option("--config", help="Pipeline YAML, passed to the ranks.")
    ] = None,
    via: Annotated[ViaChoice, typer.Option(help="Launcher of the ranks.")] = ViaChoice.auto,
    min_ranks: Annotated[
        int | None,
        typer.Option(
            "--min-ranks",
            help="Go on without failed ranks while so many are left, instead of ending all; without MPI.",
        ),
    ] = None,
    restart_failed: Annotated[
        int | None,
        typer.Option(
            "--restart-failed",
            help="With --min-ranks: start failed ranks again, so many times in the whole job.",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    tag_output: Annotated[bool, typer.Option("--tag-output", help=r"Begin each line with \[rank].")] = False,
    _hosts: Annotated[
        str | None,
        typer.Option(
            "-H",
            "--hosts",
            "--host",
            "--hostfile",
            "--machinefile",
            "--nodes",
            "--nnodes",
            hidden=True,
            callback=_refuse_hosts,
        ),
    ] = None,
    _number: Annotated[
        str | None,
        typer.Option(
            "-np",
            "--np",
            "--nproc_per_node",
            "--nproc-per-node",
            "--ntasks",
            hidden=True,
            callback=_refuse_number,
        ),
    ] = None,
) -> None:
    """Run SCRIPT on -n ranks of this host; options after SCRIPT are passed to it."""
    backends = _configured_backends(config)
    launcher: Via
    if min_ranks is None and restart_failed is None:
        launcher = choose_via(via, backends)
    else:
        launcher = _supervised(ranks, min_ranks, restart_failed, via, backends)
    command = program(script, module=module) + (args or [])
    raise typer.Exit(launch(command, ranks, via=launcher, config=config, tag_output=tag_output))


def choose_via(via: ViaChoice, backends: tuple[str, ...] | None) -> Via:
    """Resolve `auto`: MPI if it is available and `backends` is None or contains mpi."""
    if via is ViaChoice.auto:
        uses_mpi = backends is None or "mpi" in backends
        return "mpi" if uses_mpi and mpi_usable() else "torch"
    return "mpi" if via is ViaChoice.mpi else "torch"


def _supervised(
    ranks: int,
    min_ranks: int | None,
    restart_failed: int | None,
    via: ViaChoice,
    backends: tuple[str, ...] | None,
) -> Supervised:
    """Check the options about failed ranks; raise usage errors."""
    if min_ranks is None:
        raise typer.BadParameter(
            f"{restart_failed}: needs --min-ranks, the fewest ranks for the job to continue: 1 to {ranks}",
            param_hint="--restart-failed",
        )
    if not 1 <= min_ranks <= ranks:
        raise typer.BadParameter(f"{min_ranks}: expected 1 to {ranks} (-n)", param_hint="--min-ranks")
    if restart_failed is not None and restart_failed < 0:
        raise typer.BadParameter(f"{restart_failed}: expected 0 or more", param_hint="--restart-failed")
    reason = "MPI ends all ranks when one dies, so that --min-ranks starts them without MPI"
    if via is ViaChoice.mpi:
        raise typer.BadParameter(
            f"mpi: {reason}; with --min-ranks, choose auto or torch, or leave --via out", param_hint="--via"
        )
    if backends is not None and "mpi" in backends:
        others = ", ".join(name for name in backends if name != "mpi") or "msccl, gloo"
        raise typer.BadParameter(
            f"backends: mpi: {reason}; leave it out: backends: [{others}]", param_hint="--config"
        )
    return Supervised(min_ranks, restart_failed or 0)


def program(script: str, *, module: bool = False) -> list[str]:
    """Return the command that runs a script; raises a usage error if the file does not exist."""
    if module:
        return [sys.executable, "-m", script]
    if not Path(script).is_file():
        what = "not a file" if Path(script).exists() else "no such file"
        raise typer.BadParameter(f"{what}: {script}", param_hint="SCRIPT")
    if script.endswith(".py") or not os.access(script, os.X_OK):
        return [sys.executable, script]
    return [str(Path(script).absolute())]  # not resolved: the python of a virtual environment is a link


def _configured_backends(config: Path | None) -> tuple[str, ...] | None:
    """Return the backends of a configuration; checks it once here, instead of on every rank."""
    if config is None:
        return None
    from mcr_plus.config.reader import load

    return load(config).backends
