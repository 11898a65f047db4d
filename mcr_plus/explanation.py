"""The way an operation would take, and why, without running it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcr_plus import config as configuration
from mcr_plus.backends import supposed
from mcr_plus.backends.msccl.catalog import kept
from mcr_plus.errors import InvalidArgument
from mcr_plus.hooks.reducer import TAG
from mcr_plus.hooks.ways import key_of, way_of
from mcr_plus.interfaces import Context, World
from mcr_plus.launch import mpi_flavour
from mcr_plus.message import (
    ALIASES,
    DTYPES,
    KINDS,
    REDUCING,
    ROOTED,
    VECTOR,
    Group,
    Signature,
    dtype_name,
    thawed,
)
from mcr_plus.pipeline import Note, Pipeline
from mcr_plus.selection.checks import use_algorithms
from mcr_plus.units import parse_size


def explain(
    kind: str,
    nbytes: int | str,
    *,
    dtype: str = "float32",
    ranks: int = 2,
    config: str | Path | Mapping[str, Any] | None = None,
    tag: str | None = None,
    device: str = "cpu",
    nodes: int = 1,
    async_op: bool = False,
    param: str | None = None,
    shape: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Bind a hypothetical operation and say what each stage decided.

    Returns a mapping with `kind`, `bytes`, `dtype`, `ranks`, `nodes`, `async_op`, `tag`, `param`,
    `steps` (one per decision: `stage`, `operation`, `decision`, `rule`), `backends` (those the operation
    ends on), and, for the first choice of a library on its way, `table_rule` (`file:line`),
    `expected_us` (None where nothing was measured) and `alternatives` (per choice: `support`, `how`,
    `expected_us`, `extrapolated`, `why` it was chosen or not). Steps in which a library is chosen have
    the last three too, and if the table was measured elsewhere `measured_elsewhere` (the differences)
    and `strict`. A stage that has nothing to do leaves no step. Expected times of asynchronous
    operations are exposed times: what is left beside a computation of the operation's own length.

    `nbytes` may be a text such as `1MiB`. `shape`: of the tensor, for codecs that need matrices. With
    `param`, the name of a parameter, it is the all_reduce of its gradient in a bucket of its own, as
    `mcr.wrap` sends it, and the first step, `stage` "gradients", says what the configuration wants for
    it.

    Ranks are spread evenly over `nodes` hosts. Raises `ConfigError` for a wrong configuration, `Unsupported`
    if there is no way through.
    """
    options: dict[str, Any] = {"tag": tag, "device": device, "nodes": nodes, "async_op": async_op}
    return explained(
        kind, nbytes, dtype=dtype, ranks=ranks, config=config, param=param, shape=shape, **options
    ).document


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns, and for each of its steps how people read the operation."""

    document: dict[str, Any]
    operations: Sequence[Operation]


@dataclass(frozen=True)
class Operation:
    """The operation of one step: in words, and whether it runs beside others."""

    words: str
    async_op: bool


@kept()  # a job may be running, with algorithm files of its own
def explained(
    kind: str,
    nbytes: int | str,
    *,
    dtype: str = "float32",
    ranks: int = 2,
    config: str | Path | Mapping[str, Any] | None = None,
    tag: str | None = None,
    device: str = "cpu",
    nodes: int = 1,
    async_op: bool = False,
    param: str | None = None,
    shape: Sequence[int] | None = None,
) -> Explanation:
    """As `explain`, with words for people."""
    checked = configuration.load(config)
    use_algorithms(checked)
    if isinstance(nbytes, str):
        try:
            nbytes = parse_size(nbytes)
        except ValueError as error:
            raise InvalidArgument(f"bytes: {error}") from None
    signature = _signature(kind, nbytes, dtype, ranks, tag, device)
    signature = signature.replace(async_op=async_op or signature.is_p2p)  # a send is an isend and a wait
    if shape is not None:
        signature = _shaped(signature, shape)
    first: list[dict[str, Any]] = []
    if param is not None:
        signature, first = _gradient(checked, signature, param, tag)
    if not 1 <= nodes <= ranks:
        raise InvalidArgument(f"nodes: expected 1 to {ranks}, the number of ranks, got {nodes}")
    hosts = tuple(f"node{rank * nodes // ranks}" for rank in range(ranks))
    world = World(0, ranks, hosts, 300.0, libraries=_libraries())
    group = Group("world", tuple(range(ranks)), 0)
    context = Context(checked, world, group, supposed(checked.backends, world, group))
    notes = Pipeline(context).bind(signature).notes
    steps = [*first, *map(_step, notes)]
    operations = [Operation(step["operation"], signature.async_op) for step in first]
    operations += [Operation(_words(note.signature), note.signature.async_op) for note in notes]
    choice = next((step for step in steps if "alternatives" in step), {})
    document = {
        "kind": signature.kind,
        "bytes": nbytes,
        "dtype": dtype,
        "ranks": ranks,
        "nodes": nodes,
        "async_op": signature.async_op,
        "tag": signature.tag,
        "param": param,
        "steps": steps,
        "backends": list(dict.fromkeys(step.pop("backend") for step in steps if "backend" in step)),
        **{name: choice.get(name) for name in ("table_rule", "expected_us", "alternatives")},
    }
    return Explanation(document, operations)


def _words(signature: Signature) -> str:
    """The operation for people: what moves where, without what other lines of the explanation say."""
    plain = signature.replace(
        tag=None, key=None, encoding=None, backend=None, algorithm=None, compress=None, async_op=False,
        call=None,
    )  # fmt: skip
    codec = "" if signature.encoding is None else f", encoded by {signature.encoding.partition(':')[0]}"
    inside = "" if signature.group == "world" else f", in group {signature.group}"
    return f"{plain.describe()}{codec}{inside}"


def _step(note: Note) -> dict[str, Any]:
    group = note.signature.group
    inside = "" if group == "world" else f" in {group}"
    step = {
        "stage": note.stage,
        "operation": note.signature.replace(call=None).describe() + inside,
        "decision": note.text,
        "rule": note.place,
        **note.details(),
    }
    return step | {"backend": note.signature.choice} if note.stage == "dispatch" else step


def _shaped(signature: Signature, shape: Sequence[int]) -> Signature:
    """The operation on a tensor of this shape."""
    if signature.kind in VECTOR:
        raise InvalidArgument(f"shape: sizes of {signature.kind} differ between ranks; expected none")
    if math.prod(shape) != math.prod(signature.shape):
        raise InvalidArgument(f"shape: {tuple(shape)} is not {math.prod(signature.shape)} elements")
    return signature.replace(shape=tuple(shape), parts=(tuple(shape),))


def _gradient(
    config: configuration.Config, signature: Signature, param: str, tag: str | None
) -> tuple[Signature, list[dict[str, Any]]]:
    """The all_reduce of a gradient, and what the configuration says about it."""
    if signature.kind != "all_reduce" or tag is not None:
        raise InvalidArgument("param: gradients are all_reduces with a tag of their own")
    nbytes, dtype = signature.nbytes or 0, dtype_name(signature.dtype)
    way = way_of(config, param, signature.shape, nbytes, signature.dtype, TAG, signature.ranks)
    rule, _ = config.gradient_way(param, nbytes, dtype, TAG, signature.ranks)
    says = "as its bucket" if way.compress is None else "uncompressed, in a bucket of such gradients"
    if isinstance(way.compress, tuple):
        says = f"codec {thawed(way.compress)['codec']}, in a bucket of such gradients"
    if way.backend is not None:
        says = f"{says}; backend {way.backend}"
    signature = signature.replace(
        reduce_op="AVG", tag=TAG, parts=(signature.shape,), key=key_of([param]), compress=way.compress,
        backend=way.backend, async_op=True,
    )  # fmt: skip
    step = {"stage": "gradients", "operation": f"{param} {list(signature.shape)}", "decision": says}
    return signature, [{**step, "rule": None if rule is None else rule.place}]


def _libraries() -> dict[str, str]:
    """The MPI that a job started here would use, by its launcher: loading it would take a job."""
    launcher = mpi_flavour()
    return {} if launcher is None else {"mpi": launcher.library}


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
