"""Ports for programs that must be given a number before they listen."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Ports next to each other on which nothing listens, below those that the kernel hands out by itself.

    A port that is free now stays so: a rank that asks the kernel for any port, as all do, gets another one.
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
