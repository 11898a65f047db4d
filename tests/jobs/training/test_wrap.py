"""mcr.wrap and its relatives, compared with DistributedDataParallel over gloo, and their failures."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mcr_plus as mcr
from mcr_plus.api import autograd
from mcr_plus.core.c10d import PrefixStore
from mcr_plus.job import init as runtime
from mcr_plus.rendezvous.mpi_launcher import mpi_usable
from mcr_plus.training import wrap as wrapping

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
STEPS = 20
Model = nn.Module
Batch = torch.Tensor


@contextmanager
def job(backend: str) -> Iterator[mcr.Communicator]:
    """Ours, with small buckets, and torch.distributed beside it for DDP."""
    torch.set_num_threads(1)
    config = {
        "version": 1,
        "backends": [backend],
        "pipeline": [
            {"fuse": {"bucket": "4KiB", "first_bucket": "1KiB"}},
            {"select": {}},
            {"dispatch": {"timeout": "30s"}},
        ],
    }
    with mcr.init(config) as comm:
        store = runtime.current().world.store
        assert store is not None
        dist.init_process_group("gloo", store=PrefixStore("ddp", store), rank=comm.rank, world_size=comm.size)
        yield comm
        dist.destroy_process_group()


# -- models ---------------------------------------------------------------------------------------


class Mlp(nn.Module):
    layers: Any  # torch's annotations do not know what a ModuleList holds

    def __init__(self, width: int = 24, depth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: Batch) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Tied(Mlp):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.layers[0].weight


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        for param in self.layers[1].parameters():
            param.requires_grad_(False)


class Picky(Mlp):
    """Uses other layers on every rank and in every step; the last one never."""

    step = 0

    def forward(self, x: Batch) -> torch.Tensor:
        self.step += 1
        chosen = [0, 1 + (dist.get_rank() + self.step) % 2, 3]
        for index in chosen:
            x = torch.tanh(self.layers[index](x))
        return x.square().mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)
        )

    def forward(self, x: Batch) -> torch.Tensor:
        return self.body(x[:, :12].reshape(-1, 3, 2, 2).repeat(1, 1, 4, 4)).square().mean()  # type: ignore[no-any-return]


class ChannelsLast(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Moving(Mlp):
    """A module that assigns a new buffer instead of changing it."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x: Batch) -> torch.Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x - self.mean)


class Checkpointed(Mlp):
    reentrant = False

    def forward(self, x: Batch) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return x.square().mean()


class Reentrant(Checkpointed):
    reentrant = True


