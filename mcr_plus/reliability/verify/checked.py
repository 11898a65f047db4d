"""Shared-memory operations with kernels that move data and take checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mcr_plus.backends.shm import collectives_state as plain
from mcr_plus.backends.shm.backend import SharedMemoryChannel
from mcr_plus.backends.shm.collectives_state import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_WHOLE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
)
from mcr_plus.backends.shm.queue import done_at_once
from mcr_plus.core.kinds import REDUCING, VECTOR
from mcr_plus.core.message import Message
from mcr_plus.kernels.checksum_sizes import BLOCK, CHAIN_BYTES
from mcr_plus.reliability.verify import checked_kernels as kernels
from mcr_plus.reliability.verify.checksum_table import (
    GOT,
    GOT_SUMS,
    SENT,
    SENT_SUMS,
    ChecksumPlan,
    ChecksumTable,
    Flows,
)
from mcr_plus.reliability.verify.row_kernels import AGREE
from mcr_plus.reliability.verify.rows import SharedRows
from mcr_plus.reliability.verify.verified_run import Begins

if TYPE_CHECKING:
    from mcr_plus.backends.base import Poll
    from mcr_plus.backends.shm.queue import Run
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Signature
    from mcr_plus.reliability.verify.rows import RowExchange
    from mcr_plus.reliability.verify.steps import VerifiedSteps
    from mcr_plus.reliability.verify.verified_run import Judge, VerifiedRun

AREA: Final = 1 << 20
"""Most bytes of a slot to use: this many stay in the core's cache until a peer takes them."""


class Checking:
    """Binds operations to the checksum kernels of shared memory, where a kernel exists."""

    def __init__(self, steps: VerifiedSteps, group: Group, rows: RowExchange, judge: Judge) -> None:
        self._channel = steps.channel if isinstance(steps.channel, SharedMemoryChannel) else None
        self._rows = rows if isinstance(rows, SharedRows) else None
        self._group, self._judge = group, judge

    def bind(self, signature: Signature) -> Begins | None:
        """Return the functions that begin operations of a signature; None if they must run as steps."""
        channel, rows, judge = self._channel, self._rows, self._judge
        if channel is None or rows is None or not signature.nbytes or signature.kind in VECTOR:
            return None
        if signature.algorithm is not None and signature.kind not in REDUCING:
            return None  # it runs unchanged, as a step
        state = channel.direct(signature)
        if int(state[plain.KIND]) not in kernels.KINDS or not fit(state):
            return None
        ledger = ChecksumTable(plan(state), signature.digest())
        state = extended(state, ledger, rows)
        start = self.run(channel, signature, state)

        verdict = memoryview(state)[kernels.VERDICT :]

        # Operations run one at a time, so each may use the state, the ledger and the rows.
        def at_once(message: Message) -> VerifiedRun | None:
            inputs, outputs = message.inputs, message.outputs
            target = outputs[0].data_ptr() if outputs else 0
            source = inputs[0].data_ptr() if inputs else target
            poll = start(source, target, (inputs, outputs, ledger))  # alive: the queue writes to them
            if poll is done_at_once and verdict[0] == AGREE:
                return None
            return ended(poll)

        def ended(poll: Poll) -> VerifiedRun:
            yield poll
            if verdict[0] != AGREE:
                judge(signature, ledger)

        def begin(message: Message) -> VerifiedRun:
            return later(Message(signature, message.inputs, message.outputs))  # drops its tensors

        def later(message: Message) -> VerifiedRun:
            yield from at_once(message) or ()

        return Begins(begin, at_once)

    def run(self, channel: SharedMemoryChannel, signature: Signature, state: Any) -> Run:
        """Return the start of operations of a state."""
        return channel.run_by(signature, state, kernels.begin, kernels.advance)


