"""Expert parallelism on real ranks against one process with all tokens and experts, in numpy's float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus import expert
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")

Array = Any
EXACT = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.04, torch.float16: 0.01}


@dataclass(frozen=True)
class Case:
    """A routing; rank r has `tokens[r % len(tokens)]` tokens."""

    experts: int
    k: int
    tokens: tuple[int, ...]
    hidden: int = 5
    none: float = 0.0  # share of choices that are -1
    only: int | None = None  # an expert that all choices name
    twice: bool = False  # a token may name an expert twice

    def of(self, rank: int) -> dict[str, Array]:
        """Return a rank's tokens, ids, weights, and the gradient of its output."""
        random = np.random.default_rng([self.experts, self.k, self.hidden, rank])
        n = self.tokens[rank % len(self.tokens)]
        ids = np.array(
            [random.choice(self.experts, self.k, replace=self.twice) for _ in range(n)], np.int64
        ).reshape(n, self.k)
        if self.only is not None:
            ids[:] = self.only
        ids[random.random(ids.shape) < self.none] = -1
        return {
            "x": random.standard_normal((n, self.hidden)),
            "ids": ids,
            "weights": random.random((n, self.k)) + 0.1,
            "gradient": random.standard_normal((n, self.hidden)),
        }

    def matrices(self) -> Array:
        """Expert e answers tanh(x W_e)."""
        random = np.random.default_rng(self.experts)
        return random.standard_normal((self.experts, self.hidden, self.hidden)) / self.hidden**0.5


CASES = (
    Case(4, 1, (7, 5, 3)),
    Case(6, 2, (9, 0, 4)),
    Case(7, 4, (3, 11)),  # experts that do not divide
    Case(3, 2, (6,), none=0.4),  # of four ranks, one has no expert
    Case(5, 2, (4, 8), only=4),  # all at the last rank that has any
    Case(4, 3, (5, 6), twice=True),
    Case(4, 2, (0,)),
    Case(1, 1, (3, 2)),
    Case(8, 2, (10, 6), hidden=300),
)


def rounded(values: Array, dtype: torch.dtype) -> Array:
    return torch.from_numpy(values).to(dtype).double().numpy()


def expected(case: Case, ranks: int, dtype: torch.dtype, weighted: bool = True) -> dict[str, Any]:
    """Outputs, gradients of tokens and weights by rank, and gradients of the experts, token by token."""
    matrices = rounded(case.matrices(), dtype)
    found: dict[str, Any] = {"y": [], "x": [], "weights": [], "matrices": np.zeros_like(matrices)}
    for rank in range(ranks):
        own = case.of(rank)
        x, ids, gradient = rounded(own["x"], dtype), own["ids"], rounded(own["gradient"], dtype)
        weights = own["weights"] if weighted else np.ones_like(own["weights"])
        y, of_x, of_weights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights)
        for t, c in itertools.product(*map(range, ids.shape)):
            e = ids[t, c]
            if e >= 0:
                answer = np.tanh(x[t] @ matrices[e])
                y[t] += weights[t, c] * answer
                of_weights[t, c] = gradient[t] @ answer
                inner = weights[t, c] * gradient[t] * (1 - answer**2)
                of_x[t] += inner @ matrices[e].T
                found["matrices"][e] += np.outer(x[t], inner)
        found["y"].append(y)
        found["x"].append(of_x)
        found["weights"].append(of_weights)
    return found


def answers_of(routed: expert.Dispatched, matrices: torch.Tensor) -> torch.Tensor:
    """Return the outputs of the local experts, each for all its rows at once."""
    assert (
        list(routed.routing.local_experts)
        == list(range(len(matrices)))[routed.routing.local_experts.start : routed.routing.local_experts.stop]
    )
    parts = routed.rows.split(routed.counts)
    assert len(parts) == len(routed.routing.local_experts)
    own = (
        torch.tanh(part @ matrices[e]) for e, part in zip(routed.routing.local_experts, parts, strict=True)
    )
    return torch.cat([routed.rows[:0], *own])


def close(
    actual: torch.Tensor, wanted: Array, dtype: torch.dtype, what: object, tolerance: float | None = None
) -> None:
    limit = EXACT[dtype] if tolerance is None else tolerance
    np.testing.assert_allclose(
        actual.detach().double().numpy(), wanted, rtol=limit,
        atol=limit * max(1.0, np.abs(wanted).max(initial=0)), err_msg=str(what),
    )  # fmt: skip


