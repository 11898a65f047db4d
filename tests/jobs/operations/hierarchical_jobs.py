"""Programs of the tests of the hierarchical stage: results against oracles, records, failures."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

import mcr_plus as mcr
from mcr_plus.backends.shm import segment
from mcr_plus.communicator.costs import expected_us
from mcr_plus.core.kinds import ARITHMETIC, REDUCE_OPS, REDUCIBLE, ReduceOp
from mcr_plus.hierarchy.options import HIERARCHICAL
from mcr_plus.job import init as runtime
from mcr_plus.observe.record import Log

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("", "support"))  # of a program

from ranks import has_come, meet, wait_for_ranks
from reference import Failures, difference, inputs, reduced, rough, sum_bound, unit_roundoff, wide

SIZES: Final = (0, 1, 3, 4, 1031)
A_FEW: Final = (torch.float32, torch.bfloat16, torch.int64)
Dtypes = Sequence[torch.dtype]
Program = Callable[[mcr.Communicator], None]


def config(
    *, backends: Sequence[str] = ("gloo",), dispatch: dict[str, Any] | None = None,
    compress: dict[str, Any] | None = None, fuse: dict[str, Any] | None = None, **hierarchical: Any,
) -> dict[str, Any]:  # fmt: skip
    stages = [
        {"hierarchical": {"kinds": list(HIERARCHICAL), "min": 0, **hierarchical}},
        {"compress": compress or {}},
        {"select": {}},
        {"dispatch": {"timeout": "30s", **(dispatch or {})}},
    ]
    first = [] if fuse is None else [{"fuse": fuse}]
    return {"version": 1, "backends": list(backends), "pipeline": [*first, *stages]}


def tensor(rank: int, dtype: torch.dtype, count: int, salt: int, *, product: bool = False) -> torch.Tensor:
    return torch.tensor(inputs(dtype, rank, (count,), salt, product=product), dtype=dtype)


def reduced_cases(dtypes: Dtypes) -> Iterator[tuple[ReduceOp, torch.dtype, int]]:
    """Return the cases of every valid op and dtype, in every size."""
    for op in REDUCE_OPS:
        for dtype in REDUCIBLE[op]:
            if dtype in dtypes:
                for count in SIZES if dtype in (torch.float32, torch.int64) else (3, 1031):
                    yield op, dtype, count


def reductions(comm: mcr.Communicator, failures: Failures, dtypes: Dtypes) -> None:
    """Check sums and blocks of sums; all ranks have equal bits."""
    for salt, (op, dtype, count) in enumerate(reduced_cases(dtypes)):
        for kind, numel in (("all_reduce", count), ("reduce_scatter", count * comm.size)):
            product = op == "PRODUCT"
            parts = [inputs(dtype, rank, (numel,), salt, product=product) for rank in range(comm.size)]
            values = tensor(comm.rank, dtype, numel, salt, product=product)
            result, expected = values, reduced(parts, op)
            if kind == "all_reduce":
                comm.all_reduce(values, op)
            else:
                result = torch.empty(count, dtype=dtype)
                comm.reduce_scatter_tensor(result, values, op)
                failures.check(f"input {op} {dtype} {count}", difference(values, parts[comm.rank]))
                expected = expected[comm.rank * count :][:count]
            # Sums are exact; a mean is rounded once to its type.
            allowed = np.abs(expected) * (2 * unit_roundoff(dtype) if op == "AVG" else 0.0)
            failures.check(f"{kind} {op} {dtype} {count}", difference(result, expected, allowed))


def rough_sums(comm: mcr.Communicator, failures: Failures, dtypes: Dtypes) -> None:
    """Sums that depend on their order are within their bound, and the same on all ranks."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64):
        ops: tuple[ReduceOp, ...] = ("SUM", "AVG")
        for op in ops if dtype in dtypes else ():
            values = rough(dtype, comm.rank, 1031)
            comm.all_reduce(values, op)
            parts = [wide(rough(dtype, rank, 1031)) for rank in range(comm.size)]
            scale = comm.size if op == "AVG" else 1
            bound = sum_bound(parts, dtype, comm.size + 1) / scale
            failures.check(f"rough {op} {dtype}", difference(values, reduced(parts, op), bound))
            same = comm.all_gather_object(values.view(torch.uint8).tolist())
            failures.expect(f"equal bits {op} {dtype}", all(each == same[0] for each in same))


