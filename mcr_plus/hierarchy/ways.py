"""The steps of each kind of operation: their signatures, and the messages of one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch

from mcr_plus.compression.pool import Loan, Pool
from mcr_plus.dispatch.work import JointWork, Work
from mcr_plus.hierarchy.nodes import Nodes, Part
from mcr_plus.interfaces import Issue, Next
from mcr_plus.message import Kind, Message, Signature

Prepare = Callable[[], None] | None


class Way(ABC):
    """An operation made of steps.

    `steps`: the signature of each, by the group it runs in; the same on all ranks, so that what cannot be
    done is known to all, also of steps that only some nodes have. `remark`: what else there is to say.
    """

    steps: dict[Part, Signature]
    remark = ""

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
    def says(self) -> str:
        """The steps, for people."""

    @abstractmethod
    def issue(self, message: Message, agreed: Work | None = None) -> Work:
        """Start one call; if `agreed` is given, once that is done."""

    def encode(self) -> None:  # noqa: B027 - most need not know
        """Told before `bind` if the step between nodes is compressed."""

    def bind(self, bind: Callable[[Part, Signature], Issue], next: Next) -> None:  # noqa: ARG002
        """Bind the steps; `next` is the rest of the pipeline of the group itself."""
        self._issues = {part: bind(part, step) for part, step in self.steps.items()}

    # -- for subclasses ---------------------------------------------------------------------------

    def step(self, kind: Kind, part: Part, numel: int, nbytes: int, **changes: Any) -> Signature:
        """The signature of a step on tensors of `numel` elements each."""
        ranks = self.nodes.count if part == "across" else self.nodes.size
        like = self.signature.replace(
            reduce_op=None, root=None, parts=None, async_op=True, call=self.signature.as_call()
        )
        # What a codec keeps between calls belongs to the step that it works on.
        key = self.signature.key if part == "across" else None
        return like.replace(
            kind=kind, shape=(numel,), nbytes=nbytes, ranks=ranks, group=self._group(part), key=key, **changes
        )

    def start(
        self,
        part: Part,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        message: Message,
        *,
        after: Work | None,
        prepare: Prepare = None,
    ) -> Work:
        """Start a step of the operation `message`."""
        step = Message(self.steps[part], inputs, outputs, after=after, prepare=prepare, fused=message.fused)
        return self._issues[part](step)

    def lend(self) -> Loan:
        """Where to borrow space for one call: several may be in flight."""
        return self._pool.lend(torch.device(self.signature.device))

    def following(self, message: Message, agreed: Work | None) -> Work | None:
        """What the first step must wait for."""
        if message.after is None or agreed is None:
            return message.after or agreed
        return JointWork([message.after, agreed], self.signature.kind, nbytes=0)

    def handle(self, works: list[Work], agreed: Work | None) -> Work:
        """One handle for the steps."""
        signature = self.signature
        assert signature.nbytes is not None
        work = _Steps(works, signature.kind, nbytes=signature.nbytes, tag=signature.tag, legs=True)
        work.agreed = agreed
        return work

    def _group(self, part: Part) -> str:
        names = {"in": f"node{self.nodes.node}", "across": f"across{self.nodes.index}"}
        return f"{self.signature.group}/{names.get(part, f'node{self.nodes.node}/back')}"

    # -- what does not fall into equal parts ------------------------------------------------------

    def bind_rest(self, next: Next) -> None:
        """Bind the operation on those last elements that do not fall into equal parts: the flat way."""
        rest = self.numel % self.nodes.size
        if rest:
            nbytes = rest * self.dtype.itemsize
            like = self.signature.replace(shape=(rest,), nbytes=nbytes, parts=None, key=None)
            like = like.replace(compress=False, async_op=True, call=self.signature.as_call())
            self._rest = like, next(like)

    def start_rest(self, given: torch.Tensor, result: torch.Tensor, after: Work | None) -> list[Work]:
        """Start that operation, if there is one; beside the steps, in the group itself."""
        if self._rest is None:
            return []
        signature, issue = self._rest
        at = self.numel - signature.shape[0]
        source = given[at:]
        target = source if given is result else result[at:]
        return [issue(Message(signature, (source,), (target,), after=after))]

    # -- agreement --------------------------------------------------------------------------------

    def told(self, next: Next, *, always: bool) -> Issue:
        """`issue`, with its place in the order of the group itself.

        The steps are compared between ranks in their groups, which a rank that issues something else in the
        group itself never looks at. So the first call, or `always` every one, begins with an operation there
        that moves nothing: it has a number, and the ranks compare it.
        """
        told = self.signature.replace(nbytes=0, compress=False, parts=None, key=None, async_op=True)
        tell, due = next(told), True

        def issue(message: Message) -> Work:
            nonlocal due
            if not due:
                return self.issue(message)
            due = always
            return self.issue(message, tell(Message(told)))

        return issue


class _Steps(JointWork):
    """The steps of a call. That ranks disagree about it is said before what this has led to."""

    __slots__ = ("agreed",)

    agreed: Work | None

    def wait(self, timeout: float | timedelta | None = None) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        began = perf_counter()
        if self.agreed is not None:
            self.agreed.wait(seconds)
        super().wait(None if seconds is None else max(0.0, seconds - (perf_counter() - began)))


class AllReduce(Way):
    """reduce_scatter, all_reduce, all_gather.

    Values [n] fall into L equal parts, and n % L last elements that go the flat way, so nothing is padded or
    copied. AVG divides once, when the sum is complete; a codec gets means, which stay in its range.
    """

    def __init__(self, signature: Signature, nodes: Nodes, pool: Pool) -> None:
        super().__init__(signature, nodes, pool)
        self._part = self.numel // nodes.size
        self._whole = self._part * nodes.size
        nbytes = self._part * self.dtype.itemsize
        self._op = "SUM" if signature.reduce_op == "AVG" else signature.reduce_op
        part, all_parts = self._part, nbytes * nodes.size
        self.steps = {
            "in": self.step("reduce_scatter", "in", part, all_parts, reduce_op=self._op),
            "across": self.step("all_reduce", "across", part, nbytes, reduce_op=self._op),
            "back": self.step("all_gather", "back", part, all_parts),
        }
        self._before, self._after = 1, nodes.size * nodes.count if signature.reduce_op == "AVG" else 1

    @property
    def says(self) -> str:  # noqa: D102
        return "reduce_scatter in the node, all_reduce of each part between nodes, all_gather in the node"

    def encode(self) -> None:  # noqa: D102
        if self.signature.reduce_op == "AVG":
            self.steps["across"] = self.steps["across"].replace(reduce_op="AVG")
            self._before, self._after = self.nodes.size, 1

    def bind(self, bind: Callable[[Part, Signature], Issue], next: Next) -> None:  # noqa: D102
        super().bind(bind, next)
        self.bind_rest(next)

    def issue(self, message: Message, agreed: Work | None = None) -> Work:  # noqa: D102
        loan = self.lend()
        part = loan.tensor(self._part, self.dtype)
        given = message.inputs[0].view(-1)
        result = given if message.outputs[0] is message.inputs[0] else message.outputs[0].view(-1)
        whole, after = self._whole, self.following(message, agreed)
        first = self.start("in", (given[:whole],), (part,), message, after=after, prepare=message.prepare)
        rest = self.start_rest(given, result, first if message.prepare else after)
        second = self.start(
            "across", (part,), (part,), message, after=first, prepare=_divide(part, self._before)
        )
        third = self.start(
            "back", (part,), (result[:whole],), message, after=second, prepare=_divide(part, self._after)
        )
        return self.handle([first, second, third.then(loan.give_back), *rest], agreed)


class Broadcast(Way):
    """scatter in the root's node, broadcast between nodes, all_gather; parts as those of `AllReduce`.

    The root too gets its parts back, so that after a codec all ranks have the same.
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
        self.steps = {
            "in": self.step("scatter", "in", part, all_parts, root=root_index),
            "across": self.step("broadcast", "across", part, nbytes, root=self._root_node),
            "back": self.step("all_gather", "back", part, all_parts),
        }

    @property
    def says(self) -> str:  # noqa: D102
        return "scatter in the root's node, broadcast of each part between nodes, all_gather in the node"

    def bind(self, bind: Callable[[Part, Signature], Issue], next: Next) -> None:  # noqa: D102
        super().bind(bind, next)
        self.bind_rest(next)

    def issue(self, message: Message, agreed: Work | None = None) -> Work:  # noqa: D102
        loan = self.lend()
        part = loan.tensor(self._part, self.dtype)
        values = message.outputs[0].view(-1)
        whole, prepare = self._whole, message.prepare
        begin = after = self.following(message, agreed)
        works: list[Work] = []
        if self.nodes.node == self._root_node:
            source = (values[:whole],) if self._is_root else ()
            after = self.start("in", source, (part,), message, after=after, prepare=prepare)
            works.append(after)
            prepare = None
        across = self.start("across", (part,), (part,), message, after=after, prepare=prepare)
        first = works[0] if works else across
        back = self.start("back", (part,), (values[:whole],), message, after=across)
        rest = self.start_rest(values, values, first if message.prepare else begin)
        return self.handle([*works, across, back.then(loan.give_back), *rest], agreed)


