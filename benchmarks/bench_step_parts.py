"""What a training step with a codec consists of, part by part: processor time, waiting for a core, the rest.

    python benchmarks/bench_step_parts.py [--examples gpt] [--ways 'none,powersgd 4 + EF'] [--table FILE]

Two network namespaces joined by a link, one rank and half of the cores on each, and the GPT examples of
`bench_two_hosts`, with random tokens and `fuse: {plan: exact}`. Rank 0 notes when its main thread enters and
leaves each part; what is inside another part counts for the inner one alone. Time on the clock is split into
the thread's processor time, the time for which it was ready and other processes had its core, and the rest,
in which it waited for something. So figures of the first kind are of use on a busy machine, too. Processor
time of other threads is that of libraries. Means of the steps after those in which buckets are measured.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Final

import bench_two_hosts
import harness
import torch
import typer
from harness import HARDWARE, ROOT, Budget, Dated, Hardware, Rate, Tables
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.compression.error_feedback import ErrorFeedback
from mcr_plus.engine.engine import Engine
from mcr_plus.kernels import powersgd
from mcr_plus.training.reducer import Reducer
from mcr_plus.waiting.run_delay import RunDelay

FIRST: Final = 8  # steps that do not count
NONE: Final = "none"
WAYS: Final = (NONE, *bench_two_hosts.CODECS)
SHAPES: Final[Mapping[str, Mapping[str, int]]] = {
    "gpt": {"hidden": 256, "batch": 8, "sequence": 128},
    "gpt, few tokens": {"hidden": 512, "batch": 1, "sequence": 16},
}
WATCHED: Final = (
    (powersgd, "find_left", "P = M Q"),
    (powersgd, "orthonormalise", "orthonormal P"),
    (powersgd, "find_right", "Q = Mᵀ P"),
    (powersgd, "expand", "P Qᵀ, of the result and of the residual"),
    (ErrorFeedback, "begin_exchange", "residual added"),
    (ErrorFeedback, "encode", "encoding, with the residual"),
    (ErrorFeedback, "sum_payloads", "decoding"),
    (Engine, "progress", "progress of libraries"),
)
END: Final = "waiting at the end of the pass"
REST: Final = "the rest of the step"
MS: Final = 1e3


class Parts:
    """Seconds of the main thread by part: on the clock, of the processor, and without a core."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        self.calls: dict[str, int] = {}
        self._open = [REST]
        self._delay = RunDelay()
        self._since = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), self._delay.seconds()

    def turn(self) -> None:
        """Count the time until now to the part that is open."""
        now = self._now()
        sums = self.sums.setdefault(self._open[-1], [0.0, 0.0, 0.0])
        for index, (end, begin) in enumerate(zip(now, self._since, strict=True)):
            sums[index] += end - begin
        self._since = now

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count what follows to a part."""
        self.turn()
        self._open.append(part)
        self.calls[part] = self.calls.get(part, 0) + 1
        try:
            yield
        finally:
            self.turn()
            self._open.pop()

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count the calls of a function to a part."""
        function = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            with self.within(part):
                return function(*arguments, **options)

        setattr(owner, name, watched)

    def begin(self) -> None:
        """Begin anew."""
        self.turn()
        self.sums.clear()
        self.calls.clear()


