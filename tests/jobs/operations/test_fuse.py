"""The fuse stage on real ranks: fused operations, the times of sending, and the receivers of errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from command import mcr_plus
from ranks import has_come, run_ranks, wait_for_ranks

import mcr_plus as mcr
from mcr_plus.config.reader import load
from mcr_plus.core.message import Signature
from mcr_plus.engine.group_runtime import GroupRuntime
from mcr_plus.errors import ConfigError
from mcr_plus.fusion.options import FuseOptions
from mcr_plus.pipeline.dispatch import DispatchStage
from mcr_plus.pipeline.stage import Issue
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
KINDS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]


def config(backend: str, *stages: dict[str, Any], timeout: str = "30s", **fuse: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "backends": [backend],
        "pipeline": [
            {"fuse": {"kinds": KINDS, **fuse}}, *stages, {"select": {}}, {"dispatch": {"timeout": timeout}}
        ],
    }  # fmt: skip


def values(rank: int, index: int, numel: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the input of rank `rank` to operation `index`: small integers, exact in every dtype."""
    return (np.arange(numel) * 3 + 5 * index + 2 * rank) % 7


def given(rank: int, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values(rank, index, numel)).to(dtype)


def expected(kind: str, rank: int, ranks: int, index: int, numel: int) -> Any:
    """Return NumPy's result from the definition; `numel`: the elements of one rank's part."""
    total = numel * ranks if kind in ("reduce_scatter", "all_to_all") else numel
    inputs = [values(r, index, total) for r in range(ranks)]
    part = slice(rank * numel, (rank + 1) * numel)
    return {
        "all_reduce": np.sum(inputs, axis=0),
        "broadcast": inputs[1],
        "all_gather": np.concatenate(inputs),
        "reduce_scatter": np.sum(inputs, axis=0)[part],
        "all_to_all": np.concatenate([each[part] for each in inputs]),
    }[kind]


def start(comm: mcr.Communicator, kind: str, index: int, numel: int, dtype: torch.dtype) -> Any:
    """Issue operation `index` of a kind; the handle and the tensor with its result."""
    n, rank = comm.size, comm.rank
    if kind == "all_reduce":
        x = given(rank, index, numel, dtype)
        return comm.all_reduce(x, async_op=True), x
    if kind == "broadcast":
        x = given(rank, index, numel, dtype)
        return comm.broadcast(x, 1, async_op=True), x
    if kind == "all_gather":
        out = torch.zeros(n * numel, dtype=dtype)
        return comm.all_gather_into_tensor(out, given(rank, index, numel, dtype), async_op=True), out
    if kind == "reduce_scatter":
        out = torch.zeros(numel, dtype=dtype)
        return comm.reduce_scatter_tensor(out, given(rank, index, n * numel, dtype), async_op=True), out
    out = torch.zeros(n * numel, dtype=dtype)
    return comm.all_to_all_single(out, given(rank, index, n * numel, dtype), async_op=True), out


