"""The table of operations: one case per operation, backend, dtype, reduce op, group, shape and mode.

This part runs on the ranks; `test_conformance` starts it. All ranks walk the same table in the same order.
Asynchronous cases are left in flight, several at a time, and waited for in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby, product
from typing import Any, Final

import numpy as np
import reference
import torch
from reference import Array, Failures, Shape, difference, inputs, reduced, unit_roundoff

import mcr_plus as mcr
from mcr_plus.core.kinds import ARITHMETIC, REDUCIBLE

Check = Callable[[], "str | None"]
Runner = Callable[["Scene"], "tuple[Any, list[Check]]"]

IN_FLIGHT: Final = 4  # asynchronous cases at a time
FILL: Final = 77  # the bytes around a tensor that does not own all its memory
PAIRS: Final = [(op, dtype) for op, dtypes in REDUCIBLE.items() for dtype in dtypes]

# name → shape, and how the tensor lies in memory
SHAPES: Final[dict[str, tuple[Shape, str]]] = {
    "seven": ((7,), "plain"),
    "scalar": ((), "plain"),
    "one": ((1,), "plain"),
    "matrix": ((5, 3), "plain"),
    "long": ((1031,), "plain"),
    "transposed": ((5, 3), "transposed"),
    "strided": ((7,), "strided"),
    "strided rows": ((4, 6), "strided"),
    "offset": ((7,), "offset"),
    "neighbours": ((3, 2), "neighbours"),
    "empty": ((0,), "plain"),
    "empty rows": ((0, 3), "plain"),
}


class Laid:
    """A tensor with given values, somewhere in memory; knows whether its surroundings were left alone."""

    def __init__(self, values: Array, dtype: torch.dtype, layout: str) -> None:
        self._base: torch.Tensor | None = None
        self.tensor = (
            reference.tensor(values, dtype=dtype) if layout == "plain" else self._view(values, dtype, layout)
        )

    def _view(self, values: Array, dtype: torch.dtype, layout: str) -> torch.Tensor:
        shape = values.shape
        if layout == "transposed" or not shape:
            view = base = reference.full(shape[::-1], FILL, dtype=torch.float64).to(dtype)
            view = view.permute(tuple(reversed(range(len(shape)))))
        elif layout == "strided":
            base = reference.full((*shape[:-1], 2 * shape[-1] + 1), FILL, dtype=torch.float64).to(dtype)
            view = base[..., 1 : 1 + 2 * shape[-1] : 2]
        else:
            base = reference.full((values.size + 5,), FILL, dtype=torch.float64).to(dtype)
            view = base[3 : 3 + values.size].view(shape)
        view.copy_(reference.tensor(values, dtype=dtype))
        self._base = base
        return view

    def spilled(self) -> str | None:
        """Return the bytes written outside the tensor."""
        if self._base is None or self._base.dim() == 0:
            return None
        base = self._base
        inside = reference.zeros(base.shape, dtype=torch.uint8)
        inside.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).fill_(1)
        around = base[inside == 0]
        fill = reference.full(around.shape, FILL, dtype=torch.float64).to(base.dtype)
        return None if torch.equal(around, fill) else "memory beside the tensor was changed"


def neighbours(values: Sequence[Array], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return tensors next to each other in memory, away from its beginning."""
    base = reference.zeros(4 + sum(value.size for value in values), dtype=dtype)
    parts = torch.split(base[4:], [value.size for value in values])
    tensors = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(reference.tensor(value, dtype=dtype))
    return tensors


@dataclass(frozen=True)
class Case:
    """A cell of the table."""

    name: str
    backend: str | None
    dtype: torch.dtype
    op: str | None
    group: str
    shape: str
    async_op: bool
    salt: int

    def __str__(self) -> str:
        where = f"on {self.backend}, group {self.group}, {self.shape}"
        return f"{self.name} {self.op or ''} {self.dtype} {where}, {'async' if self.async_op else 'sync'}"


