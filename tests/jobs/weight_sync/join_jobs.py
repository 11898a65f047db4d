"""What ranks and processes outside their job do in the tests of `mcr.join_sync`.

Weights of a version follow from its number, so that every process can compare all bits by itself. Processes
meet by files in a folder of the test.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs.weight_sync.sync_layout_jobs import SOURCES, layouts_of, same, state_of, wholes
from jobs.weight_sync.sync_layout_jobs import step as step_to

import mcr_plus as mcr
from mcr_plus.rendezvous.stream import StreamConnection
from mcr_plus.weight_sync.connection import SourceConnection

LARGE = 4_000_037
SHORT = 5_003  # its messages with all weights are no windows of exponents
PERIOD = 97
INVITATION = "policy.sync"
State = dict[str, torch.Tensor]


@cache
def _first(numel: int) -> tuple[Any, Any]:
    numbers = np.arange(numel, dtype=np.int64)
    return (numbers * 31 % 16001).astype(np.int16), (numbers * 7919 % PERIOD).astype(np.int16)


def _bits(version: int, numel: int) -> Any:
    """One element in 97 moves with each version, by one step of its bits: others each time."""
    first, places = _first(numel)
    rounds, rest = divmod(version, PERIOD)
    return first + np.int16(rounds) + (places + np.int16(rest) >= PERIOD).astype(np.int16)


def values(version: int, numel: int = LARGE) -> State:
    """The weights of a version: bfloat16, and float32 with a NaN that has a payload."""
    other = np.arange(101, dtype=np.uint32) * 65537 + version
    other[version % 101] = 0x7FC01234
    return {
        "w": torch.from_numpy(_bits(version, numel)).view(torch.bfloat16),
        "v": torch.from_numpy(other.view(np.float32)),
    }


def wrong(state: State, version: int) -> int:
    """How many elements differ in their bits from those of a version."""
    expected = values(version, state["w"].numel())
    return sum(
        int((state[name].view(dtype).numpy() != expected[name].view(dtype).numpy()).sum())
        for name, dtype in (("w", torch.int16), ("v", torch.int32))
    )


def zeros(numel: int = LARGE) -> State:
    return {name: torch.zeros_like(each) for name, each in values(0, numel).items()}


def come(folder: str, name: str) -> None:
    """Say that this process has come so far."""
    Path(folder, name).touch()


# -- ranks ------------------------------------------------------------------------------------------------


def let_receivers_follow(weights: mcr.WeightSync, version: int) -> None:
    """Wait until no receiver outside the job is so far behind that all weights are shorter than changes."""
    source: Any = weights._end
    while any(version - each > 20 for each in list(source._joined.values())):
        time.sleep(0.001)


def trains(folder: str, numel: int, until: Sequence[str]) -> dict[str, Any]:
    """Rank 0 pushes, the others pull each version, until all these files are there."""
    with mcr.init(backends=["gloo"]) as comm:
        state = values(0, numel)
        weights = mcr.sync(state, src=0, invite=Path(folder, INVITATION))
        mode = Path(folder, INVITATION).stat().st_mode & 0o777
        version, bad, most, ends = 0, 0, 0, False
        while not ends:
            version += 1
            if comm.rank == 0:
                for name, each in values(version, numel).items():
                    state[name].copy_(each)
                weights.push()
                let_receivers_follow(weights, version)
                most = max(most, weights.stats()["joined"])
            else:
                assert weights.pull(timeout=60) == version
                bad += wrong(state, version)
            ends = comm.broadcast_object(all(Path(folder, name).exists() for name in until), 0)
        stats = weights.stats()
        weights.close()
        assert not Path(folder, INVITATION).exists()
        return {"version": version, "wrong": bad, "stats": stats, "most": most, "mode": mode}


def shards(folder: str, until: Sequence[str]) -> dict[str, Any]:
    """Ranks 0 to 2 hold shards, and 3 and 4 others, as in `sync_layout_jobs`, until these files are there."""
    with mcr.init(backends=["gloo"]) as comm:
        rank, version, bad, ends = comm.rank, 0, 0, False
        state = state_of(rank, 0)
        file = Path(folder, INVITATION)
        weights = mcr.sync(state, src=SOURCES, layout=layouts_of(rank), invite=file)
        while not ends:
            version += 1
            if rank in SOURCES:
                step_to(state, rank, version)
                weights.push()
            else:
                assert weights.pull(timeout=60) == version
                bad += not same(state, rank, version)
            ends = comm.broadcast_object(all(Path(folder, name).exists() for name in until), 0)
        stats = weights.stats()
        weights.close()
        return {"version": version, "wrong": bad, "stats": stats}


def split_values(version: int) -> dict[str, Any]:
    """Whole tensors of a version, which servers cut in ways that no rank of the job has."""
    real = np.arange(13 * 10, dtype=np.float32).reshape(13, 10) * 0.5 + version
    numbers = np.arange(12, dtype=np.float32).reshape(4, 3)
    return {
        "w": real,
        "c": (numbers + 1j * (numbers * version)).astype(np.complex64),
        "norm": np.arange(7, dtype=np.float32) - version,
        "last": np.arange(5, dtype=np.float32) * (version + 1),
    }


def split_layouts() -> dict[str, mcr.Layout]:
    """Those of two servers: columns of `w`, rows of `c`, and `last` on the second one alone."""
    return {
        "w": mcr.Layout.sharded((13, 10), [0, 1], 1, [6, 4]),
        "c": mcr.Layout.sharded((4, 3), [0, 1], 0, [1, 3]),
        "last": mcr.Layout.replicated((5,), [1]),
    }


def split_part(rank: int, version: int) -> dict[str, Any]:
    """What a server holds, by slices."""
    whole = split_values(version)
    first = {"w": whole["w"][:, :6], "c": whole["c"][:1], "norm": whole["norm"]}
    second = {"w": whole["w"][:, 6:], "c": whole["c"][1:], "norm": whole["norm"], "last": whole["last"]}
    return (first, second)[rank]


def splits(folder: str, until: Sequence[str]) -> dict[str, Any]:
    """Three sources with rows of tensors, and no receiver in the job, until these files are there."""
    with mcr.init(backends=["gloo"]) as comm:
        layouts = {
            name: mcr.Layout.sharded(each.shape, range(3), 0) for name, each in split_values(0).items()
        }
        bounds = {
            name: next(
                zip(*(side[layout.pieces(comm.rank), 0].tolist() for side in layout.held), strict=True),
                (0, 0),
            )
            for name, layout in layouts.items()
        }

        def part(version: int) -> State:
            whole = split_values(version)
            return {name: torch.from_numpy(whole[name][slice(*bounds[name])].copy()) for name in whole}

        state, version, ends = part(0), 0, False
        weights = mcr.sync(
            state, src=range(3), layout=layouts, invite=Path(folder, INVITATION),
            offers={"tensor parallel": split_layouts(), "again": split_layouts()},
        )  # fmt: skip
        while not ends:
            version += 1
            for name, each in part(version).items():
                state[name].copy_(each)
            weights.push()
            ends = comm.broadcast_object(all(Path(folder, name).exists() for name in until), 0)
        stats = weights.stats()
        weights.close()
        return {"version": version, "stats": stats}


# -- processes outside the job ----------------------------------------------------------------------------


def serves(folder: str, numel: int, count: int, name: str) -> dict[str, Any]:
    """Pull so many versions, and compare each; then say so."""
    state = zeros(numel)
    with mcr.join_sync(Path(folder, INVITATION), state) as weights:
        pulled, bad = [], 0
        for _ in range(count):
            pulled.append(weights.pull(timeout=60))
            bad += wrong(state, pulled[-1] or 0)
        stats = weights.stats()
    assert not mcr.is_initialized()
    come(folder, name)
    return {"pulled": pulled, "wrong": bad, "stats": stats}


def dies(folder: str, numel: int, pulls: int) -> None:
    """SIGKILL itself in the middle of a message with all weights, after so many versions."""
    fill, is_next = StreamConnection.fill, False

    def killed(self: StreamConnection, space: memoryview, *args: Any) -> None:
        if is_next and len(space) > 1 << 20:
            self._some(space[: 1 << 18])  # some of it has come
            os.kill(os.getpid(), signal.SIGKILL)
        fill(self, space, *args)

    StreamConnection.fill = killed  # type: ignore[assignment,method-assign]
    state = zeros(numel)
    is_next = not pulls
    weights = mcr.join_sync(Path(folder, INVITATION), state)
    for number in range(pulls):
        weights.pull(timeout=60)
        assert not wrong(state, weights.stats()["version"])
        if number == pulls - 1:  # what it holds is spoilt, so that the next message has all weights
            is_next = True
            with weights._end._holding:  # type: ignore[union-attr]
                for feed in weights._end._feeds:  # type: ignore[union-attr]
                    feed._digests = [0 for _ in feed._digests]
    while True:
        weights.pull(timeout=60)


def receives_damage(folder: str, numel: int, count: int, name: str) -> dict[str, Any]:
    """As `serves`; a bit of each third message changes after its signature has been checked."""
    received, number = SourceConnection._received, 0
    draw = np.random.default_rng(5)

    def damaged(self: SourceConnection, *args: Any) -> Any:
        nonlocal number
        kind, newest, parts, body = received(self, *args)
        number += 1
        if parts and number % 3 == 0:
            body[int(draw.integers(8 * parts, len(body)))] ^= 1 << int(draw.integers(8))
        return kind, newest, parts, body

    SourceConnection._received = damaged  # type: ignore[assignment,method-assign]
    return serves(folder, numel, count, name)


def serves_shards(folder: str, rank: int | None, count: int, name: str) -> dict[str, Any]:
    """As a rank of the job, by its layouts; None: with all of all tensors."""
    whole = {each: torch.zeros_like(value) for each, value in wholes(0).items()}
    state = whole if rank is None else {n: torch.zeros_like(v) for n, v in state_of(rank, 0).items()}
    layout = None if rank is None else layouts_of(rank)
    bad, version = 0, 0
    with mcr.join_sync(Path(folder, INVITATION), state, layout, rank=rank or 0) as weights:
        for _ in range(count):
            version = weights.pull(timeout=60) or 0
            if rank is not None:
                bad += not same(state, rank, version)
            else:
                bad += any(
                    not np.array_equal(state[each].view(torch.int16), expected.view(torch.int16))
                    for each, expected in wholes(version).items()
                )
        stats = weights.stats()
    come(folder, name)
    return {"wrong": bad, "stats": stats, "version": version}


def serves_splits(folder: str, rank: int | None, count: int, name: str) -> dict[str, Any]:
    """As a rank of the layouts that the job offers; None: with all of all tensors."""

    def expected(version: int) -> dict[str, Any]:
        return split_values(version) if rank is None else split_part(rank, version)

    state = {each: torch.zeros_like(torch.from_numpy(value.copy())) for each, value in expected(0).items()}
    layout = None if rank is None else split_layouts()
    refused, bad = "", 0
    with mcr.join_sync(Path(folder, INVITATION), state, layout, rank=rank or 0) as weights:
        if rank is not None:
            other = {**state, "w": torch.zeros(13, 5)}
            halves = {**split_layouts(), "w": mcr.Layout.sharded((13, 10), [0, 1], 1)}
            try:
                mcr.join_sync(Path(folder, INVITATION), other, halves, rank=rank)
            except mcr.InvalidArgument as error:
                refused = str(error)
        for _ in range(count):
            version = weights.pull(timeout=60) or 0
            bad += any(
                state[each].numpy().tobytes() != np.ascontiguousarray(value).tobytes()
                for each, value in expected(version).items()
            )
        stats = weights.stats()
    come(folder, name)
    return {"wrong": bad, "stats": stats, "refused": refused}


# -- in one process: a job of one rank, and receivers that join it ------------------------------------------


def churn(folder: str, count: int) -> dict[str, Any]:
    """Receivers come and go, some without a word; what is left of them at the source."""
    with mcr.init(backends=["gloo"]):
        state = {"w": torch.arange(1000.0)}
        weights = mcr.sync(state, src=0, invite=Path(folder, INVITATION))
        weights.push()
        source: Any = weights._end
        left: list[dict[str, int]] = []
        for number in range(count):
            target = {"w": torch.zeros(1000)}
            receiver = mcr.join_sync(Path(folder, INVITATION), target)
            assert receiver.pull(timeout=60) == 1
            assert torch.equal(target["w"], state["w"])
            if number % 2:
                end: Any = receiver._end
                for feed in end._feeds:
                    feed._link._socket.shutdown(2)  # as the end of a process does
                    feed._place = ("127.0.0.1", 1)  # it does not come back
            receiver.close()
            if number in (4, count - 1):
                deadline = time.monotonic() + 60
                while source._links and time.monotonic() < deadline:
                    time.sleep(0.01)
                for thread in source._acceptor.serving:
                    thread.join(60)
                left.append({
                    "links": len(source._links), "joined": len(source._joined), "lost": len(source._lost),
                    "threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")),
                })  # fmt: skip
        weights.push()  # nobody is there: no error
        stats = weights.stats()
        weights.close()
        return {"left": left, "stats": stats}


def in_inference_mode(folder: str) -> list[int]:
    """Both ends and their tensors are made in torch's inference mode or not, and used in the other one."""
    file = Path(folder, INVITATION)
    bad = []
    with mcr.init(backends=["gloo"]):
        for made, used in ((True, False), (True, True), (False, True)):
            with torch.inference_mode(made):
                state, target = values(0, SHORT), zeros(SHORT)
                weights = mcr.sync(state, src=0, invite=file)
                receiver = mcr.join_sync(file, target)
            for version in range(1, 5):
                with torch.inference_mode(used or made):
                    for name, each in values(version, SHORT).items():
                        state[name].copy_(each)
                with torch.inference_mode(used):
                    weights.push()
                    assert receiver.pull(timeout=60) == version
                bad.append(wrong(target, version))
            receiver.close()
            weights.close()
    return bad


