"""A new world of processes, old ranks and new ones, that a program names by their handles.

The semantics are those of c10d's `reconfigure` (torch 2.14): ranks have the order of the handles, and if an
attempt fails before all processes have arrived, each of them stays in its world.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

import torch

from mcr_plus.config.reader import fingerprint
from mcr_plus.core.addresses import place_text
from mcr_plus.core.c10d import PrefixStore, Store
from mcr_plus.core.deadline import Deadline, until
from mcr_plus.core.environment import (
    agent_has_store,
    host_name,
    job_secret,
    launch_environment,
    package_version,
)
from mcr_plus.core.job_store import JobStore
from mcr_plus.engine.closing import release_waiting
from mcr_plus.errors import (
    BackendError,
    CommTimeout,
    ConfigError,
    InvalidArgument,
    LaunchError,
    McrError,
    PeerLost,
    phrase_ranks,
    short,
)
from mcr_plus.job import init
from mcr_plus.job.epoch_change import (
    begin_epoch,
    close_world,
    remove_arrivals,
    remove_world,
)
from mcr_plus.job.members import EpochWatch
from mcr_plus.job.process import job
from mcr_plus.job.runtime import Runtime
from mcr_plus.membership.epoch_log import EpochLog
from mcr_plus.membership.rules import Decision, Process
from mcr_plus.rendezvous.identity import own_process
from mcr_plus.rendezvous.secret_offer import SecretOffer, read_offer
from mcr_plus.rendezvous.store_connections import opened, own_server

_log = logging.getLogger("mcr_plus")
_FORM: Final = "mcr1:"
_GO: Final = "go"
_ERRORS: Final[Mapping[str, type[McrError]]] = {
    "argument": InvalidArgument,
    "absent": CommTimeout,
    "lost": BackendError,
    "differs": ConfigError,
}
_USED: Final = "uuid: already used; each attempt needs a new one"
_DIFFERENT: Final = "handles: processes have passed different ones with this uuid"
_FIRST_NAP: Final = 0.0005  # s between polls of the store
_NAP: Final = 0.02
_LOOKS_AFTER: Final = 0.1  # s between checks of the processes
_LOSS_SHOWS: Final = 0.3  # s after a library error within which the death that caused it shows


@dataclass(frozen=True)
class ProcessHandle:
    """Content of a handle: the process, a value new in each of its worlds, and a store that it reaches."""

    process: Process
    token: str
    address: tuple[str, int]

    def text(self) -> str:
        """Return the handle as text, for programs to pass on."""
        plain = json.dumps([self.process, self.token, self.address])
        return _FORM + base64.urlsafe_b64encode(plain.encode()).decode()

    @classmethod
    def read(cls, text: object, place: str) -> ProcessHandle:
        """Parse a handle's `text`; raise `InvalidArgument` for any other text."""
        try:
            assert isinstance(text, str)
            assert text.startswith(_FORM)
            plain = json.loads(base64.urlsafe_b64decode(text.removeprefix(_FORM)))
            process, token, (host, port) = plain
            return cls(Process(*process), token, (host, port))
        except (AssertionError, ValueError, TypeError, RecursionError, binascii.Error):
            raise InvalidArgument(
                f"{place}: expected what mcr.reconfigure_handle() returned in some process, got {short(text)}"
            ) from None


def latest() -> Runtime:
    """Return this process's runtime that another world may replace: the present one, or the last one if it
    ended with a change of members. Raises `NotInitialized` if there is none.
    """
    runtime = job.runtime
    return runtime if runtime is not None and runtime.superseded else init.current()


def handle(runtime: Runtime) -> str:
    """Return the handle of this process in its world `runtime`."""
    return _own(runtime).text()


def _own(runtime: Runtime) -> ProcessHandle:
    token = runtime.attached.setdefault("handle", secrets.token_hex(16))
    return ProcessHandle(own_process(host_name(), 0), token, _address(runtime))