def check(
    comm: mcr.Communicator, case: Case, dtype: torch.dtype, tolerance: float | None = None, **options: Any
) -> expert.Dispatched:
    """A forward and a backward pass, and both again with the routing of the first."""
    what = (case, dtype, options)
    want = expected(case, comm.size, dtype)
    own = case.of(comm.rank)
    ids = torch.from_numpy(own["ids"])
    gradient = torch.from_numpy(own["gradient"]).to(dtype)
    first: expert.Dispatched | None = None
    for again in (False, True):
        x = torch.from_numpy(own["x"]).to(dtype).requires_grad_()
        kept = x.detach().clone()
        weights = torch.from_numpy(own["weights"]).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        )
        weights.requires_grad_()
        matrices = torch.from_numpy(case.matrices()).to(dtype).requires_grad_()
        if again:
            assert first is not None
            routed = expert.dispatch(x, weights=weights, routing=first.routing)
        else:
            first = routed = expert.dispatch(x, ids, weights, experts=case.experts, **options)
        y = expert.combine(answers_of(routed, matrices), routed)
        assert y.dtype == routed.rows.dtype == dtype
        close(y, want["y"][comm.rank], dtype, what, tolerance)
        y.backward(gradient)
        close(x.grad, want["x"][comm.rank], dtype, what, tolerance)  # type: ignore[arg-type]
        close(weights.grad, want["weights"][comm.rank], dtype, what, tolerance)  # type: ignore[arg-type]
        start, stop = routed.routing.local_experts.start, routed.routing.local_experts.stop
        if matrices.grad is not None:
            close(matrices.grad[start:stop], want["matrices"][start:stop], dtype, what, tolerance)
        assert torch.equal(x, kept)
    assert first is not None
    return first


def check_places(comm: mcr.Communicator, case: Case) -> None:
    """Rows are in the order of experts, ranks and tokens, and `load` counts the choices of all ranks."""
    all_of_them = [case.of(rank) for rank in range(comm.size)]
    own = all_of_them[comm.rank]
    x, ids, weights = (torch.from_numpy(own[name]) for name in ("x", "ids", "weights"))
    routed = expert.dispatch(x, ids, weights, experts=case.experts, load=True)
    runs = np.array_split(np.arange(case.experts), comm.size)
    assert list(routed.routing.local_experts) == runs[comm.rank].tolist()
    rows: list[Array] = []
    counts, factors = [], []
    for e in runs[comm.rank]:
        before = len(rows)
        for each in all_of_them:
            for t, c in np.argwhere(each["ids"] == e):
                rows.append(each["x"][t])
                factors.append(each["weights"][t, c])
        counts.append(len(rows) - before)
    assert routed.counts == counts
    np.testing.assert_array_equal(routed.rows.numpy(), np.array(rows).reshape(-1, case.hidden))
    assert routed.weights is not None
    np.testing.assert_array_equal(routed.weights.numpy(), np.array(factors))
    load = np.array([
        [sum(int((each["ids"][:, c] == e).sum()) for each in all_of_them) for e in range(case.experts)]
        for c in range(case.k)
    ])  # fmt: skip
    assert routed.load is not None
    np.testing.assert_array_equal(routed.load.numpy(), load)
    assert routed.dropped == 0


def check_capacity(comm: mcr.Communicator) -> None:
    """First choices have precedence over second choices; choices without room count for nothing."""
    case = Case(3, 2, (9, 6))
    own = case.of(comm.rank)
    room, kept = [2] * case.experts, own["ids"].copy()
    for c, t in itertools.product(range(case.k), range(len(kept))):
        e = kept[t, c]
        room[e] -= 1
        if room[e] < 0:
            kept[t, c] = -1
    x, ids, weights = (torch.from_numpy(own[name]) for name in ("x", "ids", "weights"))
    routed = expert.dispatch(x, ids, weights, experts=3, capacity=2, load=True)
    other = expert.dispatch(x, torch.from_numpy(kept), weights, experts=3)
    assert routed.counts == other.counts
    assert torch.equal(routed.rows, other.rows)
    assert routed.dropped == (kept < 0).sum() > 0
    assert routed.load is not None
    assert int(routed.load.sum()) == sum(case.of(rank)["ids"].size for rank in range(comm.size))


def check_unweighted(comm: mcr.Communicator) -> None:
    """Check calls without weights, asynchronous calls, and a layer with outputs of another width."""
    case = Case(5, 2, (4, 7))
    want = expected(case, comm.size, torch.float64, weighted=False)
    own = case.of(comm.rank)
    x = torch.from_numpy(own["x"]).requires_grad_()
    pending = expert.dispatch(x, torch.from_numpy(own["ids"]).int(), experts=5, async_op=True)
    routed = pending.wait()
    assert pending.wait() is routed
    assert routed.weights is None
    answers = answers_of(routed, torch.from_numpy(case.matrices()))
    wide = torch.cat([answers, answers], dim=1)
    y = expert.combine(wide, routed, async_op=True).wait()
    close(y, np.tile(want["y"][comm.rank], 2), torch.float64, case)
    gradient = torch.from_numpy(own["gradient"])
    y.backward(torch.cat([gradient, torch.zeros_like(gradient)], dim=1))
    close(x.grad, want["x"][comm.rank], torch.float64, case)  # type: ignore[arg-type]


