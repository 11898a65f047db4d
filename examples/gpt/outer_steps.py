"""Trains the transformer over a slow link: gradients averaged in every step, or `mcr.local`.

Bytes are those that the network interfaces of a host count while it trains, headers included, so that all
ways are counted alike; other traffic of the host is among them. All ways use gloo.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, Protocol

import numpy as np
import torch
from corpus import Corpus
from libraries import JobError, McrTransport, TorchTransport, share_the_cores
from reporting import STYLE, Monitor, ends, write_json
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel
from transformer import LanguageModel, Shape

import mcr_plus as mcr

_HELD_OUT: Final = 32  # batches of a rank
_ALONE: Final = 12  # steps that a rank makes alone, to know what computing takes
_WARM: Final = 0.05  # of the steps, in which the learning rate rises; then it falls as a cosine to a tenth
_NETWORK: Final = Path("/proc/net/dev")


@dataclass(frozen=True)
class Way:
    """How ranks are kept together.

    Attributes:
        gradients: `compress` of mcr.wrap; None for mcr.local and DDP.
        outer: makes the outer optimizer of mcr.local.
        compress: of mcr.local.
        betas: of AdamW; less momentum where a codec delays values.
    """

    kind: str  # ddp, wrap, local, or one with a `start` of its own
    gradients: Mapping[str, Any] | None = None
    outer: Callable[..., torch.optim.Optimizer] | None = None
    compress: Mapping[str, Any] | None = None
    betas: tuple[float, float] = (0.9, 0.999)

    def config(self) -> dict[str, Any]:
        """Everything over gloo, whose own threads move data while the program computes."""
        stages = [
            {"fuse": {}},
            {"compress": {}},
            {"select": {}},
            {"dispatch": {"timeout": "600s"}},
        ]
        rule = {"match": {"tag": "gradients"}, "compress": dict(self.gradients or {"codec": "none"})}
        return {"version": 1, "backends": ["gloo"], "pipeline": stages, "rules": [rule]}

    def connect(self) -> Any:
        """Join the other ranks."""
        return TorchTransport() if self.kind == "ddp" else _Mcr(self.config())

    def start(self, task: Task, model: LanguageModel, inner: torch.optim.Optimizer) -> OuterSteps:
        """What makes the steps of a way with outer steps."""
        return mcr.local(
            model,
            inner,
            self.outer,
            task.every,
            task.fragments,
            task.delay,
            task.mix,
            self.compress,
            warmup=task.warmup,
        )


class OuterSteps(Protocol):
    """What `mcr.local` returns, for one."""

    @property
    def rounds(self) -> int: ...
    def step(self) -> None: ...
    def finish(self) -> None: ...
    def stats(self) -> dict[str, float]: ...


WAYS: Final[dict[str, Way]] = {
    "ddp": Way("ddp"),
    "wrap": Way("wrap"),
    "wrap int8": Way("wrap", {"codec": "int8_block"}),
    "wrap topk": Way(
        "wrap",
        {"codec": "topk", "preset": "adam"},
        betas=(0.5, 0.999),
    ),
    "wrap powersgd": Way(
        "wrap", {"codec": "powersgd", "rank": 4, "error_feedback": True, "exempt": {"max_ndim": 1}}
    ),
    "local": Way("local"),
    "local int4": Way("local", compress={"codec": "int4_block", "error_feedback": True}),
    "local int2": Way("local", compress={"codec": "int2_block", "error_feedback": True}),
    # Error feedback delays what it keeps, as momentum does, so that the optimizer has less of it.
    "local topk": Way(
        "local",
        outer=partial(torch.optim.SGD, lr=0.9, momentum=0.6, nesterov=True),
        compress={"codec": "topk", "preset": "outer"},
    ),
}
TITLES: Final = {
    "ddp": "DDP, gloo",
    "wrap": "mcr.wrap",
    "wrap int8": "mcr.wrap, int8_block",
    "wrap topk": "mcr.wrap, topk 0.18",
    "wrap powersgd": "mcr.wrap, powersgd 4",
    "local": "mcr.local, float32",
    "local int4": "mcr.local, int4_block",
    "local int2": "mcr.local, int2_block",
    "local topk": "mcr.local, topk 1/8",
}
USUAL: Final = "local int4"


@dataclass(frozen=True)
class Task:
    """What to train, and the settings of mcr.local."""

    shape: Shape
    batch: int
    steps: int
    lr: float
    seed: int
    every: int = 30
    fragments: int = 2
    delay: int = 2
    mix: float = 1.0
    warmup: int = 0  # first steps with averaged gradients, in all ways; neither their time nor bytes count


@dataclass(frozen=True)
class Outcome:
    """What came out, the same on all ranks; `seconds` and `sent` after each step, of rank 0 and all ranks."""

    way: str
    ranks: int
    tokens: int  # of a step, on all ranks together
    losses: list[float]  # of a step, the mean over ranks
    seconds: list[float]
    sent: list[float]  # bytes
    compute: float  # seconds of a step without communication, the slowest rank's
    held_out: float
    rounds: int  # of outer steps
    waiting: float = 0.0  # seconds for other ranks in outer steps, of rank 0
    outer: float = 0.0  # seconds in the rest of outer steps, of rank 0
    processor: float = 0.0  # seconds of a step, of all threads of rank 0
    processor_alone: float = 0.0  # the same of a step without communication

    @property
    def speed(self) -> float:
        """Tokens per second, from the first step to the end."""
        return self.tokens * len(self.losses) / self.seconds[-1]

    @property
    def bytes_per_token(self) -> float:
        """Of all ranks together."""
        return self.sent[-1] / (self.tokens * len(self.losses))

    @property
    def utilization(self) -> float:
        """The share of computing in the time."""
        return self.share(self.compute)

    def share(self, compute: float) -> float:
        """The same where computing takes so many seconds a step."""
        return min(1.0, compute * len(self.losses) / self.seconds[-1])

    def document(self) -> dict[str, Any]:
        """The report for programs."""
        figures = {
            "tokens_per_second": self.speed,
            "bytes_per_token": self.bytes_per_token,
            "utilization": self.utilization,
        }
        return asdict(self) | figures


def train(task: Task, corpus: Corpus, name: str, console: Console) -> Outcome:
    """Train in one way, over ranks that are joined for it alone."""
    way = WAYS[name]
    comms = way.connect()
    share_the_cores(comms.world_size)
    console.quiet = comms.rank != 0
    with Monitor(console, TITLES[name], "tokens") as observe:
        outcome = _train(task, corpus, name, comms, observe)
    comms.close()
    return outcome


class _Mcr(McrTransport):
    def __init__(self, config: dict[str, Any]) -> None:
        mcr.init(config)
        self.rank, self.world_size = mcr.get_rank(), mcr.get_world_size()


def _train(task: Task, corpus: Corpus, name: str, comms: Any, observe: Any) -> Outcome:
    way = WAYS[name]
    own, alone = _alone(task, corpus, comms)
    compute = max(comms.gather(own))
    model = LanguageModel(task.shape, task.seed)
    inner = torch.optim.AdamW(model.parameters(), lr=task.lr, betas=way.betas, fused=True)
    called: torch.nn.Module = model
    outer: OuterSteps | None = None
    if way.kind == "ddp":
        called = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif way.kind == "wrap":
        mcr.wrap(model, inner)
    else:
        outer = way.start(task, model, inner)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, partial(_rate, task.warmup + task.steps))
    advance = inner.step if outer is None else outer.step
    tokens = task.batch * (corpus.window - 1) * comms.world_size
    losses: list[float] = []
    seconds: list[float] = []
    sent: list[float] = []
    comms.gather(None)
    before, began, processor = sent_bytes(), time.perf_counter(), time.process_time()
    for number in range(task.warmup + task.steps):
        if number == task.warmup:
            comms.gather(None)
            for series in (losses, seconds, sent):
                series.clear()
            before, began, processor = sent_bytes(), time.perf_counter(), time.process_time()
        windows = corpus.windows(number, comms.rank, task.batch)
        inner.zero_grad()
        loss = called(windows).text
        loss.backward()
        advance()
        schedule.step()
        if outer is not None and number == task.warmup + task.steps - 1:
            outer.finish()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        sent.append(float(sent_bytes() - before))
        fraction = (number + 1) / (task.warmup + task.steps)
        observe(fraction, number + 1, losses[-1], tokens * len(losses) / seconds[-1])
    processor = (time.process_time() - processor) / task.steps
    parts = {} if outer is None else outer.stats()
    share = _sharers(comms)
    everything = comms.gather(
        (losses, [each / share for each in sent], _held_out(task, corpus, model, comms))
    )
    return Outcome(
        name,
        comms.world_size,
        tokens,
        np.mean([each[0] for each in everything], axis=0).tolist(),
        seconds,
        np.sum([each[1] for each in everything], axis=0).tolist(),
        compute,
        mean(each[2] for each in everything),
        0 if outer is None else outer.rounds,
        parts.get("waiting", 0.0),
        parts.get("outer", 0.0),
        processor,
        alone,
    )


def _rate(steps: int, step: int) -> float:
    """The learning rate of a step, relative to the highest."""
    rising = max(1, round(_WARM * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def _alone(task: Task, corpus: Corpus, comms: Any) -> tuple[float, float]:
    """Seconds of a step of this rank without communication, while the others do the same; of its threads."""
    model = LanguageModel(task.shape, task.seed)
    inner = torch.optim.AdamW(model.parameters(), lr=task.lr, fused=True)
    comms.gather(None)
    times, processor = [], []
    for number in range(_ALONE):
        start, began = time.perf_counter(), time.process_time()
        inner.zero_grad()
        loss = model(corpus.windows(number, comms.rank, task.batch)).text
        loss.backward()
        inner.step()
        loss.item()
        times.append(time.perf_counter() - start)
        processor.append(time.process_time() - began)
    return median(times[2:]), median(processor[2:])


def sent_bytes(*, within: bool = True) -> int:
    """Bytes that have left this host's interfaces; `within`: those between its own processes, too."""
    lines = [line.partition(":") for line in _NETWORK.read_text().splitlines()[2:]]
    return sum(int(rest.split()[8]) for name, _, rest in lines if within or name.strip() != "lo")


