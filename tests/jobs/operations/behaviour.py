"""Behaviour beyond the table of operations: messages, objects, handles, arrays, codecs, the life of a job.

This part runs on the ranks; `test_conformance` starts it. Each section is a function of a communicator, the
backends to ask for, and the failures to add to; it runs in a job of its own, so that one section's failure
does not spoil the next.
"""

from __future__ import annotations

import gc
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import reference
import torch
import torch.distributed as dist
from jobs.operations import conformance
from reference import Array, Failures, difference, inputs, reduced, rough, sum_bound, unit_roundoff, wide

import mcr_plus as mcr
from mcr_plus.communicator.tensors import as_tensor
from mcr_plus.core.kinds import COMPLEX, FLOATS

Backends = Sequence["str | None"]
Section = Callable[[mcr.Communicator, Backends, Failures], None]

TIMEOUT: Final = 30.0
COUNT: Final = 10
FLOAT: Final = torch.float32


def mine(
    comm: mcr.Communicator, count: int = COUNT, salt: int = 0, dtype: torch.dtype = FLOAT
) -> torch.Tensor:
    """This rank's input."""
    return reference.tensor(inputs(dtype, comm.rank, (count,), salt), dtype=dtype)


def everyones(
    comm: mcr.Communicator, count: int = COUNT, salt: int = 0, dtype: torch.dtype = FLOAT
) -> list[Array]:
    """Return the inputs of all ranks."""
    return [inputs(dtype, rank, (count,), salt) for rank in range(comm.size)]


def summed(comm: mcr.Communicator, count: int = COUNT, salt: int = 0, dtype: torch.dtype = FLOAT) -> Array:
    """Return the sum of all ranks' inputs."""
    return reduced(everyones(comm, count, salt, dtype), "SUM")


def possible_backends(comm: mcr.Communicator, backend: str | None) -> set[str]:
    """Return the libraries that may have run: without a named library, tables choose by kind and size."""
    if comm.size == 1:
        return {"local"}
    return set(mcr.get_backends()) if backend is None else {backend}


def started(work: mcr.Work | None) -> mcr.Work:
    """Check and return the handle of an asynchronous call."""
    assert work is not None
    return work


# -- reductions: rounding, equal bits ----------------------------------------------------------------


