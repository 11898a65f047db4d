"""Decide how a waiting rank idles, by the load of this host.

A rank that polls at full speed finds its peer's answer at once, but occupies a core. That is harmless if
every rank has a core of its own. If other work runs, the peer may need the core. Then a waiting rank sleeps
on its bell (`bells`), and the peer wakes it. The scheduler favours a thread that wakes over threads that have
been running, while a thread that yields goes to the end of the queue, behind the other work.

Signs of other work, checked only in waits that take longer than the first polls:

- at every check for some time, more threads are runnable than there are cores, or than there are ranks if
  ranks outnumber cores (/proc/loadavg);
- this thread lost the core for a good part of its polling time, to another thread or because the cgroup's
  quota was used up;
- if this process may not use all cores: a peer has waited for a core since the last check
  (/proc/PID/schedstat).

Each sign is remembered for a while. No check is needed if the cgroup's quota gives each rank less than a
core. With more ranks than cores and no other work, a waiting rank first yields, because the core goes to a
peer. Longer waits always sleep (decision 16). All of this affects only how a rank waits, never the results.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from mcr_plus.core.environment import usable_cores

if TYPE_CHECKING:
    from mcr_plus.waiting.futex import Wakeups
    from mcr_plus.waiting.rescheduling import ReschedulingThread

WaitPolicy = Literal["auto", "spin", "yield", "sleep"]

FIRST_POLLS: Final = 20
"""Polls at full speed under any load: a peer that is about to answer is faster than going to sleep."""
GLANCE: Final = 4
"""First polls for a library whose polls wait for a moment themselves."""
SHORT_NAPS: Final = range(4)
"""Naps before the waiting loop takes over, with its deadline and its checks of peers."""
_CHECK_EVERY: Final = 50e-6  # seconds between checks of the load in one wait
_LOST: Final = 0.2  # share of lost polling time from which other work is assumed
_LEAST_LOST: Final = 200e-6  # s; shorter losses do not count
_BUSY_FOR: Final = 0.01  # s for which too many runnable threads are remembered at first
_BUSY_LONGEST: Final = 0.3  # s for which they are remembered if found repeatedly
_BUSY_AFTER: Final = 300e-6  # s of too many threads at every check, because some threads run only briefly
_SEEN_WITHIN: Final = 2e-3  # seconds between two checks that count as consecutive
_LOST_FOR: Final = 10  # a lost core is remembered for ten times as long as it was lost
_KEPT_FOR: Final = 0.1  # seconds for which a peer's wait for a core is remembered
_PEERS_EVERY: Final = 2e-3
_SLOW_FILE: Final = 50e-6  # seconds; if reading /proc/loadavg takes longer, a container emulates it
_TRIES: Final = range(8)  # reads of the file, because this thread may lose the core during one of them
_WATCHED: Final = 8  # peers
_SPIN_FOR: Final = 2e-3  # s of polling a polled library, after which a rank yields even its own core
# Seconds of yielding before a waiting rank begins to sleep. Not longer: since Linux 6.18 a task that yields
# all the time can keep others from the core for many seconds.
_YIELD_FOR: Final = 0.002
_POLL_FOR: Final = 0.5  # s of short naps, for operations that advance only while they are polled
_NAP: Final = 20e-6
_LONG_NAP: Final = 200e-6
# Nap for a library with threads of its own, which may need this core: a share of the time waited so far.
# Polls then cost little of the core, and the end of the operation is noticed late by half the nap on average.
_NAP_SHARE: Final = 1 / 128
_POLLED_NAP: Final = (
    50e-6  # on the bell, for a library that advances only while polled: peers ring for most progress
)
_RUNG_NAP: Final = 1e-3  # if peers ring for all progress
LONGEST_NAP: Final = 2e-3
_RUNG_SHARE: Final = 1 / 8  # of the time waited so far, if peers ring for all progress
_LONGEST_RUNG_NAP: Final = 0.01
_RELAY_EVERY: Final = 200e-6  # s between two relays, which take some 30 µs each
_LONG_RELAY: Final = 4e-3  # s of a relay while another thread of the program holds the interpreter
_RELAYS_RARELY: Final = 1.0  # s between two if all of them take that long


class WaitStrategy:
    """Load of the host as seen by this process, and the resulting way to idle.

    Attributes:
        calm: True if a wait may poll at full speed for longer than `FIRST_POLLS`.
        own_cores: True if there are as many cores as ranks. Otherwise a yield gives the core to a peer.
        yields: True if polls may yield, also in compiled code.
    """

    def __init__(
        self,
        policy: WaitPolicy,
        *,
        short: bool = False,
        ranks: int = 1,
        bells: Wakeups | None = None,
        peers: Sequence[int] = (),
        oversubscribed: bool = False,
    ) -> None:
        """Open the files of /proc. `short`: each rank may use less than a core.

        `ranks`: number of ranks on this host. `peers`: pids of the other ranks. `oversubscribed`: there are
        fewer cores than ranks, so polling at full speed is kept short.
        """
        self.policy = policy
        self._oversubscribed = oversubscribed
        self.bells = bells
        self.calm = policy in ("spin", "yield") or (policy == "auto" and not short)
        self.yields = True
        self._never_calm = not self.calm
        self._relay: ReschedulingThread | None = None
        self._next_relay, self._relay_every = 0.0, _RELAY_EVERY
        self._busy_until = 0.0
        self._busy_since = math.inf  # start of the current series of checks that found too many threads
        self._busy_began = 0.0
        self._last_check = 0.0
        self._cores = os.cpu_count() or 1
        self._most = max(self._cores, ranks)  # runnable threads without other work
        self.own_cores = ranks <= self._cores
        # A rank that yields beside other work gets the core back after a time slice or two.
        self._seen_within = _SEEN_WITHIN if self.own_cores else 10 * _SEEN_WITHIN
        self._busy_least = self._busy_for = _BUSY_FOR if self.own_cores else 5 * _BUSY_FOR
        self._loadavg = _opened("/proc/loadavg")
        # If ranks may use all cores, the number of threads is enough.
        watched = peers[:_WATCHED] if len(usable_cores()) < self._cores else ()
        self._peers = {_opened(f"/proc/{pid}/schedstat"): (0.0, 0) for pid in watched}
        self._peers.pop(-1, None)
        self._peers_next = 0.0
        if self._loadavg >= 0 and min(map(self._time_a_check, _TRIES)) > _SLOW_FILE:
            os.close(self._loadavg)
            self._loadavg = -1

    def _time_a_check(self, _: int) -> float:
        began = time.monotonic()
        self._too_many_run()
        return time.monotonic() - began

    def close(self) -> None:
        """Close the files of /proc, and end the thread."""
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()
        for descriptor in (self._loadavg, *self._peers):
            if descriptor >= 0:
                os.close(descriptor)
        self._loadavg = -1
        self._peers.clear()

    def abandon(self) -> None:
        """Drop bells and thread in a forked child, because they belong to the parent."""
        self.bells = self._relay = None

    @property
    def may_block(self) -> bool:
        """Return whether a wait may rely on a library's own threads to wake this thread."""
        return self.policy in ("auto", "sleep")

    def spins_for(self, backend_spins: int) -> int:
        """Return the number of first polls of a wait at full speed, if a library suggests `backend_spins`."""
        if self.policy == "spin":
            return 1 << 16
        if self.policy == "sleep":
            return 1
        return min(backend_spins, 20) if self._oversubscribed else backend_spins

    # -- load ----------------------------------------------------------------------------------------

    def may_nap(self) -> bool:
        """Return whether there are bells, and waits have recently not been calm."""
        return bool(self.bells) and self._is_busy(time.monotonic())

    def _is_busy(self, now: float) -> bool:
        return now < self._busy_until or self._never_calm

    def arm(self, ranks: tuple[int, ...]) -> None:
        """See `Wakeups.arm`."""
        assert self.bells is not None
        self.bells.arm(ranks)

    def nap(self, rings: bool) -> None:
        """Sleep until a peer rings; `rings`: the library rings for all progress that a wait depends on."""
        assert self.bells is not None
        self.bells.sleep(_RUNG_NAP if rings else _POLLED_NAP)

    def relay(self) -> None:
        """Block for a moment after an operation, if waits are not calm.

        The scheduler chooses a core for a thread that wakes, but never moves a thread that does not sleep
        (decision 41).
        """
        now = time.monotonic()
        if self.calm or now < self._next_relay or not self._is_busy(now):
            return
        self._next_relay = math.inf  # none until this one is over, or at all without a thread
        if self._relay is None:
            from mcr_plus.waiting.rescheduling import ReschedulingThread  # not needed on calm hosts

            with contextlib.suppress(RuntimeError):
                self._relay = ReschedulingThread()
        relay = self._relay
        if relay is None:
            return
        try:
            relay.hand_over()
        finally:  # a signal handler may raise
            ended = time.monotonic()
            is_long = ended - now >= _LONG_RELAY
            self._relay_every = (
                min(max(2 * self._relay_every, ended - now), _RELAYS_RARELY) if is_long else _RELAY_EVERY
            )
            self._next_relay = ended + self._relay_every

    def check_load(self, now: float, polled: float, had: float) -> None:
        """Decide whether waits are calm. The wait polled for `polled` s, and had the core for `had` s."""
        if self.policy != "auto" or self._never_calm:
            self._publish()
            return
        lost = polled - had
        # Ranks that share cores lose them to each other.
        if lost > _LEAST_LOST and lost > _LOST * polled and self.own_cores:
            self._busy_until = max(self._busy_until, now + _LOST_FOR * lost)
        anew = now - max(self._last_check, self._busy_until) > self._seen_within
        self._last_check = now
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
        self._publish()

    def _remember(self, now: float) -> None:
        """Remember other work, for longer if it has been there since the previous time.

        Otherwise a program that computes between its operations would have to detect the work again in each
        of them, and waste the time in which the scheduler prefers this rank.
        """
        if now - self._busy_until > _BUSY_LONGEST:  # there was no other work for a while
            self._busy_began, self._busy_for = now, self._busy_least
        elif now - self._busy_began > self._busy_for:
            self._busy_for = min(2 * self._busy_for, _BUSY_LONGEST)
        self._busy_until = max(self._busy_until, now + self._busy_for)

    def _publish(self) -> None:
        """Tell compiled code whether it may yield; it stops yielding once a yield has cost the core."""
        if self.bells is not None:
            self.bells.set_calm(self.calm and self.yields)

    def may_yield(self, waited: float) -> None:
        """Let compiled code yield only at the beginning of a wait, which has lasted `waited` seconds."""
        yields = waited < _YIELD_FOR or self.policy == "yield"
        if yields != self.yields:
            self.yields = yields
            self._publish()

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
        # If ranks share cores, other work can hide in the count in place of sleeping ranks.
        return not self.own_cores and bool(self.bells) and running > max(self._cores, self._awake())

    def _awake(self) -> int:
        assert self.bells is not None
        return self._most - self.bells.asleep()

    def _peers_are_kept_waiting(self, now: float) -> bool:
        crowded = False
        for descriptor, (seen_at, seen) in list(self._peers.items()):
            try:
                delay = int(os.pread(descriptor, 64, 0).split()[1])
            except (OSError, ValueError, IndexError):  # the process has ended
                del self._peers[descriptor]
                with contextlib.suppress(OSError):
                    os.close(descriptor)
                continue
            self._peers[descriptor] = (now, delay)
            lost = (delay - seen) * 1e-9
            crowded |= seen_at > 0 and lost > _LEAST_LOST and lost > _LOST * (now - seen_at)
        return crowded


