"""Programs of ranks with tensors on a device, which all ranks may share.

`test_gpu_jobs` starts them with CUDA tensors, `test_openreg` with tensors of a simulated device.

Oracles are NumPy's sums of inputs that all ranks can compute. For codecs the oracles are the same calls on
CPU tensors, which other tests compare with oracles of their own.
"""

from __future__ import annotations

import json
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice, product
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jobs.devices import late_streams
from jobs.devices.device_layers import LAYERS, fsdp, group_of_torch
from jobs.devices.gpu_arrays import arrays_in_order, delta_in_order
from jobs.operations import behaviour, conformance
from jobs.operations.conformance import Case
from jobs.reliability import verify_jobs
from reference import DEVICE, Failures, difference, full, inputs, reduced, rough, wide, zeros
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mcr_plus as mcr
from mcr_plus.backends.nccl.channel import support
from mcr_plus.core.kinds import KINDS
from mcr_plus.core.message import Signature

Part = Callable[[Sequence[str], Failures], None]
TIMEOUT: Final = 20.0
CODECS: Final[tuple[dict[str, Any], ...]] = (
    {"codec": "bf16"},
    {"codec": "fp16"},
    {"codec": "bf16", "rounding": "stochastic"},
    {"codec": "int8_block"},
    {"codec": "int4_block"},
    {"codec": "int4_block", "hadamard": True},
    {"codec": "int2_block", "error_feedback": True},
    {"codec": "fp8_block"},
    {"codec": "fp8_block", "format": "e5m2"},
    {"codec": "fp8_block", "scale": "e8m0"},
    {"codec": "sign1", "error_feedback": True},
    {"codec": "topk", "ratio": 0.05, "error_feedback": True},
    {"codec": "topk", "ratio": 0.0625, "chunk": 256, "values": "int2", "error_feedback": True},
    {"codec": "randk", "ratio": 0.05, "error_feedback": True},
    {"codec": "powersgd", "rank": 2, "error_feedback": True},
    {"codec": "int_shared"},
)
SECTIONS: Final = (
    "rough sums",
    "compressed",
    "messages",
    "persistent",
    "overlapping",
    "handles",
    "dropped",
    "groups",
)


def reports(library: str, launch: str) -> None:
    """Run the parts of a launch, each in a job of its own; print the findings of each at once."""
    run_parts(library, {n: part for n, part in PARTS[launch].items() if n not in LACKING.get(library, ())})


def run_parts(library: str, parts: Mapping[str, Part]) -> None:
    """Do the same for these parts."""
    late_streams.begin()
    for name, part in parts.items():
        failures, began = Failures(), time.perf_counter()
        try:
            part((library,), failures)
        except Exception:
            failures.check(name, traceback.format_exc()[-2500:])
        report = failures.report() | {"part": name, "seconds": round(time.perf_counter() - began, 2)}
        print(json.dumps(report), flush=True)


def check_part(results: Sequence[Any], name: str) -> None:
    """Check the output of a launch's ranks about a part."""
    for result in results:
        lines = (line for line in result.stdout.splitlines() if line.startswith("{"))
        found = {report["part"]: report for report in map(json.loads, lines)}
        assert name in found, f"rank {result.rank} ended before: {result.stderr[-3000:]}"
        report = found[name]
        told = "\n".join(report["failures"])
        assert not told, f"rank {result.rank}: {report['failed']} of {report['cases']} failed\n{told}"
        assert report["cases"] > 0


def _section(name: str) -> Callable[[Sequence[str], Failures], None]:
    def run(backends: Sequence[str], failures: Failures) -> None:
        with mcr.init(backends=with_host(backends), timeout=TIMEOUT) as comm:
            behaviour.SECTIONS[name](comm, backends, failures)

    return run


def with_host(backends: Sequence[str]) -> list[str]:
    """Objects and barriers need a library that takes CPU tensors."""
    return [*backends, *(name for name in ("mpi", "gloo") if name not in backends)]


def _sampled(cases: Iterator[Case], every: int, rank_sizes: dict[str, int]) -> Iterator[Case]:
    """Return every n-th of the library's cases."""
    yield from islice((case for case in cases if _possible(case, rank_sizes[case.group])), 0, None, every)


