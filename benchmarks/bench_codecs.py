"""How fast codecs encode and decode, beside a copy of the same values in the same rounds.

    python benchmarks/bench_codecs.py [--size 64MiB] [--threads 1 2] [--codec NAME …] [--json FILE]

GB/s are bytes of float32 values, whatever the codec makes of them, by the fastest of the rounds. The calls
of a codec and `torch.Tensor.copy_` take turns; ratios are to that copy. Calls:

    encode      values → payload
    decode      payload → values
    accumulate  payload added to values
    reduce      two payloads decoded and added to values, and the sum encoded
    exchange    codecs without payloads: the work of one of 8 ranks in all rounds of an all_reduce, not the
                reductions themselves
    eager       encode in plain torch operations, where the kernels have them to be tested against

Every call's result is compared with the values before anything is timed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import torch
import typer
from harness import Json, Rounds, in_turns, program, seconds, show, write_json

from mcr_plus import registry
from mcr_plus.compression.codec import Codec, PayloadCodec, make
from mcr_plus.core.units import format_size, parse_size

Calls = dict[str, Callable[[], object]]
Row = dict[str, Any]

VARIANTS: Final[dict[str, list[dict[str, Any]]]] = {
    "int_shared": [{"bits": 16}],
    "topk": [
        *({"ratio": 1 / 64, "values": values, "chunk": 4096} for values in ("float32", "int4", "int2")),
        {"ratio": 0.25, "values": "int2", "chunk": 4096},
        {"ratio": 0.18, "values": "int4", "chunk": 4096},
    ],
}
"""Options beside the defaults that are worth rows of their own."""
EAGER: Final = ("int8_block",)
LIMIT: Final = 0.65
"""The largest relative L2 error of a working codec: signs at the best scale leave 0.6 of Gaussians."""
EXCHANGE_LIMIT: Final = 0.15
"""The same for codecs without payloads, which are given a matrix of rank one: 15 levels leave 0.07."""
RANKS: Final = 8


def configurations(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"codec": name, **options} for name in names for options in ({}, *VARIANTS.get(name, ()))]


def title(config: Mapping[str, Any]) -> str:
    return " ".join([config["codec"], *(f"{key}={value}" for key, value in config.items() if key != "codec")])


def verify(what: str, result: torch.Tensor, true: torch.Tensor, limit: float, *, sparse: bool) -> None:
    """Stops the program if a result is wrong. Of sparse ones only what they hold counts, up to its scale."""
    if sparse:
        kept = result != 0
        result, true = result[kept], true[kept]
        result = result * (true.norm() / result.norm())
    error = float((result - true).norm() / true.norm())
    if not error < limit:
        raise SystemExit(f"{what}: relative error {error:.3g}; expected less than {limit}")


def payload_calls(codec: PayloadCodec, numel: int) -> tuple[Calls, float]:
    """The calls, and bits per value of a payload."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    room, item = codec.wire_numel(numel), codec.wire_dtype.itemsize
    wires = torch.zeros(2, -(-room * item // 4) * 4 // item, dtype=codec.wire_dtype)
    first, second = (row[: codec.encode(values, row)] for row in wires)
    out, total, wire = torch.zeros(numel), torch.zeros(numel), torch.zeros_like(wires[0])

    def check(call: str, result: torch.Tensor, true: torch.Tensor) -> None:
        verify(f"{codec}: {call}", result, true, LIMIT, sparse=codec.traits.sparse)

    codec.decode(first, out)
    check("decode", out, values)
    codec.decode_accumulate(second, total)
    check("accumulate", total, values)
    length = codec.reduce(wires, total, wire, skip=0)
    check("reduce", total, 2 * values)
    codec.decode(wire[:length], out)
    check("encode of a sum", out, total)
    calls: Calls = {
        "encode": lambda: codec.encode(values, wires[0]),
        "decode": lambda: codec.decode(first, out),
        "accumulate": lambda: codec.decode_accumulate(first, total),
        "reduce": lambda: codec.reduce(wires, total, wire, skip=-1),
    }
    if codec.name in EAGER:
        kernel: Any = importlib.import_module(f"mcr_plus.kernels.{codec.name}")
        calls["eager"] = lambda: kernel.encode_reference(values, wire)
    return calls, first.numel() * item * 8 / numel


def exchange_calls(codec: Codec, numel: int) -> tuple[Calls, float]:
    """As `payload_calls`; the values are a matrix that is as nearly square as whole rows of 256 let it be."""
    columns = max(256, round(math.sqrt(numel) / 256) * 256)
    shape = (-(-numel // columns), columns)
    random = torch.Generator().manual_seed(0)
    parts = [torch.randn(size, generator=random) for size in shape]
    values = torch.outer(parts[0], parts[1]).view(-1)
    wires = [torch.zeros(each.numel, dtype=each.dtype) for each in codec.rounds([shape], RANKS)]
    out = values.clone()

    def exchange() -> None:
        for _ in codec.exchange(out, [shape], wires, RANKS, None):
            pass  # with the other ranks' parts all zero, a sum is this rank's part

    exchange()
    verify(f"{codec}: exchange", out, values, EXCHANGE_LIMIT, sparse=codec.traits.sparse)
    return {"exchange": exchange}, sum(wire.nbytes for wire in wires) * 8 / values.numel()


def best_of(calls: Calls, rounds: int) -> dict[str, float]:
    """Seconds of each call's fastest turn; all are called once before."""
    for call in calls.values():
        call()
    return {name: min(turns) for name, turns in in_turns(calls, rounds, seconds).items()}


def measure(config: Mapping[str, Any], nbytes: int, threads: int, rounds: int) -> list[Row]:
    torch.set_num_threads(threads)
    codec = make(config)
    numel = nbytes // 4
    calls, bits = (
        payload_calls(codec, numel) if isinstance(codec, PayloadCodec) else exchange_calls(codec, numel)
    )
    source, target = torch.ones(numel), torch.zeros(numel)
    best = best_of({"copy": lambda: target.copy_(source), **calls}, rounds)
    return [
        {
            "codec": title(config),
            "call": call,
            "bytes": nbytes,
            "threads": threads,
            "bits": bits,
            "gbs": nbytes / best[call] / 1e9,
            "copy_gbs": nbytes / best["copy"] / 1e9,
        }
        for call in calls
    ]


def print_tables(rows: Sequence[Row]) -> None:
    for nbytes, threads in dict.fromkeys((row["bytes"], row["threads"]) for row in rows):
        lines: list[list[str]] = []
        earlier = ""
        for row in rows:
            if (row["bytes"], row["threads"]) == (nbytes, threads):
                first = (row["codec"], f"{row['bits']:.2f}") if row["codec"] != earlier else ("", "")
                ratio = row["gbs"] / row["copy_gbs"]
                lines.append(
                    [*first, row["call"], f"{row['gbs']:.1f}", f"{row['copy_gbs']:.1f}", f"{ratio:.2f}"]
                )
                earlier = row["codec"]
        title = f"{format_size(nbytes)} of float32, {threads} thread{'s' * (threads > 1)}"
        show(["codec", "bits/value", "call", "GB/s", "copy_ GB/s", "× copy_"], lines, title)


@program
def main(
    size: Annotated[
        list[str], typer.Option(default_factory=lambda: ["64MiB"], help="Of the values, as float32.")
    ],
    threads: Annotated[list[int], typer.Option(default_factory=lambda: [1, 2])],
    codec: Annotated[list[str], typer.Option(default_factory=lambda: list(registry.names("codecs")))],
    rounds: Rounds = 11,
    figures: Json = None,
) -> None:
    before = torch.get_num_threads()
    rows = [
        row
        for each in size
        for count in threads
        for config in configurations(codec)
        for row in measure(config, parse_size(each), count, rounds)
    ]
    torch.set_num_threads(before)
    print_tables(rows)
    write_json(rows, figures)


if __name__ == "__main__":
    main()
