"""Plans made for special models, beside the best of the others: slices, 3F1B, interlaced stages.

    python benchmarks/bench_plan_cases.py [--case terapipe] [--rate 1gbit]

Each on two ranks, which have a core each, since stages that share cores gain nothing:

- terapipe: a transformer and one or two sequences of 1,024 bytes, in one or two micro-batches, on one host;
  slices of the sequence through the pipeline / 1F1B. Goal: at least 1.3 times as fast.
- three_f_one_b: residual MLPs that recycle their output (three passes, of which the last has gradients), on
  two hosts; 3F1B / the best of the plans that know no passes without gradients. Goal: at most 0.85.
- interlaced: a vocabulary of 32,768 words before and after residual MLPs, few words in a step, on one host;
  the pipeline with embedding and head on all ranks / the best of the others. Goal: at most 0.85.

Plans of a case take turns. The report goes to benchmarks/results/plan-cases_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, NamedTuple

import harness
import plan_steps as steps
import torch
import typer
from harness import HARDWARE, Budget, Dated, Hardware, Rate, Rounds
from plan_steps import Workload
from torch import Tensor, nn
from torch.nn import functional
from transformer import Shape
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.errors import McrError
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.named import named
from mcr_plus.plans.proof import ProvedPlan, prove

RANKS: Final = 2
OTHERS: Final = ("data_parallel", "zero1", "zero3", "tensor_parallel", "gpipe", "one_f_one_b")
WORDS: Final = 32768


# --- models ---------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """x + MLP(norm(x))."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


class Recycled(nn.Module):
    """Three passes through the same blocks, of which the last has gradients."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Residual(hidden) for _ in range(count))
        for param in self.blocks.parameters():
            param.mcr_shared = True  # type: ignore[attr-defined]
        self.head = nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        previous = torch.zeros_like(x)
        for number in range(3):
            with torch.set_grad_enabled(number == 2 and torch.is_grad_enabled()):
                previous = x + previous
                for block in self.blocks:
                    previous = block(previous)
        output: Tensor = self.head(previous)
        return output


def _words(hidden: int, count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(WORDS, hidden), *(Residual(hidden) for _ in range(count)), nn.Linear(hidden, WORDS)
    )


def _of_words(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Case(NamedTuple):
    """A model; plans made for it by name, with their arguments; and what they are compared with."""

    work: Callable[[], Workload]
    plans: dict[str, tuple[str, dict[str, Any]]]
    others: dict[str, tuple[str, dict[str, Any]]]
    hosts: int = 1


def _slices(rows: int) -> Case:
    def work() -> Workload:
        made = steps.transformer
        shape = Shape(layers=6, hidden=256, heads=4, sequence=1024)
        return Workload(lambda: made(shape), steps.text, steps.windows(rows, shape.sequence), list)

    cuts = {"4 equal": 4, "8 equal": 8, "6 shorter and shorter": [230, 200, 178, 158, 138, 120]}
    return Case(
        work,
        {
            f"terapipe, {name}": ("terapipe", {"micro_batches": rows, "slices": cut})
            for name, cut in cuts.items()
        },
        {"one_f_one_b": ("one_f_one_b", {"micro_batches": rows})},
    )  # fmt: skip


def _recycled() -> Workload:
    x, y = torch.randn(8, 16, 256), torch.randn(8, 16, 8)
    return Workload(lambda: Recycled(256, 24), functional.mse_loss, (x, y), list)


def _vocabulary() -> Workload:
    x = steps.windows(8, 8, WORDS)
    return Workload(lambda: _words(512, 4), _of_words, (x[:, :-1], x[:, 1:]), list)


def _made(name: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return {f"{name}, {count} micro-batches": (name, {"micro_batches": count}) for count in (1, 2, 4)}


_OTHERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {name: (name, {}) for name in OTHERS}
CASES: Final[dict[str, Case]] = {
    "terapipe, one sequence": _slices(1),
    "terapipe, two sequences": _slices(2),
    "three_f_one_b": Case(_recycled, _made("three_f_one_b"), _OTHERS, hosts=2),
    "interlaced": Case(_vocabulary, _made("interlaced"), _OTHERS),
}


# --- steps ----------------------------------------------------------------------------------------------


def _plans(case: Case, profile: Profile) -> Iterator[tuple[str, ProvedPlan]]:
    for name, (plan, options) in {**case.plans, **case.others}.items():
        with suppress(McrError):  # one for other models
            yield name, prove(named(plan, profile, RANKS, **options))


def measured(name: str, table: str, rate: str, rounds: int) -> Any:
    """Figures of a case's plans; on rank 0."""
    torch.set_num_threads(1)
    with mcr.init(steps.pipeline(table)) as comm:
        case = CASES[name]
        work = case.work()
        plans = dict(_plans(case, steps.profiled(work)))
        costs = steps.costs_of(table, comm.size, case.hosts, rate)
        rows, _ = steps.measured(work, plans, costs, rounds)
    return rows if comm.rank == 0 else None


def main(
    cases: Annotated[list[str], typer.Option("--case", default_factory=lambda: list(CASES))],
    rate: Rate = "1gbit", rounds: Rounds = 7, tune: Budget = "60s", output: Dated = None,
    hardware: Hardware = HARDWARE,
) -> None:  # fmt: skip
    harness.chosen(cases, CASES, "case")
    parts: list[str] = []
    for name in cases:
        case = CASES[name]
        with ExitStack() as stack:
            both = None
            if case.hosts == 2:
                need_two_hosts()
                both = stack.enter_context(TwoHosts(rate))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            table = folder / "table.yaml"
            steps.tuned(table, RANKS, both, tune)
            given = name, str(table), rate, rounds
            found = harness.on_ranks(steps.launcher(RANKS, both), measured, *given)
        figures = sorted((steps.PlanFigures(*each) for each in found), key=lambda each: median(each.seconds))
        ours, theirs = (
            next(each for each in figures if (each.name in case.plans) == made) for made in (True, False)
        )
        rows = [steps.row_of(each) for each in figures]
        ratio = median(ours.seconds) / median(theirs.seconds)
        sums = f"{ours.name} / {theirs.name}: {ratio:.2f}, {1 / ratio:.2f} times as fast."
        harness.show(steps.HEAD, rows, name)
        print(sums, flush=True)
        parts += [f"## {name}", harness.markdown(steps.HEAD, rows), sums]
    note = (__doc__ or "").split("\n\n", 2)[2].rsplit("The report", 1)[0].strip()
    harness.write(
        harness.page("Plans made for models", harness.command(), note, *parts),
        output,
        f"plan-cases_{hardware}",
    )


if __name__ == "__main__":
    harness.program(main)()
