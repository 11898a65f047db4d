#!/usr/bin/env bash
# DistributedDataParallel: writing out the default bucket_cap_mb=25 changes the buckets; other options change their order.
#
# A good guess: `DDP(model)` and `DDP(model, bucket_cap_mb=25)` are the same, the documented default being 25, and
#   buckets are filled from the last layer to the first from the second step on, whatever the other options.
# What happens (torch 2.13.0, 12 layers of 1 MiB; sizes in MiB of the buckets as they become ready, steps 1, 2, 3):
#   DDP(model)                           [12]    [1, 11] [1, 11]    a first bucket of 1 MiB, once they are rebuilt
#   DDP(model, bucket_cap_mb=25)         [12]    [12]    [12]       no small first bucket
#   DDP(model, static_graph=True)        [12]    [12]    [1, 11]    rebuilt one step later
#   DDP(model, find_unused_parameters)   [11, 1] [11, 1] [11, 1]    never rebuilt: the small bucket comes last
#   The first step sends one bucket of all gradients at its end, so its time says nothing about the others.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat >"$work/buckets.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sent = []


def hook(state, bucket):
    sent.append(bucket.buffer().nbytes >> 20)
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def buckets(**options):
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(12)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), **options)
    model.register_comm_hook(None, hook)
    steps = []
    for _ in range(3):
        sent.clear()
        model(torch.ones(1, 512)).sum().backward()
        steps.append(list(sent))
    print(options, steps)
    return steps


print("torch", torch.__version__)
same = [
    buckets() == [[12], [1, 11], [1, 11]],
    buckets(bucket_cap_mb=25) == [[12]] * 3,
    buckets(static_graph=True) == [[12], [12], [1, 11]],
    buckets(find_unused_parameters=True) == [[11, 1]] * 3,
]
dist.destroy_process_group()
sys.exit(not all(same))
PY
"$work/venv/bin/python" "$work/buckets.py" 2>"$work/log" || { cat "$work/log"; exit 1; }
