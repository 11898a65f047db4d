"""Heartbeats between the hosts of a job, as its ranks see them: start of the agents, and findings."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mcr_plus.core.addresses import family_of
from mcr_plus.core.environment import package_version
from mcr_plus.core.mapped_memory import made, mapped
from mcr_plus.errors import LaunchError
from mcr_plus.hosts.dump_request import address_of, opened
from mcr_plus.membership.rules import Process
from mcr_plus.rendezvous.store import exchange

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store
    from mcr_plus.hosts.findings import Findings

_log = logging.getLogger("mcr_plus")


def open_findings(
    store: Store,
    rank: int,
    processes: Sequence[Process],
    secret: bytes,
    limit: float,
    timeout: float,
) -> Findings | None:
    """Start the agents of a job and return the findings of this host's agent; collective over its ranks.

    None in a job in one place, and if this host has no agent, which is logged. `limit`: seconds without a
    beat after which a host is silent; 0 for the shortest time that the number of hosts allows.
    """
    hosts = hosts_of(processes)
    if len(hosts) < 2:
        return None
    from mcr_plus.hosts.findings import Findings  # imported here, as below: most jobs have one host

    size = Findings.size(len(processes))
    me = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    starts = rank == hosts[me][0]
    memory, descriptor, place = made(size, "mcr_plus findings") if starts else (None, None, "")
    link, address = _link() if starts else (None, None)
    try:
        mine = json.dumps([place, address, secrets.token_hex(16)])
        answers = [
            json.loads(text) for text in exchange(store, rank, len(processes), "heartbeats", mine, timeout)
        ]
        if not starts:
            memory = mapped(answers[hosts[me][0]][0], size)
        # All ranks must have mapped the memory before its descriptor is closed.
        exchange(store, rank, len(processes), "heartbeats/mapped", "", timeout)
        if memory is None:
            return None
        # The token, so that no datagram of another job with the same secret counts.
        key = hmac.digest(secret, answers[0][2].encode(), hashlib.sha256)
        requests = address_of(hmac.digest(key, f"requests {me}".encode(), hashlib.sha256).hex()[:32])
        if starts and link is not None and descriptor is not None:
            order = {
                "key": key.hex(),
                "hosts": hosts,
                "addresses": [answers[ranks[0]][1] for ranks in hosts],
                "me": me,
                "processes": {peer: processes[peer][:2] for peer in hosts[me]},
                "limit": limit,
                "job": job_id(processes),
                "version": package_version(),
                "memory": descriptor,
                "socket": link.fileno(),
            }
            with contextlib.ExitStack() as stack:
                # Without this socket, only dumps of other hosts' ranks are missing.
                taker: int | None = None
                try:
                    taker = stack.enter_context(opened(requests)).fileno()
                except OSError as error:
                    _log.warning("ranks of other hosts are not asked for dumps: %s", error)
                _start(order | {"requests": taker})
        others = [answers[ranks[0]][1] for number, ranks in enumerate(hosts) if number != me]
        addresses = [each[0] for each in others if each is not None]
        return Findings(memory, len(processes), addresses, requests)
    finally:
        if link is not None:
            link.close()
        if descriptor is not None:
            os.close(descriptor)


def job_id(processes: Sequence[Process]) -> str:
    """Return a name of the job of these processes, for people and for status pages."""
    return hashlib.sha256(json.dumps(processes).encode()).hexdigest()[:8]


def hosts_of(processes: Sequence[Process]) -> list[list[int]]:
    """Return the ranks of each place, in the order of their first ranks."""
    found: dict[str, list[int]] = {}
    for rank, process in enumerate(processes):
        found.setdefault(process.place, []).append(rank)
    return list(found.values())


def _link() -> tuple[socket.socket | None, tuple[str, int] | None]:
    """Return an agent's socket and address; None if this host has no address that others reach."""
    from mcr_plus.rendezvous.network import meeting_address

    link = None
    try:
        address = meeting_address()
        link = socket.socket(family_of(address), socket.SOCK_DGRAM)
        link.bind((address, 0))
    except (OSError, LaunchError) as error:
        if link is not None:
            link.close()
        _log.warning("no heartbeats with other hosts, so their failures show late: %s", error)
        return None, None
    return link, link.getsockname()[:2]


def _start(order: dict[str, Any]) -> None:
    """Start the agent of this host."""
    from mcr_plus.rendezvous.side_processes import start_once

    descriptors = [order[name] for name in ("memory", "socket", "requests") if order[name] is not None]
    try:
        problem = start_once("mcr_plus.hosts.agent", order, descriptors)
    except OSError as error:
        problem = str(error)
    if problem:
        _log.warning("no heartbeats with other hosts, so their failures show late: %s", problem)
