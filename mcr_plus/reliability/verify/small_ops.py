"""Small verified operations of one step: one call of compiled code does all work after the step.

These operations move data, or reduce values that a rank gathers and reduces itself. If checksum rows are in
shared memory and the library is polled, an operation may end in its starting call.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mcr_plus.backends.shm.reductions import kernels_for
from mcr_plus.core.kinds import REDUCING, VECTOR
from mcr_plus.core.message import Message
from mcr_plus.reliability.verify import row_kernels as words
from mcr_plus.reliability.verify.checksum_table import (
    GOT,
    LARGE,
    SENT,
    SENT_SUMS,
    ChecksumPlan,
    ChecksumTable,
    Flows,
)
from mcr_plus.reliability.verify.reducing import EXACT, SMALL, reduction
from mcr_plus.reliability.verify.row_kernels import AGREE, DIFFER, MISSING, check_sent, settle
from mcr_plus.reliability.verify.rows import SharedRows
from mcr_plus.reliability.verify.verified_run import Begins, derived, movement
from mcr_plus.waiting.policy import FIRST_POLLS, GLANCE

if TYPE_CHECKING:
    from mcr_plus.backends.base import Poll
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Signature
    from mcr_plus.reliability.verify.rows import RowExchange
    from mcr_plus.reliability.verify.steps import VerifiedStep, VerifiedSteps
    from mcr_plus.reliability.verify.verified_run import Judge, VerifiedRun

_Tensors = tuple[torch.Tensor, ...]

WHOLE: Final = 8192
"""Largest all_reduce or reduce in bytes for which a rank gathers all values and reduces them itself."""
_STEPS: Final = {"all_reduce": "all_gather", "reduce": "gather", "reduce_scatter": "all_to_all"}
_MOST: Final = {"all_reduce": WHOLE, "reduce": WHOLE, "reduce_scatter": SMALL}  # bytes
_TRIES: Final = 400  # checks of other ranks' rows in a synchronous call: a few microseconds


class SmallOperations:
    """Binds small operations of a library of a group."""

    def __init__(self, steps: VerifiedSteps, group: Group, rows: RowExchange, judge: Judge) -> None:
        self._steps, self._group, self._rows, self._judge = steps, group, rows, judge

    def bind(self, signature: Signature) -> Begins | None:
        """Return the functions that begin small operations; None if large, or if they have several steps."""
        kind, nbytes = signature.kind, signature.nbytes
        if kind in VECTOR or not nbytes or nbytes >= LARGE:
            return None
        if kind not in REDUCING:
            moved = _Moved(self._steps.bind(signature), signature, self._group, self._rows, self._judge)
        elif nbytes <= _MOST[kind]:
            every = nbytes if kind == "reduce_scatter" else self._group.size * nbytes
            step = derived(signature, _STEPS[kind], nbytes=every, root=signature.root)
            moved = _Reduced(self._steps.bind(step), signature, self._group, self._rows, self._judge)
        else:
            return None
        backend = self._steps.backend
        if not (backend.host_driven and isinstance(self._rows, SharedRows)):
            return Begins(moved.begin)
        polls = 1 if signature.async_op else GLANCE if backend.rings else FIRST_POLLS
        return Begins(moved.begin, partial(moved.at_once, range(polls)))


class _Moved:
    """Operations of one signature that move data."""

    combine: tuple[int, int, int, int] = 0, 0, 0, 0
    """Reduction kernels for the received data, elements of each rank, and bytes of one, see `settle`."""
    by_torch: bool = False
    """True if torch reduces the received data, after their checksums are taken."""

    def __init__(
        self, step: VerifiedStep, signature: Signature, group: Group, rows: RowExchange, judge: Judge
    ) -> None:
        self._step, self.signature, self.group, self._rows, self._judge = step, signature, group, rows, judge
        self._free: list[_Use] = []  # one per concurrent operation

    def plan(self, message: Message) -> ChecksumPlan:
        """Return the plan of this rank's sent and received data."""
        return movement(self.group.rank, self.group.size, message)

    def inner(self, message: Message) -> Message:
        """Return the message of the step."""
        return Message(self._step.signature, message.inputs, message.outputs)

    def settle(self, use: _Use, outputs: _Tensors) -> int:
        """Finish an operation after its step, and return the verdict, see `row_kernels.settle`."""
        found: int = settle(use.at, outputs[0].data_ptr() if outputs else 0, 0)
        return found

    def begin(self, message: Message) -> VerifiedRun:
        """Begin an operation, which may have to wait for other operations, see `Begin`."""
        return self._run(self._begun(message), self.inner(message), message.outputs)

    def at_once(self, polls: range, message: Message) -> VerifiedRun | None:
        """Run an operation as far as possible within `polls` polls, see `AtOnce`."""
        use, step, inner, outputs = self._begun(message), self._step, self.inner(message), message.outputs
        if (gate := step.gate(inner)) is not None:
            return self._run(use, inner, outputs, gate)
        poll = step.start(inner)
        for _ in polls:
            if poll():
                break
        else:
            return self._ended(use, poll, outputs)
        found = self.settle(use, outputs)
        self._rows.ring()
        if found != AGREE:
            return self._agreed(use, found)
        self._free.append(use)
        return None

    def _begun(self, message: Message) -> _Use:
        use = self._free.pop() if self._free else _Use(self, self.plan(message), self._rows)
        if use.sends:
            check_sent(use.at, (message.inputs or message.outputs)[0].data_ptr())
        return use

    def _run(self, use: _Use, inner: Message, outputs: _Tensors, gate: Poll | None = None) -> VerifiedRun:
        gate = gate or self._step.gate(inner)
        if gate is not None:
            yield gate
        yield from self._ended(use, self._step.start(inner), outputs)

    def _ended(self, use: _Use, poll: Poll, outputs: _Tensors) -> VerifiedRun:
        yield poll
        found = self.settle(use, outputs)
        self._rows.ring()
        yield from self._agreed(use, found)

    def _agreed(self, use: _Use, found: int) -> VerifiedRun:
        rows = self._rows
        if found == MISSING:
            yield rows.poll() if isinstance(rows, SharedRows) else rows.post(use.ledger.row)
        if found == DIFFER or (found == MISSING and not rows.agree()):
            self._judge(self.signature, use.ledger)
        self._free.append(use)


