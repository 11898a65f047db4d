"""Programs of ranks for `test_feedback`."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from codec_exam import F64, f64

import mcr_plus as mcr
from mcr_plus import registry
from mcr_plus.compression.codec import PayloadCodec, Traits
from mcr_plus.trials import router

SHAPE = (24, 50)
FED_BACK: list[dict[str, Any]] = [
    {"codec": "bf16"},
    {"codec": "int8_block"},
    {"codec": "fp8_block"},
    {"codec": "int4_block"},
    {"codec": "int2_block"},
    {"codec": "sign1"},
    {"codec": "topk", "ratio": 0.05, "values": "int2", "chunk": 128},
    {"codec": "randk", "ratio": 0.05},
    {"codec": "powersgd", "rank": 2},
    {"codec": "int_shared"},
]


def drawn(rank: int, step: int) -> torch.Tensor:
    """Return a rank's values in a step."""
    random = np.random.default_rng([rank, step])
    return torch.tensor(random.standard_normal(SHAPE), dtype=torch.float32)


def mean_of(ranks: int, steps: range) -> F64:
    """Return the sum over steps of the mean over ranks."""
    total: F64 = np.sum([f64(drawn(rank, step)) for step in steps for rank in range(ranks)], 0) / ranks
    return total


def left_over(state: dict[str, Any], tag: str) -> F64:
    """Return an operation's residual as a part of the mean over ranks."""
    (kept,) = (kept for name, kept in state["codecs"]["world"].items() if f"tag={tag} " in name)
    shard = kept.get("shard")
    return f64(kept["residual"]) + (0 if shard is None else f64(shard))


def off(got: F64, expected: F64) -> float:
    """Return the relative L2 norm of a difference."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def nothing_is_lost(op: Any, steps: int) -> dict[str, Any]:
    """With error feedback, the results and the residuals add up to all inputs."""
    torch.set_num_threads(1)
    found = {}
    with mcr.init(timeout=60) as comm:
        scale = 1 if op == "AVG" else comm.size
        for config in FED_BACK:
            tag = config["codec"]
            how: dict[str, Any] = {"compress": {**config, "error_feedback": True}, "tag": tag}
            total, prints = np.zeros(SHAPE).reshape(-1), set()
            for step in range(steps):
                tensor = drawn(comm.rank, step)
                comm.all_reduce(tensor, op, **how)
                total += f64(tensor) / scale
                prints |= set(comm.all_gather_object(float(f64(tensor).sum())))
            back = left_over(mcr.state_dict(), tag)
            found[tag] = [
                off(total + back, mean_of(comm.size, range(steps))),
                off(total, mean_of(comm.size, range(steps))),
                len(prints) - steps,
            ]
    return found


def saves(path: str, steps: int) -> dict[str, list[float]]:
    """Some steps, then a checkpoint by rank 0; returns the sums of results."""
    torch.set_num_threads(1)
    sums = {}
    with mcr.init(timeout=60) as comm:
        for config in FED_BACK:
            total = np.zeros(SHAPE).reshape(-1)
            for step in range(steps):
                tensor = drawn(comm.rank, step)
                how: dict[str, Any] = {"compress": {**config, "error_feedback": True}, "tag": config["codec"]}
                comm.all_reduce(tensor, "AVG", **how)
                total += f64(tensor)
            sums[config["codec"]] = total.tolist()
        state = mcr.state_dict()
        if comm.rank == 0:
            torch.save(state, Path(path))
    return sums


def goes_on_with_failover() -> list[float]:
    """Return the errors of the sum of two steps in two jobs, with and without kept residuals."""
    torch.set_num_threads(1)
    stages: list[Any] = [{"compress": {"codec": "int4_block", "error_feedback": True}}, {"select": {}}]
    config = {
        "version": 1,
        "backends": ["gloo", "mpi"],
        "pipeline": [*stages, {"dispatch": {"failover": True}}],
    }
    total, state = np.zeros(SHAPE), None
    for step in range(2):
        with mcr.init(config, timeout=60) as comm:
            if state is not None:
                mcr.load_state_dict(state)
            tensor = drawn(comm.rank, step)
            comm.all_reduce(tensor, "AVG", tag="kept")
            total += f64(tensor).reshape(SHAPE)
            state = mcr.state_dict()
    assert state is not None
    expected = mean_of(2, range(2))
    flat = total.reshape(-1)
    return [off(flat + left_over(state, "kept").reshape(-1), expected), off(flat, expected)]


def goes_on(path: str, steps: list[int], late: bool) -> dict[str, Any]:
    """Run further steps with another job's residuals, loaded before or after the first call is bound."""
    torch.set_num_threads(1)
    found = {}
    with mcr.init(timeout=60) as comm:
        state = torch.load(Path(path), weights_only=True)
        if not late:
            mcr.load_state_dict(state)
        for config in FED_BACK:
            tag = config["codec"]
            how: dict[str, Any] = {"compress": {**config, "error_feedback": True}, "tag": tag}
            if late:
                comm.all_reduce(drawn(comm.rank, 999), "AVG", **how)
                mcr.load_state_dict(state)
            total = np.zeros(SHAPE).reshape(-1)
            for step in range(*steps):
                tensor = drawn(comm.rank, step)
                comm.all_reduce(tensor, "AVG", **how)
                total += f64(tensor)
            found[tag] = [total.tolist(), left_over(mcr.state_dict(), tag).tolist()]
    return found


