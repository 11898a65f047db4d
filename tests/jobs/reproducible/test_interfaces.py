"""`numerics: {sums: …}` reaches what models and other interfaces send: the same bits on all libraries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from command import mcr_plus
from jobs.reproducible.test_sums import LIBRARIES, expected, values
from mismatches import outcome_of
from ranks import own_rank, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_features import FSDP2_ON_CPU

import mcr_plus as mcr
import mcr_plus.horovod as hvd

SIZES: Final = (12_001, 5, 3000)


def rows(size: int) -> list[torch.Tensor]:
    """Return the values of all ranks."""
    return [values(rank, size, torch.float32) for rank in range(3)]


class Model(nn.Module):
    """The gradient of a parameter is what `rows` has for its size and rank."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(size) for size in SIZES])
        self.own = [rows(size)[own_rank()] for size in SIZES]  # not buffers, which would be broadcast

    def forward(self) -> torch.Tensor:
        parts = zip(self.parts, self.own, strict=True)
        return torch.stack([(part * own).sum() for part, own in parts]).sum()


@cache
def total(size: int, sums: str, factor: float = 1.0) -> torch.Tensor:
    """Return the sums of the values, each times a factor."""
    return expected([row * factor for row in rows(size)], sums)


def gradients(model: nn.Module, sums: str, *, before: bool = False) -> list[str]:
    """Return the parameters whose gradient is not the mean; `before`: DDP divides values before the sum."""
    wrong = []
    for size, part in zip(SIZES, model.parameters(), strict=True):
        found: Any = part.grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        mean = total(size, sums, 1 / 3) if before else total(size, sums) / 3
        if not torch.equal(found, mean):
            wrong.append(f"{size}: {(found != mean).sum()}")
    return wrong


def passes(model: nn.Module, optimizer: Any, sums: str, **how: Any) -> list[str]:
    wrong = []
    for number in range(3):  # after the first pass, wrap and DDP plan buckets again
        optimizer.zero_grad()
        model().backward()
        wrong += [f"pass {number}, {each}" for each in gradients(model, sums, **how)]
        optimizer.step()
    return wrong


def descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@contextmanager
def torch_job(config: dict[str, Any]) -> Iterator[None]:
    dist.init_process_group("mcr", pg_options=config)
    try:
        yield
    finally:
        dist.destroy_process_group()


def wrapped(config: dict[str, Any], sums: str) -> list[str]:
    with mcr.init({**config, "pipeline": [{"fuse": {"bucket": "16KiB"}}, *config["pipeline"]]}):
        plain = mcr.wrap(model := Model(), descent(model))
        found = passes(*plain, sums)
        del plain, model
        model = mcr.compile(Model(), cuts="none", backend="eager")
        return found + [f"compiled, {each}" for each in passes(*mcr.wrap(model, descent(model)), sums)]


def sharded() -> nn.Module:
    model: Any = fully_shard(Model())
    return model  # type: ignore[no-any-return]


def by_rule(config: dict[str, Any], sums: str) -> list[str]:
    """Gradients alone, by their tags."""
    rules = [{"match": {"tag": tag}, "sums": sums} for tag in ("gradients", "fsdp*")]
    config = {**config, "numerics": {"sums": "fast"}, "rules": rules}
    with mcr.init(config):
        found = passes(*mcr.wrap(model := Model(), descent(model)), sums)
    with torch_job(config):
        if FSDP2_ON_CPU:
            module = mcr.fsdp(sharded())
            found += [f"fsdp, {each}" for each in passes(module, descent(module), sums)]
        hooked = DistributedDataParallel(Model())
        hooked.register_comm_hook(mcr.DDPState(), mcr.ddp_hook)
        found += [f"hook, {each}" for each in passes(hooked, descent(hooked), sums)]
    return [*found, *(f"horovod, {each}" for each in optimized(config, sums))]


