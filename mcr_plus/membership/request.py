"""The request of a process that wants to join a job, and the transfer of the state to it beforehand.

Keys, in the part of the job's store that `mcr_plus.membership.epoch_log` uses:

    newcomer/<k>              the process, and properties that it must share with the job
    newcomer/<k>/refused      why it is not taken in
    newcomer/<k>/source<t>    address where a member offers the state, during training; null if it cannot
    newcomer/<k>/failed<t>    the newcomer did not get the state there: another member is asked, with t+1
    newcomer/<k>/ready        the newcomer may be taken in, with the state or without
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from mcr_plus.core.job_store import JobStore

TRIES: Final = 3
"""Number of members that a newcomer asks for the state before it is taken in without the state."""
Place = tuple[str, int] | None
"""Address and port of a member; None if it cannot give the state."""


class JoinRequest(NamedTuple):
    """One request, as the newcomer and the members see it."""

    root: JobStore
    number: int

    @property
    def key(self) -> str:
        """Key of the request itself, and prefix of its other keys."""
        return f"newcomer/{self.number}"

    def attempt(self) -> int:
        """Number of members that have failed to give the newcomer the state."""
        return next((t for t in range(TRIES) if not self.root.check([f"{self.key}/failed{t}"])), TRIES)

    def has_source(self, attempt: int) -> bool:
        """True if a member has published where it offers the state."""
        return self.root.check([f"{self.key}/source{attempt}"])

    def source(self, attempt: int) -> Place:
        """Address where the state is offered; only after `has_source`."""
        place = json.loads(self.root.get(f"{self.key}/source{attempt}"))
        return None if place is None else (str(place[0]), int(place[1]))

    def offer(self, attempt: int, place: Place) -> None:
        """Publish where this member offers the state."""
        self.root.set(f"{self.key}/source{attempt}", json.dumps(place))

    def note_failure(self, attempt: int) -> None:
        """Ask for another member."""
        self.root.set(f"{self.key}/failed{attempt}", "")

    @property
    def is_ready(self) -> bool:
        """True if the newcomer only waits to be taken in."""
        return self.root.check([f"{self.key}/ready"])

    def be_ready(self) -> None:
        """Mark the newcomer as ready to be taken in."""
        self.root.set(f"{self.key}/ready", "")
