"""The examples on two hosts: mcr_plus by default, which mixes libraries, against each library alone.

    python benchmarks/bench_mix_hosts.py --rate 1gbit --rate 100mbit [--examples dlrm]

Two network namespaces joined by a link of that rate, with ranks and half of the cores on each. They take
turns in one job, in rounds:

    default              `mcr.init()` without a configuration
    gloo, mpi            that library alone: `backends: [gloo]`
    torch's gloo         `torch.distributed` (DDP, exchanges by hand) without mcr_plus
    gloo in steps        gloo alone with `hierarchical`, inside of hosts as well as between them

A step's time is the median of a turn, without recording. `waited` is what a program waited for communication
in a step, the mean of further steps with recording, which torch's gloo has not. Ratios are of steps. Goal:
at least 1.2 over the best library alone in two of three examples, and never below 1.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import harness
import typer
from harness import HARDWARE, ROOT, Dated, Hardware, Rounds
from two_hosts import TwoHosts, need_two_hosts

from mcr_plus.observe.record_table import communication

DEFAULT: Final = "default"
TORCH: Final = "torch's gloo"
ALONE: Final = ("gloo", "mpi", TORCH)
IN_STEPS: Final = "gloo in steps"
WAYS: Final = (DEFAULT, *ALONE, IN_STEPS)
EXAMPLES: Final = ("dlrm", "moe", "gpt")
BATCH: Final = 1  # windows of a rank's step: cores that ranks share hide what a library does behind more
WARM_UP: Final = 3  # steps that `waited` leaves out

Turn = dict[str, Any]


def measure(example: str, rounds: int, steps: int) -> dict[str, list[Turn]] | None:
    """On ranks: the turns of each way, from rank 0."""
    sys.path[:0] = [str(ROOT / "examples" / folder) for folder in ("common", example)]
    share_the_cores = importlib.import_module("libraries").share_the_cores
    module, train = dlrm() if example == "dlrm" else transformer(example)
    rank = 0

    def turn(way: str) -> Turn:
        nonlocal rank
        transport = opened(module, way)
        rank = transport.rank
        share_the_cores(transport.world_size)
        record, transport.record = transport.record, lambda _: nullcontext()
        found: Turn = {"step": 1e3 * train(transport, steps).step_seconds, "waited": None, "took": []}
        if way != TORCH:
            transport.record = record
            log = train(transport, WARM_UP + steps // 2).log.records
            rows = communication(log[len(log) * WARM_UP // (WARM_UP + steps // 2) :], steps // 2)
            found["waited"] = 1e3 * sum(row.waited for row in rows)
            found["took"] = sorted({f"{row.backend} {row.kind} {row.tag}".strip() for row in rows})
        transport.close()
        return found

    turns = harness.in_turns({way: way for way in WAYS}, rounds, turn)
    return None if rank else turns


def opened(module: Any, way: str) -> Any:
    """The example's transport for a way."""
    if way == TORCH:
        return module.TorchTransport()
    if way == DEFAULT:
        return module.McrTransport()
    if way != IN_STEPS:
        return module.McrTransport(backends=[way])
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "steps.yaml")
        stages = "[hierarchical: {}, compress: {}, select: {}, dispatch: {}]"
        config.write_text(f"version: 1\nbackends: [gloo]\npipeline: {stages}\n")
        return module.McrTransport(config)


Train = Callable[[Any, int], Any]  # by a transport, so many steps


def dlrm() -> tuple[Any, Train]:
    """The module with the DLRM's transports, and what trains it."""
    example, model = importlib.import_module("train"), importlib.import_module("model")
    data, config = example.HERE / "sample.tsv.gz", model.ModelConfig()

    def train(transport: Any, steps: int) -> Any:
        job = example.Job(data, config, 128, lr=0.1, epochs=1, steps=steps, holdout=0.0, eval_rows=0)
        return example.Trainer(job, transport, lambda *_: None).run()

    return importlib.import_module("transports"), train


