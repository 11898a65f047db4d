"""Strangers who reach the port of a job's store, or its data channels: their data is refused."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mismatches import outcome_of
from ports import free_ports
from ranks import Via, own_rank, run_ranks, wait_for_files
from torch_features import needs_list_keys

import mcr_plus as mcr
import mcr_plus.horovod as hvd
from mcr_plus.board.store import StoreBoard
from mcr_plus.core.c10d import HashStore, PrefixStore, Store, TCPStore, put
from mcr_plus.core.job_store import JobStore, seal, unseal
from mcr_plus.errors import LaunchError
from mcr_plus.rendezvous.mpi_launcher import mpi_usable
from mcr_plus.rendezvous.secret_offer import SecretOffer, read_offer
from mcr_plus.rendezvous.store import signed_part
from mcr_plus.rendezvous.store_connections import server_of

GLOO = {"version": 1, "backends": ["gloo"], "pipeline": [{"select": {}}, {"dispatch": {"timeout": "20s"}}]}
needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")


def resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


needs_a_name = pytest.mark.skipif(
    not resolves(socket.gethostname()), reason="the host's name does not resolve"
)
OTHERS = 65534  # the user "nobody"


def test_values_of_strangers_are_refused() -> None:
    raw = HashStore()
    ours, theirs, elsewhere = (
        JobStore(raw, *each) for each in ((b"s" * 32, "a"), (b"t" * 32, "a"), (b"s" * 32, "b"))
    )
    PrefixStore("p", ours).set("key", "value")
    assert PrefixStore("p", JobStore(raw, b"s" * 32, "a")).get("key") == b"value"
    signed = raw.get("p/key")
    for forged in (b"", b"value", signed[:-1], signed + b"!", signed[:32], bytes(len(signed))):
        put(raw, "p/key", forged)
        with pytest.raises(LaunchError, match="'p/key' in the job's store was not written by a rank"):
            ours.get("p/key")
    put(raw, "p/another", signed)  # one of the job's values in another place
    for store, key in ((ours, "p/another"), (theirs, "p/another"), (elsewhere, "p/another")):
        with pytest.raises(LaunchError, match="not written by a rank of this job"):
            store.get(key)
    put(raw, "p/key", signed)
    assert ours.get("p/key") == b"value"
    for store in (theirs, elsewhere):
        with pytest.raises(LaunchError):
            store.get("p/key")
    assert [ours.add("n", 2), ours.add("n", 1), theirs.add("n", 0)] == [2, 3, 3]
    assert ours.check(["n", "p/key"])
    assert ours.delete_key("p/key")
    assert not ours.check(["p/key"])


def test_names_are_signed_with_their_values() -> None:
    assert unseal(b"k", "name", seal(b"k", "name", b"value")) == b"value"
    assert unseal(b"k", "na", seal(b"k", "name", b"value")) is None
    assert unseal(b"k", "namev", seal(b"k", "name", b"value")[:32] + b"alue") is None
    assert unseal(b"", "name", seal(b"", "name", b"value")) == b"value"


def test_a_secret_is_read_from_processes_of_the_same_user_only() -> None:
    offer = SecretOffer()
    assert read_offer(offer.place) == offer.secret
    assert read_offer(offer.place) == offer.secret  # and by the next one
    something_else = os.memfd_create("mcr_plus", 0)
    here = offer.place.split(":", 2)[2]
    places = (f"{os.getpid()}:{something_else}", "999999999:3", "words", "1:2:3", f"{os.getpid()}:-1")
    for place in (*(f"{each}:{here}" for each in places), "words", "1:2", "", offer.place + "x"):
        with pytest.raises(LaunchError, match=f"cannot be read from process '{place.partition(':')[0]}'"):
            read_offer(place)
    os.close(something_else)
    place = offer.place
    offer.close()
    with pytest.raises(LaunchError):
        read_offer(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can open files of other users' processes at all")
def test_a_secret_of_another_user_is_refused() -> None:
    assert SecretOffer().place  # imports what another user may be unable to read
    place, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(OTHERS)
            os.write(place[1], SecretOffer().place.encode())
            os.read(done[0], 1)
        finally:
            os._exit(0)
    os.close(place[1])
    try:
        with pytest.raises(LaunchError, match=r"belongs to another user|Permission denied"):
            read_offer(os.read(place[0], 100).decode())
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        for each in (place[0], *done):
            os.close(each)


class _Evil:
    """An object that a stranger would like to have unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


