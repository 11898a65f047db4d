"""Free ports for programs that need a port number before they listen."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Return adjacent unused ports below those that the kernel assigns by itself.

    A free port stays free: a rank that asks the kernel for any port, as all ranks do, gets another one.
    """
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    while True:
        port = random.SystemRandom().randrange(10_000, int(first) - count)
        with ExitStack() as held:
            try:
                for number in range(port, port + count):
                    held.enter_context(socket.socket()).bind(("", number))
            except OSError:
                continue
            return list(range(port, port + count))