class Mixed(Mlp):
    """Parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].to(torch.float64)

    def forward(self, x: Batch) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.square().mean()


def sgd(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adam(**options: Any) -> Callable[[Model], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


# -- a training step -----------------------------------------------------------------------------


def plain(model: Model, optimizer: torch.optim.Optimizer, batch: Batch, no_sync: Any) -> None:
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()


def keeping(model: Model, optimizer: torch.optim.Optimizer, batch: Batch, no_sync: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(batch).backward()
    optimizer.step()


def clipped(model: Model, optimizer: torch.optim.Optimizer, batch: Batch, no_sync: Any) -> None:
    optimizer.zero_grad()
    model(batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def accumulated(model: Model, optimizer: torch.optim.Optimizer, batch: Batch, no_sync: Any) -> None:
    optimizer.zero_grad()
    first, second, third = batch.tensor_split(3)
    with no_sync(model):
        model(first).backward()
        model(second).backward()
    model(third).backward()
    optimizer.step()


def twice(model: Model, optimizer: torch.optim.Optimizer, batch: Batch, no_sync: Any) -> None:
    optimizer.zero_grad()
    first, second = batch.tensor_split(2)
    model(first).backward()
    model(second).backward()
    optimizer.step()


def autocast(model: Model, optimizer: torch.optim.Optimizer, batch: Batch, no_sync: Any) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch)
    loss.backward()
    optimizer.step()


def scaled(model: Model, optimizer: torch.optim.Optimizer, batch: Batch, no_sync: Any) -> None:
    scaler = optimizer.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    optimizer.zero_grad()
    scaler.scale(model(batch)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "plain": (Mlp, sgd, plain, {}),
    "zeros kept": (Mlp, sgd, keeping, {}),
    "foreach": (Mlp, adam(foreach=True), plain, {}),
    "fused": (Mlp, adam(fused=True), plain, {}),
    "tied": (Tied, sgd, plain, {}),
    "frozen": (Frozen, sgd, plain, {}),
    "unused": (Picky, sgd, plain, {"find_unused_parameters": True}),
    "batch norm": (Normed, sgd, plain, {}),
    "moving mean": (Moving, sgd, plain, {}),
    "channels last": (ChannelsLast, sgd, plain, {}),
    "accumulation": (Mlp, sgd, accumulated, {}),
    "two backward passes": (Mlp, sgd, twice, {}),
    "clipping": (Mlp, sgd, clipped, {}),
    "autocast": (Mlp, sgd, autocast, {}),
    "grad scaler": (Mlp, sgd, scaled, {}),
    "checkpoint": (Checkpointed, sgd, plain, {}),
    "reentrant checkpoint": (Reentrant, sgd, plain, {}),
    "two types": (Mixed, adam(), plain, {}),
}
SOME = ["plain", "foreach", "unused", "batch norm", "accumulation", "clipping", "checkpoint", "two types"]


def trained(name: str, comm: mcr.Communicator, way: str) -> Model:
    """So many steps of a case on data of this rank; the model."""
    make, optimizer_of, step, options = CASES[name]
    torch.manual_seed(17 + (comm.rank if way != "ddp" else 0))  # ours broadcasts; so does DDP
    model: Model = make()
    if way == "ddp":
        torch.manual_seed(17)
        model = make()
    data = torch.randn(STEPS, 12, 24, generator=torch.Generator().manual_seed(1000 + comm.rank))
    inner = model
    no_sync: Any = lambda each: each.no_sync()  # noqa: E731
    if way == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.004, **options)
        optimizer = optimizer_of(inner)
    elif way == "hook":
        torch.manual_seed(17)
        inner = make()
        model = DistributedDataParallel(inner, bucket_cap_mb=0.004, **options)
        model.register_comm_hook(mcr.DDPState(), mcr.ddp_hook)
        optimizer = optimizer_of(inner)
    elif way == "horovod":
        optimizer = mcr.DistributedOptimizer(optimizer_of(model), model.named_parameters())
        mcr.broadcast_parameters(model.state_dict())
        no_sync = lambda _: nullcontext()  # noqa: E731
    else:
        model, optimizer = mcr.wrap(model, optimizer_of(model))
        no_sync = mcr.no_sync
    for batch in data:
        step(model, optimizer, batch.clone(), no_sync)
    return inner


def compared(backend: str, names: list[str], ways: list[str], dtype: str = "float32") -> dict[str, float]:
    """Run on ranks; return largest difference from DDP by case and entry, relative to the largest value."""
    found = {}
    torch.set_default_dtype(getattr(torch, dtype))
    with job(backend) as comm:
        for name in names:
            torch_model = trained(name, comm, "ddp").state_dict()
            for way in ways:
                ours = trained(name, comm, way).state_dict()
                assert ours.keys() == torch_model.keys()
                found[f"{name}, {way}"] = max(
                    float(
                        (ours[key].double() - value.double()).abs().max()
                        / value.double().abs().max().clamp(min=1e-6)
                    )
                    for key, value in torch_model.items()
                )
    return found


@pytest.mark.short("some-mpi")
@pytest.mark.parametrize("backend", [pytest.param("mpi", marks=needs_mpi), "gloo"])
@pytest.mark.parametrize("names", [SOME, list(CASES)], ids=["some", "all"])
def test_training_matches_ddp(names: list[str], backend: str) -> None:
    """On two ranks the rounding of a mean does not depend on its computation: equal to the last bit."""
    via: Any = "mpi" if backend == "mpi" else "torch"
    for result in run_ranks(compared, 2, args=[backend, names, ["wrap"]], via=via, timeout=240):
        assert len(result.value) == len(names)
        assert {name: worst for name, worst in result.value.items() if worst > 0} == {}


@pytest.mark.long
def test_training_matches_ddp_on_three_ranks() -> None:
    """DDP divides before it adds, we after: in double precision nothing of that is left after some steps."""
    names = ["plain", "unused", "batch norm", "accumulation", "tied"]
    args = ["gloo", names, ["wrap"], "float64"]
    for result in run_ranks(compared, 3, args=args, via="torch", timeout=240):
        assert len(result.value) == len(names)
        assert {name: worst for name, worst in result.value.items() if worst > 1e-10} == {}


@pytest.mark.long
@pytest.mark.parametrize("backend", [pytest.param("mpi", marks=needs_mpi), "gloo"])
def test_hook_and_optimizer_train_like_wrap(backend: str) -> None:
    names = ["plain", "foreach", "tied", "clipping", "two types"]
    via: Any = "mpi" if backend == "mpi" else "torch"
    for result in run_ranks(compared, 2, args=[backend, names, ["horovod", "hook"]], via=via, timeout=240):
        assert {name: worst for name, worst in result.value.items() if worst > 0} == {}


# -- the wrapped model --------------------------------------------------------------------------


def inside() -> dict[str, Any]:
    """Run on ranks: the places of gradients, the order of buckets, and copies of the model."""
    found: dict[str, Any] = {}
    with job("gloo") as comm:
        torch.manual_seed(comm.rank)
        model = Mlp()
        keys = list(model.state_dict())
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        reducer = wrapping._wrapped[model].reducer
        found["state"] = list(model.state_dict()) == keys
        found["before"] = reducer.buckets
        model(torch.randn(4, 24)).backward()
        optimizer.zero_grad()
        with mcr.record() as log:
            model(torch.randn(4, 24)).backward()
        found["after"] = reducer.buckets
        spaces = [(flat.values.data_ptr(), flat.values.nbytes) for flat in reducer._flats]
        found["views"] = all(
            p.grad is not None and any(start <= p.grad.data_ptr() < start + n for start, n in spaces)
            for p in model.parameters()
        )
        found["records"] = [(record.tag, record.fused) for record in log.records]
        optimizer.step()
        copied, buffer = copy.deepcopy(model), io.BytesIO()
        copied(torch.randn(4, 24)).backward()  # not wrapped: communicates nothing
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        loaded(torch.randn(4, 24)).backward()
        found["copies"] = all(
            torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
        )
        comm.barrier()
    return found


def test_gradients_are_views_into_buckets_in_the_order_of_the_first_pass() -> None:
    for result in run_ranks(inside, 2, via="torch"):
        found = result.value
        assert found["state"]
        assert found["views"]
        assert found["copies"]
        names = [name for bucket in found["after"] for name in bucket]
        assert sorted(names) == sorted(name for bucket in found["before"] for name in bucket)
        layers = [int(name.split(".")[1]) for name in names]
        assert layers == sorted(layers, reverse=True)  # the last layer's gradients come first
        assert len(found["after"]) >= 3
        buckets = [fused for tag, fused in found["records"] if tag == "gradients"]
        assert sorted(buckets) == sorted([*(len(bucket) for bucket in found["after"]), 1])


class Breaking(Mlp):
    """Raises in the middle of its backward pass on request."""

    broken = False

    def forward(self, x: Batch) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 2 and self.broken:
                x.register_hook(self.fail)
        return x.square().mean()

    def fail(self, gradient: torch.Tensor) -> None:
        raise RuntimeError("on purpose")


def broken(ranks: list[int]) -> list[Any]:
    """Run on ranks: the second backward pass raises on some of them; the third must be right again."""
    with job("gloo") as comm:
        torch.manual_seed(3)
        model = Breaking()
        twin = copy.deepcopy(model)
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        told = ""
        for step in range(3):
            optimizer.zero_grad()
            batch = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            model.broken = step == 1 and comm.rank in ranks
            try:
                model(batch).backward()
            except (RuntimeError, mcr.McrError) as error:
                told = f"{type(error).__name__}: {error}"
        for rank in range(comm.size):
            batch = torch.randn(4, 24, generator=torch.Generator().manual_seed(20 + rank))
            (twin(batch) / comm.size).backward()
        right = all(
            a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-9)
            for a, b in zip(model.parameters(), twin.parameters(), strict=True)
        )
        return [told, right]


@pytest.mark.parametrize("ranks", [[0, 1], [1], [0]])
def test_the_step_after_a_backward_pass_that_raised(ranks: list[int]) -> None:
    for result in run_ranks(broken, 2, args=[ranks], via="torch"):
        told, right = result.value
        assert right
        if result.rank in ranks:
            assert told == "RuntimeError: on purpose"
        else:
            assert told.startswith(f"McrError: the backward pass of rank {ranks[0]} failed")


def refused() -> dict[str, str]:
    """Run on ranks; return the problems of models, the final models, and the messages."""
    found: dict[str, str] = {}
    with job("gloo") as comm:

        def told(name: str, act: Callable[[], Any]) -> None:
            try:
                act()
                found[name] = "nothing"
            except (mcr.McrError, RuntimeError) as error:
                found[name] = f"{type(error).__name__}: {error}"

        def wrapped(model: Any) -> tuple[Any, torch.optim.Optimizer]:
            return mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
            model(torch.randn(4, 24)).backward()
            optimizer.step()

        told("other shapes", lambda: wrapped(Mlp(24 + comm.rank)))
        nothing: Any = 3
        told("no model", lambda: mcr.wrap(nothing, nothing))
        told("no optimizer", lambda: mcr.DistributedOptimizer(nothing))
        told("other optimizer", lambda: mcr.wrap(Mlp(), sgd(Mlp())))
        told("not wrapped", lambda: mcr.no_sync(Mlp()).__enter__())
        model, optimizer = wrapped(Frozen())
        model.layers[1].weight.requires_grad_(True)
        told("unfrozen", lambda: step(model, optimizer))
        model, optimizer = wrapped(Mlp())
        extra = nn.Linear(2, 2)
        model.extra = extra
        optimizer.add_param_group({"params": extra.parameters()})
        told("added", lambda: step(model, optimizer))
        model, _ = wrapped(Mlp())
        model.extra = nn.Linear(2, 2)
        told("grown", lambda: step(model, sgd(model)))
        told("wrapped again", lambda: step(*wrapped(model)))
        model, optimizer = wrapped(Mlp())
        model.layers = model.layers[:3]
        told("removed", lambda: step(model, optimizer))
        sparse = nn.Sequential(nn.Embedding(7, 3, sparse=True))
        mcr.wrap(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))
        told("sparse", lambda: sparse(torch.tensor([1, 2])).sum().backward())
    return found


def test_invalid_models_and_optimizers_are_refused() -> None:
    for result in run_ranks(refused, 2, via="torch"):
        found = result.value
        assert "has other parameters; the first difference is 'layers.0.weight: [" in found["other shapes"]
        assert "model: expected a torch.nn.Module, got int" in found["no model"]
        assert "mcr.wrap has not been called on it" in found["not wrapped"]
        assert "parameter 'layers.1.weight' was added or unfrozen; call mcr.wrap again" in found["unfrozen"]
        assert "parameter 'extra.weight' was added or unfrozen" in found["added"]
        assert "parameter 'extra.weight' was added or unfrozen" in found["grown"]
        assert "expected a torch.optim.Optimizer, got int" in found["no optimizer"]
        assert "optimizer: holds none of the model's parameters" in found["other optimizer"]
        assert found["wrapped again"] == "nothing"
        assert "parameter 'layers.3.weight' was removed or frozen" in found["removed"]
        assert "the gradient of '0.weight' is sparse" in found["sparse"]


def skipped() -> list[Any]:
    """Run on ranks: parameters and buffers marked as a rank's own."""
    with job("gloo") as comm:
        torch.manual_seed(comm.rank)
        model = Mlp()
        for param in model.layers[2].parameters():
            param.mcr_skip = True
        own = [param.detach().clone() for param in model.layers[2].parameters()]
        model, _ = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        kept = all(torch.equal(a, b) for a, b in zip(own, model.layers[2].parameters(), strict=True))
        model(torch.full((4, 24), comm.rank + 1.0)).backward()
        sums = [float(p.grad.double().sum()) for p in (model.layers[2].weight, model.layers[0].weight)]
        alike = [len(set(comm.all_gather_object(value))) == 1 for value in sums]
        return [kept, alike]