def movements(comm: mcr.Communicator, failures: Failures, dtypes: Dtypes) -> None:
    """Broadcasts from every root, exchanges, and blocks of all ranks, also where the own one is in place."""
    for dtype in dtypes:
        for count in SIZES if dtype is torch.int64 else (3, 1031):
            for root in range(comm.size):
                values = tensor(comm.rank, dtype, count, root)
                comm.broadcast(values, comm.ranks[root])
                failures.check(
                    f"broadcast {dtype} {count}", difference(values, inputs(dtype, root, (count,), root))
                )
            sent = tensor(comm.rank, dtype, count * comm.size, 1)
            got = torch.zeros_like(sent)
            comm.all_to_all_single(got, sent)
            mine = slice(comm.rank * count, (comm.rank + 1) * count)
            whole = [inputs(dtype, rank, (count * comm.size,), 1)[mine] for rank in range(comm.size)]
            failures.check(f"all_to_all {dtype} {count}", difference(got, np.concatenate(whole)))
            whole = [inputs(dtype, rank, (count,), 2) for rank in range(comm.size)]
            comm.all_gather_into_tensor(got, tensor(comm.rank, dtype, count, 2))
            failures.check(f"all_gather {dtype} {count}", difference(got, np.concatenate(whole)))
            got.zero_()
            got[mine] = tensor(comm.rank, dtype, count, 2)
            comm.all_gather_into_tensor(got, got[mine])
            failures.check(f"all_gather in place {dtype} {count}", difference(got, np.concatenate(whole)))
            several = list(torch.zeros(comm.size, count, dtype=dtype))
            comm.all_gather(several, tensor(comm.rank, dtype, count, 2))
            for rank, (each, expected) in enumerate(zip(several, whole, strict=True)):
                failures.check(f"all_gather, a list, {dtype} {count} {rank}", difference(each, expected))


