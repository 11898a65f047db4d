"""Redistribution: planning, models between two hosts, many small tensors, and its memory, beside what users
write by hand.

    python benchmarks/bench_layout.py --parts planning,calls,messages,halo,state,memory,dtensor,hosts,overlap

`planning` runs in one process, `calls` and `halo` with two ranks of this host, `messages`, `state`, `memory`
and `dtensor` with four, `hosts` and `overlap` with two ranks and one on each of two network namespaces.
Candidates take turns; a time is that of the slowest rank, and of the rounds the median (with their range).
The report goes to benchmarks/results/layout_<hardware>_<yyyymm>.md.

Long because each part measures something else, and what users write by hand stands beside it.
"""

from __future__ import annotations

import itertools
import math
import resource
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Annotated, Any, Final

import harness
import numpy as np
import torch
import torch.distributed as dist
import typer
from harness import HARDWARE, Dated, Hardware, Rate, Rounds
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus import autograd, spatial
from mcr_plus.dtensor import dtensor_volume
from mcr_plus.layout import Layout, proof
from mcr_plus.layout.program import bound, load, programs

PARTS: Final = ("planning", "calls", "messages", "halo", "state", "memory", "dtensor", "hosts", "overlap")
MATRIX: Final = (4096, 4096)
LIBRARIES: Final = ("msccl", "mpi", "gloo")
SIZES: Final = (1 << 10, 64 << 10, 4 << 20)  # bytes that a rank sends
MODEL: Final = 100 << 20  # bytes between the hosts
TENSORS: Final = 500  # of a state, 4 to 64 KiB each
IN_A_TURN: Final = 5  # redistributions of DTensors
MATRIX_4MIB: Final = (1024, 1024)
CONVOLUTIONS: Final = ((16, 16), (16, 1), (1, 1))  # channels before and after
STATE: Final = 1 << 30  # bytes moved in bounded memory


# --- planning, in one process ---------------------------------------------------------------------------


def planning() -> list[list[str]]:
    """Rows: pair of layouts, ranks, milliseconds of a rank's own part, of its proof, and of all
    candidates."""
    wide = range(1024)
    pairs = {
        "S0 -> S1 @2x4, 8 ranks": (Layout.mesh(MATRIX, np.arange(8).reshape(2, 4), ["S0", "R"]),
                                   Layout.mesh(MATRIX, np.arange(8).reshape(2, 4), ["R", "S1"])),
        "S0 @1024 -> S0 @1000": (Layout.sharded(MATRIX, wide, 0), Layout.sharded(MATRIX, range(1000), 0)),
        "S0 @1024 -> S1 @1024": (Layout.sharded(MATRIX, wide, 0), Layout.sharded(MATRIX, wide, 1)),
        "S0 @1024 -> R @1000": (Layout.sharded(MATRIX, wide, 0), Layout.replicated(MATRIX, range(1000))),
    }  # fmt: skip
    rows = []
    for name, (source, target) in pairs.items():
        _ = source.regions, target.target_regions  # made once per layout
        step = programs(source, target, 4)[-1].steps[0]
        part = step.part(7)
        own, check, all_of_them = (
            1e3 * min(harness.seconds(call) for _ in range(7))
            for call in (
                partial(step.part, 7),
                partial(proof.check, part, step.source, step.target),
                partial(programs, source, target, 4),
            )
        )
        rows.append([name, f"{own:.2f}", f"{check:.2f}", f"{all_of_them:.2f}"])
    return rows


def planning_of_many() -> list[list[str]]:
    """Rows: pair of layouts, and milliseconds of a rank's own parts and their proofs, of different shapes."""
    rows = []
    for name, dim, others in (("S0 @1024 -> S0 @1000", 0, 1000), ("S0 @1024 -> S1 @1024", 1, 1024)):

        def plan(dim: int = dim, others: int = others) -> None:
            for number in range(TENSORS):
                shape = (1024 + 8 * number, 2048)
                source, target = (
                    Layout.sharded(shape, range(1024), 0),
                    Layout.sharded(shape, range(others), dim),
                )
                for program in programs(source, target, 4):
                    for step, part in zip(program.steps, program.parts(7), strict=True):
                        load(part, 4)
                        proof.check(part, step.source, step.target)

        rows.append([name, f"{1e3 * min(harness.seconds(plan) for _ in range(3)):.0f}"])
    return rows


