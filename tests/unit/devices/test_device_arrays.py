"""Arrays of other libraries on a device: access to their memory, and refused arrays.

The order of their streams is tested in `test_races.py`, in the settings named `arrays`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from unit.devices.device_programs import COUNT, given, total
from unit.devices.device_ranks import Job
from unit.devices.device_settings import SETTINGS

from mcr_plus.communicator.arrays import stated_stream
from mcr_plus.communicator.tensors import ArrayOnDevice, as_tensor, is_on_device, tensor_on
from mcr_plus.compression import policy
from mcr_plus.compression.codec import make
from mcr_plus.compression.options import CompressOptions
from mcr_plus.core.message import Signature
from mcr_plus.errors import InvalidArgument


class Interface:
    """An array with `__cuda_array_interface__` alone, such as numba's."""

    def __init__(self, memory: torch.Tensor, **entries: Any) -> None:
        self.memory = memory
        self.entries = {"data": (memory.data_ptr(), False), "version": 3} | entries

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.entries


class Managed(Interface):
    """An array with a capsule that torch refuses, such as CuPy's managed memory."""

    def __dlpack__(self, *, stream: int) -> Any:
        raise BufferError(f"a type of memory that torch has not, {stream}")


class OfType:
    """An array with DLPack alone."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, *, stream: int) -> Any:
        raise RuntimeError(f"stream {stream}")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Memory on "a device": where `torch.as_tensor` takes an array."""
    own = torch.zeros(3)

    def taken(array: Interface, device: str) -> torch.Tensor:
        assert device == "cuda"
        return array.memory

    monkeypatch.setattr(torch, "as_tensor", taken)
    return own


@pytest.mark.parametrize("kind", [Interface, Managed])
def test_memory_by_the_interface(kind: type[Interface], memory: torch.Tensor) -> None:
    assert tensor_on(kind(memory)) is memory
    with pytest.raises(InvalidArgument, match="another device than the current one"):
        tensor_on(kind(memory, data=(memory.data_ptr() + 4, False)))


@pytest.mark.parametrize("entries", [{"data": (1, True)}, {"mask": object()}])
def test_unwritable_paths_are_refused(entries: dict[str, Any], memory: torch.Tensor) -> None:
    with pytest.raises(InvalidArgument, match="read-only or has a mask"):
        tensor_on(Interface(memory, **entries))


def test_the_reason_of_a_refusal_is_told() -> None:
    with pytest.raises(InvalidArgument, match="OfType: the array cannot be shared with torch: stream -1"):
        tensor_on(OfType(2))


@pytest.mark.parametrize(
    ("entries", "stream"), [({}, None), ({"stream": None}, None), ({"stream": 1}, 1), ({"stream": 94}, 94)]
)
def test_streams(entries: dict[str, Any], stream: int | None, memory: torch.Tensor) -> None:
    assert stated_stream(Interface(memory, **entries)) == stream
    assert stated_stream(OfType(2)) is None


@pytest.mark.parametrize("stream", [0, -1, True, "one"])
def test_streams_that_the_interface_excludes_are_refused(stream: Any, memory: torch.Tensor) -> None:
    with pytest.raises(InvalidArgument, match=f"stream {stream!r}; expected None, or the handle"):
        stated_stream(Interface(memory, stream=stream))


def test_arrays_on_a_device_are_recognised(memory: torch.Tensor) -> None:
    assert is_on_device(Interface(memory))
    # CPU, CUDA, pinned host memory, ROCm, pinned by ROCm, CUDA's managed memory, an FPGA
    assert [is_on_device(OfType(kind)) for kind in (1, 2, 3, 10, 11, 13, 14)] == [
        False, True, False, True, False, True, False,
    ]  # fmt: skip
    assert not any(map(is_on_device, (memory, memory.numpy(), 3, "SUM", None)))
    with pytest.raises(ArrayOnDevice, match=r"x: Interface on a device; this call takes tensors there"):
        as_tensor(Interface(memory), "x")


def test_an_array_without_one_device_is_refused() -> None:
    class Sharded(OfType):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise BufferError("on 2 devices")

    with pytest.raises(InvalidArgument, match="x: Sharded cannot be shared through DLPack: on 2 devices"):
        as_tensor(Sharded(1), "x")