def in_flight(comm: mcr.Communicator, failures: Failures, _: Dtypes) -> None:
    """Run many operations of all kinds at once, waited for in another order on every rank."""
    works: list[tuple[str, mcr.Work, Callable[[], str | None]]] = []
    for turn in range(4 * len(HIERARCHICAL)):
        count, root = 1031 + turn, turn % comm.size
        kind = HIERARCHICAL[turn % len(HIERARCHICAL)]
        if kind in ("all_to_all", "reduce_scatter"):
            count *= comm.size
        values = tensor(comm.rank, torch.int64, count, turn)
        result = values
        every = [inputs(torch.int64, rank, (count,), turn) for rank in range(comm.size)]
        work: mcr.Work | None
        if kind == "all_reduce":
            work, expected = comm.all_reduce(values, async_op=True), reduced(every, "SUM")
        elif kind == "broadcast":
            work, expected = comm.broadcast(values, comm.ranks[root], async_op=True), every[root]
        elif kind == "all_gather":
            result = torch.empty(count * comm.size, dtype=values.dtype)
            work = comm.all_gather_into_tensor(result, values, async_op=True)
            expected = np.concatenate(every)
        elif kind == "reduce_scatter":
            result = torch.empty(count // comm.size, dtype=values.dtype)
            work = comm.reduce_scatter_tensor(result, values, async_op=True)
            expected = reduced(every, "SUM")[comm.rank * len(result) :][: len(result)]
        else:
            result = torch.empty_like(values)
            part = count // comm.size
            mine = slice(comm.rank * part, (comm.rank + 1) * part)
            work = comm.all_to_all_single(result, values, async_op=True)
            expected = np.concatenate([each[mine] for each in every])
        assert work is not None
        works.append((f"{kind} {turn}", work, partial(difference, result, expected)))
    order = np.random.default_rng(comm.rank).permutation(len(works))
    for index in order:
        name, begun, problem = works[index]
        begun.wait()
        failures.check(f"in flight: {name}", problem())
        failures.expect("info", begun.info.kind == name.split()[0], begun.info)


def sub_groups(comm: mcr.Communicator, failures: Failures, _: Dtypes) -> None:
    """Groups in another order, of fewer nodes, and of uneven nodes; a branch; a persistent operation."""
    for ranks in (list(reversed(range(comm.size))), list(range(comm.size - 1)), [0, comm.size - 1]):
        group = mcr.new_group(ranks)
        if group.rank >= 0:
            reductions_of_one(group, failures)
    branch = comm.branch()
    reductions_of_one(branch, failures)
    values = torch.full((1031,), float(comm.rank))
    op = mcr.persistent("all_reduce", values)
    op()
    op.start().wait()
    total = sum(range(comm.size)) * comm.size
    failures.expect("persistent", bool((values == total).all()), values[:3])


def reductions_of_one(group: mcr.Communicator, failures: Failures) -> None:
    values = tensor(group.rank, torch.int64, 1031, 3)
    group.all_reduce(values)
    every = [inputs(torch.int64, rank, (1031,), 3) for rank in range(group.size)]
    failures.check(f"{group!r}", difference(values, reduced(every, "SUM")))
    moved = tensor(group.rank, torch.int64, 5 * group.size, 4)
    got = torch.empty_like(moved)
    group.all_to_all_single(got, moved)
    mine = slice(group.rank * 5, group.rank * 5 + 5)
    every = [inputs(torch.int64, rank, (5 * group.size,), 4)[mine] for rank in range(group.size)]
    failures.check(f"all_to_all {group!r}", difference(got, np.concatenate(every)))
    group.all_gather_into_tensor(got, moved[:5])
    every = [inputs(torch.int64, rank, (5 * group.size,), 4) for rank in range(group.size)]
    failures.check(f"all_gather {group!r}", difference(got, np.concatenate([each[:5] for each in every])))
    group.reduce_scatter_tensor(got[:5], moved)
    failures.check(f"reduce_scatter {group!r}", difference(got[:5], reduced(every, "SUM")[mine]))


def recorded(comm: mcr.Communicator, failures: Failures, _: Dtypes) -> None:
    """The operations that a call issues."""
    comm.all_reduce(torch.ones(1031), tag="seen")
    with mcr.record() as log:
        comm.all_reduce(torch.ones(1031), tag="seen")
        comm.all_reduce(torch.ones(1031), tag="seen", backend="gloo")
        comm.all_gather_into_tensor(torch.ones(comm.size), torch.ones(1), tag="gathered")
        comm.reduce_scatter_tensor(torch.ones(1), torch.ones(comm.size), tag="scattered")
    found = [(r.kind, r.group.rstrip("012345"), r.tag) for r in log.records]
    expected = [
        ("reduce_scatter", "world/node", "seen"),
        ("all_reduce", "world/across", "seen"),
        ("all_reduce", "world", "seen"),  # the last elements, which do not divide into equal parts
    ]
    failures.expect("steps", all(step in found for step in expected), found)
    for tag, parts in (("gathered", ("across", "node/back")), ("scattered", ("node", "across"))):
        groups = [group for _, group, each in steps(log, tag) if each is None and group != "world"]
        failures.expect(tag, sorted(groups) == sorted(f"world/{part}" for part in parts), groups)
    kinds = [record.kind for record in log.records if record.group.endswith("/back")]
    failures.expect("back", kinds == ["all_gather", "all_gather"], kinds)
    sizes = [record.bytes for record in log.records if record.group == "world" and record.bytes]
    rest = 1031 % (len(comm.opened.parts[0].group.ranks))
    failures.expect("flat", sorted(sizes) == sorted([4 * rest, 4124]), sizes)


SECTIONS: Final = (reductions, rough_sums, movements, in_flight, sub_groups, recorded)


def every_section(backends: list[str], options: dict[str, Any], every_type: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    failures = Failures()
    with mcr.init(config(backends=backends, **options)) as comm:
        for section in SECTIONS:
            section(comm, failures, ARITHMETIC if every_type else A_FEW)
    return failures.report()


# -- four ranks on two nodes ----------------------------------------------------------------------

NODES: Final[dict[str, Any]] = {"ranks_per_node": 2}
INT8: Final[dict[str, Any]] = {"compress": {"codec": "int8_block"}}
OUTER: Final[dict[str, Any]] = {
    "codec": "topk", "ratio": 0.0156, "values": "int2", "chunk": 256, "error_feedback": {"decay": 0.95},
}  # fmt: skip


def noise(rank: int, count: int = 4099, salt: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank * 1000 + salt))


def equal_bits(comm: mcr.Communicator, values: torch.Tensor) -> None:
    every = comm.all_gather_object(values.view(-1).view(torch.uint8).tolist())
    assert all(each == every[0] for each in every), "ranks have different bits"


def steps(log: Log, tag: str | None = None) -> list[tuple[str, str, str | None]]:
    """Kind, group without the node's number, and codec of the operations issued."""
    found = [record for record in log.records if record.tag == tag]
    return [(r.kind, "".join(c for c in r.group if not c.isdigit()), r.codec) for r in found]


def summed(comm: mcr.Communicator, count: int = 4099, salt: int = 0) -> torch.Tensor:
    return torch.stack([noise(rank, count, salt).double() for rank in range(comm.size)]).sum(0)


def compressed() -> None:
    """The codec of the stage applies between nodes only; the codec of the call takes precedence."""
    with mcr.init(config(**NODES, inter=INT8)) as comm:
        for op, scale in (("SUM", 1), ("AVG", comm.size)):
            values = noise(comm.rank)
            with mcr.record() as log:
                comm.all_reduce(values, op, tag="a")  # type: ignore[arg-type]
            error = (values - summed(comm) / scale).abs().max().item() * scale
            assert 0 < error < 0.1, f"{op}: error {error}"
            equal_bits(comm, values)
            codecs = {(group, codec) for _, group, codec in steps(log, "a") if codec}
            assert codecs == {("world/across", "int8_block")}, steps(log, "a")
            across = [record for record in log.records if "across" in record.group and record.codec]
            assert all(record.wire_bytes < record.bytes for record in across), across
        values = noise(comm.rank)
        comm.all_reduce(values, compress=False)
        assert (values - summed(comm)).abs().max() < 1e-5, "the call says no codec"
        values = noise(comm.rank)
        with mcr.record() as log:
            comm.all_reduce(values, compress="bf16", tag="b")
        assert {codec for _, _, codec in steps(log, "b") if codec} == {"bf16"}, steps(log, "b")
        whole = torch.full((4099,), comm.rank)
        comm.all_reduce(whole)  # a dtype that the codec does not support
        assert (whole == 6).all()
        values = noise(comm.rank)
        comm.broadcast(values, 2)
        assert 0 < (values - noise(2)).abs().max() < 0.1
        equal_bits(comm, values)
        blocks = torch.empty(comm.size, 4099)
        with mcr.record() as log:
            comm.all_gather_into_tensor(blocks, noise(comm.rank), tag="c")
        assert {group for _, group, codec in steps(log, "c") if codec} == {"world/across"}, steps(log, "c")
        every = torch.stack([noise(rank) for rank in range(comm.size)])
        assert 0 < (blocks - every).abs().max() < 0.1
        equal_bits(comm, blocks)
        count = 1031 * comm.size
        for op, scale in (("SUM", 1), ("AVG", comm.size)):
            block = torch.empty(1031)
            with mcr.record() as log:
                comm.reduce_scatter_tensor(block, noise(comm.rank, count), op, tag="d")  # type: ignore[arg-type]
            found = {group for _, group, codec in steps(log, "d") if codec}
            assert found == {"world/across"}, steps(log, "d")
            expected = summed(comm, count)[comm.rank * 1031 :][:1031] / scale
            error = (block - expected).abs().max().item() * scale
            assert 0 < error < 0.1, f"reduce_scatter {op}: error {error}"


def compressed_by_the_pipeline() -> None:
    """The compress stage compresses the step between nodes, never the steps inside."""
    with mcr.init(config(**NODES, compress={"codec": "int8_block"})) as comm:
        values = noise(comm.rank)
        with mcr.record() as log:
            comm.all_reduce(values, tag="a")
        assert {group for _, group, codec in steps(log, "a") if codec} == {"world/across"}, steps(log, "a")
        equal_bits(comm, values)


def parameters_and_gradients_of_fsdp() -> None:
    """FSDP2's gathers of parameters and blocks of gradients run in steps; the trained model is the same."""
    torch.set_num_threads(1)
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    def trained(options: dict[str, Any], codecs: dict[str, Any]) -> tuple[torch.Tensor, list[Any]]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(40, 72), torch.nn.Tanh(), torch.nn.Linear(72, 9))
        dist.init_process_group("mcr", pg_options=options)
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        mcr.fsdp(model, **codecs)
        rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), 0.05)
        with mcr.record() as log:
            for step in range(8):
                optimizer.zero_grad()
                model(noise(rank, 12 * 40, step).view(12, 40)).square().mean().backward()
                optimizer.step()
        weights = [parameter.full_tensor().flatten().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]
        dist.destroy_process_group()
        between = [each for each in log.records if "across" in each.group]
        return torch.cat(weights), between

    stages: list[dict[str, Any]] = [{"compress": {}}, {"select": {}}, {"dispatch": {}}]
    flat = {"version": 1, "backends": ["gloo"], "pipeline": stages}
    expected, none = trained(flat, {})
    assert not none
    weights, between = trained(config(**NODES), {})
    assert {each.kind for each in between} == {"all_gather", "reduce_scatter"}, between
    assert (weights - expected).abs().max() < 1e-5
    same, between = trained(config(**NODES), {"parameters": "delta"})
    assert {each.codec for each in between if each.kind == "all_gather_v"} == {"delta"}, between
    assert torch.equal(same, weights), "delta loses nothing"
    codecs = {"parameters": "int8_block", "gradients": {"codec": "int4_block", "error_feedback": True}}
    weights, between = trained(config(**NODES), codecs)
    assert {(each.kind, each.codec) for each in between} == {
        ("all_gather", "int8_block"), ("all_to_all", "int4_block"),
    }, between  # fmt: skip
    error = (weights - expected).norm() / expected.norm()
    assert 0 < error < 0.02, error


