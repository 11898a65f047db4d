"""`mcr-plus simulate`: unmodified programs on ranks that do not exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Answer, mcr_plus_process

CLUSTER = """
nodes: 256
ranks_per_node: 4
links:
  inside: {rate: 10GB/s, latency: 2us}
  nic: {rate: 10Gbit/s, latency: 10us}
"""

DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("BACKEND")
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(6)]), bucket_cap_mb=0.03)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert abs(float(total) / dist.get_world_size() - float(loss)) < 1e-4 * float(loss)
"""

WRAPPED = """
import torch, mcr_plus as mcr
comm = mcr.init()
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])
model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
even = mcr.new_group(range(0, comm.size, 2))
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(4, 32)).pow(2).mean().backward()
    optimizer.step()
    if even.rank >= 0:
        even.all_reduce(torch.ones(4), tag="even")
    assert comm.all_gather_object({"step": step}) == [{"step": step}] * comm.size
mcr.finalize()
"""

SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group()
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("copies", "shards"))
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(3)])
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100):
    model(torch.randn(4, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

STAGES = """
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(16, 16)
schedule = Schedule1F1B(
    PipelineStage(model, rank, size, torch.device("cpu")), n_microbatches=4,
    loss_fn=lambda output, target: (output - target).pow(2).mean(),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    inputs = [torch.randn(8, 16)] if rank == 0 else []
    schedule.step(*inputs, **({"target": torch.randn(8, 16)} if rank == size - 1 else {}))
    optimizer.step()
    optimizer.zero_grad()
"""

GRID = """
import sys, torch, torch.distributed as dist
dist.init_process_group("nccl")
rank, size, width, depth = dist.get_rank(), dist.get_world_size(), 4, 4
mine = {}
per_stage = size // depth
groups = [[*range(first, first + width)] for first in range(0, size, width)]
groups += [[*range(first, size, per_stage)] for first in range(per_stage)]
for ranks in groups:
    group = dist.new_group(ranks)
    if rank in ranks:
        mine[len(mine)] = group, ranks
(layer, _), (stages, column) = mine[0], mine[1]
stage = column.index(rank)
weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(10):
    values = torch.zeros(8)
    if stage:
        dist.recv(values, column[stage - 1])
    dist.all_reduce(values + weight.detach(), group=layer)
    if stage < depth - 1:
        dist.send(values, column[stage + 1])
    weight.grad = torch.ones(8)
    dist.all_reduce(weight.grad)
    optimizer.step()
"""

PLANNED = """
import torch, mcr_plus as mcr
from mcr_plus import expert
from mcr_plus.layout import plan as layouts
from mcr_plus.plans import run
from mcr_plus.plans.named import hybrid
comm = mcr.init()
rank, size = comm.rank, comm.size
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
optimizer = torch.optim.Adam(model.parameters())
batch, loss = (torch.ones(size, 16), torch.zeros(size, 16)), torch.nn.functional.mse_loss
profile = mcr.profile(model, batch, optimizer=optimizer, loss=loss, repeats=1)
plan = hybrid(profile, size, data=size // 2, stages=2, micro_batches=2)
prove = run.prove
run.prove = lambda plan: open("proved", "a").write(f"{rank} ") and prove(plan)
load = layouts.load
layouts.load = lambda *args: open("planned", "a").write(f"{rank} ") and load(*args)
parallel = mcr.parallelize(model, optimizer, plan, loss=loss)
rows, whole = mcr.Layout.sharded((size, 3), range(size), 0), mcr.Layout.replicated((size, 3), range(size))
for step in range(100):
    parallel.step(batch)
    assert mcr.redistribute(torch.ones(1, 3), rows, whole).shape == (size, 3)
    ids = torch.randint(2 * size, (24, 2), generator=torch.Generator().manual_seed(size * step + rank))
    routed = expert.dispatch(torch.ones(24, 4), ids, experts=2 * size)
    assert len(routed.rows) == sum(routed.counts) == (ids >= 0).sum()  # as many as this rank sends
    assert expert.combine(routed.rows, routed).shape == (24, 4)
    optimizer.step()
"""


def simulate(folder: Path, program: str, ranks: int, *options: str, cluster: str = CLUSTER) -> Answer:
    (folder / "cluster.yaml").write_text(cluster)
    (folder / "train.py").write_text(program)
    words = ["simulate", "-n", str(ranks), "--topology", "cluster.yaml", *options, "train.py"]
    return mcr_plus_process(*words, cwd=folder)


def document(folder: Path, program: str, ranks: int, *options: str, cluster: str = CLUSTER) -> dict[str, Any]:
    status, printed, said = simulate(folder, program, ranks, "--json", *options, cluster=cluster)
    assert status == 0, (printed, said)
    found: dict[str, Any] = json.loads(printed)
    assert not found["problems"]
    return found


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.long)])
def test_a_program_of_ddp(tmp_path: Path, backend: str) -> None:
    slow = CLUSTER.replace("10GB/s", "1MB/s")  # 96 KiB of gradients take longer than the computation
    found = document(tmp_path, DDP.replace("BACKEND", backend), 4, cluster=slow)
    (role,) = found["roles"]
    assert role["ranks"] == role["ran"] == [0, 1, 2, 3]
    # Six gradients of 16 KiB: at first in DDP's buckets, then in pairs; and the loss after all steps but one.
    assert role["operations"] > 4 * 3
    assert role["peak_bytes"] > 3 * 6 * 64 * 64 * 4  # parameters, gradients and buckets
    assert found["bound_ms"] <= found["step_ms"]
    assert found["compute_ms"] + found["exposed_ms"] == pytest.approx(found["step_ms"], rel=1e-6)
    assert set(found["links_ms"]) == {"inside"}
    assert any(
        "16 KiB at train.py:11" in name or "32 KiB at train.py:11" in name for name in found["exposed"]
    )
    assert found["exposed_ms"] > 50


