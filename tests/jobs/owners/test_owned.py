"""Muon on matrices with owners, beside torch.optim.Muon on whole matrices in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from dtensors import placed
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

import mcr_plus as mcr
from mcr_plus.errors import InvalidArgument

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")

R, S0, S1 = Replicate(), Shard(0), Shard(1)
STEPS = 4


@contextmanager
def job() -> Iterator[None]:
    config: Any = {
        "version": 1,
        "numerics": {"sums": "exact"},
        "pipeline": [{"select": {}}, {"dispatch": {"timeout": "60s"}}],
    }
    dist.init_process_group("mcr", pg_options=config)
    try:
        yield
    finally:
        dist.destroy_process_group()


def random_values(shape: Sequence[int], *seed: object) -> torch.Tensor:
    """Return the same values on all ranks."""
    generator = torch.Generator().manual_seed(random.Random(str(seed)).getrandbits(40))
    return torch.randn(*shape, generator=generator)


# -- matrices alone: gradients are given, so that only exchange and update are compared --


def shapes(count: int) -> list[tuple[int, int]]:
    chance = random.Random(count)
    return [(chance.randint(1, 30), chance.randint(1, 30)) for _ in range(count)]


def updated_like_muon(
    mesh: DeviceMesh, placements: Sequence[Placement], memory: str | None, count: int = 7
) -> dict[str, Any]:
    """Return how far matrices on a mesh are from those of one process after some steps, and the plan."""
    sizes = shapes(count)
    whole = [nn.Parameter(random_values(shape, "w", index)) for index, shape in enumerate(sizes)]
    reference = torch.optim.Muon(whole, lr=0.1)
    sharded: list[Any] = [nn.Parameter(placed(each.detach().clone(), mesh, placements)) for each in whole]
    owned = mcr.owned([(f"w{index}", each) for index, each in enumerate(sharded)], memory=memory)
    optimizer: Any = owned.optimizer(torch.optim.Muon, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    other = torch.optim.lr_scheduler.StepLR(reference, 2, 0.5)
    for step in range(STEPS):
        if step == 2:  # a checkpoint is loaded
            with torch.no_grad():
                for index, (one, part) in enumerate(zip(whole, sharded, strict=True)):
                    loaded = random_values(one.shape, "loaded", index)
                    one.copy_(loaded)
                    part.copy_(placed(loaded, mesh, placements))
        for index, (one, part) in enumerate(zip(whole, sharded, strict=True)):
            if (step + index) % 4:  # some have no gradient in this step
                one.grad = random_values(one.shape, step, index)
                part.grad = placed(one.grad, mesh, placements)
        for each in (reference, optimizer, other, scheduler):
            each.step()
        for each in (reference, optimizer):
            each.zero_grad()
    far = max(
        float((part.full_tensor() - one).abs().max().detach())
        for one, part in zip(whole, sharded, strict=True)
    )
    plan = owned.memory
    return {"far": far, "rounds": len(plan.rounds), "keeps": plan.keeps_weights, "ahead": plan.ahead}


class Failing(torch.optim.SGD):
    """Fails after an update, if told."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if Failing.fails:
            raise ArithmeticError("after the update")


def failing_steps_and_addends() -> list[list[float]]:
    """Return the matrices after steps of which one has failed, and with gradients that are addends."""
    with job():
        mesh = init_device_mesh("cpu", (2,))
        rank = dist.get_rank()
        found = []
        for placement, gradient in ((S0, S0), (R, Partial())):
            sharded: list[Any] = [nn.Parameter(placed(torch.ones(3, 2), mesh, [placement])) for _ in range(2)]
            optimizer: Any = mcr.owned(sharded).optimizer(Failing, lr=1.0)
            for step in range(3):
                for each in sharded:
                    whole = torch.full((3, 2), 8.0)
                    each.grad = (
                        placed(whole, mesh, [S0])
                        if gradient is S0
                        else DTensor.from_local(whole * (0.25, 0.75)[rank], mesh, [gradient], run_check=False)
                    )
                Failing.fails = step == 1 and placement is S0  # in place, there is no way back
                if Failing.fails:
                    with pytest.raises(ArithmeticError):
                        optimizer.step()
                    Failing.fails = False
                optimizer.step()
            found += [each.full_tensor().flatten().tolist() for each in sharded]
        return found