def matrices_go_the_flat_way() -> None:
    """An operation with a codec that needs the whole matrix stays flat."""
    with mcr.init(config(**NODES)) as comm:
        values = torch.outer(torch.ones(64), noise(comm.rank, 64))
        with mcr.record() as log:
            comm.all_reduce(values, compress={"codec": "powersgd", "rank": 1}, tag="m")
        assert {group for _, group, _ in steps(log, "m")} == {"world"}, steps(log, "m")
        assert (values[0] - summed(comm, 64)).abs().max() < 1e-3


def feedback() -> None:
    """Error feedback works between nodes, and `state_dict` restores its residuals."""
    inter = {"compress": {"codec": "topk", "ratio": 0.05, "error_feedback": True}}
    with mcr.init(config(**NODES, inter=inter)) as comm:
        total = torch.zeros(4099, dtype=torch.float64)
        for _turn in range(60):
            values = noise(comm.rank)
            comm.all_reduce(values, "AVG", tag="gradient")
            total += values
        mean = summed(comm) / comm.size
        error = (total / 60 - mean).norm() / mean.norm()
        assert error < 0.5, f"relative error of the sum of 60 calls: {error}"
        kept = mcr.state_dict()["codecs"]
        assert sorted(kept) == ["world/across0", "world/across1"], sorted(kept)
        mcr.load_state_dict(mcr.state_dict())


