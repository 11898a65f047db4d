"""Digests of operations, and `mcr-plus compare`: the first operation at which two runs part."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from command import mcr_plus
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import mcr_plus as mcr
from mcr_plus.reproducible.digest_file import INPUT, OUTPUT, load
from mcr_plus.reproducible.digests import digest_of

BIT = 1 << 20  # of a mantissa


def flip(values: torch.Tensor, at: int) -> None:
    values.detach().view(-1).view(torch.int32)[at] ^= BIT


def config(folder: str, library: str = "msccl", keep: str | None = None, **more: Any) -> Any:
    digests: Any = folder if keep is None else {"folder": folder, "keep": keep}
    return {"version": 1, "backends": [library], "observe": {"digests": digests}, **more}


def numbers(rank: int, size: int) -> torch.Tensor:
    rng = np.random.default_rng((rank, size))
    return torch.from_numpy(rng.standard_normal(size).astype(np.float32))


def compared(one: Path | str, other: Path | str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the document of the command."""
    answer = mcr_plus("compare", one, other, "--json")
    return answer.returncode, json.loads(answer.stdout)


def named(document: dict[str, Any]) -> tuple[Any, ...]:
    first = document["first"]
    return first["what"], first["stream"], first["number"], first["ranks"]


def program(folder: str, library: str, flips: bool, keep: str | None) -> None:
    """Issue operations in many manners; with `flips`, rank 1 changes the input of one of them."""
    pipeline = [{"fuse": {"bucket": "64KiB"}}, {"compress": {}}, {"select": {}}, {"dispatch": {}}]
    with mcr.init(config(folder, library, keep, pipeline=pipeline)) as comm:
        me, ranks = comm.rank, comm.size
        x, y = numbers(me, 5000), numbers(me, 1001)
        mcr.all_reduce(x)
        noise = torch.full((9,), time.time())  # a broadcast overwrites it
        mcr.broadcast(torch.ones(9) if me == 1 else noise, 1)
        mcr.all_gather_object(time.time())
        again = mcr.persistent("all_reduce", x, op="AVG")
        again()
        again.start().wait()
        works = [mcr.all_reduce(part, "AVG", async_op=True, tag="parts") for part in x.split(700)]
        for work in reversed(works):
            assert work is not None
            work.wait()
        mcr.all_reduce(x, "AVG", compress="bf16", tag="coded")
        group = mcr.new_group(list(range(ranks)))

        def beside() -> None:
            group.take_over()
            for _ in range(20):
                group.all_reduce(y, "AVG")

        thread = threading.Thread(target=beside)
        thread.start()
        for _ in range(20):
            mcr.all_reduce(x, "AVG", tag="beside")
        thread.join()
        if flips and me == 1:
            flip(y, 77)
        group.take_over()
        group.all_reduce(y, "AVG", tag="flipped")
        sent = mcr.isend(y[:40], (me + 1) % ranks)
        mcr.recv(x[:40], (me - 1) % ranks)
        sent.wait()
        out = torch.empty(ranks * 5000)
        mcr.all_gather_into_tensor(out, x)
        mcr.reduce(out, 0)
        mcr.reduce_scatter_tensor(x, out)
        mcr.barrier()


def test_a_flipped_bit_and_another_order_of_additions_are_named(tmp_path: Path) -> None:
    one, same, other, gloo = (str(tmp_path / name) for name in ("one", "same", "other", "gloo"))
    run_ranks(program, 3, args=[one, "msccl", False, "group1#21"])
    run_ranks(program, 3, args=[same, "msccl", False, "world#1"])
    run_ranks(program, 3, args=[other, "msccl", True, "group1#20-22"])
    run_ranks(program, 3, args=[gloo, "gloo", False, "world#1"])

    # of each rank: 3 + 8 + 1 + 20 + 6 operations of all ranks but the object's, 21 of the group
    assert compared(one, same) == (0, {"same": True, "operations": 3 * 60, "notes": [], "first": None})
    status, found = compared(one, other)
    assert (status, named(found)) == (1, ("input", "group1", 21, [1]))
    (elements,) = found["first"]["elements"]
    assert (elements["rank"], elements["count"], elements["of"], elements["first"][0][0]) == (1, 1, 1001, 77)
    _, mine, theirs = elements["first"][0]
    assert abs(np.float32(mine).view(np.int32) ^ np.float32(theirs).view(np.int32)) == BIT
    lines = Path(__file__).read_text().splitlines()
    line = next(at for at, text in enumerate(lines, 1) if 'tag="flipped"' in text)
    assert found["first"]["operations"][0]["site"] == f"{__file__}:{line}, in program"
    said = mcr_plus("compare", one, other)
    assert said.stdout.startswith(
        "operation 21 of 'group1' (all_reduce AVG float32 tag=flipped, 1,001 elements)"
    )
    assert "1 of 1,001 elements of its input differ" in said.stdout

    status, found = compared(one, gloo)
    assert (status, named(found)) == (1, ("output", "world", 1, [0, 1, 2]))
    assert [each["how"] for each in found["first"]["operations"]] == ["msccl", "gloo"]
    answer = mcr_plus("compare", one, gloo, "--keep", 3).stderr
    assert "not both runs have kept its elements: repeat them with observe: {digests: {folder:" in answer
    assert "keep: 'world#1'" in answer
    for words, most in (((), 8), (("--keep", 3), 3)):
        found = json.loads(mcr_plus("compare", same, gloo, "--json", *words).stdout)["first"]["elements"]
        assert [(each["rank"], each["of"], len(each["first"])) for each in found] == [
            (rank, 5000, most) for rank in range(3)
        ]