def _address(runtime: Runtime) -> tuple[str, int]:
    """Return the address of a store for meeting this process: one that outlives all ranks, or its own."""
    if agent_has_store():
        environment = launch_environment()
        if environment.master_addr and environment.master_port:
            return environment.master_addr, environment.master_port
    return own_server(runtime.world.timeout, everywhere=not runtime.world.single_host)


def reconfigure(runtime: Runtime, uuid: str, texts: Sequence[str], timeout: float) -> Runtime:
    """See `mcr.reconfigure`. `runtime`: the runtime that the new world replaces."""
    if not isinstance(uuid, str) or not uuid:
        raise InvalidArgument(f"uuid: expected a text that is new for each attempt, got {uuid!r}")
    handles = [ProcessHandle.read(text, f"handles[{index}]") for index, text in enumerate(texts)]
    mine = own_process(host_name(), 0)
    places = [index for index, each in enumerate(handles) if each.process == mine]
    if len({each.process for each in handles}) < len(handles):
        raise InvalidArgument("handles: a process occurs twice")
    if not places:
        raise InvalidArgument("handles: the handle of this process is missing")
    rank = places[0]
    members = tuple(each.process._replace(number=number) for number, each in enumerate(handles))
    part, name = _meet(handles[0], uuid, timeout), f"reconfigure/{uuid}"
    secret = job_secret()
    store = JobStore(part, secret, name)
    # Without a secret in the environment, rank 0 offers one if all processes share its host.
    offer = SecretOffer() if rank == 0 and not secret and len({each.place for each in members}) == 1 else None
    stale = handles[rank].token != _own(runtime).token
    coming = _Coming(
        handles=hashlib.sha256("\n".join(texts).encode()).hexdigest(),
        problem=f"handles[{rank}] is stale: its process has another world now" if stale else "",
        passport=_passport(runtime),
        offer="" if offer is None else offer.place,
    )
    with contextlib.ExitStack() as ending:
        if offer is not None:
            ending.callback(offer.close)
        place = _gather(store, coming, EpochWatch(EpochLog(store, 0, members, rank), runtime.loaded), timeout)
        if place:
            store = _signed(part, place, name)
        elif rank == 0 and not secret:
            _log.warning("reconfigure: values in the job's store are not signed; set MCR_SECRET on all ranks")
        # All processes have arrived, so this one gives up its old world.
        lost = {} if runtime.closed else runtime.lost_ranks()
        if not runtime.closed:
            release_waiting(runtime.engine, {}, "reconfigure")
        remove_arrivals(runtime, Decision())
        if (sight := runtime.hand_over()) is not None:
            ending.callback(sight.close)
        close_world(runtime, f"the program has made another one of {len(handles)} processes", Decision())
        # Tell a supervisor that the job continues in another world, and whether it has newcomers.
        if runtime.roster is not None:
            old = {each[:3] for each in runtime.roster.members}
            runtime.roster.note_training(takes_in=any(each[:3] not in old for each in members))
        runtime.leave_keepers()
        roster = EpochLog(store, 0, members, rank)
        new = _begin(runtime, EpochWatch(roster, runtime.loaded, sight))
        if (before := runtime.roster) is not None:
            dead = [before.members[each] for each, state in lost.items() if state == "dead"]
            remove_world(before, runtime, roster, dead)
        return new


def _signed(part: Store, place: str, name: str) -> JobStore:
    """Return a part of a store whose values are signed by the secret at `place`."""
    try:
        return JobStore(part, read_offer(place), name)
    except LaunchError:
        part.set("epoch0/leaving", "")  # so that others do not wait for this process
        raise


def _begin(runtime: Runtime, watch: EpochWatch) -> Runtime:
    """Make the world; raises `PeerLost` if a process is lost meanwhile."""
    try:
        return begin_epoch(runtime, watch)
    except McrError as error:
        # A library may raise an error of its own before the death that caused it shows.
        loss = until(watch.error, Deadline(_LOSS_SHOWS), _NAP)
        with contextlib.suppress(RuntimeError):  # tells ranks that do not see the loss
            watch.roster.root.set(f"{watch.roster.place}/leaving", "")
        if loss is None or isinstance(error, PeerLost):
            raise
        raise loss from error