def _possible(case: Case, size: int) -> bool:
    """NCCL lacks some reductions."""
    if case.backend != "nccl" or case.op is None:
        return True
    kind = "all_reduce" if case.name.startswith("all_reduce") else "reduce_scatter"
    kind = "reduce" if case.name == "reduce" else kind
    assert kind in KINDS
    signed = Signature(
        kind,
        case.dtype,
        (4,),
        4 * case.dtype.itemsize,
        "world",
        size,
        device="cuda",
        reduce_op=case.op,  # type: ignore[arg-type]
    )
    return support(signed).level != "no"


def _types(backends: Sequence[str], failures: Failures) -> None:
    _table(conformance.every_type, 3, backends, failures)


def _shapes(backends: Sequence[str], failures: Failures) -> None:
    _table(conformance.every_shape, 2, backends, failures)


def _table(
    table: Callable[..., Iterator[Case]], every: int, backends: Sequence[str], failures: Failures
) -> None:
    if backends[0] == "nccl":
        every *= 12  # ranks that share a GPU take turns on it, 5 ms for each operation
    with mcr.init(backends=with_host(backends), timeout=TIMEOUT) as comm:
        groups = conformance.make_groups(comm)
        sizes = {name: group.size for name, group in groups.items()}
        conformance.run_table(_sampled(table(backends, list(groups)), every, sizes), groups, failures)


def _codecs(backends: Sequence[str], failures: Failures) -> None:
    """Compare codecs on the GPU with the same calls on the CPU, several times, so that residuals count.

    Codecs with random numbers draw other numbers on a GPU; only their first results are checked, by bounds.
    """
    library = backends[0]
    host = "gloo" if library == "nccl" else library
    expected, got = (_encoded(backends, *where, failures) for where in (("cpu", host), (DEVICE, library)))
    for what, wanted in expected.items():
        failures.expect(f"{what} ran on the GPU", what in got)
        if what not in got:
            continue
        check = RANDOM.get(what.codec)
        if check is None or (what.codec == "bf16" and "stochastic" not in what.config):
            failures.check(f"all_reduce {what}", difference(got[what], wide(wanted)))
        elif what.turn == 0:
            problem = check(wide(got[what]), [wide(_mine(what, rank)) for rank in range(2)])
            failures.check(f"all_reduce {what}", problem)


class _Encoded(NamedTuple):
    """A call: its codec and options, the number of elements, and how many there were before."""

    codec: str
    config: str
    numel: int
    turn: int