class Scene:
    """One case on this rank: makes tensors, calls the operation, and states the expected result."""

    def __init__(self, comm: mcr.Communicator, case: Case) -> None:
        self.comm = comm
        self.case = case
        self.me = comm.rank
        self.ranks = range(comm.size)
        self.shape, self.layout = SHAPES[case.shape]
        self.root = case.salt % comm.size
        self.checks: list[Check] = []

    @property
    def root_rank(self) -> int:
        """Return the root in the form of arguments: a rank of the whole job."""
        return self.comm.ranks[self.root]

    def call(self, *args: Any, **keywords: Any) -> Any:
        """Call the operation, in turns as a function and as a method, with and without a reduce op."""
        case = self.case
        keywords |= {"backend": case.backend}
        if case.name != "ring":
            keywords["async_op"] = case.async_op
        if case.op is not None:
            keywords["op"] = case.op
        name = case.name.removesuffix(" splits")
        if case.salt % 2:
            return getattr(self.comm, name)(*args, **keywords)
        group = None if case.group == "world" and case.salt % 4 else self.comm
        return getattr(mcr, name)(*args, group=group, **keywords)

    def data(self, rank: int, shape: Shape | None = None, part: int = 0) -> Array:
        """Return a rank's input."""
        chosen = self.shape if shape is None else shape
        case = self.case
        return inputs(case.dtype, rank, chosen, case.salt % 97 + 100 * part, product=case.op == "PRODUCT")

    def rows(self, count: int) -> Shape:
        """Return the case's shape with another dim 0."""
        return (count, *self.shape[1:])

    def stacked(self) -> Shape:
        """The shape that holds one tensor of each rank."""
        return (len(self.ranks), *self.shape)

    def lay(self, values: Array) -> torch.Tensor:
        """Return an input or in-place tensor with the case's layout."""
        laid = Laid(values, self.case.dtype, self.layout)
        self.checks.append(laid.spilled)
        return laid.tensor

    def lay_all(self, values: Sequence[Array]) -> list[torch.Tensor]:
        """Return a list of tensors; neighbours in memory where the layout says so."""
        if self.layout == "neighbours":
            return neighbours(values, self.case.dtype)
        return [self.lay(value) for value in values]

    def source(self, values: Array) -> torch.Tensor:
        """Return a tensor that the operation must not change."""
        tensor = self.lay(values)
        self.is_left(tensor, values)
        return tensor

    def sources(self, values: Sequence[Array]) -> list[torch.Tensor]:
        """Return tensors that the operation must not change."""
        tensors = self.lay_all(values)
        for tensor, value in zip(tensors, values, strict=True):
            self.is_left(tensor, value)
        return tensors

    def target(self, expected: Array, allowed: float | Array = 0.0) -> torch.Tensor:
        """Return a tensor of other values that must be `expected` afterwards."""
        return self.targets([expected], allowed)[0]

    def targets(self, expected: Sequence[Array], allowed: float | Array = 0.0) -> list[torch.Tensor]:
        """Return tensors of other values that must be `expected` afterwards."""
        kept = self.case.dtype
        blank = [inputs(kept, 99, value.shape, 7) for value in expected]
        tensors = self.lay_all(blank) if len(blank) > 1 else [self.lay(blank[0])]
        for tensor, value in zip(tensors, expected, strict=True):
            self.becomes(tensor, value, allowed)
        return tensors

    def becomes(self, tensor: torch.Tensor, expected: Array, allowed: float | Array = 0.0) -> None:
        """Note the expected values of a tensor after the operation."""
        self.checks.append(lambda: difference(tensor, expected, allowed))

    def is_left(self, tensor: torch.Tensor, values: Array) -> None:
        """A tensor that must not change."""
        self.checks.append(lambda: (d := difference(tensor, values)) and f"an input was changed: {d}")

    def reduced(self, shape: Shape | None = None, part: int = 0) -> tuple[Array, Array]:
        """Return the reduction of all ranks' inputs, and the permitted error."""
        op = self.case.op or "SUM"
        value = reduced([self.data(rank, shape, part) for rank in self.ranks], op)
        # Sums of the inputs are exact; a mean is rounded once, after a division in the dtype or a wider one.
        factor = 2 * unit_roundoff(self.case.dtype) * 2**0.5 if op == "AVG" else 0.0
        return value, np.abs(value) * factor


# -- operations ---------------------------------------------------------------------------------------


def _all_reduce(s: Scene) -> Any:
    tensor = s.lay(s.data(s.me))
    s.becomes(tensor, *s.reduced())
    return s.call(tensor)


