"""Models trained under plans, compared on every rank with one process that has all of it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import mcr_plus as mcr
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.named import NAMED, hybrid
from mcr_plus.plans.run import ParallelModel

sys.path.append(str(Path(__file__).parents[2] / "examples" / "common"))  # ranks know the tests alone
from transformer import LanguageModel, Losses, Shape

Loss = Callable[..., Tensor]
ITEMS: Final = 15  # neither micro-batches nor ranks divide them
CLOSE: Final = 1e-9


class Case(NamedTuple):
    """A model, its loss, and a function of the step that gives the batch."""

    model: nn.Module
    loss: Loss
    batch: Callable[[int], Any]


class Grouped(nn.Module):
    """Attention with its own linear layers for queries, keys and values, of which some heads share keys."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.size = heads, kv_heads, hidden // heads
        self.q = nn.Linear(hidden, hidden)
        self.k = nn.Linear(hidden, kv_heads * self.size)
        self.v = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for layer, heads in ((self.q, self.n_heads), (self.k, self.n_kv_heads), (self.v, self.n_kv_heads)):
            parts.append(layer(x).unflatten(-1, (heads, self.size)).transpose(1, 2))
        q, k, v = parts
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class Layer(nn.Module):
    """Attention and an MLP with a gate."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(hidden), Grouped(hidden, heads, kv_heads)
        self.after, self.mlp = nn.RMSNorm(hidden), Gated(hidden, 5 * hidden // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        output: Tensor = x + self.mlp(self.after(x))
        return output


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, middle: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, middle, bias=False), nn.Linear(hidden, middle)
        self.down = nn.Linear(middle, hidden)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


def text(losses: Losses) -> Tensor:
    """Return the loss of the examples' transformer."""
    return losses.text


def _random(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def gpt(ranks: int, dtype: torch.dtype = torch.float64) -> Case:
    """Return the transformer of the examples, whose head is its embedding; two blocks a rank."""
    model = LanguageModel(Shape(layers=2 * ranks - 2, hidden=16, heads=4, sequence=9), 1).to(dtype)
    model.bytes.weight.mcr_shared = True  # type: ignore[attr-defined]
    return Case(model, text, lambda step: torch.randint(0, 256, (ITEMS, 10), generator=_random(step)))


def mlp(_: int) -> Case:
    """Return a plain chain, whose batch is a pair; its first layer is frozen, others work in place."""
    torch.manual_seed(2)
    sizes = [7, 12, 10, 9, 11, 5]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU(inplace=True) if after % 2 else nn.Tanh()]
    model = nn.Sequential(*layers[:-1]).double()
    for param in layers[0].parameters():
        param.requires_grad_(False)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(ITEMS, sizes[0], dtype=torch.float64, generator=_random(step))
        return x, torch.randint(0, sizes[-1], (ITEMS,), generator=_random(step))

    return Case(model, functional.cross_entropy, batch)


def layers(ranks: int, kv_heads: int) -> Case:
    """Return layers of attention with separate linear layers, between two others."""
    torch.manual_seed(3)
    width, heads = 24, 6
    inner = [Layer(width, heads, kv_heads) for _ in range(2 * ranks - 2)]
    model = nn.Sequential(nn.Linear(5, width), *inner, nn.Linear(width, 3)).double()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(ITEMS, 8, 5, dtype=torch.float64, generator=_random(step))
        return x, torch.randn(ITEMS, 8, 3, dtype=torch.float64, generator=_random(-step))

    return Case(model, functional.mse_loss, batch)


CASES: Final[dict[str, Callable[[int], Case]]] = {
    "gpt": gpt,
    "mlp": mlp,
    "separate": lambda ranks: layers(ranks, 6),
    "grouped": lambda ranks: layers(ranks, 3),
    "bfloat16": lambda ranks: gpt(ranks, torch.bfloat16),
}


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Return an optimizer with two groups of parameters."""
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.ndim > 1], "lr": 0.02},
        {"params": [param for param in params if param.ndim < 2], "lr": 0.003},
    ]
    if kind == "adamw":
        return torch.optim.AdamW(groups, weight_decay=0.1)
    return torch.optim.SGD(groups, momentum=0.9)


def profile_of(case: Case) -> Profile:
    """Return the profile with times that do not depend on the run, so that stages do not, but on the rank."""
    found = mcr.profile(case.model, case.batch(0), loss=case.loss, repeats=1)
    blocks = [
        block.model_copy(update={"forward": 1.0 + number * mcr.get_rank(), "backward": 2.0, "recompute": 1.0})
        for number, block in enumerate(found.blocks)
    ]
    return found.model_copy(update={"blocks": tuple(blocks)})


def plan_of(profile: Profile, ranks: int, spec: Mapping[str, Any]) -> ModelPlan:
    """Return a named plan, a hybrid one, or a pipeline of which some ranks have nothing."""
    options = dict(spec.get("options", {}))
    if spec["plan"] == "idle":
        plan = ModelPlan(profile, ranks)
        plan.assign(..., ranks - 1)
        plan.assign(0, 0)
        return plan
    if options.get("recompute"):
        options["recompute"] = ...
    return (hybrid if spec["plan"] == "hybrid" else NAMED[spec["plan"]])(profile, ranks, **options)


class Reference(NamedTuple):
    """Losses, and the last gradients and parameters by name."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def one_process(case: Case, kind: str, steps: int) -> Reference:
    """Train a copy of the model here."""
    model = copy.deepcopy(case.model)
    optimizer = optimizer_of(model, kind)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        batch = case.batch(step)
        inputs = batch if isinstance(batch, tuple) else (batch,)
        loss = case.loss(model(inputs[0]), *inputs[1:])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    own = dict(model.named_parameters())
    gradients = {name: param.grad for name, param in own.items() if param.grad is not None}
    return Reference(found, gradients, {name: param.detach() for name, param in own.items()})


