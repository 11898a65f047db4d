"""The way an operation would take, and why, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcr_plus import config as configuration
from mcr_plus import registry
from mcr_plus.backends import backend_class
from mcr_plus.errors import InvalidArgument
from mcr_plus.interfaces import Context, World
from mcr_plus.message import ALIASES, DTYPES, KINDS, REDUCING, ROOTED, VECTOR, Group, Signature, dtype_name
from mcr_plus.pipeline import Pipeline


def explain(
    kind: str,
    nbytes: int,
    *,
    dtype: str = "float32",
    ranks: int = 2,
    config: str | Path | Mapping[str, Any] | None = None,
    tag: str | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Bind a hypothetical operation and say what each stage decided.

    Returns a mapping with `kind`, `bytes`, `dtype`, `ranks`, `tag`, `steps` (one per decision: `stage`,
    `operation`, `decision`, `rule`), `backends` (those the operation ends on) and `alternatives` (per
    backend: `support` and `how`). A stage that has nothing to do leaves no step.

    Raises `ConfigError` for a wrong configuration, `Unsupported` if there is no way through.
    """
    checked = configuration.load(config)
    signature = _signature(kind, nbytes, dtype, ranks, tag, device)
    names = [name for name in checked.backends or registry.names("backends") if name != "local"]
    classes = {
        name: backend_class(name)
        for name in names
        if checked.backends is not None or backend_class(name).availability().available
    }
    if ranks == 1:
        classes = {"local": backend_class("local")}
    world = World(0, ranks, ("localhost",) * ranks, 300.0)
    context = Context(checked, world, Group("world", tuple(range(ranks)), 0), classes)
    notes = Pipeline(context).bind(signature).notes
    return {
        "kind": signature.kind,
        "bytes": nbytes,
        "dtype": dtype,
        "ranks": ranks,
        "tag": tag,
        "steps": [
            {
                "stage": note.stage,
                "operation": note.signature.describe(),
                "decision": note.text,
                "rule": note.place,
            }
            for note in notes
        ],
        "backends": list(dict.fromkeys(n.signature.backend for n in notes if n.stage == "dispatch")),
        "alternatives": {
            name: {"support": support.level, "how": support.how}
            for name, found in classes.items()
            for support in [found.supports(signature)]
        },
    }


def _signature(kind: str, nbytes: int, dtype: str, ranks: int, tag: str | None, device: str) -> Signature:
    name = ALIASES.get(kind, kind)
    if name not in KINDS:
        raise InvalidArgument(f"kind: unknown operation {kind!r}; known: {', '.join((*KINDS, *ALIASES))}")
    known = {dtype_name(each): each for each in DTYPES}
    if dtype not in known:
        raise InvalidArgument(f"dtype: unknown {dtype!r}; known: {', '.join(known)}")
    if nbytes < 0 or ranks < 1:
        raise InvalidArgument(f"bytes and ranks: expected at least 0 and 1, got {nbytes} and {ranks}")
    torch_dtype: torch.dtype = known[dtype]
    if nbytes % torch_dtype.itemsize:
        raise InvalidArgument(
            f"bytes: {nbytes} is not a whole number of {dtype} ({torch_dtype.itemsize} bytes)"
        )
    vector = name in VECTOR
    return Signature(
        kind=name,
        dtype=None if name == "barrier" else torch_dtype,
        shape=() if vector or name == "barrier" else (nbytes // torch_dtype.itemsize,),
        nbytes=None if vector else nbytes,
        group="world",
        ranks=ranks,
        device=device,
        reduce_op="SUM" if name in REDUCING else None,
        root=0 if name in ROOTED else None,
        tag=tag,
    )
