"""Weights from a trainer to a receiver: bytes and seconds of `mcr.sync` and of what others send.

    python benchmarks/bench_sync.py --rate 100mbit --output benchmarks/results/sync_….md
    python benchmarks/bench_sync.py --only-soak --soak 10000    or --only-signatures, --only-joins 1000,
                                                                --only-shards, --only-late, --only-relays 8,
                                                                --only-memory

A bfloat16 copy of the GPT example is trained for some steps, then with AdamW at learning rates as in
reinforcement learning; every step is a version. One host trains, the others receive, over links of the rate.
Seconds last from the call on the source until all receivers have the weights, in the median of the versions;
every version is compared bit for bit. Encoders of the others are written here: positions in 32 bits and
values (vLLM, TRL), gaps in 16 bits and values (slime), also with zstd where `zstandard` is installed.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import harness
import numpy as np
import sync_late
import sync_relays
import sync_shards
import torch
import torch.distributed as dist
import typer
from bench_local import joined
from harness import ROOT, Output
from sync_soak import joins_report, soak_report
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.kernels import delta
from mcr_plus.kernels.digest import digest
from mcr_plus.rendezvous import stream

zstandard: Any = None
with suppress(ImportError):
    zstandard = import_module("zstandard")

RATES: Final = (1e-6, 3e-6, 1e-5)
BITS: Final = torch.int16
LATE: Final = 12_800_000
Encoded = list[torch.Tensor]


# --- versions -------------------------------------------------------------------------------------------


def train(steps: int, versions: int, hidden: int, target: Path) -> dict[str, Any]:
    """Train the example, then go on at each rate; writes the bfloat16 copies after each step."""
    sys.path.insert(0, str(ROOT / "examples" / "common"))
    from corpus import read_corpus
    from transformer import LanguageModel, Shape

    shape = Shape(hidden=hidden)
    corpus, model = read_corpus(None, shape.sequence, 0), LanguageModel(shape, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    losses = []

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(corpus.windows(number, 0, 4)).text
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    def flat() -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1).bfloat16() for parameter in model.parameters()])

    for number in range(steps):
        step(number)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    moments = optimizer.state_dict()
    kept: dict[float, list[torch.Tensor]] = {}
    for rate in RATES:
        model.load_state_dict(start)
        optimizer.load_state_dict(moments)
        for group in optimizer.param_groups:
            group["lr"] = rate
        kept[rate] = [flat()]
        for number in range(versions):
            step(steps + number)
            kept[rate].append(flat())
    torch.save(kept, target)
    tenth = max(1, steps // 10)
    return {
        "parameters": kept[RATES[0]][0].numel(),
        "steps": steps,
        "loss": [sum(losses[:tenth]) / tenth, sum(losses[steps - tenth : steps]) / tenth],
    }


def read(path: str) -> dict[float, list[torch.Tensor]]:
    """The versions of each learning rate."""
    found: dict[float, list[torch.Tensor]] = torch.load(path, weights_only=True)
    return found


# --- what others send -----------------------------------------------------------------------------------


def indices(new: torch.Tensor, old: torch.Tensor) -> Encoded:
    """Positions in 32 bits, and values."""
    where = torch.nonzero(new.view(BITS) != old.view(BITS)).view(-1)
    return [where.to(torch.int32).view(torch.uint8), new[where].view(torch.uint8)]


def apply_indices(parts: Encoded, held: torch.Tensor) -> None:
    """The other end of `indices`."""
    held[parts[0].view(torch.int32).long()] = parts[1].view(torch.bfloat16)


def gaps(new: torch.Tensor, old: torch.Tensor) -> Encoded:
    """Gaps in 16 bits, and values; where a gap is longer, unchanged elements are sent, too."""
    where = np.flatnonzero(new.view(BITS).numpy() != old.view(BITS).numpy())
    between = np.diff(where, prepend=-1)
    if between.size and between.max() > 65535:
        stops = [
            np.arange(at - gap + 65535, at, 65535)
            for at, gap in zip(where, between, strict=True)
            if gap > 65535
        ]
        where = np.unique(np.concatenate([where, *stops]))
        between = np.diff(where, prepend=-1)
    steps = torch.from_numpy(between.astype(np.uint16).view(np.uint8))
    return [steps, new[torch.from_numpy(where)].view(torch.uint8)]


def apply_gaps(parts: Encoded, held: torch.Tensor) -> None:
    """The other end of `gaps`."""
    where = np.cumsum(parts[0].numpy().view(np.uint16).astype(np.int64)) - 1
    held[torch.from_numpy(where)] = parts[1].view(torch.bfloat16)


def squeezed(new: torch.Tensor, old: torch.Tensor) -> Encoded:
    """`gaps`, each part by zstd at level 3."""
    return [
        torch.frombuffer(
            bytearray(zstandard.ZstdCompressor(3).compress(part.numpy().tobytes())), dtype=torch.uint8
        )
        for part in gaps(new, old)
    ]


def apply_squeezed(parts: Encoded, held: torch.Tensor) -> None:
    """The other end of `squeezed`."""
    plain = [zstandard.ZstdDecompressor().decompress(part.numpy().tobytes()) for part in parts]
    apply_gaps([torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in plain], held)


OTHERS: Final[dict[str, tuple[Callable[..., Encoded], Callable[..., None]]]] = {
    "(b) int32 position + value": (indices, apply_indices),
    "(c) uint16 gap + value": (gaps, apply_gaps),
    **({"(c) with zstd": (squeezed, apply_squeezed)} if zstandard is not None else {}),
}
DENSE: Final = "(a) gloo broadcast"
OURS: Final = "mcr.sync"


# --- on ranks -------------------------------------------------------------------------------------------


def _send(parts: Encoded | None) -> Encoded:
    """Broadcast two parts and their lengths from rank 0."""
    lengths = torch.tensor([part.numel() for part in parts] if parts is not None else [0, 0])
    dist.broadcast(lengths, 0)
    arrived = parts or [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
    for part in arrived:
        dist.broadcast(part, 0)
    return arrived


def on_hosts(path: str) -> list[dict[str, Any]] | None:
    """Bytes and seconds of every way at every learning rate; rank 0's answer."""
    torch.set_num_threads(1)
    with mcr.init(backends=["gloo"]) as comm:
        harness.join_gloo(comm)
        rows = []
        for rate, versions in read(path).items():
            rows += [_row(comm, rate, way, versions) for way in (DENSE, *OTHERS, OURS)]
        dist.destroy_process_group()
        return rows if comm.rank == 0 else None


