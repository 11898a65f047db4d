"""Arrays of other libraries on a device: how their memory is taken, and what is refused.

The order of their streams is tested in `test_races.py`, in the settings named `arrays`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
    """One whose capsule torch refuses, such as CuPy's managed memory."""

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
def test_what_cannot_be_written_to_is_refused(entries: dict[str, Any], memory: torch.Tensor) -> None:
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


def test_what_is_on_a_device(memory: torch.Tensor) -> None:
    assert is_on_device(Interface(memory))
    # CPU, CUDA, pinned host memory, ROCm, pinned by ROCm, CUDA's managed memory, an FPGA
    assert [is_on_device(OfType(kind)) for kind in (1, 2, 3, 10, 11, 13, 14)] == [
        False, True, False, True, False, True, False,
    ]  # fmt: skip
    assert not any(map(is_on_device, (memory, memory.numpy(), 3, "SUM", None)))
    with pytest.raises(ArrayOnDevice, match=r"x: Interface on a device; this call takes tensors there"):
        as_tensor(Interface(memory), "x")


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