def rough_sums(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """Sums of values with all their digits are within the bound of their type."""
    salt = 0
    for backend in backends:
        for dtype in (*FLOATS, *COMPLEX):
            for op, count in (("SUM", 1031), ("AVG", 1031), ("SUM", 66_001)):
                salt += 1
                _rough_sum(comm, backend, dtype, op, count, salt, failures)


def _rough_sum(
    comm: mcr.Communicator,
    backend: str | None,
    dtype: torch.dtype,
    op: Any,
    count: int,
    salt: int,
    failures: Failures,
) -> None:
    parts = [rough(dtype, rank, count, salt) for rank in range(comm.size)]
    tensor = parts[comm.rank].clone()
    comm.all_reduce(tensor, op, backend=backend)
    terms = [wide(part) for part in parts]
    expected, bound = reduced(terms, op), sum_bound(terms, dtype, comm.size + 2)
    name = f"{op} of {count} × {dtype} on {backend}"
    failures.check(name, difference(tensor, expected, bound))
    same_bits(comm, name, tensor, failures)


def same_bits(comm: mcr.Communicator, name: str, tensor: torch.Tensor, failures: Failures) -> None:
    """Return whether all ranks of the group hold the same bits."""
    prints = comm.all_gather_object(
        zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    )
    failures.expect(f"{name}: equal bits on all ranks", len(set(prints)) == 1, prints)


# -- codecs ------------------------------------------------------------------------------------------


def compressed(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """bf16 and fp16 on every kind of operation: rounded once when moved, within the bound when summed."""
    everyone = mcr.new_group(list(range(comm.size))[::-1])
    for backend in backends:
        for codec, wire in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            for dtype in (torch.float32, torch.float64):
                for group in (comm, everyone):
                    _compressed(group, {"backend": backend, "compress": codec}, wire, dtype, failures)
        _codec_as_mapping(comm, backend, failures)


def _compressed(
    comm: mcr.Communicator, how: dict[str, Any], wire: torch.dtype, dtype: torch.dtype, failures: Failures
) -> None:
    size, count = comm.size, 37
    sent = [rough(dtype, rank, count * size, 3) for rank in range(size)]
    # A group of one rank sends nothing, so nothing is rounded.
    seen = [part.to(wire).to(dtype) if size > 1 else part for part in sent]
    own = sent[comm.rank]
    name = f"{how['compress']} {dtype} on {how['backend']}, group {comm.name}"

    def moved(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        failures.check(f"{what} {name}", difference(got, wide(expected)))

    root = size - 1
    tensor = own.clone()
    comm.broadcast(tensor, comm.ranks[root], **how)
    moved("broadcast", tensor, seen[root])

    gathered = reference.zeros(size * size * count, dtype=dtype)
    comm.all_gather_into_tensor(gathered, own, **how)
    moved("all_gather_into_tensor", gathered, torch.cat(seen))

    apart = [torch.zeros_like(own) for _ in range(size)]
    comm.all_gather(apart, own, **how)
    moved("all_gather", torch.cat(apart), torch.cat(seen))

    exchanged = torch.zeros_like(own)
    comm.all_to_all_single(exchanged, own, **how)
    chunks = [part.chunk(size) for part in seen]
    moved("all_to_all_single", exchanged, torch.cat([chunk[comm.rank] for chunk in chunks]))

    rows = [own[: 3 * rank + 1] for rank in range(size)]
    parts = [reference.zeros(3 * comm.rank + 1, dtype=dtype) for _ in range(size)]
    comm.all_to_all(parts, rows, **how)
    moved("all_to_all", torch.cat(parts), torch.cat([part[: 3 * comm.rank + 1] for part in seen]))

    here = comm.rank == root
    comm.gather(own, apart if here else None, comm.ranks[root], **how)
    moved("gather", torch.cat(apart), torch.cat(seen))
    comm.scatter(tensor, [part.clone() for part in sent] if here else None, comm.ranks[root], **how)
    moved("scatter", tensor, seen[comm.rank])

    _compressed_ring(comm, own, seen, how, moved)
    _compressed_sums(comm, how, wire, dtype, failures)
    failures.check(f"inputs of {name}", difference(own, wide(rough(dtype, comm.rank, count * size, 3))))


def _compressed_ring(
    comm: mcr.Communicator,
    own: torch.Tensor,
    seen: list[torch.Tensor],
    how: dict[str, Any],
    moved: Callable[[str, torch.Tensor, torch.Tensor], None],
) -> None:
    left = (comm.rank - 1) % comm.size
    target = torch.zeros_like(own)
    works = [
        comm.isend(own, comm.ranks[(comm.rank + 1) % comm.size], **how),
        comm.irecv(target, comm.ranks[left], **how),
    ]
    for work in reversed(works):
        work.wait()
    moved("isend and irecv", target, seen[left])


def _compressed_sums(
    comm: mcr.Communicator, how: dict[str, Any], wire: torch.dtype, dtype: torch.dtype, failures: Failures
) -> None:
    size, count = comm.size, 41
    for op in ("SUM", "AVG"):
        sent = [rough(dtype, rank, count * size, 5) for rank in range(size)]
        terms = [wide(part) for part in sent]
        name = f"{op} {how['compress']} {dtype} on {how['backend']}, group {comm.name}"
        # Each term is rounded when encoded, and each partial sum once more.
        expected, bound = reduced(terms, op), sum_bound(terms, wire, size + 1)

        tensor = sent[comm.rank].clone()
        comm.all_reduce(tensor, op, **how)
        failures.check(f"all_reduce {name}", difference(tensor, expected, bound))
        same_bits(comm, name, tensor, failures)

        tensor = sent[comm.rank].clone()
        comm.reduce(tensor, comm.ranks[0], op, **how)
        wanted, allowed = (expected, bound) if comm.rank == 0 else (terms[comm.rank], 0.0)
        failures.check(f"reduce {name}", difference(tensor, wanted, allowed))

        part, here = reference.zeros(count, dtype=dtype), slice(comm.rank * count, (comm.rank + 1) * count)
        comm.reduce_scatter_tensor(part, sent[comm.rank], op, **how)
        failures.check(f"reduce_scatter {name}", difference(part, expected[here], bound[here]))


def _codec_as_mapping(comm: mcr.Communicator, backend: str | None, failures: Failures) -> None:
    tensor = mine(comm)
    work = started(comm.all_reduce(tensor, async_op=True, backend=backend, compress={"codec": "bf16"}))
    work.wait()
    failures.expect(
        "a codec named by a mapping", work.info.codec == (None if comm.size == 1 else "bf16"), work.info
    )
    comm.all_reduce(tensor, backend=backend, compress=False)


# -- messages ----------------------------------------------------------------------------------------


def messages(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """Test tags out of order, any source, batches, sub-groups, sizes of zero."""
    backwards = mcr.new_group(list(range(comm.size))[::-1])
    for backend in backends:
        for group in (comm, backwards):
            name = f"on {backend}, group {group.name}"
            _tags_out_of_order(group, backend, name, failures)
            _any_source(group, backend, name, failures)
            _many_messages(group, backend, name, failures)
    _batch(comm, failures)
    _batch(backwards, failures)


def _neighbours(comm: mcr.Communicator) -> tuple[int, int]:
    """Return the group ranks of the ranks before and after this one."""
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def _tags_out_of_order(comm: mcr.Communicator, backend: str | None, name: str, failures: Failures) -> None:
    left, right = _neighbours(comm)
    tags = (5, 1, 2**24 - 1, 0)
    targets = {tag: reference.zeros(COUNT) for tag in tags}
    works = [
        comm.isend(mine(comm, salt=tag % 1000), comm.ranks[right], tag, backend=backend, label="moe")
        for tag in tags
    ]
    works += [comm.irecv(targets[tag], comm.ranks[left], tag, backend=backend) for tag in sorted(tags)]
    for work in reversed(works):
        work.wait()
    for tag, target in targets.items():
        failures.check(f"tag {tag} {name}", difference(target, inputs(FLOAT, left, (COUNT,), tag % 1000)))
    failures.expect(f"label {name}", works[0].info.tag == "moe", works[0].info)
    failures.expect(f"kind {name}", [w.info.kind for w in works] == ["send"] * 4 + ["recv"] * 4)
    failures.expect(f"source {name}", works[-1].source_rank() == comm.ranks[left])


def _any_source(comm: mcr.Communicator, backend: str | None, name: str, failures: Failures) -> None:
    """Rank 0 receives from all other ranks in an unknown order."""
    if comm.rank > 0 or comm.size == 1:
        comm.send(mine(comm, salt=8), comm.ranks[0], 3, backend=backend)
    if comm.rank == 0:
        sources = []
        for _ in range(max(1, comm.size - 1)):
            target = reference.zeros(COUNT)
            work = comm.irecv(target, tag=3, backend=backend)
            work.wait()
            rank = work.source_rank()
            assert rank is not None
            source = comm.ranks.index(rank)
            sources.append(source)
            failures.check(f"any source {name}", difference(target, inputs(FLOAT, source, (COUNT,), 8)))
        expected = list(range(1, comm.size)) or [0]
        failures.expect(
            f"every source once {name}",
            set(sources) == set(expected) and len(sources) == len(expected),
            sources,
        )
    comm.barrier(backend=backend)


def _many_messages(comm: mcr.Communicator, backend: str | None, name: str, failures: Failures) -> None:
    """Messages of one tag keep their order; some are empty, some large."""
    left, right = _neighbours(comm)
    sizes = (1, 0, 50_000, 3)
    targets = [reference.zeros(size) for size in sizes]
    works = [comm.irecv(target, comm.ranks[left], backend=backend) for target in targets]
    works += [comm.isend(mine(comm, size, 9), comm.ranks[right], backend=backend) for size in sizes]
    for work in works:
        work.wait(timeout=TIMEOUT)
    for size, target in zip(sizes, targets, strict=True):
        failures.check(f"message of {size} {name}", difference(target, inputs(FLOAT, left, (size,), 9)))


def _batch(comm: mcr.Communicator, failures: Failures) -> None:
    left, right = _neighbours(comm)
    targets = [reference.zeros(COUNT), reference.zeros(COUNT)]
    batch = [
        mcr.P2POp(mcr.irecv, targets[1], comm.ranks[left], comm, 1),
        mcr.P2POp(mcr.isend, mine(comm, salt=1), comm.ranks[right], comm, tag=1),
        mcr.P2POp(mcr.isend, mine(comm, salt=0), comm.ranks[right], group=comm),
        mcr.P2POp(mcr.irecv, targets[0], comm.ranks[left], comm),
    ]
    works = mcr.batch_isend_irecv(batch if comm.rank % 2 else batch[::-1])
    for work in works:
        work.wait()
    failures.expect("one handle per message of a batch", len(works) == 4)
    for salt, target in enumerate(targets):
        failures.check(f"batch, group {comm.name}", difference(target, inputs(FLOAT, left, (COUNT,), salt)))


# -- objects and barriers ----------------------------------------------------------------------------


def objects(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """Objects of different sizes from every root, in the world and in a sub-group."""
    for group in (comm, mcr.new_group(list(range(comm.size))[::-1])):
        for root in range(group.size):
            given = {"from": root, "data": list(range(1000 * root)), "none": None}
            got = mcr.broadcast_object(
                given if group.rank == root else "other", group.ranks[root], group=group
            )
            failures.expect(f"broadcast_object from {root}, group {group.name}", got == given, got)
        own = (group.rank, "x" * 5000 * group.rank)
        everyone = group.all_gather_object(own)
        expected = [(rank, "x" * 5000 * rank) for rank in range(group.size)]
        failures.expect(f"all_gather_object, group {group.name}", everyone == expected, everyone)


def barriers(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """No rank leaves a barrier before all ranks have come."""
    backwards = mcr.new_group(list(range(comm.size))[::-1])
    late = 0
    for backend in backends:
        for group in (comm, backwards):
            for async_op in (False, True):
                late += 1
                if group.rank == late % group.size:
                    time.sleep(0.05)
                entered = time.monotonic()
                work = mcr.barrier(group, async_op, backend=backend)
                if async_op:
                    started(work).wait()
                left = time.monotonic()
                times = group.all_gather_object((entered, left))
                early = max(t[0] for t in times) - min(t[1] for t in times)
                failures.expect(f"barrier on {backend}, group {group.name}, {async_op}", early <= 0, early)


# -- persistent operations ---------------------------------------------------------------------------


def persistent(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """Bind each kind once and run it on changing data, in turns by a call and by a handle."""
    for backend in backends:
        for group in (comm, mcr.new_group(list(range(comm.size))[::-1])):
            for dtype in (torch.float32, torch.bfloat16, torch.int8):
                for op in ("SUM", "MAX", "AVG"):
                    if op != "AVG" or dtype.is_floating_point:
                        _persistent(group, backend, dtype, op, failures)


def _persistent(
    comm: mcr.Communicator, backend: str | None, dtype: torch.dtype, op: str, failures: Failures
) -> None:
    size, me, root = comm.size, comm.rank, comm.size - 1
    small, large = COUNT, COUNT * size
    how: dict[str, Any] = {"group": comm, "backend": backend}
    sizes = dict.fromkeys(("all_reduce", "broadcast", "reduce", "gather"), small)
    sizes |= dict.fromkeys(("scatter", "exchange"), large)
    ins = {name: reference.zeros(count, dtype=dtype) for name, count in sizes.items()}
    gathered, scattered = reference.zeros(large, dtype=dtype), reference.zeros(small, dtype=dtype)
    exchanged = reference.zeros(large, dtype=dtype)
    runs = {
        "all_reduce": mcr.persistent("all_reduce", ins["all_reduce"], op=op, **how),
        "broadcast": mcr.persistent("broadcast", ins["broadcast"], comm.ranks[root], **how),
        "reduce": mcr.persistent("reduce", ins["reduce"], comm.ranks[root], op=op, **how),
        "gather": mcr.persistent("all_gather_into_tensor", gathered, ins["gather"], **how),
        "scatter": mcr.persistent("reduce_scatter_tensor", scattered, ins["scatter"], op=op, **how),
        "exchange": mcr.persistent("all_to_all_single", exchanged, ins["exchange"], **how),
        "barrier": mcr.persistent("barrier", **how),
    }
    for turn in range(4):
        parts = {n: everyones(comm, t.numel(), turn, dtype) for n, t in ins.items()}
        for name, tensor in ins.items():
            tensor.copy_(reference.tensor(parts[name][me], dtype=dtype))
        _run_all(list(runs.values()), turn)
        total, chunk = reduced(parts["scatter"], op), slice(me * small, (me + 1) * small)
        expected = {
            "all_reduce": (ins["all_reduce"], reduced(parts["all_reduce"], op)),
            "broadcast": (ins["broadcast"], parts["broadcast"][root]),
            "reduce": (ins["reduce"], reduced(parts["reduce"], op) if me == root else parts["reduce"][me]),
            "gather": (gathered, np.concatenate(parts["gather"])),
            "scatter": (scattered, total[chunk]),
            "exchange": (exchanged, np.concatenate([part[chunk] for part in parts["exchange"]])),
        }
        for name, (tensor, wanted) in expected.items():
            allowed = abs(wanted) * 2 * unit_roundoff(dtype) if op == "AVG" else 0.0
            what = f"persistent {name} {op} {dtype} on {backend}, group {comm.name}, run {turn}"
            failures.check(what, difference(tensor, wanted, allowed))


def _run_all(operations: list[Any], turn: int) -> None:
    """Even turns by a call; odd turns all in flight together, the last one waited for first."""
    if turn % 2 == 0:
        for operation in operations:
            operation()
    else:
        for work in reversed([operation.start() for operation in operations]):
            work.wait()


# -- arrays and special tensors ----------------------------------------------------------------------


class Capsule:
    """An array of a library we have never heard of: nothing but DLPack."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def arrays(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """NumPy arrays and anything else with DLPack: same memory, written in place."""
    for backend in backends:
        for async_op in (False, True):
            _arrays(comm, {"backend": backend, "async_op": async_op}, f"on {backend}, {async_op}", failures)
    array = np.zeros(3)
    shared = as_tensor(array, "tensor").data_ptr() == array.ctypes.data
    failures.expect("an array is used where it lies", shared)
    array.setflags(write=False)
    do: Any = comm  # the annotations say tensors
    failures.raises(
        "read-only array", lambda: do.all_reduce(array), mcr.InvalidArgument, "tensor", "read-only"
    )


def _arrays(comm: mcr.Communicator, how: dict[str, Any], name: str, failures: Failures) -> None:
    size, me = comm.size, comm.rank
    parts = [inputs(torch.float64, rank, (size, 3), 4) for rank in range(size)]
    total = reduced(parts, "SUM")
    do: Any = mcr  # numpy arrays are accepted at run time; the annotations say tensors

    def finish(work: mcr.Work | None) -> None:
        if work is not None:
            work.wait()

    around = np.full((size, 7), 5.0)
    forms = {
        "in rows": parts[me].copy(),
        "in columns": parts[me].copy(order="F"),
        "strided": around[:, 1:7:2],
    }
    forms["strided"][...] = parts[me]
    for form, array in forms.items():
        finish(do.all_reduce(array, **how))
        failures.expect(f"array {form} {name}", np.array_equal(array, total), array)
    failures.expect(f"array around the strided one {name}", bool((around[:, ::2] == 5).all()), around)

    capsule = Capsule(parts[me].copy())
    finish(do.broadcast(capsule, 0, **how))
    failures.expect(f"DLPack alone {name}", np.array_equal(capsule.array, parts[0]), capsule.array)

    single = np.array(float(me + 1))
    finish(do.all_reduce(single, **how))
    failures.expect(f"0-dim array {name}", float(single) == size * (size + 1) / 2, single)

    gathered = np.zeros((size, size, 3))
    finish(do.all_gather_into_tensor(gathered, parts[me].copy(), **how))
    failures.expect(f"gathered array {name}", np.array_equal(gathered, np.stack(parts)), gathered)

    apart = [np.zeros((size, 3)) for _ in range(size)]
    finish(do.all_gather(apart, parts[me].copy(), **how))
    failures.expect(f"list of arrays {name}", np.array_equal(np.stack(apart), np.stack(parts)), apart)

    exchanged = np.zeros((size, 3))
    finish(do.all_to_all_single(exchanged, parts[me].copy(), **how))
    wanted = np.stack([part[me] for part in parts])
    failures.expect(f"exchanged array {name}", np.array_equal(exchanged, wanted), exchanged)

    scattered = np.zeros(3)
    finish(do.reduce_scatter_tensor(scattered, parts[me].copy(), **how))
    failures.expect(f"scattered array {name}", np.array_equal(scattered, total[me]), scattered)


def special_tensors(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """Leaves that require gradients, lazily conjugated tensors, torch.distributed's reduce ops."""
    for backend in backends:
        leaf = mine(comm).requires_grad_()
        comm.all_reduce(leaf, backend=backend)
        comm.all_reduce(leaf, "MAX", backend=backend)
        failures.check(f"leaf on {backend}", difference(leaf, summed(comm)))
        failures.expect("a leaf stays one", leaf.is_leaf and leaf.requires_grad and leaf.grad_fn is None)
        parts = [reference.zeros(COUNT, requires_grad=True) for _ in range(comm.size)]
        comm.all_gather(parts, mine(comm).requires_grad_(), backend=backend)
        wanted = np.concatenate(everyones(comm))
        failures.check(f"leaves in a list on {backend}", difference(torch.cat(parts), wanted))
        _conjugated(comm, backend, failures)
        _torch_reduce_ops(comm, backend, failures)


def _conjugated(comm: mcr.Communicator, backend: str | None, failures: Failures) -> None:
    values = everyones(comm, dtype=torch.complex64)
    conjugated = mine(comm, dtype=torch.complex64).conj()
    comm.all_reduce(conjugated, backend=backend)
    failures.check(f"conjugated on {backend}", difference(conjugated, np.conj(reduced(values, "SUM"))))
    plain = mine(comm, dtype=torch.complex64)  # of the same dtype, shape and strides
    comm.all_reduce(plain, backend=backend)
    failures.check(f"after a conjugated one on {backend}", difference(plain, reduced(values, "SUM")))
    negated = mine(comm, dtype=torch.complex64).conj().imag
    comm.all_reduce(negated, backend=backend)
    failures.check(f"negated on {backend}", difference(negated, np.negative(np.imag(reduced(values, "SUM")))))


def _torch_reduce_ops(comm: mcr.Communicator, backend: str | None, failures: Failures) -> None:
    ops: dict[str, Any] = {
        "SUM": dist.ReduceOp.SUM,
        "MIN": dist.ReduceOp.MIN,
        "MAX": dist.ReduceOp.MAX,
        "PRODUCT": dist.ReduceOp.PRODUCT,
        "BXOR": dist.ReduceOp.BXOR,
    }
    for name, op in ops.items():
        tensor = mine(comm, dtype=torch.int32)
        comm.all_reduce(tensor, op, backend=backend)
        wanted = reduced(everyones(comm, dtype=torch.int32), name)
        failures.check(f"torch's {name} on {backend}", difference(tensor, wanted))
    mean = mine(comm, dtype=torch.float64)
    mcr.reduce(mean, 0, dist.ReduceOp.AVG, backend=backend)  # type: ignore[arg-type]
    expected = reduced(everyones(comm, dtype=torch.float64), "AVG") if comm.rank == 0 else wide(mine(comm))
    failures.check(f"torch's AVG on {backend}", difference(mean, expected, abs(expected) * 1e-15))


def overlapping(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """Test inputs that share memory with outputs."""
    size, me = comm.size, comm.rank
    for backend in backends:
        parts = everyones(comm)
        gathered = reference.zeros(size * COUNT)
        own = gathered[me * COUNT : (me + 1) * COUNT]
        own.copy_(mine(comm))
        comm.all_gather_into_tensor(gathered, own, backend=backend)
        failures.check(f"gather in place on {backend}", difference(gathered, np.concatenate(parts)))

        shifted = reference.zeros(size * COUNT + 1)
        shifted[1 : COUNT + 1] = mine(comm)
        comm.all_gather_into_tensor(shifted[: size * COUNT], shifted[1 : COUNT + 1], backend=backend)
        failures.check(f"gather shifted on {backend}", difference(shifted[:-1], np.concatenate(parts)))

        many = everyones(comm, size * COUNT)
        source = mine(comm, size * COUNT)
        target = source[me * COUNT : (me + 1) * COUNT]
        comm.reduce_scatter_tensor(target, source, backend=backend)
        chunk = slice(me * COUNT, (me + 1) * COUNT)
        failures.check(
            f"reduce_scatter in place on {backend}", difference(target, reduced(many, "SUM")[chunk])
        )

        wanted = np.concatenate([part[chunk] for part in many])
        both = mine(comm, size * COUNT)
        comm.all_to_all_single(both, both, backend=backend)
        failures.check(f"exchange in place on {backend}", difference(both, wanted))
        both, splits = mine(comm, size * COUNT), [COUNT] * size
        comm.all_to_all_single(both, both, splits, splits, backend=backend)
        failures.check(f"exchange with splits in place on {backend}", difference(both, wanted))
        pieces = list(torch.split(mine(comm, size * COUNT), COUNT))
        comm.all_to_all(pieces, pieces, backend=backend)
        failures.check(f"exchange of lists in place on {backend}", difference(torch.cat(pieces), wanted))

        pieces = [reference.zeros(COUNT) for _ in range(size)]
        pieces[me].copy_(mine(comm))
        comm.gather(pieces[me], pieces if me == 0 else None, backend=backend)
        if me == 0:
            failures.check(
                f"gather into its input on {backend}", difference(torch.cat(pieces), np.concatenate(parts))
            )


# -- handles -----------------------------------------------------------------------------------------


def handles(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """Test waits in any order, completion without a wait, and the text of `info`."""
    for backend in backends:
        tensors = [mine(comm, salt=salt) for salt in range(20)]
        works = [started(comm.all_reduce(tensor, async_op=True, backend=backend)) for tensor in tensors]
        for work in reversed(works):
            work.wait()
            work.wait()
        for salt, tensor in enumerate(tensors):
            failures.check(f"waited in reverse on {backend}", difference(tensor, summed(comm, salt=salt)))
        failures.expect("completed after wait", all(work.is_completed() for work in works))
        failures.expect("no exception", all(work.exception() is None for work in works))
        _completes(comm, backend, failures)
        _infos(comm, backend, failures)
    if len(backends) > 1:
        _mixed(comm, backends, failures)


def _completes(comm: mcr.Communicator, backend: str | None, failures: Failures) -> None:
    strided = reference.zeros(COUNT, 2)
    strided[:, 0] = mine(comm)
    for tensor in (mine(comm), strided[:, 0]):
        work = started(comm.all_reduce(tensor, async_op=True, backend=backend))
        deadline = time.monotonic() + TIMEOUT
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0)
        failures.expect(f"is_completed on {backend}", work.is_completed())
        failures.check(f"result without wait on {backend}", difference(tensor, summed(comm)))


def _infos(comm: mcr.Communicator, backend: str | None, failures: Failures) -> None:
    size, possible = comm.size, possible_backends(comm, backend)
    how: dict[str, Any] = {"async_op": True, "backend": backend, "tag": "test.info"}
    own, large = mine(comm), reference.zeros(size * COUNT)
    begin = started(comm.barrier(async_op=True, backend=backend))
    codec = None if size == 1 else "bf16"
    works: list[tuple[str, Any, int | None, int | None, str | None]] = [
        ("all_reduce", comm.all_reduce(own.clone(), **how), 40, 40, None),
        ("broadcast", comm.broadcast(own.clone(), 0, **how), 40, 40, None),
        ("all_gather", comm.all_gather_into_tensor(large, own, **how), 40 * size, 40 * size, None),
        (
            "reduce_scatter",
            comm.reduce_scatter_tensor(reference.zeros(COUNT), own.repeat(size), **how),
            40 * size,
            40 * size,
            None,
        ),
        (
            "all_to_all_v",
            comm.all_to_all(list(torch.split(reference.zeros(size * COUNT), COUNT)), [own] * size, **how),
            40 * size,
            40 * size,
            None,
        ),
        ("all_reduce", comm.all_reduce(own.clone(), compress="bf16", **how), 40, 20 if codec else 40, codec),
    ]
    for number, (kind, work, nbytes, wire, name) in enumerate(works, begin.info.sequence + 1):
        started(work).wait()
        info = work.info
        got = (info.kind, info.codec, info.bytes, info.wire_bytes, info.fused, info.sequence)
        right = got == (kind, name, nbytes, wire, 1, number) and set(info.backend.split("+")) <= possible
        failures.expect(f"info on {backend}", right, info)
        failures.expect(
            f"tag and group on {backend}", (info.tag, info.group) == ("test.info", comm.name), info
        )
    begin.wait()
    joint = started(comm.all_reduce_coalesced([own, large], **how))
    joint.wait()
    info, total = joint.info, 40 * (size + 1)
    right = (info.kind, info.tag) == ("all_reduce_coalesced", "test.info")
    right = right and set(info.backend.split("+")) <= possible
    right = right and (info.bytes, info.wire_bytes, info.fused) == (total, total, 2)
    failures.expect(f"info of coalesced on {backend}", right, info)


def _mixed(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """Run operations of all libraries together in flight, on two groups."""
    other = mcr.new_group(list(range(comm.size))[::-1])
    flying = []
    for turn in range(8):
        for group in (comm, other):
            for backend in backends:
                tensor = mine(group, salt=turn)
                work = group.all_reduce(tensor, async_op=True, backend=backend)
                flying.append((group, turn, tensor, started(work)))
    for group, turn, tensor, work in sorted(flying, key=lambda entry: (entry[1] * 5) % 8):
        work.wait()
        failures.check(f"mixed libraries, group {group.name}", difference(tensor, summed(group, salt=turn)))


def dropped(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """A dropped handle: the operation succeeds, even when its memory would be reused."""
    count = 100_000
    for backend in backends:
        for turn in range(2 * comm.size):
            tensor = mine(comm, count, turn)
            work = started(comm.all_reduce(tensor, async_op=True, backend=backend))
            left, right = _neighbours(comm)
            target = reference.zeros(count)
            receipt = comm.irecv(target, comm.ranks[left], turn, backend=backend)
            comm.isend(mine(comm, count, turn + 50), comm.ranks[right], turn, backend=backend)
            if comm.rank == turn % comm.size:
                del tensor, work
                gc.collect()
                junk = [reference.full((count,), float("nan")) for _ in range(12)]
                del junk
            else:
                work.wait()
                failures.check(
                    f"peer dropped its handle on {backend}", difference(tensor, summed(comm, count, turn))
                )
            receipt.wait()
            wanted = inputs(FLOAT, left, (count,), turn + 50)
            failures.check(f"peer dropped its send on {backend}", difference(target, wanted))
            comm.barrier(backend=backend)


# -- groups ------------------------------------------------------------------------------------------


def groups(comm: mcr.Communicator, backends: Backends, failures: Failures) -> None:
    """Test ranks of groups, ranks in arguments, splits, and ranks outside a group."""
    size, me = comm.size, comm.rank
    backwards = mcr.new_group(list(range(size))[::-1])
    failures.expect(
        "ranks keep the given order", backwards.ranks == tuple(range(size))[::-1], backwards.ranks
    )
    failures.expect("rank in a group", mcr.get_rank(backwards) == size - 1 - me == backwards.rank)
    failures.expect("size of a group", mcr.get_world_size(backwards) == size == backwards.size)
    failures.expect("the world", (mcr.get_rank(), mcr.get_world_size(), mcr.world()) == (me, size, comm))

    for root in range(size):  # global ranks, in groups of any order
        tensor = reference.full((3,), float(me))
        mcr.broadcast(tensor, root, backwards)
        failures.check("src is a global rank", difference(tensor, np.full(3, float(root))))
        tensor = reference.tensor([2.0**me])
        mcr.reduce(tensor, root, group=backwards)
        wanted = 2.0**size - 1 if me == root else 2.0**me
        failures.check("dst is a global rank", difference(tensor, np.array([wanted])))

    alone = mcr.new_group([size - 1])
    failures.expect("a stranger's rank is -1", (alone.rank >= 0) == (me == size - 1), alone.rank)
    if me == size - 1:
        tensor = mine(alone)
        work = started(mcr.all_reduce(tensor, group=alone, async_op=True))
        work.wait()
        failures.expect("a group of one needs no library", work.info.backend == "local", work.info)

    none = comm.split(None if me == 0 else 1, key=-me)
    failures.expect("split without a colour", (none is None) == (me == 0), none)
    if none is not None:
        failures.expect("split is ordered by key", none.ranks == tuple(range(1, size))[::-1], none.ranks)
        nested = none.split(0)
        assert nested is not None
        tensor = mine(nested)
        nested.all_reduce(tensor)
        failures.check("a split of a split", difference(tensor, summed(nested)))


# -- the life of a job -------------------------------------------------------------------------------


def beside_torch(folder: str, backends: Backends, failures: Failures) -> None:
    """Use a default process group of torch.distributed, made before or after the library's job."""
    rank, size = _who()
    kept = []  # torch 2.6 may hang when it destroys a group of gloo that has the last reference to a tensor

    def join(name: str) -> None:
        path = Path(folder) / name
        dist.init_process_group("gloo", init_method=path.as_uri(), rank=rank, world_size=size)

    def theirs(name: str) -> None:
        tensor = torch.tensor([float(rank + 1)])
        kept.append(tensor)
        dist.all_reduce(tensor)
        failures.expect(f"torch's group {name}", float(tensor) == size * (size + 1) / 2, tensor)

    def ours(name: str) -> None:
        for backend in backends:
            tensor = mine(mcr.world())
            mcr.all_reduce(tensor, backend=backend)
            failures.check(f"our group {name} on {backend}", difference(tensor, summed(mcr.world())))

    join("before")
    theirs("alone")
    mcr.init(timeout=TIMEOUT)
    ours("beside one made before")
    theirs("beside ours")
    handle = dist.all_reduce(torch.zeros(1000), async_op=True)
    ours("while theirs is in flight")
    assert handle is not None
    handle.wait()
    mcr.finalize()
    theirs("after finalize")
    dist.destroy_process_group()

    mcr.init(timeout=TIMEOUT)
    join("after")
    ours("beside one made after")
    theirs("made after ours")
    dist.destroy_process_group()
    ours("after theirs was destroyed")
    mcr.finalize()


def _who() -> tuple[int, int]:
    with mcr.init(timeout=TIMEOUT) as comm:
        return comm.rank, comm.size


def again(folder: str, backends: Backends, failures: Failures) -> None:
    """init, finalize, and init again in one process, with other configurations."""
    named = [name for name in backends if name not in (None, "local")]
    compressing = {
        "version": 1,
        "pipeline": [{"compress": {"codec": "bf16"}}, {"select": {}}, {"dispatch": {"timeout": "20s"}}],
    }
    for turn, (config, chosen) in enumerate(
        [(None, None), (compressing, None), *((None, [n]) for n in named)] * 2
    ):
        comm = mcr.init(config, backends=chosen, timeout=TIMEOUT)
        failures.expect("initialised", mcr.is_initialized())
        if chosen:
            failures.expect("only the backends asked for", comm.size == 1 or mcr.get_backends() == chosen)
        tensor = mine(comm, salt=turn)
        work = started(mcr.all_reduce(tensor, async_op=True))
        work.wait()
        codec = "bf16" if config is not None and comm.size > 1 else None
        failures.expect("the codec of this configuration", work.info.codec == codec, work.info)
        failures.check("result after init again", difference(tensor, summed(comm, salt=turn)))
        left_in_flight = mine(comm, salt=turn)
        mcr.all_reduce(left_in_flight, async_op=True)
        mcr.finalize()
        failures.check("finalize waits", difference(left_in_flight, summed(comm, salt=turn)))
        failures.expect("not initialised", not mcr.is_initialized())
    with mcr.init(timeout=TIMEOUT) as comm:
        failures.expect("the world is what init returns", mcr.world() is comm)
    failures.expect("finalised by with", not mcr.is_initialized())
    failures.raises("op after with", mcr.barrier, mcr.NotInitialized, "finalize")


SECTIONS: Final[dict[str, Section]] = {
    "rough sums": rough_sums,
    "compressed": compressed,
    "messages": messages,
    "objects": objects,
    "barriers": barriers,
    "persistent": persistent,
    "arrays": arrays,
    "special tensors": special_tensors,
    "overlapping": overlapping,
    "handles": handles,
    "dropped": dropped,
    "groups": groups,
}
LIVES: Final[dict[str, Callable[[str, Backends, Failures], None]]] = {
    "beside torch": beside_torch,
    "again": again,
}


def examine(backends: Backends, tables: Sequence[str], folder: str) -> dict[str, Any]:
    """Run all sections and some tables in one launch; return the findings of each, by name."""
    reports = {}

    def run(name: str, function: Callable[[Failures], None]) -> None:
        failures, began = Failures(), time.perf_counter()
        try:
            function(failures)
        except Exception:
            failures.check(name, traceback.format_exc()[-2500:])
        reports[name] = {**failures.report(), "seconds": round(time.perf_counter() - began, 2)}

    def in_a_job(section: Section) -> Callable[[Failures], None]:
        def inside(failures: Failures) -> None:
            with mcr.init(timeout=TIMEOUT) as comm:
                section(comm, backends, failures)

        return inside

    for name, section in SECTIONS.items():
        run(name, in_a_job(section))
    for name, life in LIVES.items():
        run(name, lambda failures, life=life: life(folder, backends, failures))  # type: ignore[misc]
    for name in tables:
        run(name, in_a_job(conformance.TABLES[name]))
    return reports
