"""`mcr-plus warmup`: compile the kernels before the first job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from typing import Annotated, Any, Final

import typer

from mcr_plus.cli.output import print_json
from mcr_plus.errors import unknown

_REDUCED: Final = ("float32", "float16", "bfloat16", "float64", "int32", "int64")
_OPTIONS: Final[dict[str, list[dict[str, Any]]]] = {
    "bf16": [{}, {"rounding": "stochastic"}],
    "fp16": [{}, {"rounding": "stochastic"}],
    "fp8_block": [{}, {"scale": "e8m0"}],
    "int4_block": [{}, {"hadamard": True}],
    "topk": [{}, {"chunk": 4096}],
}
"""Codec options that select among kernels."""
_WORKERS: Final = 8  # processes; each takes some 300 MiB
_LONG: Final = (
    "delta",
    "int4_block",
    "topk",
    "plans",
    "experts",
    "msccl",
    "fp8_block",
    "checksums",
)


def warmup(
    codec: Annotated[
        list[str] | None,
        typer.Option(help="Compile only the kernels of this codec; repeatable.", metavar="NAME"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Compile only these, by a name that this command prints; repeatable.", metavar="NAME"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compile the kernels (shared memory, codecs, checksums, mcr.expert) once; jobs load them from disk."""
    from rich.console import Console
    from rich.progress import Progress

    from mcr_plus.kernels import compiling

    todo = list(tasks(codec, only))
    console = Console(stderr=True)
    rows: dict[str, dict[str, Any]] = {}
    with Progress(console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task(f"{len(todo)} to compile", total=len(todo))
        for row in _compile(todo):
            name = row["name"]
            rows[name] = row
            bar.update(task, advance=1, description=name)
            if not as_json:
                what, number = "compiled" if row["compiled"] else "cached", f"{len(rows)} of {len(todo)}"
                print(f"{number} {name}: {what}, {row['seconds']:.1f} s", flush=True)
    folder = compiling.cache_folder()
    if as_json:
        kernels = [rows[name] for name in todo]
        print_json({"folder": None if folder is None else str(folder), "kernels": kernels})
    elif folder is None:
        print("Jobs will compile them again: no cache folder is writable; set one in NUMBA_CACHE_DIR.")
    else:
        print(f"Jobs load them from {folder}; NUMBA_CACHE_DIR selects another folder.")


def _compile(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Compile the named kernels on all cores, slowest first; yield a row for each finished kernel."""
    from mcr_plus.core.environment import usable_cores

    ordered = sorted(names, key=lambda name: name not in _LONG)
    workers = min(len(usable_cores()), len(names), _WORKERS)
    if workers < 2:
        yield from map(_compiled, ordered)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_compiled, name) for name in ordered]):
            yield done.result()


def _compiled(name: str) -> dict[str, Any]:
    from mcr_plus.kernels import compiling

    begins: list[bool] = []
    compiling.watchers.append(begins.append)
    compiling.say_nothing()
    began = time.perf_counter()
    tasks(None, [name])[name]()
    compiling.watchers.remove(begins.append)
    return {"name": name, "seconds": round(time.perf_counter() - began, 3), "compiled": any(begins)}


def _shared_memory() -> None:
    from mcr_plus.backends.shm import interpreter_kernels as executor
    from mcr_plus.backends.shm import p2p_kernels as messages
    from mcr_plus.backends.shm.collectives import addresses, begin_and_advance
    from mcr_plus.kernels.compiling import preparing
    from mcr_plus.kernels.images import c_kernel

    for what, module in (("msccl's algorithms", executor), ("msccl's messages", messages)):
        with preparing(what):
            module.prepare()
    for function in (messages.send_at, messages.expect_at, messages.advance_at):
        c_kernel(messages.__name__, function.__name__)
    begin_and_advance()
    addresses()


def _reductions() -> None:
    import torch

    from mcr_plus.backends.shm.reduce_kernels import prepare
    from mcr_plus.backends.shm.reductions import kernels_for
    from mcr_plus.kernels.compiling import preparing

    with preparing("reductions"):
        prepare()
        for dtype in (getattr(torch, name) for name in _REDUCED):
            for op in ("SUM", "AVG", "MAX") if dtype.is_floating_point else ("SUM", "MAX"):
                kernels_for(dtype, op)


def _sums() -> None:
    import torch

    from mcr_plus.backends.shm.reductions import SumTable
    from mcr_plus.kernels.compiling import preparing
    from mcr_plus.reproducible.accumulators import ExactSums

    with preparing("sums"):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            for sums in ("fixed", "exact"):
                SumTable(sums, dtype, "AVG", 2)
        one = ExactSums(1)
        for value in (1.0, 2.0**-60):  # the second has an error
            one.add(torch.tensor([value], device="cpu"), 0)


def _buffers() -> None:
    from mcr_plus.kernels import pack

    pack.prepare()


def _plans() -> None:
    from mcr_plus.bucketing import cut_search, events, search, simulate
    from mcr_plus.kernels.compiling import preparing
    from mcr_plus.plans import stage_search

    with preparing("plans"):
        search.prepare()
        simulate.prepare()
        cut_search.prepare()
        events.prepare()
        stage_search.prepare()


def _experts() -> None:
    from mcr_plus.parallel import routing_kernels, row_kernels

    routing_kernels.prepare()
    for dtype in row_kernels.DTYPES:
        for form in row_kernels.FORMATS:
            row_kernels.prepare(dtype, form)


def _checksums() -> None:
    from mcr_plus.backends.shm import p2p_checks
    from mcr_plus.kernels import checksum
    from mcr_plus.kernels.compiling import preparing
    from mcr_plus.reliability.verify import checked_kernels, row_kernels

    with preparing("checksums"):
        for module in (checksum, row_kernels, checked_kernels, p2p_checks):
            module.prepare()


_LIBRARIES: Final = {
    "msccl": _shared_memory,
    "reductions": _reductions,
    "sums": _sums,
    "fused buffers": _buffers,
    "plans": _plans,
    "experts": _experts,
    "checksums": _checksums,
}


def tasks(codecs: list[str] | None, only: list[str] | None = None) -> dict[str, Callable[[], None]]:
    """Return, by name, functions that compile the kernels of these codecs (None: all), or `only` these.

    MPI's reductions of 16-bit floats are omitted: every process compiles them again.
    """
    if not only:
        return _codecs(codecs) if codecs else {**_LIBRARIES, **_codecs(None)}
    known = {**_LIBRARIES, **_codecs(None)}
    if unknown_names := [name for name in only if name not in known]:
        raise typer.BadParameter(unknown("kernels", unknown_names[0], tuple(known)), param_hint="--only")
    return {name: known[name] for name in (*only, *(codecs or ()))}


def _codecs(names: list[str] | None) -> dict[str, Callable[[], None]]:
    from mcr_plus import registry

    known = [name for name in registry.names("codecs") if name != "none"]
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(unknown("codec", name, known), param_hint="--codec")
    return {name: partial(_codec, name) for name in names or known}


def _codec(name: str) -> None:
    from mcr_plus.compression.codec import make
    from mcr_plus.compression.stage import prepare

    for options in _OPTIONS.get(name, [{}]):
        prepare(make({"codec": name, **options}))
