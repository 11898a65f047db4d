"""The job's key-value store, through which ranks find each other under any launcher."""

from __future__ import annotations

import json
import logging
import secrets
from contextlib import suppress
from datetime import timedelta
from errno import EADDRINUSE
from functools import partial
from typing import TYPE_CHECKING, Final

from torch.distributed import DistError

from mcr_plus.core.addresses import is_loopback, place_of_text, place_text
from mcr_plus.core.c10d import PrefixStore, Store
from mcr_plus.core.environment import (
    LOOPBACK,
    LaunchEnvironment,
    job_secret,
    min_ranks,
    on_one_host,
    slurm_step,
)
from mcr_plus.core.job_store import JobStore, unsigned
from mcr_plus.errors import BackendUnavailable, LaunchError, PeerLost
from mcr_plus.rendezvous.arrivals import (
    NAME_OF_JOB,
    PREFIX,
    SLACK,
    STOPPED_FOR,
    JobArrivals,
    loss_as_text,
    raise_loss,
)
from mcr_plus.rendezvous.mpi_library import load_mpi
from mcr_plus.rendezvous.network import meeting_address
from mcr_plus.rendezvous.secret_offer import SecretOffer, read_offer
from mcr_plus.rendezvous.store_connections import (
    known_stores,
    listening,
    opened,
    prefer_family_of,
    server_of,
)
from mcr_plus.rendezvous.store_namespaces import unused_name, unused_part
from mcr_plus.rendezvous.wait_messages import logged_waiting, some_ranks

if TYPE_CHECKING:
    from mcr_plus.core.group import Group

_REASONS: Final = 3  # most reasons in a message
_LONGEST_REASON: Final = 300  # characters: any process may have written the reason
_HAS_ITS_OWN: Final = "MCR_SECRET is set there, and not on all ranks"
_log = logging.getLogger("mcr_plus")
_warned = False  # log the warning about unsigned values once per process
_by_mpi: list[tuple[Store, bytes]] = []  # the store whose address was sent through MPI, and its secret


def open_store(environment: LaunchEnvironment, timeout: float, stopped: float = STOPPED_FOR) -> JobStore:
    """Connect to the job's store, creating it on rank 0 if the launcher has none; collective.

    A store that rank 0 creates listens on loopback when all ranks share the host. Returns a part of it
    without keys, see `signed_part`. `stopped`: see `JobArrivals`.

    Raises:
        LaunchError: the ranks could not connect within `timeout` seconds.
        PeerLost: a rank is seen to have died.
    """
    store, secret = _connect(environment, timeout)
    rank, size = environment.rank, environment.world_size
    part, name = _signed_part(store, rank, size, timeout, JobArrivals(rank, size, store, stopped), secret)
    if rank == 0 and min_ranks() is not None:
        store.set(NAME_OF_JOB, name)
    return part


def job_announced(environment: LaunchEnvironment, timeout: float) -> bool:
    """Return whether ranks have begun a job with the launcher's store without this process."""
    store, _ = _connect(environment, timeout)
    return store.check([NAME_OF_JOB])


def join_store(environment: LaunchEnvironment, timeout: float) -> JobStore:
    """Return the ranks' part of the launcher's store, for a process that wants to join them.

    Only after `job_announced`. Raises `LaunchError` if there is no store.
    """
    store, _ = _connect(environment, timeout)
    name = store.get(NAME_OF_JOB).decode()
    return JobStore(PrefixStore(name, store), job_secret(), name)


def open_plain_store(environment: LaunchEnvironment, timeout: float) -> Store:
    """Open the store without signatures, for torch: its C++ does not keep a Python store alive."""
    store, _ = _connect(environment, timeout)
    return unused_part(store, environment.rank, environment.world_size, timeout, store)


