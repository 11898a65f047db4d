"""A simulated rank issues the operations that the same program issues on real ranks, in the same order."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.simulate.records import IssuedCall
from mcr_plus.simulate.running import SimulatedProgram

PROGRAM = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
if not dist.is_initialized():
    dist.init_process_group("mcr")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.03)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pair = dist.new_group([1, 0])
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 64)).pow(2).mean().backward()
    optimizer.step()
    rows = [torch.zeros(5) for _ in range(2)]
    dist.all_gather(rows, torch.ones(5), group=pair)
    told = [{"step": step, "from": rank}]
    dist.broadcast_object_list(told, 0)
    assert told == [{"step": step, "from": 0}]
    work = dist.isend(torch.ones(7), 1 - rank, tag=step)
    dist.recv(torch.zeros(7), 1 - rank, tag=step)
    work.wait()
"""

LAYOUTS = """
import torch, mcr_plus as mcr
from mcr_plus.autograd import halo_exchange
from mcr_plus.plans.named import hybrid
if not mcr.is_initialized():
    mcr.init()
rank = mcr.get_rank()
rows, some = (mcr.Layout.sharded((13, 6), ranks, 0) for ranks in (range(4), (3, 1)))
whole, columns = mcr.Layout.replicated((13, 6), range(4)), mcr.Layout.sharded((13, 6), (2, 1, 0, 3), 1)
addends, sums = (mcr.Layout.mesh((8, 6), [[0, 2], [3, 1]], [each, "S1"]) for each in ("P", "R"))
state = mcr.redistribution({"a": (rows, some), "b": (rows, columns)}, memory="8KiB")
x = torch.full(rows.local_shape(rank), float(rank))
for _ in range(2):
    assert mcr.redistribute(x, rows, whole).shape == (13, 6)
    parts = state({"a": x, "b": x})
    mcr.redistribute(parts["a"], some, whole)
    mcr.redistribute(torch.ones(addends.local_shape(rank)), addends, sums)
    assert len(halo_exchange(x, rows, (1, 0), (2, 0))) > len(x)
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
optimizer = torch.optim.Adam(model.parameters())
batch, loss = (torch.ones(6, 4), torch.zeros(6, 4)), torch.nn.functional.mse_loss
profile = mcr.profile(model, batch, optimizer=optimizer, loss=loss, repeats=1)
times = {"forward": 1.0, "backward": 2.0, "forward_fixed": 0.0, "backward_fixed": 0.0}
blocks = [block.model_copy(update=times) for block in profile.blocks]
stages = [range(2), range(2, len(blocks))]
plan = hybrid(profile.model_copy(update={"blocks": blocks}), 4, data=2, stages=stages, micro_batches=3)
parallel = mcr.parallelize(model, optimizer, plan, loss=loss)
for _ in range(2):
    parallel.step(batch)
    optimizer.step()
"""
PROGRAMS = {"torch": (2, PROGRAM), "layouts": (4, LAYOUTS)}

Rows = list[list[object]]


def really(path: str) -> Rows:
    """On real ranks: what the program issues."""
    import torch.distributed as dist

    dist.init_process_group("mcr")
    with mcr.record() as recorded:
        runpy.run_path(path, run_name="__main__")
    apart = ("new_group", "split")  # simulated ranks know what others pass
    return [[each.kind, each.bytes] for each in recorded.records if each.tag not in apart]


def simulated(path: str, ranks: int) -> list[Rows]:
    """What each simulated rank issues."""
    program = SimulatedProgram(Path(path), [], ("host",) * ranks, steps=0, memory=False)
    program.run(range(ranks))
    records = [program.ran[rank].events for rank in range(ranks)]
    return [[[each.kind, each.own] for each in events if isinstance(each, IssuedCall)] for events in records]


@pytest.mark.long
@pytest.mark.parametrize("name", ["torch", "layouts"])
def test_a_simulated_rank_issues_what_a_real_one_does(tmp_path: Path, name: str) -> None:
    ranks, program = PROGRAMS[name]
    path = tmp_path / "train.py"
    path.write_text(program)
    real = [result.value for result in run_ranks(really, ranks, args=[str(path)])]
    (found,) = run_ranks(simulated, 1, args=[str(path), ranks])
    # Messages that are in flight together end, and are recorded, in any order.
    collectives = [[row for row in rows if row[0] not in ("send", "recv")] for rows in real]
    assert len(collectives[0]) > 15
    for rank in range(ranks):
        mine = found.value[rank]
        assert [row for row in mine if row[0] not in ("send", "recv")] == collectives[rank]
        assert sorted(mine) == sorted(real[rank])