def _all_reduce_coalesced(s: Scene) -> Any:
    shapes = [s.shape, (3,), s.shape]
    tensors = s.lay_all([s.data(s.me, shape, part) for part, shape in enumerate(shapes)])
    for part, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        s.becomes(tensor, *s.reduced(shape, part))
    return s.call(tensors)


def _reduce(s: Scene) -> Any:
    tensor = s.lay(s.data(s.me))
    if s.me == s.root:
        s.becomes(tensor, *s.reduced())
    else:
        s.is_left(tensor, s.data(s.me))
    return s.call(tensor, s.root_rank)


def _reduce_scatter(s: Scene) -> Any:
    value, allowed = s.reduced(part=s.me)
    return s.call(s.target(value, allowed), s.sources([s.data(s.me, part=part) for part in s.ranks]))


def _reduce_scatter_tensor(s: Scene) -> Any:
    value, allowed = s.reduced(s.stacked())
    return s.call(s.target(value[s.me], allowed[s.me]), s.source(s.data(s.me, s.stacked())))


def _reduce_scatter_v(s: Scene) -> Any:
    value, allowed = s.reduced(_uneven(s, s.me), s.me)
    parts = [s.data(s.me, _uneven(s, rank), rank) for rank in s.ranks]
    return s.call(s.target(value, allowed), s.sources(parts))


def _reduce_scatter_coalesced(s: Scene) -> Any:
    shapes = [s.stacked(), (len(s.ranks), 3)]
    wanted = [s.reduced(shape, part) for part, shape in enumerate(shapes)]
    outputs = [s.target(value[s.me], allowed[s.me]) for value, allowed in wanted]
    return s.call(outputs, [s.source(s.data(s.me, shape, part)) for part, shape in enumerate(shapes)])


def _broadcast(s: Scene) -> Any:
    tensor = s.lay(s.data(s.me))
    s.becomes(tensor, s.data(s.root))
    return s.call(tensor, s.root_rank)


def _all_gather(s: Scene) -> Any:
    return s.call(s.targets([s.data(rank) for rank in s.ranks]), s.source(s.data(s.me)))


def _all_gather_v(s: Scene) -> Any:
    parts = [s.data(rank, _uneven(s, rank)) for rank in s.ranks]
    return s.call(s.targets(parts), s.source(parts[s.me]))


def _all_gather_into_tensor(s: Scene) -> Any:
    expected = _stack([s.data(rank) for rank in s.ranks])
    return s.call(s.target(expected), s.source(s.data(s.me)))


def _all_gather_coalesced(s: Scene) -> Any:
    shapes = [s.shape, (3,)]
    outputs = [
        s.target(_stack([s.data(rank, shape, part) for rank in s.ranks])) for part, shape in enumerate(shapes)
    ]
    return s.call(outputs, [s.source(s.data(s.me, shape, part)) for part, shape in enumerate(shapes)])


def _all_to_all_single(s: Scene) -> Any:
    expected = _stack([s.data(rank, s.stacked())[s.me] for rank in s.ranks])
    return s.call(s.target(expected), s.source(s.data(s.me, s.stacked())))


def _all_to_all_single_splits(s: Scene) -> Any:
    sent = [_rows_between(s, s.me, rank) for rank in s.ranks]
    received = [_rows_between(s, rank, s.me) for rank in s.ranks]
    parts = [s.data(rank, s.rows(rows), s.me) for rank, rows in zip(s.ranks, received, strict=True)]
    own = [s.data(s.me, s.rows(rows), rank) for rank, rows in zip(s.ranks, sent, strict=True)]
    return s.call(s.target(_joined(parts)), s.source(_joined(own)), received, sent)


def _all_to_all(s: Scene) -> Any:
    received = [s.data(rank, s.rows(_rows_between(s, rank, s.me)), s.me) for rank in s.ranks]
    sent = [s.data(s.me, s.rows(_rows_between(s, s.me, rank)), rank) for rank in s.ranks]
    return s.call(s.targets(received), s.sources(sent))


def _gather(s: Scene) -> Any:
    targets = s.targets([s.data(rank) for rank in s.ranks]) if s.me == s.root else None
    return s.call(s.source(s.data(s.me)), targets, dst=s.root_rank)


def _gather_v(s: Scene) -> Any:
    parts = [s.data(rank, _uneven(s, rank)) for rank in s.ranks]
    return s.call(s.source(parts[s.me]), s.targets(parts) if s.me == s.root else None, dst=s.root_rank)


