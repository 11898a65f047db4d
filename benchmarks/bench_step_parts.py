"""What a training step with a codec consists of, part by part: time of the processor, and on the clock.

    python benchmarks/bench_step_parts.py [--examples 'gpt,gpt, few tokens'] [--ways 'none,powersgd 4 + EF']

Two network namespaces joined by a link, one rank and half of the cores on each, and the GPT examples of
`bench_two_hosts`, with random tokens. Rank 0 notes when its main thread enters and leaves each part, by the
clock and by the thread's processor time; a part inside another counts for the inner one alone. What the clock
has more than the processor is waiting: for other ranks, or for a core that other threads have. The other
threads are those of libraries. Means of the steps after the first ones, in which buckets are still measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import bench_training
import bench_two_hosts
import harness
import torch
import typer
from harness import HARDWARE, ROOT, Budget, Dated, Hardware, Rate, Tables
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.core.run_delay import RunDelay
from mcr_plus.compression.error_feedback import ErrorFeedback
from mcr_plus.dispatch.engine import Engine
from mcr_plus.dispatch.operation import Operation
from mcr_plus.kernels import powersgd
from mcr_plus.training.reducer import Reducer

FIRST: Final = 8  # steps that do not count
NONE: Final = "none"
WAYS: Final = (NONE, "topk 1 % + EF", "powersgd 4 + EF")
SHAPES: Final[Mapping[str, Mapping[str, int]]] = {
    "gpt": {"hidden": 256, "batch": 8, "sequence": 128},
    "gpt, few tokens": {"hidden": 512, "batch": 1, "sequence": 16},
}
REST: Final = "the rest of the step"


class Parts:
    """Seconds of the main thread by part, on the clock and of the processor, without those of inner parts."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        self.calls: dict[str, int] = {}
        self._open: list[str] = [REST]
        self._delay = RunDelay()
        self._since = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), self._delay.seconds()

    def _turn(self) -> None:
        now = self._now()
        sums = self.sums.setdefault(self._open[-1], [0.0, 0.0, 0.0])
        for index in range(3):
            sums[index] += now[index] - self._since[index]
        self._since = now

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        self._turn()
        self._open.append(part)
        self.calls[part] = self.calls.get(part, 0) + 1
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count the calls of a function to a part."""
        function = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            with self.within(part):
                return function(*arguments, **options)

        setattr(owner, name, watched)

    def begin(self) -> None:
        self._turn()
        self.sums.clear()
        self.calls.clear()


def profile(example: str, config: dict[str, Any], steps: int) -> dict[str, Any] | None:
    """On ranks: ms of a step by part, on rank 0."""
    sys.path.insert(0, str(ROOT / "examples" / "common"))
    from transformer import LanguageModel, Shape

    torch.set_num_threads(1)
    sizes = dict(SHAPES[example])
    batch, sequence = sizes.pop("batch"), sizes["sequence"]
    parts = Parts()
    for name in ("find_left", "find_right", "orthonormalise"):
        parts.watch(powersgd, name, name)
    parts.watch(powersgd, "expand", "expand")
    parts.watch(ErrorFeedback, "begin_exchange", "residual")
    parts.watch(ErrorFeedback, "encode", "encode, residual")
    parts.watch(ErrorFeedback, "sum_payloads", "decode")
    left: list[int] = []
    complete = Reducer._complete

    def completed(reducer: Reducer, *, failed: bool) -> None:
        left.append(sum(1 for flat in reducer._flats if flat.work is None or not flat.work.is_completed()))
        with parts.within("waiting at the end"):
            flats = [flat.work for flat in reducer._flats]
            complete(reducer, failed=failed)
        if len(left) == FIRST + steps and comm.rank == 0:
            print(
                "buckets",
                [(f.nbytes) for f in reducer._flats],
                [w.info.backend for w in flats if w],
                file=sys.stderr,
            )

    Reducer._complete = completed  # type: ignore[method-assign]
    parts.watch(Engine, "progress", "progress")
    with mcr.init(config) as comm:
        torch.manual_seed(0)
        model = LanguageModel(Shape(**sizes), 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        wrapped, optimizer = mcr.wrap(model, optimizer)
        random = torch.Generator().manual_seed(comm.rank)
        times: list[float] = []
        processor = 0.0
        for step in range(FIRST + steps):
            if step == FIRST:
                comm.barrier()
                parts.begin()
                processor = time.process_time()
            began = time.perf_counter()
            optimizer.zero_grad()
            windows = torch.randint(0, 256, (batch, sequence + 1), generator=random)
            with parts.within("forward"):
                loss = wrapped(windows).text
            with parts.within("backward"):
                loss.backward()
            with parts.within("optimizer"):
                optimizer.step()
            loss.item()
            times.append(time.perf_counter() - began)
        parts._turn()
        processor = time.process_time() - processor
        if comm.rank:
            return None
    own = sum(each[1] for each in parts.sums.values())
    sums = {part: [1e3 * each / steps for each in both] for part, both in parts.sums.items()}
    return {
        "parts": sums,
        "calls": {part: calls / steps for part, calls in parts.calls.items()},
        "left": left[FIRST:],
        "others": 1e3 * (processor - own) / steps,
        "step": 1e3 * sum(times[FIRST:]) / steps,
        "times": [1e3 * each for each in times],
    }