def _meet(first: ProcessHandle, uuid: str, timeout: float) -> Store:
    """Return the part, for one attempt, of the store that the first handle names."""
    host, port = first.address
    try:
        server = opened(host, port, timedelta(seconds=timeout))
    except RuntimeError as error:
        raise LaunchError(
            f"reconfigure: no store at {place_text(host, port)}, where all meet: {error}"
        ) from error
    return PrefixStore(f"reconfigure/{uuid}", server)


class _Coming(NamedTuple):
    """Values that a process brings to an attempt.

    Attributes:
        handles: digest of the handles.
        problem: why the process cannot take part; empty if it can.
        passport: properties that must be equal.
        offer: on rank 0, the place of the secret with which values are signed; empty for none.
    """

    handles: str
    problem: str
    passport: dict[str, str]
    offer: str


def _passport(runtime: Runtime) -> dict[str, str]:
    return {
        "mcr_plus": package_version(),
        "torch": torch.__version__,
        "the configuration's digest": fingerprint(runtime.config)[:16],
    }


def _gather(store: JobStore, mine: _Coming, watch: EpochWatch, timeout: float) -> str:
    """Wait until all processes have arrived; if one does not or cannot, raise on all that have.

    Returns rank 0's offer.
    """
    rank, verdict = watch.roster.rank, "decision"
    keys = [f"come/{each}" for each in range(len(watch.roster.members))]
    first = store.compare_set("handles", "", mine.handles)
    if first.decode() != mine.handles:
        store.compare_set(verdict, "", json.dumps(["argument", _DIFFERENT]))
        is_other = json.loads(store.get(verdict))[1] != _DIFFERENT
        raise InvalidArgument(f"reconfigure: {_USED if is_other else _DIFFERENT}")
    known = store.look(verdict)
    has_begun = known is not None and json.loads(known)[0] == _GO  # begun: all had arrived before
    if has_begun or store.check([keys[rank]]):
        raise InvalidArgument(f"reconfigure: {_USED}")
    store.set(keys[rank], json.dumps(mine))
    if not store.check([verdict]):
        store.compare_set(verdict, "", json.dumps(_verdict(store, keys, watch, timeout)))
    kind, text = json.loads(store.get(verdict))
    if kind != _GO:
        raise _ERRORS[kind](f"reconfigure: {text}")
    return _Coming(*json.loads(store.get(keys[0]))).offer


def _verdict(store: Store, keys: list[str], watch: EpochWatch, timeout: float) -> list[str]:
    """Return the outcome of an attempt, as this process sees it: a kind, and a text."""
    deadline, looks, nap = Deadline(timeout), Deadline(_LOOKS_AFTER), _FIRST_NAP
    while not store.check(keys):
        if store.check(["decision"]):
            decided: list[str] = json.loads(store.get("decision"))
            return decided
        if looks.passed():
            looks = Deadline(_LOOKS_AFTER)
            lost = {rank: state for rank, state in watch.states().items() if not store.check([keys[rank]])}
            if lost:
                return ["lost", f"{phrase_ranks(list(lost))} of those in handles: {_all(lost.values())}"]
        if deadline.passed():
            absent = [each for each, key in enumerate(keys) if not store.check([key])]
            return [
                "absent",
                f"{phrase_ranks(absent)} of those in handles: did not arrive within {timeout:g} s",
            ]
        time.sleep(nap)
        nap = min(1.5 * nap, _NAP)
    come = [_Coming(*json.loads(store.get(key))) for key in keys]
    for rank, each in enumerate(come):
        if each.problem:
            return ["argument", each.problem]
        for name, value in come[0].passport.items():
            if each.passport.get(name) != value:
                other = each.passport.get(name)
                return ["differs", f"{name} is {other!r} on rank {rank} and {value!r} on rank 0"]
    if lost := watch.states():
        return ["lost", f"{phrase_ranks(list(lost))} of those in handles: {_all(lost.values())}"]
    return [_GO, ""]


def _all(states: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(states))
