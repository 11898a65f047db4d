"""Programs in which one rank does something else than the others, with their correct twins.

Each has a separate group, because a group is unusable after a mismatch. All ranks may have run both programs
many times before, so that every operation is known to all of them when one rank swaps them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import mcr_plus as mcr

Group = mcr.Communicator
Program = Callable[[Group, str], object]


@dataclass(frozen=True)
class Case:
    """Program of most ranks, program of the last rank, and patterns that a report must have."""

    good: Program
    bad: Program
    words: tuple[str, ...]


def _value(group: Group, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((numel,), group.rank + 1, dtype=dtype)


def all_reduce(shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float32, **options: Any) -> Program:
    def run(group: Group, backend: str) -> torch.Tensor:
        value = torch.full(shape, group.rank + 1, dtype=dtype)
        group.all_reduce(value, **{"backend": backend, **options})
        return value

    return run


def _waited(*, tag: str | None = None, numel: int = 4) -> Program:
    def run(group: Group, backend: str) -> torch.Tensor:
        value = _value(group, numel)
        work = group.all_reduce(value, async_op=True, backend=backend, tag=tag)
        assert work is not None
        work.wait()
        return value

    return run


def _both_in_flight(*tags: str) -> Program:
    """Start asynchronous operations, all before any is waited for."""

    def run(group: Group, backend: str) -> torch.Tensor:
        values = [_value(group, 4) for _ in tags]
        works = [
            group.all_reduce(value, async_op=True, backend=backend, tag=tag)
            for value, tag in zip(values, tags, strict=True)
        ]
        for work in works:
            assert work is not None
            work.wait()
        return torch.cat(values)

    return run


def _broadcast(source: int, numel: int = 4, **options: Any) -> Program:
    """Broadcast from the group's rank `source`, counted from the end if negative."""

    def run(group: Group, backend: str) -> torch.Tensor:
        value = _value(group, numel)
        work = group.broadcast(value, group.ranks[source], backend=backend, **options)
        if work is not None:
            work.wait()
        return value

    return run


def _reduce(target: int, numel: int = 4) -> Program:
    def run(group: Group, backend: str) -> torch.Tensor:
        value = _value(group, numel)
        group.reduce(value, group.ranks[target], backend=backend)
        return value

    return run


def _all_gather(numel: int = 4, **options: Any) -> Program:
    def run(group: Group, backend: str) -> torch.Tensor:
        output = torch.zeros(numel * group.size)
        group.all_gather_into_tensor(output, _value(group, numel), backend=backend, **options)
        return output

    return run


def _all_to_all(numel: int = 4) -> Program:
    def run(group: Group, backend: str) -> torch.Tensor:
        output = torch.zeros(numel * group.size)
        group.all_to_all_single(output, _value(group, numel * group.size), backend=backend)
        return output

    return run


def _reduce_scatter(numel: int = 4) -> Program:
    def run(group: Group, backend: str) -> torch.Tensor:
        output = torch.zeros(numel)
        group.reduce_scatter_tensor(output, _value(group, numel * group.size), backend=backend)
        return output

    return run


def _gather(target: int, numel: int = 4) -> Program:
    def run(group: Group, backend: str) -> torch.Tensor:
        dst = group.ranks[target]
        outputs = [torch.zeros(numel) for _ in range(group.size)] if dst == group.ranks[group.rank] else None
        group.gather(_value(group, numel), outputs, dst, backend=backend)
        return torch.cat(outputs) if outputs else torch.zeros(0)

    return run


def _scatter(source: int, numel: int = 4) -> Program:
    def run(group: Group, backend: str) -> torch.Tensor:
        src = group.ranks[source]
        inputs = [_value(group, numel) for _ in range(group.size)] if src == group.ranks[group.rank] else None
        output = torch.zeros(numel)
        group.scatter(output, inputs, src, backend=backend)
        return output

    return run


def _barrier(group: Group, backend: str) -> None:
    group.barrier(backend=backend)


def coalesced(*numels: int, **options: Any) -> Program:
    def run(group: Group, backend: str) -> torch.Tensor:
        values = [_value(group, numel) for numel in numels]
        group.all_reduce_coalesced(values, backend=backend, **options)
        return torch.cat(values)

    return run


def _encoded_parts(numel: int) -> Program:
    """Send encoded parts of one size: each rank sends the first one to each of the others."""

    def run(group: Group, backend: str) -> torch.Tensor:
        outputs = [torch.zeros(numel) for _ in range(group.size)]
        group.all_gather_v(outputs, _value(group, numel), backend=backend, compress="int8_block")
        return torch.cat(outputs)

    return run


def in_order(*programs: Program) -> Program:
    def run(group: Group, backend: str) -> None:
        for program in programs:
            program(group, backend)

    return run


def _nothing(group: Group, backend: str) -> None:
    """Do one call fewer than the others."""


def _on_the_other(group: Group, backend: str) -> None:
    group.all_reduce(torch.ones(4), backend="gloo" if backend != "gloo" else "mpi")