# --- on ranks -------------------------------------------------------------------------------------------


def _in_turns(comm: mcr.Communicator, candidates: Mapping[str, Callable[[], object]], rounds: int) -> Any:
    """Milliseconds of the slowest rank by candidate and round."""
    for call in candidates.values():
        call()

    def turn(call: Callable[[], object]) -> float:
        comm.barrier()
        return 1e3 * float(max(comm.all_gather_object(harness.seconds(call))))

    return harness.in_turns(candidates, rounds, turn)


def calls(rounds: int) -> dict[str, Any] | None:
    """Microseconds of a redistribution whose plan is known, and of the operations that it consists of."""
    torch.set_num_threads(1)
    with mcr.init() as comm:
        ranks, rank, number = range(comm.size), comm.rank, 200
        source, target = Layout.sharded((8, 8), ranks, 0), Layout.sharded((8, 8), ranks, 1)
        x, out = torch.full((4, 8), float(rank)), torch.empty(8, 4)
        counts = [16 * (peer != rank) for peer in ranks]
        flat, back = torch.ones(16), torch.empty(16)

        other = 1 - rank
        packed, unpacked = flat.view(4, 4), back.view(4, 4)
        kept, sent = (x[:, 4 * at : 4 * at + 4] for at in (rank, other))
        stays, arrives = (out[4 * at : 4 * at + 4] for at in (rank, other))

        def by_hand() -> None:
            stays.copy_(kept)
            packed.copy_(sent)
            comm.all_to_all_single(back, flat, counts, counts)
            arrives.copy_(unpacked)

        move = mcr.redistribution({"": (source, target)})

        def many(call: Callable[[], object]) -> float:
            return 1e6 * harness.seconds(call, number)

        candidates: dict[str, Callable[[], object]] = {
            "all_to_all_single": lambda: comm.all_to_all_single(back, flat, counts, counts),
            "its operations": by_hand,
            "redistribute": lambda: mcr.redistribute(x, source, target, out=out),
            "redistribution": lambda: move({"": x}, {"": out}),
        }
        for call in candidates.values():
            many(call)
        times = harness.in_turns(candidates, rounds, many)
        return {"times": times} if rank == 0 else None


def messages(library: str, rounds: int) -> dict[str, dict[str, list[float]]] | None:
    """Microseconds of redistributions in which ranks have few partners, and of the same by messages."""
    torch.set_num_threads(1)
    config = {"version": 1, "backends": [library]}
    with mcr.init(config) as comm:
        rank, size = comm.rank, comm.size
        found = {}
        for nbytes in SIZES:
            number = nbytes // 4
            patterns = {
                "from one to one": (
                    Layout.replicated((number,), [0]),
                    Layout.replicated((number,), [size - 1]),
                ),
                "to the next": (
                    Layout.sharded((size * number,), range(size), 0),
                    Layout.sharded((size * number,), [*range(1, size), 0], 0),
                ),
                "from one to all": (
                    Layout.replicated((number,), [0]),
                    Layout.replicated((number,), range(size)),
                ),
            }
            for name, (source, target) in patterns.items():
                x: Any = torch.ones(number) if source.local_shape(rank) else None
                y: Any = torch.empty(number) if target.local_shape(rank) else None
                peers = {
                    "from one to one": {0: [size - 1]},
                    "from one to all": {0: list(range(1, size))},
                }.get(name, {each: [(each + 1) % size] for each in range(size)})
                ops = [mcr.P2POp(mcr.isend, x, peer) for peer in peers.get(rank, ())]
                ops += [mcr.P2POp(mcr.irecv, y, peer) for peer, to in peers.items() if rank in to]
                move = mcr.redistribution({"": (source, target)})

                def ours(move: Any = move, x: Any = x, y: Any = y) -> None:
                    move({} if x is None else {"": x}, {} if y is None else {"": y})

                def by_hand(ops: Any = ops) -> None:
                    for work in comm.batch_isend_irecv(ops):
                        work.wait()

                calls = 50 if nbytes <= 64 << 10 else 5

                def many(call: Callable[[], object], calls: int = calls) -> float:
                    comm.barrier()
                    return 1e6 * float(max(comm.all_gather_object(harness.seconds(call, calls))))

                for call in (ours, by_hand):
                    many(call)
                ways: dict[str, Callable[[], object]] = {"redistribution": ours, "messages": by_hand}
                found[f"{name}, {nbytes >> 10} KiB"] = harness.in_turns(ways, rounds, many)
        return found if rank == 0 else None


