"""The state that a newcomer gets during training: one source and one receiver in this process."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from mcr_plus.core.c10d import HashStore
from mcr_plus.core.job_store import JobStore
from mcr_plus.elasticity import state_stream
from mcr_plus.elasticity.state_receiver import StateReceiver
from mcr_plus.elasticity.state_source import StateSource
from mcr_plus.membership.request import TRIES, JoinRequest
from mcr_plus.rendezvous.stream import StreamConnection

WITHIN_S = 20.0
Made = tuple[torch.nn.Module, torch.optim.Optimizer]


def made(
    seed: int, *, frozen: bool = False, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
) -> Made:
    """Return a model with buffers and an odd number of values, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    if frozen:
        model[0].requires_grad_(requires_grad=False)
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, optimizer(trained, lr=0.05)  # type: ignore[call-arg]


def train(of: Made, steps: int, at: int = 0) -> None:
    model, optimizer = of
    for step in range(at, at + steps):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        optimizer.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()


def bits(of: Made, *, buffers: bool = False) -> list[torch.Tensor]:
    """Return all tensors of the state."""
    model, optimizer = of
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [*model.parameters(), *(model.buffers() if buffers else ()), *states]


def equal(one: Made, other: Made, *, buffers: bool = False) -> bool:
    pairs = list(zip(bits(one, buffers=buffers), bits(other, buffers=buffers), strict=True))
    return all(torch.equal(first, second) for first, second in pairs)


def until(done: Callable[[], bool], receiver: StateReceiver, request: JoinRequest) -> None:
    ends = time.monotonic() + WITHIN_S
    while not done():
        receiver.poll(request)
        assert time.monotonic() < ends
        time.sleep(0.001)


class Pair:
    """A source of a model that has made two steps, and the receiver of a model that has made none."""

    def __init__(
        self, *, frozen: bool = False, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
    ) -> None:
        self._others = set(threading.enumerate())
        self.old, self.new = (
            made(1, frozen=frozen, optimizer=optimizer),
            made(2, frozen=frozen, optimizer=optimizer),
        )
        train(self.old, 2)
        self.request = JoinRequest(JobStore(HashStore()), 3)
        self.receiver = StateReceiver(*self.new)
        self.source = self.offer(0)

    def offer(self, attempt: int) -> StateSource:
        source = StateSource(*self.old, b"", f"{self.request.key}/{attempt}", "127.0.0.1")
        self.request.offer(attempt, source.place)
        return source

    def poll_until(self, done: Callable[[], bool]) -> None:
        until(done, self.receiver, self.request)

    def close(self) -> None:
        self.source.close()
        self.receiver.close()
        assert not [
            each for each in set(threading.enumerate()) - self._others if each.name.startswith("mcr_plus-")
        ]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW])
def test_a_newcomer_makes_the_steps_of_the_others(
    frozen: bool, optimizer: type[torch.optim.Optimizer]
) -> None:
    pair = Pair(frozen=frozen, optimizer=optimizer)
    train(pair.old, 1, 2)  # before it has connected
    pair.poll_until(lambda: pair.request.is_ready)
    train(pair.old, 3, 3)
    pair.source.finish()
    pair.receiver.finish()
    assert equal(pair.old, pair.new)
    assert [each.grad for each in pair.new[0].parameters()] == [None] * 6
    assert pair.receiver.has_parts
    pair.close()


def test_hooks_of_the_program_do_not_run_for_repeated_steps() -> None:
    pair, calls = Pair(), list[str]()
    pair.new[1].register_step_pre_hook(lambda *_: calls.append("pre"))
    pair.new[1].register_step_post_hook(lambda *_: calls.append("post"))
    pair.poll_until(lambda: pair.request.is_ready)
    train(pair.old, 1, 2)
    pair.source.finish()
    pair.receiver.finish()
    assert equal(pair.old, pair.new)
    assert not calls
    train(pair.new, 1)
    assert calls == ["pre", "post"]
    pair.close()


def test_a_source_waits_for_steps_that_take_long() -> None:
    pair = Pair()
    pair.poll_until(lambda: pair.request.is_ready)
    time.sleep(0.8)  # the source looks four times a second whether the newcomer is there
    assert not pair.source.is_over
    train(pair.old, 1, 2)
    pair.source.finish()
    pair.receiver.finish()
    assert equal(pair.old, pair.new)
    pair.close()


