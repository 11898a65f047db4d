"""Verified sends and receives: the receiver compares checksums.

If the library supports it, messages carry their checksums. Otherwise the checksums follow as a separate
message with the same tag on the channel of verified operations, so that the payload is not copied. Messages
between two ranks with the same tag keep their order on both channels.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from mcr_plus.backends.base import ReceivePoll
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import DataCorrupted
from mcr_plus.kernels.checksum_sizes import BLOCK
from mcr_plus.reliability.verify.checksum_table import Blocks

if TYPE_CHECKING:
    from mcr_plus.backends.base import Channel, Poll, Start
    from mcr_plus.core.group import Group
    from mcr_plus.reliability.verify.steps import VerifiedStep, VerifiedSteps

_Key = tuple["int | None", int]  # group rank and tag
_Words = tuple[torch.Tensor, int]  # checksums, and their address


class VerifiedMessages:
    """Messages of a group on a library.

    Attributes:
        open: receives that have not requested checksums, by tag, in the order of posting.
    """

    def __init__(self, own: Channel, steps: VerifiedSteps, group: Group, every: int) -> None:
        self._own, self._steps, self._every = own, steps, every
        self.group, self.library = group, steps.backend.name
        self._sent: dict[_Key, int] = {}
        self._got: dict[_Key, int] = {}
        self.open: dict[int, list[VerifiedReceive]] = {}
        self._following: list[tuple[Poll, torch.Tensor]] = []  # checksums in transit

    def bind(self, signature: Signature) -> Start:
        """See `Channel.bind`."""
        start = self._own.bind(signature)
        if not self._every:
            return start
        carrying = self._own.bind_checked(signature, self._every, partial(self.corrupted, signature))
        if carrying is not None:
            return self._carrying(signature, start, carrying)
        checks = _Checks(self._steps, signature, self.group)
        if signature.kind == "send":
            return self._send(start, checks)
        return lambda message: VerifiedReceive(self, signature, checks, message, start(message))

    @property
    def needs_polls(self) -> bool:
        """True if checksums in transit advance only when polled."""
        return bool(self._following) and self._steps.backend.host_driven

    def advance(self) -> None:
        """Advance the sent checksums."""
        if self._following:
            self._following = [each for each in self._following if not _ended(each[0])]

    def _is_due(self, counts: dict[_Key, int], peer: int | None, tag: int) -> bool:
        """Count a message, and return whether it is verified. Both ends count in the same way."""
        if self._every == 1:
            return True
        key = peer, tag
        counts[key] = number = counts.get(key, 0) + 1
        return number % self._every == 0

    def _carrying(self, signature: Signature, start: Start, carrying: Start) -> Start:
        if self._every == 1 or signature.kind == "recv":
            return carrying

        def begin(message: Message) -> Poll:
            is_due = self._is_due(self._sent, message.peer, message.match_tag)
            return carrying(message) if is_due else start(message)

        return begin

    def corrupted(self, signature: Signature, source: int, block: int) -> DataCorrupted:
        """Return the error for a message from a group rank; `block`: the first changed block."""
        group = self.group
        sender, receiver = group.named(source), group.named(group.rank)
        operation = signature.describe()
        return DataCorrupted(
            f"{operation} on {self.library} in group '{group.name}': what {sender} has sent to "
            f"{receiver} has changed, first in block {block} (from byte {block * BLOCK})",
            operation, group.ranks[group.rank], group.ranks[source], self.library, block, group.name,
        )  # fmt: skip

    def _send(self, start: Start, checks: _Checks) -> Start:
        blocks = checks.blocks

        def begin(message: Message) -> Poll:
            peer, tag = message.peer, message.match_tag
            if not self._is_due(self._sent, peer, tag) or not blocks.count:
                return start(message)
            words, address = own = checks.words()
            blocks.take(message.inputs[0].data_ptr(), address)
            poll = start(message)
            self.advance()
            following = self._message(checks.step, words, peer, tag)
            if _ended(following):
                checks.spare.append(own)
            else:
                self._following.append((following, words))
            return poll

        return begin

    def _message(self, step: VerifiedStep, words: torch.Tensor, peer: int | None, tag: int) -> Poll:
        ends = ((words,), ()) if step.signature.kind == "send" else ((), (words,))
        message = Message(step.signature, *ends)
        message.peer, message.match_tag = peer, tag  # takes a third of the constructor's time
        return step.start(message)

    def asked(self, receive: VerifiedReceive, source: int, checks: _Checks) -> tuple[Poll, _Words] | None:
        """Begin to receive the checksums of a message; return None if it has no checksums."""
        self.open[receive.tag].remove(receive)
        if not self._is_due(self._got, source, receive.tag) or not checks.blocks.count:
            return None
        words = checks.words()
        return self._message(checks.step, words[0], source, receive.tag), words


class _Checks:
    """Checksums of messages of a signature: takes them, and moves them by a step."""

    def __init__(self, steps: VerifiedSteps, signature: Signature, group: Group) -> None:
        self.blocks = blocks = Blocks(signature.nbytes or 0)
        self.step = steps.bind(
            Signature(
                signature.kind, torch.int64, (blocks.count,), 8 * blocks.count, group.name, group.size,
                backend=steps.backend.name, tag="verify", async_op=True,
            )
        )  # fmt: skip
        self.spare: list[_Words] = []  # memory of ended messages, for reuse

    def words(self) -> _Words:
        """Return memory for the checksums of one message."""
        return self.spare.pop() if self.spare else self.blocks.new()


class VerifiedReceive(ReceivePoll):
    """Poll of a receive that compares checksums.

    Receives with the same tag request checksums in the order of their messages: a receive waits for an
    earlier receive with the same sender. It also waits for an earlier receive from any source until the
    sender is known: the earlier receive already has a message, but a library may report it late.
    """

    def __init__(
        self, messages: VerifiedMessages, signature: Signature, checks: _Checks, message: Message, poll: Poll
    ) -> None:
        self._messages, self._signature, self._checks, self._poll = messages, signature, checks, poll
        self._target = message.outputs[0]
        self.peer, self.tag = message.peer, message.match_tag
        self._is_there = False
        self._has_asked = False
        self._following: tuple[Poll, _Words] | None = None
        messages.open.setdefault(self.tag, []).append(self)

    def __call__(self) -> bool:
        """See `Poll`."""
        if not self._has_asked and not self._asks():
            return False
        following = self._following
        if following is None:
            return True
        poll, words = following
        if not poll():
            return False
        checks = self._checks
        if (block := checks.blocks.changed(self._target.data_ptr(), words[1])) is not None:
            assert self.source is not None
            raise self._messages.corrupted(self._signature, self.source, block)
        self._following = None
        checks.spare.append(words)
        return True

    def arrives(self) -> bool:
        """Poll the message itself; return whether it has arrived."""
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
        for earlier in () if receives[0] is self else receives[: receives.index(self)]:
            earlier.arrives()
            if earlier.source is None or (earlier.source == source and not earlier._asks()):
                return False
        self._has_asked = True
        self._following = messages.asked(self, source, self._checks)
        return True


def _ended(poll: Poll) -> bool:
    """Return whether a message's checksums have been sent or have failed; only the receiver notices."""
    try:
        return poll()
    except Exception:
        return True