def guess_secret(running: Any) -> None:
    """Sign objects from here on with another secret than the job's."""
    running.world = replace(running.world, secret=b"guessed" * 5)
    for opened in running.groups:
        opened.objects._secret = running.world.secret


def visited(folder: str) -> list[str]:
    """Rank 1 is the stranger: at first one who knows the port of the store, then one in a data channel."""
    found = []
    comm = mcr.init(GLOO)
    running = comm._runtime
    store: Any = running.world.store
    store = JobStore(store)
    assert len(running.world.secret) == 32
    assert repr(running.world.secret) not in repr(running.world)
    if comm.rank == 0:
        store.set("told", "by rank 0")
    mcr.barrier()
    assert store.get("told") == b"by rank 0"
    mcr.barrier()
    if comm.rank == 1:
        stranger = TCPStore(*server_of(store), is_master=False)
        keys: list[str] = [key for key in stranger.list_keys() if key.endswith("/told")]
        assert keys
        for key in keys:
            stranger.set(key, "by a stranger")
    mcr.barrier()
    with pytest.raises(LaunchError) as refused:
        store.get("told")
    found.append(str(refused.value))
    assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": 0}, {"rank": 1}]
    assert comm.broadcast_object([comm.rank], 1) == [1]
    evil = _Evil(f"{folder}/touched.{comm.rank}") if comm.rank == 1 else None
    if evil:
        guess_secret(running)
    for call in (lambda: comm.all_gather_object(evil), lambda: comm.broadcast_object(evil, 1)):
        if comm.rank == 0:
            with pytest.raises(mcr.BackendError) as unread:
                call()
            found.append(str(unread.value))
            continue
        try:
            call()
        except mcr.BackendError:
            pass  # rank 0's message is not signed for the stranger
    x = torch.ones(3)
    mcr.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    return found


@needs_list_keys
@pytest.mark.parametrize("via", ["mpi", "torch"])
def test_forged_store_values_and_objects_are_refused(tmp_path: Path, via: Via) -> None:
    results = run_ranks(visited, 2, args=[str(tmp_path)], via=via)
    for result in results:
        assert "'told' in the job's store was not written by a rank of this job" in result.value[0]
    unread = "the object of rank 1 in group 'world' was not signed by it, and is not unpickled"
    assert results[0].value[1:] == [unread] * 2
    assert not list(tmp_path.glob("touched*"))


def visited_by_horovod(folder: str) -> list[str]:
    """Rank 1 is the stranger, in a data channel of a program written for Horovod."""
    hvd.init(config=GLOO)
    pair = hvd.add_process_set([1, 2])
    assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": rank} for rank in range(hvd.size())]
    if pair.included():
        assert hvd.broadcast_object([hvd.rank()], 2, process_set=pair) == [2]
    running = mcr.world()._runtime
    evil: Any = None
    optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=1.0 + hvd.rank())
    if hvd.rank() == 1:
        guess_secret(running)
        evil = _Evil(f"{folder}/touched")
        optimizer.param_groups[0]["evil"] = evil
    calls = [
        lambda: hvd.allgather_object(evil),
        lambda: hvd.broadcast_object(evil, 1),
        lambda: hvd.broadcast_optimizer_state(optimizer, 1),
    ]
    if pair.included():
        calls.append(lambda: hvd.broadcast_object(evil, 1, process_set=pair))
    outcomes = [outcome_of(call) for call in calls]
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [3.0] * 3
    assert optimizer.param_groups[0]["lr"] == 1.0 + hvd.rank()
    return [f"{each['error']}: {each['text']}" for each in outcomes]


@pytest.mark.long
def test_forged_objects_are_refused_in_horovod_programs(tmp_path: Path) -> None:
    results = run_ranks(visited_by_horovod, 3, args=[str(tmp_path)], via="torch")
    for rank, number in ((0, 3), (2, 4)):  # rank 2 is in the process set, too
        assert len(results[rank].value) == number
        for text in results[rank].value:
            told = r"HorovodInternalError: the object of rank 1( of the job)? in group '\S+' was not signed"
            assert re.match(told, text)
    assert not list(tmp_path.glob("touched*"))


