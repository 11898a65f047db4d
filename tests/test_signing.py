"""Strangers who reach the port of a job's store, or its data channels: nothing of theirs is believed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Via, run_ranks

import mcr_plus as mcr
from mcr_plus.c10d import HashStore, PrefixStore, TCPStore, put
from mcr_plus.errors import LaunchError
from mcr_plus.launch.signing import Offer, SignedStore, address_of, read_offer, seal, unseal

GLOO = {"version": 1, "backends": ["gloo"], "pipeline": [{"select": {}}, {"dispatch": {"timeout": "20s"}}]}
OTHERS = 65534  # the user "nobody"


def test_values_of_strangers_are_refused() -> None:
    raw = HashStore()
    ours, theirs, elsewhere = (
        SignedStore(raw, *each) for each in ((b"s" * 32, "a"), (b"t" * 32, "a"), (b"s" * 32, "b"))
    )
    PrefixStore("p", ours).set("key", "value")
    assert PrefixStore("p", SignedStore(raw, b"s" * 32, "a")).get("key") == b"value"
    signed = raw.get("p/key")
    for forged in (b"", b"value", signed[:-1], signed + b"!", signed[:32], bytes(len(signed))):
        put(raw, "p/key", forged)
        with pytest.raises(LaunchError, match="'p/key' in the job's store was not written by a rank"):
            ours.get("p/key")
    put(raw, "p/another", signed)  # a value of ours in another place
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


def test_what_a_thing_is_called_is_signed_with_it() -> None:
    assert unseal(b"k", "name", seal(b"k", "name", b"value")) == b"value"
    assert unseal(b"k", "na", seal(b"k", "name", b"value")) is None
    assert unseal(b"k", "namev", seal(b"k", "name", b"value")[:32] + b"alue") is None
    assert unseal(b"", "name", seal(b"", "name", b"value")) == b"value"


def test_a_secret_is_read_from_processes_of_the_same_user_only() -> None:
    offer = Offer()
    assert read_offer(offer.place) == offer.secret
    assert read_offer(offer.place) == offer.secret  # and by the next one
    something_else = os.memfd_create("mcr_plus", 0)
    for place in (f"{os.getpid()}:{something_else}", "999999999:3", "words", "1:2:3", f"{os.getpid()}:-1"):
        with pytest.raises(LaunchError, match=f"not to be had from process '{place}'"):
            read_offer(place)
    os.close(something_else)
    place = offer.place
    offer.close()
    with pytest.raises(LaunchError):
        read_offer(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can open files of other users' processes at all")
def test_a_secret_of_another_user_is_refused() -> None:
    place, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(OTHERS)
        os.write(place[1], Offer().place.encode())
        os.read(done[0], 1)
        os._exit(0)
    try:
        with pytest.raises(LaunchError, match=r"belongs to somebody else|Permission denied"):
            read_offer(os.read(place[0], 100).decode())
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        for each in (*place, *done):
            os.close(each)


class _Evil:
    """What a stranger would like to be unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def visited(folder: str) -> list[str]:
    """Rank 1 is the stranger: at first one who knows the port of the store, then one in a data channel."""
    found = []
    comm = mcr.init(GLOO)
    running = comm._runtime
    store: Any = running.world.store
    assert len(running.world.secret) == 32
    assert repr(running.world.secret) not in repr(running.world)
    if comm.rank == 0:
        store.set("told", "by rank 0")
    mcr.barrier()
    assert store.get("told") == b"by rank 0"
    mcr.barrier()
    if comm.rank == 1:
        inner = store._store
        while hasattr(inner, "underlying_store"):
            inner = inner.underlying_store
        stranger = TCPStore(address_of(store._store), inner.port, is_master=False)
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
        running.world = replace(running.world, secret=b"guessed" * 5)
    for call in (lambda: comm.all_gather_object(evil), lambda: comm.broadcast_object(evil, 1)):
        if comm.rank == 0:
            with pytest.raises(mcr.BackendError) as unread:
                call()
            found.append(str(unread.value))
            continue
        try:
            call()
        except mcr.BackendError:
            pass  # what rank 0 sent is not signed for the stranger
    x = torch.ones(3)
    mcr.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    return found


@pytest.mark.parametrize("via", ["mpi", "torch"])
def test_a_stranger_is_not_believed(tmp_path: Path, via: Via) -> None:
    results = run_ranks(visited, 2, args=[str(tmp_path)], via=via)
    for result in results:
        assert "'told' in the job's store was not written by a rank of this job" in result.value[0]
    unread = "the object of rank 1 in group 'world' was not signed by it, and is not unpickled"
    assert results[0].value[1:] == [unread] * 2
    assert not list(tmp_path.glob("touched*"))


def with_secrets() -> str:
    os.environ["MCR_SECRET"] = "the same" if os.environ["MCR_TEST_SAME"] == "1" else os.environ["RANK"]
    try:
        comm = mcr.init(GLOO)
    except LaunchError as error:
        return str(error)
    return str(comm.all_gather_object(comm.rank))


@pytest.mark.parametrize("same", [True, False])
def test_a_secret_of_the_environment(same: bool) -> None:
    for result in run_ranks(with_secrets, 2, via="torch", env={"MCR_TEST_SAME": str(int(same))}):
        assert result.value == "[0, 1]" if same else "or MCR_SECRET differs between ranks" in result.value