def _mine(what: _Encoded, rank: int) -> torch.Tensor:
    shape = (what.numel // 64, 64) if what.numel % 64 == 0 else (what.numel,)
    return rough(torch.float32, rank, what.numel, what.turn).reshape(shape)


def _rounded(got: np.ndarray[Any, Any], given: Sequence[np.ndarray[Any, Any]]) -> str | None:
    """Inputs and their sum, each rounded up or down to the 8 bits of bfloat16, right on average."""
    allowed = 2.0**-7 * (sum(np.abs(each) for each in given) + np.abs(sum(given)))
    error = got - sum(given)
    if np.any(np.abs(error) > allowed):
        return f"{int(np.sum(np.abs(error) > allowed))} of {got.size} are off by more than a step"
    mean, deviation = float(np.mean(error)), float(np.sqrt(np.sum(allowed**2))) / got.size
    return None if abs(mean) < 4 * deviation else f"a mean error of {mean}, {deviation} is one deviation"


def _picked(got: np.ndarray[Any, Any], given: Sequence[np.ndarray[Any, Any]]) -> str | None:
    """Check sums of some elements, the same elements on all ranks."""
    kept, exact = got != 0, sum(given)
    if abs(int(kept.sum()) - got.size * 0.05) > 1 + int(np.sum(exact == 0)):
        return f"{int(kept.sum())} of {got.size} elements"
    return difference(torch.tensor(got[kept]), np.asarray(exact)[kept], 1e-6 * float(np.abs(exact).max()))


def _projected(got: np.ndarray[Any, Any], given: Sequence[np.ndarray[Any, Any]]) -> str | None:
    """Return the sum, projected onto the result's columns, two of which are independent."""
    left, values, _ = np.linalg.svd(got)
    exact = np.asarray(sum(given))
    scale = float(values[0])
    if values[2] > 1e-4 * scale:
        return f"singular values {values[:4]}, of which two may be above zero"
    basis = left[:, :2]
    return difference(torch.tensor(got), basis @ (basis.T @ exact), 1e-3 * scale)


RANDOM: Final = {"bf16": _rounded, "randk": _picked, "powersgd": _projected}


def _encoded(
    backends: Sequence[str], device: str, library: str, failures: Failures
) -> dict[_Encoded, torch.Tensor]:
    """Return the results of all codecs and sizes on a device, in a job of its own."""
    results = {}
    with mcr.init(backends=with_host(backends), timeout=TIMEOUT) as comm:
        for config, count, turn in product(CODECS, (4096, 70_001), range(3)):
            if config["codec"] == "powersgd" and count % 64:
                continue  # a vector has no factors
            what = _Encoded(config["codec"], str(config), count, turn)
            tensor = _mine(what, comm.rank).to(device).clone()
            try:
                comm.all_reduce(tensor, compress=config, backend=library, tag=f"{config} of {count}")
            except mcr.McrError as error:
                failures.check(f"{what} on {device}", f"{type(error).__name__}: {error}")
                continue
            behaviour.same_bits(comm, str(what), tensor, failures)
            results[what] = tensor
    return results


def _layer(name: str) -> Part:
    def run(backends: Sequence[str], failures: Failures) -> None:
        with mcr.init(backends=with_host(backends), timeout=TIMEOUT) as comm:
            LAYERS[name](comm, failures)

    return run


def _fsdp(backends: Sequence[str], failures: Failures) -> None:
    fsdp(with_host(backends), failures)


def _delta(backends: Sequence[str], failures: Failures) -> None:
    """Test the codec delta: the lengths of its payloads are known once they are encoded."""
    with mcr.init(backends=[*backends, *({"gloo"} - set(backends))], timeout=TIMEOUT) as comm:
        delta_in_order(comm, backends[0], failures)


def _streams(backends: Sequence[str], failures: Failures) -> None:
    """Operations wait only for the stream that computes their inputs, and streams only for results."""
    with mcr.init(backends=with_host(backends), timeout=TIMEOUT) as comm:
        side = late_streams.stream()
        for backend in backends:
            for turn in range(12):
                _late_input(comm, backend, turn, failures)
                with late_streams.under(side):
                    _late_input(comm, backend, turn + 100, failures)
            _in_flight(comm, backend, side, failures)


def _late_input(comm: mcr.Communicator, backend: str, turn: int, failures: Failures) -> None:
    """Test an input that is computed late, a result that is used at once, and memory that is reused."""
    count = (1, 1000, 300_001)[turn % 3]
    source = zeros(count)
    value = torch.tensor(inputs(torch.float32, comm.rank, (count,), turn), dtype=torch.float32).to(DEVICE)
    late_streams.delay()
    source.copy_(value)
    work = behaviour.started(comm.all_reduce(source, async_op=True, backend=backend))
    work.wait()
    kept = source.clone()
    source.fill_(float("nan"))  # after the copy, in the order of the stream
    expected = reduced([inputs(torch.float32, rank, (count,), turn) for rank in range(comm.size)], "SUM")
    failures.check(f"late input on {backend}, turn {turn}", difference(kept, expected))


def _in_flight(comm: mcr.Communicator, backend: str, side: Any, failures: Failures) -> None:
    """Issue operations from two streams, each waited for on the other, without handles for their memory."""
    flying, here = [], late_streams.current()
    for turn in range(8):
        with late_streams.under(side if turn % 2 else here):
            late_streams.delay()
            tensor = full((5000,), float(comm.rank + turn))
            flying.append((turn, tensor, comm.all_reduce(tensor, async_op=True, backend=backend)))
    for turn, tensor, work in reversed(flying):
        with late_streams.under(here if turn % 2 else side) as got_on:
            behaviour.started(work).wait()
            got = tensor.clone()
        got_on.synchronize()
        wanted = sum(rank + turn for rank in range(comm.size))
        failures.check(f"in flight on {backend}", difference(got, np.full(5000, float(wanted))))


def _mixed(backends: Sequence[str], failures: Failures) -> None:
    """Tensors of the device and of the CPU, on all libraries in one random order, waited for in another."""
    with mcr.init(backends=with_host(backends), timeout=TIMEOUT) as comm:
        random = np.random.default_rng(5)
        names = with_host(backends)
        for turn in range(30):
            flying = []
            for number in range(10):
                backend = names[int(random.integers(len(names)))]
                count = int(random.integers(1, 50_000))
                on_gpu = backend == "nccl" or bool(random.integers(2))
                salt = 100 * turn + number
                value = torch.tensor(inputs(torch.float32, comm.rank, (count,), salt), dtype=torch.float32)
                tensor = value.to(DEVICE) if on_gpu else value
                work = comm.all_reduce(tensor, async_op=True, backend=backend)
                flying.append((salt, count, backend, tensor, behaviour.started(work)))
            for at in random.permutation(len(flying)):
                salt, count, backend, tensor, work = flying[at]
                work.wait()
                parts = [inputs(torch.float32, rank, (count,), salt) for rank in range(comm.size)]
                failures.check(f"{backend} on {tensor.device}", difference(tensor, reduced(parts, "SUM")))


def _fused(backends: Sequence[str], failures: Failures) -> None:
    """Test small operations that are fused, with and without a codec."""
    for codec in (None, "bf16"):
        stages: list[dict[str, Any]] = [{"fuse": {}}]
        stages += [{"compress": {"codec": codec}}] if codec else []
        config = {
            "version": 1,
            "backends": with_host(backends),
            "pipeline": [*stages, {"select": {}}, {"dispatch": {}}],
        }
        with mcr.init(config, timeout=TIMEOUT) as comm:
            for turn in range(4):
                tensors = [behaviour.mine(comm, 3 + 5 * i, salt=turn) for i in range(20)]
                works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
                for work in works:
                    behaviour.started(work).wait()
                for i, tensor in enumerate(tensors):
                    wanted = behaviour.summed(comm, 3 + 5 * i, turn)  # quarters below 8: exact in bfloat16
                    failures.check(f"fused, codec {codec}", difference(tensor, wanted))
                fused = behaviour.started(works[0]).info.fused
                failures.expect("operations travelled as one", fused > 1, fused)


def _small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(33, 64), nn.GELU(), nn.Linear(64, 17), nn.LayerNorm(17))


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(6, 33, generator=torch.Generator().manual_seed(rank))


