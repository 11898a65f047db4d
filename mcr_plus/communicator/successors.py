"""Succession of groups: the group in a new world that replaces a group of the old world."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator


@dataclass
class Succession:
    """Place of a communicator in the line of its predecessors and successors.

    Attributes:
        successor: the latest successor, if any.
        reason: the reason why there is no successor.
        before: the communicators it has replaced; the program may hold only the first.
    """

    successor: Communicator | None = None
    reason: str = ""
    before: list[weakref.ref[Communicator]] = field(default_factory=list)


def succeed(old: Communicator, new: Communicator) -> None:
    """Make `new` the successor of `old` and of all predecessors of `old`."""
    line = [weakref.ref(old), *old.succession.before]
    new.opened.numbers.update(old.opened.numbers)
    new.succession.before = [each for each in line if each() is not None]
    for each in new.succession.before:
        if (earlier := each()) is not None:
            earlier.succession.successor = new
