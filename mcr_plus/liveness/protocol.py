"""Heartbeats between hosts: what an agent sends, and what it concludes from what it receives.

Every host of a job has one agent. An agent sends one datagram per period, to hosts at distances 1, 2, 4, … in
turn, with all that it knows: of each host its latest beat and how old that is, and the ranks that are not
running. After as many periods as there are distances every host has heard of every other one, by many ways. A
host whose latest beat is older than a limit is silent: it is down, or cut off. A change is sent at once to
all distances, and passed on at once.

A host of which nothing has ever been heard is not silent but unknown: a firewall may drop the datagrams.

Nothing here reads a clock or a socket.
"""

from __future__ import annotations

import hmac
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

PERIOD: Final = 0.1
"""Seconds between two datagrams of a host."""
_MISSES: Final = 5  # periods without a beat, beyond those that a beat takes to all hosts
_FEW: Final = 3  # distances above which a lost datagram may cost a whole round: one miss more for each
_STALLED: Final = 3  # periods between two looks after which this agent itself was kept from running
_MAGIC: Final = b"mcr1"
_HEAD: Final = struct.Struct("<4sHHI")  # magic, sender, hosts, turn
_BEAT: Final = struct.Struct("<QH")  # number of the latest beat, its age in ms
_RANK: Final = struct.Struct("<IB")
_TAG: Final = 16
_GONE: Final = 1 << 63  # in the number of a host's last beat
_MOST_RANKS: Final = 8000  # that are not running, in one datagram
_OLDEST: Final = 0xFFFF  # ms

State = Literal["unknown", "running", "stopped", "dead", "silent"]
STATES: Final[tuple[State, ...]] = ("unknown", "running", "stopped", "dead", "silent")


class Finding(NamedTuple):
    """What an agent knows of a rank; `age`: seconds since the latest beat of its host."""

    state: State
    age: float = 0.0


def distances(hosts: int) -> list[int]:
    """The distances at which a host sends: powers of two below the number of hosts."""
    return [1 << power for power in range(max(0, (hosts - 1).bit_length()))]


def silence(hosts: int, period: float = PERIOD) -> float:
    """Seconds after which a host without a beat is silent, by default."""
    rounds = len(distances(hosts))
    return period * (rounds + 1 + _MISSES + max(0, rounds - _FEW))