def _vector(kind: str, extra: int) -> Program:
    """Use sizes that differ between ranks, and with `extra` also from the twin's sizes."""

    def run(group: Group, backend: str) -> None:
        rank, size = group.rank, group.size
        ones = partial(torch.ones, dtype=torch.float32)
        to_first = [ones(2 + extra), *(ones(2) for _ in range(size - 1))]
        of_last = [*(ones(2) for _ in range(size - 1)), ones(2 + extra)]
        source = group.ranks[0]
        calls: dict[str, Callable[[], object]] = {
            "all_gather_v": lambda: group.all_gather_v(to_first, to_first[rank], backend=backend),
            "reduce_scatter_v": lambda: group.reduce_scatter_v(to_first[rank], to_first, backend=backend),
            "all_to_all_v": lambda: group.all_to_all(
                [ones(2 + extra * (rank == 0)) for _ in range(size)], to_first, backend=backend
            ),
            "gather_v": lambda: group.gather_v(
                of_last[rank], None if rank else of_last, source, backend=backend
            ),
            "scatter_v": lambda: group.scatter_v(
                of_last[rank].clone(), None if rank else of_last, source, backend=backend
            ),
        }
        calls[kind]()

    return run


_LARGE = 1 << 17
_A, _B = all_reduce(tag="a"), all_reduce(tag="b")
# Two roots that depend on the group, as ranks of the job.
_ROOTS = (r"root=(\d)\b.*root=(?!\1)\d",)