def transformer(example: str) -> tuple[Any, Train]:
    """The module with a transformer's transports, and what trains it."""
    training, models = importlib.import_module("training"), importlib.import_module("transformer")
    if example == "moe":
        experts = importlib.import_module("experts")
        shape = experts.ExpertShape()
        build: Any = partial(experts.build, shape, 0)
    else:
        shape = models.Shape()
        build = lambda _: models.LanguageModel(shape, 0)  # noqa: E731

    text = importlib.import_module("corpus").read_corpus(None, shape.sequence, 0)
    float32 = training.torch.float32

    def train(transport: Any, steps: int) -> Any:
        job = training.Job(build, text, BATCH, shared=False, steps=steps, lr=5e-4, dtype=float32)
        return training.train(job, transport, lambda *_: None)

    return importlib.import_module("parallel"), train


def rows_of(found: Mapping[str, Sequence[Turn]]) -> list[list[str]]:
    """Lines of the table: way, times of a step, and of waiting in it."""

    def cell(times: Sequence[float]) -> str:
        return f"{median(times):.1f} ({min(times):.1f})"

    rows = []
    for way in WAYS:
        waits = [turn["waited"] for turn in found[way] if turn["waited"] is not None]
        rows.append([way, cell([turn["step"] for turn in found[way]]), cell(waits) if waits else "-"])
    return rows


def ratios_of(found: Mapping[str, Sequence[Turn]]) -> list[str]:
    """A line of the table of ratios: of the best library alone, and of gloo in steps, over the default."""
    steps = {way: [turn["step"] for turn in turns] for way, turns in found.items()}

    def over(ways: Sequence[str]) -> list[str]:
        of_medians = min(median(steps[way]) for way in ways) / median(steps[DEFAULT])
        of_least = min(min(steps[way]) for way in ways) / min(steps[DEFAULT])
        return [f"{of_medians:.2f}", f"{of_least:.2f}"]

    best = min(ALONE, key=lambda way: median(steps[way]))
    return [best, *over(ALONE), *over([IN_STEPS])]


@harness.program
def main(
    examples: Annotated[list[str], typer.Option(default_factory=lambda: list(EXAMPLES))],
    rate: Annotated[list[str], typer.Option(help="Of the link, as tc writes it.")],
    per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 2,
    steps: Annotated[int, typer.Option(min=4, help="Of a turn.")] = 20,
    rounds: Rounds = 5,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    harness.chosen(examples, EXAMPLES, "example")
    need_two_hosts()
    ratios, rows, took = [], [], []
    for example in examples:
        for each in rate:
            with TwoHosts(each) as hosts:
                launch = harness.on_both(hosts, per_host=per_host)
                found = harness.on_ranks(launch, measure, example, rounds, steps)
            rows += [[example, each, *row] for row in rows_of(found)]
            ratios.append([example, each, *ratios_of(found)])
            took.append([example, each, ", ".join(found[DEFAULT][-1]["took"])])
            harness.show(["example", "link", "way", "step", "waited"], rows[-len(WAYS) :])
            print(*ratios[-1], took[-1][-1], sep="  ", flush=True)
    note = (
        f"two network namespaces with {per_host} ranks and half of the cores each. Milliseconds: medians of "
        f"{rounds} rounds in which all take turns, and in brackets the least."
    )
    head = ["example", "link", "best alone", "medians", "least", "gloo in steps", "least"]
    parts = [
        "Steps of the best library over steps by default. Wanted over the best one alone: 1.2 in two of "
        "three examples, and at least 1 everywhere.",
        harness.markdown(head, ratios),
        harness.markdown(["example", "link", "way", "step ms", "waited ms"], rows),
        "Libraries of the default, with what they took on rank 0:",
        harness.markdown(["example", "link", "library and operation"], took),
    ]
    text = harness.page("The default mix of libraries on two hosts", harness.command(), note, *parts)
    harness.write(text, output, f"mix-hosts_{hardware}-two-hosts")


if __name__ == "__main__":
    main()
