"""Heartbeats between hosts: what an agent sends, and what it concludes from what it receives.

Every host of a job has one agent. An agent sends one datagram per period, to hosts at distances 1, 2, 4, … in
turn, with all that it knows: of each host its latest beat and how old that is, and the ranks that are not
running. After as many periods as there are distances every host has heard of every other one, by many ways. A
host whose latest beat is older than it should be is asked for one, directly. Where it does not answer either,
and the beat is older than a limit, the host is silent: it is down, or cut off. A change is sent to all
distances at once, and passed on. Datagrams for a silent host also go to the next one that is not, so that
those that are left reach each other.

A host of which nothing has ever been heard is not silent but unknown: a firewall may drop the datagrams.

Nothing here reads a clock or a socket.
"""

from __future__ import annotations

import hmac
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, NamedTuple

PERIOD: Final = 0.1
"""Seconds between two datagrams of a host."""
_MISSES: Final = 5  # periods without a beat, beyond those that a beat takes to all hosts
_FEW: Final = 3  # distances above which a lost datagram may cost a whole round: one miss more for each
_STALLED: Final = 3  # periods between two looks after which this agent itself was kept from running
_MAGIC: Final = b"mcr1"
_HEAD: Final = struct.Struct("<4sBHHI")  # magic, whether it asks for an answer, sender, hosts, turn
_BEAT: Final = struct.Struct("<QHH")  # number of the latest beat, its age in ms, and the most that may be
_RANK: Final = struct.Struct("<IB")
_TAG: Final = 16
_GONE: Final = 1 << 63  # in the number of a host's last beat
_ASKS: Final = 2  # without an answer, after which a host is silent if another one is
_MOST_RANKS: Final = 8000  # that are not running, in one datagram
_OLDEST: Final = 0xFFFF  # ms
_WINDOW: Final = 60.0  # seconds of heartbeats by which clocks are compared, and as many before: clocks drift

State = Literal["unknown", "running", "stopped", "dead", "silent", "left"]
STATES: Final[tuple[State, ...]] = ("unknown", "running", "stopped", "dead", "silent", "left")


class RankFinding(NamedTuple):
    """What an agent knows of a rank.

    `age`: seconds since the latest beat of its host, without those in which the agent did not run. `most`:
    seconds since that beat at most: it may have waited while an agent did not run.
    """

    state: State
    age: float = 0.0
    most: float = 0.0


class ReceivedDatagram(NamedTuple):
    """What a datagram asks of an agent.

    `news`: to pass it on at once. `asked_by`: a host that wants a datagram, None if none does.
    """

    news: bool = False
    asked_by: int | None = None


def distances(hosts: int) -> list[int]:
    """The distances at which a host sends: powers of two below the number of hosts."""
    return [1 << power for power in range(max(0, (hosts - 1).bit_length()))]


def silence(hosts: int, period: float = PERIOD) -> float:
    """Seconds after which a host without a beat is silent, by default."""
    rounds = len(distances(hosts))
    return period * (rounds + 1 + _MISSES + max(0, rounds - _FEW))


class _Ahead:
    """The most by which this host's clock is ahead of another one's, of the last one to two windows.

    A datagram arrives after it was sent, so each of them is a bound, and the fastest one the closest.
    """

    def __init__(self) -> None:
        self._began = -math.inf
        self._least = self._before = math.inf

    def add(self, now: float, seconds: float) -> None:
        """Take in that a datagram of that host has come `seconds` after it was sent, by both clocks."""
        if now - self._began > _WINDOW:
            self._before = self._least if now - self._began <= 2 * _WINDOW else math.inf
            self._began, self._least = now, math.inf
        self._least = min(self._least, seconds)

    @property
    def seconds(self) -> float:
        """The bound; infinite where nothing has come."""
        return min(self._least, self._before)