def halo(rounds: int) -> dict[str, Any] | None:
    """64³ x 16 channels in two slabs, a halo of 1: by layouts, and by messages of the same bytes."""
    torch.set_num_threads(1)
    with mcr.init() as comm:
        rank, peer = comm.rank, 1 - comm.rank
        layout = Layout.sharded((16, 64, 64, 64), range(comm.size), 1)
        x = torch.full(layout.local_shape(rank) or (), float(rank))
        face, other = torch.ones(16 * 64 * 64), torch.empty(16 * 64 * 64)
        at, edge = (0, 31) if rank == 0 else (1, 0)

        def messages() -> None:
            works = [comm.irecv(other, peer), comm.isend(face, peer)]
            for work in works:
                work.wait()

        def by_hand() -> None:
            wide = torch.empty(16, 33, 64, 64)
            face.view(16, 1, 64, 64).copy_(x[:, edge : edge + 1])
            messages()
            wide[:, at : at + 32].copy_(x)
            wide[:, 32 if rank == 0 else 0].copy_(other.view(16, 64, 64))

        def ours() -> torch.Tensor:
            return autograd.halo_exchange(x, layout, (0, 1, 0, 0), (0, 1, 0, 0))

        by_hand()
        assert torch.equal(ours()[:, at : at + 32], x)
        assert (ours()[:, 32 if rank == 0 else 0] == peer).all()
        candidates: dict[str, Callable[[], object]] = {
            "halo_exchange": ours,
            "by hand": by_hand,
            "messages alone": messages,
        }
        times = _in_turns(comm, candidates, rounds * 10)
        return {"times": times} if rank == 0 else None


