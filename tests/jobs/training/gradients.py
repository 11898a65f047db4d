"""Programs of ranks for `test_gradients`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from codec_exam import F64, f64
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mcr_plus as mcr
from mcr_plus.core.c10d import PrefixStore
from mcr_plus.job import init as runtime


def config(compress: dict[str, Any], *rules: dict[str, Any], **fuse: Any) -> dict[str, Any]:
    """Return a pipeline with a codec, and fusion of all kinds."""
    kinds = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]
    stages = [{"fuse": {"kinds": kinds, **fuse}}, {"compress": compress}, {"select": {}}]
    return {
        "version": 1,
        "pipeline": [*stages, {"dispatch": {"timeout": "30s"}}],
        "rules": list(rules),
    }


def near(got: torch.Tensor, expected: F64) -> float:
    """Return the relative L2 norm of the difference."""
    return float(np.linalg.norm(f64(got) - expected) / np.linalg.norm(expected))


# -- the fuse stage -----------------------------------------------------------------------------------


def values(rank: int, index: int, numel: int) -> torch.Tensor:
    """Neighbours in a bucket; one is 10⁹ times the other."""
    random = np.random.default_rng([rank, index])
    return torch.tensor(random.uniform(1, 2, numel) * (1e6 if index % 2 else 1e-3), dtype=torch.float32)


def neighbours(codec: str) -> dict[str, list[Any]]:
    """Fused operations by a codec: how far off each member is."""
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {}
    with mcr.init(config({"codec": codec})) as comm:
        n, me, sizes = comm.size, comm.rank, (100, 77, 3000, 5)

        def mean(index: int, numel: int) -> F64:
            total: F64 = np.sum([f64(values(rank, index, numel)) for rank in range(n)], 0) / n
            return total

        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            works: list[tuple[Any, torch.Tensor, F64]] = []
            for index, size in enumerate(sizes):
                own = values(me, index, size if kind in ("all_reduce", "all_gather") else size * n)
                part = slice(me * size, (me + 1) * size)
                if kind == "all_reduce":
                    works.append((comm.all_reduce(own, "AVG", async_op=True), own, mean(index, size)))
                elif kind == "all_gather":
                    out = torch.zeros(size * n)
                    everyone = np.concatenate([f64(values(rank, index, size)) for rank in range(n)])
                    works.append((comm.all_gather_into_tensor(out, own, async_op=True), out, everyone))
                elif kind == "reduce_scatter":
                    out = torch.zeros(size)
                    work = comm.reduce_scatter_tensor(out, own, "AVG", async_op=True)
                    works.append((work, out, mean(index, size * n)[part]))
                else:
                    out = torch.zeros(size * n)
                    parts = np.concatenate([f64(values(rank, index, size * n))[part] for rank in range(n)])
                    works.append((comm.all_to_all_single(out, own, async_op=True), out, parts))
            for work, _, _ in works:
                work.wait()
            fused = {(work.info.fused, work.info.codec) for work, _, _ in works}
            found[kind] = [sorted(fused), *(near(out, true) for _, out, true in works)]
    return found


def decided_one_by_one() -> dict[str, Any]:
    """Codecs of fused small operations, by their own size, and of a coalesced call."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    rule = {"match": {"tag": "ruled", "bytes": "<4KiB"}, "compress": {"codec": "none"}}
    with mcr.init(config({"codec": "int8_block", "exempt": {"below": "2KiB"}}, rule)) as comm:
        for tag, numel in (("exempt", 256), ("not exempt", 600), ("ruled", 600)):
            tensors = [torch.full((numel,), 1.0) for _ in range(8)]
            works = [comm.all_reduce(tensor, async_op=True, tag=tag) for tensor in tensors]
            largest = comm.all_reduce(torch.full((numel,), 7), mcr.MAX, async_op=True, tag=tag)
            assert largest is not None
            largest.wait()
            for work in works:
                assert work is not None
                work.wait()
            assert works[0] is not None
            found[tag] = [works[0].info.codec, works[0].info.fused]
        pair = [values(comm.rank, index, 100) for index in range(2)]
        comm.all_reduce_coalesced(pair, mcr.AVG, compress="int8_block")
        means = [np.mean([f64(values(rank, i, 100)) for rank in range(comm.size)], 0) for i in range(2)]
        found["coalesced"] = [near(got, mean) for got, mean in zip(pair, means, strict=True)]
    return found


def repeated(codecs: list[dict[str, Any]], passes: int) -> list[float]:
    """Return the distance of the last pass's gradients from the third pass's, with one batch in all."""
    torch.set_num_threads(1)
    found = []
    for compress in codecs:
        with mcr.init(config(compress)) as comm:
            model = Scales()
            mcr.wrap(model, torch.optim.SGD(model.parameters(), 0.0))
            seen = []
            for _ in range(passes):
                model.zero_grad()
                model(batch(comm.rank, 0)).backward()
                grads = [param.grad for param in model.parameters() if param.grad is not None]
                seen.append(torch.cat([grad.flatten() for grad in grads]))
            found.append(float((seen[-1] - seen[2]).abs().max()))
    return found


# -- mcr.wrap -----------------------------------------------------------------------------------------