def test_steps_that_cannot_be_repeated_are_given_up() -> None:
    pair = Pair()

    def closure() -> torch.Tensor:
        return torch.zeros(())

    pair.old[1].step(closure)  # type: ignore[arg-type]
    pair.poll_until(lambda: pair.request.is_ready)
    assert not pair.receiver.has_parts or not equal(pair.old, pair.new)
    pair.close()


def test_steps_that_come_too_fast_are_given_up_and_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, send = threading.Event(), threading.Event(), state_stream.send

    def slow(link: StreamConnection, message: state_stream.StateMessage) -> None:
        begun.set()
        goes_on.wait(WITHIN_S)
        send(link, message)

    monkeypatch.setattr(state_stream, "send", slow)
    pair = Pair()
    pair.poll_until(begun.is_set)
    kinds: list[list[int]] = []
    for step in range(2, 12):
        train(pair.old, 1, step)
        kinds.append([each.kind for each in pair.source._waiting])
    assert [state_stream.GIVEN_UP] in kinds
    assert max(map(len, kinds)) <= 5
    goes_on.set()
    pair.poll_until(lambda: pair.request.is_ready)
    assert pair.receiver.has_parts
    assert not equal(pair.old, pair.new)
    pair.close()


def test_a_copy_waiting_for_a_frozen_source_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, send = threading.Event(), threading.Event(), state_stream.send

    def slow(link: StreamConnection, message: state_stream.StateMessage) -> None:
        begun.set()
        goes_on.wait(WITHIN_S)
        send(link, message)

    monkeypatch.setattr(state_stream, "send", slow)
    pair = Pair(frozen=True)
    pair.poll_until(begun.is_set)
    for step in range(2, 22):
        train(pair.old, 1, step)
        assert len(pair.source._waiting) <= 6
    goes_on.set()
    pair.poll_until(lambda: pair.request.is_ready)
    pair.source.finish()
    pair.receiver.finish()
    assert equal(pair.old, pair.new)
    pair.close()


def test_a_source_that_is_lost_is_replaced() -> None:
    pair = Pair()
    pair.source.close()
    pair.poll_until(lambda: pair.request.attempt() == 1)
    assert not pair.request.is_ready
    pair.source = pair.offer(1)
    pair.poll_until(lambda: pair.request.is_ready)
    pair.source.finish()
    pair.receiver.finish()
    assert equal(pair.old, pair.new, buffers=True)
    pair.close()


def test_a_newcomer_that_nobody_can_give_the_state_is_ready_without_it() -> None:
    pair = Pair()
    pair.source.close()
    pair.request.offer(1, None)
    pair.poll_until(lambda: pair.request.attempt() == 2)
    pair.source = pair.offer(2)
    pair.source.close()
    pair.poll_until(lambda: pair.request.is_ready)
    assert pair.request.attempt() == TRIES
    assert not pair.receiver.has_parts
    pair.receiver.finish()
    pair.close()


def test_a_source_that_is_lost_at_the_end_holds_nobody_up() -> None:
    pair = Pair()
    pair.poll_until(lambda: pair.request.is_ready)
    pair.source.close()
    pair.receiver.finish()
    assert pair.receiver.has_parts
    pair.close()


def test_a_newcomer_that_dies_frees_the_copy() -> None:
    pair = Pair()
    copy = weakref.ref(pair.source._waiting[-1].tensors[0])
    pair.poll_until(lambda: pair.receiver.has_parts)
    pair.receiver.close()
    ends = time.monotonic() + WITHIN_S
    while not pair.source.is_over and time.monotonic() < ends:
        train(pair.old, 1)
        time.sleep(0.02)
    assert pair.source.is_over
    assert not pair.source._waiting
    gc.collect()
    assert copy() is None
    pair.close()


def test_a_message_that_is_not_signed_is_not_unpickled() -> None:
    pair = Pair()
    pair.receiver.close()
    pair.source.close()
    old, request = pair.old, JoinRequest(JobStore(HashStore()), 4)
    source = StateSource(*old, b"the secret", request.key, "127.0.0.1")
    request.offer(0, source.place)
    receiver = StateReceiver(*pair.new)
    until(lambda: request.attempt() == 1, receiver, request)
    assert not receiver.has_parts
    receiver.close()
    source.close()
