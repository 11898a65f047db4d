"""`mcr.local` beside torchft's DiLoCo: the same model, tokens, schedule and links.

    pip install torchft-nightly
    python benchmarks/bench_torchft.py --rates 100mbit 1gbit

Two network namespaces joined by a link of a rate, one rank on each; the transformer of examples/gpt. Both
send the same fragments after the same steps, with the outer optimizer of DiLoCo (SGD, 0.7, Nesterov momentum
0.9), over gloo; torchft with buckets. *Quality*: a small GPT (0.25 million parameters), and *speed*: one of
12.7 million, as in bench_local.py. torchft has no warm-up, so gradients are averaged for it by torch.
Bytes are counted as in bench_local.py.

"Windows": from the end of the first window of `--every` steps to the end of the last but one, in which both
send and apply each fragment as often. "To the end": all steps, and `finish()` of mcr.local, which sends what
each rank has learned since its fragments were sent last, so that the models are equal. torchft has nothing
like it: its ranks end with models of their own. "Processor": of all threads of rank 0 in a step of the run,
which other work on the machine changes little. Ways take turns, each round in another order.
"""

from __future__ import annotations

import atexit
import importlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from statistics import mean
from typing import Annotated, Any, Final

import harness
import torch
import torch.distributed as dist
import typer
from bench_local import LARGE, SMALL
from harness import HARDWARE, ROOT, Dated, Hardware
from rich.console import Console
from two_hosts import ADDRESSES, TwoHosts, need_two_hosts

from mcr_plus.core.c10d import TCPStore

sys.path += [str(ROOT / "examples" / name) for name in ("gpt", "common")]
import outer_steps
from corpus import read_corpus
from libraries import TorchTransport
from outer_steps import OuterSteps, Task, Way
from transformer import LanguageModel, Shape

TORCHFT: Final = "torchft"
WAYS: Final = (TORCHFT, "local", "local int4")
HEAD: Final = [
    "way",
    "link",
    "tokens/s in windows",
    "to torchft's",
    "bytes/token",
    "to torchft's",
    "processor, ms a step",
    "alone, ms",
    "tokens/s to the end",
    "to torchft's",
    "bytes/token to the end",
]
MINUTES: Final = timedelta(minutes=1)
LIMIT_S: Final = 3000.0


class Torchft(Way):
    """A way of the example that is torchft's."""

    def connect(self) -> TorchTransport:
        """torchft joins ranks by itself; gloo compares and reports."""
        return TorchTransport()

    def start(self, task: Task, model: LanguageModel, inner: torch.optim.Optimizer) -> OuterSteps:
        """DiLoCo of torchft."""
        return _DiLoCo(task, model, inner)


