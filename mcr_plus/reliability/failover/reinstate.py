"""Reinstate a failed library: each rank reopens it in the background, and the ranks vote.

Votes are operations of the second library, at the same operation of the program on all ranks. The first votes
decide when to try; then each rank opens the library in a thread, and further votes decide whether all ranks
have opened it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from mcr_plus.core.message import Message, Signature

if TYPE_CHECKING:
    from mcr_plus.backends.base import Channel, Poll
    from mcr_plus.core.group import Group

_FIRST_TRY: Final = 2.0  # seconds after a failure
_LAST_TRY: Final = 60.0
_PATIENCE: Final = 1.0  # seconds that closing a group waits for a thread that opens the library
_LINGERING: Final = 4  # maximum number of such threads: gloo may notice a missing peer only after its timeout
_log = logging.getLogger("mcr_plus")


Reopen = Callable[[int, Callable[[], bool]], "Channel"]
"""Opens a new channel of the library for the n-th time; fails once the function returns true."""


class Reinstatement:
    """Votes on the return of a library.

    Attributes:
        gate: gate of a vote that has not begun.
    """

    def __init__(self, reopen: Reopen) -> None:
        self._reopen = reopen
        self.gate: Poll | None = None
        self._message: Message | None = None
        self._poll: Poll | None = None
        self._tries = 0
        self._patience = _FIRST_TRY
        self._next_try = 0.0
        self._try: _Try | None = None
        self._given_up: list[_Try] = []  # abandoned tries that are still opening

    def after_failure(self) -> None:
        """Start again after a new failure of the library."""
        self.gate = self._message = self._poll = self._try = None
        self._next_try = time.monotonic() + self._patience

    @property
    def is_voting(self) -> bool:
        """True if the result of a vote is pending."""
        return self._poll is not None

    def ballot(self, group: Group, library: str) -> Message:
        """Return the vote's operation: the minimum over the ranks of 1 (yes), 0 (not yet) or -1 (never)."""
        if self._message is None:
            values = torch.tensor([self._own_vote()], dtype=torch.int32, device="cpu")
            signature = Signature(
                "all_reduce", values.dtype, (1,), values.nbytes, group.name, group.size, reduce_op="MIN",
                tag="failover", backend=library, async_op=True,
            )  # fmt: skip
            self._message = Message(signature, (values,), (values,))
        return self._message

    def begin(self, poll: Poll) -> None:
        """Begin to wait for a started vote with this poll."""
        self._poll, self.gate = poll, None

    def result(self) -> int | None:
        """Return the result of the vote; None if it is not known yet."""
        assert self._poll is not None
        assert self._message is not None
        if not self._poll():
            return None
        (values,) = self._message.outputs
        self._poll = self._message = None
        return int(values)

    def _own_vote(self) -> int:
        if self._try is None:
            lingering = sum(each.is_alive() for each in self._given_up)
            return int(time.monotonic() >= self._next_try and lingering < _LINGERING)
        if self._try.is_alive():
            return 0
        return -1 if self._try.channel is None else 1

    def decided(self, result: int) -> Channel | None:
        """Apply the ranks' decision; return the new channel if all ranks have opened it."""
        if self._try is None:
            if result == 1:
                self._tries += 1
                self._try = _Try(partial(self._reopen, self._tries))
                self._try.start()
            return None
        if result == 0:
            return None
        tried, self._try = self._try, None
        self._patience = min(2 * self._patience, _LAST_TRY)
        self._next_try = time.monotonic() + self._patience
        if result == 1:
            return tried.channel
        if tried.problem:
            _log.info("failover: the library could not be opened again: %s", tried.problem)
        tried.drop()
        self._given_up = [each for each in (*self._given_up, tried) if each.is_alive()]
        return None

    def give_up(self) -> None:
        """Release all channels, including channels being opened, because the group is closed."""
        if self._try is not None:
            self._try.drop()
            self._try.join(_PATIENCE)
            self._try = None


class _Try(threading.Thread):
    """An attempt to open the library. `channel`: the new channel; None before success."""

    def __init__(self, open_channel: Callable[[Callable[[], bool]], Channel]) -> None:
        super().__init__(name="mcr-failover", daemon=True)
        self._open_channel = open_channel
        self.channel: Channel | None = None
        self.problem = ""
        self._lock = threading.Lock()
        self._is_dropped = False

    def drop(self) -> None:
        """Release the channel, now or once it is open."""
        with self._lock:
            self._is_dropped = True
            if self.channel is not None:
                self.channel.release()

    def run(self) -> None:
        try:
            channel = self._open_channel(lambda: self._is_dropped)
            with self._lock:
                self.channel = channel
                if self._is_dropped:
                    channel.release()
        except Exception as error:  # a library may raise anything; the next vote reports it
            self.problem = str(error)
