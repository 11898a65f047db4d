"""The status pages of ranks on other hosts, which the agent of this host fetches while somebody looks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Collection, Mapping
from typing import Any, Final

from mcr_plus.hosts.page import Shown, Unreadable, read

_PATIENCE: Final = 0.5  # seconds that other hosts have to answer at first
_NAP: Final = 0.02
_OLD: Final = 5.0  # seconds after which an answer counts for nothing


class RemoteStatus:
    """The agents' pages that this process looks at; agents fetch other pages until `close`."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # inode of a page → descriptor

    def pages(self, path: str, about: Mapping[str, Any], ranks: Collection[int]) -> dict[int, Shown]:
        """The pages of these ranks of a job, as far as they come; times in them are of this host's clock.

        `path`: of the agent's page. `about`: the description on a page of the job. Waits a moment for the
        first answers.
        """
        began, patience = time.monotonic(), 0.0
        try:
            inode = os.stat(path).st_ino
            if inode not in self._held:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                self._held[inode] = descriptor
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                patience = _PATIENCE
        except OSError:
            return {}
        while True:
            found = _answers(self._held[inode], about, began if patience else 0.0)
            if found.keys() >= set(ranks) or time.monotonic() - began >= patience:
                return {rank: page for rank, page in found.items() if rank in ranks}
            time.sleep(_NAP)

    def close(self) -> None:
        """Look no more."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


def _answers(descriptor: int, about: Mapping[str, Any], since: float) -> dict[int, Shown]:
    """The answers on an agent's page that came after `since`; none if it makes no sense."""
    now, found = time.monotonic(), {}
    with contextlib.suppress(OSError, Unreadable, KeyError, TypeError, ValueError, AttributeError):
        for rank, answer in read(descriptor).picture.get("ranks", {}).items():
            if since <= float(answer["received"]) and now - float(answer["received"]) < _OLD:
                picture = _shifted(answer["picture"], float(answer["shift"])) if answer["picture"] else {}
                found[int(rank)] = Shown(str(answer["version"]), {**about, "rank": int(rank)}, picture)
    return found


def _shifted(picture: Mapping[str, Any], shift: float) -> dict[str, Any]:
    """A picture with its times by this host's clock; they are late by as long as the answer travelled."""
    return {
        **picture,
        "at": picture["at"] + shift,
        "active": picture["active"] + shift,
        "waits": [{**wait, "since": wait["since"] + shift} for wait in picture["waits"]],
        "groups": [
            {**group, "changed": group["changed"] + shift if group["changed"] else 0.0}
            for group in picture["groups"]
        ],
    }
