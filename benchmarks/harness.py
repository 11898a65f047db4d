"""What the benchmark programs share: their options, the jobs they start, turns, tables and reports."""

from __future__ import annotations

import importlib
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final, TypeVar

import torch
import torch.distributed as dist
import typer
from hosts import Hosts
from rich.console import Console
from rich.table import Table

import mcr_plus as mcr
from mcr_plus.core.c10d import HashStore, PrefixStore
from mcr_plus.core.environment import cores
from mcr_plus.job import init as runtime
from mcr_plus.tables.fingerprint import cpu_name

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"
MCR_PLUS: Final = [sys.executable, "-m", "mcr_plus.cli.main"]
HARDWARE: Final = f"{platform.machine().replace('x86_64', 'x86')}-{cores()}core"
WORDS: Final = ("way", "call", "codec", "example", "what", "goal", "operation")
"""Columns of names; the others are figures and stand to the right."""

Call = Callable[[], object]
Rows = Iterable[Sequence[str]]
Launch = Callable[[Sequence[str]], object]
Choice = TypeVar("Choice")
Result = TypeVar("Result")


# --- options --------------------------------------------------------------------------------------------

Rounds = Annotated[int, typer.Option(min=1, help="How often every candidate has its turn.")]
Output = Annotated[Path | None, typer.Option(help="Also write a report to this file.")]
Dated = Annotated[Path | None, typer.Option("--output", help="Another file than the dated one.")]
Hardware = Annotated[str, typer.Option(help="For the file's name.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw them, too; needs matplotlib.")]
Tables = Annotated[Path | None, typer.Option("--table", help="Use this tuning table.")]
Budget = Annotated[str, typer.Option(help="Budget of tuning, where there is no table.")]
Rate = Annotated[str, typer.Option(help="Of the link, as tc writes it.")]


def program(main: Callable[..., None]) -> Callable[..., None]:
    """`main` as a program whose options are its parameters, read from `arguments` or the command line.

    `--ranks 2 3` stands for `--ranks 2 --ranks 3` where an option may be repeated.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    text = "\n\n".join(f"\b\n{part}" for part in (main.__globals__["__doc__"] or "").split("\n\n"))
    app.command(help=text)(main)
    command = typer.main.get_command(app)
    repeated = {
        name for option in command.params if getattr(option, "multiple", False) for name in option.opts
    }

    def run(arguments: Sequence[str] | None = None) -> None:
        words: list[str] = []
        option = ""
        for word in sys.argv[1:] if arguments is None else arguments:
            if option in repeated and words[-1] != option and not word.startswith("-"):
                words.append(option)
            option = word if word.startswith("-") else option
            words.append(word)
        command.main(words, standalone_mode=arguments is None)

    return run


def chosen(names: Iterable[str], known: Iterable[str], what: str) -> list[str]:
    """The names without blanks. Raises `SystemExit` for one that is not known."""
    names, known = [name.strip() for name in names], list(known)
    for name in names:
        if name not in known:
            raise SystemExit(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return names


# --- jobs -----------------------------------------------------------------------------------------------


def run(line: Sequence[str]) -> None:
    """Run a command. What it printed is shown only if it fails, which raises `SystemExit`."""
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(line)}\n{done.stdout}{done.stderr}")


def here(ranks: int, python: str = sys.executable, prefix: Sequence[str] = ()) -> Launch:
    """Starts programs as so many ranks of this host."""
    return lambda words: run([*prefix, python, "-m", "mcr_plus.cli.main", "run", "-n", str(ranks), *words])


def on_both(hosts: Hosts, **options: Any) -> Launch:
    """Starts programs on the hosts; `options` as of `Hosts.mpirun`."""
    return lambda words: hosts.mpirun([sys.executable, *words], **{"stdout": subprocess.DEVNULL, **options})


def answer(launch: Launch, *words: str) -> Any:
    """The JSON document that a program writes to the file that is its last argument, None if it has not."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "answer.json")
        launch([*words, str(target)])
        return json.loads(target.read_text()) if target.exists() else None


def train(launch: Launch, example: str, *words: str) -> dict[str, Any]:
    """The report of a job of one of the examples."""
    return dict(answer(launch, str(ROOT / "examples" / example / "train.py"), *words, "--json"))