def on_ranks(backends: list[str]) -> list[str]:
    torch.set_num_threads(1)
    with mcr.init(backends=backends) as comm:
        for number, case in enumerate(CASES):
            check_places(comm, case)
            check(comm, case, torch.float64, backend=backends[number % len(backends)])
            check(comm, case, torch.float32, backend=backends[(number + 1) % len(backends)])
            most = max(case.tokens) or 1
            check(comm, case, torch.float32, max_rows=most, backend=backends[number % len(backends)])
        case = CASES[-1]
        for dtype in (torch.bfloat16, torch.float16):
            check(comm, case, dtype)
        for there, back, dtype in (
            ("bf16", None, torch.float32), ("fp8_block", "bf16", torch.float32),
            ("fp8_block", "bf16", torch.bfloat16), ("fp8_block", "fp8_block", torch.float64),
            ("fp8_block", "bf16", torch.float16),
        ):  # fmt: skip
            check(comm, case, dtype, tolerance=0.1, compress=there, compress_back=back)
        check_capacity(comm)
        check_unweighted(comm)
    return backends


@pytest.mark.short("2")
@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_as_one_process_with_all_experts(ranks: int) -> None:
    run_ranks(on_ranks, ranks, args=[["msccl", "mpi", "gloo"]])


@pytest.mark.long
def test_without_mpi() -> None:
    run_ranks(on_ranks, 2, args=[["gloo"]], via="torch")


def count_operations() -> list[dict[str, Any]]:
    """Return the operations of a step, by the way counts travel, and their bytes."""
    torch.set_num_threads(1)
    found = []
    with mcr.init(backends=["gloo"]) as comm:
        x = torch.ones(6, 256, requires_grad=True)
        ids = torch.tensor([[0, 1]] * 3 + [[2, 3]] * 3)  # two experts of one rank
        routed = expert.dispatch(x, ids, torch.ones(6, 2), experts=4)
        ways: tuple[dict[str, Any], ...] = (
            {},
            {"max_rows": 6},
            {"routing": routed.routing},
            {"compress": "fp8_block", "compress_back": "bf16"},
        )
        for options in ways:
            with mcr.record() as log:
                if "routing" in options:
                    again = expert.dispatch(x, routing=options["routing"])
                else:
                    again = expert.dispatch(x, ids, torch.ones(6, 2), experts=4, tag="moe", **options)
                expert.combine(again.rows, again).sum().backward()
            found.append({
                "operations": [(record.kind, record.tag) for record in log.records],
                "bytes": [record.bytes for record in log.records],
            })  # fmt: skip
        assert comm.size == 2
    return found


def test_a_token_travels_once_to_a_rank() -> None:
    """Three tokens to the other rank, not six; counts with the data where a bound or a routing is known."""
    for result in run_ranks(count_operations, 2, via="torch"):
        plain, bounded, again, coded = result.value
        step = [["all_to_all_v", f"moe.{name}"] for name in ("dispatch", "combine", "dispatch", "combine")]
        assert plain["operations"] == [["all_to_all", "moe.counts"], *step]
        assert bounded["operations"] == step
        assert again["operations"] == [[kind, tag.replace("moe", "expert")] for kind, tag in step]
        rows = 3 * 256 * 4
        assert plain["bytes"][2] == rows
        assert rows < plain["bytes"][1] <= rows + 6 * 8 + 16
        assert rows // 4 < coded["bytes"][1] < rows // 3
        assert coded["bytes"][2] == rows // 2


# --- bad input ------------------------------------------------------------------------------------------


def refused_by_one() -> list[str]:
    """Return each rank's errors if rank 1's arguments differ; the group continues after each."""
    torch.set_num_threads(1)
    found = []
    with mcr.init(backends=["gloo"]) as comm:
        odd = comm.rank == 1
        x, ids, weights = torch.ones(2, 8), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
        far = ids + torch.tensor([[0, 0], [0, 9]]) if odd else ids
        calls: list[dict[str, Any]] = [
            {"expert_ids": far},
            {"expert_ids": far, "max_rows": 2},
            {"expert_ids": ids[: 1 if odd else 2], "weights": None},
            {"weights": weights[:, : 1 if odd else 2]},
            {"expert_ids": ids * (0 if odd else 1), "max_rows": 1},
            {"experts": 4 - odd, "expert_ids": ids.clamp(max=2)},
            {"x": torch.ones(2, 8 - odd)},
            {"x": x.to(torch.bfloat16) if odd else x},
            {"weights": None if odd else weights},
            {"compress": "bf16" if odd else None},
            {"expert_ids": ids[:, : 1 if odd else 2], "weights": None},
        ]
        for call in calls:
            with pytest.raises(mcr.InvalidArgument) as error:
                expert.dispatch(**{"x": x, "expert_ids": ids, "weights": weights, "experts": 4, **call})
            found.append(str(error.value))
        routed = expert.dispatch(x, ids, weights, experts=4)
        assert torch.equal(expert.combine(routed.rows, routed), 2 * x)
    return found


