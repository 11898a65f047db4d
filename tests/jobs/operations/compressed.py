"""Programs of ranks for `test_compressed`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from codec_exam import CASES, F64, Case, exchanged, f64
from reference import Failures

import mcr_plus as mcr
from mcr_plus.compression.codec import PayloadCodec
from mcr_plus.core.kinds import dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32)


def values(rank: int, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Rank-dependent float32 values of different scales."""
    random = np.random.default_rng([rank, seed])
    array = random.standard_normal(tuple(shape)) * (1 + random.integers(0, 8, tuple(shape)))
    return torch.tensor(array, dtype=torch.float32)


def once(case: Case, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor after it has been encoded and decoded."""
    codec = case.make_payload()
    if not tensor.numel():
        return tensor.clone()
    wire = torch.zeros(codec.wire_numel(tensor.numel()), dtype=codec.wire_dtype)
    written = codec.encode(tensor, wire)
    out = torch.empty_like(tensor)
    codec.decode(wire[:written], out)
    return out


class Exam:
    """Runs operations with one codec, dtype, group and size, and notes the refused ones.

    Moved values are compared bit by bit, sums within the error bound of the codec.
    """

    MOVES = (
        "broadcast", "all_gather", "gather", "scatter", "all_to_all", "all_to_all_v", "all_gather_v",
        "gather_v", "scatter_v", "ring",
    )  # fmt: skip

    def __init__(
        self,
        comm: mcr.Communicator,
        case: Case,
        dtype: torch.dtype,
        numel: int,
        backend: str | None,
        failures: Failures,
    ) -> None:
        self.comm, self.case, self.dtype, self.failures = comm, case, dtype, failures
        self.size, self.me, self.ranks, self.root = comm.size, comm.rank, comm.ranks, comm.size - 1
        self.how: dict[str, Any] = {"compress": case.config, "backend": backend}
        self.name = f"{case.name} {dtype_name(dtype)} {numel} {backend} {comm.name}"
        self.codec = case.make()
        self.every = [values(rank, (numel,)).to(dtype) for rank in range(comm.size)]
        self.numel, self.own = numel, self.every[comm.rank]
        self.encodes = isinstance(self.codec, PayloadCodec) and dtype in self.codec.traits.dtypes
        self.seen = [once(case, each) for each in self.every] if self.encodes else self.every
        # If all ranks' places and values are larger than the dense values, a sparse codec's all_reduce is
        # dense.
        self.dense = False
        if self.codec.traits.sparse and isinstance(self.codec, PayloadCodec):
            self.dense = self.codec.wire_nbytes(numel) * comm.size >= 2 * numel * dtype.itemsize
        self.op: Any = "SUM"
        self.refused: list[str] = []

    def run(self, *, briefly: bool = False) -> None:
        """Run every operation, or one for each way to encode values: moved, in rows, summed."""
        for what in ("broadcast", "all_to_all_v", "ring") if briefly else self.MOVES:
            self.attempt(what)
        sums = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v")
        for self.op in ("SUM",) if briefly else ("SUM", "AVG"):
            first = sums[0] if self.encodes else "all_reduce_in_rounds"
            for what in (first, "reduce_scatter") if briefly else (first, *sums[1:]):
                self.attempt(what)
        self.op = "MAX"
        self.attempt("maximum")

    def attempt(self, what: str) -> None:
        """Run an operation; a refusal is noted."""
        try:
            getattr(self, what)()
        except mcr.Unsupported:
            self.refused.append(f"{what} {self.op}" if what not in (*self.MOVES, "maximum") else what)

    # -- comparing --------------------------------------------------------------------------------

    def same(self, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        """The very bits; where rounding is drawn, the neighbours too."""
        equal = torch.equal(got.contiguous().view(-1), expected.contiguous().view(-1))
        if self.codec.traits.unbiased and isinstance(self.codec, PayloadCodec):
            step = float(torch.finfo(self.codec.wire_dtype).eps)
            equal = torch.allclose(got, expected, rtol=2 * step, atol=2.0**-24)
        seen = "" if equal else f"{got.flatten()[:4]} {expected.flatten()[:4]}"  # formatting takes its time
        self.failures.expect(f"{what} {self.name}", equal, seen)

    def near(self, what: str, got: torch.Tensor, expected: F64, room: float) -> None:
        """Check the L2 norm of the difference against `room` and the rounding of the dtype."""
        off = float(np.linalg.norm(f64(got) - expected))
        eps = max(float(torch.finfo(self.dtype).eps), 2.0**-22) * float(np.linalg.norm(expected)) + 1e-6
        self.failures.expect(f"{what} {self.op} {self.name}", off <= room + eps, f"{off} > {room} + {eps}")

    def agreed(self, tensor: torch.Tensor) -> None:
        """Check that all ranks hold the same bits."""
        mine = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        prints = self.comm.all_gather_object(mine)
        self.failures.expect(f"equal bits {self.op} {self.name}", len(set(prints)) == 1, prints)

    # -- moved values -------------------------------------------------------------------------------

    def broadcast(self) -> None:
        tensor = self.own.clone()
        self.comm.broadcast(tensor, self.ranks[self.root], **self.how)
        self.same("broadcast", tensor, self.seen[self.root])

    def all_gather(self) -> None:
        out = torch.zeros(self.size * self.numel, dtype=self.dtype)
        self.comm.all_gather_into_tensor(out, self.own, **self.how)
        self.same("all_gather", out, torch.cat(self.seen))

    def gather(self) -> None:
        parts = [torch.zeros_like(self.own) for _ in self.ranks] if self.me == self.root else None
        self.comm.gather(self.own, parts, self.ranks[self.root], **self.how)
        if parts is not None:
            self.same("gather", torch.cat(parts), torch.cat(self.seen))

    def scatter(self) -> None:
        out = torch.zeros_like(self.own)
        parts = self.every if self.me == self.root else None
        self.comm.scatter(out, parts, self.ranks[self.root], **self.how)
        self.same("scatter", out, self.seen[self.me])

    def all_to_all(self) -> None:
        sent = torch.cat([self.every[(self.me + rank) % self.size] for rank in range(self.size)])
        out = torch.zeros_like(sent)
        self.comm.all_to_all_single(out, sent, **self.how)
        expected = [self.seen[(rank + self.me) % self.size] for rank in range(self.size)]
        self.same("all_to_all", out, torch.cat(expected))

    def rows(self, source: int, target: int) -> int:
        """Return the number of values from one rank to another: sometimes none."""
        return (source * 3 + target * 5) % 7 * (self.numel // 7)

    def all_to_all_v(self) -> None:
        outs = [torch.zeros(self.rows(rank, self.me), dtype=self.dtype) for rank in range(self.size)]
        parts = [self.own[: self.rows(self.me, rank)] for rank in range(self.size)]
        self.comm.all_to_all(outs, parts, **self.how)
        for rank, out in enumerate(outs):
            self.same("all_to_all_v", out, once(self.case, self.every[rank][: out.numel()]))

    def all_gather_v(self) -> None:
        outs = [torch.zeros(self.rows(rank, 1), dtype=self.dtype) for rank in range(self.size)]
        self.comm.all_gather_v(outs, self.own[: self.rows(self.me, 1)], **self.how)
        for rank, out in enumerate(outs):
            self.same("all_gather_v", out, once(self.case, self.every[rank][: out.numel()]))

    def gather_v(self) -> None:
        outs = [torch.zeros(self.rows(rank, 2), dtype=self.dtype) for rank in range(self.size)]
        here = self.me == self.root
        part = self.own[: self.rows(self.me, 2)]
        self.comm.gather_v(part, outs if here else None, self.ranks[self.root], **self.how)
        for rank, out in enumerate(outs if here else ()):
            self.same("gather_v", out, once(self.case, self.every[rank][: out.numel()]))

    def scatter_v(self) -> None:
        out = torch.zeros(self.rows(3, self.me), dtype=self.dtype)
        root = self.every[self.root]
        parts = [root[: self.rows(3, rank)] for rank in range(self.size)] if self.me == self.root else None
        self.comm.scatter_v(out, parts, self.ranks[self.root], **self.how)
        self.same("scatter_v", out, once(self.case, root[: out.numel()]))

    def ring(self) -> None:
        out = torch.zeros_like(self.own)
        works = [
            self.comm.irecv(out, self.ranks[self.me - 1], **self.how),
            self.comm.isend(self.own, self.ranks[(self.me + 1) % self.size], **self.how),
        ]
        for work in works:
            work.wait()
        self.same("ring", out, self.seen[self.me - 1])

    # -- sums -------------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """Return the factor of a sum."""
        return 1 / self.size if self.op == "AVG" else 1.0

    def expected(self, terms: Sequence[torch.Tensor]) -> tuple[F64, float]:
        """Return the sum and its permitted error.

        A sparse codec drops most values, which error feedback sends later: its sum is the sum of the sent
            values, without the rank's own part if that need not travel.
        """
        codec = self.codec
        if codec.traits.sparse:
            return self.scale * np.sum([f64(once(self.case, each)) for each in terms], 0), 0.0
        total: F64 = self.scale * np.sum([f64(each) for each in terms], 0)
        again = once(self.case, torch.tensor(total, dtype=torch.float32))
        lost = float(np.linalg.norm(f64(again) - total))
        for each in terms:
            lost += self.scale * float(np.linalg.norm(f64(once(self.case, each)) - f64(each)))
            if codec.traits.additive:  # the library rounds every partial sum
                assert isinstance(codec, PayloadCodec)
                eps = float(torch.finfo(codec.wire_dtype).eps) * (2 if codec.traits.unbiased else 1)
                lost += self.scale * self.size * eps * float(np.linalg.norm(f64(each)))
        return total, 2 * lost

    def at_all(self) -> tuple[F64, float]:
        """Return the expected result of all_reduce and reduce."""
        if self.dense:
            total: F64 = self.scale * np.sum([f64(each) for each in self.every], 0)
            return total, self.size * float(torch.finfo(self.dtype).eps) * float(np.linalg.norm(total))
        return self.expected(self.every)

    def all_reduce(self) -> None:
        tensor = self.own.clone()
        work = self.comm.all_reduce(tensor, self.op, async_op=True, **self.how)
        assert work is not None
        work.wait()
        self.near("all_reduce", tensor, *self.at_all())
        self.agreed(tensor)
        codec = None if self.dense else self.codec.name
        self.failures.expect(f"info {self.name}", work.info.codec == codec, work.info)

    def reduce(self) -> None:
        tensor = self.own.clone()
        self.comm.reduce(tensor, self.ranks[0], self.op, **self.how)
        if self.me == 0:
            self.near("reduce", tensor, *self.at_all())
        else:
            self.same("reduce", tensor, self.own)

    def reduce_scatter(self) -> None:
        out = torch.zeros_like(self.own)
        self.comm.reduce_scatter_tensor(out, self.own.repeat(self.size), self.op, **self.how)
        self.scattered("reduce_scatter", out, self.every)

    def reduce_scatter_v(self) -> None:
        counts = [(3 * rank + 2) % 5 * (self.numel // 5) for rank in range(self.size)]
        out = torch.zeros(counts[self.me], dtype=self.dtype)
        self.comm.reduce_scatter_v(out, [self.own[:count] for count in counts], self.op, **self.how)
        if out.numel():
            self.scattered("reduce_scatter_v", out, [each[: out.numel()] for each in self.every])

    def scattered(self, what: str, out: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
        """Compare with the sum; the rank's own term has not travelled."""
        total, room = self.expected(terms)
        if self.codec.traits.sparse:
            mine = terms[self.me]
            total = total + self.scale * (f64(mine) - f64(once(self.case, mine)))
        self.near(what, out, total, room)

    def all_reduce_in_rounds(self) -> None:
        """Codecs of several native all_reduces: against all ranks played in one process."""
        tensors = [each[: 5 * (self.numel // 5)].view(5, self.numel // 5) for each in self.every]
        tensor = tensors[self.me].clone()
        self.comm.all_reduce(tensor, self.op, tag=f"{self.numel} {self.op}", **self.how)
        total: F64 = self.scale * np.sum([f64(each) for each in tensors], 0)
        if self.codec.name == "randk":  # where something has arrived, it is the sum
            arrived = (tensor != 0).flatten().numpy()
            expected = total * arrived * (total.size / arrived.sum() if self.codec.traits.unbiased else 1)
            self.failures.expect(f"something arrives {self.name}", bool(arrived.any()))
        elif self.codec.name == "powersgd":  # the sum, projected onto the span of the result's columns
            left, weights, _ = np.linalg.svd(f64(tensor).reshape(5, -1))
            span = left[:, weights > 1e-2 * weights[0]]
            self.failures.expect(f"rank {self.name}", span.shape[1] == 1, weights)
            expected = (span @ (span.T @ total.reshape(5, -1))).reshape(-1)
        else:
            played = exchanged([self.case.make() for _ in self.every], tensors)
            expected = self.scale * f64(played[0])
        self.near("all_reduce", tensor, expected, 1e-2 * float(np.linalg.norm(expected)))
        self.agreed(tensor)

    def maximum(self) -> None:
        self.comm.all_reduce(self.own.clone(), "MAX", **self.how)


def every_codec(backends: list[str | None], briefly: bool, only: list[str] | None = None) -> dict[str, Any]:
    """Run every codec × operation × dtype; return the failures, and the refusals by codec and dtype.

    Backends after the first get two types, one for each group, in one size: most codecs send another type
    than they take. `briefly`: only float32 in the larger size on the first backend has all operations.
    Elsewhere one operation of each way of encoding runs, and codecs have only their first options.
    """
    torch.set_num_threads(1)
    failures = Failures()
    refused: dict[str, list[str]] = {}
    first = {case.config["codec"]: case for case in reversed(CASES)}
    with mcr.init(timeout=60) as comm:
        back = mcr.new_group(list(range(comm.size))[::-1])
        for backend in backends:
            for case in CASES:
                if only is not None and case.config["codec"] not in only:
                    continue
                if case.config["codec"] == "delta":  # which needs tags; see test_delta
                    continue
                kept = not briefly or case is first[case.config["codec"]]
                for dtype in DTYPES if backend == backends[0] else DTYPES[:2]:
                    if not kept and (dtype, backend) != (torch.float32, backends[0]):
                        continue
                    group = comm if dtype is torch.float32 else back
                    exam = None
                    both = dtype is torch.float32 and backend == backends[0]
                    for numel in (35, 1031) if both else (1031,):
                        exam = Exam(group, case, dtype, numel, backend, failures)
                        # No codec encodes int32: all its operations are refused, at once.
                        whole = dtype is torch.int32 or (both and numel == 1031)
                        exam.run(briefly=briefly and not whole)
                        alike = [each == exam.refused for each in group.all_gather_object(exam.refused)]
                        failures.expect(f"refusals of {exam.name}", all(alike), alike)
                    assert exam is not None
                    refused[f"{case.name} {dtype_name(dtype)}"] = exam.refused
    return {"wrong": failures.found, "cases": failures.cases, "refused": refused}