def of(values: torch.Tensor) -> int:
    """Digest values that the program holds; `unit/test_digests.py` compares this with integers of Python."""
    return digest_of(values.detach().contiguous())


def in_all_manners(folder: str) -> list[Any]:
    """Issue operations; return for each the digests of what the program passed and got, None for neither."""
    pipeline = [{"fuse": {"bucket": "64KiB"}}, {"hierarchical": {"ranks_per_node": 2}}, {"compress": {}},
                {"select": {}}, {"dispatch": {}}]  # fmt: skip
    seen: list[list[int | None]] = []
    with mcr.init(config(folder, pipeline=pipeline)) as comm:
        me, ranks = comm.rank, comm.size
        waiting: list[tuple[Any, list[int | None], torch.Tensor]] = []
        lengths = [100 * (rank + 1) for rank in range(ranks)]

        def issue(call: Any, given: torch.Tensor | None, result: torch.Tensor | None, **options: Any) -> None:
            row = [None if given is None else of(given), None]
            seen.append(row)
            work = call(**options)
            if work is not None:
                waiting.append((work, row, result))  # type: ignore[arg-type]
            elif result is not None:
                row[1] = of(result)

        for turn in range(3):
            x, out = numbers(me + 10 * turn, 3000), torch.empty(3000 * ranks)
            for options in ({}, {"async_op": True}, {"compress": "int8_block"}, {"tag": "named"}):
                y = x.clone()
                issue(lambda y=y, **more: mcr.all_reduce(y, "AVG", **more), y, y, **options)
            for work, row, result in waiting:
                work.wait()
                row[1] = of(result)
            waiting.clear()
            strided = numbers(me, 600).view(20, 30).t()
            issue(lambda x=strided: mcr.all_reduce(x), strided, strided)
            issue(lambda x=x: mcr.broadcast(x, 1), x if me == 1 else None, x)
            issue(lambda x=x: mcr.reduce(x, 0), x, x if me == 0 else None)
            x = numbers(me, 3000)
            issue(lambda x=x, out=out: mcr.all_gather_into_tensor(out, x), x, out)
            issue(lambda x=x, out=out: mcr.reduce_scatter_tensor(x, out), out, x)
            parts = list(out.split(3000))
            issue(
                lambda x=x, parts=parts: mcr.scatter(x, parts if me == 0 else None, 0),
                out if me == 0 else None,
                x,
            )
            own, gathered = x[: lengths[me]], torch.empty(sum(lengths))
            issue(lambda own=own, to=gathered: mcr.all_gather_v(list(to.split(lengths)), own), own, gathered)
            mcr.all_gather_object([me])
            assert mcr.broadcast_object([turn] if me == 0 else None, 0) == [turn]
            if me < 2:
                seen.append([of(x[:70]), None])
                sent = mcr.isend(x[:70], 1 - me)
                issue(lambda x=x: mcr.recv(x[-70:], 1 - me), None, x[-70:])
                sent.wait()
            again = mcr.persistent("all_reduce", x, op="AVG", tag="again")
            for _ in range(2):
                issue(again, x, x)
            row = [of(x), None]
            seen.append(row)
            again.start().wait()
            row[1] = of(x)
            issue(mcr.barrier, None, None)
    return seen