def test_all_ranks_raise_where_one_is_wrong() -> None:
    other, wrong = (result.value for result in run_ranks(refused_by_one, 2, via="torch"))
    assert wrong[:5] == [
        "expert_ids[1, 1]: expected an expert from 0 to 3, or -1 for none, got 12",
        "expert_ids[1, 1]: expected an expert from 0 to 3, or -1 for none, got 12",
        "expert_ids: shape [1, 2] does not fit x of shape [2, 8]; expected a row per token",
        "weights: expected shape [2, 2], that of expert_ids, got [2, 1]",
        "max_rows: 2 tokens of rank 1 go to rank 0, expected 1 at most",
    ]
    assert set(other[:5]) == {"dispatch: rank 1 refuses its arguments; its error has the reason"}
    same = "dispatch: expected the same {} on all ranks, got {} on rank 0 and {} on rank 1"
    facts = [
        ("experts", 4, 3), ("hidden", 8, 7), ("dtype", "float32", "bfloat16"),
        ("dtype of weights", "float32", "None"), ("compress", "None", "bf16"), ("experts per token", 2, 1),
    ]  # fmt: skip
    assert other[5:] == wrong[5:] == [same.format(*fact) for fact in facts]


BAD: dict[str, dict[str, Any]] = {
    r"x: expected a torch.Tensor, got list": {"x": [1.0]},
    r"x: expected shape \[rows, width\], got \[3\]": {"x": torch.ones(3)},
    r"x: dtype int64; expected one of float32, bfloat16, float16, float64": {"x": torch.ones(2, 3).long()},
    r"expert_ids: expected a torch.Tensor, got NoneType": {"expert_ids": None},
    r"expert_ids: expected integers, got float32": {"expert_ids": torch.ones(2, 1)},
    r"expert_ids: expected shape \[tokens, k\], k from 1, got \[2\]": {"expert_ids": torch.ones(2).int()},
    r"weights: expected a floating-point torch.Tensor or None, got int": {"weights": torch.ones(2, 1).int()},
    r"experts: expected an integer from 1, got 0": {"experts": 0},
    r"experts: expected an integer from 1, got None": {"experts": None},
    r"capacity: expected an integer from 0 or None, got -1": {"capacity": -1},
    r"max_rows: expected an integer from 1 or None, got 1.5": {"max_rows": 1.5},
    r"compress: unknown codec 'topk'; known: None, 'bf16', 'fp8_block'": {"compress": "topk"},
    r"compress_back: unknown codec 'int8'": {"compress_back": "int8"},
    r"expert_ids\[0, 0\]: expected an expert from 0 to 3": {"expert_ids": torch.tensor([[-2], [4]])},
    r"routing: expected that of a dispatch, got int": {
        "routing": 3, "expert_ids": None, "experts": None, "weights": None
    },
    r"with routing= expected only x and weights": {"routing": 3},
}  # fmt: skip


def test_bad_arguments_have_clear_errors() -> None:
    good: dict[str, Any] = {
        "x": torch.ones(2, 3),
        "expert_ids": torch.zeros(2, 1).int(),
        "weights": torch.ones(2, 1),
        "experts": 4,
    }
    with mcr.init():
        for text, changes in BAD.items():
            with pytest.raises(mcr.InvalidArgument, match=text):
                expert.dispatch(**{**good, **changes})
        routed = expert.dispatch(**good)
        with pytest.raises(
            mcr.InvalidArgument, match="answers: expected 2 rows, as many as were dispatched, got 3"
        ):
            expert.combine(torch.ones(3, 3), routed)
        with pytest.raises(
            mcr.InvalidArgument, match="routed: expected what dispatch has returned, got Tensor"
        ):
            expert.combine(torch.ones(2, 3), torch.ones(1))  # type: ignore[call-overload]
        with pytest.raises(mcr.InvalidArgument, match="x: expected the 2 tokens of its routing, got 3"):
            expert.dispatch(torch.ones(3, 3), routing=routed.routing)
        with pytest.raises(
            mcr.InvalidArgument, match=r"weights: expected shape \[2, 1\] of its routing, got \[2, 2\]"
        ):
            expert.dispatch(torch.ones(2, 3), weights=torch.ones(2, 2), routing=routed.routing)