CASES = {
    # another operation
    "op": Case(all_reduce(), _broadcast(0), ("all_reduce", "broadcast")),
    "exchange": Case(_all_gather(), _all_to_all(), ("all_gather", "all_to_all")),
    "gathered": Case(all_reduce(), _all_gather(2), ("all_reduce", "all_gather")),
    "scattered": Case(all_reduce(), _reduce_scatter(), ("all_reduce", "reduce_scatter")),
    "scatter or gather": Case(_reduce_scatter(), _gather(0), ("reduce_scatter", "gather")),
    "reduce or all_reduce": Case(_reduce(0), all_reduce(), (r"\breduce\b", "all_reduce")),
    "barrier": Case(_barrier, all_reduce(), ("barrier", "all_reduce")),
    "barrier or broadcast": Case(_barrier, _broadcast(-1), ("barrier", "broadcast")),
    # the same operation on something else
    "reduce op": Case(all_reduce(), all_reduce(op="MAX"), ("SUM", "MAX")),
    "dtype": Case(all_reduce(), all_reduce(dtype=torch.int32), ("float32", "int32")),
    "half": Case(all_reduce(dtype=torch.float16), all_reduce(dtype=torch.bfloat16), ("float16", "bfloat16")),
    "size": Case(all_reduce(), all_reduce((5,)), (r"\[4\]", r"\[5\]")),
    "shape": Case(all_reduce(), all_reduce((2, 2)), (r"\[4\]", r"\[2,2\]")),
    "large sizes": Case(
        all_reduce((_LARGE // 2,)), all_reduce((_LARGE,)), (rf"\[{_LARGE // 2}\]", rf"\[{_LARGE}\]")
    ),
    "size of broadcast": Case(_broadcast(0), _broadcast(0, 5), (r"\[4\]", r"\[5\]")),
    "large broadcast": Case(_broadcast(0, 5), _broadcast(0, _LARGE), (r"\[5\]", rf"\[{_LARGE}\]")),
    "size of all_gather": Case(_all_gather(), _all_gather(5), (r"\[4\]", r"\[5\]")),
    "size of all_to_all": Case(_all_to_all(), _all_to_all(5), ("all_to_all", "all_to_all")),
    "size of reduce_scatter": Case(
        _reduce_scatter(), _reduce_scatter(5), ("reduce_scatter", "reduce_scatter")
    ),
    "coalesced": Case(coalesced(4, 4), all_reduce((_LARGE,)), (r"\[8\]|coalesced", rf"\[{_LARGE}\]")),
    # another root
    "root": Case(_broadcast(0), _broadcast(1), _ROOTS),
    "roots of their own": Case(_broadcast(0), _broadcast(-1), _ROOTS),
    "root of reduce": Case(_reduce(0), _reduce(1), _ROOTS),
    "root of gather": Case(_gather(0), _gather(1), _ROOTS),
    "root of scatter": Case(_scatter(0), _scatter(1), _ROOTS),
    # another order
    "order": Case(in_order(_A, _B), in_order(_B, _A), ("tag=a", "tag=b")),
    "order of those in flight": Case(
        _both_in_flight("a", "b"), _both_in_flight("b", "a"), ("tag=a", "tag=b")
    ),
    "order of broadcasts": Case(
        in_order(_broadcast(0), _broadcast(1)), in_order(_broadcast(1), _broadcast(0)), _ROOTS
    ),
    "tag": Case(_A, _B, ("tag=a", "tag=b")),
    "fewer calls": Case(_A, _nothing, ("tag=a", "barrier")),
    "fewer calls in flight": Case(_both_in_flight("a", "b"), _both_in_flight("b"), ("tag=a", "tag=b")),
    # another way
    "async": Case(all_reduce(), _waited(), (r"float32\[4\]", "async")),
    "async broadcast": Case(_broadcast(0), _broadcast(0, async_op=True), (r"float32\[4\]", "async")),
    "compress": Case(
        all_reduce(),
        all_reduce(compress="bf16"),
        (
            r"SUM float32\[4\] backend=",
            r"SUM float32\[4\] compressed with bf16 as all_reduce SUM bfloat16\[4\] \S+ backend=\w+[;.]",
        ),
    ),
    "compress a block": Case(
        all_reduce((4096,)),
        all_reduce((4096,), compress="int8_block"),
        (r"SUM float32\[4096\] compressed with int8_block as", "uint8"),
    ),
    "sums": Case(
        all_reduce(), all_reduce(sums="fixed"), (r"SUM float32\[4\] (backend=|async)", "sums=fixed")
    ),
    "order of sums": Case(
        all_reduce((_LARGE,), sums="fixed"), all_reduce((_LARGE,), sums="exact"), ("sums=fixed", "sums=exact")
    ),
    # operations from which a stage derives similar operations
    "mean of encoded": Case(
        all_reduce(compress="bf16"), all_reduce(op="AVG", compress="bf16"), (r"SUM float32", r"AVG float32")
    ),
    "mean of encoded blocks": Case(
        all_reduce((4096,), compress="int8_block"),
        all_reduce((4096,), op="AVG", compress="int8_block"),
        (r"SUM float32", r"AVG float32"),
    ),
    "size of encoded blocks": Case(
        all_reduce((4095,), compress="int8_block"),
        all_reduce((4096,), compress="int8_block"),
        (r"\[4095\]", r"\[4096\]"),
    ),
    "encoded, another kind": Case(
        all_reduce((4096,), compress="topk"),
        _all_gather(4096, compress="topk"),
        (r"all_reduce SUM float32", r"all_gather float32"),
    ),
    "encoded parts": Case(_encoded_parts(4095), _encoded_parts(4096), (r"\b4095\b", r"\b4096\b")),
    "order in a bucket": Case(coalesced(4, 8), coalesced(8, 4), (r"\b4\+8\b", r"\b8\+4\b")),
    "sizes in a bucket": Case(coalesced(6, 6), coalesced(4, 8), (r"\b6\+6\b", r"\b4\+8\b")),
    "order in an encoded bucket": Case(
        coalesced(4096, 8192, compress="int8_block"),
        coalesced(8192, 4096, compress="int8_block"),
        (r"\b4096\+8192\b", r"\b8192\+4096\b"),
    ),
    "backend": Case(all_reduce(), _on_the_other, ("backend=m", "backend=gloo")),
    # other numbers of elements
    **{
        kind: Case(_vector(kind, 0), _vector(kind, 1), (kind, r"(?=.*\b2\b)(?=.*\b3\b)"))
        for kind in ("all_gather_v", "reduce_scatter_v", "all_to_all_v", "gather_v", "scatter_v")
    },
}


def outcome_of(run: Callable[[], object]) -> dict[str, Any]:
    """Return the outcome of a program: the error's type and text, or none, and the duration."""
    began = time.monotonic()
    kind: str | None = None
    text = ""
    try:
        run()
    except mcr.McrError as error:
        kind, text = type(error).__name__, str(error)
    return {"error": kind, "text": text, "seconds": time.monotonic() - began}


def try_case(
    name: str, backend: str, group: Group, *, before: int, twins: bool = False, right: Group | None = None
) -> list[dict[str, Any]]:
    """Run both programs `before` times on all ranks, then each rank's own program, and an operation after it.

    With `twins` the correct program runs once before, even if `before` is 0. `right`: another group of these
    ranks, in which both programs run first; `garbage` then says whether the faulty program returned a result
    that differs from its result in that group.
    """
    if group.rank < 0:
        return []
    case = CASES[name]
    program = case.bad if group.rank == group.size - 1 else case.good
    told = {"case": f"{name}/{backend}/{group.size}", "rank": group.rank}
    returned: list[object] = []

    def prepare() -> None:
        if right is not None:
            results = case.good(right, backend), case.bad(right, backend)
            returned.append(results[program is case.bad])
        for turn in range(before):
            case.good(group, backend)
            if turn % 100 == 0:
                case.bad(group, backend)
        if twins and not before:
            case.good(group, backend)
        if before:
            group.barrier(backend=backend)

    def fault() -> None:
        returned.append(program(group, backend))
        in_order(_barrier, all_reduce())(group, backend)

    results = [told | {"twin": True} | outcome_of(prepare)]
    found = outcome_of(fault)
    again = outcome_of(lambda: group.barrier(backend=backend))
    garbage = len(returned) == 2 and not _same(*returned)
    return [*results, told | {"twin": False, "again": again["error"], "garbage": garbage} | found]


def _same(expected: object, value: object) -> bool:
    if isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor):
        return torch.equal(expected, value)
    return expected is value is None