def test_a_program_of_mcr_plus_in_which_ranks_differ(tmp_path: Path) -> None:
    found = document(tmp_path, WRAPPED, 4)
    even, odd = found["roles"]
    assert (even["ranks"], odd["ranks"]) == ([0, 2], [1, 3])
    assert even["operations"] - odd["operations"] == 3  # the fourth step ends the program


@pytest.mark.long
@pytest.mark.parametrize("program", [SHARDED, STAGES])
def test_shards_and_stages_of_torch(tmp_path: Path, program: str) -> None:
    found = document(tmp_path, program, 4)
    assert sum(len(each["ranks"]) for each in found["roles"]) == 4
    assert (len(found["roles"]) == 4) == (program == STAGES)


@pytest.mark.long
def test_few_of_many_ranks_run_and_stand_for_all(tmp_path: Path) -> None:
    folded, whole = document(tmp_path, GRID, 64), document(tmp_path, GRID, 64, "--all")
    ranks = [sorted(each["ranks"] for each in found["roles"]) for found in (folded, whole)]
    assert ranks[0] == ranks[1]
    assert sum(len(each["ran"]) for each in folded["roles"]) < 30
    assert sum(len(each["ran"]) for each in whole["roles"]) == 64


@pytest.mark.long
def test_stages_of_a_plan_are_folded(tmp_path: Path) -> None:
    found = document(tmp_path, PLANNED, 24, "--no-memory")
    assert [each["ranks"] for each in found["roles"]] == [[*range(12)], [*range(12, 24)]]
    assert sum(len(each["ran"]) for each in found["roles"]) < 20
    assert set(found["links_ms"]) == {"inside", "nic"}
    assert (tmp_path / "proved").read_text() == "0 "  # ranks that run later take the proof over
    assert {*(tmp_path / "planned").read_text().split()} == {"0"}  # and the loads of all ranks


