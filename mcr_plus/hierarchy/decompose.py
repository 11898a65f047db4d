"""Decompositions of operations, one class per kind: signatures of the steps, and messages of one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch

from mcr_plus.backends.emulation import divide
from mcr_plus.core.buffers import Lease, Pool
from mcr_plus.core.deadline import Deadline, check_wait
from mcr_plus.core.kinds import Kind
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import JointWork, Work
from mcr_plus.hierarchy.nodes import Nodes, Part
from mcr_plus.pipeline.stage import Issue, Next

Prepare = Callable[[], None] | None


class Decomposition(ABC):
    """Operation decomposed into steps.

    `steps` maps the group of each step to the step's signature. All ranks have the signatures of all steps,
    even of steps that only some nodes run, so that every rank notices an unsupported step. `remark` is
    appended to the line that `explain` prints.
    """

    steps: dict[Part, Signature]
    remark = ""
    has_rest: ClassVar[bool] = True
    """True if parts are equal, and the last numel % L elements are sent flat."""

    def __init__(self, signature: Signature, nodes: Nodes, pool: Pool) -> None:
        assert signature.nbytes is not None
        assert signature.dtype is not None
        self.signature, self.nodes = signature, nodes
        self.dtype = signature.dtype
        self.numel = signature.nbytes // self.dtype.itemsize
        self._pool = pool
        self._issues: dict[Part, Issue] = {}
        self._rest: tuple[Signature, Issue] | None = None

    @property
    @abstractmethod
    def summary(self) -> str:
        """Description of the steps that `explain` prints."""

    @abstractmethod
    def start(self, message: Message, agreed: Work | None = None) -> Work:
        """Start one call. If `agreed` is given, the first step waits for it."""

    def prepare_for_codec(self) -> None:  # noqa: B027 - most steps are the same with a codec
        """Adapt the steps to a codec between nodes; called before `bind` if the inter step has one."""

    def bind(self, bind: Callable[[Part, Signature], Issue], next: Next) -> None:
        """Bind the steps; `next` is the rest of the pipeline of the undivided group."""
        self._issues = {part: bind(part, step) for part, step in self.steps.items()}
        if self.has_rest:
            self._bind_rest(next)

    # -- for subclasses ---------------------------------------------------------------------------

    def step(self, kind: Kind, part: Part, numel: int, nbytes: int, **changes: Any) -> Signature:
        """Return the signature of a step on tensors of `numel` elements each."""
        ranks = self.nodes.count if part == "inter" else self.nodes.size
        like = self.signature.replace(
            reduce_op=None,
            root=None,
            root_in_job=None,
            parts=None,
            async_op=True,
            call=self.signature.as_call(),
        )
        # The key identifies the codec's state, so only the compressed step gets the key.
        key = self.signature.key if part == "inter" else None
        group = f"{self.signature.group}/{self.nodes.group_name(part)}"
        return like.replace(
            kind=kind, shape=(numel,), nbytes=nbytes, ranks=ranks, group=group, key=key, **changes
        )

    def begin(
        self,
        part: Part,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        message: Message,
        *,
        after: Work | None,
        prepare: Prepare = None,
    ) -> Work:
        """Issue a step of the operation `message`."""
        step = Message(self.steps[part], inputs, outputs, after=after, prepare=prepare, fused=message.fused)
        return self._issues[part](step)

    def lease(self) -> Lease:
        """Return a lease of buffers for one call; several calls may be in flight."""
        return self._pool.lease(torch.device(self.signature.device))

    def following(self, message: Message, agreed: Work | None) -> Work | None:
        """Return the work for which the first step must wait; None if it may start at once."""
        if message.after is None or agreed is None:
            return message.after or agreed
        return JointWork([message.after, agreed], self.signature.kind, nbytes=0)

    def handle(self, works: list[Work], agreed: Work | None) -> Work:
        """Return one handle for all steps."""
        signature = self.signature
        assert signature.nbytes is not None
        work = _Steps(works, signature.kind, nbytes=signature.nbytes, tag=signature.tag, legs=True)
        work.agreed = agreed
        return work

    # -- the remainder of an uneven division ------------------------------------------------------

    def _bind_rest(self, next: Next) -> None:
        """Bind the flat operation on the last numel % L elements, which do not divide into equal parts."""
        rest = self.numel % self.nodes.size
        if rest:
            nbytes = rest * self.dtype.itemsize
            like = self.signature.replace(shape=(rest,), nbytes=nbytes, parts=None, key=None)
            like = like.replace(compress=False, async_op=True, call=self.signature.as_call())
            self._rest = like, next(like)

    def start_rest(self, given: torch.Tensor, result: torch.Tensor, after: Work | None) -> list[Work]:
        """Issue the flat operation on the remaining elements, concurrently with the steps."""
        if self._rest is None:
            return []
        signature, issue = self._rest
        at = self.numel - signature.shape[0]
        source = given[at:]
        target = source if given is result else result[at:]
        return [issue(Message(signature, (source,), (target,), after=after))]

    # -- agreement --------------------------------------------------------------------------------

    def announced(self, next: Next, *, always: bool) -> Issue:
        """Return `start`, preceded by an announcement in the undivided group.

        Ranks compare steps only in the steps' groups, so a rank that issues another operation in the
        undivided group would not notice a mismatch. Therefore the first call, or every call if `always`,
        begins with an operation of zero bytes in that group, which has a sequence number that ranks compare.
        """
        announcement = self.signature.replace(nbytes=0, compress=False, parts=None, key=None, async_op=True)
        announce, due = next(announcement), True

        def start(message: Message) -> Work:
            nonlocal due
            if not due:
                return self.start(message)
            due = always
            return self.start(message, announce(Message(announcement)))

        return Issue(start)


class _Steps(JointWork):
    """Handle of a hierarchical operation.

    It reports a signature mismatch before errors of steps caused by the mismatch.
    """

    __slots__ = ("agreed",)

    agreed: Work | None

    def wait(self, timeout: float | timedelta | None = None) -> None:
        check_wait(timeout)
        deadline = Deadline(timeout)
        if self.agreed is not None:
            self.agreed.wait(deadline.left())
        super().wait(deadline.left())


class _TwoLevelReduction(Decomposition):
    """Base class of reductions that sum in the node, then between nodes.

    AVG divides by `_after` once, after the last sum. A codec between nodes needs values in its range. So with
    a codec, values are divided by `_before` before the step between nodes, which then takes the mean over
    nodes.
    """

    def __init__(self, signature: Signature, nodes: Nodes, pool: Pool) -> None:
        super().__init__(signature, nodes, pool)
        self._part = self.numel // nodes.size
        is_mean = signature.reduce_op == "AVG"
        self._op = "SUM" if is_mean else signature.reduce_op
        self._before, self._after = 1, nodes.size * nodes.count if is_mean else 1

    def prepare_for_codec(self) -> None:
        if self.signature.reduce_op == "AVG":
            self.steps["inter"] = self.steps["inter"].replace(reduce_op="AVG")
            self._before, self._after = self.nodes.size, 1


class HierarchicalAllReduce(_TwoLevelReduction):
    """all_reduce as reduce_scatter in the node, all_reduce between nodes, all_gather in the node.

    Values [n] are divided into L equal parts. A flat all_reduce sends the last n % L elements, so nothing is
    padded or copied.
    """

    def __init__(self, signature: Signature, nodes: Nodes, pool: Pool) -> None:
        super().__init__(signature, nodes, pool)
        self._whole = self._part * nodes.size
        nbytes = self._part * self.dtype.itemsize
        part, all_parts = self._part, nbytes * nodes.size
        self.steps = {
            "intra": self.step("reduce_scatter", "intra", part, all_parts, reduce_op=self._op),
            "inter": self.step("all_reduce", "inter", part, nbytes, reduce_op=self._op),
            "intra2": self.step("all_gather", "intra2", part, all_parts),
        }

    @property
    def summary(self) -> str:  # noqa: D102
        return "reduce_scatter in the node, all_reduce of each part between nodes, all_gather in the node"

    def start(self, message: Message, agreed: Work | None = None) -> Work:  # noqa: D102
        lease = self.lease()
        part = lease.tensor(self._part, self.dtype)
        given = message.inputs[0].view(-1)
        result = given if message.outputs[0] is message.inputs[0] else message.outputs[0].view(-1)
        whole, after = self._whole, self.following(message, agreed)
        first = self.begin("intra", (given[:whole],), (part,), message, after=after, prepare=message.prepare)
        rest = self.start_rest(given, result, first if message.prepare else after)
        second = self.begin(
            "inter", (part,), (part,), message, after=first, prepare=_divide(part, self._before)
        )
        third = self.begin(
            "intra2", (part,), (result[:whole],), message, after=second, prepare=_divide(part, self._after)
        )
        return self.handle([first, second, third.then(lease.release), *rest], agreed)


class HierarchicalBroadcast(Decomposition):
    """Broadcast as scatter in the root's node, broadcast between nodes and all_gather in the node.

    Parts are as in `HierarchicalAllReduce`. The root joins the all_gather, so that all ranks hold the same
    values after a lossy codec.
    """

    def __init__(self, signature: Signature, nodes: Nodes, pool: Pool) -> None:
        super().__init__(signature, nodes, pool)
        assert signature.root is not None
        self._part = self.numel // nodes.size
        self._whole = self._part * nodes.size
        nbytes = self._part * self.dtype.itemsize
        self._root_node, root_index = nodes.place(signature.root)
        self._is_root = (self._root_node, root_index) == (nodes.node, nodes.index)
        part, all_parts = self._part, nbytes * nodes.size
        sender = nodes.in_job[nodes.ranks[self._root_node][nodes.index]]  # between nodes
        roots = {"root": root_index, "root_in_job": nodes.in_job[signature.root]}
        self.steps = {
            "intra": self.step("scatter", "intra", part, all_parts, **roots),
            "inter": self.step("broadcast", "inter", part, nbytes, root=self._root_node, root_in_job=sender),
            "intra2": self.step("all_gather", "intra2", part, all_parts),
        }

    @property
    def summary(self) -> str:  # noqa: D102
        return "scatter in the root's node, broadcast of each part between nodes, all_gather in the node"

    def start(self, message: Message, agreed: Work | None = None) -> Work:  # noqa: D102
        lease = self.lease()
        part = lease.tensor(self._part, self.dtype)
        values = message.outputs[0].view(-1)
        whole, prepare = self._whole, message.prepare
        begin = after = self.following(message, agreed)
        works: list[Work] = []
        if self.nodes.node == self._root_node:
            source = (values[:whole],) if self._is_root else ()
            after = self.begin("intra", source, (part,), message, after=after, prepare=prepare)
            works.append(after)
            prepare = None
        inter = self.begin("inter", (part,), (part,), message, after=after, prepare=prepare)
        first = works[0] if works else inter
        intra2 = self.begin("intra2", (part,), (values[:whole],), message, after=inter)
        rest = self.start_rest(values, values, first if message.prepare else begin)
        return self.handle([*works, inter, intra2.then(lease.release), *rest], agreed)


class HierarchicalAllToAll(Decomposition):
    """all_to_all of blocks [G, b], one per rank of the group, first between nodes, then in the node.

    The blocks are reordered before and after each step, in one copy:

        sent between nodes        [j, k]    for rank k of node j
        received between nodes    [j, k]    from node j, for rank k of this node
        sent in the node          [k, j]
        received in the node      [k, j]    from rank k of node j
    """

    has_rest = False

    def __init__(self, signature: Signature, nodes: Nodes, pool: Pool) -> None:
        super().__init__(signature, nodes, pool)
        nbytes = signature.nbytes or 0
        self.steps = {
            "inter": self.step("all_to_all", "inter", self.numel, nbytes),
            "intra2": self.step("all_to_all", "intra2", self.numel, nbytes),
        }
        order = [rank for node in nodes.ranks for rank in node]
        self._in_order = order == sorted(order)
        places = {rank: (j, k) for j, node in enumerate(nodes.ranks) for k, rank in enumerate(node)}
        inside = [j * nodes.size + k for k in range(nodes.size) for j in range(nodes.count)]
        result = [places[rank][1] * nodes.count + places[rank][0] for rank in range(len(order))]
        self._order, self._inside, self._result = (
            torch.tensor(indices, device=signature.device) for indices in (order, inside, result)
        )

    @property
    def summary(self) -> str:  # noqa: D102
        return "all_to_all between ranks of the same place in their nodes, then all_to_all in the node"

    def start(self, message: Message, agreed: Work | None = None) -> Work:  # noqa: D102
        lease = self.lease()
        given, result = message.inputs[0].view(-1), message.outputs[0].view(-1)
        # Two buffers are enough for both steps: one is free again when the other is written.
        sent, received = lease.tensor(self.numel, self.dtype), lease.tensor(self.numel, self.dtype)
        earlier = message.prepare

        def pack() -> None:
            if earlier is not None:
                earlier()
            if not self._in_order:
                _pick(given, self._order, sent)

        def turn() -> None:
            _pick(received, self._inside, sent)

        def unpack() -> None:
            _pick(received, self._result, result)
            lease.release()

        first = given if self._in_order else sent
        after = self.following(message, agreed)
        inter = self.begin("inter", (first,), (received,), message, after=after, prepare=pack)
        intra2 = self.begin("intra2", (sent,), (received,), message, after=inter, prepare=turn)
        return self.handle([inter, intra2.then(unpack)], agreed)


class HierarchicalAllGather(Decomposition):
    """all_gather of a block per rank, first between nodes, then in the node.

    The blocks are reordered after the second step, in one copy:

        received between nodes    [j]       from node j
        received in the node      [k, j]    from rank k of node j
    """

    has_rest = False

    def __init__(self, signature: Signature, nodes: Nodes, pool: Pool) -> None:
        super().__init__(signature, nodes, pool)
        nbytes = signature.nbytes or 0
        self._part = self.numel // nodes.size
        block = self._part // nodes.count
        self.steps = {
            "inter": self.step("all_gather", "inter", block, nbytes // nodes.size),
            "intra2": self.step("all_gather", "intra2", self._part, nbytes),
        }
        places = [node[k] for k in range(nodes.size) for node in nodes.ranks]
        self._in_order = places == sorted(places)
        order = sorted(range(len(places)), key=places.__getitem__)
        self._result = torch.tensor(order, device=signature.device)

    @property
    def summary(self) -> str:  # noqa: D102
        return "all_gather between ranks of the same place in their nodes, then all_gather in the node"

    def start(self, message: Message, agreed: Work | None = None) -> Work:  # noqa: D102
        lease = self.lease()
        given, result = message.inputs[0].view(-1), message.outputs[0].view(-1)
        part = lease.tensor(self._part, self.dtype)
        received = result if self._in_order else lease.tensor(self.numel, self.dtype)

        def unpack() -> None:
            if not self._in_order:
                _pick(received, self._result, result)
            lease.release()

        after = self.following(message, agreed)
        inter = self.begin("inter", (given,), (part,), message, after=after, prepare=message.prepare)
        intra2 = self.begin("intra2", (part,), (received,), message, after=inter)
        return self.handle([inter, intra2.then(unpack)], agreed)


class HierarchicalReduceScatter(_TwoLevelReduction):
    """reduce_scatter of a block per rank, first in the node, then between nodes.

    The blocks are reordered before the first step, in one copy:

        given in the node        [k, j]    for rank k of node j
        given between nodes      [j]       for node j, sums of this node
    """

    has_rest = False

    def __init__(self, signature: Signature, nodes: Nodes, pool: Pool) -> None:
        super().__init__(signature, nodes, pool)
        nbytes, op = signature.nbytes or 0, self._op
        block = self._part // nodes.count
        self.steps = {
            "intra": self.step("reduce_scatter", "intra", self._part, nbytes, reduce_op=op),
            "inter": self.step("reduce_scatter", "inter", block, nbytes // nodes.size, reduce_op=op),
        }
        order = [node[k] for k in range(nodes.size) for node in nodes.ranks]
        self._in_order = order == sorted(order)
        self._order = torch.tensor(order, device=signature.device)

    @property
    def summary(self) -> str:  # noqa: D102
        return "reduce_scatter in the node, then between ranks of the same place in their nodes"

    def start(self, message: Message, agreed: Work | None = None) -> Work:  # noqa: D102
        lease = self.lease()
        given, result = message.inputs[0].view(-1), message.outputs[0].view(-1)
        part = lease.tensor(self._part, self.dtype)
        packed = given if self._in_order else lease.tensor(self.numel, self.dtype)
        earlier, last = message.prepare, _divide(result, self._after)

        def pack() -> None:
            if earlier is not None:
                earlier()
            _pick(given, self._order, packed)

        def finish() -> None:
            if last is not None:
                last()
            lease.release()

        first = earlier if self._in_order else pack
        after = self.following(message, agreed)
        intra = self.begin("intra", (packed,), (part,), message, after=after, prepare=first)
        divide = _divide(part, self._before)
        inter = self.begin("inter", (part,), (result,), message, after=intra, prepare=divide)
        return self.handle([intra, inter.then(finish)], agreed)


def _pick(blocks: torch.Tensor, order: torch.Tensor, out: torch.Tensor) -> None:
    """Write block `order[i]` to position i of `out`; both tensors have `len(order)` blocks."""
    count = len(order)
    with torch.inference_mode():  # else tensors created in inference mode cannot be written
        torch.index_select(blocks.view(count, -1), 0, order, out=out.view(count, -1))


def _divide(values: torch.Tensor, number: int) -> Prepare:
    """Return a function that divides `values` in place; None for a division by one."""
    if number == 1:
        return None

    return partial(divide, values, number)


DECOMPOSITIONS: dict[str, type[Decomposition]] = {
    "all_reduce": HierarchicalAllReduce,
    "broadcast": HierarchicalBroadcast,
    "all_to_all": HierarchicalAllToAll,
    "all_gather": HierarchicalAllGather,
    "reduce_scatter": HierarchicalReduceScatter,
}
