"""The processes of the ranks: their states, and when they count as lost to the job."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from mcr_plus.core.proc import Stop, state_of
from mcr_plus.core.sockets import open_sockets, unacknowledged
from mcr_plus.errors import PeerLost, phrase_ranks
from mcr_plus.hosts.dump_request import send
from mcr_plus.hosts.protocol import RankFinding, silence
from mcr_plus.membership.rules import Process
from mcr_plus.rendezvous.heartbeats import open_findings
from mcr_plus.rendezvous.identity import DIED, is_visible, own_process
from mcr_plus.rendezvous.network import agree, host_addresses
from mcr_plus.rendezvous.store import exchange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mcr_plus.core.c10d import Store
    from mcr_plus.hosts.findings import Findings
    from mcr_plus.rendezvous.store_connections import StoreRelease

Status = Literal["running", "stopped", "dead", "silent", "left", "unknown"]
LEFT: Final = "has left"
_DEATH_SHOWS: Final = 0.2  # s after a library error within which the death that caused it shows
_FINDING_SHOWS: Final = 0.2  # s, beyond that silence, for which a library error is held back
_ON_ITS_WAY: Final = 0.1  # s after a death in which a last beat may still arrive
_UNACKNOWLEDGED: Final = 0.6  # seconds after which a connection without an acknowledgement is silent
_DOUBT_EVERY: Final = 0.2  # s between checks of connections


class Loss(NamedTuple):
    """Loss of a rank: the state of its process, and the evidence."""

    status: Literal["dead", "stopped", "silent"]
    seen: str


class Sight:
    """Continued findings of a world's agents about its ranks, while another world replaces it."""

    def __init__(self, findings: Findings, processes: Sequence[Process], rank: int) -> None:
        """`rank`: this process's rank among `processes`."""
        self._findings, self._rank = findings, rank
        self._ranks = {process[:3]: each for each, process in enumerate(processes)}

    def of(self, process: Process) -> RankFinding:
        """Return the finding for a process; `unknown` if it was not a rank of that world."""
        rank = self._ranks.get(process[:3])
        return RankFinding("unknown") if rank is None else self._findings.of(rank)

    def close(self) -> None:
        """Release the agents: they end once all ranks of their host have done so."""
        self._findings.leave(self._rank)
        self._findings.close()