class _DiLoCo:
    """torchft's context manager with the methods that the example calls."""

    def __init__(self, task: Task, model: LanguageModel, inner: torch.optim.Optimizer) -> None:
        self._task, self._model, self._inner = task, model, inner
        self._steps = self.rounds = 0
        self._entered: Any = None

    def step(self) -> None:
        if self._steps == self._task.warmup:
            self._entered = self._enter()
        if self._entered is None:
            for param in self._model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        self._inner.step()
        self._steps += 1
        self.rounds = max(0, self._steps - self._task.warmup) // self._task.every

    def finish(self) -> None:
        """torchft has nothing like it: ranks end with models of their own, whose losses are averaged."""

    def stats(self) -> dict[str, float]:
        """torchft counts nothing of what the example reports."""
        return {}

    def _enter(self) -> Any:
        rank, ranks, task = dist.get_rank(), dist.get_world_size(), self._task
        # torchft passes names of hosts to the others, which no server resolves for namespaces.
        socket.gethostname = lambda: ADDRESSES[rank]
        coordination, local_sgd, manager, process_group = (
            importlib.import_module(f"torchft.{name}")
            for name in ("coordination", "local_sgd", "manager", "process_group")
        )
        port = 29600
        if rank == 0:
            self._lighthouse = coordination.LighthouseServer(
                bind=f"[::]:{port}", min_replicas=dist.get_world_size()
            )
        dist.barrier()
        self._store = TCPStore(ADDRESSES[rank], 0, is_master=True, wait_for_workers=False)
        self._manager = manager.Manager(
            pg=process_group.ProcessGroupGloo(timeout=MINUTES),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=ranks,
            use_async_quorum=False,
            init_sync=False,  # replicas are equal already
            timeout=MINUTES,
            quorum_timeout=MINUTES,
            rank=0,
            world_size=1,
            store_addr=ADDRESSES[rank],
            store_port=self._store.port,
            lighthouse_addr=f"http://{ADDRESSES[0]}:{port}",
            replica_id=f"rank{rank}",
            hostname=ADDRESSES[rank],
        )
        fragments = [torch.nn.ModuleList(each) for each in self._cut()]
        outer = [
            torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments
        ]
        self._diloco = local_sgd.DiLoCo(
            self._manager,
            list(fragments),
            self._inner,
            outer,
            task.every,
            use_bucketization=True,
            fragment_sync_delay=task.delay,
            fragment_update_alpha=1 - task.mix,
        )
        return self._diloco.__enter__()

    def _cut(self) -> list[list[torch.nn.Module]]:
        """The model's modules in so many runs of about the same size."""
        modules = [self._model.bytes, self._model.positions, *self._model.blocks, self._model.norm]
        sizes = [sum(param.numel() for param in module.parameters()) for module in modules]
        share = sum(sizes) / self._task.fragments
        runs: list[list[torch.nn.Module]] = [[] for _ in range(self._task.fragments)]
        begin = 0
        for module, size in zip(modules, sizes, strict=True):
            runs[min(len(runs) - 1, int((begin + size / 2) / share))].append(module)
            begin += size
        return runs


def trained(way: str, words: Sequence[str], settings: dict[str, Any]) -> dict[str, Any] | None:
    """On ranks: the example's report of a way."""
    outer_steps.WAYS[TORCHFT] = Torchft(TORCHFT)
    outer_steps.TITLES[TORCHFT] = "torchft DiLoCo"
    given = dict(zip([word[2:] for word in words[::2]], words[1::2], strict=True))
    sizes = {key: int(given[key]) for key in Shape.model_fields if key in given}
    shape = Shape(**sizes)
    task = Task(shape, int(given.get("batch", 8)), lr=float(given.get("lr", 5e-4)), **settings)
    corpus = read_corpus(None, shape.sequence, task.seed)
    outcome = outer_steps.train(task, corpus, way, Console(quiet=True))
    if way in (TORCHFT, "ddp"):  # threads of torchft and of torch's gloo may abort the end of the process
        atexit.register(os._exit, 0)
    return outcome.document() if int(os.environ["RANK"]) == 0 else None


def in_windows(report: dict[str, Any], every: int) -> tuple[float, float]:
    """Tokens/s of all ranks, and their bytes per token, between the first and the last window."""
    first, last = every - 1, len(report["losses"]) - every - 1
    tokens = report["tokens"] * (last - first)
    seconds, sent = (report[name][last] - report[name][first] for name in ("seconds", "sent"))
    return tokens / seconds, sent / tokens


def speed_rows(found: Mapping[str, Sequence[dict[str, Any]]], rate: str, every: int) -> list[list[str]]:
    """Lines of the table of speeds: of each round, and means relative to torchft's."""
    windows = {way: [in_windows(each, every) for each in runs] for way, runs in found.items()}
    means = {way: [mean(column) for column in zip(*pairs, strict=True)] for way, pairs in windows.items()}
    ends = {way: mean(each["tokens_per_second"] for each in runs) for way, runs in found.items()}
    rows = []
    for way, runs in found.items():
        parts = [
            f"{1e3 * mean(each[part] for each in runs):.1f}" for part in ("processor", "processor_alone")
        ]
        rows.append(
            [
                way,
                rate,
                " ".join(f"{speed:.0f}" for speed, _ in windows[way]),
                f"{means[way][0] / means[TORCHFT][0]:.3f}",
                f"{means[way][1]:,.0f}",
                f"{means[way][1] / means[TORCHFT][1]:.3f}",
                *parts,
                " ".join(f"{each['tokens_per_second']:.0f}" for each in runs),
                f"{ends[way] / ends[TORCHFT]:.3f}",
                f"{mean(each['bytes_per_token'] for each in runs):,.0f}",
            ]
        )
    return rows