def _connect(environment: LaunchEnvironment, timeout: float) -> tuple[Store, bytes]:
    """Return the job's store, and the secret that was sent through MPI, empty without MPI."""
    limit, secret = timedelta(seconds=timeout), b""
    try:
        if environment.launcher in ("openmpi", "mpich") and environment.master_addr is None:
            store, secret = _through_mpi(environment, limit)
        else:
            store = _through_address(environment, limit)
    except LaunchError as error:
        raise LaunchError(f"rank {environment.rank} found no store: {error}") from error
    except (DistError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == EADDRINUSE:
            place = place_text(environment.master_addr or "", environment.master_port)
            raise LaunchError(
                f"rank {environment.rank} cannot listen on {place}, which another program, or a second rank "
                f"{environment.rank}, uses; set "
                "MASTER_ADDR and MASTER_PORT to another place on all ranks"
            ) from error
        raise LaunchError(f"rank {environment.rank} found no store within {timeout:g} s: {error}") from error
    prefer_family_of(store)
    if (
        environment.launcher == "slurm"
    ):  # the steps may meet at the same port, which follows from their numbers
        return PrefixStore(f"{PREFIX}/{slurm_step()}", store), secret
    return PrefixStore(PREFIX, store), secret


def signed_part(store: Store, rank: int, size: int, timeout: float, secret: bytes = b"") -> JobStore:
    """Return an `unused_part` with signed values, so that values of other programs are refused; collective.

    The secret is `secret`, the one in MCR_SECRET, or one that rank 0 offers to processes of the same user on
    its host. Without a secret, values are not signed and rank 0 logs a warning, once. Waits end when a rank
    has died.

    Raises `LaunchError` as `unused_part` does, if ranks do not have the same secret, and if ranks that share
    a host cannot read rank 0's secret; `PeerLost` if a rank is seen to have died.
    """
    return _signed_part(store, rank, size, timeout, JobArrivals(rank, size), secret)[0]


def _signed_part(
    store: Store, rank: int, size: int, timeout: float, arrivals: JobArrivals, secret: bytes = b""
) -> tuple[JobStore, str]:
    """See `signed_part`; also returns the name of the part."""
    name = unused_name(store, rank, size, timeout, arrivals)
    part = PrefixStore(name, store)
    problem, own = "", secret or job_secret()
    if not own:
        watched = JobStore(part, timeout=timeout + SLACK, lost=arrivals.error)
        own, problem = _offered_secret(watched, name, rank, size, timeout)
        if not problem:
            return JobStore(part, own, name, timeout=timeout, lost=arrivals.error), name
    elif not secret:  # so that ranks without a secret do not wait
        part.set(f"reads/{rank}" if rank else "offer", _HAS_ITS_OWN if rank else "")
    signed = JobStore(part, own or b"unknown", name, timeout=timeout, lost=arrivals.error)
    try:
        exchange(signed, rank, size, "signed", "", timeout)
    except (LaunchError, PeerLost):  # the other ranks may have ended because of the error
        if not problem:
            raise
    if problem:
        raise LaunchError(
            f"messages between ranks cannot be signed ({problem}); set MCR_SECRET to the same random "
            "text on all ranks"
        )
    return signed, name


def _offered_secret(part: JobStore, name: str, rank: int, size: int, timeout: float) -> tuple[bytes, str]:
    """Return the secret that rank 0 offers, empty if values stay unsigned; or a problem, on all ranks.

    Ranks that have read the secret sign their answers, and rank 0 signs the list of ranks that have not, so
    another program cannot make a rank with the secret continue unsigned. It can still keep ranks from finding
    the secret, so a job whose ranks all share a host, by the launcher or by the store's address, never runs
    unsigned.
    """
    offer = SecretOffer() if rank == 0 else None
    try:
        if offer is not None:
            secret = offer.secret
            without = _offer_secret(part, part.signed(secret, name), offer.place, size, timeout)
        else:
            secret, without = _read_secret(part, name, rank, timeout)
    finally:
        if offer is not None:
            offer.close()
    if not without and secret:
        return secret, ""
    reasons = "; ".join(f"rank {peer}: {reason}" for peer, reason in list(without.items())[:_REASONS])
    reasons += f"; and {len(without) - _REASONS} ranks more" if len(without) > _REASONS else ""
    reasons = reasons if reasons.isprintable() else repr(reasons)
    if secret and str(rank) in without:
        raise LaunchError(f"another program has answered for rank {rank} in the job's store: {reasons}")
    shared = on_one_host(ranks=size) or is_loopback(server_of(part)[0])
    if shared or not without or _HAS_ITS_OWN in without.values():
        return b"", reasons or "rank 0 has not written the answer in the job's store"
    global _warned
    if rank == 0 and not _warned:
        _log.warning(
            "values in the job's store and objects that ranks send are not signed (%s); where "
            "others can reach their network, set MCR_SECRET to the same random text on all ranks",
            reasons,
        )
    _warned = True
    return b"", ""


def _offer_secret(part: Store, signed: Store, place: str, size: int, timeout: float) -> dict[str, str]:
    """Publish, on rank 0, the place of the secret; return why ranks have not read it, by rank."""
    part.set("offer", place)
    keys = {str(peer): f"reads/{peer}" for peer in range(1, size)}
    try:
        if keys:
            part.wait(list(keys.values()), timedelta(seconds=timeout))
        without = {peer: reason for peer, key in keys.items() if (reason := _reason(part, signed, key))}
    except RuntimeError as error:
        if isinstance(error, PeerLost):
            signed.set("without", loss_as_text(error))
            raise
        missing = [int(peer) for peer, key in keys.items() if not part.check([key])]
        raise LaunchError(f"ranks {missing} did not call init within {timeout:g} s: {error}") from error
    signed.set("without", json.dumps(without))
    return without


def _reason(part: Store, signed: Store, key: str) -> str:
    """Return the reason why a rank has not read the secret; empty if it has."""
    try:
        signed.get(key)
    except LaunchError:
        return part.get(key).decode(errors="replace")[:_LONGEST_REASON] or "no reason"
    return ""


def _read_secret(part: JobStore, name: str, rank: int, timeout: float) -> tuple[bytes, dict[str, str]]:
    """Return, on other ranks, the secret (empty if unreadable), and why ranks have not read it, by rank."""
    secret, patience = b"", timedelta(seconds=timeout + SLACK)
    try:
        part.wait(["offer"], patience)
        place = part.get("offer").decode(errors="replace")
        if not place:
            return b"", {"0": _HAS_ITS_OWN}
        try:
            secret = read_offer(place)
            part.signed(secret, name).set(f"reads/{rank}", "")
        except LaunchError as error:
            part.set(f"reads/{rank}", str(error))
        part.wait(["without"], patience)
        said = part.signed(secret, name).get("without") if secret else unsigned(part.get("without"))
        without = dict(json.loads(said))
        raise_loss(without)
        return secret, without
    except (LaunchError, PeerLost):
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise LaunchError(f"rank 0 did not answer within {timeout:g} s: {error}") from error


def exchange(
    store: Store, rank: int, size: int, what: str, value: str, timeout: float, *, group: Group | None = None
) -> list[str]:
    """Return every rank's `value`, by rank; collective. `what` names the exchange and must be new.

    `group`: the group being opened, whose ranks these are; None for the ranks of the job.

    Rank 0 collects and publishes the values, so that the store gets a few requests per rank and not one per
    pair. Raises `LaunchError` naming the ranks that have not called this within `timeout` seconds, or the key
    that another program has written. Long waits are logged.
    """
    waits = partial(_waits, store, rank, size, what, group)
    with logged_waiting(waits):
        return _exchanged(store, rank, size, what, value, timeout, group)


def _waits(store: Store, rank: int, size: int, what: str, group: Group | None) -> str:
    """Describe, for the log, which ranks this rank waits for in an exchange."""
    late: list[int] = []
    with suppress(RuntimeError):  # then the wait itself ends with the error
        late = [peer for peer in range(size) if not store.check([f"{what}/{peer}"])]
    if group is not None:
        late, rank = [group.ranks[peer] for peer in late], group.ranks[rank]
    place = "init or reset" if group is None else f"the opening of group '{group.name}'"
    return f"rank {rank} waits in {place} for {some_ranks(late) if late else 'an answer'}"


def _exchanged(
    store: Store, rank: int, size: int, what: str, value: str, timeout: float, group: Group | None
) -> list[str]:
    call = "reset" if what.startswith("reset") else "init"
    first = "rank 0"
    if group is not None:
        call, first = f"open group '{group.name}'", group.named(0)
    try:
        store.set(f"{what}/{rank}", value)
    except RuntimeError as error:
        raise LaunchError(f"the job's store does not answer ({what}): {error}") from error
    # Rank 0 publishes failures too, so that the other ranks raise them instead of timing out.
    if rank == 0:
        keys = [f"{what}/{peer}" for peer in range(size)]
        try:
            store.wait(keys, timedelta(seconds=timeout))
        except PeerLost as error:
            store.set(f"{what}/all", loss_as_text(error))
            raise
        except RuntimeError:
            missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
            store.set(f"{what}/all", json.dumps({"missing": missing}))
        else:
            try:
                values = [store.get(key).decode() for key in keys]
            except LaunchError as error:
                store.set(f"{what}/all", json.dumps({"problem": str(error)}))
                raise
            store.set(f"{what}/all", json.dumps({"values": values}))
    try:
        store.wait([f"{what}/all"], timedelta(seconds=timeout + SLACK))
        result = json.loads(store.get(f"{what}/all"))
    except (LaunchError, PeerLost):
        raise
    except RuntimeError as error:
        raise LaunchError(f"{first} did not answer within {timeout:g} s ({what}): {error}") from error
    if "missing" in result:
        missing = result["missing"]
        late = f"ranks {missing}" if group is None else group.named(*missing)
        raise LaunchError(f"{late} did not {'call ' * (group is None)}{call} within {timeout:g} s")
    raise_loss(result)
    if "problem" in result:
        raise LaunchError(result["problem"])
    values = result["values"]
    assert isinstance(values, list)
    return values


def open_torch_store(environment: LaunchEnvironment, limit: timedelta) -> Store:
    """Connect to the store of `env://`, which rank 0 creates, and which listens on loopback; collective.

    The store lives as long as rank 0's process. Keys are new at each call, because a program may destroy its
    process group and create it again.

    Raises `LaunchError` if the port is taken or a rank is missing, and torch's own errors if rank 0 is
    missing.
    """
    address, port, size = environment.master_addr, environment.master_port, environment.world_size
    assert address is not None
    assert port is not None
    try:
        store = _through_address(environment, limit)
    except OSError as error:
        raise LaunchError(f"env://: rank 0 cannot listen on {place_text(address, port)}: {error}") from error
    return unused_part(PrefixStore(f"torch/{size}", store), environment.rank, size, limit.total_seconds())


def _through_address(environment: LaunchEnvironment, limit: timedelta) -> Store:
    address, port = environment.master_addr, environment.master_port
    if address is None or port is None:
        raise LaunchError(
            f"the job was started by {environment.launcher} with {environment.world_size} ranks, but "
            "MASTER_ADDR and MASTER_PORT are not set; set them, or start it with mcr-plus run, torchrun or "
            "mpirun"
        )
    known = known_stores.get((address, port))
    if known is not None:  # init after finalize: this process already has the address
        return known
    is_server = environment.rank == 0 and not environment.agent_store
    own = LOOPBACK if address == "localhost" else address
    listener = listening(own, port) if is_server and is_loopback(address) else None
    place = place_text(address, port)
    who = f"rank {environment.rank} of {environment.world_size}"
    server = "the launcher" if environment.agent_store else "rank 0"
    with logged_waiting(lambda: f"{who} cannot connect to {place}, where {server} should listen"):
        store = known_stores[address, port] = opened(address, port, limit, listener, serves=is_server)
    return store


def _through_mpi(environment: LaunchEnvironment, limit: timedelta) -> tuple[Store, bytes]:
    """Broadcast through MPI, under mpirun without an address, the address of rank 0's store and a secret.

    Done once per process, because MPI may be unusable at another `init`.
    """
    if _by_mpi:
        _by_mpi[0][0].set_timeout(limit)
        return _by_mpi[0]
    try:
        mpi = load_mpi()
    except BackendUnavailable as error:
        raise LaunchError(
            f"started by {environment.launcher}, but {error}; or set MASTER_ADDR and MASTER_PORT"
        ) from error
    comm = mpi.COMM_WORLD
    if comm.size != environment.world_size:
        raise LaunchError(
            f"the launcher has started {environment.world_size} ranks, MPI's world has {comm.size}: "
            "mpirun and the MPI library that mpi4py loads do not belong together"
        )
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    address = LOOPBACK if node.size == comm.size else ""
    node.Free()
    place = bytearray(64) + secrets.token_bytes(32)
    listener = None
    if comm.rank == 0:
        listener = listening(address or meeting_address())
        place[:64] = place_text(*listener.getsockname()[:2]).encode().ljust(64)
    comm.Bcast([place, mpi.BYTE], root=0)
    host, port = place_of_text(place[:64].decode().strip())
    _by_mpi.append((opened(host, port, limit, listener), bytes(place[64:])))
    return _by_mpi[0]
