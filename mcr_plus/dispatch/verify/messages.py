"""Sends and receives that are verified: the digests of a message follow it, and the receiver compares them.

They are a message of their own, with the same tag on the channel of verified operations, so the payload is
not copied. Messages between two ranks with one tag keep their order, on either channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mcr_plus.backends.base import ReceivePoll
from mcr_plus.core.message import Message, Signature
from mcr_plus.dispatch.verify.flows import first_block
from mcr_plus.errors import DataCorrupted
from mcr_plus.kernels.digest import HASHED, block_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcr_plus.backends.base import Channel, Poll, Start
    from mcr_plus.core.group import Group
    from mcr_plus.dispatch.failover.second import SecondLibrary

_Key = tuple["int | None", int]  # group rank and tag


class Messages:
    """The messages of a group on a library.

    Attributes:
        open: receives of a tag whose digests have not been asked for, in the order in which they were posted.
    """

    def __init__(self, own: Channel, library: SecondLibrary, group: Group, every: int) -> None:
        self._own, self._library, self._every = own, library, every
        self.group, self.library = group, library.backend.name
        self._sent: dict[_Key, int] = {}
        self._got: dict[_Key, int] = {}
        self.open: dict[int, list[VerifiedReceive]] = {}
        self._digests: list[tuple[Poll, torch.Tensor]] = []  # on their way

    def bind(self, signature: Signature) -> Start:
        """See `Channel.bind`."""
        start = self._own.bind(signature)
        if not self._every:
            return start
        return self._send(start) if signature.kind == "send" else self._receive(signature, start)

    def advance(self) -> None:
        """Let the digests that have been sent move on."""
        if self._digests:
            self._digests = [each for each in self._digests if not _ended(each[0])]

    def is_due(self, counts: dict[_Key, int], key: _Key) -> bool:
        """Count a message; whether it is verified: both its ends count alike."""
        counts[key] = number = counts.get(key, 0) + 1
        return number % self._every == 0

    def _send(self, start: Start) -> Start:
        def begin(message: Message) -> Poll:
            value, peer, tag = message.inputs[0], message.peer, message.match_tag
            hashes = block_hashes(value) if self.is_due(self._sent, (peer, tag)) else None
            poll = start(message)
            if hashes is not None and hashes.size:
                self.advance()
                words = torch.from_numpy(hashes.view(np.int64))
                self._digests.append((self._digest_message("send", words, peer, tag), words))
            return poll

        return begin

    def _receive(self, signature: Signature, start: Start) -> Start:
        def begin(message: Message) -> Poll:
            return VerifiedReceive(self, signature, message, start(message))

        return begin

    def _digest_message(self, kind: str, words: torch.Tensor, peer: int | None, tag: int) -> Poll:
        signature = Signature(
            "send" if kind == "send" else "recv", torch.int64, tuple(words.shape), words.nbytes,
            self.group.name, self.group.size, backend=self.library, tag="verify", async_op=True,
        )  # fmt: skip
        ends: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
        ends = ((words,), ()) if kind == "send" else ((), (words,))
        return self._library.poll(Message(signature, *map(tuple, ends), peer=peer, match_tag=tag))

    def asked(self, receive: VerifiedReceive, source: int, numel: int) -> tuple[Poll, torch.Tensor] | None:
        """Begin to receive the digests of a message of so many bytes; None if it has none."""
        self.open[receive.tag].remove(receive)
        blocks = -(-numel // HASHED)
        if not self.is_due(self._got, (source, receive.tag)) or not blocks:
            return None
        words = torch.empty(blocks, dtype=torch.int64, device="cpu")
        return self._digest_message("recv", words, source, receive.tag), words


class VerifiedReceive(ReceivePoll):
    """The poll of a receive that compares digests.

    Receives of a tag ask for digests in the order of their messages: one whose sender is that of an earlier
    receive waits for it. An earlier one from any source that has not found its message is not waited for: it
    would have been given this one.
    """

    def __init__(self, messages: Messages, signature: Signature, message: Message, poll: Poll) -> None:
        self._messages, self._signature, self._poll = messages, signature, poll
        self._target = message.outputs[0]
        self.peer, self.tag = message.peer, message.match_tag
        self._is_there = False
        self._has_asked = False
        self._digests: tuple[Poll, torch.Tensor] | None = None
        messages.open.setdefault(self.tag, []).append(self)

    def __call__(self) -> bool:
        """See `Poll`."""
        if not self._has_asked and not self._asks():
            return False
        digests = self._digests
        if digests is None:
            return True
        if not digests[0]():
            return False
        got, sent = block_hashes(self._target), digests[1].numpy().view(np.uint64)
        if not np.array_equal(got, sent):
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
            if earlier.source == source and not earlier._asks():
                return False
        self._has_asked = True
        self._digests = messages.asked(self, source, self._target.nbytes)
        return True

    def _corrupted(self, block: int | None) -> DataCorrupted:
        group, library = self._messages.group, self._messages.library
        source, rank = (group.ranks[each] for each in (self.source or 0, group.rank))
        operation = self._signature.describe()
        return DataCorrupted(
            f"{operation} on {library} in group '{group.name}': what rank {source} has sent to rank {rank} "
            f"has changed, first in block {block} (from byte {(block or 0) * HASHED})",
            operation, rank, source, library, block, group.name,
        )  # fmt: skip


def _ended(poll: Poll) -> bool:
    """Whether the digests of a message have been sent, or cannot be: the receiver is who misses them."""
    try:
        return poll()
    except Exception:
        return True