def fused() -> None:
    """Small operations share a bucket, which is decomposed; the codec between nodes compresses the bucket."""
    for inter, codecs in (({}, set()), (INT8, {"int8_block"})):
        with mcr.init(config(**NODES, min="16KiB", fuse={"bucket": "64KiB"}, inter=inter)) as comm:
            with mcr.record() as log:
                every = [noise(comm.rank, 3000, salt) for salt in range(4)]
                works = [comm.all_reduce(values, async_op=True, tag="a") for values in every]
                for work in works:
                    assert work is not None
                    work.wait()
            for salt, values in enumerate(every):
                error = (values - summed(comm, 3000, salt)).abs().max().item()
                assert error < (0.2 if codecs else 1e-5), f"error {error}"
                equal_bits(comm, values)
            assert {codec for _, _, codec in steps(log, "a") if codec} == codecs, steps(log, "a")
            packed = [record.fused for record in log.records if "across" in record.group]
            assert max(packed) == 4, packed


def wrapped() -> None:
    """Gradients of a wrapped model, with and without a stateful codec between nodes."""
    feedback = {"compress": {"codec": "int8_block", "error_feedback": True}}
    for inter, near in (({}, 1e-6), (feedback, 0.05)):
        with mcr.init(config(**NODES, inter=inter, fuse={})) as comm:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 30))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            model, optimizer = mcr.wrap(model, optimizer)
            with mcr.record() as log:
                for _turn in range(4):
                    optimizer.zero_grad()
                    model(noise(comm.rank, 400).view(10, 40)).square().mean().backward()
                    optimizer.step()
            got = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            torch.manual_seed(0)
            twin = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 30))
            for rank in range(comm.size):
                (twin(noise(rank, 400).view(10, 40)).square().mean() / comm.size).backward()
            for mine, parameter in zip(got, twin.parameters(), strict=True):
                assert parameter.grad is not None
                error = (mine - parameter.grad).norm() / parameter.grad.norm()
                assert error < near, f"relative error {error}"
                equal_bits(comm, mine)
            codecs = {record.codec for record in log.records if "across" in record.group and record.codec}
            assert codecs == ({"int8_block"} if inter else set()), codecs
            # Every bucket has residuals of its own, also if another bucket has its size.
            kept = mcr.state_dict()["codecs"]
            assert bool(kept) == bool(inter), kept
            assert all("key=" in name for names in kept.values() for name in names), kept


