"""Gate of a library that another library may replace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcr_plus.errors import McrError

if TYPE_CHECKING:
    from mcr_plus.backends.base import Gate, Poll
    from mcr_plus.core.message import Message
    from mcr_plus.reliability.failover.channel import FailoverChannel


class FirstGate:
    """Gate of the first library; open once the library has failed."""

    def __init__(self, channel: FailoverChannel, gate: Gate) -> None:
        self._channel, self._gate = channel, gate

    @property
    def every(self) -> bool:
        """See `Gate`."""
        return self._channel.stands and self._gate.every

    @property
    def again(self) -> bool:
        """See `Gate`."""
        return self._channel.stands and self._gate.again

    def __call__(self, message: Message) -> Poll | None:
        """See `Gate`."""
        channel = self._channel
        if not channel.stands:
            return None
        try:
            poll = self._gate(message)
        except McrError:
            raise
        except Exception as error:
            channel.fail(str(error), channel.slot.backend.breaks(error))
            return None
        if poll is None:
            return None
        inner = poll

        def passed() -> bool:
            if not channel.stands:
                return True
            try:
                return inner()
            except McrError:
                raise
            except Exception as error:
                channel.fail(str(error), channel.slot.backend.breaks(error))
                return True

        return passed