def _expected_gradients(size: int) -> list[torch.Tensor]:
    """Return the gradient of the mean of the ranks' losses, computed in one process on the CPU in float64."""
    model = _small_model().double()
    loss = torch.stack([model(_batch(rank).double()).square().mean() for rank in range(size)]).mean()
    loss.backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def _training(backends: Sequence[str], failures: Failures) -> None:
    """Test gradients in `mcr.wrap`, with and without a codec."""
    for codec, error in ((None, 1e-5), ("bf16", 2e-2), ("int8_block", 2e-2)):
        stages = [{"compress": {"codec": codec}}] if codec else []
        config = {
            "version": 1,
            "backends": with_host(backends),
            "pipeline": [{"fuse": {}}, *stages, {"select": {}}, {"dispatch": {}}],
        }
        with mcr.init(config, timeout=TIMEOUT) as comm:
            model: nn.Module = _small_model().to(DEVICE)
            model, _ = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(3):
                model.zero_grad()
                model(_batch(comm.rank).to(DEVICE)).square().mean().backward()
                _compare_gradients(f"mcr.wrap, codec {codec}", model, comm.size, error, failures)


def _compare_gradients(name: str, model: nn.Module, size: int, error: float, failures: Failures) -> None:
    for param, wanted in zip(model.parameters(), _expected_gradients(size), strict=True):
        assert param.grad is not None
        allowed = error * float(wanted.abs().max()) + 1e-7
        failures.check(name, difference(param.grad, wanted.numpy(), allowed))


def _in_torch(backends: Sequence[str], failures: Failures) -> None:
    """Test torch's DDP and its functions on tensors of the device, with the backend `mcr`."""
    with group_of_torch(with_host(backends)) as (rank, size):
        model = DistributedDataParallel(_small_model().to(DEVICE))
        for _ in range(3):
            model.zero_grad()
            model(_batch(rank).to(DEVICE)).square().mean().backward()
            _compare_gradients("DDP", model, size, 1e-5, failures)
        total = full((7,), float(rank + 1))
        dist.all_reduce(total)
        failures.check("dist.all_reduce", difference(total, np.full(7, size * (size + 1) / 2)))
        parts = [zeros(3) for _ in range(size)]
        dist.all_gather(parts, full((3,), float(rank)))
        failures.check(
            "dist.all_gather", difference(torch.stack(parts), np.arange(size)[:, None].repeat(3, 1))
        )
        out = zeros(2 * size)
        dist.all_to_all_single(out, full((2 * size,), float(rank)))
        failures.check("dist.all_to_all_single", difference(out, np.arange(float(size)).repeat(2)))


