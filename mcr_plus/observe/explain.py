"""The path of an operation through the pipeline and the reasons for it, without running the operation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcr_plus.backends import assumed_backends
from mcr_plus.communicator.gradient_policy import TAG, key_of, policy_for
from mcr_plus.compression.policy import gradient_compression
from mcr_plus.config.reader import load
from mcr_plus.config.schema import Config
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import ALIASES, DTYPES, KINDS, REDUCING, ROOTED, VECTOR, check_reducible, dtype_name
from mcr_plus.core.message import Signature, thawed
from mcr_plus.core.units import parse_size, whole_number, whole_numbers
from mcr_plus.errors import InvalidArgument
from mcr_plus.msccl.catalog import kept
from mcr_plus.pipeline.pipeline import Note, Pipeline
from mcr_plus.pipeline.stage import Context
from mcr_plus.rendezvous.mpi_launcher import mpi_flavour
from mcr_plus.rendezvous.world import World
from mcr_plus.selection.checks import use_algorithms
from mcr_plus.tables.writing import microseconds


def explain(
    kind: str,
    nbytes: int | str,
    *,
    dtype: str | torch.dtype | np.dtype[Any] = "float32",
    ranks: int = 2,
    config: str | Path | Mapping[str, Any] | None = None,
    tag: str | None = None,
    device: str = "cpu",
    nodes: int = 1,
    async_op: bool = False,
    param: str | None = None,
    shape: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Bind a hypothetical operation and return the decision of each stage.

    Returns a mapping with `kind`, `bytes`, `dtype`, `ranks`, `nodes`, `async_op`, `tag`, `param`,
    `steps` (one per decision: `stage`, `operation`, `decision`, `rule`), `backends` (libraries that run parts
    of the operation), and, for the first choice of a library, `table_rule` (`file:line`), `expected_us` (None
    if nothing was measured) and `alternatives` (per choice: `support`, `how`, `expected_us`, `extrapolated`,
    `figure`, `bound_us`, and `why` it was chosen or not). Steps that choose a library have these three fields
    too; if the table was measured on another machine, they also have `measured_elsewhere` (the differences)
    and `strict`. A `fuse` step has `fused` if it fuses. A codec step has `codec`, `never_slower` (the
    option's value), and, if the table knows both times, `payload_us` (transfer of the encoded payload,
    without encoding and decoding), `without_codec_us`, and `comparison` (the sentence that `mcr-plus explain`
    prints). A stage that does not apply has no step. Expected times of asynchronous operations are exposed
    times, next to a computation as long as the operation itself.

    `figure` is the quality of an expected time: "measured", "extrapolated", "at_most" below the smallest
    size measured, "at_least" beyond the largest if no slope is known, "unknown" if the bound was measured
    with other numbers of ranks or nodes. `bound_us` is the time measured for a bound, else None.

    `config` is as for `mcr.init`: a file, a mapping, or None for the file of MCR_CONFIG or the default. The
    configuration of a running job is used only if it is passed here. `nbytes` may be a text such as `1MiB`,
    `dtype` a dtype of torch or NumPy. `shape` is the shape of the tensor, for codecs that need matrices.
    With `param`, the name of a parameter, the operation is the all_reduce of its gradient in a separate
    bucket, as `mcr.wrap` sends it; the first step, `stage` "gradients", then holds the configuration's
    decision for that gradient.

    Ranks are spread evenly over `nodes` hosts. Needs no job, and sends nothing.

    Raises:
        ConfigError: the configuration is wrong.
        InvalidArgument: the operation, dtype, size or shape is unknown or does not fit.
        Unsupported: no backend can run the operation.

    Example:
        ```python
        explanation = mcr.explain("all_reduce", "1MiB", ranks=2, config={"version": 1, "backends": ["gloo"]})
        assert explanation["backends"] == ["gloo"]
        ```
    """
    options: dict[str, Any] = {"tag": tag, "device": device, "nodes": nodes, "async_op": async_op}
    return explained(
        kind, nbytes, dtype=dtype, ranks=ranks, config=config, param=param, shape=shape, **options
    ).document