def rules() -> None:
    """Rules change the options for some operations, and name a backend for others, which stay flat."""
    changed = config(**NODES)
    changed["rules"] = [
        {"match": {"tag": "off"}, "hierarchical": {"kinds": []}},
        {"match": {"tag": "flat"}, "backend": "gloo"},
        {"match": {"tag": "int8"}, "hierarchical": {"inter": INT8}},
        {"match": {"tag": "outer.*.last"}, "compress": {"codec": "int2_block", "error_feedback": True}},
        {"match": {"tag": "outer.*"}, "compress": OUTER},
    ]
    with mcr.init(changed) as comm:
        with mcr.record() as log:
            for tag in ("off", "flat", "int8", "plain", "outer", "outer.0", "outer.1", "outer.0.last"):
                comm.all_reduce(noise(comm.rank), tag=tag)
        by_glob = {"outer": None, "outer.0": "topk", "outer.1": "topk", "outer.0.last": "int2_block"}
        for tag, codec in by_glob.items():  # between nodes the codec of the first glob, inside them none
            found = {(group, each) for _, group, each in steps(log, tag)}
            assert {each for group, each in found if "across" in group} == {codec}, (tag, found)
            assert {each for group, each in found if "across" not in group} == {None}, (tag, found)
        across = [r for r in log.records if r.codec == "topk"]
        assert all(r.wire_bytes * 9 < r.bytes for r in across), across
        for tag in ("off", "flat"):
            assert {group for _, group, _ in steps(log, tag)} == {"world"}, steps(log, tag)
        assert "int8_block" in {codec for _, _, codec in steps(log, "int8")}, steps(log, "int8")
        assert ("all_reduce", "world/across", None) in steps(log, "plain"), steps(log, "plain")
        assert expected_us(comm, "all_reduce", torch.float32, 4099, op="SUM") is None  # and does not fail


def uneven() -> None:
    """With nodes of different sizes operations stay flat, and results are right."""
    with mcr.init(config(nodes=[[0, 1, 2], [3]])) as comm:
        assert not comm.opened.parts
        with mcr.record() as log:
            values = torch.ones(100)
            comm.all_reduce(values, tag="a")
        assert (values == 4).all()
        assert steps(log, "a") == [("all_reduce", "world", None)], steps(log, "a")


def first_steps_do_not_wait_for_last_ones() -> None:
    """While the other node is away, the second operation's reduce_scatter ends before the first's rest."""
    with mcr.init(config(**NODES)) as comm:
        gate = comm.branch()
        engine = runtime.current().engine
        first, second = torch.ones(1000), torch.ones(1000)
        for values in (first, second):
            work = comm.all_reduce(values, async_op=True, tag="a")
            assert work is not None
            work.wait()
        if comm.rank >= 2:
            gate.barrier()
        with mcr.record() as log:
            works = [comm.all_reduce(values, async_op=True, tag="a") for values in (first, second)]
            deadline = time.monotonic() + 25
            while comm.rank < 2 and time.monotonic() < deadline:
                assert works[1] is not None
                assert not works[1].is_completed()
                with engine.lock:  # steps are not polled before a wait for them
                    for step in list(engine.in_flight):
                        engine.try_poll(step)
                if [kind for kind, _, _ in steps(log, "a")] == ["reduce_scatter"] * 2:
                    break
            early = steps(log, "a")
        if comm.rank < 2:
            assert early == [("reduce_scatter", "world/node", None)] * 2, early
            gate.barrier()
        for work in works:
            assert work is not None
            work.wait()
        assert (first == 16).all(), first[:3]


def bad_nodes() -> None:
    """A configuration with the nodes of another job fails on every rank, and the next job works."""
    with pytest.raises(mcr.ConfigError, match="3 ranks are listed; expected all 4 of this job"):
        mcr.init(config(nodes=[[0, 1], [2]]))


