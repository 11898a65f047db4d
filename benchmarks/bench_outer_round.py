"""What a round of `mcr.local` costs a rank in processor time, part by part, against the steps between.

    python benchmarks/bench_outer_round.py [--rounds 20] [--ways 'local int4,local int2,local topk']

One process and one thread, without other ranks: it makes the steps of a round with the GPT of 12.7 million
parameters of `bench_local`, then everything that an outer step does to each fragment, with as many payloads
as there would be ranks. Time is that of the thread, so other work on the machine matters only as far as it
takes caches and memory. Waiting, gloo's threads and the calls between the parts are not in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import HARDWARE, ROOT, Dated, Hardware

from mcr_plus.compression.codec import PayloadCodec, make
from mcr_plus.compression.error_feedback import ErrorFeedback
from mcr_plus.compression.topk import TopK
from mcr_plus.local_sgd import arguments
from mcr_plus.local_sgd.fragments import Fragment, digest

sys.path += [str(ROOT / "examples" / name) for name in ("gpt", "common")]
import outer_steps
from transformer import LanguageModel, Shape

WAYS: Final = ("local int4", "local int2", "local topk")
SHAPE: Final = Shape(hidden=512, sequence=16)
STEPS: Final = "steps"


def codec_of(compress: Mapping[str, Any]) -> PayloadCodec:
    """The codec of a way, without the options of the stage."""
    options = dict(compress)
    if preset := options.pop("preset", None):
        options |= TopK.presets[preset]
    options.pop("error_feedback")
    codec = make(options)
    assert isinstance(codec, PayloadCodec)
    return codec


class Round:
    """The model, its fragments, and the seconds of each part in each round."""

    def __init__(self, way: str, every: int, fragments: int, ranks: int) -> None:
        self.every = every
        self.model = LanguageModel(SHAPE, 0)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        chosen = outer_steps.WAYS[way]
        settings = arguments.checked(every, fragments, 0, 1.0, chosen.compress, False, False, 0, None)
        named = arguments.trained(self.model, self.inner)
        self.fragments = arguments.fragments_of(named, settings, chosen.outer)
        codec = codec_of(chosen.compress or {})
        sizes = [fragment.anchor.numel() for fragment in self.fragments]
        self.states = [ErrorFeedback(codec, size, torch.device("cpu")) for size in sizes]
        self.wires = [torch.zeros(ranks, codec.wire_numel(size), dtype=torch.uint8) for size in sizes]
        self.random = torch.Generator().manual_seed(0)
        self.times: dict[str, list[float]] = {}

    def run(self) -> None:
        sums: dict[str, float] = {}

        def timed(part: str, call: Callable[[], Any]) -> Any:
            began = time.thread_time()
            result = call()
            sums[part] = sums.get(part, 0.0) + time.thread_time() - began
            return result

        timed(STEPS, self._steps)
        for fragment, state, wires in zip(self.fragments, self.states, self.wires, strict=True):
            self._outer_step(fragment, state, wires, timed)
        for part, seconds in sums.items():
            self.times.setdefault(part, []).append(seconds)

    def _steps(self) -> None:
        for _ in range(self.every):
            self.inner.zero_grad()
            loss = self.model(torch.randint(0, 256, (1, SHAPE.sequence + 1), generator=self.random)).text
            loss.backward()
            self.inner.step()
            loss.item()

    def _outer_step(self, fragment: Fragment, state: ErrorFeedback, wires: torch.Tensor, timed: Any) -> None:
        timed("digest", lambda: digest(fragment.anchor))
        flat = timed("pseudo-gradient", lambda: fragment.pseudo_gradient(None))
        timed("encoding, residual", lambda: state.encode(flat, 0, wires[0]))
        wires[1:] = wires[0]
        timed("decoding, mean", lambda: state.sum_payloads(wires, flat, flat, 1 / len(wires)))
        timed("outer optimizer, parameters", lambda: fragment.apply(flat, 1.0))


@harness.program
def main(
    ways: str = ",".join(WAYS),
    rounds: Annotated[int, typer.Option(min=2, help="Of which the median counts.")] = 20,
    every: Annotated[int, typer.Option(min=1)] = 30,
    fragments: Annotated[int, typer.Option(min=1)] = 4,
    ranks: Annotated[int, typer.Option(min=2, help="Payloads that are decoded.")] = 2,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    torch.set_num_threads(1)
    names = harness.chosen(ways.split(","), WAYS, "way")
    benches = {way: Round(way, every, fragments, ranks) for way in names}
    for _ in range(rounds):
        for bench in benches.values():
            bench.run()
    rows = []
    for way, bench in benches.items():
        found = {part: 1e3 * median(times) for part, times in bench.times.items()}
        outer = sum(found.values()) - found[STEPS]
        figures = [f"{each:.1f}" for each in (*found.values(), outer)]
        rows.append([way, *figures, f"{found[STEPS] / (found[STEPS] + outer):.1%}"])
        print(*rows[-1], sep="  ", flush=True)
    parts = next(iter(benches.values())).times
    note = f"ms of processor time in a round of {every} steps and {fragments} fragments, {ranks} payloads."
    text = harness.page(
        "A round of outer steps",
        harness.command(),
        note,
        harness.markdown(["way", *parts, "all but steps", "steps / all"], rows),
    )
    harness.write(text, output, f"outer-round_{hardware}")


if __name__ == "__main__":
    main()