def _scatter(s: Scene) -> Any:
    parts = [s.data(s.root, part=part) for part in s.ranks]
    return s.call(s.target(parts[s.me]), s.sources(parts) if s.me == s.root else None, src=s.root_rank)


def _scatter_v(s: Scene) -> Any:
    parts = [s.data(s.root, _uneven(s, part), part) for part in s.ranks]
    return s.call(s.target(parts[s.me]), s.sources(parts) if s.me == s.root else None, src=s.root_rank)


def _ring(s: Scene) -> Any:
    """Send from every rank to the next. Sends come first on some ranks and second on others."""
    left, right = (s.comm.ranks[(s.me + step) % len(s.ranks)] for step in (-1, 1))
    source, target = s.source(s.data(s.me)), s.target(s.data((s.me - 1) % len(s.ranks)))
    backend = s.case.backend
    tag = 0 if backend == "nccl" else s.case.salt % 1000  # NCCL has none
    sends_first = s.me % 2 == 0
    if not s.case.async_op and len(s.ranks) > 1:
        # The calls block, so one rank must receive first.
        if s.me == 0:
            mcr.recv(target, left, tag, group=s.comm, backend=backend)
            mcr.send(source, right, tag, group=s.comm, backend=backend)
        else:
            mcr.send(source, right, tag, group=s.comm, backend=backend)
            mcr.recv(target, left, tag, group=s.comm, backend=backend)
        return None
    works = [s.comm.isend(source, right, tag, backend=backend)] if sends_first else []
    works.append(s.comm.irecv(target, left, tag, backend=backend))
    if not sends_first:
        works.append(s.comm.isend(source, right, tag, backend=backend))
    if s.case.async_op:
        return works
    for work in works:
        work.wait()
    return None


def _uneven(s: Scene, rank: int) -> Shape:
    """Return the shape of a rank's part: some have no rows, a scalar stays one."""
    return s.rows((2 * rank + s.case.salt) % 4) if s.shape else ()


def _rows_between(s: Scene, sender: int, receiver: int) -> int:
    return (sender + 2 * receiver + s.case.salt) % 4


def _stack(parts: Sequence[Array]) -> Array:
    return np.stack(parts)


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts)


REDUCTIONS: Final[dict[str, Callable[[Scene], Any]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_v": _reduce_scatter_v,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce_scatter_coalesced": _reduce_scatter_coalesced,
}
MOVES: Final[dict[str, Callable[[Scene], Any]]] = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_v": _all_gather_v,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single splits": _all_to_all_single_splits,
    "gather": _gather,
    "gather_v": _gather_v,
    "scatter": _scatter,
    "scatter_v": _scatter_v,
    "ring": _ring,
}
OPERATIONS: Final = {**REDUCTIONS, **MOVES}


# -- the table ----------------------------------------------------------------------------------------


def every_type(backends: Iterable[str | None], groups: Sequence[str]) -> Iterator[Case]:
    """Operation × backend × dtype × reduce op × sync and async × group; shapes take turns."""
    what = [(name, op, dtype) for name in REDUCTIONS for op, dtype in PAIRS]
    what += [(name, None, dtype) for name in MOVES for dtype in ARITHMETIC]  # type: ignore[misc]
    shapes = cycle(SHAPES)
    cells = product(what, backends, (False, True), groups)
    for salt, ((name, op, dtype), backend, async_op, group) in enumerate(cells):
        if backend is None and group != "world":
            continue  # the pipeline's choice is one of the others
        # With twelve shapes and even strides, an occasional extra step lets all combinations occur.
        if salt % 61 == 0:
            next(shapes)
        yield Case(name, backend, dtype, op, group, next(shapes), async_op, salt)


def every_shape(backends: Iterable[str | None], groups: Sequence[str]) -> Iterator[Case]:
    """Operation × backend × shape × sync and async × group, each twice: bound, then from the plan."""
    dtypes = cycle((torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64))
    cells = product(OPERATIONS, backends, SHAPES, (False, True), groups)
    for salt, (name, backend, shape, async_op, group) in enumerate(cells):
        if backend is None and group != "world":
            continue
        op, dtype = ("SUM" if name in REDUCTIONS else None), next(dtypes)
        for again in (0, 4):  # the same root in groups of 1, 2 and 4; another one in groups of 3
            yield Case(name, backend, dtype, op, group, shape, async_op, salt + again)