def matrices_on_three_ranks() -> list[dict[str, Any]]:
    with job():
        mesh = init_device_mesh("cpu", (3,))
        found = [
            updated_like_muon(mesh, [placement], memory)
            for placement in (S0, S1, R)
            for memory in (None, "40KiB")
        ]
        found.append(updated_like_muon(mesh, [S0], "20KiB", 70))
        return found


def matrices_on_a_mesh() -> list[dict[str, Any]]:
    with job():
        mesh = init_device_mesh("cpu", (2, 2))
        return [
            updated_like_muon(mesh, placements, memory)
            for placements in ([S0, S1], [R, S0], [S0, S0], [S1, R])
            for memory in ("256MiB", "20KiB")
        ]


def test_shards_of_every_kind_are_updated_like_whole_matrices() -> None:
    for result in run_ranks(matrices_on_three_ranks, 3, via="torch"):
        assert [each["far"] for each in result.value] == [0.0] * 7
        assert {each["keeps"] for each in result.value} == {True, False}
        assert max(each["rounds"] for each in result.value) > 1


@pytest.mark.long
def test_matrices_on_a_mesh_of_two_dimensions() -> None:
    for result in run_ranks(matrices_on_a_mesh, 4, via="torch"):
        assert [each["far"] for each in result.value] == [0.0] * 8


def test_failed_steps_are_not_made_twice_and_addends_are_summed() -> None:
    for result in run_ranks(failing_steps_and_addends, 2, via="torch"):
        assert result.value == [[1.0 - 3 * 8.0] * 6] * 4


# -- FSDP2 ----------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(11, 13)]
    for inputs, outputs in ((13, 17), (17, 29), (29, 29), (29, 2)):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers)


