"""What `tune` and `bench` share: options, and how the ranks are started and their answer is read."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from mcr_plus.cli.run import ViaChoice, choose_via
from mcr_plus.environment import launch_environment
from mcr_plus.errors import BackendUnavailable, unknown
from mcr_plus.launch import launch

if TYPE_CHECKING:
    from mcr_plus.config import Config
    from mcr_plus.tuning.worker import Job

T = TypeVar("T")
_INTERRUPTED = 128


def answer_of(job: Job, ranks: int | None, via: ViaChoice) -> dict[str, Any] | None:
    """Run the job on `ranks` ranks of this host and return what rank 0 found out.

    Without `ranks`, this process must be a rank that mpirun, torchrun or srun has started; then only rank 0
    gets an answer, the others None. Exits as the job does if it fails.
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
            typer.echo(
                f"what was measured is in {job.measurements}; the same command goes on there", err=True
            )
        if status != 0:
            raise typer.Exit(status)  # the launcher has said why
        return _read(job)


def _as_rank(job: Job) -> dict[str, Any] | None:
    place = launch_environment()
    if place.world_size == 1:
        raise typer.BadParameter(
            "how many ranks? Inside a job that mpirun, torchrun or srun has started, it may be left out",
            param_hint="-n",
        )
    from mcr_plus.tuning.worker import run

    run(job)
    return _read(job) if place.rank == 0 else None


def _read(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(job.answer).read_text())
    return found


def names(text: str | None, what: str, known: Sequence[str], option: str) -> tuple[str, ...] | None:
    """The names in `a,b,c`, all known; usage error otherwise."""
    if text is None:
        return None
    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(unknown(what, name, known), param_hint=option)
    if not chosen:
        raise typer.BadParameter(f"expected at least one of {', '.join(known)}", param_hint=option)
    return chosen


def kinds(text: str | None, default: Sequence[str]) -> tuple[Any, ...]:
    """The kinds in `--kinds`, as calls or tables spell them."""
    from mcr_plus.message import ALIASES
    from mcr_plus.tuning.operations import KINDS

    chosen = names(text, "kind", (*KINDS, *ALIASES), "--kinds") or tuple(default)
    return tuple(dict.fromkeys(ALIASES.get(name, name) for name in chosen))


def backend_names(text: str | None, config: Config, files: str) -> tuple[str, ...] | None:
    """The backends in `--backends`, or algorithms of theirs that `config` knows: `name:algorithm`.

    Raises `ConfigError` for others, and for an algorithm file of `config` that is wrong. `files`: the option
    that names such files.
    """
    from mcr_plus import registry
    from mcr_plus.backends import backend_class
    from mcr_plus.backends.msccl.catalog import kept
    from mcr_plus.config import names_no_algorithm
    from mcr_plus.selection.checks import check_algorithm, use_algorithms

    if text is None:
        return None
    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    known = [name for name in registry.names("backends") if name != "local"]
    libraries = names(",".join(each.partition(":")[0] for each in chosen), "backend", known, "--backends")
    for name in libraries or ():
        found = backend_class(name).availability()
        if not found.available:
            raise BackendUnavailable(
                f"--backends: {name} cannot be used here: {found.reason}; {found.remedy}"
            )
    with kept():
        use_algorithms(config)
        for choice in chosen:
            if names_no_algorithm(choice):
                what = f"{choice!r} names no algorithm; expected name or name:algorithm"
                raise typer.BadParameter(what, param_hint="--backends")
            check_algorithm(choice, "--backends", files=files)
    return chosen


def dtype_names(text: str, option: str = "--dtypes") -> tuple[str, ...]:
    """The dtypes in `--dtypes`."""
    from mcr_plus.config import DTYPE_NAMES

    return names(text, "dtype", DTYPE_NAMES, option) or ("float32",)


def number(text: str | None, parse: Callable[[object], T], option: str) -> T | None:
    """A size or a duration; usage error if it is none."""
    try:
        return None if text is None else parse(int(text) if text.isascii() and text.isdigit() else text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def sizes(smallest: str, largest: str) -> tuple[int, int]:
    """The ends of the sizes to measure."""
    from mcr_plus.units import parse_size

    low, high = number(smallest, parse_size, "--min"), number(largest, parse_size, "--max")
    assert low is not None
    assert high is not None
    if not 1 <= low <= high:
        raise typer.BadParameter(f"expected 1 ≤ --min ≤ --max, got {low} and {high}", param_hint="--min")
    return low, high


def check_plot(path: Path | None) -> None:
    """Refuse to measure for minutes and fail at the picture."""
    if path is not None:
        from mcr_plus.tuning.plot import check_available

        if path.is_fifo():
            raise typer.BadParameter(f"expected a regular file, got {path}", param_hint="--plot")
        check_available(path)