def _row(comm: mcr.Communicator, rate: float, way: str, versions: Sequence[torch.Tensor]) -> dict[str, Any]:
    is_source = comm.rank == 0
    model = {"weights": versions[0].clone()}
    held = model["weights"]
    sync = mcr.sync(model) if way == OURS else None
    sizes, seconds, pauses, passes = [], [], [], []
    for old, new in pairwise(versions):
        if is_source:
            held.copy_(new)
        comm.barrier()
        begin, sent = time.monotonic(), 0
        if sync is not None:
            sync.push()
            sync.pull(timeout=120)
            end = time.monotonic()
            comm.barrier()
            stats = sync.stats()
            sent = stats["bytes"]
            pauses.append(stats.get("pause_seconds", 0.0))
            target = torch.empty_like(held)
            target.copy_(held)
            before = time.perf_counter()
            target.copy_(held)
            passes.append(time.perf_counter() - before)
        elif way == DENSE:
            dist.broadcast(held, 0)
            end, sent = time.monotonic(), held.nbytes
        else:
            encode, apply = OTHERS[way]
            parts = _send(encode(new, old) if is_source else None)
            if not is_source:
                apply(parts, held)
            end, sent = time.monotonic(), sum(part.numel() for part in parts)
        if not torch.equal(held.view(BITS), new.view(BITS)):
            raise SystemExit(f"{way}: version differs on rank {comm.rank}")
        # Both hosts are this machine, whose monotonic clock they share.
        times = comm.all_gather_object((begin, end))
        seconds.append(max(each[1] for each in times) - times[0][0])
        sizes.append(sent)
    answers = comm.all_gather_object((median(pauses or [0.0]), median(passes or [0.0])))
    if sync is not None:
        sync.close()
    changed = [(a.view(BITS) != b.view(BITS)).float().mean().item() for a, b in pairwise(versions)]
    return {
        "rate": rate, "way": way, "density": median(changed), "bytes": median(sizes),
        "seconds": median(seconds), "dense_bytes": held.nbytes, "pause": answers[1][0], "pass": answers[1][1],
    }  # fmt: skip


