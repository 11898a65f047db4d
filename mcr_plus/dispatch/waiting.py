"""How a rank idles while it waits, decided per wait by what is seen on this host.

A rank that polls at full speed finds its peer's answer at once, and takes a core. As long as every rank has a
core of its own nobody misses it. Beside other work the core may be the one that the peer needs: then whoever
waits sleeps on its bell (`bells`), and the peer wakes it. The scheduler favours a rank that wakes over one
that has been running, where one that yields goes to the end of the queue, behind whatever else runs there.

What counts as other work, looked at only in waits that take longer than the first polls:

- more threads want to run than there are cores, or ranks if there are more of them (/proc/loadavg), at every
  look for some time;
- this thread has polled for some time of which it did not have the core for a good part: somebody else had
  it, or the quota of the cgroup was used up;
- where this process may not use all cores: a peer was kept waiting for one since the last look
  (/proc/PID/schedstat).

Each is remembered for a while. Where the cgroup's quota gives ranks less than a core each there is no need to
look. Where there are more ranks than cores and nothing else, yielding is best: the core goes to a peer.
All of it concerns this rank alone: how it waits, never what is done.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from mcr_plus.environment import usable_cores

if TYPE_CHECKING:
    from mcr_plus.dispatch.bells import Bells

WaitPolicy = Literal["auto", "spin", "yield", "sleep"]

FIRST_POLLS: Final = 20
"""At full speed, whatever else goes on: a peer that is about to answer is faster than going to sleep."""
GLANCE: Final = 4
"""The same of a library whose polls wait for a moment themselves."""
SHORT_NAPS: Final = range(4)
"""Naps before a wait is taken for a long one, with its deadline and its looks at peers."""
_LOOK_EVERY: Final = 50e-6  # seconds between looks at the load in one wait
_LOST: Final = 0.2  # of the time of polling: to have been without the core for so much is no accident
_LEAST_LOST: Final = 200e-6  # seconds
_BUSY_FOR: Final = 0.01  # seconds for which too many runnable threads are remembered at first
_BUSY_LONGEST: Final = 0.3  # the same where they are found again and again
_BUSY_AFTER: Final = 300e-6  # of seeing nothing else: threads that run for a moment are no other work
_SEEN_WITHIN: Final = 2e-3  # seconds between two looks that see the same
_LOST_FOR: Final = 10  # times as long as it was, a lost core is remembered
_KEPT_FOR: Final = 0.1  # seconds for which a peer's wait for a core is remembered
_PEERS_EVERY: Final = 2e-3
_SLOW_FILE: Final = 50e-6  # seconds of reading /proc/loadavg, where it is a file system of a container's
_TRIES: Final = range(8)  # of reading it, of which this thread may have been without a core for some
_WATCHED: Final = 8  # peers
_SPIN_FOR: Final = 2e-3  # seconds of polling for what is polled before a rank yields a core of its own
_YIELD_FOR: Final = 0.002  # seconds of yielding before a waiting rank begins to sleep
_POLL_FOR: Final = 0.5  # the same for operations that advance only while they are polled
_NAP: Final = 20e-6
_LONG_NAP: Final = 200e-6
_POLLED_NAP: Final = 50e-6  # on the bell, for what moves only while it is polled: peers ring for most of it
_RUNG_NAP: Final = 1e-3  # where they ring for all of it
_LONGEST_NAP: Final = 2e-3


class Waiting:
    """What this process sees of the load of its host, and how it idles.

    Attributes:
        calm: whether a wait may poll at full speed for longer than `FIRST_POLLS`.
        own_cores: whether there are as many cores as ranks. Where there are not, a yield is for a peer.
    """

    def __init__(
        self,
        policy: WaitPolicy,
        *,
        short: bool = False,
        ranks: int = 1,
        bells: Bells | None = None,
        peers: Sequence[int] = (),
    ) -> None:
        """`short`: ranks may use less than a core each. `ranks`: of this host. `peers`: their processes."""
        self.policy = policy
        self.bells = bells
        self.calm = policy in ("spin", "yield") or (policy == "auto" and not short)
        self._never_calm = not self.calm
        self._busy_until = 0.0
        self._busy_since = (
            math.inf
        )  # when too many threads were first seen, of the looks that saw nothing else
        self._busy_began = 0.0
        self._looked = 0.0
        self._cores = os.cpu_count() or 1
        self._most = max(self._cores, ranks)  # threads that run where there is no other work
        self.own_cores = ranks <= self._cores
        # A rank that yields beside other work has the core again after a time slice or two.
        self._seen_within = _SEEN_WITHIN if self.own_cores else 10 * _SEEN_WITHIN
        self._busy_least = self._busy_for = _BUSY_FOR if self.own_cores else 5 * _BUSY_FOR
        self._loadavg = _opened("/proc/loadavg")
        # Where ranks may use all cores, the number of threads says all.
        watched = peers[:_WATCHED] if len(usable_cores()) < self._cores else ()
        self._peers = {_opened(f"/proc/{pid}/schedstat"): (0.0, 0) for pid in watched}
        self._peers.pop(-1, None)
        self._peers_next = 0.0
        if self._loadavg >= 0 and min(map(self._time_of_a_look, _TRIES)) > _SLOW_FILE:
            os.close(self._loadavg)
            self._loadavg = -1

    def _time_of_a_look(self, _: int) -> float:
        began = time.monotonic()
        self._too_many_run()
        return time.monotonic() - began

    def close(self) -> None:
        """Close the files of /proc."""
        for descriptor in (self._loadavg, *self._peers):
            if descriptor >= 0:
                os.close(descriptor)
        self._loadavg = -1
        self._peers.clear()

    def abandon(self) -> None:
        """In a forked child: the bells are its parent's, and so are their sleepers."""
        self.bells = None

    # -- what is seen ---------------------------------------------------------------------------------

    def may_nap(self) -> bool:
        """Whether waits have lately been found not to be calm, and there are bells."""
        return bool(self.bells) and (time.monotonic() < self._busy_until or self._never_calm)

    def arm(self, ranks: tuple[int, ...]) -> None:
        """See `Bells.arm`."""
        assert self.bells is not None
        self.bells.arm(ranks)

    def nap(self, rings: bool) -> None:
        """Sleep until a peer rings; `rings`: it does so for all of what is waited for."""
        assert self.bells is not None
        self.bells.sleep(_RUNG_NAP if rings else _POLLED_NAP)

    def look(self, now: float, polled: float, had: float) -> None:
        """Decide whether waits are calm, after `polled` seconds of polling, `had` of them with the core."""
        if self.policy != "auto" or self._never_calm:
            self._tell()
            return
        lost = polled - had
        # Where ranks share cores, they lose them to each other.
        if lost > _LEAST_LOST and lost > _LOST * polled and self.own_cores:
            self._busy_until = max(self._busy_until, now + _LOST_FOR * lost)
        anew = now - max(self._looked, self._busy_until) > self._seen_within
        self._looked = now
        if not self._too_many_run():
            self._busy_since = math.inf
        elif anew or self._busy_since == math.inf:
            self._busy_since = now
        elif now - self._busy_since > _BUSY_AFTER:
            self._remember(now)
        if self._peers and now >= self._peers_next:
            self._peers_next = now + _PEERS_EVERY
            if self._peers_are_kept_waiting(now):
                self._busy_until = max(self._busy_until, now + _KEPT_FOR)
        self.calm = now >= self._busy_until
        self._tell()

    def _remember(self, now: float) -> None:
        """Remember other work: for longer, if it has been there since it was last remembered.

        A program that computes between its operations would otherwise find out anew at each of them, and
        spend on it the time for which the scheduler would prefer it to that other work.
        """
        if now - self._busy_until > _BUSY_LONGEST:  # for a while there was none
            self._busy_began, self._busy_for = now, self._busy_least
        elif now - self._busy_began > self._busy_for:
            self._busy_for = min(2 * self._busy_for, _BUSY_LONGEST)
        self._busy_until = max(self._busy_until, now + self._busy_for)

    def _tell(self) -> None:
        """Tell compiled code, which stops yielding by itself until then if a yield has cost the core."""
        if self.bells is not None:
            self.bells.tell(self.calm)

    def _too_many_run(self) -> bool:
        if self._loadavg < 0:
            return False
        try:
            text = os.pread(self._loadavg, 64, 0)
            running = int(text[: text.index(b"/")].rsplit(b" ", 1)[1])
        except (OSError, ValueError, IndexError):
            return False
        if running > self._most:
            return True
        # Where ranks share cores, those that sleep leave room in the count for other work.
        return not self.own_cores and bool(self.bells) and running > max(self._cores, self._awake())

    def _awake(self) -> int:
        assert self.bells is not None
        return self._most - self.bells.asleep()

    def _peers_are_kept_waiting(self, now: float) -> bool:
        found = False
        for descriptor, (seen_at, seen) in list(self._peers.items()):
            try:
                delay = int(os.pread(descriptor, 64, 0).split()[1])
            except (OSError, ValueError, IndexError):  # it has ended
                del self._peers[descriptor]
                with contextlib.suppress(OSError):
                    os.close(descriptor)
                continue
            self._peers[descriptor] = (now, delay)
            lost = (delay - seen) * 1e-9
            found |= seen_at > 0 and lost > _LEAST_LOST and lost > _LOST * (now - seen_at)
        return found


