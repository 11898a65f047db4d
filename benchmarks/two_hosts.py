"""Two "hosts" on one machine: network namespaces joined by a link of a given rate.

    with TwoHosts("1gbit") as hosts:
        done = hosts.mpirun([sys.executable, "program.py"], stdout=subprocess.PIPE)

Each host has nothing but the link between them, and half of the cores. Needs root, iproute2 and Open MPI:
`why_not()` returns what is missing.
"""

from __future__ import annotations

import os
from typing import Final

from hosts import Hosts, inside, ip, need_hosts, shape, why_not

__all__ = ["TwoHosts", "need_two_hosts", "why_not"]

ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
NETWORK: Final = "10.77.0.0/24"


def need_two_hosts() -> None:
    """Ends the program where this machine cannot have two hosts."""
    need_hosts()


class TwoHosts(Hosts):
    """Two network namespaces with a link between them; `rate` as `tc` writes it, None for no limit."""

    def __init__(self, rate: str | None) -> None:
        self.rate = rate
        names = [f"mcr-{letter}-{os.getpid()}" for letter in "ab"]
        links = [f"mcr{letter}{os.getpid()}" for letter in "ab"]
        super().__init__(names, links, ADDRESSES, NETWORK)

    def connect(self) -> None:
        """Make the pair of interfaces."""
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("link", "set", link, "netns", name)
            inside(name, "ip", "address", "add", f"{address}/24", "dev", link)
            inside(name, "ip", "link", "set", link, "up")
            shape(name, link, self.rate, "256kb")
