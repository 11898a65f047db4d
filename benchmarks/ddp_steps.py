"""Program of torch.distributed alone: steps of a transformer under DDP, for `bench_simulate.py`.

mcr-plus run -n 2 --via torch benchmarks/ddp_steps.py
mcr-plus simulate -n 2 --topology cluster.yaml benchmarks/ddp_steps.py WIDTH BACKEND
"""

from __future__ import annotations

import json
import sys
from statistics import mean, median
from time import perf_counter, process_time
from typing import Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS: Final = 20
WARM: Final = 5
WIDTH: Final = int(sys.argv[1]) if len(sys.argv) > 1 else 256
BACKEND: Final = sys.argv[2] if len(sys.argv) > 2 else "gloo"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = DistributedDataParallel(torch.nn.TransformerEncoder(layer, 4), bucket_cap_mb=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times, processor = [], []
    for _ in range(STEPS):
        begin, used = perf_counter(), process_time()
        optimizer.zero_grad()
        model(torch.randn(4, 64, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        times.append(perf_counter() - begin)
        processor.append(process_time() - used)
    if dist.get_rank() == 0:
        print(
            json.dumps({"step_ms": 1e3 * median(times[WARM:]), "processor_ms": 1e3 * mean(processor[WARM:])})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