# --- kernels --------------------------------------------------------------------------------------------


def kernels(rounds: int, numel: int = 25_000_000) -> list[list[str]]:
    """GB/s of dense bytes of one thread, by its own processor time; the best of `rounds`."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    old = (torch.randn(numel, generator=random) * 0.02).bfloat16()
    wire = torch.zeros(delta.most_nbytes(numel, 2), dtype=torch.uint8)
    rows = []
    for density in (0.0, 1e-4, 0.01, 0.05, 0.5):
        moved = torch.rand(numel, generator=random) < density
        size = torch.where(torch.rand(numel, generator=random) < 0.15, 3, 1)
        sign = torch.randint(0, 2, (numel,), generator=random) * 2 - 1
        new = (old.view(BITS) + (moved * size * sign).to(BITS)).view(torch.bfloat16)
        base, nbytes, times = digest(old), 0, [[], [], [], []]  # type: ignore[var-annotated]
        for _ in range(rounds):
            held, out = old.clone(), old.clone()
            begin = time.thread_time()
            nbytes = delta.encode(new, held, wire, (0, 1), base, update=True)
            times[0].append(time.thread_time() - begin)
            begin = time.thread_time()
            delta.apply(wire[:nbytes], out)
            times[1].append(time.thread_time() - begin)
            begin = time.thread_time()
            digest(out)
            times[2].append(time.thread_time() - begin)
            begin = time.thread_time()
            held.copy_(out)
            times[3].append(time.thread_time() - begin)
        speeds = [f"{old.nbytes / min(each) / 1e9:.3g}" for each in times]
        share = f"{nbytes / max(1, int(moved.sum())):.3g}" if density else "–"
        rows.append([f"{density:.2%}", f"{old.nbytes / nbytes:,.1f}", share, *speeds])
    return rows


# --- signatures -----------------------------------------------------------------------------------------


def signatures(rounds: int, numel: int = 12_800_000) -> list[list[str]]:
    """Milliseconds of one thread's processor time of a version on the source and on a receiver; medians.

    The source copies and encodes the weights; the receiver applies what came and copies the result. Both hash
    the payload and sign two frames: the answer, and the request for the next one.
    """
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    old = (torch.randn(numel, generator=random) * 0.02).bfloat16()
    wire = torch.zeros(delta.most_nbytes(numel, 2), dtype=torch.uint8)
    rows = []
    for density in (0.0, 0.01, 0.05, None):
        moved = torch.rand(numel, generator=random) < (density or 0.0)
        new = (old.view(BITS) + moved.to(BITS)).view(torch.bfloat16)
        base, target, nbytes = digest(old), torch.empty_like(old), 0
        times: list[list[float]] = [[], [], [], []]
        for _ in range(rounds):
            held, out = old.clone(), old.clone()
            marks = [time.thread_time()]
            target.copy_(new)
            if density is None:
                nbytes = delta.encode_anchor(target, wire, 1, windowed=False)
            else:
                nbytes = delta.encode(target, held, wire, (0, 1), base, update=True)
            marks.append(time.thread_time())
            delta.apply(wire[:nbytes], out)
            target.copy_(out)
            marks.append(time.thread_time())
            # As `Payload.of`, whose long pieces other threads hash.
            view: Any = wire[:nbytes].numpy()
            hashes = [hashlib.sha256(piece).digest() for piece in stream._pieces(memoryview(view))]
            payload = hashlib.sha256(b"".join(hashes)).digest()
            marks.append(time.thread_time())
            signer = stream._Signatures(b"secret", b"source", bytes(64), 1)
            for _ in range(2):
                signer.next(bytes(32) + stream._hash_of_body(bytes(8), [payload]))
            marks.append(time.thread_time())
            for each, (begin, end) in zip(times, pairwise(marks), strict=True):
                each.append(1e3 * (end - begin))
        source, receiver, hashed, signed = (median(each) for each in times)
        shares = [f"{(hashed + signed) / (work + hashed + signed):.1%}" for work in (source, receiver)]
        name = "all weights" if density is None else f"{density:.0%} changed"
        figures = [f"{each:.3f}" for each in (source, receiver, hashed, signed)]
        rows.append([name, f"{nbytes:,}", *figures, *shares])
    return rows


def handshake(rounds: int) -> float:
    """Milliseconds of processor time of both ends of the greeting of a connection; the median."""
    times = []
    for _ in range(rounds):
        with stream.listen("127.0.0.1") as listener:
            far = stream.StreamConnection(socket.create_connection(listener.getsockname()), lambda: False)
            near = stream.StreamConnection(listener.accept()[0], lambda: False)
        begin = time.process_time()
        other = threading.Thread(target=stream.greet, args=(far, b"secret", 1))
        other.start()
        stream.greeted(near, b"secret")
        other.join()
        times.append(1e3 * (time.process_time() - begin))
        for link in (far, near):
            link.close()
    return median(times)


def _signatures(rounds: int) -> str:
    head = [
        "message", "bytes", "copy, encode", "apply, copy", "hash", "sign", "share of the source's",
        "of the receiver's",
    ]  # fmt: skip
    return (
        "## Signatures\n\nProcessor time of one thread in ms, 12.8 million bfloat16 values. Both ends hash "
        "and sign.\n\n"
        + harness.markdown(head, signatures(rounds))
        + f"\n\nThe greeting of a connection, once: {handshake(50):.2f} ms of both ends together."
    )


# --- report ---------------------------------------------------------------------------------------------


def main(
    rate: Annotated[
        list[str] | None, typer.Option(help="Of the link, as tc writes it; 100mbit and 1gbit without it.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Of training at 5e-4.")] = 150,
    versions: Annotated[int, typer.Option(help="At each learning rate.")] = 6,
    hidden: Annotated[int, typer.Option(help="Of the transformer.")] = 512,
    kept: Annotated[Path | None, typer.Option(help="File of versions; made where it is missing.")] = None,
    soak: Annotated[int, typer.Option(help="Versions with injected damage and restarts; 0 for none.")] = 2000,
    only_soak: Annotated[bool, typer.Option(help="Nothing but those versions, on one host.")] = False,
    only_signatures: Annotated[bool, typer.Option(help="Nothing but the cost of signatures.")] = False,
    only_joins: Annotated[
        int, typer.Option(min=0, help="Nothing but so many receivers outside a job, on one host.")
    ] = 0,
    only_shards: Annotated[
        bool, typer.Option(help="Nothing but two sharded sources and two tensor parallel receivers.")
    ] = False,
    only_late: Annotated[
        bool, typer.Option(help="Nothing but receivers that are many versions behind.")
    ] = False,
    only_relays: Annotated[int, typer.Option(min=0, help="Nothing but so many that relay.")] = 0,
    only_memory: Annotated[bool, typer.Option(help="Nothing but the memory of a source.")] = False,
    hosts: Annotated[int, typer.Option(min=2, help="The first has the weights.")] = 2,
    rounds: Annotated[int, typer.Option(help="Of the kernels.")] = 7,
    output: Output = None,
) -> None:
    """Measure, print, and write a report."""
    parts = []
    if only_soak:
        title, note = "Weight synchronisation with damage and restarts", "Two ranks on one host, gloo."
        return _report(title, note, [soak_report(soak)], output)
    if only_joins:
        note = "One rank and one receiver at a time, one host."
        return _report("Receivers of weights that come and go", note, [joins_report(only_joins)], output)
    if only_signatures:
        return _report("Signatures of weights", "", [_signatures(rounds)], output)
    if only_memory:
        return _report("Memory of weight synchronisation", "", [sync_late.memory_report()], output)
    need_two_hosts()
    rates = rate or ["100mbit", "1gbit"]
    if only_relays:
        note = f"{sync_relays.NUMEL:,} bfloat16 values; both hosts are one machine, and share its two cores."
        found = [sync_relays.relays_report(each, only_relays, versions) for each in rates]
        return _report("Receivers that relay weights", note, found, output)
    if only_late:
        note = f"{LATE:,} bfloat16 values; both hosts are one machine, and share its two cores."
        return _report("Receivers that are late", note, [_late(rates, rounds)], output)
    with tempfile.TemporaryDirectory() as folder:
        path = kept or Path(folder, "versions.pt")
        about = path.with_suffix(".json")
        if not path.exists() or not about.exists():
            about.write_text(json.dumps(train(steps, versions, hidden, path)))
        done = json.loads(about.read_text())
        notes = (
            f"{done['parameters']:,} parameters, {done['steps']} steps at 5e-4: loss {done['loss'][0]:.3f} → "
            f"{done['loss'][1]:.3f} nats per byte, means of the first and the last tenth. "
        )
        if only_shards:
            return _report("Sharded weight synchronisation", notes, _shards(rates, path), output)
        head = ["density", "dense / bytes", "bytes / change", "encode GB/s", "apply", "digest alone", "copy"]
        parts.append("## Kernels, bfloat16, one thread\n\n" + harness.markdown(head, kernels(rounds)))
        for each in rates:
            with joined(hosts, each) as made:
                rows = harness.on_ranks(harness.on_both(made), on_hosts, str(path))
            parts.append(f"## {hosts} hosts, {each}\n\n" + harness.markdown(*_table(rows)))
        parts.append(_signatures(rounds))
        if soak:
            parts.append(soak_report(soak))
    zstd = "" if zstandard is not None else "zstd is not installed, and left out. "
    note = (
        f"{notes}Learning rates emulate those of reinforcement learning; no such run was made. Densities are "
        f"measured. {zstd}All hosts are one machine, and share its two cores and its clock."
    )
    return _report("Weight synchronisation", note, parts, output)


def _shards(rates: Sequence[str], versions: Path) -> list[str]:
    """A table for each link between the host of two trainers and that of two servers."""
    parts = []
    for each in rates:
        with TwoHosts(each) as made:
            rows = harness.on_ranks(harness.on_both(made, per_host=2), sync_shards.on_hosts, str(versions))
        parts.append(f"## Two sources, two receivers, {each}\n\n" + sync_shards.table(rows))
    return parts


def _late(rates: Sequence[str], rounds: int) -> str:
    found = []
    for each in rates:
        rows = []
        for density in (0.01, 0.001):
            with TwoHosts(each) as made:
                launch = harness.on_both(made)
                rows += harness.on_ranks(launch, sync_late.on_hosts, LATE, density, (2, 8, 32, 128), rounds)
        found.append((each, rows))
    return sync_late.table(found)


def _report(title: str, note: str, parts: Sequence[str], output: Path | None) -> None:
    for part in parts:
        print(part, "\n")
    if output is not None:
        harness.write(harness.page(title, harness.command(), note, *parts), output)


def _table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    dense = {row["rate"]: row for row in rows if row["way"] == DENSE}
    head = [
        "way",
        "AdamW at",
        "density",
        "bytes",
        "dense / bytes",
        "bytes / change",
        "ms",
        "broadcast / ms",
        "pause ms",
        "one copy ms",
    ]
    table = []
    for row in rows:
        changes = row["density"] * row["dense_bytes"] / 2
        times = [f"{1e3 * row['pause']:.2f}", f"{1e3 * row['pass']:.2f}"] if row["way"] == OURS else ["", ""]
        table.append([
            row["way"], f"{row['rate']:g}", f"{row['density']:.2%}", f"{row['bytes']:,.0f}",
            f"{row['dense_bytes'] / row['bytes']:,.1f}", f"{row['bytes'] / changes:.2f}",
            f"{1e3 * row['seconds']:,.1f}", f"{dense[row['rate']]['seconds'] / row['seconds']:,.1f}", *times,
        ])  # fmt: skip
    return head, table


if __name__ == "__main__":
    harness.program(main)()
