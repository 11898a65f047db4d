"""Status pages of ranks on other hosts, which this host's agent fetches while a viewer reads them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Collection, Mapping
from typing import Any, Final

from mcr_plus.hosts.page import Shown, Unreadable, read

_PATIENCE: Final = 0.5  # seconds that other hosts have for the first answer
_NAP: Final = 0.02
_OLD: Final = 5.0  # seconds after which an answer is too old to use


class RemoteStatus:
    """The agents' pages that this process reads; agents fetch pages of other hosts until `close`."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # inode of a page → descriptor

    def pages(self, path: str, about: Mapping[str, Any], ranks: Collection[int]) -> dict[int, Shown]:
        """Return the available pages of `ranks`; times in them are converted to this host's clock.

        `path`: the path of the agent's page. `about`: the job's description on a page. Waits briefly for the
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
        """Stop reading; the agents stop fetching."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


def _answers(descriptor: int, about: Mapping[str, Any], since: float) -> dict[int, Shown]:
    """Return the answers on an agent's page that came after `since`; none if the page is malformed."""
    now, found = time.monotonic(), {}
    with contextlib.suppress(OSError, Unreadable, KeyError, TypeError, ValueError, AttributeError):
        for rank, answer in read(descriptor).picture.get("ranks", {}).items():
            if since <= float(answer["received"]) and now - float(answer["received"]) < _OLD:
                picture = _shifted(answer["picture"], float(answer["shift"])) if answer["picture"] else {}
                found[int(rank)] = Shown(str(answer["version"]), {**about, "rank": int(rank)}, picture)
    return found


def _shifted(picture: Mapping[str, Any], shift: float) -> dict[str, Any]:
    """Return a picture with its times on this host's clock, late by the answer's time of travel."""
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