def test_digests_are_of_what_the_program_passes_and_gets(tmp_path: Path) -> None:
    for result in run_ranks(in_all_manners, 4, args=[str(tmp_path)]):
        found = load(tmp_path / f"job0-epoch0-rank{result.rank}.digests")
        assert found.ended
        rows = [
            [
                int(row[name]) if row["flags"] & flag else None
                for name, flag in (("input", INPUT), ("output", OUTPUT))
            ]
            for row in found.rows
        ]
        texts = [found.calls[row["call"]].text for row in found.rows]
        for number, (mine, theirs) in enumerate(zip(rows, result.value, strict=True)):
            assert mine == theirs, (number, texts[number])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 8))


def steps(net: nn.Module, optimizer: Any, rank: int, flips: bool) -> None:
    for step in range(4):
        if flips and step == 2 and rank == 1:
            first: Any = next(net.parameters())
            flip(first.to_local() if hasattr(first, "to_local") else first, 5)
        optimizer.zero_grad()
        net(numbers(10 * step + rank, 30 * 6).view(6, 30)).square().mean().backward()
        optimizer.step()


def training(folder: str, way: str, flips: bool, bucket: str, sums: str) -> None:
    pipeline = [{"fuse": {"bucket": bucket, "first_bucket": bucket}}, {"select": {}}, {"dispatch": {}}]
    settings = config(folder, pipeline=pipeline, numerics={"sums": sums})
    if way == "wrap":
        with mcr.init(settings) as comm:
            net = model()
            net, optimizer = mcr.wrap(net, torch.optim.SGD(net.parameters(), 0.1))
            steps(net, optimizer, comm.rank, flips)
            mcr.all_reduce(torch.stack([each.detach().sum() for each in net.parameters()]), tag="check")
        return
    dist.init_process_group("mcr", pg_options=settings)
    wrapped: Any = fully_shard if way == "fsdp" else nn.parallel.DistributedDataParallel
    net = wrapped(model())
    steps(net, torch.optim.SGD(net.parameters(), 0.1), dist.get_rank(), flips)
    dist.destroy_process_group()


@pytest.mark.long
def test_training_by_wrap_ddp_and_fsdp(tmp_path: Path) -> None:
    for way in ("wrap", "ddp", "fsdp"):
        folders = [str(tmp_path / f"{way}{number}") for number in range(3)]
        for folder, flips in zip(folders, (False, False, True), strict=True):
            run_ranks(training, 2, args=[folder, way, flips, "25MiB", "fast"], via="torch")
        status, found = compared(folders[0], folders[1])
        assert (status, found["notes"]) == (0, []), way
        assert found["operations"] >= 2 * 8, way
        status, found = compared(folders[0], folders[2])
        # FSDP gathers the changed parameter; the others show it in the gradients.
        assert (status, found["first"]["what"], found["first"]["ranks"]) == (1, "input", [1]), way
        kind = "all_gather" if way == "fsdp" else "all_reduce"
        assert kind in found["first"]["operations"][0]["text"], way
        assert "in steps" in found["first"]["operations"][0]["site"], way


def test_other_buckets_are_noted_and_the_rest_is_compared(tmp_path: Path) -> None:
    one, other, flipped = (str(tmp_path / name) for name in ("one", "other", "flipped"))
    run_ranks(training, 2, args=[one, "wrap", False, "25MiB", "fixed"], via="torch")
    run_ranks(training, 2, args=[other, "wrap", False, "1KiB", "fixed"], via="torch")
    run_ranks(training, 2, args=[flipped, "wrap", True, "1KiB", "fixed"], via="torch")
    status, found = compared(one, other)
    assert (status, len(found["notes"])) == (0, 1)
    assert found["notes"][0].startswith("ranks 0, 1: other buckets, not compared from operation 1 of ")
    status, found = compared(one, flipped)
    assert (status, named(found)[0], named(found)[1]) == (1, "input", "world")
    assert "tag=check" in found["first"]["operations"][0]["text"]


def of_any_size(folder: str, other: bool) -> None:
    """Sum the same addends over the ranks, however they are distributed; then leave the common way."""
    with mcr.init(config(folder, numerics={"sums": "exact"})) as comm:
        mine = [leaf for leaf in range(6) if leaf % comm.size == comm.rank]
        for number in range(5):
            x = sum((numbers(leaf, 300) * 64).round() for leaf in mine) + number
            assert isinstance(x, torch.Tensor)
            mcr.all_reduce(x - number)
            mcr.all_gather_into_tensor(torch.empty(300 * comm.size), x)
        if other:
            mcr.all_reduce(torch.ones(4), "MAX")
        else:
            mcr.all_reduce(torch.ones(5), "MAX")
            mcr.barrier()


