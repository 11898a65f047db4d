"""Programs of simulated devices on a GPU: programs with CuPy's arrays, and programs with the codec delta."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from reference import Failures
from unit.devices.array_programs import ARRAY_PROGRAMS
from unit.devices.delta_programs import DELTA_PROGRAMS

import mcr_plus as mcr

LATE: Final = 200_000  # cycles of a GPU for which values are late, about a tenth of a millisecond


def arrays_in_order(comm: mcr.Communicator, backend: str, failures: Failures) -> None:
    """Run all programs on a library, and compare their results."""
    for program, give in ARRAY_PROGRAMS.items():
        read = program(CupyRank(comm), backend=backend)
        wanted = give(comm.rank, comm.size)
        failures.expect(f"CuPy, {program.__name__} on {backend}", read == wanted, (read, wanted))
    __import__("cupy").cuda.Stream.null.use()


def delta_in_order(comm: mcr.Communicator, backend: str, failures: Failures) -> None:
    """Likewise with the codec delta; messages by gloo."""
    for program, give in DELTA_PROGRAMS.items():
        read = program(GpuRank(comm), compress="delta", backend=backend)
        wanted = give(comm.rank, comm.size)
        failures.expect(f"delta, {program.__name__} on {backend}", read == wanted, (read, wanted))


class GpuRank:
    """A rank as programs see it; see `device_ranks.Rank`."""

    def __init__(self, comm: mcr.Communicator) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.engine: Any = comm._runtime.engine

    def stream(self) -> Any:
        return torch.cuda.Stream()

    def under(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def step(self) -> None:
        pass

    def poll(self, work: Any) -> None:
        while not work.is_completed():
            pass

    def tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device="cuda")

    def read(self, tensor: torch.Tensor) -> list[float]:
        values: list[float] = tensor.tolist()
        return values


class CupyRank(GpuRank):
    """A rank with CuPy's streams."""

    def __init__(self, comm: mcr.Communicator) -> None:
        super().__init__(comm)
        self._cupy: Any = __import__("cupy")

    def library(self, *, states: bool = True) -> CupyLibrary:
        return CupyLibrary(self._cupy, states)

    def stream(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True)

    def under(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr))


class CupyLibrary:
    """CuPy; values come late on its current stream."""

    def __init__(self, cupy: Any, states: bool) -> None:
        self.cupy, self.states = cupy, states
        cupy.cuda.Stream(non_blocking=True).use()

    @contextlib.contextmanager
    def under(self, stream: Any) -> Iterator[None]:
        with stream:
            yield

    def go_on_with(self, stream: Any) -> None:
        stream.wait_event(self.cupy.cuda.get_current_stream().record())
        stream.use()

    def array(self, values: Any) -> CupyArray:
        made = CupyArray(self, self.cupy.zeros(len(values), dtype=self.cupy.float32))
        made.write(values)
        return made


class CupyArray:
    """Return an array of CuPy that states its stream, or has DLPack alone."""

    def __init__(self, library: CupyLibrary, array: Any) -> None:
        self.library, self.array = library, array

    def __getattr__(self, name: str) -> Any:
        if name == "__cuda_array_interface__" and self.library.states:
            return self.array.__cuda_array_interface__
        raise AttributeError(name)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def write(self, values: Any) -> None:
        given = self.library.cupy.asarray(np.asarray(values, dtype=np.float32))
        late = torch.cuda.ExternalStream(self.library.cupy.cuda.get_current_stream().ptr)
        with torch.cuda.stream(late):
            torch.cuda._sleep(LATE)
        self.array[...] = given.reshape(self.array.shape)

    def read(self) -> list[float]:
        values: list[float] = self.library.cupy.asnumpy(self.array).reshape(-1).tolist()
        return values

    def view(self, *shape: int) -> CupyArray:
        return CupyArray(self.library, self.array.reshape(shape))

    @property
    def T(self) -> CupyArray:  # noqa: N802 - as the library's
        return CupyArray(self.library, self.array.T)
