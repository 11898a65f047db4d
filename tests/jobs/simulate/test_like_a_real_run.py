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

Rows = list[list[object]]


def really(path: str) -> Rows:
    """On two ranks: what the program issues."""
    import torch.distributed as dist

    dist.init_process_group("mcr")
    with mcr.record() as recorded:
        runpy.run_path(path, run_name="__main__")
    return [[each.kind, each.bytes] for each in recorded.records]


def simulated(path: str) -> list[Rows]:
    """What each of two simulated ranks issues."""
    program = SimulatedProgram(Path(path), [], ("host", "host"), steps=0, memory=False)
    program.run([0, 1])
    records = [program.ran[rank].events for rank in range(2)]
    return [[[each.kind, each.own] for each in events if isinstance(each, IssuedCall)] for events in records]


@pytest.mark.long
def test_a_simulated_rank_issues_what_a_real_one_does(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    real = [result.value for result in run_ranks(really, 2, args=[str(path)])]
    (found,) = run_ranks(simulated, 1, args=[str(path)])
    # Messages that are in flight together end, and are recorded, in any order.
    collectives = [[row for row in rows if row[0] not in ("send", "recv")] for rows in real]
    assert len(collectives[0]) > 15
    for rank in range(2):
        mine = found.value[rank]
        assert [row for row in mine if row[0] not in ("send", "recv")] == collectives[rank]
        assert sorted(mine) == sorted(real[rank])