def on_ranks(launch: Launch, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a program returns on rank 0, None on the others; all of it fit for JSON."""
    module = Path(function.__code__.co_filename).stem
    return answer(launch, __file__, module, function.__name__, json.dumps(arguments))


def _rank(module: str, name: str, arguments: str, target: str) -> None:
    """On ranks: the other end of `on_ranks`."""
    found = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    if found is not None:
        Path(target).write_text(json.dumps(found))


def join_gloo(comm: mcr.Communicator) -> None:
    """Make the world of torch.distributed, over gloo, of the ranks of `comm`."""
    store = runtime.current().world.store or HashStore()  # a single process has none
    dist.init_process_group("gloo", store=PrefixStore("bench", store), rank=comm.rank, world_size=comm.size)


# --- turns ----------------------------------------------------------------------------------------------


def in_turns(
    candidates: Mapping[str, Choice], rounds: int, turn: Callable[[Choice], Result]
) -> dict[str, list[Result]]:
    """The results of `turn` for each candidate, one per round.

    Noise affects all candidates alike. Every round has another order, the same on all ranks, because a
    candidate may affect the next one.
    """
    results: dict[str, list[Result]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in Random(number).sample(sorted(candidates), len(candidates)):
            results[name].append(turn(candidates[name]))
    return results


def seconds(call: Call, calls: int = 1) -> float:
    """Mean time of a call on this rank, over `calls` calls."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def take_turns(candidates: Mapping[str, tuple[Call, int]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call on this rank, by candidate and round; a candidate names its calls per turn."""
    from mpi4py import MPI

    def turn(repeated: tuple[Call, int]) -> float:
        call, calls = repeated
        seconds(call, max(3, calls // 50))
        MPI.COMM_WORLD.Barrier()
        return 1e6 * seconds(call, calls)

    return in_turns(candidates, rounds, turn)


def slowest(
    candidates: Mapping[str, Call],
    rounds: int,
    barrier: Call,
    largest: Callable[[float], float],
    *,
    turn_s: float = 0.02,
    most: int = 300,
) -> dict[str, list[float]]:
    """Microseconds of a call on the slowest rank by candidate and round; a turn has as many calls as fit.

    `largest` returns the maximum of a number over the ranks.
    """

    def timed(call: Call, calls: int) -> float:
        barrier()
        call()
        return 1e6 * largest(seconds(call, calls))

    calls = {name: max(1, min(most, int(1e6 * turn_s / timed(call, 2)))) for name, call in candidates.items()}
    turns = {name: partial(timed, call, calls[name]) for name, call in candidates.items()}
    return in_turns(turns, rounds, lambda turn: turn())


# --- what came out --------------------------------------------------------------------------------------


def show(head: Sequence[str], rows: Rows, title: str | None = None, width: int | None = None) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, justify="left" if name in WORDS else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)


def markdown(head: Sequence[str], rows: Rows) -> str:
    """The same table in a report."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def command(ranks: int | None = None) -> str:
    """The line that started this program, by `mcr-plus run` if it is itself so many ranks."""
    start = "python" if ranks is None else f"mcr-plus run -n {ranks}"
    return shlex.join([*start.split(), f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def page(title: str, line: str, note: str, *parts: str) -> str:
    """A report: its title and date, the command, the machine and what the figures are, tables."""
    about = f"{cpu_name()}, {cores()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    head = [f"# {title} ({date.today():%Y-%m-%d})", f"    {line}", f"{about}; {note}"]
    return "\n\n".join([*head, *parts]) + "\n"


def write(text: str, target: Path | None, name: str = "") -> None:
    """Write a report; without a file to write to, as that of this month in `results`."""
    target = target or RESULTS / f"{name}_{date.today():%Y%m}.md"
    target.write_text(text)
    print(target)


def write_table(
    output: Path | None, title: str, ranks: int | None, note: str, head: Sequence[str], rows: Rows
) -> None:
    """Write a report of one table, where a file is given for it."""
    if output is not None:
        write(page(title, command(ranks), note, markdown(head, rows)), output)


def write_json(figures: Any, target: Path | None) -> None:
    """Write figures, where a file is given for them."""
    if target is not None:
        target.write_text(json.dumps(figures, indent=1))


@contextmanager
def panels(path: Path, count: int, width: float, height: float) -> Iterator[Any]:
    """A figure with axes side by side, each of so many inches; drawn to a file at the end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    size = (width * count, height)
    figure, _ = pyplot.subplots(1, count, figsize=size, layout="constrained")
    yield figure
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    _rank(*sys.argv[1:])
