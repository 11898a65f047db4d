"""`Communicator`: a group of ranks with its own pipeline, the entry point of every operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from mcr_plus.communicator import calls
from mcr_plus.communicator.calls import Call, CallOptions, Unpack
from mcr_plus.communicator.operations import PLANS, Operations
from mcr_plus.communicator.operations import P2POp as P2POp
from mcr_plus.communicator.prepared import Prepared, prepare
from mcr_plus.communicator.successors import Succession
from mcr_plus.config.names import stored_backend
from mcr_plus.core.foreign_names import OF_COMMUNICATORS, name_others
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import MESSAGES, REDUCE_OPS, REDUCING, ReduceOp, check_reducible
from mcr_plus.core.message import Extras, Signature, frozen
from mcr_plus.core.units import whole_number
from mcr_plus.core.work import Work
from mcr_plus.engine.group_runtime import SIGNATURES
from mcr_plus.errors import InvalidArgument, Revoked, Unsupported, is_normal_end
from mcr_plus.pipeline.pipeline import BoundChain, Pipeline

if TYPE_CHECKING:
    from mcr_plus.communicator.job import RunningJob
    from mcr_plus.communicator.open_group import OpenGroup
    from mcr_plus.communicator.persistent import PersistentOp
    from mcr_plus.engine.group_state import GroupState
    from mcr_plus.engine.hook import Hooks

_OPTIONS = CallOptions.__annotations__.keys()


class Communicator(Operations):
    """A group of ranks, its compiled pipeline and its plans.

    Every rank of the group must issue the same operations in the same order, from one thread (autograd's
    threads may issue operations while their caller waits). As in `torch.distributed`, ranks in arguments
    (`src`, `dst`) are ranks of the whole job, also in sub-groups; lists have one entry per member in group
    order.

    Common keywords: `async_op=True` returns a `Work`, and the tensors must not be touched before its
    `wait`; `backend` names a library; `compress` is None (the pipeline decides), False (off), a codec's
    name or a mapping with `codec` and its options; `tag` is a free name, matched by rules and shown in logs.

    Tensors may be torch tensors or arrays of other libraries (NumPy, CuPy), strided in any way, of any size.
    An operation that no library supports raises `Unsupported` on every rank, before any data is sent.
    """

    def __init__(self, job: RunningJob, opened: OpenGroup) -> None:
        self._runtime = job
        self.opened = opened
        self.config = opened.config  # the configuration of this group's pipeline
        self._group: Group = opened.group
        self.pipeline: Pipeline = opened.pipeline  # the stages of this group's operations
        self.state: GroupState = opened.state  # the state of the group in this process
        self._chains = opened.chains
        self._messages = opened.messages
        self._plans, self._fast = opened.plans, opened.fast
        self.splits = 0  # groups made from this one so far
        self.succession = Succession()
        self.attached: dict[str, Any] = {}  # objects of higher layers that live as long as the group, by name
        self.persistents: WeakSet[PersistentOp] = (
            WeakSet()
        )  # persistent operations that the program still holds

    # -- identity ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The group's name, equal on all its ranks."""
        return self._group.name

    @property
    def rank(self) -> int:
        """This process's rank in the group; -1 if it is not a member."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._group.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the whole job, in group order."""
        return self._group.ranks

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of every rank of the whole job."""
        return self._runtime.world.hosts

    def __repr__(self) -> str:
        return f"<Communicator '{self.name}' rank {self.rank} of {self.size}>"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        if is_normal_end(exception[1]):
            self.close()
        else:
            self._runtime.leave(self, clean=False)

    def close(self) -> None:
        """Close the group and release its resources; collective over the group.

        `close` waits for pending operations, and raises their first error after the group is closed. Every
        later use of the group raises `NotInitialized`; closing it again does nothing. Closing the group of
        all ranks is the same as `mcr.finalize()`. `with mcr.new_group(ranks) as group:` closes the group at
        the end of the block, after an exception without waiting for other ranks.

        If the program drops a group without closing it, the group is closed when all its ranks have dropped
        it and call `new_group`, `split` or `branch` again, at the latest by `mcr.finalize()`.
        """
        self._runtime.close_together(self.opened)

    def take_over(self) -> None:
        """Let the calling thread issue this group's operations from now on.

        Only the thread that created a group may use it: operations of two threads have no common order on all
        ranks. Call this from another thread once the first thread has stopped using the group.
        """
        self.opened.take_over()

    def flush(self) -> None:
        """Send the pending buckets of the fuse stage; all ranks must call it at the same point."""
        self._check_open()
        self.pipeline.flush()

    def branch(self) -> Communicator:
        """Return another communicator of the same ranks, with its own order of operations; collective."""
        made = self.branch_named(None)
        made.opened.follows = True
        return made

    def branch_named(self, name: str | None) -> Communicator:
        """Branch under a name that no open group has, for higher layers; None picks the next free name."""
        self._check_open()
        if name is None:
            self.splits += 1
            name = f"{self.name}/{self.splits}"
        self._runtime.agree(self, None, "branch", lambda _: [self.size] * self.size)
        return self._runtime.open_group(name, self.ranks, checked=True)

    def successor(self) -> Communicator:
        """Return the group that replaces this one after the ranks of the job have changed; local.

        `mcr.shrink`, `mcr.reconfigure` and `mcr.elastic` make a new world. In it they reopen each group made
        by `mcr.new_group`, `split` or `branch`, with its surviving ranks in the same order and under the same
        name, if all of these ranks have kept the group. New ranks are only in the group of all ranks. While
        the group's world is current, `successor` returns the group itself.

        Raises:
            Revoked: the group has no successor: none of its ranks is left, some ranks had closed or dropped
                it, or this process has been left out.
            NotInitialized: the group has been closed.

        Example:
            ```python
            group = mcr.new_group([0, 1])
            mcr.shrink()
            group = group.successor()
            ```
        """
        if not self.state.revoked:
            self._check_open()
            return self
        if self.succession.successor is None:
            why = self.succession.reason or "the ranks that are left have not gone on yet"
            raise Revoked(f"group '{self.name}' has no successor: {why}")
        return self.succession.successor.successor()

    def progress(self) -> None:
        """Advance pending operations of libraries that need the host, without waiting."""
        engine = self._runtime.engine
        with engine.lock:
            engine.progress()

    @property
    def polled_by_caller(self) -> list[str]:
        """Names of this group's backends that make progress only during calls of the program."""
        engine = self._runtime.engine
        if engine.progress_thread is not None:
            return []
        polled = {backend.name for backend in engine.backends if backend.host_driven}
        return [name for name in self.pipeline.libraries if name in polled]

    @property
    def hooks(self) -> Hooks:
        """The observers of this process's operations."""
        return self._runtime.engine.hooks

    def stage_options(self, name: str) -> Any:
        """Return the options of a stage; None if the pipeline does not have the stage."""
        return self.config.options(name)

    def send_bucket(
        self,
        values: torch.Tensor,
        op: ReduceOp,
        *,
        members: int,
        into: torch.Tensor | None = None,
        parts: tuple[tuple[int, ...], ...] | None = None,
        key: str | None = None,
        **options: Unpack[CallOptions],
    ) -> Work:
        """Start an all_reduce of a bucket of `members` tensors; the fuse stage does not fuse it again.

        For gradient hooks; otherwise the same as `all_reduce`. `values`: the bucket, contiguous. `into`:
        contiguous memory of the same shape and dtype for the result; without it, `values` are reduced in
        place. `parts`, `key`: see `Signature`.
        """
        result = values if into is None else into
        extras: Extras = {"fused": members, "already_bucketed": True}
        call = Call(
            "all_reduce", (values,), (result,), values.shape, values.numel(), reduce_op=op, extras=extras,
            parts=parts, key=key,
        )  # fmt: skip
        return self.prepared(call, True, options).start()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers kept for later operations of this group."""
        return self.opened.buffer_bytes

    @property
    def closed(self) -> bool:
        """True if the group has been closed in this process."""
        return self.state.closed

    @property
    def done(self) -> int | None:
        """Number of the last operation known to be done, after `mcr.shrink`; None before.

        Operations up to this number (`Work.info.sequence`) are complete on all surviving ranks, with results
        that may be used; later operations count as not done. All surviving ranks get the same number. It does
        not cover operations that the stage `hierarchical` decomposes. A receive is done if its `wait`
        returns; a send that is done may not have been received.
        """
        return self.state.agreed

    # -- objects ----------------------------------------------------------------------------------

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """Return the object of rank `src` on every rank. Ranks unpickle only objects signed by this job."""
        root = calls.group_rank(self._group, src, "src")
        is_source = root == self.rank
        payload = (
            self.opened.objects.pickled(obj) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        length = torch.tensor([payload.numel()], device="cpu")
        self.broadcast(length, src, compress=False)
        # Sizes are powers of two, because each new size is a new signature that ranks must bind and compare.
        room = torch.empty(1 << (int(length) - 1).bit_length(), dtype=torch.uint8, device="cpu")
        room[: payload.numel()] = payload
        self.broadcast(room, src, compress=False)
        return obj if is_source else self.opened.objects.unpickled(room[: int(length)], root)

    def all_gather_object(self, obj: Any, *, tag: str | None = None) -> list[Any]:
        """Return every rank's object, in rank order. Ranks unpickle only objects signed by this job."""
        payload = self.opened.objects.pickled(obj)
        lengths = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self.all_gather_into_tensor(
            lengths, torch.tensor([payload.numel()], device="cpu"), compress=False, tag=tag
        )
        parts = [torch.empty(int(length), dtype=torch.uint8, device="cpu") for length in lengths]
        self.all_gather_v(parts, payload, compress=False, tag=tag)
        return [self.opened.objects.unpickled(part, rank) for rank, part in enumerate(parts)]

    # -- groups and persistent operations ---------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Split the group by `color`; each new group is ordered by `key`, then rank. Collective.

        Returns the new communicator, or None if `color` is None.
        """
        self._check_open()
        self.splits += 1

        def sizes(choices: Sequence[tuple[int | None, int]]) -> list[int]:
            ranks = Counter(chosen for chosen, _ in choices if chosen is not None)
            return [0 if chosen is None else ranks[chosen] for chosen, _ in choices]

        # The group's name holds the color, which may be a NumPy integer on some ranks only: normalise it.
        if (number := whole_number(color)) is not None:
            color = number
        choices = self._runtime.agree(self, (color, key), "split", sizes)
        if color is None:
            return None
        members = sorted((k, index) for index, (c, k) in enumerate(choices) if c == color)
        ranks = tuple(self.ranks[index] for _, index in members)
        made = self._runtime.open_group(f"{self.name}.{self.splits}.{color!r}", ranks, checked=True)
        made.opened.follows = True
        return made

    def persistent(self, kind: str, *tensors: Any, **options: Any) -> PersistentOp:
        """Bind an operation to its tensors once: `op()` runs it, `op.start()` returns a `Work`.

        Collective, like every call of the result. `kind` is the name of an operation with fixed sizes,
        followed by its arguments. The tensors must be contiguous and must not move. The program must wait for
        each `Work` before the next start. After `mcr.shrink`, `reconfigure` or `elastic`, the next call binds
        the operation to the group's successor; it raises `InvalidArgument` if the tensors do not fit the
        successor's number of ranks, or the root has been lost.
        """
        from mcr_plus.communicator.persistent import PersistentBinding

        return PersistentBinding.of(self, kind, tensors, options)

    # -- issuing ----------------------------------------------------------------------------------

    def prepared(self, call: Call, async_op: bool, options: CallOptions) -> Prepared:
        """Bind a call and lay out its tensors, without issuing it.

        Raises `Unsupported` if no library of the group can run it, `InvalidArgument` or `TypeError` for
        invalid options.
        """
        like, backend, tag = call.like, options.get("backend"), options.get("tag")
        async_op = async_op or call.kind in MESSAGES
        compress = options.get("compress")
        if isinstance(compress, Mapping) or not options.keys() <= _OPTIONS:
            calls.check_options(call.kind, call.reduce_op, options)
        codec = frozen(compress) if isinstance(compress, Mapping) else compress
        dtype, device = (None, "cpu") if like is None else (like.dtype, like.device.type)
        key = (
            call.kind, dtype, tuple(call.shape), call.numel, device, call.reduce_op, call.root, async_op,
            backend, codec, tag, call.parts, call.key, call.called, call.counts_agreed, options.get("sums"),
        )  # fmt: skip
        try:
            plan = self._plans.get(key)
        except TypeError:  # an unhashable value is not a valid option
            calls.check_options(call.kind, call.reduce_op, options)
            raise
        if plan is None:
            calls.check_options(call.kind, call.reduce_op, options)
            nbytes = None if call.numel is None else call.numel * (0 if dtype is None else dtype.itemsize)
            signature = Signature(
                call.kind, dtype, tuple(call.shape), nbytes, self.name, self.size, device,
                calls.reduce_op_name(call.reduce_op), call.root, tag, stored_backend(backend), codec,
                async_op, None, call.parts, call.key, None, call.called, call.counts_agreed,
                None if call.root is None else self.ranks[call.root], options.get("sums"),
            )  # fmt: skip
            plan = self._chain(signature)
            for bound in self.hooks.bound:
                plan = replace(plan, issue=bound(self._group, plan.issue))
            if len(self._plans) >= PLANS:  # needs no other rank: new plans use the same chains
                self.opened.forget_plans()
            self._plans[key] = plan
        return prepare(call, plan.signature, plan.issue)

    def _chain(self, signature: Signature) -> BoundChain:
        known = self._messages if signature.is_p2p else self._chains
        chain = known.get(signature)
        if chain is None:
            self._check_open()
            _check_valid(signature, self._group)
            if not signature.is_p2p:
                self.opened.runtime.count()
            elif len(known) >= SIGNATURES:
                known.clear()
                self.opened.forget_plans()
                self.opened.runtime.forget_messages()
            chain = known[signature] = self.pipeline.bind(signature)
        return chain

    def _check_open(self) -> None:
        if self.closed:
            self.state.check_thread()  # raises if the group is closed


name_others(Communicator, OF_COMMUNICATORS)


def _check_valid(signature: Signature, group: Group) -> None:
    """Raise `Unsupported` if this rank is not a member, `InvalidArgument` if the reduce op is missing."""
    if group.rank < 0:
        raise Unsupported(
            f"this rank is not a member of group '{group.name}' (ranks{group.of_job} {list(group.ranks)}); "
            "only members may use it"
        )
    if signature.kind in REDUCING and signature.dtype is not None:
        if signature.reduce_op is None:
            raise InvalidArgument(f"op: unknown reduce op None; known: {', '.join(REDUCE_OPS)}")
        check_reducible(signature.reduce_op, signature.dtype)
