"""Heartbeats between hosts: the datagrams that an agent sends, and its conclusions from received ones.

Every host of a job has one agent. An agent sends one datagram per period, to hosts at distances 1, 2, 4, … in
turn. The datagram has all that the agent knows: each host's latest beat and its age, and the ranks that are
not running. After as many periods as there are distances, every host has heard of every other host, on many
paths. If a host's latest beat is too old, the agent asks that host for one directly. If it does not answer,
and the beat is older than a limit, the host is silent: it is down, or cut off. A change is sent to all
distances at once, and passed on. Datagrams for a silent host also go to the next host that is not silent, so
that the remaining hosts reach each other.

A host that has never been heard is unknown, not silent: a firewall may drop the datagrams.

This module reads no clock and no socket.
"""

from __future__ import annotations

import hmac
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, NamedTuple

PERIOD: Final = 0.1
"""Seconds between two datagrams of a host."""
_MISSES: Final = 5  # periods without a beat, beyond the periods that a beat takes to all hosts
_FEW: Final = 3  # distances above which a lost datagram may cost a whole round: each adds a miss
_STALLED: Final = 3  # periods between two checks after which this agent itself was kept from running
_MAGIC: Final = b"mcr1"
_HEAD: Final = struct.Struct("<4sBHHI")  # magic, whether it asks for an answer, sender, hosts, turn
_BEAT: Final = struct.Struct("<QHH")  # number of the latest beat, its age in ms, and its maximum age
_RANK: Final = struct.Struct("<IB")
_TAG: Final = 16
_GONE: Final = 1 << 63  # flag in the number of a host's last beat
_ASKS: Final = 2  # unanswered requests after which a host is silent if another host is
_MOST_RANKS: Final = 8000  # most ranks in one datagram that are not running
_OLDEST: Final = 0xFFFF  # ms
_WINDOW: Final = 60.0  # s of heartbeats by which clocks are compared, plus as many before: clocks drift

State = Literal["unknown", "running", "stopped", "dead", "silent", "left"]
STATES: Final[tuple[State, ...]] = ("unknown", "running", "stopped", "dead", "silent", "left")


class RankFinding(NamedTuple):
    """An agent's knowledge of a rank.

    `age`: seconds since the latest beat of its host, without times in which the agent did not run. `most`:
    upper bound of the seconds since that beat: it may have waited while an agent did not run.
    """

    state: State
    age: float = 0.0
    most: float = 0.0


class ReceivedDatagram(NamedTuple):
    """Reactions that a datagram requires of an agent.

    `news`: whether to pass it on at once. `asked_by`: a host that wants a datagram, or None.
    """

    news: bool = False
    asked_by: int | None = None


def distances(hosts: int) -> list[int]:
    """Return the distances at which a host sends: powers of two below the number of hosts."""
    return [1 << power for power in range(max(0, (hosts - 1).bit_length()))]


def silence(hosts: int, period: float = PERIOD) -> float:
    """Return the default seconds after which a host without a beat is silent."""
    rounds = len(distances(hosts))
    return period * (rounds + 1 + _MISSES + max(0, rounds - _FEW))


class _Ahead:
    """Upper bound of the lead of this host's clock over another host's, over the last one to two windows.

    A datagram arrives after it was sent, so each gives a bound, and the fastest one the closest bound.
    """

    def __init__(self) -> None:
        self._began = -math.inf
        self._least = self._before = math.inf

    def add(self, now: float, seconds: float) -> None:
        """Add a datagram of that host that arrived `seconds` after it was sent, by both clocks."""
        if now - self._began > _WINDOW:
            self._before = self._least if now - self._began <= 2 * _WINDOW else math.inf
            self._began, self._least = now, math.inf
        self._least = min(self._least, seconds)

    @property
    def seconds(self) -> float:
        """Return the bound; infinite if no datagram has arrived."""
        return min(self._least, self._before)


