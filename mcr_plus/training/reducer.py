"""Average gradients over ranks during the backward pass.

Gradients are stored in flat buckets, and `param.grad` is a view. The all_reduce of a bucket starts when its
last gradient is ready, in the same order of buckets on all ranks, and the end of the backward pass waits for
all buckets. So `param.grad` is the mean over ranks when `backward()` returns.

The first pass uses buckets in reverse order of the parameters. The order in which the gradients of rank 0
became ready is then broadcast, and determines the buckets from then on (as in DDP; Li et al., VLDB 2020).
With `fuse: {plan: exact}` rank 0 also measures when gradients become ready, and plans the buckets a few
passes later, so that the last all_reduce ends as early as possible. For `plan: auto`, see `auto_plan`.

Long because the phases of a pass share its state.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd import Variable

from mcr_plus.communicator.calls import Compress
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.gradient_policy import TAG, Choice, policy_for, warn_of_unmatched
from mcr_plus.compression.policy import largest_alignment
from mcr_plus.core.kinds import AVG, MAX, SUM, ReduceOp
from mcr_plus.core.units import format_size
from mcr_plus.core.work import Work
from mcr_plus.errors import InvalidArgument, McrError
from mcr_plus.fusion.bucket import Bucket, BucketEntry, by_size, packed
from mcr_plus.fusion.options import FuseOptions
from mcr_plus.training.bucket_plan import all_reduce_costs, default_limits, earliest, first_waiting
from mcr_plus.training.flat import Flat, ParameterSlot, add_to_sums, flat_of, move_into_bucket
from mcr_plus.training.trials import trials

if TYPE_CHECKING:
    from mcr_plus.bucketing.auto_plan import AutoPlan
    from mcr_plus.bucketing.compiled import CompiledCall
    from mcr_plus.bucketing.saved import SavedPlan

_log = logging.getLogger("mcr_plus")
_MEASURED_PASS: Final = 3  # `plan: exact` uses the times of this pass; earlier ones allocate and warm up
_WHOLE, _CAPTURED = 1, 2  # flags in `_outcome`
_PARAMS: Final = 3  # index of the first parameter in `_outcome`
_ALIGNMENT: Final = 64  # bytes: a cache line, and the width of the widest vector register


# Reducers by the identity of the parameter: an attribute would be part of copies and pickles.
_reducers: dict[int, weakref.ref[Reducer]] = {}


def reducer_of(param: torch.nn.Parameter) -> Reducer | None:
    """Return the reducer that averages the gradient of a parameter; None if there is none."""
    reducer = _reducers.get(id(param), lambda: None)()
    is_current = reducer is not None and any(slot.param is param for slot in reducer._slots)
    return reducer if is_current else None


class Reducer:
    """Averages the gradients of some parameters over the ranks of `comm` in every backward pass.

    All ranks pass the same parameters in the same order. After a backward pass that raised with some
    gradients ready, `recover` sends the remaining buckets and a failure flag, so that the peers raise instead
    of waiting for this rank.

    Operations are issued in a separate group. A rank without a gradient for some parameter sends that bucket
    late, which must not change the order of the program's own operations. `branch`: its name, or None.

    `exact`: an `ExactPasses`, if passes are added up exactly. A parameter then has no gradient from pass to
    pass.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, torch.nn.Parameter]],
        comm: Communicator,
        branch: str | None = None,
        *,
        exact: Any = None,
    ) -> None:
        self._group = comm.name
        for param in {id(param): param for _, param in params}.values():
            if (before := reducer_of(param)) is not None:
                before.detach()
        self.comm = comm = comm.branch_named(branch)
        self.syncing, self.keeps, self.detached, config = True, False, False, comm.config
        self.exact = exact
        if exact is not None:
            exact.reset()
        fuse = comm.stage_options("fuse")
        named = isinstance(fuse, FuseOptions)
        self._limits = fuse if named else default_limits(comm, [param for _, param in params])
        self._alignment = largest_alignment(config, self._limits.codecs)  # in elements
        self._slots = [
            ParameterSlot(
                index,
                name,
                param,
                policy_for(config, name, param.shape, param.nbytes, param.dtype, TAG, comm.size),
            )
            for index, (name, param) in enumerate(params)
        ]
        if comm.rank == 0:
            warn_of_unmatched(config, [name for name, _ in params])
        self._order: list[int] = []
        self._times: list[float] = []  # ready times of the gradients in `_order`, in seconds
        self._arranged = False
        self._seen: list[int] = []  # gradients in the order of the buckets after the first pass
        self._final = False  # True if the buckets are final
        self._is_given = False  # True if the buckets come from a file or a loaded state
        self._watches_order = False  # True if buckets are planned, and gradients have kept the plan's order
        self._last_order: list[int] | None = []  # of the last pass; None: skip the next comparison
        self._whole_passes = 0
        self._passes = 0  # with averaged gradients
        self._stepped_at = 0  # `_passes` at the last step
        self._warned = False  # by `note_step`
        self._task: int | None = None  # the current autograd graph task
        self._flats: list[Flat] = []
        self._next = 0
        # The outcome of a pass, reduced to the maximum over ranks at its end. [0]: 1 + a rank whose pass
        # failed, or 0. [1], from rank 0: _WHOLE if all gradients became ready, plus _CAPTURED. [2]: 1 if any
        # rank's trial of plans must wait for another trial. From [_PARAMS] on, per parameter: 1 if any rank
        # has a gradient.
        device = params[0][1].device if params else None
        self._outcome = torch.zeros(_PARAMS + len(params), dtype=torch.int32, device=device)
        exactly, tensors = self._limits.plan == "exact" and comm.size > 1, [param for _, param in params]
        entries = [self._entry(slot.index) for slot in self._slots if exactly]
        self._costs = all_reduce_costs(comm, entries, tensors, TAG) if exactly else None
        self._auto: AutoPlan | None = None
        self._began = perf_counter()
        self._computed = self._began
        given = self._given() if self._slots else None
        if given is not None:
            self._adopt(given)
        else:
            self._auto = self._auto_plan() if self._limits.plan == "auto" and comm.size > 1 else None
            self._arrange(self._by_size(range(len(self._slots) - 1, -1, -1)))
        self._hooks = [
            slot.param.register_post_accumulate_grad_hook(self._hook(slot.index))
            for slot in self._slots
            if comm.size > 1 or exact is not None
        ]
        for dead in [key for key, found in _reducers.items() if found() is None]:
            del _reducers[dead]
        _reducers.update({id(slot.param): weakref.ref(self) for slot in self._slots})

    @property
    def active(self) -> bool:
        """Whether a backward pass is in progress."""
        return self._task is not None

    @property
    def _captured(self) -> bool:
        """Whether a step is being captured, with its buckets sent at the end of the pass."""
        return self.comm.hooks.holds

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters of each bucket, in the order of sending."""
        return [[slot.name for slot in flat.slots] for flat in self._flats]

    @property
    def all_used(self) -> bool:
        """Whether every parameter had a gradient on some rank in the last pass."""
        return bool(self._outcome[_PARAMS:].all())

    def detach(self) -> None:
        """Remove the hooks from the parameters, without communication.

        A later reducer gets its own group: garbage collection is independent on each rank, so a replaced
        reducer may exist on only some of them.
        """
        for hook in self._hooks:
            hook.remove()
        for slot in self._slots:
            _reducers.pop(id(slot.param), None)
        self._hooks, self._slots, self._task, self._auto, self.detached = [], [], None, None, True

    def recover(self) -> None:
        """Complete a backward pass that raised, so that the peers do not wait for it.

        The training thread calls this before every forward pass, and then owns the group.
        """
        self.comm.take_over()
        if self.active:
            self._complete(failed=True)
        elif self.exact is not None and self.exact.has_failed():
            _log.warning("a backward pass in mcr.no_sync failed; all passes of this step have to be repeated")
            self._reset()

    def drop_passes(self) -> None:
        """Drop the passes in `no_sync` that have been added up exactly."""
        if self.exact is not None and not self.active and (self.exact.number or self.exact.has_failed()):
            self._reset()

    def note_step(self, has_closure: bool = False) -> None:
        """Warn once if gradients of a step were set by the program, and are this rank's alone.

        If a pass has been averaged since the last step, they may be results of averaged gradients. Raises
        `InvalidArgument` if there was none, and passes are added up exactly, unless a closure makes one.
        """
        before, self._stepped_at = self._stepped_at, self._passes
        if self.exact is not None and before == self._passes and not has_closure:
            raise InvalidArgument(
                "optimizer.step: no backward pass of this rank since the last step, and accumulate='exact' "
                "needs one of every rank"
            )
        if before != self._passes or self._warned or not (self._hooks and self.syncing):
            return
        for slot in self._slots:
            grad = slot.param.grad
            if grad is not None and all(grad is not view for view in slot.views):
                self._warned = True
                _log.warning(
                    "optimizer.step: the gradient of '%s' was set by the program, as from "
                    "torch.autograd.grad, so it has not been averaged and models differ between ranks; call "
                    "loss.backward()", slot.name,
                )  # fmt: skip
                return

    def use(self, call: CompiledCall) -> None:
        """Begin trials of the cuts of a compiled model, if `call.is_auto`."""
        if not call.is_auto or not self._slots or self.comm.size == 1:
            return
        if self._is_given or self._costs is not None or any(slot.policy.keeps for slot in self._slots):
            call.set_cuts(call.places)  # buckets are planned only once, for the order with these cuts
            return
        # Imported here: most jobs need neither the search nor numba.
        from mcr_plus.bucketing.cut_plan import CutPlan

        entries = [self._entry(slot.index) for slot in self._slots]
        curves = {} if self._auto is None else self._auto.curves
        self._auto = CutPlan(
            self.comm, entries, self._gap, self._limits, curves, self._outcome.nbytes,
            [slot.name for slot in self._slots], self.comm.polled_by_caller, call=call,
        )  # fmt: skip

    # -- layout -----------------------------------------------------------------------------------

    def _entry(self, index: int, ready: float = 0.0) -> BucketEntry:
        param = self._slots[index].param
        like = (param.dtype, param.device, self._slots[index].policy)
        return BucketEntry(index, param.numel() * param.element_size(), like, ready)

    def _by_size(self, order: Sequence[int] | range) -> list[Bucket]:
        limits, entries = self._limits, [self._entry(index) for index in order]
        return by_size(entries, limit=limits.bucket, first_limit=limits.first_bucket, alignment=self._gap)

    @property
    def _gap(self) -> int:
        """Return the alignment of gradients in bytes, which keeps gradients in separate codec blocks."""
        itemsize = max((slot.param.element_size() for slot in self._slots), default=1)
        return math.lcm(_ALIGNMENT, self._alignment * itemsize)

    def _arrange(self, plan: Sequence[Bucket], choices: Sequence[Choice] = ()) -> None:
        """Allocate these buckets, and move existing gradients into them.

        The plan is equal on all ranks, so all ranks raise if it omits a gradient or contains one twice.
        """
        held = Counter(index for bucket in plan for index in bucket.members)
        for slot in self._slots:
            if held[slot.index] != 1:
                raise McrError(
                    f"the gradient of '{slot.name}' is in {held[slot.index]} buckets of a plan; expected one "
                    "(a defect of mcr_plus: it would not be averaged)"
                )
        self._flats = [
            flat_of(self.comm, [self._slots[index] for index in bucket.members], bucket, choice)
            for bucket, choice in zip(plan, choices or [Choice()] * len(plan), strict=True)
        ]
        if self.exact is not None:
            for flat in self._flats:
                flat.sums = self.exact.sums(flat.values.numel())

    def _given(self) -> SavedPlan | None:
        """Return the plan from a file or a loaded state; None without one."""
        if self._limits.plan in ("size", "exact") or (self._limits.plan == "auto" and self.comm.size == 1):
            return None
        from mcr_plus.bucketing import given_plan

        return given_plan.found(self._limits.plan, self.comm, self._group, self._named)

    @property
    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(slot.name, slot.param) for slot in self._slots]

    def _adopt(self, plan: SavedPlan) -> None:
        """Use these buckets from now on; gradients without a bucket in the plan are sent last, by size."""
        from mcr_plus.bucketing import given_plan

        self._alignment = math.lcm(self._alignment, largest_alignment(self.comm.config, plan.codecs))
        index = {slot.name: slot.index for slot in self._slots}
        buckets: list[Bucket] = []
        choices: list[Choice] = []
        for bucket in plan.buckets:
            entries: dict[Hashable, list[BucketEntry]] = {}
            for name in bucket.params:
                entry = self._entry(index[name])
                entries.setdefault(entry.like, []).append(entry)
            if len(entries) > 1 and self.comm.rank == 0:
                given_plan.warn_of_parts(bucket, len(entries))
            buckets += [packed(each, self._gap) for each in entries.values()]
            choices += [Choice(bucket.library, bucket.codec)] * len(entries)
        rest = self._by_size([index[name] for name in plan.unused or ()])
        buckets, choices = [*buckets, *rest], [*choices, *[Choice()] * len(rest)]
        self._arrange(buckets, choices)
        given_plan.report(self._limits.plan, self.buckets, choices)
        self._seen = [member for bucket in buckets for member in bucket.members]
        self._arranged = self._final = self._is_given = self._watches_order = True

    def _auto_plan(self) -> AutoPlan | None:
        """Measure the costs of buckets; returns None if `plan: auto` does not support these gradients."""
        if not self._slots:
            return None
        # Imported here: the search is compiled by numba, which starts slowly.
        from mcr_plus.bucketing.auto_plan import begun

        entries = [self._entry(slot.index) for slot in self._slots]
        return begun(
            self.comm, self._named, entries, self._gap, self._limits, self._outcome.nbytes, self._issue
        )

    # -- one backward pass ------------------------------------------------------------------------

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # The parameter holds its hook in C++, where the garbage collector cannot find a reference cycle.
        reducer = weakref.ref(self)

        def ready(_: torch.Tensor) -> None:
            if (owner := reducer()) is not None and owner.syncing:
                owner._is_ready(owner._slots[index])
            elif owner is not None:
                owner.keeps = True  # until a pass averages the gradients that this one accumulates
                if owner.exact is not None:
                    owner.exact.note()
                    add_to_sums(owner._slots[index])

        return ready

    def _is_ready(self, slot: ParameterSlot) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self._end)
        if slot.ready:
            raise McrError(
                f"the gradient of '{slot.name}' was accumulated again after it had been passed to the "
                "pipeline: either reentrant checkpoints share the parameter (use_reentrant=False helps), or "
                "a backward pass that raised was repeated without a forward pass"
            )
        if self.exact is None:
            move_into_bucket(slot)
        else:
            self.exact.note()
            add_to_sums(slot)
        slot.ready = True
        for ready in self.comm.hooks.ready:
            ready(slot.param)
        self._order.append(slot.index)
        self._times.append(perf_counter())
        flat = slot.flat
        assert flat is not None
        flat.missing -= 1
        if flat.missing == 0 and not (self._captured or (self._auto is not None and self._auto.holds)):
            self._send_complete()
        else:
            self.comm.progress()

    def _send_complete(self) -> None:
        """Send the complete buckets whose predecessors have been sent."""
        while self._next < len(self._flats) and self._flats[self._next].missing == 0:
            self._send(self._flats[self._next])
            self._next += 1

    def _send(self, flat: Flat) -> None:
        policy = flat.policy
        encoded = policy.encoded and (self._final or not policy.keeps)
        if policy.encoded:
            for gap in flat.gaps:  # decoded values left in gaps would change the scale of a codec's block
                gap.zero_()
        for carries in self.comm.hooks.carries:
            carries([slot.param for slot in flat.slots])
        if flat.sums is not None and self.exact is not None:
            values, into = flat.sums.of_passes(self.exact.number + 1)
            flat.work = self.comm.send_bucket(
                values, SUM, members=len(flat.slots), into=into, backend=flat.backend, compress=False,
                tag=TAG, sums="exact",
            )  # fmt: skip
            return
        flat.work = self._issue(
            flat.values,
            flat.backend,
            policy.options if encoded or not policy.encoded else False,
            members=len(flat.slots),
            parts=flat.parts if encoded else None,
            key=flat.key if encoded else None,
            into=flat.means,
        )

    def _issue(
        self,
        values: torch.Tensor,
        backend: str | None,
        compress: Compress,
        *,
        members: int = 1,
        parts: tuple[tuple[int, ...], ...] | None = None,
        key: str | None = None,
        into: torch.Tensor | None = None,
    ) -> Work:
        """Start the all_reduce of a bucket."""
        op: ReduceOp = AVG
        if values.dtype is torch.float16:  # the sum may overflow even if the mean does not
            values.div_(self.comm.size)
            op = SUM
        return self.comm.send_bucket(
            values, op, members=members, into=into, backend=backend, compress=compress, tag=TAG, parts=parts,
            key=key,
        )  # fmt: skip

    def _end(self) -> None:
        """Complete the pass; autograd calls this at the end of a backward pass."""
        if self.active:
            self._complete(failed=False)

    def _complete(self, *, failed: bool) -> None:
        """Send the remaining buckets, wait for all of them, and assign the means."""
        self._computed = perf_counter()
        for slot in self._slots if self.exact is None else ():
            if not slot.ready:
                move_into_bucket(slot)
        used = [slot.is_summed or slot.param.grad is not None for slot in self._slots]
        captured, kind = self._captured, 0
        if self.comm.rank == 0:
            kind = _WHOLE * (len(self._order) == sum(used)) + _CAPTURED * captured
        waits = self._auto is not None and trials().must_wait(self._auto)
        self._outcome.copy_(self._outcome.new_tensor([(1 + self.comm.rank) * failed, kind, waits, *used]))
        for flat in self._flats[self._next :]:
            self._send(flat)
            if captured and flat.work is not None:
                flat.work.wait()  # a captured step must not have overlapping operations
        outcome = self.comm.send_bucket(self._outcome, MAX, members=1, tag=TAG, compress=False)  # by no rule
        try:
            for work in [*(flat.work for flat in self._flats), outcome]:
                assert work is not None
                work.wait()
            if self._auto is not None and not self._auto.report:
                for flat in self._flats:
                    assert flat.work is not None
                    self._auto.used[flat.nbytes] = flat.work.info.backend
            for flat in self._flats:
                if flat.sums is not None:
                    flat.sums.write_means(flat.means, partial(self.comm.all_gather_object, tag=TAG))
        finally:
            self._reset()
        self._assign(raised=failed)

    def _reset(self) -> None:
        self._task, self._next, self.keeps = None, 0, False
        if self.exact is not None:
            self.exact.reset()
        for flat in self._flats:
            flat.reset()

    def _assign(self, *, raised: bool) -> None:
        """Assign the mean to every parameter with a gradient on some rank; raises if a pass failed."""
        order, times, self._order, self._times = self._order, self._times, [], []
        if raised:
            self._began = perf_counter()
            return  # the gradients are not assigned: the program starts another pass
        self._passes += 1
        failed, kind, waits, *used = self._outcome.tolist()
        for slot, some in zip(self._slots, used, strict=True):
            if some:
                slot.param.grad = slot.view
        if not failed:
            self._replan(order, times, bool(kind & _WHOLE), tries=not (kind & _CAPTURED or waits))
        self._began = perf_counter()
        if failed:
            raise McrError(
                f"the backward pass of {self.comm.opened.group.named(failed - 1)} failed; the gradients of "
                "this pass are not complete on any rank"
            )

    def _replan(self, seen: list[int], times: list[float], whole: bool, *, tries: bool) -> None:
        """Plan the buckets of later passes from rank 0's order and ready times in this pass.

        `seen`: indices of parameters in the order in which their gradients became ready, at `times`
        (seconds). `whole`: all gradients of rank 0 became ready in this pass; with reentrant checkpoints,
        some may not. `tries`: the pass may be part of a trial of plans, as rank 0 has not captured it (so the
        times are the plan's) and no other trial runs.
        """
        self._whole_passes += whole
        first = not self._arranged
        if (
            first
            and self._auto is not None
            and not self._auto.is_of_cuts
            and (given := self._given()) is not None
        ):
            self._auto = None  # a state was loaded after `mcr.wrap`
            self._adopt(given)
            return
        if self._auto is not None and not first:
            if tries:
                self._take_turns(self._auto, dict(zip(seen, times, strict=True)), whole)
            return
        if self._watches_order and whole and self.comm.rank == 0:
            self._compare_order(seen)
        exactly = self._costs is not None and whole and self._whole_passes == _MEASURED_PASS
        if not (first or exactly):
            return
        self._arranged = True
        rest = [slot.index for slot in reversed(self._slots) if slot.index not in seen]
        plan = self._by_size([*seen, *rest])
        if exactly and self._costs is not None:
            ready = [time - times[0] for time in times]
            ready += ready[-1:] * len(rest)
            entries = [self._entry(index, when) for index, when in zip([*seen, *rest], ready, strict=True)]
            plan = earliest(entries, self._costs, self._gap)
        # Rank 0 decides: gradients become ready in different orders on different ranks.
        members = self.comm.broadcast_object([bucket.members for bucket in plan], self.comm.ranks[0])
        plan = [packed([self._entry(index) for index in each], self._gap) for each in members]
        self._arrange(plan)
        self._seen = [index for bucket in plan for index in bucket.members]
        self._watches_order = exactly
        self._final = exactly or (self._costs is None and self._auto is None)
        _log.info(
            "gradients: %d buckets of %s, by %s",
            len(plan),
            ", ".join(format_size(bucket.nbytes) for bucket in plan[:8]) + ", …" * (len(plan) > 8),
            "the table's costs and ready times" if exactly else "size, in the order of the first pass",
        )

    def _compare_order(self, seen: list[int]) -> None:
        """Warn once, on rank 0, if the order of ready gradients differs from the plan's; the plan is kept."""
        known, self._last_order = self._last_order, seen
        if seen == known or known is None:
            return
        found = first_waiting([[slot.index for slot in flat.slots] for flat in self._flats], seen)
        if found is not None:
            self._watches_order = False
            number, index = found
            _log.warning(
                "gradients: the plan's buckets are kept, but gradients become ready in another order: "
                "bucket %d waits for '%s' in bucket %d", number, self._slots[index].name, number - 1,
            )  # fmt: skip

    def _take_turns(self, auto: AutoPlan, ready: dict[int, float], whole: bool) -> None:
        """Record a pass for `plan: auto`, and arrange the buckets that it selects for the next pass."""
        if whole:
            sent = auto.after(self._began, ready, self._computed, perf_counter(), self._seen)
        else:
            sent = auto.incomplete()
        trials().passed(auto)
        if sent is not None:
            self._arrange(*sent)
        if auto.is_final:
            self._final, self._auto = True, None
            self._watches_order = "chosen" in auto.report
            # The graph's cuts differ from the captured ones, so the next pass sets the reference order.
            self._last_order = None if auto.is_of_cuts else []
            if auto.has_verdict:
                from mcr_plus.bucketing import given_plan

                given_plan.keep(self._group, self._named, self.comm, auto.report)