def dtensor(rounds: int) -> dict[str, Any] | None:
    """All pairs of placements on 2x2 ranks: DTensor on torch's gloo, on our backend, and by our plans."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    from mcr_plus.dtensor import planned

    torch.set_num_threads(1)
    with mcr.init() as comm:
        dist.init_process_group("mcr")
        gloo: Any = {"backend_override": {0: "gloo", 1: "gloo"}}
        meshes = {"mcr": init_device_mesh("cpu", (2, 2)), "gloo": init_device_mesh("cpu", (2, 2), **gloo)}
        one = (Replicate(), Shard(0), Shard(1))
        befores = list(itertools.product((*one, Partial()), repeat=2))
        pairs = [(a, b) for a in befores for b in itertools.product(one, repeat=2) if a != b]
        found: dict[str, dict[str, float]] = {}
        for before, after in pairs:
            shape = list(MATRIX_4MIB)
            for axis in before:
                if isinstance(axis, Shard):
                    shape[axis.dim] //= 2
            local = torch.ones(shape)
            held = {
                name: DTensor.from_local(local, mesh, before, run_check=False)
                for name, mesh in meshes.items()
            }

            def moved(name: str, held: Any = held, after: Any = after) -> None:
                for _ in range(IN_A_TURN):
                    wait(held[name].redistribute(placements=after).to_local())

            def by_plans(moved: Any = moved) -> None:
                with planned():
                    moved("mcr")

            candidates: dict[str, Callable[[], object]] = {
                "gloo": partial(moved, "gloo"), "mcr": partial(moved, "mcr"), "planned": by_plans,
            }  # fmt: skip
            times = _in_turns(comm, candidates, rounds)
            found[f"{_words(before)} -> {_words(after)}"] = {
                name: median(each) / IN_A_TURN for name, each in times.items()
            }
        dist.destroy_process_group()
        return found if comm.rank == 0 else None


def wait(tensor: Any) -> Any:
    """The tensor, once what fills it is complete."""
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def _words(placements: Any) -> str:
    return ",".join(
        "R" if each.is_replicate() else f"S{each.dim}" if each.is_shard() else "P" for each in placements
    )


def hosts(rounds: int) -> dict[str, Any] | None:
    """FSDP on the first host -> replicas on the second: our plan, slices to each replica, full tensor +
    broadcast. Rows on the first -> columns on the second: our plan."""
    torch.set_num_threads(1)
    with mcr.init() as comm:
        rank, half = comm.rank, comm.size // 2
        shape = (MODEL // 4 // 1024, 1024)
        source, target = (
            Layout.sharded(shape, range(half), 0),
            Layout.replicated(shape, range(half, comm.size)),
        )
        local = source.local_shape(rank)
        x = None if local is None else torch.full(local, float(rank))
        out = torch.empty(shape) if rank >= half else None
        whole = torch.empty(shape)

        def slices() -> None:
            ops = []
            for sender in range(half):
                low, high = (int(side[sender, 0]) for side in source.held)
                for receiver in range(half, comm.size):
                    if rank == sender and x is not None:
                        ops.append(mcr.P2POp(mcr.isend, x, receiver, tag=sender))
                    if rank == receiver and out is not None:
                        ops.append(mcr.P2POp(mcr.irecv, out[low:high], sender, tag=sender))
            for work in comm.batch_isend_irecv(ops):
                work.wait()

        trainers = comm.split(0 if rank < half else None)

        def full_tensor() -> None:
            if trainers is not None and x is not None:
                trainers.all_gather_into_tensor(whole, x)
            comm.broadcast(whole, 0)

        ours = partial(mcr.redistribute, x, source, target, out=out)
        ours()
        if out is not None:
            rows = shape[0] // half
            assert all((out[at * rows : (at + 1) * rows] == at).all() for at in range(half))
        times = _in_turns(comm, {"redistribute": ours, "slices": slices, "full tensor": full_tensor}, rounds)
        columns = Layout.sharded(shape, range(half, comm.size), 1)
        across = _in_turns(comm, {"redistribute": partial(mcr.redistribute, x, source, columns)}, rounds)
        return {"times": times, "columns": across} if rank == 0 else None


def overlap(rounds: int) -> dict[str, Any] | None:
    """A step, forward and backward, of convolutions of 64³ volumes in two slabs: ours with and without
    overlap, and what it consists of: the convolution of a slab that has its halo, and the messages of both
    ways."""
    torch.set_num_threads(1)
    with mcr.init() as comm:
        rank, peer = comm.rank, 1 - comm.rank
        layout = Layout.sharded((64, 64, 64), range(comm.size), 0)
        found = {}
        for channels, out_channels in CONVOLUTIONS:
            name = f"{channels} -> {out_channels} channels"
            face = torch.ones(channels * 64 * 64)
            other = torch.empty_like(face)
            layers = {
                flag: spatial.Conv3d(channels, out_channels, 3, padding=1, layout=layout, overlap=flag)
                for flag in (True, False)
            }
            plain = torch.nn.Conv3d(channels, out_channels, 3, padding=(0, 1, 1))
            x = torch.randn(1, channels, 32, 64, 64, requires_grad=True)
            wide = torch.randn(1, channels, 34, 64, 64, requires_grad=True)
            grad = torch.randn(1, out_channels, 32, 64, 64)

            def messages(face: torch.Tensor = face, other: torch.Tensor = other) -> None:
                for _ in ("forward", "backward"):
                    works = [comm.irecv(other, peer), comm.isend(face, peer)]
                    for work in works:
                        work.wait()

            def step(conv: Any, x: torch.Tensor, grad: torch.Tensor = grad) -> None:
                x.grad = conv.weight.grad = conv.bias.grad = None
                conv(x).backward(grad)

            candidates: dict[str, Callable[[], object]] = {
                "step": partial(step, layers[True], x),
                "step without overlap": partial(step, layers[False], x),
                "computing alone": partial(step, plain, wide),
                "messages alone": messages,
            }
            found[name] = _in_turns(comm, candidates, rounds)
        return found if rank == 0 else None


def state(rounds: int) -> dict[str, Any] | None:
    """500 tensors from shards to shards of another dimension: one move, and a full tensor each over torch's
    gloo."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    with mcr.init() as comm:
        harness.join_gloo(comm)
        ranks, rank = range(comm.size), comm.rank
        mesh = init_device_mesh("cpu", (comm.size,))
        shapes = {f"t{index}": (16 << index % 5, 64) for index in range(TENSORS)}
        specs = {
            name: (Layout.sharded(shape, ranks, 0), Layout.sharded(shape, ranks, 1))
            for name, shape in shapes.items()
        }
        before = {
            name: torch.full(pair[0].local_shape(rank) or (), float(rank)) for name, pair in specs.items()
        }
        after = {name: torch.empty(pair[1].local_shape(rank) or ()) for name, pair in specs.items()}
        sharded = {
            name: DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
            for name, value in before.items()
        }

        def full_tensors() -> None:
            for name, value in sharded.items():
                after[name].copy_(value.full_tensor().chunk(comm.size, 1)[rank])

        began = time.perf_counter()
        move = mcr.redistribution(specs)
        move(before, after)
        first = 1e3 * (time.perf_counter() - began)
        times = _in_turns(
            comm, {"redistribution": lambda: move(before, after), "full_tensor each": full_tensors}, rounds
        )
        dist.destroy_process_group()
        return {"times": times, "first": first} if rank == 0 else None


