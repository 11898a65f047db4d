"""Programs of ranks with tensors on torch's simulated accelerator; `test_openreg` starts them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from jobs.devices import gpu_jobs, openreg
from jobs.devices.gpu_jobs import TIMEOUT, Part
from reference import Failures, difference
from unit.devices.delta_programs import DELTA_PROGRAMS
from unit.devices.device_programs import PROGRAMS, bare, failing, four, libraries
from unit.devices.device_settings import SETTINGS, Setting, problems_of, programs_of

import mcr_plus as mcr
from mcr_plus.backends.nccl.channel import support
from mcr_plus.core.message import Signature
from mcr_plus.errors import Unsupported

_GIVE: Final = {**PROGRAMS, **DELTA_PROGRAMS}
ELSEWHERE: Final = (bare, failing, four, libraries)
"""Programs that need NCCL, or a library that fails."""


def reports(library: str, launch: str) -> None:
    """See `gpu_jobs.reports`."""
    gpu_jobs.run_parts(library, PARTS[launch])


class Rank:
    """A rank as programs of simulated devices see it; see `device_ranks.Rank`."""

    def __init__(self, comm: mcr.Communicator) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.engine: Any = comm._runtime.engine

    def stream(self) -> torch.Stream:
        return torch.Stream("openreg")

    def under(self, stream: torch.Stream) -> AbstractContextManager[None]:
        return openreg.under(stream)

    def step(self) -> None:
        pass

    def poll(self, work: Any) -> None:
        while not work.is_completed():
            pass

    def tensor(self, values: Any) -> torch.Tensor:
        return openreg.late(values)

    def read(self, tensor: torch.Tensor) -> list[float]:
        values: list[float] = tensor.cpu().tolist()
        return values


def _programs(setting: Setting, backends: Sequence[str], failures: Failures) -> None:
    """Run the programs of simulated devices on another library, in one of their settings."""
    pipeline = setting.config["pipeline"]
    config = {"version": 1, "backends": gpu_jobs.with_host(backends), "pipeline": pipeline}
    with mcr.init(config, timeout=TIMEOUT) as comm:
        for program in programs_of(setting):
            if program in ELSEWHERE:
                continue
            read = program(Rank(comm), backend=backends[0], **setting.options)
            wanted = _GIVE[program](comm.rank, comm.size)
            problems = problems_of(setting, lambda *_, wanted=wanted: wanted, [read])
            failures.check(f"{program.__name__}, {setting.name}", "; ".join(problems) or None)


def _held(backends: Sequence[str], failures: Failures) -> None:
    """Test that an operation with late values waits, and one of another stream and library overtakes it."""
    count, names = 1000, gpu_jobs.with_host(backends)
    with mcr.init(backends=names, timeout=TIMEOUT) as comm:
        side, wanted = torch.Stream("openreg"), sum(range(1, comm.size + 1))
        for turn in range(6):
            here = torch.accelerator.current_stream()
            values = torch.full((count,), comm.rank + 1.0 + turn).pin_memory()
            x, other = torch.zeros(count, device="openreg"), torch.ones(count, device="openreg")
            result = torch.zeros(count, device="openreg")
            with openreg.held(here):
                x.copy_(values, non_blocking=True)
                work = comm.all_reduce(x, async_op=True, backend=backends[0])
                with openreg.under(side):
                    comm.all_reduce(other, backend=next(name for name in names if name != backends[0]))
                    failures.check("on another stream", difference(other, np.full(count, float(comm.size))))
                failures.expect("nothing has begun", work is not None and not work.is_completed())
            assert work is not None
            with openreg.under(side):
                work.wait()
                result.copy_(x)
            side.synchronize()
            failures.check("late values", difference(result, np.full(count, wanted + turn * comm.size)))
            failures.expect("it is complete", work.is_completed())


def _refused(backends: Sequence[str], failures: Failures) -> None:
    """Test that features of CUDA alone are refused by name."""
    with mcr.init(backends=gpu_jobs.with_host(backends), timeout=TIMEOUT) as comm:
        x = torch.ones(3, device="openreg")
        call, known = partial(comm.all_reduce, x.to("meta")), "device meta; known: cpu, cuda, openreg"
        failures.raises("a device that torch does not compute on", call, Unsupported, known)
    signature = Signature("all_reduce", x.dtype, (3,), 12, "world", 2, "openreg", "SUM")
    failures.expect("NCCL's reason", support(signature).how.startswith("openreg tensors; nccl takes CUDA"))


PARTS: Final[dict[str, dict[str, Part]]] = {
    "operations": gpu_jobs.PARTS["operations"],
    "codecs": {"codecs": gpu_jobs.PARTS["codecs"]["codecs"]},
    "programs": {name: part for name, part in gpu_jobs.PARTS["programs"].items() if name != "cupy"},
    "layers": {name: part for name, part in gpu_jobs.PARTS["layers"].items() if name != "FSDP"},
    "streams": {
        "held": _held,
        "refused": _refused,
        **{
            name.partition(", ")[2]: partial(_programs, setting)
            for name, setting in SETTINGS.items()
            if setting.library == "gloo" and not setting.nodes and "arrays" not in name
        },
    },
}
"""What is checked, by the launch in which it is checked and its name."""