def torchs(config: dict[str, Any], sums: str) -> list[str]:
    wrong = []
    me, size = own_rank(), 3000
    with torch_job(config):
        x = rows(size)[me]
        dist.all_reduce(x)
        if not torch.equal(x, total(size, sums)):
            wrong.append("all_reduce")
        part = torch.empty(size // 3)
        dist.reduce_scatter_tensor(part, rows(size)[me])
        if not torch.equal(part, total(size, sums).view(3, -1)[me]):
            wrong.append("reduce_scatter")
        x = rows(size)[me]
        dist.reduce(x, 1, dist.ReduceOp.AVG)
        if me == 1 and not torch.equal(x, total(size, sums) / 3):
            wrong.append("reduce")
        model = DistributedDataParallel(Model(), bucket_cap_mb=1)
        wrong += passes(model, descent(model), sums, before=True)
        hooked = DistributedDataParallel(Model())
        hooked.register_comm_hook(mcr.DDPState(), mcr.ddp_hook)
        wrong += [f"hook, {each}" for each in passes(hooked, descent(hooked), sums)]
    return wrong


def fsdps(config: dict[str, Any], sums: str) -> list[str]:
    with torch_job(config):
        models = {"plain": sharded(), "mcr.fsdp": mcr.fsdp(sharded())}
        return [
            f"{name}, {each}"
            for name, model in models.items()
            for each in passes(model, descent(model), sums)
        ]


def horovods(config: dict[str, Any], sums: str) -> list[str]:
    wrong = []
    hvd.init(config=config)
    for op, size in ((hvd.Sum, 3000), (hvd.Average, 12_001)):
        found = hvd.allreduce(rows(size)[hvd.rank()], op=op)
        if not torch.equal(found, total(size, sums) / (3 if op == hvd.Average else 1)):
            wrong.append(f"allreduce {op}")
    hvd.shutdown()
    return wrong + optimized(config, sums)


def optimized(config: dict[str, Any], sums: str) -> list[str]:
    """Return what is wrong with the gradients of Horovod's optimizer."""
    hvd.init(config=config)
    model = Model()
    optimizer: Any = hvd.DistributedOptimizer(descent(model), model.named_parameters())
    wrong = []
    for _ in range(2):
        optimizer.zero_grad()
        model().backward()
        optimizer.synchronize()
        wrong += gradients(model, sums)
        with optimizer.skip_synchronize():
            optimizer.step()
    hvd.shutdown()
    return wrong


WAYS: Final[dict[str, Callable[[dict[str, Any], str], list[str]]]] = {
    "wrap": wrapped, "rule": by_rule, "torch": torchs, "horovod": horovods,
    **({"fsdp": fsdps} if FSDP2_ON_CPU else {}),
}  # fmt: skip


def every_way(libraries: list[str], sums: str) -> dict[str, list[str]]:
    """Run on ranks; return what differs from the oracle, by library and interface."""
    found = {}
    for library in libraries:
        for name, way in WAYS.items():
            stages: list[Any] = [{"select": {}}, {"dispatch": {}}]
            config: Any = {
                "version": 1,
                "backends": [library],
                "numerics": {"sums": sums},
                "pipeline": stages,
            }
            found[f"{library} {name}"] = way(config, sums)
    return found


@pytest.mark.long
@pytest.mark.parametrize("libraries", [LIBRARIES, ["gloo"]], ids=["all", "gloo"])
@pytest.mark.parametrize("sums", ["fixed", "exact"])
def test_every_interface_gives_the_bits_of_the_oracle(sums: str, libraries: list[str]) -> None:
    via: Any = "mpi" if "mpi" in libraries else "torch"
    for result in run_ranks(every_way, 3, args=[libraries, sums], via=via):
        assert {name: wrong for name, wrong in result.value.items() if wrong} == {}
        assert len(result.value) == len(libraries) * len(WAYS)


def other_sums(libraries: list[str]) -> list[dict[str, Any]]:
    """Run on ranks: one rank has other `sums`, in a call on torch's group, and in the configuration."""
    found = []
    for library in libraries:
        with torch_job({"version": 1, "backends": [library]}):
            group: Any = dist.new_group([0, 1, 2])

            def call(group: Any = group) -> None:
                if own_rank() == 1:
                    group.communicator.all_reduce(torch.ones(5000), sums="exact")
                else:
                    dist.all_reduce(torch.ones(5000), group=group)

            found.append(outcome_of(call))
    config = {"version": 1, "numerics": {"sums": "fixed" if own_rank() == 1 else "exact"}}
    return [*found, outcome_of(lambda: dist.init_process_group("mcr", pg_options=config) or dist.barrier())]


def test_other_sums_on_a_rank_are_an_error_that_names_them() -> None:
    via: Any = "mpi" if "mpi" in LIBRARIES else "torch"
    for result in run_ranks(other_sums, 3, args=[LIBRARIES], via=via):
        *calls, start = result.value
        assert len(calls) == len(LIBRARIES)
        for outcome in calls:
            assert outcome["error"] == "OrderMismatch", outcome
            assert "issued all_reduce SUM float32[5000] backend" in outcome["text"]
            assert "sums=exact" in outcome["text"]
        assert start["error"] == "ConfigError", start
        assert "in numerics.sums: 'exact' and 'fixed'" in start["text"]


def recorded(folder: str) -> dict[str, list[Any]]:
    """Run on ranks: return what records say about `sums`, by library."""
    found = {}
    for library in ("msccl", "gloo"):
        with mcr.init({"version": 1, "backends": [library], "numerics": {"sums": "fixed"}}):
            with mcr.record(f"{folder}/{library}") as log:
                mcr.all_reduce(torch.ones(50_000))
                mcr.all_reduce(torch.ones(5), sums="exact")
                mcr.all_reduce(torch.ones(5), mcr.MAX)
            found[library] = [[each.kind, each.sums] for each in log.records]
    return found


def test_recordings_and_the_report_show_sums(tmp_path: Path) -> None:
    results = run_ranks(recorded, 3, args=[str(tmp_path)], via="torch")
    assert results[0].value == {
        "msccl": [["all_reduce", "fixed"], ["all_reduce", "exact"], ["all_reduce", None]],
        "gloo": [
            ["all_to_all", "fixed"], ["all_gather", "fixed"], ["all_gather", "exact"], ["all_reduce", None],
        ],
    }  # fmt: skip
    for library in ("msccl", "gloo"):
        assert mcr_plus("report", tmp_path / library, "-o", tmp_path / "page.html").returncode == 0
        page = (tmp_path / "page.html").read_text()
        assert f"{library} · sums: fixed" in page
        assert f"{library} · sums: exact" in page


def test_commands_show_sums(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    lines = ["version: 1", "backends: [gloo, msccl]", "numerics: {sums: fixed}", "rules:"]
    file.write_text("\n".join([*lines, "  - match: {tag: metric}", "    sums: exact", ""]))
    validated = mcr_plus("validate", file).stdout
    assert "numerics:\n  sums: fixed\n" in validated
    assert "  sums: exact\n" in validated
    for words, sums, how in (
        ((), "fixed", "by a tree over the ranks"),
        (("--tag", "metric"), "exact", "exactly"),
    ):
        text = mcr_plus("explain", "all_reduce", "1MiB", "--ranks", "3", "--config", file, *words).stdout
        assert f"sums: {sums}: gloo has an order of its own: all_to_all, added {how}, all_gather" in text
        assert ("rules[0]" in text) == (sums == "exact")
    for dtype, config in (("int32", file), ("float32", None)):  # exact anyway; nothing asked for
        words = ("--dtype", dtype, *(() if config is None else ("--config", config, "--tag", "metric")))
        text = mcr_plus("explain", "all_reduce", "1MiB", "--ranks", "3", *words).stdout
        said = "  SUM of int32 is exact in every order, so sums: exact changes nothing\n"
        assert (said in text, "has an order of its own" in text) == (config is not None, False)
    rows = json.loads(mcr_plus("doctor", "--ops", "--json").stdout)["operations"]
    support = {row["backend"]: row["support"] for row in rows if row["kind"] == "sums"}
    assert (support["msccl"], support["gloo"], support["nccl"]) == ("native", "emulated", "emulated")


def test_nodes_that_are_parts_of_the_tree_add_up_first() -> None:
    """Of half types and exact sums, a node's sum would be rounded."""
    for sums, dtype, ranks, said in (
        ("fixed", "float32", 6, "3 nodes of 2 ranks: reduce_scatter in the node, all_reduce of each part"),
        (
            "fixed",
            "float32",
            9,
            "not in steps: sums: fixed is a tree over all ranks, of which nodes are no parts",
        ),
        ("fixed", "bfloat16", 6, "not in steps: sums: fixed of bfloat16 is rounded once, over all ranks"),
        ("exact", "float64", 6, "not in steps: sums: exact of float64 is rounded once, over all ranks"),
    ):
        config = {"version": 1, "numerics": {"sums": sums}}
        steps = mcr.explain("all_reduce", "1MiB", dtype=dtype, ranks=ranks, nodes=3, config=config)["steps"]
        assert steps[0]["stage"] == "hierarchical"
        assert steps[0]["decision"].startswith(said)
    between = {"hierarchical": {"inter": {"compress": {"codec": "bf16"}}}}
    stages = [between, {"compress": {}}, {"select": {}}, {"dispatch": {}}]
    config = {"version": 1, "numerics": {"sums": "fixed"}, "pipeline": stages}
    step = mcr.explain("all_reduce", "1MiB", ranks=6, nodes=3, config=config)["steps"][0]
    assert step["decision"] == "not in steps: sums: fixed with a codec has an order over all ranks"


def test_a_rule_by_parameter_has_no_sums(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text('version: 1\nrules:\n  - match: {param: "*.bias"}\n    sums: exact\n')
    answer = mcr_plus("validate", file)
    assert answer.returncode != 0
    assert f"{file}:4: rules[0].sums: gradients of several parameters travel together" in answer.stderr