@pytest.mark.parametrize(
    ("codec", "needs"),
    [("int8_block", True), ("sign1", True), ("int_shared", True), ("topk", False), ("bf16", False)],
)
def test_codecs_without_triton_say_how_to_get_it(
    codec: str, needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_has_triton", lambda: False)
    signature = Signature("all_reduce", torch.float32, (4096,), 16384, "world", 2, "cuda", "SUM")
    options = CompressOptions(codec=codec)
    reason = policy.refusal(make({"codec": codec}), options, signature)
    assert reason is None or "mcr_plus[gpu]" in reason
    assert (reason is not None) == needs
    assert policy.refusal(make({"codec": codec}), options, signature.replace(device="cpu")) is None


# -- handles --------------------------------------------------------------------------------------


def on_two_ranks(setting: str, program: Callable[[Any], Any]) -> list[Any]:
    return Job(2, SETTINGS[setting].config).run(program)


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_asynchronous_operations_on_arrays_are_fused(library: str) -> None:
    def program(rank: Any) -> tuple[list[int], list[list[float]]]:
        cupy = rank.library()
        arrays = [cupy.array(given(rank.rank, salt)) for salt in range(4)]
        works = [rank.comm.all_reduce(x, async_op=True) for x in arrays]
        for work in works:
            work.wait()
        return [work.info.fused for work in works], [x.read() for x in arrays]

    sums = [total(2, salt) for salt in range(4)]
    assert on_two_ranks(f"{library}, fused", program) == [([4] * 4, sums)] * 2


def test_arrays_are_let_go_once_an_operation_is_waited_for() -> None:
    def program(rank: Any) -> list[bool]:
        x, y = (rank.library().array(given(rank.rank)) for _ in range(2))
        memory = [weakref.ref(each.tensor.block) for each in (x, y)]
        rank.comm.all_reduce(x)
        work = rank.comm.all_reduce(y, async_op=True)
        work.wait()
        del x, y, work
        for each in list(rank.engine.in_flight):
            rank.poll(each)
        return [each() is None for each in memory]

    assert on_two_ranks("nccl, arrays", program) == [[True, True]] * 2


def test_a_message_does_not_wait_for_what_other_streams_follow() -> None:
    """Rank 1 sends only once it has received: rank 0 receives under one stream, and sends under another."""

    def program(rank: Any) -> list[float]:
        cupy, comm, peer = rank.library(), rank.comm, 1 - rank.rank
        x, y = cupy.array(given(rank.rank)), cupy.array([0.0] * COUNT)
        for work in [comm.isend(x, peer), comm.irecv(y, peer)]:  # after which NCCL waits for no rank
            work.wait()
        one, other = rank.stream(), rank.stream()
        cupy.go_on_with(one)
        first = cupy.array([0.0] * COUNT)
        if rank.rank == 1:
            comm.irecv(first, peer).wait()
            first.read()
            comm.isend(cupy.array(given(1, 1)), peer).wait()
        else:
            comm.irecv(first, peer).wait()
            with cupy.under(other):
                comm.isend(cupy.array(given(0, 1)), peer).wait()
        received: list[float] = first.read()
        return received

    assert on_two_ranks("nccl, arrays", program) == [given(1, 1), given(0, 1)]


def test_a_call_begins_no_deadline_of_earlier_operations() -> None:
    """Only a poll or a wait begins a deadline: a receive may be there long before its message."""

    def program(rank: Any) -> list[bool]:
        cupy = rank.library()
        received, sent = (cupy.array(given(rank.rank, salt)) for salt in (1, 2))
        peer = 1 - rank.rank
        works = [rank.comm.irecv(received, peer)]
        early = list(rank.engine.in_flight)
        for _ in range(3):
            x = cupy.array(given(rank.rank))
            rank.comm.all_reduce(x)
        begun = [work.polled_since is not None for work in early]
        works.append(rank.comm.isend(sent, peer))
        for work in works:
            work.wait()
        assert received.read() == given(peer, 2)
        return begun

    assert on_two_ranks("gloo, arrays", program) == [[False]] * 2
