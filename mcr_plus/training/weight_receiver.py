"""A receiver of weights: a thread that fetches and checks versions, and `pull`, which copies them out."""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from mcr_plus.errors import BackendError, CommTimeout, McrError, PeerLost
from mcr_plus.kernels import delta
from mcr_plus.training import weight_link as links
from mcr_plus.training.weight_link import Ended, Link, Untrusted
from mcr_plus.training.weights import Weights, combined, digest_of

_log = logging.getLogger("mcr_plus")
AHEAD: Final = 4
"""Answers that are fetched although the program pulls none of them."""
_TRIES: Final = 8
_FAILURES: Final = 3  # answers in a row that cannot be used
_UNKNOWN: Final = 0  # the digest of weights that are not usable


class WeightReceiver:
    """Holds the newest version that has arrived whole; the module's tensors get it when the program pulls.

    `place`: where the source listens. `source`, `rank`: ranks of the job.
    """

    def __init__(
        self,
        weights: Weights,
        what: str,
        secret: bytes,
        place: tuple[str, int],
        source: int,
        rank: int,
        ends: Callable[[], bool],
    ) -> None:
        self._weights, self._what, self._secret, self._place = weights, what, secret, place
        self._source, self._rank, self._group_ends = source, rank, ends
        self._held = weights.buffers()
        weights.read(self._held)
        self._digests = digest_of(self._held)
        self._most = 2 * weights.nbytes + (1 << 20)
        self._changed = threading.Condition()
        self._holding = threading.Lock()  # of `_held`
        self._is_whole = True
        self._version = self._applied = self._newest = 0
        self._unused = self._fetched = 0  # answers since the last pull, and all
        self._is_paused = self._was_said = False
        self._error: McrError | None = None
        self._closed = False
        self._stats: dict[str, Any] = {
            "density": 0.0, "bytes": 0, "seconds": 0.0, "anchors": 0, "received_bytes": 0, "refused": 0,
            "pause_seconds": 0.0,
        }  # fmt: skip
        self._thread = threading.Thread(target=self._fetch_all, name=f"mcr_plus-{what}", daemon=True)
        self._thread.start()

    # -- of the program's thread --------------------------------------------------------------------

    def pull(self, wait: bool, timeout: float) -> int | None:
        """See `WeightSync.pull`."""
        deadline = time.monotonic() + timeout
        with self._changed:
            fetched = self._fetched + 1 if self._is_paused and wait else 0
            self._unused = 0
            self._is_paused = False
            self._changed.notify_all()
        while self._awaits_newer(wait, fetched, deadline, timeout):
            begin = time.perf_counter()
            with self._holding:
                if self._is_new:  # again: the next version may have been taken in meanwhile, and be damaged
                    self._weights.write(self._held)
                    self._applied = self._version
                    self._stats["pause_seconds"] = time.perf_counter() - begin
                    return self._applied
        return None

    def _awaits_newer(self, wait: bool, fetched: int, deadline: float, timeout: float) -> bool:
        """Wait for a newer version, and so many answers; False if there is none and it does not wait."""
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
                    raise CommTimeout(
                        f"{self._what}: no version newer than {self._applied} from rank {self._source} "
                        f"within {timeout:g} s",
                        (self._source,),
                    )
                self._changed.wait(min(left, 0.5))
            if self._error is not None and not self._is_new:
                raise self._error
            if self._closed or self._group_ends():
                raise BackendError(f"{self._what}: closed")
            return True

    @property
    def _is_new(self) -> bool:
        return self._is_whole and self._version > self._applied

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self._weights.nbytes

    def stats(self) -> dict[str, Any]:
        """See `WeightSync.stats`."""
        with self._changed:
            behind = max(0, self._newest - self._applied)
            return {**self._stats, "version": self._applied, "versions_behind": behind}

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(5.0)

    def _ends(self) -> bool:
        return self._closed or self._group_ends()

    # -- of the thread that fetches -------------------------------------------------------------------

    def _fetch_all(self) -> None:
        link: Link | None = None
        fruitless = 0  # connections in a row that have brought no answer
        try:
            while link is None:
                link = links.connect(self._place, self._secret, self._rank, self._ends, _TRIES)
                before = self._fetched
                try:
                    self._fetch_from(link)
                except (OSError, EOFError) as error:  # the connection may have been the trouble
                    if isinstance(error, Untrusted):
                        with self._changed:
                            self._stats["refused"] += 1
                        _log.warning("%s: %s; rank %d connects again", self._what, error, self._rank)
                    fruitless = fruitless + 1 if self._fetched == before else 0
                    if fruitless == _TRIES:
                        raise
                    link.close()
                    link = None
                    time.sleep(0.05 * fruitless)
        except Ended:
            if link is not None and not link.is_sending:
                with contextlib.suppress(OSError, Ended):
                    link.send(links.END)
        except (OSError, EOFError) as error:
            self._fail(
                PeerLost(
                    f"{self._what}: rank {self._source}, the source of weights, does not answer any more: "
                    f"{error}",
                    (self._source,),
                    self._what,
                    seen="connection closed",
                )
            )
        except McrError as error:
            self._fail(error)
        except Exception as error:
            self._fail(BackendError(f"{self._what}: {type(error).__name__}: {error}"))
        finally:
            if link is not None:
                link.close()

    def _fail(self, error: McrError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _fetch_from(self, link: Link) -> None:
        failures, kind = 0, links.WAIT
        while True:
            with self._changed:
                if self._unused >= AHEAD:
                    self._pause(link)
                    kind = links.POLL
            link.send(kind, self._version, self._digest)
            answer, newest, count, body = self._received(link)
            if answer == links.END:
                raise BackendError(f"{self._what}: rank {self._source} has closed it")
            kind = links.WAIT
            begin = time.perf_counter()
            try:
                if count:
                    self._take(body, count)
                failures = 0
            except BackendError as error:
                failures += 1
                with self._changed:
                    self._stats["refused"] += 1
                if failures == _FAILURES:
                    raise
                _log.warning("%s: %s; all weights are asked for instead", self._what, error)
            with self._changed:
                self._newest = max(self._newest, newest)
                self._fetched += 1
                self._unused += count > 0
                if count:
                    self._stats["seconds"] = time.perf_counter() - begin
                self._changed.notify_all()

    def _received(self, link: Link) -> tuple[int, int, int, bytearray]:
        """The next answer."""
        return link.receive(self._most)

    @property
    def _digest(self) -> int:
        return combined(self._digests) if self._is_whole else _UNKNOWN

    def _pause(self, link: Link) -> None:
        """Fetch nothing until the program pulls; raises `EOFError` if the connection is closed meanwhile."""
        self._is_paused = True
        if not self._was_said:
            self._was_said = True
            _log.warning(
                "%s: %d newer versions have arrived at rank %d, which has pulled none of them; the next are "
                "fetched when it pulls (reported once)", self._what, self._unused, self._rank,
            )  # fmt: skip
        while self._is_paused:
            if self._ends():
                raise Ended
            link.check()
            self._changed.wait(0.5)

    def _take(self, body: bytearray, count: int) -> None:
        """Apply payloads. Raises `BackendError` if they do not follow from what is held, or are damaged."""
        parts = len(self._held)
        if count % parts or len(body) < 8 * count:
            raise BackendError(f"{count} payloads in {len(body)} bytes for {parts} buffers")
        sizes = struct.unpack_from(f"<{count}Q", body)
        if sum(sizes) != len(body) - 8 * count:
            raise BackendError(f"payloads of {sum(sizes)} bytes in {len(body) - 8 * count}")
        data = torch.frombuffer(body, dtype=torch.uint8)
        wires = data[8 * count :].split(list(sizes))
        changed, anchors = 0, 0
        with self._holding:
            was, self._is_whole = self._is_whole, False
            for begin in range(0, count, parts):
                step = wires[begin : begin + parts]
                heads = [delta.header_of(wire) for wire in step]
                for head, digest in zip(heads, self._digests, strict=True):
                    delta.follow(head, self._version, digest if was else None)
                for wire, held in zip(step, self._held, strict=True):
                    delta.apply(wire, held)
                    changed += delta.changed(wire)
                self._digests = [head.digest for head in heads]
                self._version = heads[0].target
                anchors += all(head.is_anchor for head in heads)
                was = True
            self._is_whole = True
        self._stats["density"] = min(1.0, changed / max(1, self._weights.numel))
        self._stats["bytes"] = len(body)
        self._stats["received_bytes"] += len(body)
        self._stats["anchors"] += anchors
