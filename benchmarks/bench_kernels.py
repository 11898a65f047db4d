"""How fast the kernels of codecs run on a GPU, beside a copy of the same values.

    python benchmarks/bench_kernels.py [--size 256MiB] [--codec NAME …]

GB/s are bytes of float32 values, whatever the codec makes of them, by the median of timed launches (CUDA
events). `copy` moves each value once from and once to memory. Inputs are normally distributed and new for
each codec; every payload is compared with that of the CPU, and every decoded value with the CPU's, before
anything is timed. The report goes to benchmarks/results/kernels_<card>_<yyyymm>.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import Dated

from mcr_plus import registry
from mcr_plus.compression.codec import PayloadCodec, make
from mcr_plus.core.units import format_size, parse_size

CONFIGS: Final[tuple[dict[str, Any], ...]] = (
    {"codec": "bf16"},
    {"codec": "bf16", "rounding": "stochastic"},
    {"codec": "int8_block"},
    {"codec": "fp8_block"},
    {"codec": "int4_block"},
    {"codec": "int4_block", "hadamard": True},
    {"codec": "int2_block"},
    {"codec": "sign1"},
    {"codec": "topk", "ratio": 0.01},
    {"codec": "topk", "ratio": 1 / 64, "chunk": 4096, "values": "int2"},
    {"codec": "exp_window"},
)
CHECKED: Final = 1 << 20  # values compared with the CPU's, and a few that fill no block


def timed(call: Callable[[], object], rounds: int) -> float:
    """Seconds of the GPU, the median of rounds, after three that do not count."""
    times: list[float] = []
    for turn in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def same_as_on_the_cpu(config: dict[str, Any]) -> str:
    """What differs from the CPU's payload and values: nothing, or how much of it."""
    values = torch.randn(CHECKED + 37, generator=torch.Generator().manual_seed(1))
    payloads, decoded = [], []
    for device in ("cpu", "cuda"):
        codec = make(config)
        assert isinstance(codec, PayloadCodec)
        codec.enter(0, "key")
        wire = torch.zeros(codec.room(values.numel(), values.dtype), dtype=codec.wire_dtype, device=device)
        length = codec.encode(values.to(device), wire)
        out = torch.zeros(values.numel(), device=device)
        codec.decode(wire[:length], out)
        payloads.append(wire[:length].cpu())
        decoded.append(out.cpu())
    if payloads[0].numel() != payloads[1].numel():
        return f"{payloads[1].numel()} elements of the payload, {payloads[0].numel()} on the CPU"
    wrong = int((payloads[0].view(torch.uint8) != payloads[1].view(torch.uint8)).sum())
    unlike = int((decoded[0] != decoded[1]).sum())
    return "equal" if not wrong + unlike else f"{wrong} bytes, {unlike} values differ"


def row(config: dict[str, Any], numel: int, rounds: int, copied: float) -> list[str]:
    title = " ".join(
        [config["codec"], *(f"{key}={value}" for key, value in config.items() if key != "codec")]
    )
    verdict = same_as_on_the_cpu(config)
    codec = make(config)
    assert isinstance(codec, PayloadCodec)
    codec.enter(0, "key")
    values = torch.randn(numel, device="cuda")
    wire = torch.zeros(codec.room(numel, values.dtype), dtype=codec.wire_dtype, device="cuda")
    length = codec.encode(values, wire)
    payload, out = wire[:length], torch.zeros_like(values)
    calls: list[Callable[[], object]] = [
        lambda: codec.encode(values, wire),
        lambda: codec.decode(payload, out),
        lambda: codec.decode_accumulate(payload, out, 1e-3),
    ]
    rates = [values.nbytes / timed(call, rounds) / 1e9 for call in calls]
    bits = 8 * payload.nbytes / numel
    return [title, f"{bits:.2f}", *(f"{rate:.0f} ({rate / copied:.2f})" for rate in rates), verdict]


@harness.program
def main(
    size: Annotated[str, typer.Option(help="Of the float32 values.")] = "256MiB",
    codec: Annotated[list[str] | None, typer.Option(help="These alone.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    output: Dated = None,
) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels: torch sees no CUDA device")
    names = harness.chosen(codec or sorted(registry.CODECS), registry.CODECS, "codec")
    numel = parse_size(size) // 4
    values, target = torch.randn(numel, device="cuda"), torch.zeros(numel, device="cuda")
    copied = values.nbytes / timed(lambda: target.copy_(values), rounds) / 1e9
    rows: list[Sequence[str]] = [["copy", "32", f"{copied:.0f}", "", "", ""]]
    for config in CONFIGS:
        if config["codec"] in names:
            try:
                rows.append(row(config, numel, rounds, copied))
            except Exception as error:  # the others are measured all the same
                rows.append([str(config), "", "", "", "", f"{type(error).__name__}: {str(error)[:200]}"])
            print(" | ".join(rows[-1]), flush=True)
    head = ["codec", "bits/value", "encode GB/s (to copy)", "decode", "accumulate", "against the CPU"]
    card = torch.cuda.get_device_name()
    note = f"{card}; {format_size(values.nbytes)} of float32 values; medians of {rounds} launches"
    page = harness.page("Codec kernels on a GPU", harness.command(), note, harness.markdown(head, rows))
    harness.write(page, output, f"kernels_{card.lower().replace(' ', '-')}")


if __name__ == "__main__":
    main()