@dataclass(frozen=True)
class Explanation:
    """The document that `explain` returns, and the operation of each step in readable form."""

    document: dict[str, Any]
    operations: Sequence[ExplainedOperation]


@dataclass(frozen=True)
class ExplainedOperation:
    """The operation of one step: its description, and whether it is asynchronous."""

    words: str
    async_op: bool


@kept()  # a running job may have registered its own algorithm files
def explained(
    kind: str,
    nbytes: int | str,
    *,
    dtype: str | torch.dtype | np.dtype[Any] = "float32",
    ranks: int = 2,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    tag: str | None = None,
    device: str = "cpu",
    nodes: int = 1,
    async_op: bool = False,
    param: str | None = None,
    shape: Sequence[int] | None = None,
) -> Explanation:
    """Return the result of `explain`, with operations in readable form; `config` may be parsed already."""
    checked = config if isinstance(config, Config) else load(config)
    use_algorithms(checked)
    try:
        nbytes = parse_size(nbytes)
    except ValueError as error:
        raise InvalidArgument(f"bytes: {error}") from None
    if (size := whole_number(ranks)) is None or size < 1:
        raise InvalidArgument(f"ranks: expected an integer from 1, got {ranks!r}")
    if (number := whole_number(nodes)) is None or not 1 <= number <= size:
        raise InvalidArgument(f"nodes: expected 1 to {size}, the number of ranks, got {nodes!r}")
    ranks, nodes, dtype = size, number, _named(dtype)
    signature = _signature(kind, nbytes, dtype, ranks, tag, device)
    signature = signature.replace(async_op=async_op or signature.is_p2p)  # a send is an isend and a wait
    if shape is not None:
        signature = _shaped(signature, shape)
    gradient_steps: list[dict[str, Any]] = []
    if param is not None:
        signature, gradient_steps = _gradient(checked, signature, param, tag)
    hosts = tuple(f"node{rank * nodes // ranks}" for rank in range(ranks))
    world = World(0, ranks, hosts, 300.0, libraries=_libraries())
    group = Group("world", tuple(range(ranks)), 0)
    context = Context(checked, world, group, assumed_backends(checked.backends, world, group))
    pipeline = Pipeline(context)
    notes = pipeline.bind(signature).notes
    steps = [*gradient_steps, *_compared(pipeline, signature, notes, list(map(_step, notes)))]
    operations = [ExplainedOperation(step["operation"], signature.async_op) for step in gradient_steps]
    operations += [ExplainedOperation(_words(note.signature), note.signature.async_op) for note in notes]
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
    """Return the operation in readable form, without the fields that other lines of the explanation show."""
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


