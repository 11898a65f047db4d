"""Rates of the links between the hosts of a job, measured by messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from time import perf_counter
from typing import Any, Final

import torch

from mcr_plus.bucketing.topology import Topology
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.environment import cores
from mcr_plus.errors import InvalidArgument
from mcr_plus.job.init import world

_LONG: Final = 0.05  # seconds of a message that shows a rate
_MOST: Final = 16 << 20


def measure_links() -> Topology:
    """Measure the links between the hosts of this job, one pair at a time; return its topology. Collective.

    A pair shows the slower of its two links, so a host's rate is the largest of its pairs.

    Raises:
        InvalidArgument: hosts have different numbers of ranks, or ranks of a host do not follow each other.
    """
    comm = world()
    hosts = list(dict.fromkeys(comm.hosts))
    per_node = comm.size // len(hosts)
    if list(comm.hosts) != [host for host in hosts for _ in range(per_node)]:
        raise InvalidArgument(f"hosts of ranks: {comm.hosts}; expected as many consecutive ranks on each")
    rates = [0.0] * len(hosts)
    delays = [0.0]
    for one, other in combinations(range(len(hosts)), 2):
        rate, delay = _measured(comm, (one * per_node, other * per_node))
        rates[one], rates[other] = max(rates[one], rate), max(rates[other], rate)
        delays.append(delay)
    links: dict[str, Any] = {}
    if per_node > 1:
        links["inside"] = _link(*_measured(comm, (0, 1)))
    if len(hosts) > 1:
        own = [_link(rate, 0.0)["rate"] for rate in rates]
        links["nic"] = {**_link(max(rates), max(delays)), "rates": own}
    return Topology.of(
        {"nodes": len(hosts), "ranks_per_node": per_node, "cores": min(cores(), per_node), "links": links}
    )


def _link(rate: float, delay: float) -> dict[str, str]:
    return {"rate": f"{8 * rate:.0f}bit/s", "latency": f"{1e6 * delay:.3f}us"}


def _measured(comm: Communicator, pair: Sequence[int]) -> tuple[float, float]:
    """Return bytes per second and seconds of latency between two ranks, the same on all ranks."""
    comm.barrier()
    found = (0.0, 0.0)
    if comm.rank in pair:
        first = comm.rank == pair[0]
        peer = pair[first]
        short = min(_turn(comm, peer, 8, first=first) for _ in range(5))

        def beyond(nbytes: int) -> float:
            """Return the least seconds beyond the latency: a turn may be stalled."""
            return min(_turn(comm, peer, nbytes, first=first) for _ in range(3)) - short

        nbytes, seconds = 1 << 16, 0.0
        while seconds < _LONG and nbytes < _MOST:
            nbytes *= 2
            agreed = torch.tensor(beyond(nbytes), device="cpu")
            (comm.send if first else comm.recv)(agreed, peer, compress=False)
            seconds = agreed.item()
        # A difference, because a link may take a first burst at once; it is at least the half.
        twice = beyond(2 * nbytes)
        found = nbytes / max(twice - seconds, twice / 2, 1e-9), short / 2
    told: tuple[float, float] = comm.broadcast_object(found, pair[0])
    return told


def _turn(comm: Communicator, peer: int, nbytes: int, *, first: bool) -> float:
    """Send so many bytes to the peer and get an answer; return the seconds, on the first of the two."""
    data, answer = (torch.zeros(size, dtype=torch.uint8, device="cpu") for size in (nbytes, 8))
    begin = perf_counter()
    if first:
        comm.send(data, peer)
        comm.recv(answer, peer)
    else:
        comm.recv(data, peer)
        comm.send(answer, peer)
    return perf_counter() - begin
