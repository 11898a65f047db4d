"""Train by inner and outer steps in an elastic loop, in which a rank dies and comes back.

    mcr-plus run -n 3 --min-ranks 2 --restart-failed 2 local_elastic.py FOLDER

Each rank writes its final state to FOLDER/end.RANK. See tests/jobs/local_sgd/test_local.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import mcr_plus as mcr

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("", "support"))  # of a program

from jobs.local_sgd.local_jobs import made, one_step, outer_values, values
from local_oracle import Quadratic

_STEPS = 200
_DIES = 9
_PAUSE_S = 0.1  # of a step while the rank is away
_LAST_PAUSE_S = 6.0


def main(folder: str) -> None:
    """Train until the last step, and at least for some after the rank has come back."""
    torch.set_num_threads(1)
    mcr.init({"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "30s"}}]})
    slot, is_first = int(os.environ["RANK"]), os.environ["MCR_RESTARTS"] == "0"
    local = made(Quadratic(slot), every=4, fragments=2, delay=1, mix=0.5)
    sizes = []
    for step in mcr.elastic(local.model, local.inner, local, steps=_STEPS):
        with step:
            if slot == 1 and is_first and step.number == _DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            # The rank is back before the last steps.
            pause = _PAUSE_S if step.number < _STEPS - 10 else _LAST_PAUSE_S
            time.sleep(pause if mcr.get_world_size() < 3 else 0)
            one_step(local)
            sizes.append(mcr.get_world_size())
    local.finish()
    found = {"steps": local.steps, "sizes": sizes, "values": values(local), "outer": outer_values(local)}
    Path(folder, f"end.{slot}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
