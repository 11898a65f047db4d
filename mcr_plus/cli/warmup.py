"""`mcr-plus warmup`: compile the kernels before the first job."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final

import typer

from mcr_plus.cli.output import print_json

_REDUCED: Final = ("float32", "float16", "bfloat16", "float64", "int32", "int64")
_OPTIONS: Final[dict[str, list[dict[str, Any]]]] = {
    "bf16": [{}, {"rounding": "stochastic"}],
    "fp16": [{}, {"rounding": "stochastic"}],
    "fp8_block": [{}, {"scale": "e8m0"}],
    "int4_block": [{}, {"hadamard": True}],
    "topk": [{}, {"chunk": 4096}],
}
"""Codec options that select among kernels."""


def warmup(
    codec: Annotated[
        list[str] | None,
        typer.Option(help="Compile only the kernels of this codec; repeatable.", metavar="NAME"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compile the kernels of shared memory, codecs, checksums, mcr.expert once; jobs load them from disk."""
    from rich.console import Console
    from rich.progress import Progress

    from mcr_plus.kernels import compiling

    todo = tasks(codec)
    console = Console(stderr=True)
    begins: list[bool] = []
    rows: list[dict[str, Any]] = []
    compiling.watchers.append(begins.append)
    compiling.say_nothing()
    with Progress(console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("", total=len(todo))
        for name, prepare in todo.items():
            bar.update(task, description=name)
            begins.clear()
            began = time.perf_counter()
            prepare()
            seconds = round(time.perf_counter() - began, 3)
            rows.append({"name": name, "seconds": seconds, "compiled": any(begins)})
            bar.advance(task)
            if not as_json:
                print(f"{name}: {'compiled' if any(begins) else 'cached'}, {seconds:.1f} s", flush=True)
    compiling.watchers.remove(begins.append)
    folder = compiling.cache_folder()
    if as_json:
        print_json({"folder": None if folder is None else str(folder), "kernels": rows})
    elif folder is None:
        print("Jobs will compile them again: no cache folder is writable; set one in NUMBA_CACHE_DIR.")
    else:
        print(f"Jobs load them from {folder}; NUMBA_CACHE_DIR selects another folder.")


def _shared_memory() -> None:
    from mcr_plus.backends.shm import collectives_kernels as direct
    from mcr_plus.backends.shm import interpreter_kernels as executor
    from mcr_plus.backends.shm import p2p_kernels as messages
    from mcr_plus.kernels.compiling import preparing

    for what, module in (("msccl", direct), ("msccl's algorithms", executor), ("msccl's messages", messages)):
        with preparing(what):
            module.prepare()


def _reductions() -> None:
    import torch

    from mcr_plus.backends.shm.reduce_kernels import kernels_for
    from mcr_plus.kernels.compiling import preparing

    with preparing("reductions"):
        for dtype in (getattr(torch, name) for name in _REDUCED):
            for op in ("SUM", "AVG", "MAX") if dtype.is_floating_point else ("SUM", "MAX"):
                kernels_for(dtype, op)


def _buffers() -> None:
    from mcr_plus.kernels import pack

    pack.prepare()


def _plans() -> None:
    from mcr_plus.bucketing import cut_search, events, search, simulate
    from mcr_plus.kernels.compiling import preparing

    with preparing("plans"):
        search.prepare()
        simulate.prepare()
        cut_search.prepare()
        events.prepare()


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
    "fused buffers": _buffers,
    "plans": _plans,
    "experts": _experts,
    "checksums": _checksums,
}


def tasks(codecs: list[str] | None) -> dict[str, Callable[[], None]]:
    """What compiles the kernels of these codecs, by name; None: all kernels of the package.

    Those of MPI's reductions of 16-bit floats are left out: they are made anew in every process.
    """
    return _codecs(codecs) if codecs else {**_LIBRARIES, **_codecs(None)}


def _codecs(names: list[str] | None) -> dict[str, Callable[[], None]]:
    from mcr_plus import registry
    from mcr_plus.errors import unknown

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