def estimates(steps: int) -> dict[str, list[float]]:
    """EF21 on values that stay: how far off its results are, step by step."""
    torch.set_num_threads(1)
    found = {}
    with mcr.init(timeout=60) as comm:
        expected = mean_of(comm.size, range(1))
        for config in ({"codec": "topk", "ratio": 0.2}, {"codec": "int4_block"}, {"codec": "sign1"}):
            offs = []
            for _ in range(steps):
                tensor = drawn(comm.rank, 0)
                how: dict[str, Any] = {"compress": {**config, "ef21": True}, "tag": config["codec"]}
                comm.all_reduce(tensor, "AVG", **how)
                offs.append(off(f64(tensor), expected))
            found[str(config["codec"])] = offs
    return found


def in_flight(calls: int) -> dict[str, Any]:
    """Several calls of one operation in flight have the results of calls one after another, on all ranks."""
    torch.set_num_threads(1)
    found = {}
    with mcr.init(timeout=60) as comm:
        for config in (
            {"codec": "powersgd", "rank": 2, "error_feedback": True},
            {"codec": "topk", "ratio": 0.1, "ef21": True},
            {"codec": "int4_block", "ef21": True},
            {"codec": "bf16", "ef21": True},
            {"codec": "sign1", "error_feedback": True},
            {"codec": "randk", "ratio": 0.1},
        ):
            results = []
            for tag in ("apart", "together"):
                tensors = [drawn(comm.rank, step) for step in range(calls)]
                works = []
                for step, tensor in enumerate(tensors):
                    time.sleep(0.003 * ((comm.rank + step) % 2))  # ranks are ahead of each other by turns
                    work = comm.all_reduce(tensor, "AVG", async_op=True, compress=config, tag=tag)
                    assert work is not None
                    works.append(work)
                    if tag == "apart":
                        work.wait()
                for work in reversed(works):
                    work.wait()
                results.append(torch.stack(tensors))
            same = bool(torch.equal(*results)) or config["codec"] in ("powersgd", "randk")  # draw by the tag
            prints = comm.all_gather_object([f64(each).sum() for each in results])
            found[str(config["codec"]) + str("ef21" in config)] = [
                same,
                all(each == prints[0] for each in prints),
                off(f64(results[1].sum(0)), mean_of(comm.size, range(calls))),
            ]
    return found


def corrected_momentum(steps: int, ratio: float, momentum: float) -> list[list[float]]:
    """Results of topk with momentum correction."""
    torch.set_num_threads(1)
    compress = {"codec": "topk", "ratio": ratio, "momentum_correction": {"momentum": momentum}}
    found = []
    with mcr.init(timeout=60) as comm:
        for step in range(steps):
            tensor = drawn(comm.rank, step)
            comm.all_reduce(tensor, "AVG", compress=compress, tag="m")
            found.append(tensor.flatten().tolist())
    return found