def whole_gradients(parallel: ParallelModel) -> dict[int, Tensor]:
    """Return the gradients of this rank's parameters, by their identity; of all shards."""
    found: dict[int, Tensor] = {}
    for bucket in parallel.buckets:
        flat = bucket.gradients
        if bucket.held != "whole":
            assert bucket.comm is not None
            assert bucket.shard.grad is not None
            bucket.gather()
            flat = torch.empty_like(bucket.gradients)
            bucket.comm.all_gather_into_tensor(flat, bucket.shard.grad)
        sizes = [param.numel() for param in bucket.params]
        for param, own in zip(bucket.params, flat.split([*sizes, len(flat) - sum(sizes)]), strict=False):
            found[id(param)] = own.view_as(param)
    return found


def compared(parallel: ParallelModel, reference: Reference, close: float) -> Iterator[tuple[str, list[int]]]:
    """Compare this rank's parts with one process; yield names, first and end units, and their number."""
    gradients = whole_gradients(parallel)
    names = {name for block in parallel._blocks for name in parallel.plan.blocks[block].names}
    for name in sorted(names):
        param = parallel._now(name)
        cut = getattr(param, "mcr_cut", None)

        def own(whole: Tensor, cut: Any = cut) -> Tensor:
            return whole if cut is None else cut[1].take(whole, cut[2], cut[3])

        pairs = [("parameter", param.detach(), own(reference.parameters[name]))]
        if name in reference.gradients:
            pairs.append(("gradient", gradients[id(param)], own(reference.gradients[name])))
        for what, mine, theirs in pairs:
            assert mine.shape == theirs.shape, f"{what} of {name}: {mine.shape}, not {theirs.shape}"
            error = (mine - theirs).abs().max().item()
            limit = close * max(theirs.abs().max().item(), 1e-4)
            assert error <= limit, f"{what} of {name}: differs by {error:.3g}, at most {limit:.3g}"
        yield name, [0, 1, 1] if cut is None else [*cut[2], cut[3]]


def train(specs: Sequence[Mapping[str, Any]], steps: int, config: Any = None) -> list[str]:
    """Train models one after another under their plans; return what went wrong."""
    torch.set_num_threads(1)
    wrong: list[str] = []
    known: dict[str, tuple[Case, Profile]] = {}
    references: dict[tuple[str, str], Reference] = {}
    with mcr.init(config):
        for spec in specs:
            name, kind = spec["case"], spec["optimizer"]
            if name not in known:
                known[name] = (case := CASES[name](mcr.get_world_size()), profile_of(case))
            case, profile = known[name]
            if (name, kind) not in references:
                references[name, kind] = one_process(case, kind, steps)
            plan = plan_of(profile, mcr.get_world_size(), spec)
            case = case._replace(model=copy.deepcopy(case.model))
            found = steps_of(case, plan, kind, steps, references[name, kind], spec.get("close", CLOSE))
            wrong += [f"{spec}: {each}" for each in found]
    return wrong


def steps_of(
    case: Case, plan: ModelPlan, kind: str, steps: int, reference: Reference, close: float
) -> list[str]:
    """Train a model under a plan; return what differs from one process."""
    optimizer = optimizer_of(case.model, kind)
    parallel = mcr.parallelize(case.model, optimizer, plan, loss=case.loss)
    wrong = []
    for step, expected in enumerate(reference.losses):
        loss = parallel.step(case.batch(step)).item()
        optimizer.step()
        if step + 1 < len(reference.losses):
            optimizer.zero_grad()
        if not abs(loss - expected) <= close * abs(expected):
            wrong.append(f"step {step}: loss {loss!r}, not {expected!r}")
    found = {}
    try:
        found = dict(compared(parallel, reference, close))
    except AssertionError as error:
        wrong.append(str(error))
    return [*wrong[:2], *uncovered(mcr.all_gather_object(found), reference)]