def some_shapes(backends: Iterable[str | None], groups: Sequence[str]) -> Iterator[Case]:
    """Return the cases of `every_shape`: by turns one mode and group per operation, backend and shape."""
    cases = every_shape(backends, groups)
    of_a_cell = groupby(cases, lambda case: (case.name, case.backend, case.shape))
    for turn, (_, cell) in enumerate(of_a_cell):
        found = list(cell)
        # Neighbours are one call, bound and then from the plan. Twelve shapes and an even number of turns:
        # one more step after each backend lets all combinations occur.
        at = (turn + turn // len(SHAPES)) % (len(found) // 2) * 2
        yield from found[at : at + 2]


def some_types(backends: Iterable[str | None], groups: Sequence[str]) -> Iterator[Case]:
    """Return the cases of `every_type`: by turns one mode and group per operation, op, dtype, backend."""
    cases = every_type(backends, groups)
    of_a_cell = groupby(cases, lambda case: (case.name, case.op, case.dtype, case.backend))
    for turn, (_, cell) in enumerate(of_a_cell):
        found = list(cell)
        yield found[(turn + turn // len(ARITHMETIC)) % len(found)]


def run_table(cases: Iterable[Case], groups: dict[str, mcr.Communicator], failures: Failures) -> None:
    """Run the cases that this rank takes part in."""
    flying: list[tuple[Case, list[Check], Any]] = []
    for case in cases:
        comm = groups[case.group]
        if comm.rank < 0:
            continue
        scene = Scene(comm, case)
        work = OPERATIONS[case.name](scene)
        if case.async_op:
            flying.append((case, scene.checks, work))
            if len(flying) == IN_FLIGHT:
                _land(flying, failures)
        else:
            failures.check(str(case), _problem(scene.checks) or _returned(work))
    _land(flying, failures)


def _land(flying: list[tuple[Case, list[Check], Any]], failures: Failures) -> None:
    """Wait for the operations in flight, the last one first."""
    for case, checks, work in reversed(flying):
        for each in work if isinstance(work, list) else [work]:
            each.wait()
        failures.check(str(case), _problem(checks))
    flying.clear()


def _problem(checks: Sequence[Check]) -> str | None:
    return next((problem for check in checks if (problem := check())), None)


def _returned(work: object) -> str | None:
    return None if work is None else f"a synchronous call returned {work!r}"


def make_groups(comm: mcr.Communicator) -> dict[str, mcr.Communicator]:
    """Return the world, a sub-group in reversed order, one that overlaps it, and the parts of a split."""
    size = comm.size
    groups = {"world": comm, "reversed": mcr.new_group([0] if size == 1 else list(range(size))[::-1][:2])}
    if size > 1:
        groups["overlapping"] = mcr.new_group([0, size - 1])
        part = comm.split(color=min(comm.rank, 1), key=-comm.rank)
        assert part is not None
        groups["split"] = part
    return groups


def types_table(comm: mcr.Communicator, backends: Sequence[str | None], failures: Failures) -> None:
    """Run `every_type`."""
    groups = make_groups(comm)
    run_table(every_type(backends, list(groups)), groups, failures)


def some_types_table(comm: mcr.Communicator, backends: Sequence[str | None], failures: Failures) -> None:
    """Run `some_types`."""
    groups = make_groups(comm)
    run_table(some_types(backends, list(groups)), groups, failures)


def shapes_table(comm: mcr.Communicator, backends: Sequence[str | None], failures: Failures) -> None:
    """Run `every_shape`."""
    groups = make_groups(comm)
    run_table(every_shape(backends, _two_of(groups)), groups, failures)


def some_shapes_table(comm: mcr.Communicator, backends: Sequence[str | None], failures: Failures) -> None:
    """Run `some_shapes` on the named backends; the pipeline's own choice is one of them."""
    groups = make_groups(comm)
    named = [backend for backend in backends if backend is not None]
    run_table(some_shapes(named, _two_of(groups)), groups, failures)


def _two_of(groups: Iterable[str]) -> list[str]:
    return [name for name in groups if name in ("world", "reversed")]


TABLES: Final = {
    "types": types_table,
    "some types": some_types_table,
    "shapes": shapes_table,
    "some shapes": some_shapes_table,
}