def _on_several_hosts(library: str) -> mcr.Communicator:
    """Make a job with ranks that see each other as ranks of other hosts, so their board is in the store."""
    host = f"host{own_rank()}"
    with mock.patch("mcr_plus.job.init.host_name", return_value=host):
        comm = mcr.init({**GLOO, "backends": [library]}, timeout=60.0)
    assert isinstance(comm.opened.state.board, StoreBoard)
    return comm


def _stranger(store: Any) -> TCPStore:
    return TCPStore(*server_of(store), is_master=False)


def forged(library: str, name: str, folder: str) -> dict[str, Any]:
    """Run on ranks: while rank 0 waits for rank 1, a stranger writes `name` of rank 1 on the board."""
    noticed = Path(folder, "noticed")
    comm = _on_several_hosts(library)
    for _ in range(3):
        comm.all_reduce(torch.ones(3))
    store: Any = comm._runtime.world.store
    store = JobStore(store)
    if comm.rank == 1:
        stranger = _stranger(store)
        row = next(key for key in stranger.list_keys() if key.endswith("board/world/1/row"))
        time.sleep(0.5)  # rank 0 waits by now, or reads it at its start
        put(stranger, row.removesuffix("row") + name, pickle.dumps(_Evil(f"{folder}/touched")))
        wait_for_files(noticed)
    told = outcome_of(lambda: comm.all_reduce(torch.ones(3)))
    noticed.touch()
    return {**told, "next": outcome_of(comm.barrier)["text"]}


@pytest.mark.long
@needs_list_keys
@pytest.mark.parametrize("library", [pytest.param("mpi", marks=needs_mpi), "gloo"])
@pytest.mark.parametrize("name", ["row", "closed", "failed", "compiling"])
def test_forged_board_entries_fail_the_operation_and_its_group(
    tmp_path: Path, library: str, name: str
) -> None:
    via: Via = "mpi" if library == "mpi" else "torch"
    results = run_ranks(forged, 2, args=[library, name, str(tmp_path)], via=via, check=False)
    deceived, other = (result.value for result in results)
    assert deceived["error"] == other["error"] == "BackendError"
    written = f"board/world/1/{name}' in the job's store was not written by a rank of this job"
    assert written in deceived["text"]
    assert f"rank 0 has given up: BackendError: {deceived['text'][:30]}" in other["text"]
    assert deceived["seconds"] < 15.0
    assert other["seconds"] < 15.0
    assert all("cannot be used after it has failed" in each["next"] for each in (deceived, other))
    assert not list(tmp_path.glob("touched*"))


def without_a_store(library: str, port: int, server: int, folder: str) -> None:
    """Run on ranks: the process that holds the store ends in a healthy job."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(store)
    with mock.patch("mcr_plus.core.environment._by_our_mpi", return_value=False):
        comm = _on_several_hosts(library)
    other = mcr.new_group([0, 1])

    def reduce(group: mcr.Communicator, numel: int) -> None:
        value = torch.ones(numel)
        group.all_reduce(value)
        assert value.tolist() == [2.0] * numel

    for group in (comm, other):
        for _ in range(3):
            reduce(group, 3)
    comm.barrier()
    comm.barrier()
    gone = Path(folder, "gone")
    if comm.rank == 1:
        os.kill(server, signal.SIGKILL)
        while Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        gone.touch()
        time.sleep(1.0)
    else:
        wait_for_files(gone)
        time.sleep(1.5)
    found = {"known": outcome_of(lambda: reduce(other, 3))}
    found["group"] = outcome_of(lambda: mcr.new_group([1, 0]))
    found["new"] = outcome_of(lambda: reduce(comm, 4))
    if comm.rank == 0:
        with mock.patch("mcr_plus.engine.watchdog._UNSEEN", 2.0):
            found["alone"] = outcome_of(lambda: reduce(other, 3))
    found["reset"] = outcome_of(mcr.reset)
    own, other_rank = (Path(folder, str(rank)) for rank in (comm.rank, 1 - comm.rank))
    own.with_suffix(".part").write_text(json.dumps(found))
    own.with_suffix(".part").rename(own)
    wait_for_files(other_rank, patience=30)  # mpiexec ends all ranks once one exits without MPI_Finalize


SERVER = """
import sys, time
from mcr_plus.rendezvous.store_connections import served
store = served()
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.parametrize("library", [pytest.param("mpi", marks=needs_mpi), "gloo"])
def test_operations_that_need_the_store_fail_soon_after_its_owner_dies(library: str, tmp_path: Path) -> None:
    via: Via = "mpi" if library == "mpi" else "torch"
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        try:
            arguments = [library, port, server.pid, str(tmp_path)]
            run_ranks(without_a_store, 2, args=arguments, via=via, timeout=90, check=False)
        finally:
            server.kill()
    results = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for found in results:
        if library == "mpi":  # known operations do without it
            assert found["known"]["error"] is None
        for name in ("known", "group", "new", "alone", "reset"):
            if found is results[0] and "rank 1 has left this world" in str(found.get(name, {}).get("text")):
                continue  # it has ended its heartbeat in `reset`: found before the store is
            if name in found and found[name]["error"] is not None:
                assert found[name]["error"] in ("BackendError", "LaunchError"), found[name]
                assert "store" in found[name]["text"], found[name]
                assert found[name]["seconds"] < 15, found[name]
        assert found["new"]["error"] in ("BackendError", "PeerLost")
        assert found["reset"]["error"] == "LaunchError"
    assert results[0]["alone"]["error"] in ("BackendError", "PeerLost")
    assert results[0]["alone"]["seconds"] < 15


