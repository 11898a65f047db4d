"""The request of a process that wants to join a job, and how it gets the state beforehand.

Keys, in the part of the job's store in which `mcr_plus.membership.epoch_log` has its own:

    newcomer/<k>              the process, and what it must have in common with the job
    newcomer/<k>/refused      why it is not taken in
    newcomer/<k>/source<t>    where a member gives it the state, beside training; nowhere if that failed
    newcomer/<k>/failed<t>    the newcomer has not got it there: another member is asked, with t+1
    newcomer/<k>/ready        the newcomer may be taken in: it has the state, or does without
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store

TRIES: Final = 3
"""Members that a newcomer asks for the state before it is taken in without it."""
Place = tuple[str, int] | None
"""The address and port of a member; None if it cannot give the state."""


class JoinRequest(NamedTuple):
    """One request, as the newcomer and the members see it."""

    root: Store
    number: int

    @property
    def key(self) -> str:
        """The key of the request itself, and the beginning of the others."""
        return f"newcomer/{self.number}"

    def attempt(self) -> int:
        """How many members have failed to give it the state."""
        return next((t for t in range(TRIES) if not self.root.check([f"{self.key}/failed{t}"])), TRIES)

    def has_source(self, attempt: int) -> bool:
        """Whether a member has said where it gives the state."""
        return self.root.check([f"{self.key}/source{attempt}"])

    def source(self, attempt: int) -> Place:
        """Where that is; only after `has_source`."""
        place = json.loads(self.root.get(f"{self.key}/source{attempt}"))
        return None if place is None else (str(place[0]), int(place[1]))

    def offer(self, attempt: int, place: Place) -> None:
        """Say where this member gives the state."""
        self.root.set(f"{self.key}/source{attempt}", json.dumps(place))

    def note_failure(self, attempt: int) -> None:
        """Ask for another member."""
        self.root.set(f"{self.key}/failed{attempt}", "")

    @property
    def is_ready(self) -> bool:
        """Whether the newcomer waits for nothing but to be taken in."""
        return self.root.check([f"{self.key}/ready"])

    def be_ready(self) -> None:
        """Say so."""
        self.root.set(f"{self.key}/ready", "")