def profile(example: str, config: dict[str, Any], steps: int) -> dict[str, Any] | None:
    """On ranks: seconds of a step by part, on rank 0; its buckets, and those that are not done at the end."""
    sys.path.insert(0, str(ROOT / "examples" / "common"))
    from transformer import LanguageModel, Shape

    torch.set_num_threads(1)
    sizes = dict(SHAPES[example])
    batch, sequence = sizes.pop("batch"), sizes["sequence"]
    parts = Parts()
    for owner, name, part in WATCHED:
        parts.watch(owner, name, part)
    undone: list[int] = []
    buckets = 0
    complete = Reducer._complete

    def completed(self: Reducer, *, failed: bool) -> None:
        nonlocal buckets
        buckets = len(self._flats)
        undone.append(sum(flat.work is None or not flat.work.is_completed() for flat in self._flats))
        with parts.within(END):
            complete(self, failed=failed)

    Reducer._complete = completed  # type: ignore[method-assign]
    with mcr.init(config) as comm:
        model = LanguageModel(Shape(**sizes), 0)
        wrapped, optimizer = mcr.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        random = torch.Generator().manual_seed(comm.rank)
        processor = 0.0
        for step in range(FIRST + steps):
            if step == FIRST:
                comm.barrier()
                parts.begin()
                processor = time.process_time()
            optimizer.zero_grad()
            with parts.within("forward"):
                loss = wrapped(torch.randint(0, 256, (batch, sequence + 1), generator=random)).text
            with parts.within("backward"):
                loss.backward()
            with parts.within("optimizer"):
                optimizer.step()
        parts.turn()
        processor = time.process_time() - processor
        if comm.rank:
            return None
    own = sum(each[1] for each in parts.sums.values())
    return {
        "parts": {part: [each / steps for each in sums] for part, sums in parts.sums.items()},
        "calls": {part: calls / steps for part, calls in parts.calls.items()},
        "others": (processor - own) / steps,
        "buckets": buckets,
        "undone": mean(undone[FIRST:]),
    }


def section(example: str, way: str, found: Mapping[str, Any]) -> str:
    """A table, with a line on buckets above it."""
    rows = []
    for part, (clock, processor, coreless) in found["parts"].items():
        figures = [
            f"{MS * each:.2f}" for each in (processor, coreless, max(0.0, clock - processor - coreless))
        ]
        rows.append([part, f"{found['calls'].get(part, 1):.0f}", *figures])
    sums = [sum(each[index] for each in found["parts"].values()) for index in range(3)]
    figures = [f"{MS * each:.2f}" for each in (sums[1], sums[2], sums[0] - sums[1] - sums[2])]
    rows += [["main thread", "", *figures], ["other threads", "", f"{MS * found['others']:.2f}", "", ""]]
    head = ["part", "calls", "processor ms", "without a core ms", "waiting ms"]
    return (
        f"## {example}, {way}\n\n{found['buckets']} buckets, of which {found['undone']:.1f} are not done at "
        f"the end of the backward pass.\n\n{harness.markdown(head, rows)}"
    )


@harness.program
def main(
    examples: Annotated[list[str], typer.Option(default_factory=lambda: list(SHAPES))],
    ways: Annotated[
        str, typer.Option(help="Methods of bench_training, or none.")
    ] = f"{NONE},powersgd 4 + EF",
    rate: Rate = "1gbit",
    steps: Annotated[int, typer.Option(min=1, help="That count.")] = 20,
    table: Tables = None,
    tune: Budget = "60s",
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    harness.chosen(examples, SHAPES, "example")
    names = harness.chosen(ways.split(","), WAYS, "way")
    need_two_hosts()
    sections = []
    with TwoHosts(rate) as hosts, tempfile.TemporaryDirectory() as folder:
        known = (table or Path(folder) / "table.yaml").absolute()
        bench = bench_two_hosts.Bench(hosts, Path(folder), known, steps)
        if not known.exists():
            bench.tune(tune)
        for example in examples:
            for way in names:
                config = bench_two_hosts.pipeline(known, "ours" if way == NONE else way)
                found = harness.on_ranks(harness.on_both(hosts), profile, example, config, steps)
                sections.append(section(example, way, found))
                print(sections[-1], "\n", flush=True)
    title, note = f"Parts of a step over a link of {rate}", "Means of a step on rank 0, by part."
    harness.write(
        harness.page(title, harness.command(), note, *sections), output, f"step-parts_{hardware}-two-hosts"
    )


if __name__ == "__main__":
    main()