def fit(state: Any) -> bool:
    """Round the slices of a state to whole blocks; return False if a slot is too small for a block."""
    kind, ranks, width = (int(state[word]) for word in (plain.KIND, plain.RANKS, plain.WIDTH))
    area = min(AREA, int(state[plain.AREA]))
    # Each slice has equally many blocks per flow; a slot holds one flow per rank, or one for all.
    flows = ranks if kind in (ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER) else 1
    blocks = area // (flows * BLOCK)
    if not blocks:
        return False
    elements = blocks * BLOCK // width * (ranks if kind == ALL_REDUCE else 1)
    state[plain.SLICE], state[plain.PLACES] = elements, 1
    state[plain.SLICES] = -(-int(state[plain.COUNT]) // elements)
    return True


def plan(state: Any) -> ChecksumPlan:
    """Return the plan of this rank's sent and received data for a state after `fit`."""
    kind, ranks, me, root, count, width, elements, slices = (
        int(state[word])
        for word in (
            plain.KIND, plain.RANKS, plain.RANK, plain.ROOT, plain.COUNT, plain.WIDTH, plain.SLICE,
            plain.SLICES,
        )
    )  # fmt: skip
    nbytes, ends = count * width, dict[int, Flows]()
    others = [rank for rank in range(ranks) if rank != me]
    if kind == ALL_REDUCE:
        left, line = count - (slices - 1) * elements, 64 // width
        part = -(-left // (ranks * line)) * line
        of = [
            width * ((slices - 1) * elements // ranks + max(0, min(part, left - rank * part)))
            for rank in range(ranks)
        ]
        ends[SENT] = _flows({rank: of[rank] for rank in others})
        ends[GOT] = _flows(dict.fromkeys(others, of[me]))
        ends[SENT_SUMS] = Flows.one(0, of[me], ranks)
        ends[GOT_SUMS] = Flows.of_parts(of)
    elif kind == ALL_REDUCE_WHOLE:
        ends[SENT], ends[GOT] = Flows.one(0, nbytes, ranks), Flows.of_parts([nbytes] * ranks)
        ends[SENT_SUMS] = Flows.one(0, nbytes, 2 * ranks)  # equal on all ranks
    elif kind == REDUCE_SCATTER:
        ends[SENT], ends[GOT] = (_flows(dict.fromkeys(others, nbytes)) for _ in range(2))
    elif kind == BROADCAST:
        ends[GOT] = Flows.one(root, nbytes)
        if me == root:
            ends[SENT] = Flows.one(0, nbytes, ranks)
    else:
        ends[SENT] = Flows.one(0, nbytes, ranks) if kind == ALL_GATHER else Flows.of_parts([nbytes] * ranks)
        ends[GOT] = Flows.of_parts([nbytes] * ranks)
    return ChecksumPlan(ranks, ends)


def _flows(nbytes: dict[int, int]) -> Flows:
    return Flows([(rank, 1) for rank in nbytes], [0] * len(nbytes), list(nbytes.values()))


def extended(state: Any, ledger: ChecksumTable, rows: SharedRows) -> Any:
    """Return the state with the words of `checked_kernels` and memory for checksum chains at its end."""
    ranks, width = int(state[plain.RANKS]), int(state[plain.WIDTH])
    chains = kernels.TABLE + 4 * ranks
    whole: Any = np.zeros(chains + (ranks + 1) * CHAIN_BYTES // 8, np.int64)
    whole[: len(state)] = state
    flows, count, checksums, row = ledger.joined
    whole[kernels.COUNTER], whole[kernels.ROWS], whole[kernels.STRIDE] = rows.addresses
    whole[kernels.CHAINS] = whole.ctypes.data + 8 * chains
    shared = ranks if state[plain.KIND] == ALL_REDUCE else 1
    whole[kernels.STEP] = int(state[plain.SLICE]) // shared * width // BLOCK
    whole[kernels.FLOWS], whole[kernels.FLOW_COUNT] = flows, count
    whole[kernels.CHECKSUMS], whole[kernels.ROW] = checksums, row
    whole[kernels.ROW_WORDS] = len(ledger.row)
    for first, _, word, _ in ledger.plan.flows.tolist():
        whole[kernels.TABLE + word] = checksums + 8 * first
    return whole