def _sharers(comms: Any) -> int:
    """How many ranks count the same interfaces."""
    own = Path("/proc/self/ns/net").readlink().name
    return int(comms.gather(own).count(own))


@torch.no_grad()
def _held_out(task: Task, corpus: Corpus, model: LanguageModel, comms: Any) -> float:
    batches = corpus.held_out(comms.rank, comms.world_size, task.batch, _HELD_OUT)
    return float(mean(model(windows).text.item() for windows in batches))


# --- reports ----------------------------------------------------------------------------------------


def start(task: Task, corpus: Corpus, names: Sequence[str], json: Path | None, plot: Path | None) -> None:
    """Train in each of these ways, and report."""
    for name in names:
        if name not in WAYS:
            raise JobError(f"--way {name!r}: expected one of {', '.join(WAYS)}")
    console = Console(stderr=json == Path("-"), highlight=False)
    if not console.is_terminal:
        console.width = 120
    outcomes = [train(task, corpus, name, console) for name in names]
    if console.quiet:
        return
    console.print()
    console.print(table(outcomes))
    if plot is not None:
        draw(outcomes, plot)
    if json is not None:
        settings = {**vars(task), "shape": dict(vars(task.shape))}
        write_json({"task": settings, "runs": [each.document() for each in outcomes]}, json)


