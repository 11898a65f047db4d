"""Broadcast for codecs with `keeps_received`: encode once, and forward payloads inside nodes as bytes.

    lengths    payload length, and a flag if a rank needs all values: 8 bytes from each rank to all
    inter      payload from the root to the rank with the root's local index on every other node
    intra2     payload from that rank to the other ranks of its node

Every rank applies the payload to the value it holds, so the link carries one payload per node, not per rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mcr_plus.core.buffers import Pool
from mcr_plus.core.message import Extras, Message, Signature
from mcr_plus.core.work import Work
from mcr_plus.hierarchy.decompose import Decomposition
from mcr_plus.hierarchy.nodes import Nodes, Part
from mcr_plus.pipeline.stage import Issue, Next


class ForwardedBroadcast(Decomposition):
    """Steps that move the bytes of a payload; the compress stage encodes and applies it."""

    has_rest = False

    def __init__(self, signature: Signature, nodes: Nodes, pool: Pool) -> None:
        super().__init__(signature, nodes, pool)
        assert signature.root is not None
        self._root_node, self._leader = nodes.place(signature.root)
        self._is_leader = nodes.index == self._leader
        # Payload lengths vary, so the broadcast is an all_gather to which only the leader contributes.
        unsized = {"dtype": torch.uint8, "counts_agreed": False, "compress": False}
        parts: tuple[Part, ...] = ("inter", "intra2")
        self.steps = {
            part: self.step("all_gather_v", part, 0, 0, **unsized).replace(shape=(), nbytes=None, key=None)
            for part in parts
        }

    @property
    def summary(self) -> str:  # noqa: D102
        return "encoded once, one payload to each node, forwarded in the node as bytes, applied by each rank"

    def bind(self, bind: Callable[[Part, Signature], Issue], next: Next) -> None:  # noqa: D102
        super().bind(bind, next)

        def instead(signature: Signature) -> Issue | None:
            return Issue(self._forward) if signature.kind == "all_gather_v" else None

        self._whole = next.moving(self.signature, instead)

    def start(self, message: Message, agreed: Work | None = None) -> Work:  # noqa: D102
        after = self.following(message, agreed)
        return self._whole(message.with_tensors(message.inputs, message.outputs, after=after))

    def _forward(self, message: Message) -> Work:
        """Move the payload; the length is known after `message.prepare`."""
        size, count = self.nodes.size, self.nodes.count
        across = Message(self.steps["inter"], (), (), **_of_steps(message))
        inside = Message(self.steps["intra2"], (), (), **_of_steps(message))

        at_leader: list[torch.Tensor] = []

        def fill_across() -> None:
            assert message.prepare is not None
            message.prepare()
            arrived = torch.empty_like(message.outputs[0])
            at_leader.append(arrived)
            across.inputs, across.outputs = message.inputs, (arrived,)
            across.output_counts = _only(self._root_node, count, arrived.numel())

        def fill_inside() -> None:
            if at_leader:
                given = at_leader[0]
            else:
                assert message.prepare is not None
                message.prepare()
                given = message.inputs[0]
            inside.inputs, inside.outputs = (given,), message.outputs
            inside.output_counts = _only(self._leader, size, message.outputs[0].numel())

        inside.prepare = fill_inside
        if self._is_leader:
            across.prepare = fill_across
            inside.after = self._issues["inter"](across)
        return self._issues["intra2"](inside)


def _of_steps(message: Message) -> Extras:
    return {
        "after": message.after,
        "fused": message.fused,
        "codec": message.codec,
        "uncompressed_bytes": message.uncompressed_bytes,
        "counts_known": False,
    }


def _only(index: int, ranks: int, numel: int) -> tuple[int, ...]:
    return tuple(numel if rank == index else 0 for rank in range(ranks))