def test_skipped_parameters_are_not_averaged() -> None:
    for result in run_ranks(skipped, 2, via="torch"):
        assert result.value == [True, [False, True]]


class Sharing(nn.Module):
    """One parameter that only some ranks use, and an operation of the model's own in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.ones(1024))
        self.some = nn.Parameter(torch.ones(1024))

    def forward(self, x: Batch, use: bool) -> torch.Tensor:
        rows = autograd.replicate(self.all * x)  # its backward is as large as a bucket
        return (rows * self.some).sum() if use else rows.sum()


def beside_others(backend: str) -> list[list[float]]:
    """Run on ranks; return gradients by step, while buckets are sent at different places of the program."""
    found = []
    with job(backend) as comm:
        model: Any = Sharing()
        mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            model.zero_grad()
            model(torch.full((1024,), comm.rank + 1.0), step < 2 or comm.rank == 0).backward()
            found.append([value for param in model.parameters() for value in param.grad.unique().tolist()])
    return found


@pytest.mark.parametrize("backend", [pytest.param("mpi", marks=needs_mpi), "gloo"])
def test_buckets_keep_the_order_of_the_program_s_operations(backend: str) -> None:
    """all: both ranks' gradients of the sum (2 each) times x, their mean; some: x where it is used."""
    via: Any = "mpi" if backend == "mpi" else "torch"
    for result in run_ranks(beside_others, 2, args=[backend], via=via):
        assert result.value == [[3.0, 1.5], [3.0, 1.5], [3.0, 0.5], [3.0, 0.5]]