class _Host:
    """What an agent knows of one host."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.beat = 0
        self.beaten = 0.0  # when the latest beat was sent, by this agent's clock
        self.heard = False
        self.gone = False
        self.states: dict[int, State] = {}  # of those that are not running


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
        """`hosts`: the ranks of each. `limit`: 0 for that of `silence`. `heard`: hosts heard of before."""
        self._hosts = [_Host(ranks) for ranks in hosts]
        self._me = me
        self._key = key
        self._period = period
        self.limit = limit or silence(len(hosts), period)
        self._distances = distances(len(hosts))
        self._turn = 0
        self._looked = now
        for number in heard:
            self._hosts[number].heard, self._hosts[number].beaten = True, now

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

    def next_target(self) -> list[int]:
        """The host that the next periodic datagram goes to; empty without other hosts."""
        if not self._distances:
            return []
        self._turn += 1
        distance = self._distances[self._turn % len(self._distances)]
        return [(self._me + distance) % len(self._hosts)]

    def all_targets(self) -> list[int]:
        """The hosts that a change is sent to."""
        return sorted({(self._me + distance) % len(self._hosts) for distance in self._distances})

    def datagram(self, now: float) -> bytes:
        """All that this agent knows, signed."""
        self._wake(now)
        own = self._hosts[self._me]
        # The clock goes on where an agent takes another one's place, so beats of a host always grow.
        own.beat, own.beaten = max(own.beat + 1, int(now * 1e6)), now
        beats, ranks = [], []
        for host in self._hosts:
            age = min(_OLDEST, max(0, round((now - host.beaten) * 1e3)))
            beats.append(_BEAT.pack(host.beat | (_GONE if host.gone else 0), age))
            ranks += [_RANK.pack(rank, STATES.index(state)) for rank, state in host.states.items()]
        head = _HEAD.pack(_MAGIC, self._me, len(self._hosts), self._turn & 0xFFFFFFFF)
        body = b"".join((head, *beats, *ranks[:_MOST_RANKS]))
        return body + self._sign(body)

    def receive(self, data: bytes, now: float) -> bool:
        """Take in a datagram; returns whether it changes anything that other hosts should know at once.

        One that no agent of this job has signed, or that is malformed, is ignored.
        """
        self._wake(now)
        body, tag = data[:-_TAG], data[-_TAG:]
        if len(body) < _HEAD.size or not hmac.compare_digest(tag, self._sign(body)):
            return False
        magic, sender, count, turn = _HEAD.unpack_from(body)
        end = _HEAD.size + count * _BEAT.size
        well_formed = len(body) >= end and (len(body) - end) % _RANK.size == 0
        if magic != _MAGIC or count != len(self._hosts) or sender == self._me or not well_formed:
            return False
        states = {rank: STATES[state] for rank, state in _RANK.iter_unpack(body[end:]) if state < len(STATES)}
        beats = _BEAT.iter_unpack(body[_HEAD.size : end])
        news = [
            self._update(host, number, age, states, now)
            for host, (number, age) in zip(self._hosts, beats, strict=True)
        ]
        # Agents whose turns are alike send at the same distance, so that a beat gets everywhere in one round.
        self._turn = max(self._turn, turn - 1)
        return any(news)

    def _update(self, host: _Host, number: int, age: int, states: Mapping[int, State], now: float) -> bool:
        """Take in what another agent knows of a host; returns whether its ranks have changed."""
        gone, beat = bool(number & _GONE), number & (_GONE - 1)
        if host is self._hosts[self._me] or beat <= host.beat:
            return False
        host.beat, host.heard = beat, True
        host.beaten = max(host.beaten, now - age / 1e3)
        found = {rank: states[rank] for rank in host.ranks if rank in states}
        changed = (found, gone) != (host.states, host.gone)
        host.states, host.gone = found, gone
        return changed

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:_TAG]

    # -- findings -------------------------------------------------------------------------------------

    def findings(self, now: float) -> dict[int, Finding]:
        """What is known of the ranks of the other hosts.

        Hosts that were cut off together are silent together, although their latest beats arrived at different
        times.
        """
        self._wake(now)
        others = [host for number, host in enumerate(self._hosts) if number != self._me]
        alive = [host for host in others if host.heard and not host.gone]
        limit = self.limit
        if any(now - host.beaten > limit for host in alive):
            limit = max(limit - (len(self._distances) + 1) * self._period, limit / 2)
        found: dict[int, Finding] = {}
        for host in others:
            age = now - host.beaten
            is_silent = host in alive and age > limit
            for rank in host.ranks:
                state: State = "silent" if is_silent else "running" if host.heard else "unknown"
                found[rank] = Finding(host.states.get(rank, state), age)
                if is_silent and found[rank].state == "stopped":
                    found[rank] = Finding("silent", age)
        return found

    def next_silence(self, now: float) -> float:
        """The earliest time after `now` at which another host may become silent; infinite if none can."""
        others = (host for number, host in enumerate(self._hosts) if number != self._me)
        ends = (host.beaten + self.limit for host in others if host.heard and not host.gone)
        return min((end for end in ends if end > now), default=math.inf)

    def _wake(self, now: float) -> None:
        """Give other hosts the time for which this agent was kept from running, and could hear nothing."""
        away = now - self._looked
        self._looked = now
        if away > _STALLED * self._period:
            for number, host in enumerate(self._hosts):
                if number != self._me:
                    host.beaten += away
