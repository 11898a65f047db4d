"""`mcr-plus warmup`: compile the kernels before the first job."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress

from mcr_plus.cli.output import print_json

_REDUCED: Final = ("float32", "float16", "bfloat16", "float64", "int32", "int64")
_OPTIONS: Final[dict[str, list[dict[str, Any]]]] = {
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
    """Compile the kernels of shared memory and of the codecs once; jobs then load them from disk."""
    from mcr_plus.kernels import compiling

    tasks = _codecs(codec) if codec else {**_LIBRARIES, **_codecs(None)}
    console = Console(stderr=True)
    begins: list[bool] = []
    rows: list[dict[str, Any]] = []
    compiling.watchers.append(begins.append)
    compiling.say_nothing()
    with Progress(console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("", total=len(tasks))
        for name, prepare in tasks.items():
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
    from mcr_plus.kernels.compiling import preparing
    from mcr_plus.plan import cut_search, events, search, simulate

    with preparing("plans"):
        search.prepare()
        simulate.prepare()
        cut_search.prepare()
        events.prepare()


_LIBRARIES: Final = {
    "msccl": _shared_memory,
    "reductions": _reductions,
    "fused buffers": _buffers,
    "plans": _plans,
}


def _codecs(names: list[str] | None) -> dict[str, Callable[[], None]]:
    """Return the tasks of the named codecs, or of all."""
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
