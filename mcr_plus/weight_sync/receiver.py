"""Receiver of weights: a thread fetches and checks versions, and `pull` copies them to the tensors.

With several source ranks, each sends a part, and a version is complete once all parts have arrived. The
receiver asks the first source, the *lead*, for a newer version. When the lead's answer begins, the receiver
asks the other sources for the same version, so that all answers arrive at the same time and agree. A source
that has dropped the payloads up to this version answers with all its weights of a newer version. Then all
sources are asked for the newer version, and `pull` waits until it is complete. Answers are applied before
that, so that later changes can build on them: a receiver that discarded them would need all weights of a
newer version again, for as long as the sources push faster than all weights travel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from mcr_plus.errors import BackendError, CommTimeout, McrError, SyncClosed, phrase_ranks
from mcr_plus.rendezvous import stream as links
from mcr_plus.rendezvous.stream import StreamClosed
from mcr_plus.rendezvous.wait_messages import logged_waiting
from mcr_plus.weight_sync.connection import SourceAnswer, SourceConnection
from mcr_plus.weight_sync.weights import Weights

_log = logging.getLogger("mcr_plus")
AHEAD: Final = 4
"""Answers that are fetched although the program pulls none of them."""


class WeightReceiver:
    """Holder of the newest complete version; the program's `pull` copies it to the tensors.

    `sources`: address of each source rank, and the numbers of the buffers that it fills. `rank`: rank of this
    receiver in the job; outside the job its number, with the `offer` that it takes.
    """

    def __init__(
        self,
        weights: Weights,
        what: str,
        secret: bytes,
        sources: Mapping[int, tuple[tuple[str, int], Sequence[int]]],
        rank: int,
        ends: Callable[[], bool],
        offer: int | None = None,
    ) -> None:
        self._weights, self._what, self._rank, self._group_ends = weights, what, rank, ends
        self._held = weights.buffers()
        weights.read(self._held)
        self._changed = threading.Condition()
        self._holding = threading.Lock()  # guards `_held`
        self._applied = self._newest = 0
        self._unused = self._fetched = 0  # answers since the last pull, and all answers
        self._waiting = 0  # number of waiting `pull` calls
        self._is_paused = self._was_said = self._is_idle = False
        self._error: McrError | None = None
        self._closed, self._is_in_order = False, True
        self._stats: dict[str, Any] = {"density": 0.0, "bytes": 0, "seconds": 0.0, "pause_seconds": 0.0}
        self._feeds: list[SourceConnection] = []
        for source, (place, buffers) in sources.items():
            held = [self._held[number] for number in buffers]
            own_ends = self._ends if self._feeds else self._ends_or_looks
            self._feeds.append(
                SourceConnection(what, source, place, secret, rank, held, own_ends, offer, self._ends)
            )
        self._pending: dict[SourceConnection, Future[SourceAnswer]] = {}
        self._helpers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._fetch_all, name=f"mcr_plus-{what}", daemon=True)
        self._thread.start()

    # -- of the program's thread --------------------------------------------------------------------

    def pull(self, wait: bool, timeout: float) -> int | None:
        """Copy the newest version to the tensors, see `WeightSync.pull`."""
        if self._newest or not wait:
            return self._pull(wait, timeout)
        with logged_waiting(lambda: f"{self._what}: waits for the first push of {self._sources}"):
            return self._pull(wait, timeout)

    def _pull(self, wait: bool, timeout: float) -> int | None:
        deadline = time.monotonic() + timeout
        with self._changed:
            fetched = self._fetched + 1 if self._is_paused and wait else 0
            self._unused = 0
            self._is_paused = False
            self._waiting += wait
            self._changed.notify_all()
        try:
            while self._awaits_newer(wait, fetched, deadline, timeout):
                begin = time.perf_counter()
                with self._holding:
                    if self._is_new:  # again: the next version may have been applied, damaged
                        self._weights.write(self._held)
                        self._applied = self._feeds[0].version
                        self._stats["pause_seconds"] = time.perf_counter() - begin
                        return self._applied
            return None
        finally:
            with self._changed:
                self._waiting -= wait
                self._unused = 0  # answers that came while it waited do not count as unused

    def _awaits_newer(self, wait: bool, fetched: int, deadline: float, timeout: float) -> bool:
        """Wait for a newer version, and `fetched` answers in all; False if there is none without `wait`."""
        with self._changed:
            while not (self._is_new and self._fetched >= fetched):
                if self._error is not None or self._group_ends() or self._closed:
                    break
                left = deadline - time.monotonic()
                if not wait:
                    return False
                if left <= 0:
                    if self._is_new:
                        break
                    raise self._late(timeout)
                self._changed.wait(min(left, 0.5))
            if self._error is not None and not self._is_new:
                raise self._error
            if self._closed or self._group_ends():
                if self._is_in_order:
                    raise SyncClosed(f"{self._what}: closed")
                raise BackendError(f"{self._what}: its group was closed after an error, or for another world")
            return True

    def _late(self, timeout: float) -> CommTimeout:
        ranks = [feed.source for feed in self._feeds]
        text = f"no version newer than {self._applied} from {self._sources} within {timeout:g} s"
        text += "; it has pushed none so far" * (not self._newest)
        late = [feed.source for feed, future in tuple(self._pending.items()) if not future.done()]
        if late:
            ranks, text = late, f"{text}: rank {ranks[0]} has one, {phrase_ranks(late)} not yet"
        return CommTimeout(f"{self._what}: {text}", tuple(ranks))

    @property
    def _sources(self) -> str:
        return phrase_ranks([feed.source for feed in self._feeds])

    @property
    def _is_new(self) -> bool:
        return self._is_level and self._feeds[0].version > self._applied

    @property
    def _is_level(self) -> bool:
        """Whether all sources have sent the same version completely."""
        version = self._feeds[0].version
        return all(feed.is_whole and feed.version == version for feed in self._feeds)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self._weights.nbytes

    def stats(self) -> dict[str, Any]:
        """Return figures of this rank, see `WeightSync.stats`."""
        with self._changed:
            behind = max(0, self._newest - self._applied)
            counted = {
                "anchors": sum(feed.anchors for feed in self._feeds),
                "refused": sum(feed.refused for feed in self._feeds),
                "received_bytes": sum(feed.received for feed in self._feeds),
                "forwarded_bytes": sum(feed.relay.forwarded for feed in self._feeds if feed.relay),
            }
            return {**self._stats, **counted, "version": self._applied, "versions_behind": behind}

    def close(self, *, in_order: bool = True) -> None:
        """Stop the threads. `in_order`: whether a `pull` waiting in another thread raises `SyncClosed`."""
        with self._changed:
            self._closed, self._is_in_order = True, in_order
            self._changed.notify_all()
        self._thread.join(5.0)

    def _ends(self) -> bool:
        return self._closed or self._group_ends() or self._error is not None

    def _ends_or_looks(self) -> bool:
        """Return `_ends()`; while idle until the lead's next version, check the other connections."""
        if self._ends():
            return True
        if self._is_idle:
            for feed in self._feeds[1:]:
                feed.check()
        return False

    # -- the fetching thread ---------------------------------------------------------------------------

    def _fetch_all(self) -> None:
        kind, aim, is_intended = links.WAIT, 0, False
        try:
            while True:
                if self._begins_pause():
                    self._pause()
                    kind = links.POLL
                answers = self._answers(kind, aim)
                versions = {feed.version if each is None else each.version for feed, each in answers.items()}
                aim = max(versions) if len(versions) > 1 else 0
                self._take(answers)
                kind = links.WAIT if self._is_level else links.POLL
        except StreamClosed:
            is_intended = True
        except McrError as error:
            self._fail(error)
        except Exception as error:
            self._fail(BackendError(f"{self._what}: {type(error).__name__}: {error}"))
        finally:
            for helper in self._helpers:
                helper.join()
            is_intended = is_intended or any(feed.has_ended for feed in self._feeds)
            for feed in self._feeds:
                feed.close(says_end=is_intended)

    def _fail(self, error: McrError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _answers(self, kind: int, aim: int) -> dict[SourceConnection, SourceAnswer | None]:
        """Return the lead's answer to a request, and the other sources' answers for the same version.

        The answer is None for a source that already has sent this version.
        """
        lead, *others = self._feeds
        pending = self._pending = {}

        def announced(version: int) -> None:
            self._is_idle = False
            for feed in others:
                if feed not in pending and feed.lacks(version):
                    pending[feed] = self._beside(feed, version)

        self._is_idle = True
        try:
            first = lead.fetch(kind, aim, announced)
        finally:
            self._is_idle = False
        rest = {feed: pending[feed].result() if feed in pending else None for feed in others}
        return {lead: first, **rest}

    def _beside(self, feed: SourceConnection, version: int) -> Future[SourceAnswer]:
        """Fetch a version from one source on another thread."""
        future: Future[SourceAnswer] = Future()

        def run() -> None:
            try:
                future.set_result(feed.fetch(links.WAIT, version))
            except BaseException as error:
                future.set_exception(error)

        # At exit, Python would wait for threads of a `ThreadPoolExecutor`; daemon threads do not delay it.
        thread = threading.Thread(target=run, name=f"mcr_plus-{self._what}", daemon=True)
        self._helpers = [each for each in self._helpers if each.is_alive()]
        thread.start()
        self._helpers.append(thread)
        return future

    def _begins_pause(self) -> bool:
        """Pause if the program pulled none of the last answers, unless a `pull` waits for sources."""
        with self._changed:
            self._is_paused = self._unused >= AHEAD and not self._waiting
            return self._is_paused

    def _pause(self) -> None:
        """Fetch nothing until the program pulls."""
        if not self._was_said:
            self._was_said = True
            _log.warning(
                "%s: %d newer versions have arrived at %s, which has pulled none of them; the next are "
                "fetched when it pulls (reported once)", self._what, self._unused, links.named(self._rank),
            )  # fmt: skip
        while self._is_paused:
            if self._ends():
                raise StreamClosed
            for feed in self._feeds:
                feed.check()
            with self._changed:
                if self._is_paused:
                    self._changed.wait(0.5)

    def _take(self, answers: Mapping[SourceConnection, SourceAnswer | None]) -> None:
        """Apply the answers of all sources for one version."""
        found = [(feed, answer) for feed, answer in answers.items() if answer is not None]
        brings = any(answer.payloads for _, answer in found)
        begin, before = time.perf_counter(), sum(feed.received for feed in self._feeds)
        with self._holding:
            changed = sum(feed.take(answer) for feed, answer in found)
        with self._changed:
            nbytes = sum(feed.received for feed in self._feeds) - before
            if nbytes:
                self._stats["density"] = min(1.0, changed / max(1, self._weights.numel))
                self._stats["bytes"] = nbytes
            if brings:
                self._stats["seconds"] = time.perf_counter() - begin
            self._newest = max(self._newest, *(answer.version for _, answer in found))
            self._fetched += 1
            self._unused += brings
            self._changed.notify_all()
