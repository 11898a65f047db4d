"""Copies of operations for failover: the copied tensors and their memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mcr_plus.core.message import Message, Signature
from mcr_plus.reliability.failover import kept_operations as module
from mcr_plus.reliability.failover.attempt import FailoverPoll, _is_in_place
from mcr_plus.reliability.failover.kept_operations import KeptOperations
from mcr_plus.reliability.failover.rules import RankOperation
from mcr_plus.reliability.failover.state import WeakTensor

NUMEL = 300
NBYTES = 4 * NUMEL


def message(kind: str, given: torch.Tensor, result: torch.Tensor) -> Message:
    op = "SUM" if kind in ("all_reduce", "reduce_scatter") else None
    signature = Signature(
        cast("Any", kind), given.dtype, tuple(given.shape), given.nbytes, "world", 2,
        reduce_op=cast("Any", op), tag="", backend="gloo", async_op=True,
    )  # fmt: skip
    return Message(signature, (given,), (result,))


def completed(
    kept: KeptOperations, kind: str, given: torch.Tensor, result: torch.Tensor, number: int = 0
) -> FailoverPoll:
    """Return an operation that has run on this rank, and is kept."""
    issued = message(kind, given, result)
    binding = SimpleNamespace(digest=7, signature=issued.signature)
    attempt = FailoverPoll(cast("Any", SimpleNamespace(library="gloo")), cast("Any", binding), issued, number)
    attempt.keep_inputs(kept.copied)
    issued.inputs = issued.outputs = ()  # like the handle
    result.fill_(number)
    attempt.complete()
    attempt.note_state({})
    kept.add(attempt)
    return attempt


def what_is_left(kept: KeptOperations) -> list[tuple[bool, bool]]:
    """Return, for each operation, whether its inputs and its result are there."""
    records: list[RankOperation] = [each.record({}) for each in kept]
    return [(each.has_input, each.has_result) for each in records]


def test_an_operation_works_in_place_if_its_tensors_share_memory() -> None:
    memory = torch.zeros(4 * NUMEL)
    first, second = memory[:NUMEL], memory[2 * NUMEL : 3 * NUMEL]
    assert _is_in_place(message("all_gather", first, memory))
    assert _is_in_place(message("all_to_all", memory[:NUMEL], memory[NUMEL // 2 : NUMEL // 2 + NUMEL]))
    assert _is_in_place(message("all_reduce", first, first))
    assert _is_in_place(message("all_reduce", first, memory[:NUMEL]))  # another view of the same elements
    assert _is_in_place(message("all_reduce", first, second))  # whether views overlap is not looked at
    assert not _is_in_place(message("all_reduce", first, torch.zeros(NUMEL)))
    assert not _is_in_place(message("all_gather", first.clone(), memory))


def test_two_views_of_one_storage_are_copied_before_they_are_overwritten() -> None:
    kept, memory = KeptOperations(), torch.arange(4.0 * NUMEL)
    attempt = completed(kept, "all_to_all", memory[:NUMEL], memory[NUMEL // 2 : NUMEL // 2 + NUMEL], 1)
    assert attempt.kept_bytes == 3 * NBYTES
    ((has_input, _),) = what_is_left(kept)
    assert has_input
    (again,) = attempt.again(attempt.binding.signature).inputs
    assert torch.equal(again, torch.arange(float(NUMEL)))


def test_memory_of_the_program_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three tensors of a bucket take turns: together much more is kept than the limit."""
    monkeypatch.setattr(module, "_MOST_BYTES", NBYTES)
    kept = KeptOperations()
    tensors = [torch.full((NUMEL,), -1.0) for _ in range(21)]
    for number in range(20):
        completed(kept, "all_reduce", tensors[number], tensors[number + 1], number)
    # The result of each operation is the input of the next one, so all inputs are intact.
    assert what_is_left(kept) == [(False, True)] * 20
    assert [float(each._result[5]) for each in kept if each._result is not None] == [*range(20)]


def test_tensors_that_the_program_drops_are_kept_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 6 * NBYTES)
    kept = KeptOperations()
    for number in range(10):
        completed(kept, "all_to_all", torch.ones(NUMEL), torch.zeros(NUMEL), number)
    assert what_is_left(kept) == [(False, False)] * 7 + [(True, False)] * 3


def test_copies_are_kept_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 3 * NBYTES)
    kept, tensors = KeptOperations(), [torch.zeros(NUMEL) for _ in range(8)]
    for number, tensor in enumerate(tensors):
        completed(kept, "all_reduce", tensor, tensor, number)
        tensor.add_(1)  # the program continues
    # The last operation keeps its tensor alive twice, as input and output, and a copy.
    assert what_is_left(kept) == [(False, False)] * 7 + [(True, False)]
    again = [*kept][-1].again([*kept][-1].binding.signature)
    assert again.inputs[0] is again.outputs[0]
    assert torch.equal(again.inputs[0], torch.zeros(NUMEL))


def test_a_tensor_that_is_held_weakly_is_the_same_one() -> None:
    memory = torch.arange(100.0)
    tensor = memory[10:70].view(6, 10).t()
    weak, before = WeakTensor(tensor), tensor._version
    memory[0] = 5.0  # all views share the count of changes
    found, is_there = weak.found()
    assert is_there
    assert (found.data_ptr(), found.shape, found.stride()) == (tensor.data_ptr(), tensor.shape, (1, 10))
    assert found._version == tensor._version == before + 1
    del found, weak

    weak = WeakTensor(tensor)
    del tensor, memory
    found, is_there = weak.found()
    assert not is_there
    assert (found.shape, found.stride()) == ((10, 6), (1, 10))