def taken_over() -> dict[str, float]:
    """Run on ranks; return the largest error of gradients of parameters that were handed over twice."""
    found = {}
    with job("gloo") as comm:
        for name in ("optimizer twice", "wrap and optimizer", "optimizer and wrap"):
            torch.manual_seed(0)
            model: Any = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
            for way in name.split(" and ") if " and " in name else ("optimizer", "optimizer"):
                if way == "wrap":
                    mcr.wrap(model, optimizer)
                else:
                    optimizer = mcr.DistributedOptimizer(optimizer)
            worst = 0.0
            for _ in range(8):
                optimizer.zero_grad()
                x = torch.full((1, 64), 1.0 + 2 * comm.rank)
                torch.stack([layer(x).sum() for layer in model]).sum().backward()
                worst = max(worst, *(float((param.grad - 2).abs().max()) for param in model.parameters()))
            found[name] = worst
    return found


@pytest.mark.long
def test_a_parameter_belongs_to_its_latest_reducer() -> None:
    for result in run_ranks(taken_over, 2, via="torch"):
        assert result.value == {"optimizer twice": 0, "wrap and optimizer": 0, "optimizer and wrap": 0}


def half_range() -> list[float]:
    """Run on ranks: a mean that float16 can hold, of gradients whose sum it cannot."""
    with job("gloo"):
        model = nn.Linear(4, 1, bias=False).half()
        mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        (model(torch.full((1, 4), 40.0, dtype=torch.half)) * 1000).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.flatten().tolist()