def everything(backend: str) -> list[str]:
    """Run on ranks, with many operations of all kinds and some dtypes in flight; return the failures."""
    problems = []
    with mcr.init(config(backend, bucket="4KiB", first_bucket="1500")) as comm:
        started = []
        for index in range(60):
            kind = KINDS[index % 5]
            numel = (index * 7) % 41 + 1
            dtype = (torch.bfloat16, torch.int64)[index // 5 % 2]
            started.append((kind, index, numel, start(comm, kind, index, numel, dtype)))
            if index == 33:
                mcr.flush()
        order = range(len(started)) if comm.rank % 2 else reversed(range(len(started)))
        for place in order:  # ranks wait in different orders
            kind, index, numel, (work, out) = started[place]
            work.wait()
            wanted = expected(kind, comm.rank, comm.size, index, numel)
            if not np.array_equal(out.to(torch.int64).numpy(), wanted):
                problems.append(f"{kind} {index} {numel}: {out.tolist()} instead of {wanted.tolist()}")
            if not (work.is_completed() and work.exception() is None):
                problems.append(f"{kind} {index}: not completed after its wait")
        fused = [work.info.fused for _, _, _, (work, _) in started]
        if max(fused) < 3:
            problems.append(f"nothing was fused: {fused}")
    return problems


@pytest.mark.short("2-mpi")
@pytest.mark.parametrize("backend", [pytest.param("mpi", marks=needs_mpi), "gloo"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_kinds_fused_in_flight_give_correct_results(backend: str, ranks: int) -> None:
    for result in run_ranks(everything, ranks, args=[backend], via="mpi" if backend == "mpi" else "torch"):
        assert result.value == []


# -- when a bucket is sent ------------------------------------------------------------------------


def counted(records: Any) -> list[tuple[str, int, int]]:
    ordered = sorted(records, key=lambda record: record.sequence)
    return [(record.kind, record.bytes, record.fused) for record in ordered if record.kind != "barrier"]


def when() -> dict[str, Any]:  # noqa: C901 - a list of cases
    """Run on ranks; return the operations that each event of the program sends."""
    found: dict[str, Any] = {}
    with mcr.init(config("gloo", bucket="128", first_bucket="64")) as comm:

        def ones(*sizes: int) -> list[Any]:
            return [comm.all_reduce(torch.ones(size // 4), async_op=True) for size in sizes]

        def sent(step: Callable[[], Any]) -> None:
            """Return the operations issued by the end of `step`, and in the end."""
            with mcr.record() as log:
                kept = step()
                mcr.barrier()  # not fused, and does not send the held operations
                mcr.flush()
                for work in kept:
                    work.wait()
            barrier = next(record.sequence for record in log.records if record.kind == "barrier")
            before = [record for record in log.records if record.sequence < barrier]
            found[step.__name__] = (counted(before), counted(log.records))

        def held() -> list[Any]:
            return ones(16, 16, 16)

        def full() -> list[Any]:
            works = ones(32, 32)  # exactly the first bucket
            works[0].wait()
            return works

        def no_room() -> list[Any]:
            works = ones(40, 40, 40, 40)  # 40, then a bucket of 128
            for work in works[:1]:
                work.wait()
            return works

        def asked() -> list[Any]:
            works = ones(16, 16)
            while not works[1].is_completed():
                pass
            return works

        def too_large() -> list[Any]:
            works = ones(16, 256)
            works[1].wait()
            return works

        def as_large_as_a_bucket() -> list[Any]:
            works = ones(16, 128)
            works[1].wait()
            return works

        def apart() -> list[Any]:
            works: list[Any] = [
                comm.all_reduce(torch.ones(2), async_op=True),
                comm.all_reduce(torch.ones(2, dtype=torch.int32), async_op=True),
                comm.all_reduce(torch.ones(2), mcr.MAX, async_op=True),
                comm.all_reduce(torch.ones(2), async_op=True, tag="other"),
                comm.broadcast(torch.ones(2), 0, async_op=True),
                comm.broadcast(torch.ones(2), 1, async_op=True),
                comm.all_reduce(torch.ones(2), async_op=True),
            ]
            works[-1].wait()
            return works

        for step in (held, full, no_room, asked, too_large, as_large_as_a_bucket, apart):
            sent(step)
        synchronous = torch.full((4,), comm.rank + 1.0)
        with mcr.record() as log:
            waiting = ones(16)
            comm.all_reduce(synchronous)
            found["synchronous"] = (counted(log.records), synchronous.tolist())
            waiting[0].wait()
        last = torch.full((3,), comm.rank + 1.0)
        comm.all_reduce(last, async_op=True)
    found["at the end"] = last.tolist()
    return found


def test_events_that_send_a_bucket() -> None:
    for result in run_ranks(when, 2, via="torch"):
        found = result.value
        both = [["all_reduce", 48, 3]]
        assert found["held"] == [[], both]
        assert found["full"] == [[["all_reduce", 64, 2]]] * 2
        assert found["no_room"] == [[["all_reduce", 40, 1]], [["all_reduce", 40, 1], ["all_reduce", 120, 3]]]
        assert found["asked"] == [[["all_reduce", 32, 2]]] * 2
        for step, size in (("too_large", 256), ("as_large_as_a_bucket", 128)):
            alone = ["all_reduce", size, 1]
            assert found[step] == [[alone], [alone, ["all_reduce", 16, 1]]]
        apart = [["all_reduce", 16, 2], *[["all_reduce", 8, 1]] * 3, *[["broadcast", 8, 1]] * 2]
        assert found["apart"] == [apart] * 2
        assert found["synchronous"] == [[["all_reduce", 16, 1]], [3.0] * 4]
        assert found["at the end"] == [3.0] * 3


def order_of_buckets(order: str) -> list[str]:
    """Run on ranks; return the order in which open buckets are sent, however ranks wait."""
    with mcr.init(config("gloo", order=order)) as comm, mcr.record() as log:
        works: list[Any] = [
            comm.all_reduce(torch.ones(2), async_op=True, tag="first"),
            comm.all_reduce(torch.ones(2, dtype=torch.int64), async_op=True, tag="second"),
            comm.broadcast(torch.ones(2), 0, async_op=True, tag="third"),
            comm.all_reduce(torch.ones(2), async_op=True, tag="first"),
        ]
        for work in works if comm.rank else reversed(works):
            work.wait()
        records = sorted(log.records, key=lambda record: record.sequence)
        return [record.tag or "" for record in records]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("ready", ["first", "second", "third"]), ("priority", ["third", "second", "first"])],
)
def test_order_option_determines_the_order_of_buckets(order: str, expected: list[str]) -> None:
    for result in run_ranks(order_of_buckets, 2, args=[order], via="torch"):
        assert result.value == expected


def other_way_round() -> list[float]:
    """Run on ranks: rank 1 waits and then sends, rank 0 receives and then waits."""
    with mcr.init(config("gloo")) as comm:
        x, y = torch.full((5,), comm.rank + 1.0), torch.full((3,), 7.0 * comm.rank)
        work = comm.all_reduce(x, async_op=True)
        more = comm.all_reduce(x.clone(), async_op=True)
        assert work is not None
        assert more is not None
        if comm.rank == 0:
            comm.recv(y, 1)
            work.wait()
        else:
            work.wait()
            comm.send(y, 0)
        more.wait()
        return [*x.tolist(), *y.tolist()]


def test_buckets_of_a_waiting_peer_are_sent() -> None:
    for result in run_ranks(other_way_round, 2, via="torch"):
        assert result.value == [3.0] * 5 + [7.0] * 3


def bound_at_the_same_places(codec: str | None) -> list[Any]:
    """Run on ranks: the same, many times with new sizes, while groups remember few signatures."""
    bound = []
    bind = DispatchStage._bind

    def noted(stage: DispatchStage, signature: Signature, runtime: GroupRuntime) -> Issue:
        if not signature.is_p2p:
            bound.append([runtime.bound, signature.describe()])
        return bind(stage, signature, runtime)

    more = [] if codec is None else [{"compress": {"codec": codec}}]
    longer = 1 if codec != "int8_block" else 600  # so that it is used
    with (
        mock.patch.object(DispatchStage, "_bind", noted),
        mock.patch("mcr_plus.engine.group_runtime.SIGNATURES", 7),
        mcr.init(config("gloo", *more)) as comm,
    ):
        for numel in [*range(1, 30), *range(1, 30)]:
            tensors = [torch.full((longer * numel + many,), comm.rank + 1.0) for many in range(1 + numel % 3)]
            y = torch.full((3,), 7.0 * comm.rank)
            works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
            if comm.rank == 0:
                comm.recv(y, 1)
            for work in works:
                assert work is not None
                work.wait()
            if comm.rank == 1:
                comm.send(y, 0)
            assert all(tensor.tolist() == [3.0] * tensor.numel() for tensor in tensors)
            assert y.tolist() == [7.0] * 3
    return bound


@pytest.mark.long
@pytest.mark.parametrize("codec", [None, "bf16", "int8_block"])
def test_lookup_of_a_peers_buckets_binds_nothing(codec: str | None) -> None:
    first, second = run_ranks(bound_at_the_same_places, 2, args=[codec], via="torch")
    assert first.value == second.value
    assert len(first.value) > 50


def only_what_is_needed() -> list[Any]:
    """Run on ranks: the same, while rank 0 also holds operations that its peer has not issued yet."""
    with mcr.init(config("gloo")) as comm:
        x, y, z = torch.full((5,), comm.rank + 1.0), torch.zeros(3), torch.ones(2, dtype=torch.int64)
        works: list[Any] = [comm.all_reduce(x, async_op=True)]
        if comm.rank == 0:
            works.append(comm.all_reduce(z, async_op=True))
            comm.recv(y, 1)
        else:
            works[0].wait()
            comm.send(y, 0)
            works.append(comm.all_reduce(z, async_op=True))
        works.append(comm.all_reduce(z.clone(), async_op=True))
        for work in works:
            work.wait()
        return [x.tolist(), z.tolist(), works[1].info.fused]


def test_flush_for_a_waiting_peer_sends_only_its_buckets() -> None:
    for result in run_ranks(only_what_is_needed, 2, via="torch"):
        assert result.value == [[3.0] * 5, [2, 2], 2]


def different_places() -> str:
    """Run on ranks: one waits between two operations, the other after them."""
    with mcr.init(config("gloo")) as comm:
        first = comm.all_reduce(torch.ones(4), async_op=True)
        assert first is not None
        try:
            if comm.rank == 0:
                first.wait()
            second = comm.all_reduce(torch.ones(4), async_op=True)
            assert second is not None
            second.wait()
        except mcr.OrderMismatch as error:
            return str(error)
    return "nothing"


def test_waiting_at_different_places_is_a_mismatch() -> None:
    for result in run_ranks(different_places, 2, via="torch"):
        assert "float32[4]" in result.value
        assert "float32[8]" in result.value


def members_swapped(numels: list[list[int]]) -> str:
    """Run on ranks: each rank has the same number of elements in its bucket, of other tensors."""
    with mcr.init(config("gloo")) as comm:
        for own in (*numels, numels[comm.rank]):
            works = [comm.all_reduce(torch.ones(numel), async_op=True) for numel in own]
            try:
                for work in works:
                    assert work is not None
                    work.wait()
            except mcr.OrderMismatch as error:
                return str(error)
    return "nothing"


@pytest.mark.parametrize("numels", [[[4, 8], [8, 4]], [[6, 6], [4, 8]], [[1] * 40, [2] * 20]])
def test_buckets_of_other_members_are_a_mismatch(numels: list[list[int]]) -> None:
    for result in run_ranks(members_swapped, 2, args=[numels], via="torch"):
        for own in numels:
            assert ("+".join(map(str, own)) if len(own) == 2 else f"{len(own)} tensors") in result.value


# -- handles --------------------------------------------------------------------------------------


def lonely() -> list[str]:
    """Run on ranks: rank 1 never joins; every member of rank 0's buckets must say so."""
    with mcr.init(config("gloo", timeout="1s")) as comm:
        found = []
        if comm.rank == 0:
            works = [comm.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
            works.append(comm.broadcast(torch.ones(3), 0, async_op=True))
            for work in works:
                assert work is not None
                try:
                    work.wait()
                except mcr.McrError as error:
                    found.append(f"{type(error).__name__}: {error}")
                assert work.is_completed()
                assert work.exception() is not None
            has_come("told")
        else:
            wait_for_ranks("told", 1)
        return found


def test_errors_reach_every_member() -> None:
    told = run_ranks(lonely, 2, via="torch")[0].value
    assert len(told) == 4
    assert len(set(told[:3])) == 1
    assert told[0].startswith("CommTimeout")
    assert "all_reduce SUM float32[9]" in told[0]


def stretched() -> list[Any]:
    """Run on ranks: tensors that are not contiguous, of no dimension, and of no elements."""
    with mcr.init(config("gloo", {"compress": {"codec": "bf16"}})) as comm:
        grid = torch.full((4, 6), float(comm.rank + 1))
        scalar, nothing = torch.tensor(2.0), torch.empty(0)
        kept = grid.clone()
        works = [comm.all_reduce(x, async_op=True) for x in (grid[:, ::2], grid.t()[1], scalar, nothing)]
        for work in works:
            assert work is not None
            work.wait()
        untouched = torch.equal(grid[:, 3::2], kept[:, 3::2])
        info = works[0].info  # type: ignore[union-attr]
        return [
            grid[:, ::2].unique().tolist(),
            grid[:, 1].tolist(),
            scalar.item(),
            untouched,
            info.codec,
            info.fused,
        ]


def test_odd_tensors_and_a_codec() -> None:
    for result in run_ranks(stretched, 2, via="torch"):
        assert result.value == [[3.0], [3.0] * 4, 4.0, True, "bf16", 3]


def steady() -> list[list[int]]:
    """Run on ranks; return, for some steps, the buffers' memory before and after, and the allocated bytes."""
    with mcr.init(config("gloo", bucket="64KiB", first_bucket="16KiB", memory="256KiB")) as comm:
        tensors = [torch.ones(n) for n in (100, 1000, 3000, 5000, 7000, 400)]
        found = []
        for _ in range(9):
            before = comm.buffer_bytes
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as profile:
                works = [comm.all_reduce(tensor, mcr.MAX, async_op=True) for tensor in tensors]
                for work in works:
                    assert work is not None
                    work.wait()
            events = [event for event in profile.events() or () if event.name == "[memory]"]
            allocated = sum(max(0, event.cpu_memory_usage) for event in events)
            found.append([before, comm.buffer_bytes, allocated])
        return found


def test_nothing_is_allocated_in_the_long_run() -> None:
    for result in run_ranks(steady, 2, via="torch"):
        grown = [after > before for before, after, _ in result.value]
        # The later a peer is, the more buffers are in use at once, up to the limit.
        assert grown[0]
        assert sum(grown) <= 256 // 64
        for before, after, allocated in result.value[1:]:
            assert before <= after <= 256 << 10
            assert allocated == 0 or after > before


def unwaited() -> list[list[int]]:
    """Run on ranks; return the members of operations while no rank waits, and after that."""
    with mcr.init(config("gloo", bucket="64", first_bucket="64", memory="128")) as comm:
        found = []
        for _ in range(2):
            works = [comm.all_reduce(torch.ones(4), async_op=True) for _ in range(11)]
            for work in works:
                assert work is not None
                work.wait()
            found.append([work.info.fused for work in works if work is not None])
        return found


def test_operations_without_a_wait_are_sent_separately_beyond_the_memory_limit() -> None:
    for result in run_ranks(unwaited, 2, via="torch"):
        assert result.value == [[4] * 8 + [1] * 3] * 2


def other_thread() -> str:
    """Run on ranks: a second thread may not add to the buckets of the first."""
    with mcr.init(config("gloo")) as comm:
        told: list[str] = []

        def use() -> None:
            try:
                comm.all_reduce(torch.ones(1), async_op=True)
            except mcr.OrderMismatch as error:
                told.append(str(error))

        thread = threading.Thread(target=use, name="second")
        thread.start()
        thread.join()
        return told[0]


def test_another_thread_is_refused() -> None:
    for result in run_ranks(other_thread, 2, via="torch"):
        assert "'second'" in result.value


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("{kinds: [all_reduce, gather]}", "unknown kind 'gather'; known: all_reduce, broadcast"),
        ("{kinds: 3}", "expected a list of kinds"),
        ("{bucket: 0}", "bucket"),
        ("{bucket: 25MB5}", "bucket"),
        ("{first_bucket: -1}", "first_bucket"),
        ("{timer: 5ms}", "unknown key 'timer'; known: bucket, codecs, first_bucket, kinds"),
    ],
)
def test_wrong_options_are_refused_with_their_place(tmp_path: Any, options: str, told: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"version: 1\npipeline:\n  - fuse: {options}\n  - select: {{}}\n  - dispatch: {{}}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert f"{path}:3: pipeline[0].fuse" in str(caught.value)
    assert told in str(caught.value)


def test_a_rule_switches_off() -> None:
    for result in run_ranks(by_rule, 2, via="torch"):
        assert result.value == [["left", 8, 1], ["left", 8, 1], ["", 16, 2]]


def by_rule() -> list[Any]:
    """Run on ranks: operations of one tag are left alone."""
    rules = [{"match": {"tag": "left"}, "fuse": {"kinds": []}}]
    with mcr.init({**config("gloo"), "rules": rules}) as comm, mcr.record() as log:
        works = [comm.all_reduce(torch.ones(2), async_op=True, tag=tag) for tag in ("left", None) * 2]
        for work in works:
            assert work is not None
            work.wait()
        records = sorted(log.records, key=lambda record: record.sequence)
        return [(record.tag or "", record.bytes, record.fused) for record in records]


def test_defaults_and_names() -> None:
    plain = FuseOptions()
    assert (plain.bucket, plain.first_bucket, plain.kinds) == (25 << 20, 1 << 20, ("all_reduce",))
    assert FuseOptions.model_validate({"kinds": "all_to_all_single"}).kinds == ("all_to_all",)


def test_explain_names_fused_operations(tmp_path: Any) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\npipeline:\n  - fuse: {bucket: 1MiB}\n  - select: {}\n  - dispatch: {}\n")
    for words, told in (
        (["4KiB", "--async"], "fused with operations that differ only in size, not in tag, up to 1MiB"),
        (["4KiB"], "not fused: it is waited for at once"),
        (["1020KiB", "--async"], "fused with operations that differ only in size, not in tag, up to 1MiB"),
        (["1MiB", "--async"], "not fused: it fills a bucket of 1MiB by itself"),
    ):
        answer = mcr_plus("explain", "all_reduce", *words, "--ranks", "2", "--config", str(path))
        assert answer.returncode == 0, answer.stderr
        assert told in answer.stdout