class _Forging(Store):
    """Rank 1's store; a stranger changes one key of it."""

    def __init__(self, store: Store, key: str, value: bytes) -> None:
        super().__init__()
        self._store, self._key, self._value = store, key, value

    def set(self, key: str, value: str | bytes) -> None:
        put(self._store, key, self._changed(key, value if isinstance(value, bytes) else value.encode()))

    def get(self, key: str) -> bytes:
        return self._changed(key, self._store.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout or timedelta(seconds=10))

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def _changed(self, key: str, value: bytes) -> bytes:
        return self._value if key.endswith(self._key) else value


def met(stores: tuple[Store, Store], variables: dict[str, str]) -> list[Any]:
    """Return the parts that two ranks, threads of this process, read from a store, or the errors."""

    def meet(rank: int) -> Any:
        try:
            return signed_part(stores[rank], rank, 2, 5.0)
        except LaunchError as error:
            return str(error)

    with mock.patch.dict(os.environ, variables), ThreadPoolExecutor(2) as pool:
        return list(pool.map(meet, range(2)))


@pytest.mark.long
@pytest.mark.parametrize("one_host", [True, False])
def test_forged_handshake_cannot_disable_signing(one_host: bool) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2" if one_host else "1"}
    raw = HashStore()
    both = met((raw, raw), variables)
    assert both[0].secret == both[1].secret != b""

    _, refused = met((raw, _Forging(raw, "/reads/1", b"on another host")), variables)
    assert refused == "another program has answered for rank 1 in the job's store: rank 1: on another host"

    lies = bytes(32) + json.dumps({"0": "on another host"}).encode()
    _, refused = met((raw, _Forging(raw, "without", lies)), variables)
    assert refused.startswith("'without' in the job's store was not written by a rank of this job")

    both = met((raw, _Forging(raw, "offer", b"1:2:elsewhere")), variables)
    told = "rank 1: the job's secret cannot be read from process '1': it is on another host, or in another"
    if one_host:
        assert both[0] == both[1]
        assert both[0].startswith(f"messages between ranks cannot be signed ({told}")
        assert both[0].endswith("set MCR_SECRET to the same random text on all ranks")
    else:
        assert [part.secret for part in both] == [b"", b""]