@harness.program
def main(
    rates: Annotated[list[str], typer.Option(default_factory=lambda: ["100mbit", "1gbit"])],
    seeds: Annotated[int, typer.Option(min=0, help="Of the quality; 0 leaves it out.")] = 1,
    quality_steps: Annotated[int, typer.Option(min=1)] = 900,
    quality_every: Annotated[int, typer.Option(min=1)] = 30,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of the quality with averaged gradients.")] = 300,
    steps: Annotated[int, typer.Option(min=1, help="Where speed is measured.")] = 300,
    every: Annotated[int, typer.Option(min=1, help="Where speed is measured.")] = 100,
    fragments: Annotated[int, typer.Option(min=1)] = 4,
    delay: Annotated[int, typer.Option(min=0)] = 20,
    mix: float = 1.0,
    ways: str = ",".join(WAYS),
    rounds: Annotated[int, typer.Option(min=1, help="Of each way where speed is measured, in turns.")] = 2,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    need_two_hosts()
    names = harness.chosen(ways.split(","), WAYS, "way")
    if TORCHFT not in names:
        names.insert(0, TORCHFT)

    def run(way: str, rate: str, words: Sequence[str], **settings: Any) -> dict[str, Any]:
        with TwoHosts(rate) as hosts:

            def launch(line: Sequence[str]) -> None:
                hosts.torchrun([sys.executable, *line], timeout=LIMIT_S)

            report: dict[str, Any] = harness.on_ranks(launch, trained, way, words, settings)
        print(
            f"{rate}  {way}  {report['held_out']:.4f}  {report['tokens_per_second']:.0f} tokens/s", flush=True
        )
        return report

    parts = []
    quality: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        for way in ("ddp", *names):
            common = {"steps": quality_steps, "seed": seed, "warmup": warmup, "mix": mix}
            report = run(way, "1gbit", SMALL, every=quality_every, fragments=2, delay=1, **common)
            quality.setdefault(way, []).append(report)
    if quality:
        table = [
            [
                way,
                *(
                    f"{each['held_out'] / ddp['held_out']:.4f}"
                    for each, ddp in zip(runs, quality["ddp"], strict=True)
                ),
            ]
            for way, runs in quality.items()
        ]
        parts += [
            f"## Held-out loss / DDP's: {quality_steps} steps of the small model, every {quality_every}",
            harness.markdown(["way", *(f"seed {seed}" for seed in range(seeds))], table),
        ]
    rows = []
    for rate in rates:
        settings = {
            "steps": steps,
            "seed": 0,
            "every": every,
            "fragments": fragments,
            "delay": delay,
            "mix": mix,
        }
        turns = {way: partial(run, way, rate, LARGE, **settings) for way in names}
        rows += speed_rows(harness.in_turns(turns, rounds, lambda turn: turn()), rate, every)
    if rows:
        parts += [
            f"## Speed: 12.7 million parameters, every {every}, {fragments} fragments, delay {delay}",
            harness.markdown(HEAD, rows),
        ]
    note = (
        f"torchft-nightly {version('torchft-nightly')}; mix {mix:g}; a small model and emulated links (tbf)"
    )
    harness.write(
        harness.page("mcr.local beside torchft's DiLoCo, two hosts", harness.command(), note, *parts),
        output,
        f"torchft_{hardware}-two-hosts",
    )


if __name__ == "__main__":
    main()