def a_bad_step() -> dict[str, list[Any]]:
    """A value that is not finite shows in its step on all ranks and is gone in the next."""
    torch.set_num_threads(1)
    found = {}
    with mcr.init(timeout=60) as comm:
        for config in FED_BACK:
            rows = []
            for step in range(4):
                tensor = drawn(comm.rank, step)
                if step == 1 and comm.rank == comm.size - 1:
                    tensor[3, 7] = torch.inf
                how: dict[str, Any] = {"compress": {**config, "error_feedback": True}, "tag": config["codec"]}
                comm.all_reduce(tensor, "AVG", **how)
                rows.append(bool(torch.isfinite(tensor).all()))
            found[config["codec"]] = rows
    return found


def a_bad_step_of_ef21() -> dict[str, list[bool]]:
    """Return the finite steps of EF21 if the second step's input is not finite."""
    torch.set_num_threads(1)
    found = {}
    with mcr.init(timeout=60) as comm:
        for config in ({"codec": "int8_block"}, {"codec": "topk", "ratio": 0.1}, {"codec": "bf16"}):
            finite = []
            for step in range(4):
                tensor = drawn(comm.rank, 0)
                if step == 1 and comm.rank == 0:
                    tensor[0, 0] = torch.nan
                comm.all_reduce(tensor, "AVG", compress={**config, "ef21": True}, tag="e")
                finite.append(bool(torch.isfinite(tensor).all()))
            found[str(config["codec"])] = finite
    return found


