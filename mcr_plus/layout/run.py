"""Run a plan: local tensors at every step, copies, and operations in flight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final

import torch

from mcr_plus.backends.emulation import divide
from mcr_plus.communicator.calls import Call, CallOptions
from mcr_plus.core.message import Message
from mcr_plus.core.work import JointWork, Work
from mcr_plus.layout.buffers import Buffers, Chain, Repeated
from mcr_plus.layout.rounds import ExchangeRound, ExchangeStage, Locals, Strided, Transfer, copy_all, views_of

if TYPE_CHECKING:
    from mcr_plus.core.kinds import Kind
    from mcr_plus.core.message import Extras
    from mcr_plus.layout.mover import Mover
    from mcr_plus.pipeline.stage import Issue

TAG: Final = "redistribute"
_torch: Any = torch  # its type stubs lack the operations on lists
_HALF: Final = (torch.float16, torch.bfloat16)
_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _extreme(
    combine: Callable[..., Any],
    of_equal: Callable[..., torch.Tensor],
    targets: list[torch.Tensor],
    values: list[torch.Tensor],
) -> None:
    """Compute MIN or MAX like all libraries: propagate NaN as torch does, but order zeros by sign.

    `of_equal` combines the bits of equal numbers, which differ only in the sign of zeros.
    """
    equal: list[torch.Tensor] = []
    if targets[0].is_floating_point():
        bits = _BITS[targets[0].itemsize]
        for target, value in zip(targets, values, strict=True):
            both = of_equal(target.view(bits), value.view(bits)).view(target.dtype)
            equal.append(torch.where(target == value, both, float("nan")))
    combine(targets, values)
    for target, both in zip(targets, equal, strict=False):
        torch.where(both == target, both, target, out=target)


def _add(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Add complex numbers part by part: torch multiplies them by 1 first, which turns inf into NaN."""
    _torch._foreach_add_([_parts(each) for each in targets], [_parts(each.resolve_conj()) for each in values])


