"""A new world of processes that a program names by their handles, old ranks and new ones.

The meaning is that of c10d's `reconfigure` (torch 2.14): the order of the handles is that of the ranks, and
an attempt that fails before all have come leaves each process in the world that it has.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from torch.distributed import DistError

from mcr_plus.core.c10d import PrefixStore, Store, TCPStore
from mcr_plus.core.environment import host_name, job_secret, launch_environment
from mcr_plus.errors import (
    BackendError,
    CommTimeout,
    InvalidArgument,
    LaunchError,
    McrError,
    PeerLost,
    phrase_ranks,
    short,
)
from mcr_plus.membership.roster import Roster
from mcr_plus.membership.rules import Decision, Process
from mcr_plus.rendezvous.processes import own_process
from mcr_plus.rendezvous.signing import SignedStore
from mcr_plus.rendezvous.store import own_server
from mcr_plus.rendezvous.store_release import server_of
from mcr_plus.rendezvous.watched_store import WatchedStore
from mcr_plus.runtime import init
from mcr_plus.runtime.regroup import Watch, begin_epoch, close_world
from mcr_plus.runtime.runtime import Runtime

_FORM: Final = "mcr1:"
_GO: Final = "go"


@dataclass(frozen=True)
class Handle:
    """What a handle says: the process, what is new with each of its worlds, and a store that it reaches."""

    process: Process
    token: str
    address: tuple[str, int]

    def text(self) -> str:
        """The handle as programs pass it on."""
        plain = json.dumps([self.process, self.token, self.address])
        return _FORM + base64.urlsafe_b64encode(plain.encode()).decode()

    @classmethod
    def read(cls, text: object, place: str) -> Handle:
        """The opposite; raises `InvalidArgument` for anything else."""
        try:
            assert isinstance(text, str)
            assert text.startswith(_FORM)
            plain = json.loads(base64.urlsafe_b64decode(text.removeprefix(_FORM)))
            process, token, (host, port) = plain
            return cls(Process(*process), token, (host, port))
        except (AssertionError, ValueError, TypeError, binascii.Error):
            raise InvalidArgument(
                f"{place}: expected what mcr.reconfigure_handle() returned in some process, got {short(text)}"
            ) from None


def handle() -> str:
    """The handle of this process in the world that it has."""
    runtime = init.current()
    return _own(runtime).text()


def _own(runtime: Runtime) -> Handle:
    token = runtime.attached.setdefault("handle", secrets.token_hex(8))
    return Handle(own_process(host_name(), 0), token, _address(runtime))


def _address(runtime: Runtime) -> tuple[str, int]:
    """The store in which this process can be met: that of its job, of its launcher, or one of its own."""
    if runtime.roster is not None:
        return server_of(runtime.roster.root)
    environment = launch_environment()
    if environment.agent_store and environment.master_addr and environment.master_port:
        return environment.master_addr, environment.master_port
    return own_server(runtime.world.timeout)


def reconfigure(uuid: str, texts: Sequence[str], timeout: float) -> Runtime:
    """See `mcr.reconfigure`."""
    runtime = init.current()
    if not isinstance(uuid, str) or not uuid:
        raise InvalidArgument(f"uuid: expected a text that is new for each attempt, got {uuid!r}")
    handles = [Handle.read(text, f"handles[{index}]") for index, text in enumerate(texts)]
    mine = own_process(host_name(), 0)
    places = [index for index, each in enumerate(handles) if each.process == mine]
    if len({each.process for each in handles}) < len(handles):
        raise InvalidArgument("handles: a process is in them twice")
    if not places:
        raise InvalidArgument("handles: that of this process is not in them")
    rank = places[0]
    stale = handles[rank] != _own(runtime)
    members = tuple(each.process._replace(number=number) for number, each in enumerate(handles))
    store = _meet(handles[0].address, uuid, timeout)
    roster = Roster(store, 0, members, rank)
    watch = Watch(roster, runtime.loaded)
    problem = f"handles[{rank}] is stale: its process has another world now" if stale else ""
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    _gather(store, rank, [problem, digest], watch, timeout)
    close_world(runtime, f"the program has made another one of {len(handles)} processes", Decision())
    return begin_epoch(runtime, watch)


def _meet(address: tuple[str, int], uuid: str, timeout: float) -> Store:
    """The part of the store at `address` for one attempt."""
    host, port = address
    try:
        server = TCPStore(
            host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise LaunchError(f"reconfigure: no store at {host}:{port}, where all meet: {error}") from error
    name = f"reconfigure/{uuid}"
    part, secret = PrefixStore(name, server), job_secret()
    return SignedStore(part, secret, name) if secret else part


def _gather(store: Store, rank: int, mine: list[str], watch: Watch, timeout: float) -> None:
    """Wait until all processes have come; raises on all that have if one does not, or cannot.

    `mine`: why this process cannot, empty if it can; and a digest of the handles that it has been given.
    """
    keys = [f"come/{each}" for each in range(len(watch.roster.members))]
    if store.check([keys[rank]]):
        raise InvalidArgument("uuid: it was used before; each attempt needs a new one")
    store.set(keys[rank], json.dumps(mine))
    verdict = "decision"
    try:
        WatchedStore(store, timeout, watch.error).wait(keys, timedelta(seconds=timeout))
        problems, digests = zip(*(json.loads(store.get(key)) for key in keys), strict=True)
        found = [_GO, ""]
        if len(set(digests)) > 1:
            found = ["argument", "handles: processes have passed different ones"]
        if any(problems):
            found = ["argument", next(filter(None, problems))]
    except PeerLost as error:
        found = ["lost", str(error)]
    except DistError:
        absent = [each for each, key in enumerate(keys) if not store.check([key])]
        found = ["absent", f"handles of {phrase_ranks(absent)} have not come within {timeout:g} s"]
    store.compare_set(verdict, "", json.dumps(found))
    kind, text = json.loads(store.get(verdict))
    errors: dict[str, type[McrError]]
    errors = {"argument": InvalidArgument, "absent": CommTimeout, "lost": BackendError}
    if kind != _GO:
        raise errors[kind](f"reconfigure: {text}")
