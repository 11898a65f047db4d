"""The rendezvous store of a job on one host, in the process that starts the ranks.

The store listens on 127.0.0.1 only. Without a listening socket, TCPStore would bind every interface, whatever
host it is given.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from mcr_plus.core.c10d import TCPStore, on_socket
from mcr_plus.core.environment import LOOPBACK

_STORE_TIMEOUT = timedelta(minutes=5)


def loopback_store(timeout: timedelta = _STORE_TIMEOUT) -> TCPStore:
    """Return a TCPStore server whose socket is bound to loopback, on a free port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        None,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        **on_socket(listener),
    )