@pytest.mark.long
def test_a_thousand_ranks(tmp_path: Path) -> None:
    found = document(tmp_path, DDP.replace("BACKEND", "gloo"), 1024)
    assert [len(each["ranks"]) for each in found["roles"]] == [1024]
    assert len(found["roles"][0]["ran"]) < 8
    assert set(found["links_ms"]) == {"inside", "nic"}


FAULTS = {
    "order of one group": (
        """
sizes = (4, 8) if dist.get_rank() != 2 else (8, 4)
for size in sizes:
    dist.all_reduce(torch.ones(size))
""",
        ["operation 0 of the ranks (0, 1, 2)", "on rank 0", "on rank 2", "train.py:6"],
    ),
    "order of two groups": (
        """
pair = dist.new_group([0, 1])
if dist.get_rank() < 2:
    for group in (pair, None) if dist.get_rank() == 0 else (None, pair):
        dist.all_reduce(torch.ones(4), group=group)
else:
    dist.all_reduce(torch.ones(4))
""",
        ["ranks wait for each other", "rank 0 waits for all_reduce", "rank 1 waits for", "train.py:7"],
    ),
    "a send without its recv": (
        """
if dist.get_rank() == 0:
    dist.isend(torch.ones(4), 2)
dist.barrier()
""",
        ["message 0 of the ranks (0, 2): send of 16 B", "on rank 0, nothing on rank 2", "train.py:5"],
    ),
    "order of redistributions": (
        """
import mcr_plus as mcr
rows, columns = (mcr.Layout.sharded((7, 7), range(3), dim) for dim in (0, 1))
moves = [(rows, columns), (columns, rows)]
for source, target in moves if dist.get_rank() != 2 else moves[::-1]:
    mcr.redistribute(torch.ones(source.local_shape(dist.get_rank())), source, target)
""",
        ["of the ranks (0, 1, 2): redistribution ", "on rank 0; redistribution ", "on rank 2", "train.py:8"],
    ),
    "groups": (
        """
dist.new_group([0, 1] if dist.get_rank() < 2 else [1, 2])
dist.barrier()
""",
        ["makes the group (0, 1) at train.py:4, rank 2 the group (1, 2) at train.py:4"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_program_are_named(tmp_path: Path, name: str) -> None:
    program, texts = FAULTS[name]
    start = 'import torch, torch.distributed as dist\ndist.init_process_group("gloo")'
    status, printed, _ = simulate(tmp_path, start + "\n" + program, 3, "--no-memory")
    assert status == 1
    assert "problem: " in printed
    assert all(text in printed for text in texts), printed
    assert "step:" not in printed


JOIN = 'import time, torch, torch.distributed as dist\ndist.init_process_group("gloo")\n'
BAD = {
    "fails": (JOIN + "1 // (dist.get_rank() - 1)", 3, CLUSTER, 1, "rank 1: the program has failed"),
    "exits": (JOIN + "raise SystemExit(3)", 1, CLUSTER, 1, "rank 0: the program has failed"),
    "silent": ("print(1)", 2, CLUSTER, 2, "no operation between ranks"),
    "hangs": (JOIN + "time.sleep(90)", 2, CLUSTER, 1, "train.py\", line 3"),
    "many": (JOIN + "dist.barrier()", 5, "nodes: 4", 2, "the topology has 4"),
    "unknown links": (JOIN + "dist.barrier()", 2, "nodes: 4", 1, "the topology has no nic link"),
    "other rank": (
        JOIN.replace('"gloo"', '"gloo", "tcp://x:1", rank=1, world_size=2'),
        2, CLUSTER, 1, "rank=1; the simulated job has 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(tmp_path: Path, name: str) -> None:
    program, ranks, cluster, status, text = BAD[name]
    found, printed, said = simulate(tmp_path, program, ranks, "--timeout", "5", cluster=cluster)
    assert found == status, (printed, said)
    assert text in said.replace("\n│ ", " "), said
    assert "runpy" not in said