def test_means_of_half_precision_do_not_overflow() -> None:
    for result in run_ranks(half_range, 2, via="torch"):
        assert result.value == [40000.0] * 4


def forgotten() -> list[bool]:
    """Run on ranks; return whether a model, its parameters and their buckets live on after their last use."""
    with job("gloo"):
        model: Any = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mcr.wrap(model, optimizer)
        model(torch.randn(4, 24)).backward()
        optimizer.step()
        seen = [
            weakref.ref(each) for each in (model, model.layers[0].weight, wrapping._wrapped[model].reducer)
        ]
        del model, optimizer
        gc.collect()
        return [each() is not None for each in seen]


def test_a_wrapped_model_is_garbage_collected() -> None:
    for result in run_ranks(forgotten, 2, via="torch"):
        assert result.value == [False] * 3


def test_one_rank_averages_nothing() -> None:
    with mcr.init():
        model = Mlp()
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with mcr.no_sync(model):
            model(torch.randn(2, 24)).backward()
        optimizer.step()


# -- with codecs ----------------------------------------------------------------------------------


def encoded_job(codecs: list[dict[str, Any]]) -> list[tuple[bool, bool, float]]:
    """Run on ranks; return whether wrapping kept the first rank's state, and the bytes of a step.

    The results: whether the first rank's parameters and buffers are unchanged, whether all ranks have them,
    and the bytes of a step's operations on gradients, relative to the bytes of the parameters.
    """
    torch.set_num_threads(1)
    found = []
    for codec in codecs:
        stages: list[dict[str, Any]] = [{"compress": codec}, {"select": {}}, {"dispatch": {"timeout": "30s"}}]
        with mcr.init({"version": 1, "pipeline": stages}) as comm:
            torch.manual_seed(comm.rank)
            model: nn.Module = nn.Sequential(*(nn.Linear(96, 96) for _ in range(8)), nn.BatchNorm1d(96))
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.normal_()
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            firsts = comm.all_gather_object(after)[0]
            same = all(torch.equal(tensor, firsts[name]) for name, tensor in after.items())
            kept = comm.rank > 0 or all(torch.equal(tensor, before[name]) for name, tensor in after.items())
            for _ in range(2):  # the first pass finds out how to make buckets
                model(torch.randn(4, 96)).square().mean().backward()
                optimizer.step()
            with mcr.record() as log:
                model(torch.randn(4, 96)).square().mean().backward()
            sent = sum(record.wire_bytes for record in log.records if record.tag == "gradients")
            found.append((kept, same, sent / sum(param.nbytes for param in model.parameters())))
    return found


@pytest.mark.long
def test_codecs_apply_to_gradients_and_not_to_parameters() -> None:
    exempt = {"max_ndim": 1}
    codecs = [
        {"codec": "int8_block", "exempt": exempt},
        {"codec": "topk", "ratio": 0.01, "error_feedback": True, "exempt": exempt},
        {"codec": "topk", "ratio": 0.01, "exempt": exempt},
    ]
    for result in run_ranks(encoded_job, 2, args=[codecs], timeout=120):
        # int8: there, and back again
        for codec, most, (kept, same, share) in zip(codecs, (0.65, 0.25, 0.25), result.value, strict=True):
            assert kept, codec
            assert same, codec
            assert 0 < share < most, codec