def data(step: int, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randint(11, (64,), generator=generator)


def mean_gradients(alone: nn.Module, step: int, number: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return the exact sums over ranks of a pass's gradients, rounded once, over the number of ranks."""
    sums: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        alone.zero_grad()
        alone(data(step, rank, number)).square().mean().backward()
        for name, each in alone.named_parameters():
            assert each.grad is not None
            sums[name] = sums.get(name, 0) + each.grad.double()
    return {name: each.float() / ranks for name, each in sums.items()}


def trained_by_fsdp(memory: str, early: bool, clips: bool, passes: int) -> dict[str, Any]:
    """Return how far an FSDP2 model is from one process, and the rounds that began in each backward pass."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    owned = mcr.owned(model, memory=memory)
    muon = owned.optimizer(torch.optim.Muon, lr=0.05)
    mcr.fsdp(model, owned=owned if early else None, tag=f"{memory} {early} {clips} {passes}")
    sgd = torch.optim.SGD(owned.others, lr=0.1)
    alone = network()
    matrices = {each.name for each in owned.matrices}
    named = dict(alone.named_parameters())
    references = [
        torch.optim.Muon([named[name] for name in matrices], lr=0.05),
        torch.optim.SGD([each for name, each in named.items() if name not in matrices], lr=0.1),
    ]
    began = []
    for step in range(STEPS):
        sums = {name: torch.zeros_like(each) for name, each in named.items()}
        for number in range(passes):
            model(data(step, rank, number)).square().mean().backward()
            for name, mean in mean_gradients(alone, step, number, ranks).items():
                sums[name] += mean
        began.append(muon._early)
        for name, each in named.items():
            each.grad = sums[name]
        if clips:
            for one in (model, alone):
                nn.utils.clip_grad_norm_(one.parameters(), 1e-3 * (step + 1) ** 2)
        for optimizer in (muon, sgd, *references):
            optimizer.step()
            optimizer.zero_grad()
    far = 0.0
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        far = max(far, float((parameter.full_tensor() - named[name]).abs().max().detach()))
    return {"far": far, "began": began, "matrices": sorted(matrices), "ahead": owned.memory.ahead}


def fsdp_models() -> list[dict[str, Any]]:
    with job():
        return [
            trained_by_fsdp("40KiB", early, clips, passes)
            for early, clips, passes in (
                (False, False, 1),
                (True, False, 1),
                (True, True, 1),
                (True, False, 2),
            )
        ]


def test_fsdp_trains_like_one_process() -> None:
    for result in run_ranks(fsdp_models, 3, via="torch"):
        late, early, clipped, several = result.value
        assert [each["far"] for each in result.value] == [0.0] * 4
        assert late["matrices"] == ["1.weight", "3.weight", "5.weight", "7.weight"]  # without the embedding
        ahead = early["ahead"]
        assert ahead > 0
        assert late["began"] == [0] * STEPS
        assert early["began"] == [0, *[ahead] * (STEPS - 1)]
        assert clipped["began"] == [0, ahead, 0, 0]  # gradients that are sent and then clipped are sent again
        assert several["began"] == early["began"]


# -- data parallel, states, memory, bad input ------------------------------------------------------------


def trained_by_wrap() -> dict[str, Any]:
    with mcr.init(config={"version": 1, "numerics": {"sums": "exact"}}) as comm:
        model = network()
        owned = mcr.owned(model)
        muon: Any = owned.optimizer(torch.optim.Muon, lr=0.05)
        model, muon = mcr.wrap(model, muon)
        alone = network()
        named = dict(alone.named_parameters())
        reference = torch.optim.Muon([named[each.name] for each in owned.matrices], lr=0.05)
        for step in range(STEPS):
            model(data(step, comm.rank, 0)).square().mean().backward()
            for name, mean in mean_gradients(alone, step, 0, comm.size).items():
                named[name].grad = mean
            muon.step()
            reference.step()
            muon.zero_grad()
        far = max(float((each - named[name]).abs().max().detach()) for name, each in model.named_parameters())
        own = [each.name for each in owned.matrices if each.owner == comm.rank]
        states = comm.all_gather_object(muon.state_dict())
        merged = {**states[0], "state": {name: each for one in states for name, each in one["state"].items()}}
        mine = muon.state_dict()["state"]
        muon.load_state_dict(merged)
        same = all(
            torch.equal(each["momentum_buffer"], muon.state_dict()["state"][name]["momentum_buffer"])
            for name, each in mine.items()
        )
        missing = ""
        try:
            muon.load_state_dict({**merged, "state": {"1.weight": merged["state"]["1.weight"]}})
        except InvalidArgument as error:
            missing = str(error)
        return {"far": far, "own": own, "states": sorted(merged["state"]), "same": same, "missing": missing}


def test_replicas_are_updated_by_owners_with_states_of_their_own() -> None:
    results = [result.value for result in run_ranks(trained_by_wrap, 2)]
    assert [each["far"] for each in results] == [0.0, 0.0]
    assert sorted(results[0]["own"] + results[1]["own"]) == ["1.weight", "3.weight", "5.weight", "7.weight"]
    for each in results:
        assert each["states"] == ["1.weight", "3.weight", "5.weight", "7.weight"]
        assert each["same"]
    assert any("merge the `state` of all ranks' files" in each["missing"] for each in results)


class Allocations(TorchDispatchMode):
    """Sums up tensors that are made, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(each, torch.Tensor) and func._schema.name.startswith(
                ("aten::empty", "aten::zeros", "aten::clone")
            ):
                storage = each.untyped_storage()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                finalize(storage, self._freed, storage.nbytes())
        return found

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes


def memory_of_steps() -> list[tuple[int, int]]:
    found = []
    with job():
        mesh = init_device_mesh("cpu", (3,))
        for memory in ("4MiB", "1MiB", "700KiB"):
            with Allocations() as allocations:
                sharded = [
                    nn.Parameter(
                        DTensor.from_local(torch.full((40, 128), float(index)), mesh, [S0], run_check=False)
                    )
                    for index in range(9)
                ]
                before = allocations.now
                allocations.peak = before
                owned = mcr.owned(sharded, memory=memory)
                optimizer = owned.optimizer(torch.optim.SGD, lr=0.1, foreach=False)
                for each in sharded:
                    each.grad = DTensor.from_local(torch.ones(40, 128), mesh, [S0], run_check=False)
                gradients = allocations.now - before
                allocations.peak = allocations.now
                for _ in range(3):
                    optimizer.step()
                found.append((allocations.peak - before - gradients, owned.memory.nbytes))
                del optimizer, owned, sharded
    return found


def test_memory_of_a_step_is_bounded() -> None:
    for result in run_ranks(memory_of_steps, 3, via="torch"):
        for used, bound in result.value:
            assert 0 < used <= bound + 8192  # the agreement, and scalars
        assert [
            bound <= limit << 10 for (_, bound), limit in zip(result.value, (4096, 1024, 700), strict=True)
        ]


def mistakes() -> dict[str, str]:
    found = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except InvalidArgument as error:
            found[name] = str(error)

    with job():
        mesh = init_device_mesh("cpu", (2,))
        matrix, vector = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(5))
        note("vector", lambda: mcr.owned([("w", matrix), ("bias", vector), ("norm", vector)]))
        note("twice", lambda: mcr.owned([("a", matrix), ("b", matrix)]))
        note("none", lambda: mcr.owned([]))
        note("model", lambda: mcr.owned(nn.LayerNorm(4)))
        note("cost", lambda: mcr.owned([matrix], cost=lambda shape: -float(shape[0])))
        note("memory", lambda: mcr.owned([matrix], memory="many"))
        no_list: Any = matrix
        note("tensor", lambda: mcr.owned(no_list))
        sharded: Any = placed(torch.ones(4, 6), mesh, [S0]).requires_grad_()
        owned = mcr.owned([("w", sharded)])
        note("class", lambda: owned.optimizer(lambda parameters: None))  # type: ignore[arg-type,return-value]
        optimizer = owned.optimizer(torch.optim.Muon)
        note("second", lambda: owned.optimizer(torch.optim.Muon))
        note("group", lambda: optimizer.add_param_group({"params": [matrix]}))
        note("state", lambda: optimizer.load_state_dict({"x": 1}))
        if dist.get_rank() == 0:
            parameter = owned.matrices[0].parameter
            parameter.grad = placed(torch.ones(4, 6), mesh, [S0])
        note("some", optimizer.step)
        note("fsdp", lambda: mcr.fsdp(nn.Linear(2, 2), owned=3))
        model = nn.Linear(2, 2, bias=False)
        note("elastic", lambda: mcr.elastic(model, mcr.owned(model).optimizer(torch.optim.Muon)))
        note("state of fsdp", lambda: mcr.fsdp_state(model, mcr.owned(model).optimizer(torch.optim.Muon)))
        pair = model, mcr.owned(model).optimizer(torch.optim.Muon)
        note("elastic_sharded", lambda: next(mcr.elastic_sharded(lambda: pair)))
    return found


def test_mistakes_are_named_on_all_ranks() -> None:
    for result in run_ranks(mistakes, 2, via="torch"):
        found = result.value
        assert found["vector"].startswith(
            "parameters: expected matrices that require gradients; bias is of shape [5], norm is of shape [5]"
        )
        assert found["twice"] == "parameters: ['a', 'b']: a name or a parameter is given twice"
        assert found["none"] == "parameters: there are none"
        assert found["model"] == "parameters: the model has no matrices that require gradients"
        assert found["cost"] == "cost: expected a number from 0 on for matrix 0, got -4.0"
        assert found["memory"].startswith("memory: ")
        assert found["tensor"].startswith("parameters: expected a model or its matrices, got")
        assert found["class"] == "optimizer: expected a class of torch.optim.Optimizer, got None"
        assert "call mcr.owned again" in found["second"]
        assert found["group"].startswith("add_param_group: ")
        assert found["state"].startswith("state_dict: expected one of mcr.owned")
        assert found["some"] == "step: only some ranks have the gradients of ['w']"
        assert found["fsdp"] == "owned: expected the result of mcr.owned, got 3"
        for name in ("elastic", "elastic_sharded", "state of fsdp"):
            assert "optimizer: the states of mcr.owned are on their owners alone" in found[name]
