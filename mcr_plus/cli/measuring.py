"""Code shared by `tune` and `bench`: parse options, start the ranks, read the answer."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from mcr_plus.cli.run import ViaChoice, choose_via
from mcr_plus.core.environment import launch_environment
from mcr_plus.errors import BackendUnavailable, unknown
from mcr_plus.launch.run import launch

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config
    from mcr_plus.tuning.worker import TuningJob

T = TypeVar("T")
_INTERRUPTED = 128


def answer_of(job: TuningJob, ranks: int | None, via: ViaChoice) -> dict[str, Any] | None:
    """Run the job on `ranks` ranks of this host and return the answer of rank 0.

    Without `ranks`, this process must be a rank started by mpirun, torchrun or srun; rank 0 then returns the
    answer, other ranks return None. Exits with the job's status if the job fails.
    """
    with tempfile.TemporaryDirectory(prefix="mcr-measure-") as folder:
        job = replace(job, answer=str(Path(folder) / "answer.json"))
        if ranks is None:
            return _as_rank(job)
        request = Path(folder) / "request.json"
        request.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "mcr_plus.tuning.worker", str(request)]
        status = launch(command, ranks, via=choose_via(via, job.backends))
        if status >= _INTERRUPTED and job.measurements:
            typer.echo(f"the samples so far are in {job.measurements}; the same command continues", err=True)
        if status != 0:
            raise typer.Exit(status)  # the launcher has printed the error
        return _read(job)


def rank_here() -> int:
    """Return the rank of this process under a launcher; raise a usage error (`-n`) without one."""
    place = launch_environment()
    if place.world_size == 1:
        raise typer.BadParameter(
            "the number of ranks is missing; it is optional only under mpirun, torchrun or srun",
            param_hint="-n",
        )
    # mpirun gives its ranks terminals. On a terminal, numba makes colorama (if installed) write an escape
    # sequence at the end of the process: on every rank, after the document of `--json`.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    return place.rank


def _as_rank(job: TuningJob) -> dict[str, Any] | None:
    rank = rank_here()
    from mcr_plus.tuning.worker import run

    run(job)
    return _read(job) if rank == 0 else None


def _read(job: TuningJob) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(Path(job.answer).read_text())
    return answer


def names(text: str | None, what: str, known: Sequence[str], option: str) -> tuple[str, ...] | None:
    """Return the names in `a,b,c`; an unknown name is a usage error."""
    if text is None:
        return None
    listed = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in listed:
        if name not in known:
            raise typer.BadParameter(unknown(what, name, known), param_hint=option)
    if not listed:
        raise typer.BadParameter(f"expected at least one of {', '.join(known)}", param_hint=option)
    return listed


def kinds(text: str | None, default: Sequence[str]) -> tuple[Any, ...]:
    """Return the kinds in `--kinds`, spelled as in calls or tables."""
    from mcr_plus.core.kinds import ALIASES
    from mcr_plus.tuning.operations import KINDS

    listed = names(text, "kind", (*KINDS, *ALIASES), "--kinds") or tuple(default)
    return tuple(dict.fromkeys(ALIASES.get(name, name) for name in listed))


def backend_names(text: str | None, config: Config, files: str) -> tuple[str, ...] | None:
    """Return the backends in `--backends`, or their algorithms in `config`: `name:algorithm`.

    `files`: the option that names algorithm files.

    Raises:
        ConfigError: an unknown algorithm, or an invalid algorithm file of `config`.
        BackendUnavailable: a backend cannot be used here.
    """
    from mcr_plus import registry
    from mcr_plus.backends import backend_class
    from mcr_plus.config.names import names_no_algorithm, stored_backend
    from mcr_plus.msccl.catalog import kept
    from mcr_plus.selection.checks import check_algorithm, use_algorithms

    if text is None:
        return None
    parts = (part.strip() for part in text.split(","))
    choices = tuple(dict.fromkeys(stored_backend(part) for part in parts if part))
    known = [name for name in registry.names("backends") if name != "local"]
    libraries = names(
        ",".join(choice.partition(":")[0] for choice in choices), "backend", known, "--backends"
    )
    for name in libraries or ():
        status = backend_class(name).availability()
        if not status.available:
            raise BackendUnavailable(
                f"--backends: {name} cannot be used here: {status.reason}; {status.remedy}"
            )
    with kept():
        use_algorithms(config)
        for choice in choices:
            if names_no_algorithm(choice):
                what = f"{choice!r} names no algorithm; expected name or name:algorithm"
                raise typer.BadParameter(what, param_hint="--backends")
            check_algorithm(choice, "--backends", files=files)
    return choices


def dtype_names(text: str, option: str = "--dtypes") -> tuple[str, ...]:
    """Return the dtypes in `--dtypes`."""
    from mcr_plus.core.kinds import ARITHMETIC, dtype_name

    return names(text, "dtype", tuple(map(dtype_name, ARITHMETIC)), option) or ("float32",)


def number(text: str | None, parse: Callable[[object], T], option: str) -> T | None:
    """Parse a size or a duration; invalid text is a usage error."""
    try:
        return None if text is None else parse(int(text) if text.isascii() and text.isdigit() else text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def sizes(smallest: str, largest: str) -> tuple[int, int]:
    """Return the smallest and the largest size to measure."""
    from mcr_plus.core.units import parse_size

    low, high = number(smallest, parse_size, "--min"), number(largest, parse_size, "--max")
    assert low is not None
    assert high is not None
    if not 1 <= low <= high:
        raise typer.BadParameter(f"expected 1 ≤ --min ≤ --max, got {low} and {high}", param_hint="--min")
    return low, high


def check_plot(path: Path | None) -> None:
    """Raise an error for an unwritable plot before minutes of measuring."""
    if path is not None:
        from mcr_plus.tuning.plot import check_available

        if path.is_fifo():
            raise typer.BadParameter(f"expected a regular file, got {path}", param_hint="--plot")
        check_available(path)