class Pause:
    """Idles between two polls of one wait.

    `polled`: the library advances only while it is polled. `rings`: the library rings after all progress.
    `peers`: ranks of the job that may ring.
    """

    __slots__ = ("_had", "_nap", "_next_check", "_peers", "_polled", "_rings", "_since", "_waiting")

    def __init__(self, waiting: WaitStrategy, polled: bool, rings: bool, peers: tuple[int, ...]) -> None:
        self._waiting, self._polled, self._rings, self._peers = waiting, polled, rings, peers
        self._next_check = 0.0
        self._since = self._had = 0.0
        self._nap = _RUNG_NAP if rings else _POLLED_NAP

    def before(self, now: float, waited: float) -> bool:
        """Return True if the caller should poll again and call `sleep`, False if it should call `idle`."""
        waiting = self._waiting
        if waiting.policy == "spin" or not self._polled:
            return False  # a library's own threads would count as other work
        if now >= self._next_check:
            self._next_check = now + _CHECK_EVERY
            had = time.thread_time()
            since = self._since or now
            waiting.check_load(now, now - since, had - self._had if self._since else 0.0)
            self._since, self._had = now, had
        bells, is_short = waiting.bells, waited < _YIELD_FOR or waiting.policy == "yield"
        if not bells or (waiting.calm and is_short):
            return False
        waiting.may_yield(waited)
        bells.arm(self._peers)
        return True

    def sleep(self, longest: float, waited: float) -> None:
        """Sleep until a peer rings, for a time that grows with every call."""
        waiting = self._waiting
        assert waiting.bells is not None
        if waiting.bells.wanted[0]:  # this rank's polls may have advanced an operation for which peers wait
            waiting.bells.ring()
        if waiting.calm and not self._rings:  # for nothing but the end, which is noticed late by little
            longest = min(longest, max(_NAP, waited * _NAP_SHARE))
        waiting.bells.sleep(min(self._nap, longest))
        rung = min(_RUNG_SHARE * waited, _LONGEST_RUNG_NAP) if self._rings else 0.0
        self._nap = min(2 * self._nap, max(LONGEST_NAP, rung))
        self._since = 0.0

    def idle(self, waited: float) -> None:
        """Yield, and later nap, without bells."""
        waiting = self._waiting
        policy = waiting.policy
        calm = waiting.calm or not self._polled
        if policy == "spin":
            return
        if policy == "auto" and calm and self._polled and waiting.own_cores and waited < _SPIN_FOR:
            return
        waiting.may_yield(waited)
        if policy == "yield" or (policy == "auto" and calm and waited < _YIELD_FOR):
            os.sched_yield()
        elif self._polled:
            time.sleep(_NAP if waited < _POLL_FOR + 0.05 else _LONG_NAP)
            self._since = 0.0
        else:
            time.sleep(min(max(_NAP, waited * _NAP_SHARE), LONGEST_NAP))


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
