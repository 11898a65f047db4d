"""Fallback library: starts operations in issue order, each when its gate opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcr_plus.backends.base import done
from mcr_plus.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mcr_plus.backends.base import Backend, Channel, Gate, Poll, Start
    from mcr_plus.core.message import Message, Signature
    from mcr_plus.reliability.failover.attempt import FailoverPoll


class SecondLibrary:
    """The library that takes over.

    Attributes:
        backend, channel: the library, and a channel that only failover uses.
    """

    def __init__(self, backend: Backend, channel: Channel, rank: int) -> None:
        """Use `channel`; `rank` is the rank of this process in the group."""
        self.backend, self.channel = backend, channel
        self._rank = rank
        self._bound: dict[Signature, tuple[Start, Gate | None]] = {}
        self._passed: set[Signature] = set()  # signatures whose gate an operation has passed
        self._repeated: list[FailoverPoll] = []  # complete here, but run again for others

    @property
    def is_busy(self) -> bool:
        """True if repeated operations are running for other ranks."""
        return bool(self._repeated)

    def start(self, attempt: FailoverPoll, sources: Mapping[int, int]) -> bool:
        """Start an operation unless its gate is closed; return whether it has started.

        `sources`: see `Verdict`.
        """
        if attempt.second is None:
            signature = attempt.binding.signature.replace(backend=self.backend.name, algorithm=None)
            source = sources.get(attempt.number)
            sent = None if source is None else attempt.sent(signature, source, self._rank)
            attempt.second = sent or attempt.again(signature)
            attempt.library = self.backend.name
        if attempt.gate is None:
            attempt.gate = self.gate(attempt.second)
        if not attempt.gate():
            return False
        attempt.poll = self.poll(attempt.second)
        if attempt.is_done:
            self._repeated.append(attempt)
        return True

    def advance(self) -> None:
        """Poll operations for which the program does not wait."""
        self._repeated = [each for each in self._repeated if each.poll is not None and not each.poll()]

    def gate(self, message: Message) -> Poll:
        """Return the poll of the library's step before an operation; true at once without such a step."""
        signature = message.signature
        _, gate = self._binding(signature)
        if gate is None or (signature in self._passed and not (gate.every or gate.again)):
            return done
        self._passed.add(signature)
        return gate(message) or done

    def poll(self, message: Message) -> Poll:
        """Start an operation whose gate is open."""
        start, _ = self._binding(message.signature)
        return start(message)

    def _binding(self, signature: Signature) -> tuple[Start, Gate | None]:
        if signature not in self._bound:
            support = self.backend.supports(signature)
            if not support:
                raise BackendError(f"{self.backend.name} cannot run {signature.describe()}: {support.how}")
            gate = self.channel.gate(signature, signature.digest())
            self._bound[signature] = self.channel.bind(signature), gate
        return self._bound[signature]

    def clear(self) -> None:
        """Drop repeated operations: they are no longer polled."""
        self._repeated.clear()
