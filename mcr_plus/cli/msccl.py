"""`mcr-plus msccl`: verify, show and generate algorithm files."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcr_plus.cli.output import print_json, print_table, print_written

if TYPE_CHECKING:
    from mcr_plus.msccl.algorithm import Algorithm, AlgorithmStep, Chunks, ThreadBlock
    from mcr_plus.msccl.generators import Generator
    from mcr_plus.msccl.simulator import SymbolicRun

app = typer.Typer(no_args_is_help=True, help="Verify, show and generate MSCCL algorithm files.")

_REFUSED = 1
_PATH: dict[str, Any] = {"exists": True, "readable": True}
_FILE: dict[str, Any] = {**_PATH, "dir_okay": False}
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Slots = Annotated[int, typer.Option(min=1, help="Capacity of a queue between two ranks, in messages.")]


@app.command()
def verify(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Algorithm files (XML), or folders of *.xml.", **_PATH),
    ],
    slots: Slots = 2,
    as_json: AsJson = False,
) -> None:
    """Prove that FILEs compute their collectives without deadlock or race; status 1 if a proof fails."""
    chosen = [file for path in files for file in _inside(path)]
    answers = []
    for file in chosen:
        answers.append(_verified(file, slots))
        if not as_json:
            _print_answer(answers[-1])
    if as_json:
        print_json(answers)
    if not all(answer["verified"] for answer in answers):
        raise typer.Exit(_REFUSED)


def _inside(path: Path) -> list[Path]:
    """Return the file, or the *.xml files of the folder."""
    files = sorted(path.glob("*.xml")) if path.is_dir() else [path]
    if not files:
        raise typer.BadParameter(f"no *.xml in the folder {path}", param_hint="FILE")
    return files


def _verified(file: Path, slots: int) -> dict[str, Any]:
    from mcr_plus.errors import ConfigError
    from mcr_plus.msccl.reader import read_algorithm
    from mcr_plus.msccl.verifier import verify_all

    answer: dict[str, Any] = {"file": str(file), "verified": False}
    try:
        algorithm = read_algorithm(file)
        answer.update(collective=algorithm.collective, ranks=algorithm.ranks)
        answer["reports"] = [asdict(report) for report in verify_all(algorithm, slots=slots)]
    except ConfigError as error:
        return {**answer, "problems": str(error).splitlines()}
    return {**answer, "verified": True}


def _print_answer(answer: dict[str, Any]) -> None:
    """Print a line per proof to stdout, or the problems to stderr."""
    if not answer["verified"]:
        print(f"{answer['file']}: refused", flush=True)
        for problem in answer["problems"]:
            print(problem, file=sys.stderr)
        return
    for report in answer["reports"]:
        manner = "in place" if report["in_place"] else "out of place"
        cost = f"{report['messages']} messages, {report['rounds']} rounds"
        what = f"{answer['collective']} of {answer['ranks']} ranks, {manner}: {cost}"
        print(f"{answer['file']}: {what}", flush=True)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An algorithm file (XML).", **_FILE)],
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only this rank, a column per thread block.")
    ] = None,
    slots: Slots = 2,
    as_json: AsJson = False,
) -> None:
    """Show the steps of every rank of FILE by rounds, in which all runnable steps run at once."""
    from mcr_plus.msccl.reader import read_algorithm
    from mcr_plus.msccl.simulator import SymbolicRun

    algorithm = read_algorithm(file)
    if rank is not None and rank >= algorithm.ranks:
        what = f"{rank}, expected a rank: 0 to {algorithm.ranks - 1}"
        raise typer.BadParameter(what, param_hint="--rank")
    run = SymbolicRun(algorithm, in_place=algorithm.in_place, slots=slots)
    _warn_of_refusal(algorithm, slots)
    if as_json:
        print_json(_plain(algorithm, run, rank))
        return
    manner = "in place" if algorithm.in_place else "out of place"
    chunks = f"{algorithm.chunks} chunk{'' if algorithm.chunks == 1 else 's'}"
    what = f"{algorithm.collective} of {algorithm.ranks} ranks, {chunks}, {manner}"
    rows = _rows(algorithm, run, rank)
    if rank is None:
        columns = [f"rank {number}" for number in range(algorithm.ranks)]
    else:
        blocks = algorithm.programs[rank].blocks
        columns = [f"tb {number} {_peers(block)}".rstrip() for number, block in enumerate(blocks)]
    print_table(f"{algorithm.name}: {what}", ["round", *columns], rows)


def _warn_of_refusal(algorithm: Algorithm, slots: int) -> None:
    """Print a warning if the algorithm is refused."""
    from mcr_plus.errors import AlgorithmError
    from mcr_plus.msccl.verifier import verify_all

    try:
        verify_all(algorithm, slots=slots)
    except AlgorithmError as error:
        first, *more = str(error).splitlines()
        rest = f" (and {len(more)} more: mcr-plus msccl verify)" if more else ""
        print(f"refused: {first}{rest}", file=sys.stderr)


def _steps(
    algorithm: Algorithm, rank: int | None
) -> list[tuple[tuple[int, int, int], ThreadBlock, AlgorithmStep]]:
    """Return all steps but `nop`, of one rank or of all."""
    return [
        ((number, index, at), block, step)
        for number, program in enumerate(algorithm.programs)
        if rank in (None, number)
        for index, block in enumerate(program.blocks)
        for at, step in enumerate(block.steps)
        if step.operation != "nop"
    ]


def _rows(algorithm: Algorithm, run: SymbolicRun, rank: int | None) -> list[list[str]]:
    """Return a row per round, and a last row for deadlocked steps."""
    width = algorithm.ranks if rank is None else len(algorithm.programs[rank].blocks)
    cells: dict[int, list[list[str]]] = {}
    for (number, index, at), block, step in _steps(algorithm, rank):
        time = run.times.get((number, index, at), run.rounds + 1)
        row = cells.setdefault(time, [[] for _ in range(width)])
        row[number if rank is None else index].append(_does(block, step))
    return [
        ["never" if time > run.rounds else str(time), *(", ".join(cell) for cell in cells[time])]
        for time in sorted(cells)
    ]


def _does(block: ThreadBlock, step: AlgorithmStep) -> str:
    """Return a step in symbols. `3 + i[2] → o[2] → 1`: receive from 3, add i[2], store, send to 1."""
    from mcr_plus.msccl.algorithm import READS, RECEIVES, SENDS, WRITES

    source, target = _chunks(step.source, step.count), _chunks(step.target, step.count)
    if step.operation == "re":
        return f"{target} + {source} → {target}"
    inputs = [str(block.receive)] if step.operation in RECEIVES else []
    inputs += [source] if step.operation in READS else []
    outputs = [target] if step.operation in WRITES else []
    outputs += [str(block.send)] if step.operation in SENDS else []
    return " → ".join([" + ".join(inputs), *outputs])


def _chunks(chunks: Chunks, count: int) -> str:
    last = f"-{chunks.at + count - 1}" if count > 1 else ""
    return f"{chunks.space}[{chunks.at}{last}]"


def _peers(block: ThreadBlock) -> str:
    peers = [f"from {block.receive}"] if block.receive >= 0 else []
    peers += [f"to {block.send}"] if block.send >= 0 else []
    if block.channel and peers:
        peers.append(f"channel {block.channel}")
    return " ".join(peers)


def _plain(algorithm: Algorithm, run: SymbolicRun, rank: int | None) -> dict[str, Any]:
    steps = [
        {
            "rank": number,
            "tb": index,
            "step": at,
            "round": run.times.get((number, index, at)),
            "type": step.operation,
            "receive": block.receive if block.receive >= 0 else None,
            "send": block.send if block.send >= 0 else None,
            "channel": block.channel,
            "src": _chunks(step.source, step.count),
            "dst": _chunks(step.target, step.count),
        }
        for (number, index, at), block, step in _steps(algorithm, rank)
    ]
    return {
        "name": algorithm.name,
        "collective": algorithm.collective,
        "ranks": algorithm.ranks,
        "chunks": algorithm.chunks,
        "rounds": run.rounds,
        "steps": steps,
    }


@app.command()
def generate(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The algorithm, see --list.")] = None,
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=2, help="Number of ranks.")] = None,
    group: Annotated[int | None, typer.Option(help="Ranks of a group, for two-level algorithms.")] = None,
    root: Annotated[int | None, typer.Option(help="The root, for rooted collectives.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file, else stdout.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the algorithms.")] = False,
) -> None:
    """Write the algorithm NAME for a number of ranks, as verified MSCCL XML."""
    from mcr_plus.errors import InvalidArgument, unknown
    from mcr_plus.msccl.generators import GENERATORS
    from mcr_plus.msccl.verifier import verify_all
    from mcr_plus.msccl.writer import algorithm_text, write_algorithm

    if list_all:
        rows = [_listed(each, generator) for each, generator in GENERATORS.items()]
        print_table("algorithms", ("name", "collective", "options", "description"), rows)
        return
    if name not in GENERATORS:
        what = "missing; see --list" if name is None else unknown("algorithm", name, tuple(GENERATORS))
        raise typer.BadParameter(what, param_hint="NAME")
    if ranks is None:
        raise typer.BadParameter("missing", param_hint="-n")
    options = {key: value for key, value in (("group", group), ("root", root)) if value is not None}
    for key in options:
        if key not in GENERATORS[name].options:
            raise typer.BadParameter(f"{name} has no such option", param_hint=f"--{key}")
    try:
        algorithm = GENERATORS[name].make(ranks, **options)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    verify_all(algorithm)
    if output is None:
        print(algorithm_text(algorithm), end="")
    else:
        write_algorithm(algorithm, output)
        print_written(output, f"{algorithm.collective} of {algorithm.ranks} ranks")


def _listed(name: str, generator: Generator) -> tuple[str, str, str, str]:
    first = (generator.make.__doc__ or "").partition("\n")[0]
    return name, generator.collective, ", ".join(f"--{option}" for option in generator.options), first