class _Host:
    """What an agent knows of one host."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.beat = 0
        self.beaten = 0.0  # when the latest beat was sent, by this agent's clock
        self.surely = 0.0  # no later than that
        self.heard = False
        self.gone = False
        self.asked = 0  # how often it was asked for a beat since the latest
        self.asked_at = 0.0
        self.states: dict[int, State] = {}  # of those that are not running
        self.ahead = _Ahead()

    @property
    def is_watched(self) -> bool:
        """Whether beats of it are expected."""
        return self.heard and not self.gone


class Heartbeat:
    """The state of one agent. Times are seconds of a monotonic clock of its host.

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
        """`hosts`: the ranks of each. `limit`: 0 for that of `silence`. `heard`: hosts heard before."""
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
        """Note the states of this host's ranks that are not running; returns whether they have changed."""
        own = self._hosts[self._me]
        changed = own.states != states
        own.states = dict(states)
        return changed

    def leave(self) -> None:
        """Say good-bye with the next datagrams: this host's ranks have ended, and it will be silent."""
        self._hosts[self._me].gone = True

    # -- datagrams ------------------------------------------------------------------------------------

    def next_targets(self, now: float) -> list[int]:
        """The hosts that the next periodic datagram goes to: one, or two if that one is silent."""
        if not self._distances:
            return []
        self._turn += 1
        return self._targets(self._distances[self._turn % len(self._distances)], self._silent(now))

    def all_targets(self, now: float) -> list[int]:
        """The hosts that a change is sent to."""
        silent = self._silent(now)
        return sorted({host for distance in self._distances for host in self._targets(distance, silent)})

    def _targets(self, distance: int, silent: Collection[int]) -> list[int]:
        """The host at a distance, and the next one that can be reached if that one is silent."""
        count = len(self._hosts)
        around = [(self._me + distance + step) % count for step in range(count)]
        others = [host for host in around if host != self._me and not self._hosts[host].gone]
        reachable = [host for host in others if host not in silent]
        return list(dict.fromkeys([*others[:1], *reachable[:1]]))

    def to_ask(self, now: float) -> list[int]:
        """The hosts that are to be sent a datagram that asks, because their beats are late."""
        found = []
        for number in sorted(self._watched() - self._silent(now)):
            host = self._hosts[number]
            if now - host.beaten > self._late and now - host.asked_at >= self._period:
                host.asked, host.asked_at = host.asked + 1, now
                found.append(number)
        return found

    def datagram(self, now: float, *, asks: bool = False) -> bytes:
        """All that this agent knows, signed. `asks`: the receiver is to send one in return."""
        self._wake(now)
        own = self._hosts[self._me]
        # The clock goes on where an agent takes another one's place, so beats of a host always grow.
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
        """Take in a datagram, which has come after `since`; None for `now`.

        One that no agent of this job has signed, or that is malformed, is ignored.
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
        # Agents whose turns are alike send at the same distance, so that a beat gets everywhere in one round.
        self._turn = max(self._turn, turn - 1)
        return ReceivedDatagram(any(news), sender if asks else None)

    def _update(
        self, host: _Host, number: int, beaten: tuple[float, float], states: Mapping[int, State]
    ) -> bool:
        """Take in what another agent knows of a host; returns whether its ranks have changed."""
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
        """What is known of the ranks of the other hosts."""
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
        """By how many seconds at most this host's clock is ahead of that of each host heard directly.

        Of the last minute or two; by the host's lowest rank. The difference is negative where it is behind.
        """
        return {min(host.ranks): host.ahead.seconds for host in self._hosts if host.ahead.seconds < math.inf}

    def _watched(self) -> set[int]:
        return {number for number, host in enumerate(self._hosts) if host.is_watched and number != self._me}

    def _silent(self, now: float) -> set[int]:
        """The hosts that are silent.

        Those that were cut off together are silent together, although their latest beats were of different
        age: with the first go those that have not answered either.
        """
        watched = self._watched()
        silent = {number for number in watched if now - self._hosts[number].beaten > self.limit}
        return silent | {number for number in watched if silent and self._hosts[number].asked >= _ASKS}

    def next_silence(self, now: float) -> float:
        """The earliest time after `now` at which another host may become silent; infinite if none can."""
        ends = (self._hosts[number].beaten + self.limit for number in self._watched())
        return min((end for end in ends if end > now), default=math.inf)

    def _wake(self, now: float) -> None:
        """Give other hosts the time for which this agent was kept from running, and could hear nothing."""
        away = now - self._looked
        self._looked = now
        if away > _STALLED * self._period:
            for number, host in enumerate(self._hosts):
                if number != self._me:
                    host.beaten += away