class AllToAll(Way):
    """Blocks [G, b], one per rank of the group, first to the right node, then to the right rank.

    Between the steps blocks change places, each time in one copy:

        to send across     [j, k]    for rank k of node j
        from across        [j, k]    from node j, for rank k of this node
        to send inside     [k, j]
        from inside        [k, j]    from rank k of node j
    """

    def __init__(self, signature: Signature, nodes: Nodes, pool: Pool) -> None:
        super().__init__(signature, nodes, pool)
        nbytes = signature.nbytes or 0
        self.steps = {
            "across": self.step("all_to_all", "across", self.numel, nbytes),
            "back": self.step("all_to_all", "back", self.numel, nbytes),
        }
        self._ranks = nodes.count * nodes.size
        order = [rank for node in nodes.ranks for rank in node]
        self._in_order = order == sorted(order)
        places = {rank: (j, k) for j, node in enumerate(nodes.ranks) for k, rank in enumerate(node)}
        inside = [j * nodes.size + k for k in range(nodes.size) for j in range(nodes.count)]
        result = [places[rank][1] * nodes.count + places[rank][0] for rank in range(self._ranks)]
        self._order, self._inside, self._result = (
            torch.tensor(each, device=signature.device) for each in (order, inside, result)
        )

    @property
    def says(self) -> str:  # noqa: D102
        return "all_to_all between ranks of the same place in their nodes, then all_to_all in the node"

    def issue(self, message: Message, agreed: Work | None = None) -> Work:  # noqa: D102
        loan = self.lend()
        given, result = message.inputs[0].view(-1), message.outputs[0].view(-1)
        # Each is free again when the other is written: one holds what is sent, one what is received.
        sent, received = loan.tensor(self.numel, self.dtype), loan.tensor(self.numel, self.dtype)
        earlier = message.prepare

        def pack() -> None:
            if earlier is not None:
                earlier()
            if not self._in_order:
                self._pick(given, self._order, sent)

        def turn() -> None:
            self._pick(received, self._inside, sent)

        def unpack() -> None:
            self._pick(received, self._result, result)
            loan.give_back()

        first = given if self._in_order else sent
        after = self.following(message, agreed)
        across = self.start("across", (first,), (received,), message, after=after, prepare=pack)
        back = self.start("back", (sent,), (received,), message, after=across, prepare=turn)
        return self.handle([across, back.then(unpack)], agreed)

    def _pick(self, blocks: torch.Tensor, order: torch.Tensor, out: torch.Tensor) -> None:
        """Write block `order[i]` to place i of `out`."""
        torch.index_select(blocks.view(self._ranks, -1), 0, order, out=out.view(self._ranks, -1))


def _divide(values: torch.Tensor, number: int) -> Prepare:
    """What divides `values` in place; nothing by one."""
    if number == 1:
        return None

    def divide() -> None:
        values.div_(number)

    return divide