class Pause:
    """What happens between two polls of one wait.

    `polled`: the library moves only while it is polled. `rings`: and rings whenever it has moved something.
    `peers`: ranks of the job that may ring.
    """

    __slots__ = ("_had", "_look_at", "_nap", "_peers", "_polled", "_since", "_waiting")

    def __init__(self, waiting: Waiting, polled: bool, rings: bool, peers: tuple[int, ...]) -> None:
        self._waiting, self._polled, self._peers = waiting, polled, peers
        self._look_at = 0.0
        self._since = self._had = 0.0
        self._nap = _RUNG_NAP if rings else _POLLED_NAP

    def before(self, now: float) -> bool:
        """Whether to sleep: then the caller looks at what it waits for once more, and calls `sleep`.

        If not, it has idled for as long as it should.
        """
        waiting = self._waiting
        if waiting.policy == "spin" or not self._polled:
            return False  # a library's own threads would count as other work
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            had = time.thread_time()
            since = self._since or now
            waiting.look(now, now - since, had - self._had if self._since else 0.0)
            self._since, self._had = now, had
        bells = waiting.bells
        if waiting.calm or not bells:
            return False
        bells.arm(self._peers)
        return True

    def sleep(self, longest: float) -> None:
        """Until a peer rings, for a while that grows with every call."""
        waiting = self._waiting
        assert waiting.bells is not None
        if waiting.bells.wanted[0]:  # what this rank has polled may be what others wait for
            waiting.bells.ring()
        waiting.bells.sleep(min(self._nap, longest))
        self._nap = min(2 * self._nap, _LONGEST_NAP)
        self._since = 0.0

    def idle(self, waited: float) -> None:
        """Where nobody rings: yield, then nap."""
        waiting = self._waiting
        policy = waiting.policy
        patience = _POLL_FOR if self._polled else _YIELD_FOR
        calm = waiting.calm or not self._polled
        if policy == "spin":
            return
        if policy == "auto" and calm and self._polled and waiting.own_cores and waited < _SPIN_FOR:
            return
        if policy == "yield" or (policy == "auto" and calm and waited < patience):
            os.sched_yield()
        else:
            time.sleep(_NAP if waited < patience + 0.05 else _LONG_NAP)
            self._since = 0.0


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