def _compared(
    pipeline: Pipeline, signature: Signature, notes: Sequence[Note], steps: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Add to the step of a codec the libraries' times with and without it, if both are known."""
    at = next((at for at, step in enumerate(steps) if "codec" in step), None)
    if at is None or any(note.signature.group != signature.group for note in notes):
        return steps  # between nodes, the codec handles only a part of the operation
    payloads = [
        pipeline.expected_us(note.signature.replace(async_op=signature.async_op, compress=False))
        for note in notes[at:]
        if note.stage == "select" and note.signature.encoding is not None
    ]
    without = pipeline.expected_us(notes[at].signature.replace(compress=False))
    if without is None or None in payloads or not payloads:
        return steps
    payload = sum(us for us in payloads if us is not None)
    fused = any("fused" in step for step in steps)
    by_itself = " if sent by itself" if fused else ""
    is_set = steps[at]["never_slower"]
    if signature.is_p2p:
        choice = "`never_slower` is for collectives alone"
    elif fused:
        choice = f"`never_slower{'` compares' if is_set else ': true` would compare'} whole buckets"
    else:
        choice = f"`never_slower{'` leaves' if is_set else ': true` would leave'} it out"
        if payload < without:
            choice += f" if encoding and decoding take more than {microseconds(without - payload)} µs"
    steps[at] |= {
        "payload_us": payload,
        "without_codec_us": without,
        "comparison": f"expected{by_itself}: {microseconds(payload)} µs for what it sends, "
        f"{microseconds(without)} µs without the codec; {choice}",
    }
    return steps


def _shaped(signature: Signature, shape: Sequence[int]) -> Signature:
    """Return the operation on a tensor of this shape."""
    if signature.kind in VECTOR:
        raise InvalidArgument(f"shape: sizes of {signature.kind} differ between ranks; expected none")
    numbers = whole_numbers(shape)
    if numbers is None or math.prod(numbers) != math.prod(signature.shape):
        raise InvalidArgument(f"shape: {tuple(shape)} is not {math.prod(signature.shape)} elements")
    sizes = tuple(numbers)
    return signature.replace(shape=sizes, parts=(sizes,))


def _gradient(
    config: Config, signature: Signature, param: str, tag: str | None
) -> tuple[Signature, list[dict[str, Any]]]:
    """Return the signature of a gradient's all_reduce, and the step with the configuration's decision."""
    if signature.kind != "all_reduce" or tag is not None:
        raise InvalidArgument("param: gradients are all_reduces with a tag of their own")
    nbytes, dtype = signature.nbytes or 0, dtype_name(signature.dtype)
    policy = policy_for(config, param, signature.shape, nbytes, signature.dtype, TAG, signature.ranks)
    rule, _ = gradient_compression(config, param, nbytes, dtype, TAG, signature.ranks)
    decision = "as its bucket" if policy.compress is None else "uncompressed, in a bucket of such gradients"
    if isinstance(policy.compress, tuple):
        decision = f"codec {thawed(policy.compress)['codec']}, in a bucket of such gradients"
    if policy.backend is not None:
        decision = f"{decision}; backend {policy.backend}"
    signature = signature.replace(
        reduce_op="AVG", tag=TAG, parts=(signature.shape,), key=key_of([param]), compress=policy.compress,
        backend=policy.backend, async_op=True,
    )  # fmt: skip
    step = {"stage": "gradients", "operation": f"{param} {list(signature.shape)}", "decision": decision}
    return signature, [{**step, "rule": None if rule is None else rule.place}]


def _libraries() -> dict[str, str]:
    """Return the MPI that a job started here would use, by its launcher: only jobs can load MPI."""
    launcher = mpi_flavour()
    return {} if launcher is None else {"mpi": launcher.library}


def _named(dtype: str | torch.dtype | np.dtype[Any]) -> str:
    """Return the name of a dtype of torch or NumPy."""
    if isinstance(dtype, torch.dtype):
        return dtype_name(dtype)
    return dtype.name if isinstance(dtype, np.dtype) else dtype


def _signature(kind: str, nbytes: int, dtype: str, ranks: int, tag: str | None, device: str) -> Signature:
    name = ALIASES.get(kind, kind)
    if name not in KINDS:
        raise InvalidArgument(f"kind: unknown operation {kind!r}; known: {', '.join((*KINDS, *ALIASES))}")
    known = {dtype_name(torch_dtype): torch_dtype for torch_dtype in DTYPES}
    if dtype not in known:
        raise InvalidArgument(f"dtype: unknown {dtype!r}; known: {', '.join(known)}")
    torch_dtype: torch.dtype = known[dtype]
    if nbytes % torch_dtype.itemsize:
        raise InvalidArgument(
            f"bytes: {nbytes} is not a whole number of {dtype} ({torch_dtype.itemsize} bytes)"
        )
    if name in REDUCING:
        check_reducible("SUM", torch_dtype)
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
