"""Sends and receives that are verified: the checksums of a message follow it, and the receiver compares them.

They are a message of their own, with the same tag on the channel of verified operations, so the payload is
not copied. Messages between two ranks with one tag keep their order, on either channel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

import torch

from mcr_plus.backends.base import ReceivePoll
from mcr_plus.core.message import Message, Signature
from mcr_plus.dispatch.verify.flows import Blocks, first_block
from mcr_plus.errors import DataCorrupted
from mcr_plus.kernels.checksum import BLOCK

if TYPE_CHECKING:
    from mcr_plus.backends.base import Channel, Poll, Start
    from mcr_plus.core.group import Group
    from mcr_plus.dispatch.verify.steps import Step, Steps

_Key = tuple["int | None", int]  # group rank and tag
_SIZES: Final = 256  # numbers of blocks whose messages of checksums are kept bound


class Messages:
    """The messages of a group on a library.

    Attributes:
        open: receives of a tag that have not asked for checksums, in the order in which they were posted.
    """

    def __init__(self, own: Channel, steps: Steps, group: Group, every: int) -> None:
        self._own, self._steps, self._every = own, steps, every
        self.group, self.library = group, steps.backend.name
        self._sent: dict[_Key, int] = {}
        self._got: dict[_Key, int] = {}
        self.open: dict[int, list[VerifiedReceive]] = {}
        self._following: list[tuple[Poll, torch.Tensor]] = []  # checksums on their way
        self._step = lru_cache(_SIZES)(self._bound)

    def bind(self, signature: Signature) -> Start:
        """See `Channel.bind`."""
        start = self._own.bind(signature)
        if not self._every:
            return start
        blocks = Blocks(signature.nbytes or 0)
        if signature.kind == "send":
            return self._send(start, blocks)
        return lambda message: VerifiedReceive(self, signature, blocks, message, start(message))

    def advance(self) -> None:
        """Let the checksums that have been sent move on."""
        if self._following:
            self._following = [each for each in self._following if not _ended(each[0])]

    def is_due(self, counts: dict[_Key, int], key: _Key) -> bool:
        """Count a message; whether it is verified: both its ends count alike."""
        counts[key] = number = counts.get(key, 0) + 1
        return number % self._every == 0

    def _send(self, start: Start, blocks: Blocks) -> Start:
        def begin(message: Message) -> Poll:
            value, peer, tag = message.inputs[0], message.peer, message.match_tag
            words = blocks.of(value) if self.is_due(self._sent, (peer, tag)) and blocks.count else None
            poll = start(message)
            if words is not None:
                self.advance()
                self._following.append((self._message("send", words, peer, tag), words))
            return poll

        return begin

    def _message(
        self, kind: Literal["send", "recv"], words: torch.Tensor, peer: int | None, tag: int
    ) -> Poll:
        step = self._step(kind, words.numel())
        ends = ((words,), ()) if kind == "send" else ((), (words,))
        return step.start(Message(step.signature, *ends, peer=peer, match_tag=tag))

    def _bound(self, kind: Literal["send", "recv"], blocks: int) -> Step:
        return self._steps.bind(
            Signature(
                kind, torch.int64, (blocks,), 8 * blocks, self.group.name, self.group.size,
                backend=self.library, tag="verify", async_op=True,
            )
        )  # fmt: skip

    def asked(self, receive: VerifiedReceive, source: int, blocks: int) -> tuple[Poll, torch.Tensor] | None:
        """Begin to receive the checksums of a message; None if it has none."""
        self.open[receive.tag].remove(receive)
        if not self.is_due(self._got, (source, receive.tag)) or not blocks:
            return None
        words = torch.empty(blocks, dtype=torch.int64, device="cpu")
        return self._message("recv", words, source, receive.tag), words


class VerifiedReceive(ReceivePoll):
    """The poll of a receive that compares checksums.

    Receives of a tag ask for checksums in the order of their messages: one whose sender is that of an earlier
    receive waits for it. It also waits for an earlier one from any source until that shows which message it
    has: it has one, or it would have been given this one, but a library may show it later.
    """

    def __init__(
        self, messages: Messages, signature: Signature, blocks: Blocks, message: Message, poll: Poll
    ) -> None:
        self._messages, self._signature, self._blocks, self._poll = messages, signature, blocks, poll
        self._target = message.outputs[0]
        self.peer, self.tag = message.peer, message.match_tag
        self._is_there = False
        self._has_asked = False
        self._following: tuple[Poll, torch.Tensor] | None = None
        messages.open.setdefault(self.tag, []).append(self)

    def __call__(self) -> bool:
        """See `Poll`."""
        if not self._has_asked and not self._asks():
            return False
        following = self._following
        if following is None:
            return True
        poll, sent = following
        if not poll():
            return False
        got = self._blocks.of(self._target)
        if not torch.equal(got, sent):
            raise self._corrupted(first_block(sent.tolist(), got.tolist()))
        return True

    def arrives(self) -> bool:
        """Poll the message itself; whether it is there."""
        if not self._is_there:
            poll = self._poll
            self._is_there = poll()
            finds = isinstance(poll, ReceivePoll)
            self.source = poll.source if finds and poll.source is not None else self.peer  # type: ignore[attr-defined]
            self.arriving = self._is_there or (finds and poll.arriving)  # type: ignore[attr-defined]
        return self._is_there

    def _asks(self) -> bool:
        if not self.arrives():
            return False
        source, messages = self.source, self._messages
        assert source is not None
        receives = messages.open[self.tag]
        for earlier in receives[: receives.index(self)]:
            earlier.arrives()
            if earlier.source is None or (earlier.source == source and not earlier._asks()):
                return False
        self._has_asked = True
        self._following = messages.asked(self, source, self._blocks.count)
        return True

    def _corrupted(self, block: int | None) -> DataCorrupted:
        group, library = self._messages.group, self._messages.library
        source, rank = (group.ranks[each] for each in (self.source or 0, group.rank))
        operation = self._signature.describe()
        return DataCorrupted(
            f"{operation} on {library} in group '{group.name}': what rank {source} has sent to rank {rank} "
            f"has changed, first in block {block} (from byte {(block or 0) * BLOCK})",
            operation, rank, source, library, block, group.name,
        )  # fmt: skip


def _ended(poll: Poll) -> bool:
    """Whether the checksums of a message have been sent, or cannot be: the receiver is who misses them."""
    try:
        return poll()
    except Exception:
        return True
