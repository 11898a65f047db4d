"""The examples on two hosts: mcr_plus by default, which mixes libraries, against each library alone.

    python benchmarks/bench_mix_hosts.py --rate 1gbit --rate 100mbit [--examples dlrm]

Two network namespaces joined by a link of that rate, with ranks and half of the cores on each. The default is
what `mcr.init()` does without a configuration; alone is `backends: [gloo]` or `[mpi]`, and torch's gloo is
`torch.distributed` (DDP, and exchanges by hand) without mcr_plus. They take turns in one job, in rounds. A
step's time is the median of a turn. Of it, `waited` is what the program waited for communication, the mean
over the second half of a turn; torch's gloo does not record it. Ratios are of whole steps.
Goal: at least 1.2 in two of three examples, and never below 1.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Annotated, Any, Final

import harness
import typer
from harness import HARDWARE, ROOT, Dated, Hardware, Rounds
from two_hosts import TwoHosts, need_two_hosts

from mcr_plus.observe.record_table import communication

DEFAULT: Final = "default"
ALONE: Final = {"gloo": "gloo", "mpi": "mpi", "torch's gloo": "torch"}
WAYS: Final = {DEFAULT: "mix", **ALONE}
EXAMPLES: Final = ("dlrm", "moe", "gpt")
BATCH: Final = 1  # windows of a rank's step: cores that ranks share hide what a library does behind more

Turn = dict[str, Any]


def measure(example: str, rounds: int, steps: int) -> dict[str, list[Turn]] | None:
    """On ranks: the turns of each way, from rank 0."""
    sys.path[:0] = [str(ROOT / "examples" / folder) for folder in ("common", example)]
    libraries = importlib.import_module("libraries")
    open_transport, train = dlrm(steps) if example == "dlrm" else transformer(example, steps)
    rank = 0

    def turn(name: str) -> Turn:
        nonlocal rank
        transport = open_transport(name, None)
        rank = transport.rank
        libraries.share_the_cores(transport.world_size)
        outcome = train(transport, lambda *_: None)
        transport.close()
        half = [] if outcome.log is None else outcome.log.records[len(outcome.log.records) // 2 :]
        rows = communication(half, seconds=steps / 2)
        return {
            "step": 1e3 * outcome.step_seconds,
            "waited": 1e3 * sum(row.waited for row in rows) if rows else None,
            "ops": [[row.kind,row.tag,row.backend,row.count,row.bytes//row.count,round(row.p50_us),round(1e3*row.waited,2)] for row in rows],
            "took": sorted({f"{row.backend} {row.kind} {row.tag}".strip() for row in rows}),
        }

    turns = harness.in_turns(WAYS, rounds, turn)
    return None if rank else turns


def dlrm(steps: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What opens a library for the DLRM, and what trains it."""
    train, model = importlib.import_module("train"), importlib.import_module("model")
    data = train.HERE / "sample.tsv.gz"
    job = train.Job(data, model.ModelConfig(), 128, lr=0.1, epochs=1, steps=steps, holdout=0.0, eval_rows=0)
    return train.open_transport, lambda transport, observe: train.Trainer(job, transport, observe).run()


def transformer(example: str, steps: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What opens a library for a transformer, and what trains it."""
    training, corpus = importlib.import_module("training"), importlib.import_module("corpus")
    models = importlib.import_module("transformer")
    if example == "moe":
        experts = importlib.import_module("experts")
        shape = experts.ExpertShape()
        build = partial(experts.build, shape, 0)
    else:
        shape = models.Shape()

        def build(_: object) -> Any:
            return models.LanguageModel(shape, 0)

    text = corpus.read_corpus(None, shape.sequence, 0)
    job = training.Job(build, text, BATCH, shared=False, steps=steps, lr=5e-4, dtype=training.torch.float32)
    return training.open_transport, partial(training.train, job)


def rows_of(found: Mapping[str, Sequence[Turn]]) -> list[list[str]]:
    """Lines of the table: way, times of a step, and of waiting in it."""

    def cell(times: Sequence[float]) -> str:
        return f"{median(times):.1f} ({min(times):.1f})"

    rows = []
    for way, turns in found.items():
        waits = [turn["waited"] for turn in turns]
        rows.append([way, cell([turn["step"] for turn in turns]), "-" if None in waits else cell(waits)])
    return rows


def ratios_of(found: Mapping[str, Sequence[Turn]]) -> list[str]:
    """A line of the table of ratios, all of steps: the way alone that is the best, and over the default."""
    steps = {way: [turn["step"] for turn in turns] for way, turns in found.items()}
    best = min(ALONE, key=lambda way: median(steps[way]))
    rounds = [alone / own for alone, own in zip(steps[best], steps[DEFAULT], strict=True)]
    of_least = min(min(steps[way]) for way in ALONE) / min(steps[DEFAULT])
    of_medians = median(steps[best]) / median(steps[DEFAULT])
    return [best, *(f"{ratio:.2f}" for ratio in (of_medians, of_least, min(rounds), max(rounds)))]


@harness.program
def main(
    examples: Annotated[list[str], typer.Option(default_factory=lambda: list(EXAMPLES))],
    rate: Annotated[list[str], typer.Option(help="Of the link, as tc writes it.")],
    per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 2,
    steps: Annotated[int, typer.Option(min=4, help="Of a turn.")] = 24,
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
    head = ["example", "link", "best alone", "of medians", "of the least", "least of a round", "most"]
    note = (
        f"two network namespaces with {per_host} ranks and half of the cores each. Milliseconds: medians of "
        f"{rounds} rounds in which all take turns, and in brackets the least."
    )
    parts = [
        "A step with the best library alone over one by default: at least 1.2 in two of three examples, and "
        "nowhere below 1, were wanted.",
        harness.markdown(head, ratios),
        harness.markdown(["example", "link", "way", "step ms", "waited ms"], rows),
        "Libraries of the default, with what they took on rank 0:",
        harness.markdown(["example", "link", "library and operation"], took),
    ]
    text = harness.page("The default mix of libraries on two hosts", harness.command(), note, *parts)
    harness.write(text, output, f"mix-hosts_{hardware}-two-hosts")


if __name__ == "__main__":
    main()