def memory(rounds: int) -> dict[str, Any] | None:
    """Peak of memory above the tensors, of a move of 1 GiB in 64 MiB."""
    del rounds
    torch.set_num_threads(1)
    with mcr.init() as comm:
        ranks, rank, number = range(comm.size), comm.rank, 16
        shape = (STATE // number // 4 // 1024, 1024)
        pair = (Layout.sharded(shape, ranks, 0), Layout.sharded(shape, ranks, 1))
        specs = {f"w{index}": pair for index in range(number)}
        before = {name: torch.full(pair[0].local_shape(rank) or (), float(rank)) for name in specs}
        after = {name: torch.zeros(pair[1].local_shape(rank) or ()) for name in specs}
        mcr.redistribute(
            torch.ones(4),
            Layout.sharded((4 * comm.size,), ranks, 0),
            Layout.sharded((4 * comm.size,), ranks, 0),
        )
        move = mcr.redistribution(specs, memory="64MiB")
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        move(before, after)
        took = time.perf_counter() - began
        extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024
        rows = shape[0] // comm.size
        assert all(
            (value[at * rows : (at + 1) * rows] == at).all() for value in after.values() for at in ranks
        )
        most = max(comm.all_gather_object((extra, move.buffer_bytes / (1 << 20), took)))
        return {"extra": most[0], "buffers": most[1], "seconds": most[2]} if rank == 0 else None


# --- the report -----------------------------------------------------------------------------------------


def _pairs(pairs: Mapping[str, Mapping[str, float]]) -> str:
    taken = {name: each for name, each in pairs.items() if _is_taken(name)}
    rows = []
    for ours, theirs, some in (
        ("planned", "mcr", pairs),
        ("planned", "mcr", taken),
        ("planned", "gloo", pairs),
        ("mcr", "gloo", pairs),
    ):
        ratios = {name: each[ours] / each[theirs] for name, each in some.items()}
        worst = max(ratios, key=ratios.__getitem__)
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        above = sum(ratio > 1.05 for ratio in ratios.values())
        figures = [f"{each:.2f}" for each in (mean, min(ratios.values()), ratios[worst])]
        rows.append([f"{ours} / {theirs}", str(len(some)), *figures, worst, str(above)])
    table = harness.markdown(["times", "pairs", "geometric mean", "least", "most", "of", "above 1.05"], rows)
    ways = ("gloo", "mcr", "planned")
    every = [[name, *(f"{each[way]:.2f}" for way in ways)] for name, each in pairs.items()]
    note = (
        "`gloo`, `mcr`: DTensor's own plans on that backend; `planned`: on mcr inside `dtensor.planned()`. "
        "The second row is of the pairs for which a plan of ours receives less than DTensor's."
    )
    return "\n\n".join([note, table, harness.markdown(["pair", *(f"{way}, ms" for way in ways)], every)])


def _is_taken(pair: str) -> bool:
    """Whether DTensor's own plan receives more than the bound."""
    mesh = np.arange(4).reshape(2, 2)
    before, after = (side.split(",") for side in pair.split(" -> "))
    theirs = dtensor_volume(MATRIX_4MIB, mesh.shape, before, after)
    least = bound(Layout.mesh(MATRIX_4MIB, mesh, before), Layout.mesh(MATRIX_4MIB, mesh, after))
    return theirs is not None and (least.fullest, least.total) < (theirs.most, theirs.total)


def _table(times: Mapping[str, list[float]], first: str, unit: str = "ms") -> str:
    middle = {name: median(each) for name, each in times.items()}
    rows = [
        [
            name,
            f"{middle[name]:.1f}",
            f"{min(each):.1f}-{max(each):.1f}",
            f"{middle[name] / middle[first]:.2f}",
        ]
        for name, each in times.items()
    ]
    return harness.markdown(["way", unit, "range", f"/ {first}"], rows)


def _few_partners(launch: harness.Launch, rounds: int) -> str:
    rows = []
    for library in LIBRARIES:
        for pattern, times in harness.on_ranks(launch, messages, library, rounds).items():
            ours, theirs = (median(times[name]) for name in ("redistribution", "messages"))
            rows.append([library, pattern, f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"])
    head = ["library", "which", "redistribution, µs", "isend/irecv by hand, µs", "ratio"]
    return harness.markdown(head, rows)


@harness.program
def main(
    parts: Annotated[str, typer.Option(help="Which, with commas between.")] = ",".join(PARTS),
    rate: Rate = "1gbit",
    rounds: Rounds = 5,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    names = harness.chosen(parts.split(","), PARTS, "part")
    texts = []
    if "planning" in names:
        head = ["pair", "own part, ms", "proof, ms", "all candidates, ms"]
        texts += ["### Planning, one rank's part", harness.markdown(head, planning())]
        texts += [
            f"Layouts, all candidates, own parts and proofs of {TENSORS} tensors whose shapes all differ:",
            harness.markdown(["pair", "ms"], planning_of_many()),
        ]
    two, here = harness.here(2), harness.here(4)
    if "calls" in names:
        found = harness.on_ranks(two, calls, rounds)
        texts += [
            "### A known plan: 8x8 floats, S0 -> S1, two ranks",
            _table(found["times"], "its operations", "µs"),
            "all_to_all_single: of the bytes that the redistribution sends; its operations: that, and the "
            "three copies to and from its buffers, of views that are there already.",
        ]
    if "messages" in names:
        texts += ["### Few partners, four ranks of one host", _few_partners(here, rounds)]
    if "halo" in names:
        found = harness.on_ranks(two, halo, rounds)
        texts += [
            "### Halo of 1 around 64³ x 16 channels in two slabs, 256 KiB each way",
            _table(found["times"], "by hand"),
            "By hand: the face is packed, sent and received, and laid beside the slab in a new tensor.",
        ]
    if "state" in names:
        found = harness.on_ranks(here, state, rounds)
        texts += [
            f"### {TENSORS} tensors of 4 to 64 KiB, S0 -> S1, four ranks of one host",
            _table(found["times"], "redistribution"),
            f"The first call, with planning and proof, took {found['first']:.0f} ms.",
        ]
    if "memory" in names:
        found = harness.on_ranks(here, memory, rounds)
        texts += [
            "### 1 GiB in `memory: 64MiB`, four ranks of one host",
            f"Peak above the tensors {found['extra']:.0f} MiB (resident memory), of which buffers "
            f"{found['buffers']:.0f} MiB; {found['seconds']:.2f} s.",
        ]
    if "dtensor" in names:
        pairs = harness.on_ranks(here, dtensor, rounds)
        texts += [f"### DTensor, {len(pairs)} pairs of placements on 2x2 ranks, 4 MiB", _pairs(pairs)]
    if "hosts" in names:
        need_two_hosts()
        with TwoHosts(rate) as both:
            found = harness.on_ranks(harness.on_both(both, per_host=2, stdout=None), hosts, rounds)
        link = 1e3 * MODEL * 8 / 1e9 if rate == "1gbit" else 0.0
        texts += [
            f"### {MODEL >> 20} MiB, FSDP on one host -> two replicas on the other, {rate}",
            _table(found["times"], "redistribute"),
            f"The bytes once over the link take {link:.0f} ms at its nominal rate." if link else "",
            f"### {MODEL >> 20} MiB, rows on two ranks of one host -> columns on two of the other, {rate}",
            _table(found["columns"], "redistribute"),
        ]
    if "overlap" in names:
        need_two_hosts()
        with TwoHosts(rate) as both:
            found = harness.on_ranks(harness.on_both(both, per_host=1, stdout=None), overlap, rounds)
        texts += [f"### A step of a 3x3x3 convolution, 64³ in two slabs, a rank on each host, {rate}"]
        for name, times in found.items():
            texts += [f"{name}:", _table(times, "step")]
    note = "medians of rounds in which candidates take turns, times of the slowest rank"
    harness.write(
        harness.page("Redistribution", harness.command(), note, *texts), output, f"layout_{hardware}"
    )


if __name__ == "__main__":
    main()