def what_one_node_lacks() -> None:
    """If a step that only the root's node runs is unsupported, the operation stays flat on all nodes."""
    lacking = config(**NODES, backends=["msccl", "gloo"], local={"backend": "msccl:ring"})
    with mcr.init(lacking) as comm:
        values = torch.full((1000,), float(comm.rank))
        with mcr.record() as log:
            comm.broadcast(values, 1, tag="flat")
        assert (values == 1).all()
        assert {group for _, group, _ in steps(log, "flat")} == {"world"}, steps(log, "flat")
        sums = noise(comm.rank)
        comm.all_reduce(sums)
        np.testing.assert_allclose(sums.double(), summed(comm), rtol=1e-5, atol=1e-5)


def a_codec_between_nodes_with_an_algorithm() -> None:
    """A named algorithm does not apply with a codec, and the operation stays flat."""
    named = config(**NODES, backends=["msccl", "gloo"], inter={"backend": "msccl:ring", **INT8})
    with mcr.init(named) as comm:
        values = torch.full((1000,), float(comm.rank))
        comm.broadcast(values, 1)
        assert (values == 1).all()


def no_memory_on_one_node() -> None:
    """If a library is unavailable in one node, the ranks of the other node raise at once, too."""
    create, calls = segment._create, [0]

    def failing(nbytes: int) -> Any:
        calls[0] += 1  # rank 2 makes no memory for the job, and then the memory of its node
        raise OSError(28, "No space left on device", "/dev/shm")

    rank = int(os.environ["RANK"])
    segment._create = failing if rank == 2 else create
    try:
        with pytest.raises(mcr.BackendUnavailable, match="rank 2 of the job: No space left on device"):
            mcr.init(config(**NODES, backends=["gloo", "msccl"]))
        assert calls[0] == (rank == 2)
    finally:
        segment._create = create


@contextmanager
def nothing_left_for_rank_2() -> Iterator[None]:
    """Shared memory fails for the job and between nodes, but works in this node."""
    create = segment._create

    def failing(nbytes: int) -> Any:
        raise OSError(28, "No space left on device", "/dev/shm")

    if int(os.environ["RANK"]) == 2:
        segment._create = failing
    try:
        yield
    finally:
        segment._create = create


def no_memory_for_a_named_step() -> None:
    """A job without named backends drops an unavailable library, unless a step names it."""
    told = (
        r"^hierarchical\.local\.backend: msccl was asked for; group 'world/node1': .*No space left.*enlarge"
    )
    as_rule = config(**NODES)
    as_rule["rules"] = [{"match": {"tag": "x"}, "hierarchical": {"local": {"backend": "msccl:ring"}}}]
    for named in (config(**NODES, local={"backend": "msccl"}), as_rule):
        del named["backends"]
        began = time.monotonic()
        with nothing_left_for_rank_2(), pytest.raises(mcr.BackendUnavailable, match=told):
            mcr.init(named)
        assert time.monotonic() - began < 60  # `init` waits for 300


def no_memory_on_a_node_that_needs_none() -> None:
    """A library that is unavailable in one node is dropped in all nodes, for that step only."""
    for across in ({}, {"backend": "msccl"}):
        plain = config(**NODES, inter=across)
        del plain["backends"]
        with nothing_left_for_rank_2():
            comm = mcr.init(plain)
        with comm:
            sums = noise(comm.rank)
            with mcr.record() as log:
                comm.all_reduce(sums, tag="a")
            np.testing.assert_allclose(sums.double(), summed(comm), rtol=1e-5, atol=1e-5)
            used = {(r.kind, "across" in r.group): r.backend for r in log.records if r.group != "world"}
            every = comm.all_gather_object(sorted(used.values()))
            assert every == [["gloo", "gloo", "msccl"]] * 4, every
            assert used["all_reduce", True] == "msccl", used


def another_thread() -> None:
    """`take_over` of a group includes the groups inside it."""
    with mcr.init(config(**NODES)) as comm:
        problems: list[str] = []

        def work() -> None:
            try:
                comm.take_over()
                values = torch.ones(100)
                comm.all_reduce(values)
                assert (values == 4).all()
            except Exception as error:
                problems.append(repr(error))

        comm.all_reduce(torch.ones(100))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        comm.take_over()
        assert not problems, problems


def another_operation() -> None:
    """A mismatch raises on all ranks and names the group; so do the operations issued after it."""
    with mcr.init(config(**NODES, dispatch={"timeout": "20s"})) as comm:
        group = comm.branch()
        with pytest.raises(mcr.OrderMismatch, match=r"world/1'.*float32\[999\]"):
            group.all_reduce(torch.ones(1000 if comm.rank != 3 else 999), tag="odd")


