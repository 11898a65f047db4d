"""The job's key-value store: how ranks find each other, whatever started them."""

from __future__ import annotations

import json
import socket
from collections import Counter
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistError

from mcr_plus.c10d import PrefixStore, Store, TCPStore
from mcr_plus.environment import LOOPBACK, LaunchEnvironment
from mcr_plus.errors import BackendUnavailable, LaunchError
from mcr_plus.launch.network import host_address

_SLACK: Final = 10.0  # seconds that rank 0's verdict may take to arrive
_meetings: Counter[tuple[str, int, int]] = Counter()  # of torch's groups, by address and size
_stores: dict[tuple[str, int], Store] = {}  # those of this process that listen or are connected


def open_store(environment: LaunchEnvironment, attempt: int, timeout: float) -> Store:
    """Connect to the job's store, creating it on rank 0 if the launcher has none; collective.

    A store of our own listens on loopback when all ranks share the host. `attempt` counts the calls of
    `init` in this process, so that keys of an earlier one are never seen.

    Raises:
        LaunchError: the ranks cannot find each other, or have not done so within `timeout` seconds.
    """
    limit = timedelta(seconds=timeout)
    try:
        if environment.launcher in ("openmpi", "mpich") and environment.master_addr is None:
            store = _through_mpi(environment, limit)
        else:
            store = _through_address(environment, limit)
    except (DistError, OSError, ValueError, RuntimeError) as error:
        raise LaunchError(f"rank {environment.rank} found no store within {timeout:g} s: {error}") from error
    return PrefixStore(f"mcr_plus/{attempt}", store)


def exchange(store: Store, rank: int, size: int, what: str, value: str, timeout: float) -> list[str]:
    """Every rank's `value`, by rank; collective. `what` names the exchange and must be new.

    Rank 0 collects and publishes, so that the store sees a few requests per rank and not one per pair.
    Raises `LaunchError` naming the ranks that have not come within `timeout` seconds.
    """
    store.set(f"{what}/{rank}", value)
    if rank == 0:
        keys = [f"{what}/{peer}" for peer in range(size)]
        try:
            store.wait(keys, timedelta(seconds=timeout))
            values = [store.get(key).decode() for key in keys]
            store.set(f"{what}/all", json.dumps({"values": values}))
        except RuntimeError:
            missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
            store.set(f"{what}/all", json.dumps({"missing": missing}))
    try:
        store.wait([f"{what}/all"], timedelta(seconds=timeout + _SLACK))
        result = json.loads(store.get(f"{what}/all"))
    except RuntimeError as error:
        raise LaunchError(f"rank 0 did not answer within {timeout:g} s ({what}): {error}") from error
    if "missing" in result:
        raise LaunchError(f"ranks {result['missing']} did not call init within {timeout:g} s")
    values = result["values"]
    assert isinstance(values, list)
    return values


def open_torch_store(environment: LaunchEnvironment, limit: timedelta) -> Store:
    """Connect to the store of `env://`, which rank 0 creates, and which listens on loopback; collective.

    It stays for the life of rank 0's process. Keys are new at each call, as a program may destroy its process
    group and create it again.

    Raises `LaunchError` if the port is taken, and torch's own errors if rank 0 does not come.
    """
    address, port, size = environment.master_addr, environment.master_port, environment.world_size
    assert address is not None
    assert port is not None
    try:
        store = _through_address(environment, limit)
    except OSError as error:
        raise LaunchError(f"env://: rank 0 cannot listen on {address}:{port}: {error}") from error
    _meetings[address, port, size] += 1
    return PrefixStore(f"torch/{size}/{_meetings[address, port, size]}", store)


def _through_address(environment: LaunchEnvironment, limit: timedelta) -> Store:
    address, port = environment.master_addr, environment.master_port
    if address is None or port is None:
        raise LaunchError(
            f"the job was started by {environment.launcher} with {environment.world_size} ranks, but "
            "MASTER_ADDR and MASTER_PORT are not set; set them, or start it with mcr-plus run, torchrun or "
            "mpirun"
        )
    known = _stores.get((address, port))
    if known is not None:  # init after finalize: the address is taken, by ourselves
        return known
    is_server = environment.rank == 0 and not environment.agent_store
    options: dict[str, Any] = {}
    if is_server and address in (LOOPBACK, "localhost"):
        listener = _listen(LOOPBACK, port)
        options = {"master_listen_fd": listener.detach()}
    # multi_tenant: the user's own init_process_group may use the same port in this process.
    store = _stores[address, port] = TCPStore(
        address,
        port,
        environment.world_size,
        is_server,
        limit,
        wait_for_workers=False,
        multi_tenant=True,
        **options,
    )
    return store


def _listen(address: str, port: int) -> socket.socket:
    """A listening socket bound to one address: TCPStore by itself binds all interfaces."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(1024)
    return listener


def _through_mpi(environment: LaunchEnvironment, limit: timedelta) -> Store:
    """Started by mpirun without an address: MPI carries the address of a store on rank 0."""
    from mcr_plus.backends.mpi import load_mpi

    try:
        mpi = load_mpi()
    except BackendUnavailable as error:
        raise LaunchError(
            f"started by {environment.launcher}, but {error}; or set MASTER_ADDR and MASTER_PORT"
        ) from error
    comm = mpi.COMM_WORLD
    if comm.size != environment.world_size:
        raise LaunchError(
            f"the launcher says {environment.world_size} ranks, MPI says {comm.size}: "
            "mpirun and the MPI library that mpi4py loads do not belong together"
        )
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    address = LOOPBACK if node.size == comm.size else ""
    node.Free()
    place = bytearray(64)
    listener = None
    if comm.rank == 0:
        listener = _listen(address or host_address(), 0)
        host, port = listener.getsockname()
        place[:] = f"{host}:{port}".encode().ljust(64)
    comm.Bcast([place, mpi.BYTE], root=0)
    host, _, number = place.decode().strip().partition(":")
    options: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    return TCPStore(host, int(number), comm.size, comm.rank == 0, limit, wait_for_workers=False, **options)
