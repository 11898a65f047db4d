"""Trainer of `test_vllm.py`: pushes weights as it is told, by lines of a named pipe, LINES.

    mcr-plus run -n RANKS vllm_trainer.py MODEL INVITATION DEGREE LINES

DEGREE: tensor parallel degree that is offered; 0 offers whole tensors alone. With two ranks, each of them has
half of the rows of each tensor. Lines: `push SEED FOLDER` changes about 1 % of the values, and saves the
checkpoint there; `end` closes the synchronisation.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM

import mcr_plus as mcr
from mcr_plus.engines.tensor_parallel import tensor_parallel_offers


def changed(weights: dict[str, torch.Tensor], seed: int) -> None:
    """Change about 1 % of the values, the same ones on all ranks."""
    random = torch.Generator().manual_seed(seed)
    for each in weights.values():
        picked = torch.rand(each.shape, generator=random) < 0.01
        each.add_((picked * torch.randn(each.shape, generator=random)).to(each.dtype), alpha=0.1)


def main(folder: str, invitation: str, degree: int, lines: str) -> None:
    """Push until told to end."""
    with mcr.init() as comm, open(lines if comm.rank == 0 else os.devnull) as told:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").requires_grad_(requires_grad=False)
        weights = dict(model.named_parameters())
        layouts = {
            name: mcr.Layout.sharded(tuple(each.shape), comm.ranks, 0) for name, each in weights.items()
        }
        parts = {name: each.chunk(comm.size)[comm.rank] for name, each in weights.items()}
        offers = tensor_parallel_offers(model, degree) if degree else None
        sync = mcr.sync(parts, src=comm.ranks, layout=layouts, invite=invitation, offers=offers)
        if comm.rank == 0:
            print(json.dumps({"ready": True}), flush=True)
        while True:
            line = comm.broadcast_object(told.readline().split(), 0)
            if line == ["end"]:
                break
            changed(weights, int(line[1]))
            version = sync.push()
            if comm.rank == 0:
                model.save_pretrained(line[2])
                print(json.dumps({"version": version}), flush=True)
        sync.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