def _and_barrier(program: Program, group: mcr.Communicator) -> None:
    program(group)
    group.barrier()


def _sent(comm: mcr.Communicator, root: int) -> None:
    comm.broadcast(torch.ones(1000), root)


def known_operations_swapped() -> None:
    """Mismatches with the same steps raise: sums and means, sizes, roots."""

    def summed(comm: mcr.Communicator, numel: int = 1000, op: ReduceOp = "SUM") -> None:
        comm.all_reduce(torch.ones(numel), op)

    pairs: list[tuple[Program, Program, str, str]] = [
        (summed, partial(summed, op="AVG"), "SUM float32", "AVG float32"),
        (summed, partial(summed, numel=1001), r"float32\[1000\]", r"float32\[1001\]"),
        (partial(_sent, root=0), partial(_sent, root=1), "root=0", "root=1"),
    ]
    with mcr.init(config(**NODES, dispatch={"timeout": "20s"})) as comm:
        for good, bad, mine, other in pairs:
            group = comm.branch()
            for _turn in range(2):
                good(group)
                bad(group)
            program = bad if comm.rank == 3 else good
            with pytest.raises(mcr.OrderMismatch) as found:
                _and_barrier(program, group)
            assert re.search(mine, str(found.value)), found.value
            assert re.search(other, str(found.value)), found.value


def ranks_that_do_nothing_more() -> None:
    """Every rank raises the mismatch, although ranks that have raised it call nothing more."""
    with mcr.init(config(**NODES, dispatch={"timeout": "20s"})) as comm:
        for turn in range(4):
            group = comm.branch()
            for root in (0, 1) * 2:
                group.broadcast(torch.ones(1000), root)
            program = partial(_sent, root=int(comm.rank == 3))
            with pytest.raises(mcr.OrderMismatch):
                _and_barrier(program, group)
            meet(f"raised {turn}", 4)


def a_missing_rank() -> None:
    """A timeout names the missing rank, and the group that waits for it."""
    with mcr.init(config(**NODES, dispatch={"timeout": "3s"})) as comm:
        group = comm.branch()
        for _turn in range(2):
            group.all_reduce(torch.ones(1000), tag="late")
        if comm.rank != 1:
            with pytest.raises(mcr.CommTimeout) as late:
                group.all_reduce(torch.ones(1000), tag="late")
            has_come("told")
            text = str(late.value)
            assert any(f"world/1/{name}" in text for name in ("node0", "across", "node1/back")), text
            if comm.rank == 0:
                assert "reduce_scatter SUM float32[500]" in text, text
                assert "missing ranks: [1]" in text, text
        else:
            wait_for_ranks("told", 3)


FOUR_RANKS: Final[dict[str, Callable[[], None]]] = {
    section.__name__: section
    for section in (
        compressed, compressed_by_the_pipeline, matrices_go_the_flat_way, feedback, fused, wrapped,
        rules, uneven, bad_nodes, what_one_node_lacks,
        first_steps_do_not_wait_for_last_ones, a_codec_between_nodes_with_an_algorithm,
        no_memory_on_one_node, no_memory_for_a_named_step, no_memory_on_a_node_that_needs_none,
        another_thread, another_operation, known_operations_swapped, ranks_that_do_nothing_more,
        a_missing_rank,
    )
}  # fmt: skip


def four_ranks() -> dict[str, str]:
    """The failure of each section; empty if it passed."""
    torch.set_num_threads(1)
    return {name: problem_of(section) for name, section in FOUR_RANKS.items()}


def problem_of(section: Callable[[], None]) -> str:
    try:
        section()
    except Exception:
        return traceback.format_exc()[-1500:]
    return ""


def on_two_hosts(folder: Path) -> None:
    """Run on the ranks of two hosts: nodes are found by their names, and results are right."""
    torch.set_num_threads(1)
    failures = Failures()
    with mcr.init(
        config(backends=["mpi", "gloo", "msccl"], local={"backend": "msccl"}, inter={"backend": "gloo"})
    ) as comm:
        for section in (rough_sums, in_flight, sub_groups):
            section(comm, failures, ARITHMETIC)
        report = {**failures.report(), "groups": " ".join(part.name for part in comm.opened.parts)}
    (folder / f"{comm.rank}").write_text(json.dumps(report))


if __name__ == "__main__":
    on_two_hosts(Path(sys.argv[1]))