def test_runs_of_other_sizes_and_other_programs(tmp_path: Path) -> None:
    two, three, other = (str(tmp_path / name) for name in ("two", "three", "other"))
    run_ranks(of_any_size, 2, args=[two, False])
    run_ranks(of_any_size, 3, args=[three, False])
    run_ranks(of_any_size, 2, args=[other, True])
    status, found = compared(two, three)
    assert (status, found["operations"]) == (0, 2 * 12)
    (note,) = found["notes"]
    assert note == "2 ranks in A, 3 in B: in groups of other sizes only all_reduce and broadcast are compared"
    status, found = compared(two, other)
    assert (status, named(found)) == (1, ("call", "world", 11, [0, 1]))
    for path in Path(two).iterdir():  # as if run B had ended before
        content = path.read_bytes()
        (Path(other) / path.name).write_bytes(content[:-8])
    assert compared(two, other)[1]["notes"] == ["ranks 0, 1: run B was killed, or goes on"]
    Path(other, "job0-epoch0-rank0.digests").unlink()
    assert compared(two, other)[1]["notes"][0] == "rank 1: run B was killed, or goes on"
    assert compared(two, other)[1]["notes"][1] == "rank 0: no file in run B"
    Path(other, "job0-epoch0-rank0.digests").write_bytes(
        Path(three, "job0-epoch0-rank0.digests").read_bytes()
    )
    answer = mcr_plus("compare", two, other)
    assert answer.returncode == 2
    assert f"{other}: of an earlier run: job0-epoch0-rank1.digests; each run needs a folder" in answer.stderr


def losing(folder: str, flips: bool) -> None:
    """Lose rank 2, whose last second is not in its file, and go on without it."""
    pipeline = [{"select": {}}, {"dispatch": {"timeout": "30s"}}]
    comm = mcr.init(config(folder, pipeline=pipeline))
    rank = comm.rank
    for number in range(6):
        comm.all_reduce(numbers(rank, 100) + number)
        if number == 2:
            time.sleep(1.2)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            comm.all_reduce(torch.ones(8))
    except mcr.PeerLost:
        comm = mcr.shrink()
    for number in range(4):
        x = numbers(rank, 50) + number
        if flips and number == 2 and rank == 1:
            flip(x, 3)
        comm.all_reduce(x)
    mcr.finalize()


@pytest.mark.long
def test_worlds_after_a_loss_are_compared_one_by_one(tmp_path: Path) -> None:
    one, same, other = (str(tmp_path / name) for name in ("one", "same", "other"))
    for folder, flips in ((one, False), (same, False), (other, True)):
        run_ranks(losing, 3, args=[folder, flips], via="torch", check=False)
    status, found = compared(one, same)
    assert status == 0
    assert found["notes"] == [f"rank 2: run {run} was killed, or goes on" for run in "AB"]
    assert found["operations"] == 2 * (6 + 1 + 4) + 4
    status, found = compared(one, other)
    assert (status, named(found), found["first"]["world"]) == (1, ("input", "world", 3, [1]), [0, 1])


def full_disk(folder: str) -> list[bool]:
    """Limit the size of files, as a full disk does; return whether the results are right."""
    with mcr.init(config(folder)) as comm:
        right = []
        for number in range(3000):
            if number == 500:
                comm.barrier()
                resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
            x = torch.full((10,), float(number))
            comm.all_reduce(x)
            right.append(bool(x.eq(number * comm.size).all()))
            if number % 1000 == 0:
                time.sleep(1.1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return [all(right)]


@pytest.mark.long
def test_a_full_disk_ends_the_digests_but_not_the_job(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    results = run_ranks(full_disk, 2, args=[str(folder)])
    for result in results:
        assert result.value == [True]
        assert result.stderr.count("the file has no more digests, and the job goes on") == 1
        assert "File too large" in result.stderr
    shutil.copytree(folder, copy)
    status, found = compared(folder, copy)
    assert (status, found["same"]) == (0, True)
    assert 0 < found["operations"] < 2 * 3000
    assert mcr_plus("compare", folder, folder).returncode == 2