def refusals(folder: str) -> dict[str, str]:
    """The texts of what is refused, by name."""
    texts: dict[str, str] = {}
    file, kept = Path(folder, INVITATION), Path(folder, "kept")

    def refused(name: str, call: Any) -> None:
        try:
            call()
            texts[name] = "accepted"
        except (mcr.McrError, ValueError) as error:
            texts[name] = f"{type(error).__name__}: {error}"

    def join(state: State | None = None, timeout: float = 0.5, **more: Any) -> None:
        own = {"a": torch.zeros(3), "b": torch.zeros(2, 2)} if state is None else state
        mcr.join_sync(file, own, timeout=timeout, **more).close()

    with mcr.init(backends=["gloo"]) as comm:
        rank = comm.rank
        state = {"a": torch.ones(3), "b": torch.ones(2, 2)}
        refused("other names", lambda: mcr.sync(state, invite=f"{folder}/{rank}"))
        refused("on one rank", lambda: mcr.sync(state, invite=file if rank else None))
        refused("no folder", lambda: mcr.sync(state, invite=f"{folder}/none/file"))
        refused("a folder", lambda: mcr.sync(state, invite=folder))
        refused("not a name", lambda: mcr.sync(state, invite=5))  # type: ignore[arg-type]
        halves = {"a": mcr.Layout.sharded((3,), [0, 1], 0)}

        def offered(name: str, offers: Any, **more: Any) -> None:
            refused(name, lambda: mcr.sync(state, **{"invite": file, "offers": offers, **more}))

        offered("offers without a file", {"x": halves}, invite=None)
        offered("offers of no layouts", {"x": {}})
        offered("offers of a layout", halves)
        offered("offers of addends", {"x": {"a": mcr.Layout.mesh((3,), [0, 1], ["P"])}})
        offered("offers of no tensor", {"x": {"z": halves["a"]}})
        offered("offers of another shape", {"x": {"b": halves["a"]}})
        short = mcr.Layout.sharded((2,), [0, 1], 0)  # a layout of complex numbers would be such
        offered("offers without the last dimension", {"x": {"b": short}})
        offered("offers on one rank", {"x": halves} if rank else None)
        rows = mcr.Layout.sharded((6, 4), [0, 1, 2], 0)  # of a larger job
        part = {"w": torch.zeros(rows.locals[rank])}
        refused("no offer", lambda: mcr.sync(part, src=[0, 1], layout={"w": rows}, invite=file))
        if rank == 0:
            refused("no file", join)
        weights = mcr.sync(state, src=0, invite=file)
        if rank == 0:
            weights.push()
            good = file.read_text()
            refused("accepted", join)
            refused("a shape", lambda: join({"a": torch.zeros(3), "b": torch.zeros(2, 3)}))
            refused("a dtype", lambda: join({"a": torch.zeros(3).half(), "b": torch.zeros(2, 2)}))
            refused("less", lambda: join({"a": torch.zeros(3)}))
            refused("more", lambda: join({**state, "c": torch.zeros(1)}))
            refused("timeout", lambda: join(timeout=-1))
            refused("rank", lambda: join(rank=-1))
            file.chmod(0o640)
            refused("mode", join)
            file.chmod(0o600)
            for name, text in {
                "truncated": good[: len(good) // 2],
                "format": good.replace('"format":1', '"format":2'),
                "a key more": good.replace('"format":1', '"format":1,"more":2'),
                "no port": good.replace('"port"', '"door"'),
                "corners": good.replace("[[3]]", "[[2]]"),
                "other tensors": good.replace('{"name":"a","corners"', '{"name":"z","corners"'),
                "empty": "",
                "a list": "[]",
            }.items():
                assert text != good
                file.write_text(text)
                refused(name, join)
            at = good.index('"key":"') + 7
            file.write_text(good[:at] + ("0" if good[at] != "0" else "1") + good[at + 1 :])
            refused("key", join)
            file.write_text(good)
            kept.write_text(good)
            kept.chmod(0o600)
        comm.barrier()
        weights.close()
        if rank == 0:
            assert not file.exists()
            kept.rename(file)
            refused("stale", join)
        return texts


def ends_and_begins_again(folder: str) -> dict[str, Any]:
    """The source closes, and begins again: a receiver that is told so joins again, by the new invitation."""
    file = Path(folder, INVITATION)
    with mcr.init(backends=["gloo"]):
        target = {"w": torch.zeros(5)}
        source = {"w": torch.ones(5)}
        weights = mcr.sync(source, invite=file)
        receiver = mcr.join_sync(file, target)
        deadline = time.monotonic() + 60
        while not weights.stats()["joined"] and time.monotonic() < deadline:
            time.sleep(0.01)
        weights.push()
        weights.close()  # waits until the receiver has the last version
        found = [receiver.pull(timeout=60), target["w"].tolist()]
        text = ""
        try:
            receiver.pull(timeout=60)
        except mcr.SyncClosed as error:
            text = str(error)
        with pytest.raises(mcr.SyncClosed):
            receiver.pull(wait=False)
        receiver.close()
        assert not file.exists()
        first = mcr.sync(source, tag="first", invite=file)
        second = mcr.sync({"w": torch.full((5,), 2.0)}, tag="second", invite=file)  # takes its place
        first.close()
        assert file.exists(), "it is no longer the first one's"
        with mcr.join_sync(file, target) as receiver:
            second.push()
            found += [receiver.pull(timeout=60), target["w"].tolist()]
        try:
            receiver.pull()
        except mcr.NotInitialized as error:
            text += str(error)
        return {"found": found, "text": text}
