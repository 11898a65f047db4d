"""Steps of verified operations: operations of a library on a separate channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcr_plus.errors import BackendError

if TYPE_CHECKING:
    from mcr_plus.backends.base import Backend, Channel, Gate, Poll, Start
    from mcr_plus.core.message import Message, Signature


class VerifiedSteps:
    """Binds steps.

    Attributes:
        backend, channel: the library, and its channel for steps alone.
    """

    def __init__(self, backend: Backend, channel: Channel) -> None:
        self.backend, self.channel = backend, channel

    def bind(self, signature: Signature) -> VerifiedStep:
        """Return a step for operations of a signature. The caller keeps it: nothing is cached here."""
        support = self.backend.supports(signature)
        if not support:
            raise BackendError(f"{self.backend.name} cannot run {signature.describe()}: {support.how}")
        gate = None if signature.is_p2p else self.channel.gate(signature, signature.digest())
        return VerifiedStep(signature, self.channel.bind(signature), gate)


class VerifiedStep:
    """A bound step.

    Attributes:
        start: hands a message to the library once its gate is open.
    """

    __slots__ = ("_gate", "_has_passed", "signature", "start")

    def __init__(self, signature: Signature, start: Start, gate: Gate | None) -> None:
        self.signature, self.start, self._gate = signature, start, gate
        self._has_passed = False

    def gate(self, message: Message) -> Poll | None:
        """Return the library's step before a message; None if there is nothing to wait for."""
        gate = self._gate
        if gate is None or (self._has_passed and not (gate.every or gate.again)):
            return None
        self._has_passed = True
        return gate(message)
