"""gloo, through torch's ProcessGroupGloo on the job's own store.

The program's default process group is neither needed nor touched. gloo runs operations on its own threads;
waiting ranks yield at once, because gloo's threads need the cores.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from mcr_plus.backends.base import NATIVE, Availability, Backend, Channel, Preference, Support
from mcr_plus.backends.gloo.channel import GlooChannel, stuck
from mcr_plus.core import c10d
from mcr_plus.core.buffers import Pool
from mcr_plus.core.environment import gloo_connects_late
from mcr_plus.core.group import Group
from mcr_plus.core.message import Signature
from mcr_plus.core.sockets import (
    accepted_in_silence,
    listener_among,
    of_peers,
    open_sockets,
    shut_down,
    take_connections,
)
from mcr_plus.core.threads import threads
from mcr_plus.errors import Unsupported
from mcr_plus.rendezvous.world import World

_SLACK: Final = timedelta(seconds=30)  # gloo's own timeout must not expire before ours
_FIRST_BYTES: Final = 8  # sent by a peer as soon as it has connected

_EMULATIONS: Final = {
    "reduce_scatter": "all_to_all, then each rank reduces its part",
    "reduce_scatter_v": "all_to_all_v, then each rank reduces its part",
    "all_gather_v": "all_to_all_v of the same tensor to all ranks",
    "gather_v": "all_to_all_v with nothing for ranks other than the root",
    "scatter_v": "all_to_all_v with nothing from ranks other than the root",
}


def _available() -> bool:
    return dist.is_available() and dist.is_gloo_available()


class GlooBackend(Backend):
    """One device (loopback on a single host) shared by all groups of the job."""

    name = "gloo"
    on_stream = False
    has_algorithms = False
    spins = 1
    preference = Preference(cpu=3, between_hosts=1, cuda=3)

    def __init__(self, world: World) -> None:
        self._world = world
        self._timeout = timedelta(seconds=world.timeout) + _SLACK
        self._channels: list[GlooChannel] = []
        self._connections: dict[int, str] = {}
        self._pool = Pool()
        self._address = "127.0.0.1"
        if not world.single_host:
            from mcr_plus.rendezvous.network import host_address

            self._address = host_address()
        before = open_sockets()
        self._device: Any = c10d.ProcessGroupGloo.create_device(hostname=self._address)
        self._listener = listener_among(open_sockets().items() - before.items())
        self._disconnected = False

    @classmethod
    def library_version(cls) -> str:
        """Version of torch, since gloo has no version of its own."""
        return f"gloo of torch {torch.__version__.partition('+')[0]}"

    @classmethod
    def availability(cls) -> Availability:
        """Report gloo as available on Linux and macOS, where torch includes it."""
        if _available():
            return Availability(True, f"torch {torch.__version__}")
        return Availability(
            False,
            reason="this build of torch has no gloo",
            remedy="install a build of torch with torch.distributed (any Linux wheel)",
        )

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        """Support all operations; missing ones are built from all_to_all or all_gather."""
        if signature.algorithm is not None:
            return Support("no", f"algorithm '{signature.algorithm}'; gloo has none to choose from")
        if signature.device != "cpu":
            return Support("emulated", "staged through host memory")
        kind = signature.kind
        if kind in ("all_reduce", "reduce"):
            from mcr_plus.backends.gloo.keys import compares_keys
            from mcr_plus.backends.gloo.operations import gloo_reduces

            if compares_keys(signature):
                own = "exchange, then each rank compares"
                keys = f"{signature.reduce_op} of integers in the order of the values"
                return Support("emulated", own if kind == "all_reduce" and signature.ranks == 2 else keys)
            if gloo_reduces(signature):
                native = signature.reduce_op != "AVG"
                return NATIVE if native else Support("emulated", "SUM, then divided by the number of ranks")
            return Support("emulated", "all_gather, then each rank reduces in rank order")
        how = _EMULATIONS.get(kind)
        return Support("emulated", how) if how else NATIVE

    @classmethod
    def keeps_those_apart(cls, signature: Signature, hosts: int) -> bool:
        """See `Backend`. Exchanges between two ranks are messages, which have tags."""
        from mcr_plus.backends.gloo.swap import swaps

        return swaps(signature, hosts)

    @classmethod
    def descriptors(cls, size: int) -> int:
        """See `Backend`. A group has a connection to each peer."""
        return size - 1

    def open(self, group: Group) -> Channel:
        """See `Backend.open`."""
        if self._world.store is None:
            raise Unsupported("backend gloo needs the store of a running job")
        store = c10d.PrefixStore(f"gloo/{group.name}", self._world.store_of(group))
        before, others = open_sockets(), threads()
        token = object()
        with _lock:
            _opening.append(token)
            take_connections(self._listener, accepts=True)
        try:
            process_group = c10d.gloo_group(
                store, group.rank, group.size, devices=[self._device], threads=2, timeout=self._timeout
            )
        finally:
            # The connections may include some that another thread of the program has opened meanwhile.
            connections = of_peers(open_sockets().items() - before.items(), self._address)
            self._connections.update(connections)
            with _lock:
                _opening.remove(token)
        connections = self._without_strangers(connections)
        workers = threads() - others  # a lower bound: also counts threads that the program began meanwhile
        hosts = self._world.hosts_of(group)
        channel = GlooChannel(
            process_group, group, self._timeout, self._channels, connections, workers, self._pool, hosts
        )
        self._channels.append(channel)
        return channel

    def _without_strangers(self, connections: dict[int, str]) -> dict[int, str]:
        """End connections of strangers, and accept none until the next group is opened.

        gloo keeps every connection to its port until the end of the job. Once a group is open, all of its
        peers are connected. Peers of the next group connect after this rank has published its address for
        that group.
        """
        silent = accepted_in_silence(connections, self._listener, _FIRST_BYTES)
        shut_down(silent)
        with _lock:
            if not _opening and sys.platform == "linux" and not gloo_connects_late():
                take_connections(self._listener, accepts=False)
        return {descriptor: name for descriptor, name in connections.items() if descriptor not in silent}

    def progress(self) -> None:
        """No-op: gloo has threads of its own."""

    def disconnect(self) -> None:
        """See `Backend.disconnect`."""
        for channel in self._channels:
            channel.stop_operations()
        shut_down(self._connections)
        self._disconnected = True

    def close(self, clean: bool) -> None:
        """See `Backend.close`.

        Destroying a group joins its threads, for which a stuck operation would block until gloo's own
        timeout. So a group with a stuck operation is not destroyed here. After `disconnect` stuck operations
        fail, usually at once; a group with an operation that has not failed is destroyed when a later job of
        this process closes, if at all.
        """
        if not clean and self._disconnected:
            for channel in self._channels:
                channel.keep()
            stuck.extend(self._channels)
        elif not clean:
            self.abandon()
        for channel in [channel for channel in stuck if channel.is_idle]:
            stuck.remove(channel)
            channel.let_go()
        self._channels.clear()
        self._pool.clear()
        self._device = None  # the device's thread and files go with the last group
        del self._world  # the exit handler keeps this object, but must not keep the closed world

    def abandon(self) -> None:
        """Never destroy the groups, for example in a forked child, which does not have their threads."""
        for channel in self._channels:
            channel.keep()
        _never.extend(self._channels)

    def before_exit(self) -> None:
        """Prevent an abort or a hang at the end of the process.

        A thread that still waits for a peer wakes up when the peer closes its connection. If the interpreter
        ends at that moment, the thread is killed inside C++ code, and std::terminate aborts the process
        (pytorch #190489). With another terminate handler, the thread sleeps until the process ends. Also,
        gloo's own threads continue while C++ libraries destroy their globals, which sometimes corrupts the
        heap and makes the process spin forever. So the process ends at once after the interpreter.
        """
        if stuck or _never or _opening:
            try:
                cxx, libc = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
                cxx._ZSt13set_terminatePFvvE(ctypes.cast(libc.pause, ctypes.c_void_p))
                libc.fflush(None)
                libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # called as _exit(status)
            except (OSError, AttributeError):
                pass  # C library without these functions: an abort is possible


_never: list[GlooChannel] = []
_lock = threading.Lock()  # guards `_opening`, and the flag that peers may connect
_opening: list[object] = []  # threads that may be inside gloo when the process ends
