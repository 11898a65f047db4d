"""Steps of verified operations: a library's operations on a separate channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcr_plus.errors import BackendError

if TYPE_CHECKING:
    from mcr_plus.backends.base import Backend, Channel, Gate, Poll, Start
    from mcr_plus.core.message import Message, Signature


class VerifiedSteps:
    """Binds steps.

    Attributes:
        backend, channel: the library, and a channel that only steps use.
    """

    def __init__(self, backend: Backend, channel: Channel) -> None:
        self.backend, self.channel = backend, channel

    def bind(self, signature: Signature) -> VerifiedStep:
        """Return a step for operations of a signature. Nothing is cached here: the caller keeps the step."""
        support = self.backend.supports(signature)
        if not support:
            raise BackendError(f"{self.backend.name} cannot run {signature.describe()}: {support.how}")
        gate = None if signature.is_p2p else self.channel.gate(signature, signature.digest())
        return VerifiedStep(signature, self.channel.bind(signature), gate)


class VerifiedStep:
    """A bound step.

    Attributes:
        start: passes a message to the library once the gate is open.
    """

    __slots__ = ("_gate", "_has_passed", "signature", "start")

    def __init__(self, signature: Signature, start: Start, gate: Gate | None) -> None:
        self.signature, self.start, self._gate = signature, start, gate
        self._has_passed = False

    def gate(self, message: Message) -> Poll | None:
        """Return the library's step before a message; None without such a step."""
        gate = self._gate
        if gate is None or (self._has_passed and not (gate.every or gate.again)):
            return None
        self._has_passed = True
        return gate(message)
