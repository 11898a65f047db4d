"""The processes of the ranks, and whether they are running, stopped or dead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mcr_plus.rendezvous.store import exchange

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store

Status = Literal["running", "stopped", "dead", "unknown"]


def _read_stat(pid: int | str) -> tuple[str, str] | None:
    """State letter and start time of a process, or None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may contain anything
    return fields[0], fields[19]


class Peers:
    """Process ids of all ranks, exchanged once. Only ranks in the same /proc can be observed."""

    def __init__(self, rank: int, hosts: tuple[str, ...], store: Store | None, timeout: float) -> None:
        self.keep: list[Any] = []  # memory that a library may still write to
        self._rank = rank
        self._hosts = hosts
        self._processes: list[tuple[int, str, str]] = []
        if store is None:
            return
        own = _read_stat(os.getpid())
        namespace = _namespace()
        mine = json.dumps([os.getpid(), own[1] if own else "", namespace])
        for peer, text in enumerate(exchange(store, rank, len(hosts), "peers", mine, timeout)):
            pid, started, theirs = json.loads(text)
            visible = own is not None and theirs == namespace and hosts[peer] == hosts[rank]
            self._processes.append((pid, started, "visible" if visible else ""))

    def beside(self) -> list[int]:
        """Process ids of the other ranks on this host, as far as they are visible here."""
        return [
            pid for rank, (pid, _, visible) in enumerate(self._processes) if visible and rank != self._rank
        ]

    def status(self, rank: int) -> Status:
        """State of the process of global rank `rank`, `unknown` if it is not visible here."""
        if not self._processes or not self._processes[rank][2]:
            return "unknown"
        pid, started, _ = self._processes[rank]
        now = _read_stat(pid)
        if now is None or now[1] != started or now[0] in "ZX":
            return "dead"
        return "stopped" if now[0] in "Tt" else "running"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