class _Host:
    """An agent's knowledge of one host."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.beat = 0
        self.beaten = 0.0  # send time of the latest beat, by this agent's clock
        self.surely = 0.0  # latest possible time of that
        self.heard = False
        self.gone = False
        self.asked = 0  # number of requests for a beat since the latest
        self.asked_at = 0.0
        self.states: dict[int, State] = {}  # states of ranks that are not running
        self.ahead = _Ahead()

    @property
    def is_watched(self) -> bool:
        """Return whether beats of this host are expected."""
        return self.heard and not self.gone


class Heartbeat:
    """The state of one agent. Times are in seconds of its host's monotonic clock.

    Attributes:
        limit: seconds without a beat after which a host is silent.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        me: int,
        key: bytes,
        now: float,
        *,
        limit: float = 0.0,
        period: float = PERIOD,
        heard: Sequence[int] = (),
    ) -> None:
        """`hosts`: the ranks of each host. `limit`: 0 for `silence`. `heard`: hosts heard before."""
        self._hosts = [_Host(ranks) for ranks in hosts]
        self._me = me
        self._key = key
        self._period = period
        self._distances = distances(len(hosts))
        self._late = period * (len(self._distances) + 2)
        self.limit = max(limit, self._late + period) if limit else silence(len(hosts), period)
        self._turn = 0
        self._looked = now
        for number in heard:
            host = self._hosts[number]
            host.heard, host.beaten, host.surely = True, now, now

    # -- this host ------------------------------------------------------------------------------------

    def observe(self, states: Mapping[int, State]) -> bool:
        """Note the states of this host's ranks that are not running; return whether they have changed."""
        own = self._hosts[self._me]
        changed = own.states != states
        own.states = dict(states)
        return changed

    def leave(self) -> None:
        """Announce in the next datagrams that this host's ranks have ended, so that it will be silent."""
        self._hosts[self._me].gone = True

    # -- datagrams ------------------------------------------------------------------------------------

    def next_targets(self, now: float) -> list[int]:
        """Return the hosts for the next periodic datagram: one, or two if the first is silent."""
        if not self._distances:
            return []
        self._turn += 1
        return self._targets(self._distances[self._turn % len(self._distances)], self._silent(now))

    def all_targets(self, now: float) -> list[int]:
        """Return the hosts to which a change is sent."""
        silent = self._silent(now)
        return sorted({host for distance in self._distances for host in self._targets(distance, silent)})

    def _targets(self, distance: int, silent: Collection[int]) -> list[int]:
        """Return the host at a distance, and if it is silent also the next reachable host."""
        count = len(self._hosts)
        around = [(self._me + distance + step) % count for step in range(count)]
        others = [host for host in around if host != self._me and not self._hosts[host].gone]
        reachable = [host for host in others if host not in silent]
        return list(dict.fromkeys([*others[:1], *reachable[:1]]))

    def to_ask(self, now: float) -> list[int]:
        """Return the hosts to ask for a datagram, because their beats are late."""
        found = []
        for number in sorted(self._watched() - self._silent(now)):
            host = self._hosts[number]
            if now - host.beaten > self._late and now - host.asked_at >= self._period:
                host.asked, host.asked_at = host.asked + 1, now
                found.append(number)
        return found

    def datagram(self, now: float, *, asks: bool = False) -> bytes:
        """Return all that this agent knows, signed. `asks`: request a datagram in return."""
        self._wake(now)
        own = self._hosts[self._me]
        # The clock continues if another agent takes over, so the beats of a host always grow.
        own.beat, own.beaten, own.surely = max(own.beat + 1, int(now * 1e6)), now, now
        beats, ranks = [], []
        for host in self._hosts:
            ages = (min(_OLDEST, max(0, round((now - at) * 1e3))) for at in (host.beaten, host.surely))
            beats.append(_BEAT.pack(host.beat | (_GONE if host.gone else 0), *ages))
            ranks += [_RANK.pack(rank, STATES.index(state)) for rank, state in host.states.items()]
        head = _HEAD.pack(_MAGIC, asks, self._me, len(self._hosts), self._turn & 0xFFFFFFFF)
        body = b"".join((head, *beats, *ranks[:_MOST_RANKS]))
        return body + self._sign(body)

    def receive(self, data: bytes, now: float, since: float | None = None) -> ReceivedDatagram:
        """Receive a datagram that arrived after `since`; None for `now`.

        A datagram that is malformed, or not signed by an agent of this job, is ignored.
        """
        since = now if since is None else since
        self._wake(now)
        body, tag = data[:-_TAG], data[-_TAG:]
        if len(body) < _HEAD.size or not hmac.compare_digest(tag, self._sign(body)):
            return ReceivedDatagram()
        magic, asks, sender, count, turn = _HEAD.unpack_from(body)
        end = _HEAD.size + count * _BEAT.size
        well_formed = len(body) >= end and (len(body) - end) % _RANK.size == 0
        is_other = sender < count == len(self._hosts) and sender != self._me
        if magic != _MAGIC or not is_other or not well_formed:
            return ReceivedDatagram()
        states = {rank: STATES[state] for rank, state in _RANK.iter_unpack(body[end:]) if state < len(STATES)}
        beats = list(_BEAT.iter_unpack(body[_HEAD.size : end]))
        sent = (beats[sender][0] & (_GONE - 1)) * 1e-6  # by the sender's clock, see `datagram`
        self._hosts[sender].ahead.add(now, now - sent)
        news = [
            self._update(host, number, (now - age / 1e3, since - most / 1e3), states)
            for host, (number, age, most) in zip(self._hosts, beats, strict=True)
        ]
        # Agents with equal turns send at the same distance, so that a beat reaches all hosts in one round.
        self._turn = max(self._turn, turn - 1)
        return ReceivedDatagram(any(news), sender if asks else None)

    def _update(
        self, host: _Host, number: int, beaten: tuple[float, float], states: Mapping[int, State]
    ) -> bool:
        """Merge another agent's knowledge of a host; return whether the host's ranks have changed."""
        gone, beat = bool(number & _GONE), number & (_GONE - 1)
        if host is self._hosts[self._me] or beat <= host.beat:
            return False
        host.beat, host.heard, host.asked = beat, True, 0
        host.beaten, host.surely = max(host.beaten, beaten[0]), max(host.surely, beaten[1])
        found: dict[int, State] = {rank: states[rank] for rank in host.ranks if rank in states}
        changed = (found, gone) != (host.states, host.gone)
        host.states, host.gone = found, gone
        return changed

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:_TAG]

    # -- findings -------------------------------------------------------------------------------------

    def findings(self, now: float) -> dict[int, RankFinding]:
        """Return the findings about the ranks of the other hosts."""
        self._wake(now)
        silent = self._silent(now)
        found: dict[int, RankFinding] = {}
        for number, host in enumerate(self._hosts):
            state: State = "silent" if number in silent else "running" if host.heard else "unknown"
            state = "left" if host.gone else state
            for rank in host.ranks if number != self._me else ():
                known = host.states.get(rank, state)
                out_of_sight = number in silent and known != "dead"
                ages = now - host.beaten, now - host.surely
                found[rank] = RankFinding("silent" if out_of_sight else known, *ages)
        return found

    def ahead(self) -> dict[int, float]:
        """Return the most seconds by which this host's clock is ahead of each host heard directly.

        Bounds of the last minute or two, by the hosts' lowest ranks; negative if the clock is behind.
        """
        return {min(host.ranks): host.ahead.seconds for host in self._hosts if host.ahead.seconds < math.inf}

    def _watched(self) -> set[int]:
        return {number for number, host in enumerate(self._hosts) if host.is_watched and number != self._me}

    def _silent(self, now: float) -> set[int]:
        """Return the silent hosts.

        Hosts that were cut off together become silent together, although the ages of their latest beats
        differ: when the first is silent, so are the others that have not answered either.
        """
        watched = self._watched()
        silent = {number for number in watched if now - self._hosts[number].beaten > self.limit}
        return silent | {number for number in watched if silent and self._hosts[number].asked >= _ASKS}

    def next_silence(self, now: float) -> float:
        """Return the earliest time after `now` at which another host may become silent, or infinity."""
        ends = (self._hosts[number].beaten + self.limit for number in self._watched())
        return min((end for end in ends if end > now), default=math.inf)

    def _wake(self, now: float) -> None:
        """Extend other hosts' deadlines by the time in which this agent could not run, and heard nothing."""
        away = now - self._looked
        self._looked = now
        if away > _STALLED * self._period:
            for number, host in enumerate(self._hosts):
                if number != self._me:
                    host.beaten += away