def uncovered(everyone: Sequence[Mapping[str, Any]], reference: Reference) -> Iterator[str]:
    """Yield the parameters of which no rank has some part."""
    for name in reference.parameters:
        parts = sorted({tuple(found[name]) for found in everyone if name in found})
        at = 0
        for low, high, _ in parts:
            at = max(at, high) if low <= at else at
        if not parts or at < parts[0][2]:
            yield f"{name}: parts {parts} of ranks"


class Odd(nn.Module):
    """A head that is the embedding by another name, a layer that nothing uses, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(20, 8), Gated(8, 12)
        self.layer.register_buffer("kept", torch.ones(2))
        self.layer.register_buffer("scratch", torch.ones(3), persistent=False)
        self.head, self.unused = nn.Linear(8, 20, bias=False), nn.Linear(2, 2)
        self.head.weight = self.embed.weight
        self.embed.weight.mcr_shared = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layer(self.embed(x))).square().mean()
        return output


def checkpoint_of_odd() -> bool:
    """Return whether a checkpoint on rank 0 is the state dict of the model."""
    with mcr.init():
        torch.manual_seed(4)
        model = Odd()
        before = copy.deepcopy(model.state_dict())
        plan = NAMED["tensor_parallel"](mcr.profile(model, torch.ones(6, 4).long(), repeats=1), 2)
        found = mcr.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan).state_dict()
        same = before.keys() == found.keys() and all(found[name].equal(before[name]) for name in before)
        return same if mcr.get_rank() == 0 else not found


# -- what is refused ----------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Blocks of which some may be skipped, or fail."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.skipped: set[int] = set()
        self.fails = -1

    def forward(self, x: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            if number == self.fails:
                raise ZeroDivisionError(f"in part {number}")
            try:
                x = x if number in self.skipped else part(x)
            except ValueError:
                return x
        return x


def chain(width: int = 6) -> Case:
    """Return the chain on a batch of 8 rows."""
    return Case(Chain(width), lambda y: y.square().mean(), lambda step: torch.ones(8, width) * (step + 1))


def refusals() -> dict[str, str]:
    """Return what is said about wrong arguments of `parallelize` and `step`."""
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    with mcr.init():
        profile = profile_of(chain())
        pipeline = NAMED["one_f_one_b"](profile, 2, micro_batches=2)

        def said(
            name: str, plan: ModelPlan, case: Case, rows: int = 8, optimizer: Any = None,
            change: Callable[[Any], None] | None = None,
        ) -> None:  # fmt: skip
            try:
                chosen = optimizer or torch.optim.SGD(case.model.parameters(), lr=0.1)
                parallel = mcr.parallelize(case.model, chosen, plan, loss=case.loss)
                if change is not None:
                    change(case.model)
                parallel.step(torch.ones(rows, 6))
                found[name] = ""
            except (mcr.McrError, RuntimeError) as error:
                found[name] = f"{type(error).__name__}: {error}"

        said("batch", pipeline, chain(), rows=9)
        case = chain()
        adam = torch.optim.Adam(case.model.parameters())
        case.model(torch.ones(8, 6)).sum().backward()
        adam.step()
        said("state", pipeline, case, optimizer=adam)
        said("stranger", pipeline, chain(), optimizer=torch.optim.SGD(chain().model.parameters(), lr=0.1))
        again, shards = chain(), NAMED["zero3"](profile, 2)
        said("once", shards, again)
        said("again", shards, again)
        said("ranks", NAMED["data_parallel"](profile, 3), chain())
        said("kind", cast("Any", "data_parallel"), chain())
        said("shapes", pipeline, chain(7))
        said("modules", pipeline, Case(nn.Sequential(nn.Linear(6, 6)), *chain()[1:]))
        wrong = NAMED["one_f_one_b"](profile, 2, micro_batches=2)
        wrong.orders[1].pop()
        said("proof", wrong, chain())
        both = NAMED["data_parallel"](profile, 2)
        said("way", both, chain(), change=lambda model: model.skipped.update({0, 1, 2, 3}))
    return found


def fail_on_one_rank() -> None:
    """Train a step; then a block fails on rank 1."""
    torch.set_num_threads(1)
    with mcr.init(backends=["gloo"]) as comm:
        case = chain()
        plan = NAMED["one_f_one_b"](profile_of(case), 2, micro_batches=2)
        optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
        parallel = mcr.parallelize(case.model, optimizer, plan, loss=case.loss)
        parallel.step(case.batch(0))
        if comm.rank == 1:
            case.model.fails = 3  # type: ignore[assignment]
        parallel.step(case.batch(1))