class Peers:
    """The processes of all ranks: visible ones are observed in /proc, others by the agents of their hosts.

    Attributes:
        patience: seconds after a library error within which the loss of a peer shows.
        processes: processes of all ranks; empty in a job of one.
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

        `processes`: processes of all ranks, if known; otherwise the ranks exchange theirs. `heartbeat`:
        seconds without a heartbeat after which a host is lost, 0 for the shortest time that the number of
        hosts allows, None for no heartbeats. `shortens`: whether a suspicion shortens them, see `suspect`.
        `sight`: findings of an earlier world, until this world has agents. `rank_0_serves`: see the
        attribute.
        """
        self.keep: list[Any] = []  # memory that a library may still write to
        self.patience = _DEATH_SHOWS
        self._rank = rank
        self._stop_grace = stop_grace
        self._suspected: dict[int, float] = {}  # rank → time of suspicion; see `suspect`
        self._next_doubt = 0.0  # time of the next check of connections
        self._is_silent = False  # whether a connection was silent at the last check
        self._enough = 0.0  # s of silence that confirm a suspicion
        self._late = math.inf  # s in which a beat of every host arrives, unless agents miss some
        self._stopped: dict[int, Stop] = {}  # by rank
        self.processes = tuple(processes)
        self._findings: Findings | None = None
        self._sight = sight
        self.rank_0_serves = rank_0_serves
        self._last: dict[int, RankFinding] = {}  # findings after the end
        self._release: StoreRelease | None = None
        if store is None:
            return
        if not processes:
            single = len(set(hosts)) == 1
            mine = json.dumps([own_process(hosts[rank], rank), {} if single else host_addresses()])
            texts = exchange(store, rank, len(hosts), "peers", mine, timeout)
            answers = [json.loads(text) for text in texts]
            self.processes = tuple(Process(*process) for process, _ in answers)
            agree([addresses for _, addresses in answers], hosts)
        if heartbeat is not None:
            self._findings = open_findings(store, rank, self.processes, secret, heartbeat, timeout)
        if self._findings is not None:
            places = len({process.place for process in self.processes})
            # Allow twice the beat interval, because agents on busy hosts miss some beats.
            beats = min(2 * silence(places), heartbeat or math.inf)
            self._late = silence(places) / 2
            self._enough = beats if shortens else heartbeat or beats
            self.patience = _FINDING_SHOWS + beats
            if rank != 0:  # rank 0 has the store, or shares the host of the agent that has it
                from mcr_plus.rendezvous.store_connections import StoreRelease  # most jobs have one host

                self._release = StoreRelease(store, self.store_is_lost)

    def store_is_lost(self) -> bool:
        """Return whether requests to the store hang; the end of its process would end them with an error."""
        if self.has_silent_connection():  # the thread that waits for an answer cannot check
            self.suspect([0])
        loss = self.lost(0)
        if loss is None or loss.status == "dead":
            return False
        return loss.status == "silent" or self.rank_0_serves

    def close(self) -> None:
        """Leave in good order: this rank's end is not a death. States on other hosts are frozen."""
        if self._release is not None:
            self._release.close()
        findings, self._release, self._findings = self._findings, None, None
        if findings is not None:
            self._last = {rank: findings.of(rank) for rank in range(len(self.processes))}
            findings.leave(self._rank)
            findings.close()

    def hand_over(self) -> Sight | None:
        """Return, before `close`, the agents' findings, for the world that will replace this one.

        None in a job on one host. Until the other world exists, there is no other source about other hosts.
        """
        findings, self._findings = self._findings, None
        if findings is None:
            return None
        self._last = {rank: findings.of(rank) for rank in range(len(self.processes))}
        return Sight(findings, self.processes, self._rank)

    def _visible(self, rank: int) -> bool:
        """Return whether a rank's process is in the same /proc."""
        return is_visible(self.processes[self._rank], self.processes[rank])

    def beside(self) -> list[int]:
        """Return the process ids of the other ranks on this host that are visible here."""
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
        """Return the most seconds by which this host's clock is ahead of other hosts' clocks, by heartbeats.

        The keys are the lowest ranks of the hosts; unknown hosts are left out.
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
        """Return the state of global rank `rank`, `unknown` if neither /proc nor an agent shows it."""
        if not self.processes:
            return "unknown"
        if self._visible(rank):
            process = self.processes[rank]
            return state_of(process.pid, process.started)
        return self._finding(rank).state

    def has_left(self, rank: int) -> bool:
        """Return whether a rank of a job on several hosts has left this world and sends nothing more."""
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
        """Return when this host's agent last checked; it may not have been scheduled since."""
        return 0.0 if self._findings is None else self._findings.looked

    def is_away(self, rank: int) -> bool:
        """Return whether the process of global rank `rank` is known here not to answer at present."""
        return self.status(rank) in ("dead", "stopped", "silent")

    def has_silent_connection(self) -> bool:
        """Return whether a connection to another host of the job has acknowledged nothing for a while.

        In jobs on several hosts only; checked every few tenths of a second, in between the last result.
        """
        findings, now = self._findings, time.monotonic()
        if findings is None:
            return False
        if now >= self._next_doubt:
            self._next_doubt = now + _DOUBT_EVERY
            self._is_silent = bool(unacknowledged(open_sockets(), _UNACKNOWLEDGED, findings.addresses))
        return self._is_silent

    def suspect(self, ranks: Iterable[int]) -> None:
        """Note evidence, from a library's error or another rank, for the loss of these ranks.

        A suspected host is silent after twice the time in which beats arrive from all hosts, if none has
        arrived: a broken or silent connection together with missing beats is stronger evidence than silence
        alone, which may only mean that an agent does not run. A limit chosen by the program is not shortened.
        """
        for rank in ranks:
            self.lost(rank)  # it ends an earlier suspicion that was wrong
            self._suspected.setdefault(rank, time.monotonic())

    def in_doubt(self, ranks: Iterable[int]) -> bool:
        """Return whether any of these ranks is suspected, and neither lost nor heard since.

        If its beats stop after one that cleared it, the rank is suspected again: when a host ends under load,
        connections may break before its agent has ended.
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
        """Return whether a host is silent; `place` as in `Process`."""
        return any(
            process.place == place
            and not self._visible(rank)
            and (loss := self.lost(rank)) is not None
            and loss.status == "silent"
            for rank, process in enumerate(self.processes)
        )

    def lost(self, rank: int) -> Loss | None:
        """Return why global rank `rank` will do nothing more; None unless it is lost.

        A stopped process is lost once `stop_grace` has passed, see `Stop`.
        """
        status = self.status(rank)
        if status == "dead":
            return Loss("dead", DIED)
        doubted = self._suspected.get(rank)  # another thread checks as well
        if status == "running" and doubted is not None and not self._visible(rank):
            looked = self._looked()  # first: with a later check, an older beat would look like a new one
            _, age, most = self._finding(rank)
            if looked - most > doubted + _ON_ITS_WAY:  # a beat has arrived in the meantime
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

    def losses(self, ranks: Iterable[int] | None = None) -> dict[int, Loss]:
        """Return the losses among these ranks (None: all) that are known here; never this rank's own."""
        others = range(len(self.processes)) if ranks is None else ranks
        found = {rank: self.lost(rank) for rank in others if rank != self._rank}
        return {rank: loss for rank, loss in found.items() if loss is not None}

    def states(self) -> dict[int, str]:
        """Return the states of the lost ranks."""
        return {rank: loss.status for rank, loss in self.losses().items()}

    def error(self, ranks: Iterable[int] | None = None) -> PeerLost | None:
        """Return the error of a wait for one of these ranks (None: all), if any is lost."""
        losses = self.losses(ranks)
        if not losses:
            return None
        seen = "; ".join(dict.fromkeys(loss.seen for loss in losses.values()))
        return PeerLost(f"{phrase_ranks(list(losses))} of the job: {seen}", list(losses), seen=seen)