class _Reduced(_Moved):
    """Reductions in which ranks gather values and reduce them themselves.

    In an all_reduce every rank reduces all values, in a reduce_scatter its part, and in a reduce only the
    root reduces.
    """

    def __init__(
        self, step: VerifiedStep, signature: Signature, group: Group, rows: RowExchange, judge: Judge
    ) -> None:
        super().__init__(step, signature, group, rows, judge)
        kind, dtype, size, root = signature.kind, signature.dtype, group.size, signature.root or 0
        assert dtype is not None
        assert signature.reduce_op is not None
        nbytes = (signature.nbytes or 0) // (size if kind == "reduce_scatter" else 1)
        self._is_target = kind != "reduce" or group.rank == root
        self._parts = torch.empty(
            size if self._is_target else 0, nbytes // dtype.itemsize, dtype=dtype, device="cpu"
        )
        self._gathered = (self._parts.view(-1),) if self._is_target else ()
        self._place, self._reduce = self._parts.data_ptr(), None
        if self._is_target and dtype in EXACT:
            kernels = kernels_for(dtype, signature.reduce_op)
            self.combine = kernels.combine, kernels.divide, self._parts.shape[1], dtype.itemsize
        elif self._is_target:
            self._reduce, self.by_torch = reduction(signature), True
        self._plan = ChecksumPlan(size, self._ends(kind, nbytes, size, root))

    def _ends(self, kind: str, nbytes: int, size: int, root: int) -> dict[int, Flows]:
        """Return this rank's sent and received data; `nbytes` to or from each rank."""
        got = Flows.of_parts([nbytes] * size)
        if kind == "reduce_scatter":
            return {SENT: got, GOT: got}
        if kind == "reduce":
            sent = {SENT: Flows.one(root, nbytes)}
            return {**sent, GOT: got} if self._is_target else sent
        # The sums of all ranks are equal, as if each rank had sent its sums to all ranks.
        return {SENT: Flows.one(0, nbytes, size), GOT: got, SENT_SUMS: Flows.one(0, nbytes, 2 * size)}

    def plan(self, message: Message) -> ChecksumPlan:  # noqa: ARG002
        return self._plan

    def inner(self, message: Message) -> Message:
        (value,) = message.inputs
        return Message(self._step.signature, (value if value.dim() == 1 else value.view(-1),), self._gathered)

    def settle(self, use: _Use, outputs: _Tensors) -> int:
        if self._reduce is not None:
            use.ledger.take(GOT, self._place)
            self._reduce(self._parts, outputs[0].view(-1))
        found: int = settle(use.at, self._place, outputs[0].data_ptr() if self._is_target else 0)
        return found


class _Use:
    """Checksums of one operation, and its words for `settle`."""

    __slots__ = ("_words", "at", "ledger", "sends")

    def __init__(self, moved: _Moved, plan: ChecksumPlan, rows: RowExchange) -> None:
        self.ledger = ledger = ChecksumTable(plan, moved.signature.digest())
        flows, count, checksums, row = ledger.joined
        own: Any = np.zeros(words.WORDS, np.int64)
        ends = {words.SENT_CUT: SENT, words.GOT_CUT: GOT, words.SUMS_CUT: SENT_SUMS}
        if moved.by_torch:
            del ends[words.GOT_CUT]
        for word, end in ends.items():
            own[word : word + 3] = ledger.cut(end)
        own[words.CHECKSUMS : words.ROW_WORDS + 1] = checksums, flows, count, row, len(ledger.row)
        if isinstance(rows, SharedRows):
            own[words.COUNTER : words.STRIDE + 1] = rows.addresses
        tries = 0 if moved.signature.async_op else _TRIES
        own[words.RANK : words.TRIES + 1] = moved.group.rank, plan.ranks, *moved.combine, tries
        self._words, self.at, self.sends = own, own.ctypes.data, SENT in plan.cuts