def _cupy(backends: Sequence[str], failures: Failures) -> None:
    """Test operations on CuPy's arrays in place, in the order of CuPy's current stream."""
    if find_spec("cupy") is None:
        failures.expect("no CuPy here", True)
        return
    cupy: Any = __import__("cupy")
    with mcr.init(backends=with_host(backends), timeout=TIMEOUT) as comm:
        do: Any = comm  # the annotations say tensors
        for backend in backends:
            array = cupy.full((1000,), float(comm.rank + 1), dtype=cupy.float32)
            do.all_reduce(array, backend=backend)
            wanted = np.full(1000, comm.size * (comm.size + 1) / 2)
            failures.expect(f"CuPy on {backend}", bool((cupy.asnumpy(array) == wanted).all()), array[:3])
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                late = torch.cuda.ExternalStream(stream.ptr)
                with torch.cuda.stream(late):
                    late_streams.delay()
                array = cupy.full((1000,), float(comm.rank + 1), dtype=cupy.float32)
                do.all_reduce(array, backend=backend)
                result = array.copy()
            stream.synchronize()
            failures.expect(
                f"CuPy's stream on {backend}", bool((cupy.asnumpy(result) == wanted).all()), result[:3]
            )
            arrays_in_order(comm, backend, failures)


def _verified(backends: Sequence[str], failures: Failures) -> None:
    """`dispatch: {verify: every}`: right results, and a bit that flips on the host is found on both ranks."""
    library = backends[0]
    config = verify_jobs.config(*with_host(backends))
    with mcr.init(config) as comm:
        groups = conformance.make_groups(comm)
        sizes = {name: group.size for name, group in groups.items()}
        table = conformance.every_type(backends, list(groups))
        conformance.run_table(_sampled(table, 12, sizes), groups, failures)
    for place, victim, count in (
        ("sent", 0, 7),
        ("arrived", 1, 7),
        ("sent", 1, 70_001),
        ("arrived", 0, 70_001),
    ):
        with mcr.init(config) as comm:  # the group is failed after the first
            flipper = verify_jobs.Flipper(verify_jobs.verified(library))
            tensor = behaviour.mine(comm, count)
            comm.all_reduce(tensor, backend=library)
            failures.check("a verified sum", difference(tensor, behaviour.summed(comm, count)))
            flipper.arm(place if comm.rank == victim else "", 0, random.Random(count))
            try:
                comm.all_reduce(behaviour.mine(comm, count), backend=library)
                raised = "nothing"
            except mcr.DataCorrupted as error:
                raised = error.library
            failures.expect(
                f"a bit of {count} that flips in {place} on rank {victim}", raised == library, raised
            )


def _sums(backends: Sequence[str], failures: Failures) -> None:
    """Test `sums` on tensors of the device: the bits of the same call on the host."""
    with mcr.init(backends=with_host(backends), timeout=TIMEOUT) as comm:
        for library in backends:
            for sums in ("fixed", "exact"):
                for dtype in (torch.float32, torch.bfloat16):
                    host = torch.randn(5003, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
                    tensor = host.to(DEVICE)
                    comm.all_reduce(host, sums=sums, backend=library)
                    comm.all_reduce(tensor, sums=sums, backend=library)
                    failures.expect(f"{sums} {dtype} on {library}", torch.equal(tensor.cpu(), host))


PARTS: Final[dict[str, dict[str, Part]]] = {
    "operations": {
        "types": _types,
        "shapes": _shapes,
        **{name: _section(name) for name in SECTIONS},
    },
    "codecs": {"codecs": _codecs, "delta": _delta},
    "programs": {
        "streams": _streams,
        "mixed": _mixed,
        "fused": _fused,
        "training": _training,
        "in torch": _in_torch,
        "cupy": _cupy,
        "verified": _verified,
        "sums": _sums,
    },
    "layers": {**{name: _layer(name) for name in LAYERS}, "FSDP": _fsdp},
}
"""What is checked, by the launch in which it is checked and its name."""

LACKING: Final = {"nccl": ("messages", "dropped", "verified")}
"""Parts that need what a library lacks: match tags, a host that has the data."""