def table(outcomes: Sequence[Outcome]) -> Table:
    """A line for each way, relative to the first."""
    shown = Table(
        title=f"{outcomes[0].ranks} ranks, {len(outcomes[0].losses)} steps",
        caption="bytes: what interfaces have sent, of all ranks; utilization: computing alone / time",
        caption_justify="left",
        **STYLE,
    )
    for heading in (
        "way",
        "train loss",
        "held out",
        "bytes/token",
        "fewer",
        "utilization",
        "tokens/s",
        "faster",
    ):
        shown.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    first, compute = outcomes[0], min(each.compute for each in outcomes)
    for each in outcomes:
        shown.add_row(
            TITLES[each.way],
            f"{ends(np.array(each.losses))[1]:.4f}",
            f"{each.held_out:.4f}",
            f"{each.bytes_per_token:,.1f}",
            f"{first.bytes_per_token / each.bytes_per_token:,.1f}" if each.sent[-1] else "-",
            f"{each.share(compute):.1%}",
            f"{each.speed:,.0f}",
            f"{each.speed / first.speed:.1f}",
        )
    return shown


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw the training loss over time and over bytes; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for each in outcomes:
        window = max(1, len(each.losses) // 20)
        curve = np.convolve(each.losses, np.full(window, 1 / window), mode="valid")
        for axis, over in zip(axes, (np.array(each.seconds), np.array(each.sent) / 2**20), strict=True):
            axis.plot(over[window - 1 :], curve, label=TITLES[each.way], lw=1.3)
    for axis, label in zip(axes, ("seconds", "MiB sent, all ranks"), strict=True):
        axis.set_xlabel(label)
        axis.set_xscale("log")
        axis.grid(alpha=0.25, lw=0.5)
    axes[0].set_ylabel("training loss, nats per byte")
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