def by_host_name(port: int, local_size: int, elsewhere: int) -> dict[str, Any]:
    """Run on ranks with a store at the host's name; rank `elsewhere` cannot see the others in `/proc`."""
    place = {
        "MASTER_ADDR": socket.gethostname(),
        "LOCAL_RANK": str(own_rank() % local_size),
        "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": str(local_size),
    }
    os.environ.update(place | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    where = "elsewhere" if own_rank() == elsewhere else "here"
    with mock.patch("mcr_plus.rendezvous.secret_offer._processes", return_value=where):
        found = outcome_of(lambda: mcr.init(GLOO, timeout=30.0))
        if found["error"] is None:
            found["bits"] = 8 * len(mcr.world()._runtime.world.secret)
            found["objects"] = mcr.all_gather_object(own_rank())
            mcr.finalize()
            mcr.init(GLOO)
            mcr.barrier()
    return found


@needs_a_name
@pytest.mark.parametrize("local_size", [3, 1], ids=["one host, as the launcher says", "who knows"])
def test_ranks_that_meet_by_the_name_of_their_host(local_size: int) -> None:
    for result in run_ranks(by_host_name, 3, args=[free_ports(1)[0], local_size, -1], via="torch"):
        assert (result.value["bits"], result.value["objects"]) == (256, [0, 1, 2])
        assert "not signed" not in result.stderr


@needs_a_name
@pytest.mark.parametrize("elsewhere", [0, 2])
def test_ranks_that_cannot_read_the_secret_continue_unsigned_with_a_warning(elsewhere: int) -> None:
    results = run_ranks(by_host_name, 3, args=[free_ports(1)[0], 1, elsewhere], via="torch")
    for result in results:
        assert (result.value["bits"], result.value["objects"]) == (0, [0, 1, 2])
    warned = [result.stderr.count("not signed") for result in results]
    assert warned == [1, 0, 0]
    assert "set MCR_SECRET to the same random text on all ranks" in results[0].stderr
    assert ("rank 1: the job's secret cannot be read" in results[0].stderr) == (elsewhere == 0)
    assert "rank 2: the job's secret cannot be read" in results[0].stderr


@needs_a_name
def test_init_fails_if_a_rank_of_the_same_host_cannot_read_the_secret() -> None:
    for result in run_ranks(by_host_name, 3, args=[free_ports(1)[0], 3, 1], via="torch"):
        assert result.value["error"] == "LaunchError"
        assert (
            "cannot be signed (rank 1: the job's secret cannot be read from process" in result.value["text"]
        )
        assert result.value["seconds"] < 20


UNDER_TORCHRUN = """
import os
import torch.distributed as dist
import mcr_plus as mcr
from mcr_plus.job.init import current
dist.init_process_group("mcr")
dist.barrier()
bits = [8 * len(current().world.secret)]
dist.destroy_process_group()
with mcr.init(backends=["gloo"]) as comm:
    bits.append(8 * len(current().world.secret))
    line = f"{os.environ['MASTER_ADDR']} {bits[0]} {bits[1]}\\n"
    os.write(1, line.encode())  # at once: print writes the pieces apart where Python does not buffer
"""


@pytest.mark.long
@needs_a_name
def test_jobs_of_torchrun_on_one_host_are_signed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNDER_TORCHRUN)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", socket.gethostname()),
        *("--nproc-per-node", "2", str(program)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        address, *bits = line.split()
        assert address == socket.gethostname()
        assert bits == ["256", "256"]
    assert "not signed" not in done.stderr


def with_secrets(given: list[str | None]) -> dict[str, Any]:
    own = given[own_rank()]
    if own is not None:
        os.environ["MCR_SECRET"] = own
    found: list[Any] = []
    outcome = outcome_of(lambda: found.extend(mcr.init(GLOO).all_gather_object(own_rank())))
    return outcome | {"found": found}


def test_a_secret_of_the_environment() -> None:
    for result in run_ranks(with_secrets, 2, args=[["the same", "the same"]], via="torch"):
        assert result.value["found"] == [0, 1]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["one", "another", "one"], "or MCR_SECRET differs between ranks"),
        (["one", None, "one"], "(rank 0: MCR_SECRET is set there, and not on all ranks)"),
        ([None, None, "one"], "(rank 2: MCR_SECRET is set there, and not on all ranks)"),
    ],
)
def test_a_secret_that_not_all_ranks_have(given: list[str | None], problem: str) -> None:
    results = run_ranks(with_secrets, 3, args=[given], via="torch")
    for own, result in zip(given, results, strict=True):
        assert result.value["error"] == "LaunchError"
        assert result.value["seconds"] < 20
        assert (problem if own is None else "or MCR_SECRET differs between ranks") in result.value["text"]
