"""Two "hosts" on one machine: network namespaces joined by a link of a given rate.

    with TwoHosts("1gbit") as hosts:
        done = hosts.mpirun([sys.executable, "program.py"], stdout=subprocess.PIPE)

Each host has nothing but the link between them, and half of the cores. Needs root, iproute2 and Open MPI:
`why_not()` returns what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from hosts import Hosts, inside, ip, need_hosts, shape, why_not

__all__ = ["TwoHosts", "need_two_hosts", "why_not"]

ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
NETWORK: Final = "10.77.0.0/24"
IPV6_ADDRESSES: Final = ("fd00:77::1", "fd00:77::2")
IPV6_NETWORK: Final = "fd00:77::/64"


def need_two_hosts() -> None:
    """Ends the program where this machine cannot have two hosts."""
    need_hosts()


class TwoHosts(Hosts):
    """Two network namespaces with a link between them; `rate` as `tc` writes it, None for no limit.

    `families`: 4, 6 or both, of which `addresses` are the first.
    """

    def __init__(self, rate: str | None, families: Sequence[int] = (4,)) -> None:
        self.rate, self.families = rate, tuple(families)
        names = [f"mcr-{letter}-{os.getpid()}" for letter in "ab"]
        links = [f"mcr{letter}{os.getpid()}" for letter in "ab"]
        first = (ADDRESSES, NETWORK) if self.families[0] == 4 else (IPV6_ADDRESSES, IPV6_NETWORK)
        super().__init__(names, links, *first)

    def connect(self) -> None:
        """Make the pair of interfaces."""
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, *both in zip(self.names, self.links, ADDRESSES, IPV6_ADDRESSES, strict=True):
            ip("link", "set", link, "netns", name)
            for family, address, bits, *options in ((4, both[0], 24), (6, both[1], 64, "nodad")):
                if family in self.families:
                    inside(name, "ip", "address", "add", f"{address}/{bits}", "dev", link, *options)
            inside(name, "ip", "link", "set", link, "up")
            shape(name, link, self.rate, "256kb")