class Scales(nn.Module):
    """Layers with gradients that differ by many orders of magnitude."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.loud = nn.Linear(20, 30)
        self.quiet = nn.Linear(20, 30)
        self.spare = nn.Linear(20, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loud, quiet, spare = self.loud(x), self.quiet(x), self.spare(x)
        loss: torch.Tensor = 1e5 * loud.square().mean() + 1e-5 * quiet.square().mean() + spare.square().mean()
        return loss


def batch(rank: int, step: int) -> torch.Tensor:
    """Return a rank's inputs in a step."""
    random = np.random.default_rng([rank, step, 9])
    return torch.tensor(random.standard_normal((16, 20)), dtype=torch.float32)


def true_gradients(ranks: int, step: int) -> dict[str, F64]:
    """Return the mean over ranks, by one process without any of ours."""
    model = Scales().double()
    for rank in range(ranks):
        (model(batch(rank, step).double()) / ranks).backward()
    return {name: f64(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def wrapped(compress: dict[str, Any], rules: Sequence[dict[str, Any]], passes: int) -> dict[str, Any]:
    """Return the gradients of an unchanging model, pass by pass."""
    torch.set_num_threads(1)
    with mcr.init(config(compress, *rules)) as comm:
        model = Scales()
        mcr.wrap(model, torch.optim.SGD(model.parameters(), 0.0))
        offs: list[dict[str, float]] = []
        codecs: list[str] = []
        total = {name: np.zeros(param.numel()) for name, param in model.named_parameters()}
        true = {name: np.zeros(param.numel()) for name, param in model.named_parameters()}
        for step in range(passes):
            model.zero_grad()
            with mcr.record() as log:
                model(batch(comm.rank, step)).backward()
            codecs = sorted({str(record.codec) for record in log.records if record.bytes > 64})
            expected = true_gradients(comm.size, step)
            offs.append({})
            for name, param in model.named_parameters():
                assert param.grad is not None
                offs[-1][name] = near(param.grad, expected[name])
                total[name] += f64(param.grad)
                true[name] += expected[name]
        state = mcr.state_dict()
        kept = [each for group in state["codecs"].values() for each in group.values()]
        left = sum(float(np.sum(f64(each["residual"]))) for each in kept if "residual" in each)
        left += sum(float(np.sum(f64(each["shard"]))) for each in kept if "shard" in each)
        sums = [sum(map(np.sum, each.values())) for each in (total, true)]
        equal = comm.all_gather_object([f64(param.grad).sum() for param in model.parameters()])  # type: ignore[arg-type]
        return {
            "offs": offs,
            "codecs": codecs,
            "names": [name for group in state["codecs"].values() for name in group],
            "sums": [float(each) for each in sums],
            "left": left,
            "equal": all(each == equal[0] for each in equal),
        }


def trained(ways: list[dict[str, Any]], via: str) -> list[dict[str, Any]]:
    """A small regression by mcr.wrap or DDP's hook, once by each codec, in jobs one after another."""
    torch.set_num_threads(1)
    return [_trained(compress, via) for compress in ways]


def _trained(compress: dict[str, Any], via: str) -> dict[str, Any]:
    """Return the loss, and whether ranks agree."""
    with mcr.init(config(compress, bucket="8KiB", first_bucket="4KiB")) as comm:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(
            nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        if via == "ddp":
            store = runtime.current().world.store
            assert store is not None
            dist.init_process_group(
                "gloo", store=PrefixStore("ddp", store), rank=comm.rank, world_size=comm.size
            )
            model = DistributedDataParallel(model, bucket_cap_mb=0.01)
            model.register_comm_hook(mcr.DDPState(), mcr.ddp_hook)
        else:
            mcr.wrap(model, optimizer)
        losses, codecs = [], set()
        for step in range(90):
            x = batch(comm.rank, step)
            optimizer.zero_grad()
            loss = (model(x)[:, 0] - torch.sin(x.sum(1))).square().mean()
            with mcr.record() as log:
                loss.backward()
            sent = [each for each in log.records if each.bytes > 64 and each.kind != "broadcast"]
            codecs |= {(step > 0, str(each.codec)) for each in sent}
            optimizer.step()
            losses.append(float(loss.detach()))
        total = torch.tensor(losses[-30:]).mean()
        comm.all_reduce(total, "AVG", compress=False)
        prints = comm.all_gather_object(
            [float(param.detach().double().sum()) for param in model.parameters()]
        )
        if via == "ddp":
            dist.destroy_process_group()
        return {
            "loss": float(total),
            "equal": all(each == prints[0] for each in prints),
            "codecs": sorted(codecs),
            "kept": len(mcr.state_dict()["codecs"]),
        }


def losses(ways: list[dict[str, Any]], steps: int) -> list[list[float]]:
    """Return the losses of a model, a normalised layer between two others, trained with several codecs."""
    torch.set_num_threads(1)
    found = []
    for compress in ways:
        with mcr.init(config(compress)) as comm:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 8))
            teacher = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 8), nn.LayerNorm(8))
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            mcr.wrap(model, optimizer)
            taken = []
            for step in range(steps):
                random = np.random.default_rng([comm.rank, step])
                x = torch.tensor(random.standard_normal((16, 24)), dtype=torch.float32)
                loss = nn.functional.mse_loss(model(x), teacher(x))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                taken.append(loss.item())
            found.append(taken)
    return found