def by_name(calls: int) -> dict[str, Any]:
    """Test one tag with and without feedback, inputs next to never_slower, and saved states of sub-groups."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with mcr.init(timeout=60) as comm:
        plain, fed = {"codec": "sign1"}, {"codec": "sign1", "error_feedback": True}

        def mean_off(compress: dict[str, Any]) -> float:
            total = np.zeros(SHAPE).reshape(-1)
            for _ in range(calls):
                tensor = drawn(comm.rank, 0)
                comm.all_reduce(tensor, "AVG", compress=compress, tag="shared")
                total += f64(tensor)
            return off(total, calls * mean_of(comm.size, range(1)))

        found["off"] = [mean_off(plain), mean_off(fed), mean_off(plain)]

        changed, out = 0, torch.zeros(1200 // comm.size)
        slow = {"codec": "int4_block", "error_feedback": True, "never_slower": True}
        for _ in range(20):
            given = drawn(comm.rank, 1).view(-1)
            comm.reduce_scatter_tensor(out, given, compress=slow, tag="rs")
            changed += not torch.equal(given, drawn(comm.rank, 1).view(-1))
        found["changed"] = changed

        half = comm.split(comm.rank % 2)
        assert half is not None
        if half.size > 1:
            half.all_reduce(drawn(comm.rank, 2), compress=fed, tag="half")
        state = mcr.state_dict()
        found["groups"] = sorted(state["codecs"])
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcr_plus").addHandler(handler)
    with mcr.init(timeout=60) as comm:
        mcr.load_state_dict(state)
        comm.all_reduce(drawn(comm.rank, 3), "AVG", compress=fed, tag="shared")
        again = mcr.state_dict()
        found["again"] = [
            {group: sorted(kept) for group, kept in each["codecs"].items()} for each in (state, again)
        ]
        for bad in ({}, {"version": 1, "codecs": {"world": {"x": 3}}}, {"version": 2, "codecs": {}}, 7):
            with pytest.raises(mcr.InvalidArgument, match=r"mcr\.state_dict"):
                mcr.load_state_dict(bad)  # type: ignore[arg-type]
    found["lines"] = [line for line in lines if line.startswith("state: ")]  # kernels may be compiled
    return found


def misunderstandings() -> list[str]:
    """Ranks that use different codecs of equal payloads, each pair in a job of its own."""
    torch.set_num_threads(1)
    texts = []
    pairs: list[tuple[Any, Any]] = [
        ("int8_block", "fp8_block"),
        ({"codec": "fp8_block"}, {"codec": "fp8_block", "format": "e5m2"}),
        ({"codec": "randk"}, {"codec": "randk", "seed": 1}),
        ({"codec": "int8_block", "ef21": True}, {"codec": "int8_block"}),
    ]
    for pair in pairs:
        comm = mcr.init(timeout=20)
        try:
            comm.all_reduce(drawn(comm.rank, 0), compress=pair[comm.rank], tag="q")
            texts.append("nothing")
        except mcr.OrderMismatch as error:
            texts.append(str(error))
        mcr.finalize()
    return texts


def lengths_known_late() -> int:
    """exp_window with every operation compared, and several in flight; returns how many calls were exact."""
    torch.set_num_threads(1)
    exact = 0
    config = {
        "pipeline": [{"compress": {}}, {"select": {}}, {"dispatch": {"check": "every", "timeout": "30s"}}]
    }
    with mcr.init(config) as comm:
        for step in range(5):
            works, tensors = [], [drawn(comm.rank, step + index) for index in range(3)]
            for tensor in tensors:
                time.sleep(0.002 * ((comm.rank + step) % 3))
                works.append(comm.all_reduce(tensor, async_op=True, compress="exp_window", tag=f"t{step}"))
            for work in works:
                assert work is not None
                work.wait()
            for index, tensor in enumerate(tensors):
                total = sum(f64(drawn(rank, step + index)) for rank in range(comm.size))
                exact += off(f64(tensor), np.asarray(total)) < 1e-6
    return exact


class Crooked(PayloadCodec):
    """Decodes to something else on rank 1 from the fifth call on."""

    name = "crooked"
    wire_dtype = torch.float32
    traits = Traits()
    calls = 0

    def wire_numel(self, numel: int) -> int:
        return numel

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        wire.copy_(values)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wire)
        Crooked.calls += 1
        if Crooked.calls > 4 and mcr.get_rank() == 1:
            out[0] += 1

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        total.add_(wire, alpha=scale)


class Sluggish(Crooked):
    """Takes a second on one rank, by the clock of `never_slower`: far more than a busy machine adds."""

    name = "sluggish"
    ahead = 0.0

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wire)
        if mcr.get_rank() == 0:
            Sluggish.ahead += 1.0


def decisions() -> dict[str, Any]:
    """Audit, never_slower, warm-up and exemptions."""
    registry.register("codecs", "crooked", Crooked)
    registry.register("codecs", "sluggish", Sluggish)
    setattr(router, "perf_counter", lambda: time.perf_counter() + Sluggish.ahead)  # noqa: B010 - in a rank
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcr_plus").addHandler(handler)
    logging.getLogger("mcr_plus").setLevel(logging.INFO)
    found: dict[str, Any] = {}

    def codecs(calls: int, compress: Any, tag: str, kind: str = "all_reduce") -> list[str | None]:
        used = []
        for _ in range(calls):
            tensor = torch.ones(3000) * comm.rank
            work = getattr(comm, kind)(tensor, *([0] if kind == "broadcast" else []), async_op=True,
                                       compress=compress, tag=tag)  # fmt: skip
            work.wait()
            used.append(work.info.codec)
        return used

    with mcr.init(timeout=60) as comm:
        found["never slower"] = codecs(40, {"codec": "sluggish", "never_slower": True}, "slow")
        for _ in range(30):
            comm.all_reduce(
                torch.ones(3000), compress={"codec": "sluggish", "never_slower": True}, tag="sync"
            )
        found["lines"] = lines
        found["warm"] = codecs(5, {"codec": "int8_block", "warmup": 3}, "warm")
        found["exempt"] = codecs(1, {"codec": "int8_block", "exempt": {"below": "16KiB"}}, "exempt")
        found["not exempt"] = codecs(1, {"codec": "int8_block", "exempt": {"below": "8KiB"}}, "exempt")
        found["audited"] = codecs(4, {"codec": "bf16", "audit_every": 2}, "audited")
        found["audited broadcast"] = codecs(4, {"codec": "int8_block", "audit_every": 1}, "b", "broadcast")
        operation = comm.persistent(
            "all_reduce", torch.ones(3000), compress={"codec": "int8_block", "never_slower": True}
        )
        for _ in range(20):
            operation()
        codecs(5, {"codec": "crooked", "audit_every": 3}, "bent")
        try:
            codecs(1, {"codec": "crooked", "audit_every": 3}, "bent")
        except mcr.ResultMismatch as error:
            found["bent"] = str(error)
    return found


def between_peers(steps: int, warmup: int) -> dict[int, float]:
    """Messages to several peers in turn; return of each sender what is missing in the sum of all messages.

    The values are the same in every step, so that without feedback all errors would be equal. In the first
    two steps ranks send to lower ones alone, so that they have sent and received different numbers.
    """
    how: dict[str, Any] = {"codec": "int4_block", "error_feedback": True, "warmup": warmup}
    config = {"version": 1, "pipeline": [{"compress": how}, {"select": {}}, {"dispatch": {}}]}
    with mcr.init(config, timeout=60) as comm:
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        given = {peer: drawn(comm.rank, peer) for peer in others}
        total = {peer: np.zeros(np.prod(SHAPE)) for peer in others}
        for step in range(steps):
            got = {peer: torch.empty(SHAPE) for peer in others if step > 1 or peer > comm.rank}
            works = [comm.irecv(out, peer) for peer, out in got.items()]
            to = [peer for peer in others if step > 1 or peer < comm.rank]
            for peer in to[:: 1 if step % 3 else -1]:
                if step % 2:
                    works.append(comm.isend(given[peer], peer))
                else:
                    comm.send(given[peer], peer)
            for work in works:
                work.wait()
            for peer, out in got.items():
                total[peer] += f64(out) - f64(drawn(peer, comm.rank))
        return {peer: float(np.abs(total[peer]).max()) for peer in others}


def tags_in_another_order(warmup: int) -> float:
    """Messages with two tags, expected the other way round; return the largest error of their sums.

    The values are the same in every step; each tag has its own.
    """
    how: dict[str, Any] = {"codec": "bf16", "error_feedback": True, "warmup": warmup}
    config = {"version": 1, "pipeline": [{"compress": how}, {"select": {}}, {"dispatch": {}}]}
    with mcr.init(config, timeout=60) as comm:
        given = {tag: drawn(tag, 2) for tag in (0, 1)}
        total = {tag: np.zeros(np.prod(SHAPE)) for tag in given}
        for _ in range(6):
            got = {tag: torch.zeros(SHAPE) for tag in given}
            if comm.rank == 0:
                works = [comm.isend(given[tag], 1, tag) for tag in (1, 0)]
            else:
                works = [comm.irecv(got[tag], 0, tag) for tag in (0, 1)]
            for work in works:
                work.wait()
            for tag, out in got.items():
                total[tag] += f64(out) - f64(given[tag])
        return max(float(np.abs(each).max()) for each in total.values()) if comm.rank else 0.0


def refusals() -> list[str]:
    """Impossible calls raise on every rank, and nothing is sent."""
    texts = []
    with mcr.init(timeout=60) as comm:
        x = torch.ones(600)
        calls: list[tuple[str, dict[str, Any]]] = [
            ("all_reduce", {"compress": {"codec": "topk", "error_feedback": True}}),
            (
                "all_gather_into_tensor",
                {"compress": {"codec": "int8_block", "error_feedback": True}, "tag": "x"},
            ),
            ("reduce_scatter_tensor", {"compress": {"codec": "int8_block", "ef21": True}, "tag": "x"}),
            ("all_reduce", {"compress": {"codec": "powersgd"}, "tag": "x"}),
            ("all_reduce", {"compress": {"codec": "int8_block", "momentum_correction": True}, "tag": "x"}),
            ("all_reduce", {"compress": {"codec": "int8_block", "ef21": True, "error_feedback": True}}),
            ("all_reduce", {"compress": {"codec": "int8_block", "error_feedback": {"decay": 2.0}}}),
            ("all_reduce", {"compress": {"codec": "int8_block", "warmup": -1}}),
            ("all_reduce", {"op": "MIN", "compress": "int8_block"}),
        ]
        for kind, how in calls:
            tensors = {"all_reduce": (x,), "all_gather_into_tensor": (torch.ones(600 * comm.size), x)}
            other = (torch.ones(600), torch.ones(600 * comm.size))
            try:
                getattr(comm, kind)(*tensors.get(kind, other), **how)
                texts.append("done")
            except mcr.Unsupported as error:
                texts.append(str(error))
        comm.all_reduce(x)
        assert torch.equal(x, torch.full((600,), float(comm.size)))
    return texts