def _bitwise(combine: Callable[..., Any], targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        combine(target, value, out=target)


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


_REDUCE: Final[dict[str, Callable[..., Any]]] = {
    "SUM": _add,
    "AVG": _add,
    "PRODUCT": _torch._foreach_mul_,
    "MAX": partial(_extreme, _torch._foreach_maximum_, torch.bitwise_and),
    "MIN": partial(_extreme, _torch._foreach_minimum_, torch.bitwise_or),
    "BAND": partial(_bitwise, torch.bitwise_and),
    "BOR": partial(_bitwise, torch.bitwise_or),
    "BXOR": partial(_bitwise, torch.bitwise_xor),
}


class PlanRun:
    """One run of a plan: its local tensors at every stage, and the operations in flight."""

    def __init__(self, mover: Mover, sources: Locals, outputs: Locals, chain_: Chain | None = None) -> None:
        self._mover = mover
        self._outputs = outputs
        like = next((each for each in chain(outputs, sources) if each is not None), None)
        device = mover.device if like is None else like.device
        self._before = [] if chain_ is None else chain_.before
        self._taken = None if chain_ is not None else mover.pool.take(mover.nbytes, device)
        space = self._taken if chain_ is None else chain_.space
        assert space is not None
        buffers = space.buffers.get(mover.key)
        if buffers is None:
            buffers = space.buffers[mover.key] = Buffers(mover, space)
        self.buffers = buffers
        self._device = device
        for index in mover.gaps:
            if (output := outputs[index]) is not None:
                output.zero_()
        self._stores: list[Locals] = [sources]
        for stage in mover.stages:
            self._stores.append(outputs if stage.is_last else self._store(stage, device))

    def _store(self, stage: ExchangeStage, device: torch.device) -> Locals:
        """Return the tensors that a step writes: outputs, new tensors, or the previous step's tensors."""
        mover, found = self._mover, list[torch.Tensor | None]()
        for index, layout in enumerate(stage.targets):
            if layout is None:
                found.append(self._stores[-1][index])
            elif layout.inside is not None or layout is mover.plan.specs[index].target:
                found.append(self._outputs[index])
            else:
                shape = layout.local_shape(mover.rank)
                found.append(None if shape is None else torch.empty(shape, dtype=mover.dtype, device=device))
        return found

    def run_at_once(self) -> None:
        """Run a plan of at most one operation, without a handle."""
        (stage,) = self._mover.stages
        (each,) = stage.rounds
        self._keep(0)
        if stage.is_idle:
            self._reduce(0, each, 0)
            return
        if stage.by_messages:
            self._issue_messages(0, each, 0, {}).wait()
            self._unpack(0, each, 0)
            return
        self._pack(0, each, 0)
        issue, message = self._operation(0, each, 0, False, {})
        issue.run(message)
        self._unpack(0, each, 0)

    def repeated(self, tensors: Locals) -> Repeated:
        """Record this run of one operation. The record keeps none of `tensors` (outputs first) alive."""
        (stage,) = self._mover.stages
        (each,) = stage.rounds
        number = len(self._stores[1])
        # `data` is a separate tensor in the same memory: views of `data` do not keep the original alive.
        aliases = [None if local is None else local.data for local in tensors]
        self._stores = [aliases[number:], aliases[:number]]
        packed, unpacked = self.buffers.of(each, 0)
        before, after = self._stores
        copies = [(views_of(stage.kept.tos, after), views_of(stage.kept.froms, before)), ([], []), ([], [])]
        if each.sent_at is None:
            copies[1] = self.buffers.views(each.sent, packed), views_of(each.sent, before)
        if each.received_at is None:
            copies[2] = views_of(each.received, after), self.buffers.views(each.received, unpacked)
        issue, message = self._operation(0, each, 0, False, {})
        return Repeated(self.buffers, tensors, copies, issue, message)

    def start(self) -> list[Work]:
        """Issue all operations; returns their handles. Outputs are complete when all handles are."""
        if self._mover.waves:
            return self._start_in_waves()
        works: list[Work] = []
        last: list[Work] = []  # operations of the previous step
        slots = self._mover.slots
        for number, stage in enumerate(self._mover.stages):
            mine: list[Work] = []
            for index, each in enumerate(stage.rounds if not stage.is_idle else ()):
                waits = last or self._before
                if index >= slots:
                    waits = [*waits, mine[index - slots]]
                mine.append(self._issue(number, each, index % slots, waits))
            _after(last, partial(self._keep, number))
            if stage.is_idle:
                for each in stage.rounds:
                    _after(last, partial(self._reduce, number, each, 0))
            else:
                works += mine
                last = mine
        return works

    def _start_in_waves(self) -> list[Work]:
        first, second = (stage.rounds for stage in self._mover.stages)
        sent: list[Work] = []
        gathered: list[Work] = []
        for wave, each in enumerate(first):
            sent.append(self._issue(0, each, wave, sent[-1:] or self._before))
            if wave == 0:
                self._keep(0)
            else:
                gathered.append(self._issue(1, second[wave - 1], wave - 1, [sent[wave - 1]]))
        gathered.append(self._issue(1, second[-1], len(second) - 1, sent[-1:]))
        return [*sent, *gathered]

    def finish(self) -> None:
        """Copy boxes that are listed twice, and return the buffers to the pool."""
        for pairs in self._mover.twins:
            pairs.copy(self._outputs, self._outputs)
        if self._taken is not None:
            self._mover.pool.give_back(self._taken)

    def _issue(self, number: int, each: ExchangeRound, slot: int, waits: list[Work]) -> Work:
        extras: Extras = {}
        if waits:
            extras["after"] = waits[0] if len(waits) == 1 else JointWork(waits, TAG, nbytes=0)
        if self._mover.stages[number].by_messages:
            work = self._issue_messages(number, each, slot, extras)
            if each.received_at is None or each.sums:
                work.then(partial(self._unpack, number, each, slot))
            return work
        if waits:
            if each.sent_at is None:
                extras["prepare"] = partial(self._pack, number, each, slot)
        else:
            self._pack(number, each, slot)
        issue, message = self._operation(number, each, slot, True, extras)
        work = issue.start(message)
        if each.received_at is None or each.sums:
            work.then(partial(self._unpack, number, each, slot))
        return work

    def _operation(
        self, number: int, each: ExchangeRound, slot: int, async_op: bool, extras: Extras
    ) -> tuple[Issue, Message]:
        """Return the exchange of a round, bound on first use, with flat, contiguous, disjoint tensors."""
        packed, unpacked = self.buffers.of(each, slot)
        source = self._buffer(each.sent, each.sent_at, each.sent_numel, number, packed)
        target = self._buffer(each.received, each.received_at, each.received_numel, number + 1, unpacked)
        extras["input_counts"], extras["output_counts"] = each.input_counts, each.output_counts
        key = (async_op, self._device.type)
        bound = each.bound.get(key)
        if bound is None:
            mover = self._mover
            stages = mover.stages
            called = f"{mover.plan.call}, step {number + 1} of {len(stages)}, round {each.place}"
            call = Call(
                "all_to_all_v", (source,), (target,), (), None, extras=extras, called=called,
                counts_agreed=True,
            )  # fmt: skip
            exact: CallOptions = {**mover.options, "compress": False}
            options = mover.options if stages[number].is_lossy else exact
            ready = mover.comm.prepared(call, async_op, options)
            bound = each.bound[key] = (ready.message.signature, ready.issue)
        signature, issue = bound
        return issue, Message(signature, (source,), (target,), **extras)

    def _issue_messages(self, number: int, each: ExchangeRound, slot: int, extras: Extras) -> Work:
        """Issue the messages of a round, receives first. `extras`: holds `after`, except in the first
        step."""
        mover = self._mover
        packed, unpacked = self.buffers.of(each, slot)
        tag = mover.next_match_tag()
        works = []
        for part in each.messages:
            boxes, at, total = (
                (each.sent, each.sent_at, each.sent_numel)
                if part.is_send
                else (each.received, each.received_at, each.received_numel)
            )
            store, buffer = (number, packed) if part.is_send else (number + 1, unpacked)
            tensor = self._buffer(boxes, at, total, store, buffer)[part.begin : part.end]
            own: Extras = {**extras, "peer": part.peer, "match_tag": tag}
            if part.is_send and at is None:
                pack = partial(self._pack_part, part, number, packed)
                if extras:
                    own["prepare"] = pack
                else:
                    pack()
            inputs, outputs = ((tensor,), ()) if part.is_send else ((), (tensor,))
            if part.bound is None:
                kind: Kind = "send" if part.is_send else "recv"
                call = Call(kind, inputs, outputs, tensor.shape, tensor.numel(), extras=own)
                exact: CallOptions = {**mover.options, "compress": False}
                ready = mover.comm.prepared(call, True, exact)
                part.bound = ready.message.signature, ready.issue
            signature, issue = part.bound
            works.append(issue.start(Message(signature, inputs, outputs, **own)))
        return JointWork(works, TAG, nbytes=0)

    def _pack_part(self, part: Transfer, number: int, packed: torch.Tensor) -> None:
        copy_all(self.buffers.views(part.boxes, packed), views_of(part.boxes, self._stores[number]))

    def _buffer(
        self, boxes: list[Strided], at: int | None, numel: int, store: int, buffer: torch.Tensor
    ) -> torch.Tensor:
        """Return the tensor that an operation sends or receives: a range of a local tensor, or a buffer."""
        if at is None:
            return buffer
        local = self._stores[store][boxes[0].tensor] if boxes else None
        return buffer[:0] if local is None else local.view(-1)[at : at + numel]

    def _pack(self, number: int, each: ExchangeRound, slot: int) -> None:
        if each.sent_at is None:
            views = self.buffers.views(each.sent, self.buffers.of(each, slot)[0])
            copy_all(views, views_of(each.sent, self._stores[number]))

    def _unpack(self, number: int, each: ExchangeRound, slot: int) -> None:
        if each.received_at is None and each.received:
            views = self.buffers.views(each.received, self.buffers.of(each, slot)[1])
            copy_all(views_of(each.received, self._stores[number + 1]), views)
        self._reduce(number, each, slot)

    def _keep(self, number: int) -> None:
        """Copy boxes that this rank already holds into the local tensors of the next layout."""
        self._mover.stages[number].kept.copy(self._stores[number], self._stores[number + 1])

    def _reduce(self, number: int, each: ExchangeRound, slot: int) -> None:
        """Reduce the addends of each tensor in index order, which is the same on all ranks."""
        for addends in each.sums:
            result = self._stores[number + 1][addends.tensor]
            if result is None:
                continue
            into = result
            # Sum in float32 and round once. A mean of two may be finite although their sum is not.
            if result.dtype in _HALF and len(addends.addends) > 1 + (addends.op != "AVG"):
                into = torch.zeros_like(result, dtype=torch.float32)  # some addends may lack elements
            for addend, (received, kept) in enumerate(addends.addends):
                targets = [box.of(into) for box in received]
                values = self.buffers.views(received, self.buffers.of(each, slot)[1]).copy()
                targets += [to.of(into) for _, to in kept]
                values += views_of([one for one, _ in kept], self._stores[number])
                if addend == 0 and not addends.onto:
                    copy_all(targets, values)
                elif targets:
                    values = [value.to(into.dtype) for value in values]
                    _REDUCE[addends.op](targets, values)
            if addends.op == "AVG":
                divide(into, len(addends.addends))
            if into is not result:
                result.copy_(into)


def _after(works: list[Work], function: Callable[[], None]) -> None:
    """Call a function when all operations are complete, in any order; immediately if there are none."""
    if not works:
        function()
        return
    done = count(1)

    def one_more() -> None:
        if next(done) == len(works):
            function()

    for work in works:
        work.then(one_more)
