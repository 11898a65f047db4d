"""What costs loss when gradients are compressed under AdamW: one cause or remedy after the other, no ranks.

    python benchmarks/bench_feedback.py '{}' '{compress: {codec: topk}}' …

One process computes the gradients of both ranks of the job that `bench_training.py` calls gpt, and sends them
through the payloads and the error feedback of the codec, matrices as one flat bucket, so that parts of the
method can be replaced that a job cannot. Fields of a way:

    compress   codec and options; `error_feedback: {decay: …}` beside them; feedback is always on
    lr, beta1, beta2, eps   of AdamW
    warmup     steps that send gradients as they are
    variance   `exact`: AdamW's second moments are those of uncompressed gradients, its first of the sent
    send       `update`: every rank has moments of its own gradients, and what is sent is AdamW's update
    scaled     decay of mean squares by whose root gradients are divided before they are encoded, and
               multiplied after; of what all ranks have received, so that they all have the same
    momentum   momentum correction, with AdamW's beta1 at 0; without `compress`, momentum before AdamW alone
    masking    false: the velocity of what has been sent is kept
    exempt_beta1   AdamW's beta1 of biases and norms, which are never compressed; as of matrices without it
    ramp       steps in which the learning rate grows to `lr`

The final loss is the mean over the last twentieth of the steps and both ranks; differences are to the first
way with the same seed. "update" is the root of the mean square of what AdamW subtracts from matrices, in
learning rates, the mean over the second half of the steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
import yaml
from harness import Json, program, show, write_json
from pydantic import BaseModel, ConfigDict, ValidationError

from mcr_plus.compression.codec import PayloadCodec, make
from mcr_plus.compression.error_feedback import ErrorFeedback, MomentumCorrection

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "common"))

RANKS = 2
TAIL = 20
BATCH = 8
SHAPE = {"layers": 2, "hidden": 96, "heads": 4, "sequence": 32}  # of bench_training's gpt


class Way(BaseModel):
    """One run; see the top of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compress: dict[str, Any] = {}
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    warmup: int = 0
    variance: str = "sent"
    send: str = "gradient"
    scaled: float | None = None
    momentum: float | None = None
    masking: bool = True
    exempt_beta1: float | None = None
    ramp: int = 0

    @property
    def beta1_of_matrices(self) -> float:
        return 0.0 if self.momentum is not None else self.beta1


class Unmasked(MomentumCorrection):
    """Momentum correction that keeps the velocity of what has been sent."""

    def encode(self, values: torch.Tensor, lo: int, wire: torch.Tensor, scale: float = 1.0) -> int:
        return ErrorFeedback.encode(self, values, lo, wire, scale)


class Adam:
    """AdamW's moments of flat values."""

    def __init__(self, way: Way, beta1: torch.Tensor) -> None:
        self.way, self.beta1, self.steps = way, beta1, 0
        self.first, self.second = torch.zeros_like(beta1), torch.zeros_like(beta1)

    def update(self, gradient: torch.Tensor, squared_of: torch.Tensor) -> torch.Tensor:
        way, beta1 = self.way, self.beta1
        self.steps += 1
        self.first.lerp_(gradient, 1 - beta1)
        self.second.mul_(way.beta2).addcmul_(squared_of, squared_of, value=1 - way.beta2)
        mean_ = self.first / (1 - beta1**self.steps)
        return mean_ / ((self.second / (1 - way.beta2**self.steps)).sqrt() + way.eps)


