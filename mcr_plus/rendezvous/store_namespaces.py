"""Unused parts of a store, in which the ranks of a job begin."""

from __future__ import annotations

import json
import secrets
import time
from typing import Final

from mcr_plus.core.c10d import PrefixStore, Store
from mcr_plus.core.deadline import Deadline
from mcr_plus.core.job_store import JobStore
from mcr_plus.errors import LaunchError, PeerLost
from mcr_plus.membership.rules import Process
from mcr_plus.rendezvous.arrivals import SLACK, JobArrivals, loss_as_text, raise_loss
from mcr_plus.rendezvous.identity import is_visible
from mcr_plus.rendezvous.store_connections import place_of
from mcr_plus.rendezvous.wait_messages import logged_waiting, some_ranks

_LONGEST_NAP: Final = 0.02
_LOOKS_AFTER: Final = 0.1  # s between checks of the arrived ranks' processes


def unused_part(store: Store, rank: int, size: int, timeout: float, launchers: Store | None = None) -> Store:
    """Return a part of the store without any keys, the same for all ranks; collective.

    A store may outlive the processes that use it: torchrun's agent keeps it when it restarts the ranks, and
    the replacement of a rank has not taken part in earlier calls. So a counter in the process cannot name the
    part. Rank 0 draws a random name, and sends it to ranks that request it under random names of their own;
    no key left by an earlier job can be taken for an answer. `launchers`: see `JobArrivals`.

    Raises `LaunchError` naming the ranks that have not called this within `timeout` seconds, and `PeerLost`
    if a rank is seen to have died.
    """
    arrivals = JobArrivals(rank, size, launchers)
    name = unused_name(store, rank, size, timeout, arrivals)
    arrivals.presence.close()  # waits for values in the part do not use it
    return PrefixStore(name, store)


def unused_name(store: Store, rank: int, size: int, timeout: float, arrivals: JobArrivals) -> str:
    """Return the name of an `unused_part`; all `arrivals` are known then. Long waits are logged."""
    missing = list(range(1, size))
    place = place_of(store)

    def waits() -> str:
        if rank and 0 not in arrivals.processes:
            return (
                f"rank {rank} of {size} has come to {place} and waits for rank 0, which knows of the others"
            )
        if rank:
            return f"rank {rank} of {size} waits for others; rank 0 says for which"
        here = [each for each in range(size) if each not in missing]
        return f"{some_ranks(here)} of {size} arrived at {place}; still awaited: {some_ranks(missing)}"

    with logged_waiting(waits):
        return _unused_name(store, rank, size, timeout, arrivals, missing)


def _unused_name(
    store: Store, rank: int, size: int, timeout: float, arrivals: JobArrivals, missing: list[int]
) -> str:
    name = mine = secrets.token_hex(8)
    if rank == 0:
        part = PrefixStore(mine, store)
        part.set("here/0", json.dumps([arrivals.own, arrivals.presence.listen(name, store, size)]))
        try:
            _answer(store, mine, missing, timeout, arrivals)
        except PeerLost as error:
            part.set("here", loss_as_text(error))
            raise
        part.set("here", json.dumps({"missing": missing, "processes": arrivals.processes}))
    else:
        watched = JobStore(store, timeout=timeout + SLACK, lost=arrivals.error)
        try:
            watched.set(f"asks/{rank}", mine)
            name = watched.get(f"answer/{mine}").decode()
            own = JobStore(PrefixStore(name, store), timeout=timeout + SLACK, lost=arrivals.error)
            process, listening = json.loads(own.get("here/0"))
            arrivals.processes[0] = Process(*process)
            if listening is not None and not is_visible(arrivals.own, arrivals.processes[0]):
                arrivals.presence.connect(listening, name, rank, store)
            own.set(f"here/{rank}", json.dumps(arrivals.own))
            result = json.loads(own.get("here"))
        except RuntimeError as error:
            if isinstance(error, PeerLost):
                raise
            raise LaunchError(f"rank 0 did not answer within {timeout:g} s: {error}") from error
        raise_loss(result)
        missing = result["missing"]
        arrivals.processes |= {int(peer): Process(*each) for peer, each in result["processes"].items()}
    if missing:
        raise LaunchError(f"ranks {missing} did not call init within {timeout:g} s")
    return name


def _answer(store: Store, name: str, missing: list[int], timeout: float, arrivals: JobArrivals) -> None:
    """Send the part's `name`, on rank 0, to ranks that request it; the others stay in `missing`.

    Raises `PeerLost` if a rank is seen to have died, unless a supervisor restarts it.
    """
    answered: dict[int, bytes] = {}
    deadline, nap, looks = Deadline(timeout), 0.0005, Deadline(_LOOKS_AFTER)
    while True:
        for peer in tuple(missing):
            # The first request may come from a process that has exited; another one follows.
            if store.check([f"asks/{peer}"]) and answered.get(peer) != (asked := store.get(f"asks/{peer}")):
                store.set(f"answer/{asked.decode()}", name)
                answered[peer] = asked
        for peer in [peer for peer in missing if store.check([f"{name}/here/{peer}"])]:
            arrivals.processes[peer] = Process(*json.loads(store.get(f"{name}/here/{peer}")))
            missing.remove(peer)
        if not missing or deadline.passed():
            return
        if looks.passed():
            looks = Deadline(_LOOKS_AFTER)
            for peer in arrivals.forget_restarted():  # they had arrived
                store.delete_key(f"{name}/here/{peer}")
                missing.append(peer)
            if (lost := arrivals.error()) is not None:
                raise lost
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)
