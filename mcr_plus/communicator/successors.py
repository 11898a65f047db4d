"""What takes the place of a group when another world takes the place of its own."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator


@dataclass
class Succession:
    """The place of one communicator in the line of those that have followed each other.

    Attributes:
        successor: the latest one; None while there is none.
        reason: why there is none.
        before: those whose place it has taken. The program may have kept the first of them alone.
    """

    successor: Communicator | None = None
    reason: str = ""
    before: list[weakref.ref[Communicator]] = field(default_factory=list)


def succeed(old: Communicator, new: Communicator) -> None:
    """Let one communicator take the place of another, and of those whose place that one had taken."""
    line = [weakref.ref(old), *old.succession.before]
    new.opened.numbers.update(old.opened.numbers)
    new.succession.before = [each for each in line if each() is not None]
    for each in new.succession.before:
        if (earlier := each()) is not None:
            earlier.succession.successor = new
