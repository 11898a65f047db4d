"""The processes of the ranks: whether they are running, and when they are lost to the job."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from mcr_plus.core.proc import Stop, state_of
from mcr_plus.core.sockets import open_sockets, unacknowledged
from mcr_plus.hosts.dump_request import send
from mcr_plus.hosts.protocol import RankFinding, silence
from mcr_plus.membership.rules import Process
from mcr_plus.rendezvous.heartbeats import open_findings
from mcr_plus.rendezvous.identity import DIED, is_visible, own_process
from mcr_plus.rendezvous.store import exchange
from mcr_plus.rendezvous.store_release import StoreRelease

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mcr_plus.core.c10d import Store
    from mcr_plus.hosts.findings import Findings

Status = Literal["running", "stopped", "dead", "silent", "left", "unknown"]
LEFT: Final = "has left"
_DEATH_SHOWS: Final = 0.2  # seconds after an error of a library in which the death behind it shows
_FINDING_SHOWS: Final = 0.2  # seconds beyond that silence in which an error of a library is held back
_ON_ITS_WAY: Final = 0.1  # seconds after a death in which a last beat may still come
_UNACKNOWLEDGED: Final = 0.6  # seconds after which a connection without an acknowledgement is silent
_DOUBT_EVERY: Final = 0.2  # seconds between looks at connections


class Loss(NamedTuple):
    """Why a rank is lost: the state of its process, and what was seen of it."""

    status: Literal["dead", "stopped", "silent"]
    seen: str


class Sight:
    """What the agents of a world go on seeing of its ranks while another world takes its place."""

    def __init__(self, findings: Findings, processes: Sequence[Process], rank: int) -> None:
        """`rank`: of this process, among `processes`."""
        self._findings, self._rank = findings, rank
        self._ranks = {process[:3]: each for each, process in enumerate(processes)}

    def of(self, process: Process) -> RankFinding:
        """What is known of a process; `unknown` of one that was no rank of that world."""
        rank = self._ranks.get(process[:3])
        return RankFinding("unknown") if rank is None else self._findings.of(rank)

    def close(self) -> None:
        """Need the agents no more: they end once all ranks of their host say so."""
        self._findings.leave(self._rank)
        self._findings.close()


class Peers:
    """The processes of all ranks: those in the same /proc are observed, others by the agents of their hosts.

    Attributes:
        patience: seconds after an error of a library in which the loss of a peer shows.
        processes: of all ranks; empty in a job of one.
        rank_0_serves: whether the store is in the process of rank 0.
    """

    def __init__(
        self,
        rank: int,
        hosts: tuple[str, ...],
        store: Store | None,
        timeout: float,
        *,
        stop_grace: float = math.inf,
        heartbeat: float | None = None,
        shortens: bool = False,
        secret: bytes = b"",
        processes: Sequence[Process] = (),
        sight: Sight | None = None,
        rank_0_serves: bool = True,
    ) -> None:
        """`stop_grace`: seconds after which a stopped process is lost. `secret`: signs heartbeats.

        `processes`: of all ranks, where they are known; otherwise the ranks exchange theirs.
        `heartbeat`: seconds after which a host without a sign of life is lost, 0 for as few as the number of
        hosts allows, None for no heartbeats. `shortens`: whether a suspicion shortens them, see `suspect`.
        `sight`: of an earlier world, where this one has no agents yet.
        `rank_0_serves`: see the attribute.
        """
        self.keep: list[Any] = []  # memory that a library may still write to
        self.patience = _DEATH_SHOWS
        self._rank = rank
        self._stop_grace = stop_grace
        self._suspected: dict[int, float] = {}  # rank → since when; see `suspect`
        self._next_doubt = 0.0  # when to look at connections again
        self._is_silent = False  # whether one was silent then
        self._enough = 0.0  # seconds of silence with which a suspicion is right
        self._late = math.inf  # seconds in which a beat of every host comes, unless agents miss some
        self._stopped: dict[int, Stop] = {}  # by rank
        self.processes = tuple(processes)
        self._findings: Findings | None = None
        self._sight = sight
        self.rank_0_serves = rank_0_serves
        self._last: dict[int, RankFinding] = {}  # after the end
        self._release: StoreRelease | None = None
        if store is None:
            return
        if not processes:
            mine = json.dumps(own_process(hosts[rank], rank))
            texts = exchange(store, rank, len(hosts), "peers", mine, timeout)
            self.processes = tuple(Process(*json.loads(text)) for text in texts)
        if heartbeat is not None:
            self._findings = open_findings(store, rank, self.processes, secret, heartbeat, timeout)
        if self._findings is not None:
            places = len({process.place for process in self.processes})
            # Twice what beats take, as agents on busy hosts miss some.
            beats = min(2 * silence(places), heartbeat or math.inf)
            self._late = silence(places) / 2
            self._enough = beats if shortens else heartbeat or beats
            self.patience = _FINDING_SHOWS + beats
            if rank != 0:  # which has the store, or shares the host of the agent that has it
                self._release = StoreRelease(store, self.store_is_lost)

    def store_is_lost(self) -> bool:
        """Whether a request to the store gets no answer, nor an error: dead processes have no connections."""
        if self.has_silent_connection():  # the thread that waits for an answer cannot look
            self.suspect([0])
        loss = self.lost(0)
        if loss is None or loss.status == "dead":
            return False
        return loss.status == "silent" or self.rank_0_serves

    def close(self) -> None:
        """Leave in good order: this rank's end is no death. Ranks of other hosts stay what they are then."""
        if self._release is not None:
            self._release.close()
        findings, self._release, self._findings = self._findings, None, None
        if findings is not None:
            self._last = {rank: findings.of(rank) for rank in range(len(self.processes))}
            findings.leave(self._rank)
            findings.close()

    def hand_over(self) -> Sight | None:
        """Before `close`, for another world that is going to take the place of this one: what agents see.

        None in a job on one host. Until the other world stands, nothing else shows other hosts.
        """
        findings, self._findings = self._findings, None
        if findings is None:
            return None
        self._last = {rank: findings.of(rank) for rank in range(len(self.processes))}
        return Sight(findings, self.processes, self._rank)

    def _visible(self, rank: int) -> bool:
        """Whether a rank's process is in the same /proc."""
        return is_visible(self.processes[self._rank], self.processes[rank])

    def beside(self) -> list[int]:
        """Process ids of the other ranks on this host, as far as they are visible here."""
        return [
            process.pid
            for rank, process in enumerate(self.processes)
            if rank != self._rank and self._visible(rank)
        ]

    def ask_elsewhere(self, text: str) -> None:
        """Ask the ranks of other hosts for their dumps; see `mcr_plus.hosts.dump_request`."""
        findings = self._findings
        if findings is not None:
            send([findings.requests], text)

    def clocks(self) -> dict[int, float]:
        """By how many seconds at most this host's clock is ahead of those of other hosts, by heartbeats.

        By the lowest rank of each host; those of which nothing is known are left out.
        """
        findings = self._findings
        if findings is None:
            return {}
        lowest: dict[str, int] = {}
        for rank, process in enumerate(self.processes):
            lowest.setdefault(process.place, rank)
        found = {rank: findings.ahead(rank) for rank in lowest.values()}
        return {rank: seconds for rank, seconds in found.items() if seconds is not None}

    def status(self, rank: int) -> Status:
        """State of the process of global rank `rank`, `unknown` if neither /proc nor an agent shows it."""
        if not self.processes:
            return "unknown"
        if self._visible(rank):
            process = self.processes[rank]
            return state_of(process.pid, process.started)
        return self._finding(rank).state

    def has_left(self, rank: int) -> bool:
        """Whether a rank of a job on several hosts has left this world: nothing of it comes any more."""
        findings = self._findings
        if findings is not None and self._visible(rank):
            return findings.has_left(rank)
        return self.status(rank) == "left"

    def _finding(self, rank: int) -> RankFinding:
        findings = self._findings
        if self._sight is not None:
            return self._sight.of(self.processes[rank])
        return self._last.get(rank, RankFinding("unknown")) if findings is None else findings.of(rank)

    def _looked(self) -> float:
        """When the agent of this host last looked; it may have been kept from running since."""
        return 0.0 if self._findings is None else self._findings.looked

    def is_away(self, rank: int) -> bool:
        """Whether the process of global rank `rank` answers nothing now, for all that is known here."""
        return self.status(rank) in ("dead", "stopped", "silent")

    def has_silent_connection(self) -> bool:
        """Whether a connection to another host of the job has acknowledged nothing for a while.

        Looks every few tenths of a second, in jobs on several hosts only; between looks, as it was.
        """
        findings, now = self._findings, time.monotonic()
        if findings is None:
            return False
        if now >= self._next_doubt:
            self._next_doubt = now + _DOUBT_EVERY
            self._is_silent = bool(unacknowledged(open_sockets(), _UNACKNOWLEDGED, findings.addresses))
        return self._is_silent

    def suspect(self, ranks: Iterable[int]) -> None:
        """Note that an error of a library, or what another rank has seen, speaks for the loss of these.

        Their host is then silent after twice the time in which beats come from all hosts, as long as none
        comes: a torn or silent connection and no beat together say more than silence alone, for which an
        agent that does not run is reason enough. A limit that the program has chosen is not shortened.
        """
        for rank in ranks:
            self.lost(rank)  # which ends an earlier suspicion that was wrong
            self._suspected.setdefault(rank, time.monotonic())

    def in_doubt(self, ranks: Iterable[int]) -> bool:
        """Whether any of these is suspected, and neither lost nor heard of since.

        If its beats have stopped since one that spoke for it, it is suspected again: where a host ends under
        load, connections may be torn before its agent has ended.
        """
        found = False
        for rank in ranks:
            if self._visible(rank) or self.lost(rank) is not None or self.status(rank) != "running":
                continue
            if rank not in self._suspected and self._finding(rank).age > self._late:
                self.suspect([rank])
            found |= rank in self._suspected
        return found

    def is_cut_off(self, place: str) -> bool:
        """Whether a host is silent; `place` as in `Process`."""
        return any(
            process.place == place
            and not self._visible(rank)
            and (loss := self.lost(rank)) is not None
            and loss.status == "silent"
            for rank, process in enumerate(self.processes)
        )

    def lost(self, rank: int) -> Loss | None:
        """Why nothing more is to be expected of global rank `rank`; None unless it is lost.

        A stopped process is lost once `stop_grace` has passed, see `Stop`.
        """
        status = self.status(rank)
        if status == "dead":
            return Loss("dead", DIED)
        doubted = self._suspected.get(rank)  # another thread looks as well
        if status == "running" and doubted is not None and not self._visible(rank):
            looked = self._looked()  # first: with a later look, an older beat would seem to be a new one
            _, age, most = self._finding(rank)
            if looked - most > doubted + _ON_ITS_WAY:  # a beat has come in the meantime
                self._suspected.pop(rank, None)
            elif age >= self._enough:
                status = "silent"
        if status == "silent":
            return Loss("silent", f"no heartbeat for {self._finding(rank).age:.1f} s")
        if status != "stopped":
            self._stopped.pop(rank, None)
            return None
        now = time.monotonic()
        stop = self._stopped.setdefault(rank, Stop(self._stop_grace, now))
        return Loss("stopped", "stopped") if stop.is_certain(now) else None