class Channel:
    """What both ranks' values are to all of them after an all_reduce with the codec, as a mean."""

    def __init__(self, way: Way, numel: int) -> None:
        self.way, self.numel, self.calls = way, numel, 0
        config = dict(way.compress)
        feedback = config.pop("error_feedback", {})
        self.codec = make(config) if config else None
        self.squares, self.velocity = torch.zeros(numel), torch.zeros(numel)
        if self.codec is None:
            return
        assert isinstance(self.codec, PayloadCodec)
        cpu = torch.device("cpu")
        self.states = [
            ErrorFeedback(self.codec, numel, cpu, **feedback)
            if way.momentum is None
            else (MomentumCorrection if way.masking else Unmasked)(self.codec, numel, cpu, way.momentum)
            for _ in range(RANKS)
        ]
        self.wire = torch.zeros(self.codec.wire_numel(numel), dtype=self.codec.wire_dtype)

    def mean(self, values: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        total = torch.zeros(self.numel)
        if self.codec is None or self.calls <= self.way.warmup:
            for each in values:
                total.add_(each, alpha=1 / RANKS)
            if self.codec is None and self.way.momentum is not None:
                total = self.velocity.mul_(self.way.momentum).add_(total).clone()
        else:
            assert isinstance(self.codec, PayloadCodec)
            scale = self.scale()
            for state, each in zip(self.states, values, strict=True):
                if scale is not None:  # residuals are kept unscaled: the scale changes
                    state._residual.div_(scale)
                state.encode(each if scale is None else each / scale, 0, self.wire)
                if scale is not None:
                    state._residual.mul_(scale)
                self.codec.decode_accumulate(self.wire, total, 1 / RANKS)
            if scale is not None:
                total.mul_(scale)
        if self.way.scaled is not None:
            self.squares.mul_(self.way.scaled).addcmul_(total, total, value=1 - self.way.scaled)
        return total

    def scale(self) -> torch.Tensor | None:
        if self.way.scaled is None or self.calls == 1:
            return None
        roots = self.squares.sqrt()
        return roots + 0.1 * roots.mean() + 1e-12


def train(way: Way, steps: int, seed: int) -> tuple[list[float], float]:
    """The loss of each step, the mean over ranks; the size of an update, see the top of the file."""
    from corpus import read_corpus
    from transformer import LanguageModel, Shape

    model = LanguageModel(Shape(**SHAPE), seed)
    corpus = read_corpus(None, SHAPE["sequence"], seed)
    params = sorted(model.parameters(), key=lambda param: param.ndim < 2)  # what is compressed comes first
    numel = sum(param.numel() for param in params)
    matrices = sum(param.numel() for param in params if param.ndim > 1)
    channel = Channel(way, matrices)
    beta1 = torch.full((numel,), way.beta1_of_matrices)
    if way.exempt_beta1 is not None:
        beta1[matrices:] = way.exempt_beta1
    moments = [Adam(way, beta1) for _ in range(RANKS if way.send == "update" else 1)]
    losses, sizes = [], []
    for step in range(steps):
        gradients, loss = [], 0.0
        for rank in range(RANKS):
            model.zero_grad()
            own = model(corpus.windows(step, rank, BATCH)).text
            own.backward()
            loss += own.item() / RANKS
            gradients.append(torch.cat([param.grad.view(-1) for param in params if param.grad is not None]))
        losses.append(loss)
        exact = torch.stack(gradients).mean(0)

        def sent(values: list[torch.Tensor], exact: torch.Tensor = exact) -> torch.Tensor:
            return torch.cat([channel.mean([each[:matrices] for each in values]), exact[matrices:]])

        if way.send == "update":
            updates = [each.update(own, own) for each, own in zip(moments, gradients, strict=True)]
            update = sent(updates, torch.stack(updates).mean(0))
        else:
            got = sent(gradients)
            if way.momentum is not None and way.variance == "exact":
                got[:matrices] *= 1 - way.momentum  # to the scale of the gradients
            update = moments[0].update(got, exact if way.variance == "exact" else got)
        sizes.append(update[:matrices].square().mean().sqrt().item())
        lr = way.lr * min(1.0, (step + 1) / max(1, way.ramp))
        with torch.no_grad():
            at = 0
            for param in params:
                part = update[at : at + param.numel()].view(param.shape)
                param.mul_(1 - 0.01 * lr).sub_(part, alpha=lr)
                at += param.numel()
    return losses, mean(sizes[steps // 2 :])


def bits(way: Way) -> float:
    """Of a payload, per value, after the warm-up."""
    config = {key: value for key, value in way.compress.items() if key != "error_feedback"}
    if not config:
        return 32.0
    codec = make(config)
    assert isinstance(codec, PayloadCodec)
    return codec.wire_nbytes(1 << 20) * 8 / (1 << 20)


def read(text: str) -> Way:
    try:
        return Way.model_validate(yaml.safe_load(text) or {})
    except (yaml.YAMLError, ValidationError) as error:
        raise typer.BadParameter(f"{text}: {error}") from None


@program
def main(
    ways: Annotated[list[str], typer.Argument(help="YAML mappings; the first is what others differ from.")],
    steps: int = 1000,
    seed: Annotated[list[int], typer.Option(help="Several with the option again.")] = [0],  # noqa: B006
    figures: Json = None,
) -> None:
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for text, way in [(text, read(text)) for text in ways]:  # all are read before the first is run
        finals, sizes = [], []
        for number in seed:
            start = time.perf_counter()
            losses, size = train(way, steps, number)
            finals.append(mean(losses[-max(1, steps // TAIL) :]))
            sizes.append(size)
            print(
                f"{finals[-1]:.4f}  update {size:.3f}  {time.perf_counter() - start:.0f} s  "
                f"seed {number}  {text}",
                flush=True,
            )
        first = runs[0]["finals"] if runs else finals
        differences = [final / other - 1 for final, other in zip(finals, first, strict=True)]
        runs.append(
            {
                "way": text,
                "bits": bits(way),
                "finals": finals,
                "differences": differences,
                "update": mean(sizes),
            }
        )
        write_json(runs, figures)
    rows = [
        [
            run["way"],
            f"{run['bits']:.2f}",
            f"{mean(run['finals']):.4f}",
            f"{mean(run['differences']):+.2%}",
            " ".join(f"{each:+.2%}" for each in run["differences"]),
            f"{run['update']:.3f}",
        ]
        for run in runs
    ]
    head = ["way", "bits a value", "final loss", "difference", "… by seed", "update"]
    show(head, rows, "gpt, nats per byte")


if __name__ == "__main__":
    main()
