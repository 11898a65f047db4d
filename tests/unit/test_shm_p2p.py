"""Messages over shared memory: ranks stepped by turns in this process, and real ones."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import msccl_jobs as jobs
import numpy as np
import pytest
import torch
from ranks import own_rank, run_ranks, wait_for_files

from mcr_plus.backends.shm import collectives_state, p2p_kernels
from mcr_plus.backends.shm.collectives import DirectCollectives, begin_and_advance
from mcr_plus.backends.shm.p2p import PointToPoint
from mcr_plus.backends.shm.queue import WorkQueue
from mcr_plus.backends.shm.reductions import kernels_for
from mcr_plus.backends.shm.segment import Segment, Shape, open_segment
from mcr_plus.core.c10d import FileStore
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import DTYPES, Kind
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import OrderMismatch

SIZES = (0, 1, 3, 15, 16, 17, 63, 64, 65, 241, 1000, 4099)
LARGE = 3 * 1024 * 1024 + 7


def values(seed: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any bits: also NaN and −0."""
    high = 2 if dtype is torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, high, count * dtype.itemsize, dtype=np.uint8)
    tensor = torch.empty(count, dtype=dtype)
    octets(tensor)[:] = raw
    return tensor


def octets(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor, shared with it."""
    return tensor.view(torch.uint8).numpy()


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(np.array_equal(octets(found), octets(wanted)))


@dataclass
class Over:
    """A poll of a message that compiled code has sent or received."""

    source: int | None
    done: bool = True
    error: Exception | None = None

    def __call__(self) -> bool:
        return True


class Box:
    """A rank's messages, called as by the engine."""

    def __init__(self, segment: Segment, **settings: int) -> None:
        self.segment, self.me, self.ranks = segment, segment.rank, segment.shape.ranks
        group = Group("exam", tuple(range(self.ranks)), self.me)
        self.p2p = PointToPoint(segment, group, **settings)

    def _message(self, kind: Kind, tensor: torch.Tensor) -> Signature:
        return Signature(kind, tensor.dtype, tuple(tensor.shape), tensor.nbytes, "exam", self.ranks)

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0, polls: int | None = None) -> Any:
        signature = self._message("send", tensor)
        message = Message(signature, inputs=(tensor,), peer=peer, match_tag=tag)
        return self._started(self.p2p.bind_send(signature), message, tensor, polls)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0, polls: int | None = None) -> Any:
        signature = self._message("recv", tensor)
        message = Message(signature, outputs=(tensor,), peer=peer, match_tag=tag)
        return self._started(self.p2p.bind_receive(signature), message, tensor, polls)

    def _started(self, start: Any, message: Message, tensor: torch.Tensor, polls: int | None) -> Any:
        """Start a message, with `polls` as compiled calls do: they poll so often before Python waits."""
        native = None if polls is None else start.native(message.peer, message.match_tag)
        if native is None or native.running is not None or ctypes.c_int64.from_address(native.active).value:
            return start(message)
        begin, advance = (
            ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * count)(address)
            for count, address in ((2, native.begin), (1, native.advance))
        )
        words, address = native.words.ctypes.data, tensor.data_ptr()
        done = begin(words, address, address)
        for _ in range(polls or 0):
            done = done or advance(words, 1)
        return Over(message.peer) if done else native.begun(address, address, (tensor,))

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is in flight and no slot holds data."""
        box = self.p2p
        return not (
            box._words[p2p_kernels.ACTIVE]
            or box._unexpected
            or box._waiting
            or any(box._wanted)
            or box._wanted_of_any
        )


def together(ranks: int, *, depth: int = 2, slot: int = 128) -> list[Box]:
    """Ranks of one process: each moves only when it is polled."""
    shape = Shape(ranks, depth=depth, slot=slot, area=64 * ranks)
    memory = mmap.mmap(-1, shape.nbytes)
    return [Box(Segment(shape, rank, memory), glances=1, spins=1, yields=0) for rank in range(ranks)]


def all_done(polls: Sequence[Any]) -> bool:
    """Poll each once."""
    return [bool(poll()) for poll in polls] == [True] * len(polls)


def settle(*polls: Any) -> None:
    """Poll all until all are done."""
    for _ in range(10_000):
        if all_done(polls):
            return
    raise AssertionError("messages do not arrive")


# -- ranks by turns ----------------------------------------------------------------------------------


def test_a_message_that_fits_a_slot_is_sent_at_once() -> None:
    first, second = together(2)
    data = [values(seed, count) for seed, count in enumerate((16, 0))]
    targets = [torch.empty(16), torch.empty(0)]
    for tensor in data:
        assert first.send(tensor, 1)()
    kept = data[0].clone()
    data[0].zero_()  # it is in the queue
    third = first.send(values(3, 1), 1)
    for _ in range(9):
        assert not third()  # both slots are filled
    for target in targets:
        assert second.receive(target, 0)()
    assert same(targets[0], kept)
    assert third()


def test_an_unreceived_message_blocks_its_sender() -> None:
    first, second, third = together(3)
    settle(third.send(values(0, 1), 1), second.receive(torch.empty(1), None))  # which looked at all queues
    send = first.send(values(1, 500), 1)
    waiting = second.receive(torch.empty(1), 2)  # of somebody else
    for _ in range(20):
        assert not send()
        assert not waiting()
        second.p2p.progress()
    assert not second.p2p._unexpected
    target = torch.empty(500)
    settle(send, second.receive(target, 0))
    assert same(target, values(1, 500))
    settle(third.send(torch.empty(1), 1), waiting)
    assert first.is_empty
    assert second.is_empty


@pytest.mark.parametrize("source", [0, None])
def test_tags_in_any_order(source: int | None) -> None:
    first, second = together(2)
    sends = [first.send(values(tag, 10 + 40 * tag), 1, tag) for tag in range(5)]
    for tag in (3, 0, 4, 2, 1):
        target = torch.empty(10 + 40 * tag)
        receive = second.receive(target, source, tag)
        settle(*sends[: tag + 1], receive)
        assert receive.source == 0
        assert same(target, values(tag, 10 + 40 * tag))
    assert second.is_empty


def test_messages_of_a_tag_stay_in_order_wherever_they_are() -> None:
    """The first three go aside, the others are met in the queue or expected."""
    first, second = together(2)
    sends = [first.send(values(seed, 20 + seed), 1, 5) for seed in range(3)]
    sends.append(first.send(values(9, 1), 1, 6))
    settle(second.receive(torch.empty(1), 0, 6), *sends)
    sends += [first.send(values(seed, 20 + seed), 1, 5) for seed in range(3, 6)]
    targets = [torch.empty(20 + seed) for seed in range(8)]
    receives = [second.receive(target, 0, 5) for target in targets]
    sends += [first.send(values(seed, 20 + seed), 1, 5) for seed in range(6, 8)]
    settle(*sends, *reversed(receives))
    for seed, target in enumerate(targets):
        assert same(target, values(seed, 20 + seed))


def test_a_receive_posted_while_its_message_is_moved_aside() -> None:
    first, second = together(2)
    large = first.send(values(1, 500), 1, 1)
    small = first.send(values(2, 3), 1, 2)
    targets = torch.empty(500), torch.empty(3)
    wanted = second.receive(targets[1], 0, 2)
    assert not wanted()  # it has begun to move the large one
    other = second.receive(targets[0], 0, 1)
    assert not other()
    settle(wanted, other, large, small)
    assert same(targets[0], values(1, 500))
    assert same(targets[1], values(2, 3))
    assert second.is_empty


def test_the_receive_posted_first_is_served_first() -> None:
    first, second, third = together(3)
    targets = [torch.zeros(4) for _ in range(4)]
    peers = (0, None, 0, None)
    receives = [second.receive(target, peer) for target, peer in zip(targets, peers, strict=True)]
    for seed in range(2):
        settle(first.send(values(seed, 4), 1))
        settle(receives[seed])
        assert not any(poll() for poll in receives[seed + 1 :])
    settle(third.send(values(2, 4), 1), receives[3])  # the third receive is for the first rank
    assert (receives[3].source, receives[2].done) == (2, False)
    settle(first.send(values(3, 4), 1), receives[2])
    for target, seed in zip(targets, (0, 1, 3, 2), strict=True):
        assert same(target, values(seed, 4))


def test_no_source_starves_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcr_plus.backends.shm.p2p._AT_ONCE", 4)
    first, second, third = together(3, depth=7)
    settle(third.send(values(0, 1), 1, 7))
    wanted = second.receive(torch.empty(1), None, 7)
    settle(*(first.send(values(turn, 1), 1, 3) for turn in range(6)))
    second.p2p.progress()
    assert wanted.done


def test_messages_are_received_in_order_of_arrival() -> None:
    first, second, third = together(3)
    unmet = second.receive(torch.empty(1), None, 9)
    for box in (third, first):
        settle(box.send(values(box.me, 5), 1))
        second.p2p.progress()
    for source in (2, 0):
        receive = second.receive(torch.empty(5), None)
        assert receive()
        assert receive.source == source
    assert not unmet()


def test_messages_to_oneself() -> None:
    box, _ = together(2)
    targets = [torch.empty(100), torch.empty(7), torch.empty(0)]
    early = box.receive(targets[1], None, 4)
    data = values(1, 100)
    for tensor, tag in ((data, 3), (values(2, 7), 4), (values(3, 0), 3)):
        assert box.send(tensor, 0, tag)()
    data.zero_()
    late = [box.receive(targets[0], 0, 3), box.receive(targets[2], None, 3)]
    assert all(poll() and poll.source == 0 for poll in (early, *late))
    assert same(targets[0], values(1, 100))
    assert same(targets[1], values(2, 7))
    assert box.is_empty


@pytest.mark.parametrize("how", ["expected", "queued", "aside", "self"])
@pytest.mark.parametrize(
    ("sent", "described"),
    [
        (values(1, 300, torch.int16), "int16[300] (600 bytes)"),
        (values(1, 150, torch.int32), "int32[150] (600 bytes)"),
        (values(1, 0), "float32[0] (0 bytes)"),
    ],
)
def test_messages_that_do_not_fit(how: str, sent: torch.Tensor, described: str) -> None:
    first, second = together(2)
    source, target = second.me if how == "self" else 0, torch.full((150,), 7.0)
    sender = second if how == "self" else first
    wrong = second.receive(target, source, 3) if how == "expected" else None
    polls = [sender.send(sent, 1, 3)]
    if how == "aside":
        polls.append(first.send(values(2, 1), 1, 4))
        settle(*polls, second.receive(torch.empty(1), 0, 4))
    wrong = wrong or second.receive(target, source, 3)
    polls.append(sender.send(values(5, 150), 1, 3))
    with pytest.raises(OrderMismatch) as caught:
        settle(wrong, *polls)
    advice = "; a message must fill its receive: send the size first, or receive into a tensor of 0"
    assert str(caught.value) == (
        f"message with tag 3 in group 'exam': rank {source} issued send {described}; "
        f"rank 1 issued recv float32[150] (600 bytes){advice * (sent.dtype is torch.float32)}"
    )
    assert wrong.source == source
    assert bool((target == 7).all())
    with pytest.raises(OrderMismatch):
        wrong()
    settle(*polls, second.receive(target, source, 3))
    assert same(target, values(5, 150))
    assert first.is_empty
    assert second.is_empty


# -- random traffic against a model ------------------------------------------------------------------


@dataclass(eq=False)
class Sent:
    source: int
    target: int
    tag: int
    seed: int
    poll: Any


@dataclass(eq=False)
class Posted:
    number: int
    peer: int | None
    tag: int
    target: torch.Tensor
    poll: Any
    met: Sent | None = None

    def fits(self, sent: Sent) -> bool:
        return self.tag == sent.tag and self.peer in (None, sent.source)

    def is_over(self) -> bool:
        try:
            return bool(self.poll())
        except OrderMismatch:
            return True


COUNTS = (1, 40, 700, 0, 40, 700)  # by tag


class Traffic:
    """Ranks that send and receive at random, and checks of the possible outcomes."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.boxes = together(self.chance.choice([2, 3, 4]), depth=self.chance.choice([2, 3]))
        self.sent: list[Sent] = []
        self.posted: list[list[Posted]] = [[] for _ in self.boxes]

    def send(self, source: int, target: int, tag: int) -> None:
        seed = len(self.sent)
        polls = self.chance.choice((None, 0, 3))
        poll = self.boxes[source].send(values(seed, COUNTS[tag]), target, tag, polls)
        self.sent.append(Sent(source, target, tag, seed, poll))

    def receive(self, rank: int, peer: int | None, tag: int, dtype: torch.dtype = torch.float32) -> None:
        target = torch.empty(COUNTS[tag], dtype=dtype)
        poll = self.boxes[rank].receive(target, peer, tag, self.chance.choice((None, 0, 3)))
        self.posted[rank].append(Posted(len(self.posted[rank]), peer, tag, target, poll))

    def step(self) -> None:
        chance, ranks = self.chance, len(self.boxes)
        rank, other, tag = chance.randrange(ranks), chance.randrange(ranks), chance.randrange(len(COUNTS))
        what = chance.random()
        if what < 0.25:
            self.send(rank, other, tag)
        elif what < 0.5:
            dtype = torch.int32 if chance.random() < 0.1 else torch.float32
            self.receive(rank, chance.choice([None, other, other]), tag, dtype)
        elif what < 0.8:
            polls = [each for each in self.posted[rank] if not each.poll.done]
            if polls:
                chance.choice(polls).is_over()
        else:
            self.boxes[rank].p2p.progress()

    def come_to_rest(self) -> None:
        for _ in range(300):
            for box in self.boxes:
                box.p2p.progress()

    def left(self) -> tuple[list[Sent], list[tuple[int, Posted]]]:
        """Unmatched messages and receives."""
        met = {each.met for posted in self.posted for each in posted}
        lonely = [(rank, each) for rank, posted in enumerate(self.posted) for each in posted if not each.met]
        return [each for each in self.sent if each not in met], lonely

    def check(self) -> None:
        for rank, posted in enumerate(self.posted):
            self.identify(rank, posted)
            self.check_order(rank, posted)
        for sent in self.left()[0]:
            assert not any(each.fits(sent) for each in self.posted[sent.target] if each.met is None)

    def identify(self, rank: int, posted: list[Posted]) -> None:
        """Return the message that each receive has met, by its contents."""
        queues: dict[tuple[int, int], list[Sent]] = {}
        for sent in self.sent:
            if sent.target == rank:
                queues.setdefault((sent.source, sent.tag), []).append(sent)
        for each in posted:
            if not each.is_over():
                assert each.met is None
                continue
            met = queues[each.poll.source, each.tag].pop(0)
            assert each.met in (None, met)
            assert each.fits(met)
            each.met = met
            wrong = each.target.dtype is not torch.float32
            assert wrong == (each.poll.error is not None)
            assert wrong or same(each.target, values(met.seed, COUNTS[met.tag]))

    def check_order(self, rank: int, posted: list[Posted]) -> None:
        """Check that there is a valid order of events.

        In it each message goes to the first receive that fits it, and each receive takes the first message of
        its source that fits it.
        """
        order: TopologicalSorter[Posted] = TopologicalSorter()
        for one in posted:
            for other in posted:
                if other.met is None or one is other:
                    continue
                if one.number < other.number and one.fits(other.met):
                    assert one.met is not None
                    order.add(other, one)
                if one.met is not None and (one.met.source, one.met.tag) == (other.met.source, other.met.tag):
                    order.add(*((other, one) if one.met.seed < other.met.seed else (one, other)))
        order.prepare()  # raises CycleError


@pytest.mark.parametrize("seed", range(120))
def test_random_traffic(seed: int) -> None:
    traffic = Traffic(seed)
    for _ in range(traffic.chance.choice([20, 150, 400])):
        traffic.step()
    traffic.come_to_rest()
    traffic.check()
    unsought, lonely = traffic.left()
    for sent in unsought:
        traffic.receive(sent.target, sent.source, sent.tag)
    for rank, each in lonely:
        traffic.send(rank if each.peer is None else each.peer, rank, each.tag)
    traffic.come_to_rest()
    traffic.check()
    assert traffic.left() == ([], [])
    assert all(box.is_empty for box in traffic.boxes)
    assert all(sent.poll() for sent in traffic.sent)


# -- real ranks --------------------------------------------------------------------------------------


def wait(*polls: Any) -> None:
    for poll in polls:
        jobs.wait(poll)


def every_dtype_and_size(box: Box) -> Iterator[str]:
    """Around the ring, in both directions at once."""
    left, right = (box.me - 1) % box.ranks, (box.me + 1) % box.ranks
    for number, dtype in enumerate(DTYPES):
        for count in SIZES:
            polls, found = [], []
            for way, (peer, other) in enumerate(((right, left), (left, right))):
                target = torch.empty(count, dtype=dtype)
                seed = 1000 * number + 10 * count + way
                found.append((target, values(10 * seed + other, count, dtype), other))
                receive = box.receive(target, other, way)
                polls += [box.send(values(10 * seed + box.me, count, dtype), peer, way), receive]
            wait(*polls)
            for target, wanted, other in found:
                if not same(target, wanted):
                    yield f"{count} of {dtype} from rank {other}"


def large_both_ways(box: Box) -> Iterator[str]:
    """Between all pairs, all in flight at once; the receives last."""
    for count in (LARGE // 4, LARGE):
        others = [rank for rank in range(box.ranks) if rank != box.me]
        sends = [
            box.send(values(16 * box.me + other, count, torch.uint8), other, 2**62 + box.me)
            for other in others
        ]
        targets = {other: torch.empty(count, dtype=torch.uint8) for other in others}
        receives = [box.receive(target, other, 2**62 + other) for other, target in targets.items()]
        wait(*(sends + receives)[::-1])
        for other, target in targets.items():
            if not same(target, values(16 * other + box.me, count, torch.uint8)):
                yield f"{count} bytes from rank {other}"


def any_source(box: Box) -> Iterator[str]:
    """Send from all ranks to all, themselves included, in random order."""
    times = 25
    counts = [(7 * turn) ** 2 // 3 for turn in range(times)]
    sends = [
        box.send(values(100 * box.me + turn, counts[turn]), other, turn)
        for turn in range(times)
        for other in range(box.ranks)
    ]
    for turn in range(times):
        targets = [torch.empty(counts[turn]) for _ in range(box.ranks)]
        receives = [box.receive(target, None, turn) for target in targets]
        wait(*receives)
        if sorted(poll.source for poll in receives) != list(range(box.ranks)):
            yield f"sources of turn {turn}: {[poll.source for poll in receives]}"
        for poll, target in zip(receives, targets, strict=True):
            if not same(target, values(100 * poll.source + turn, counts[turn])):
                yield f"any source, turn {turn}: not the data of rank {poll.source}"
    wait(*sends)


def at_random(box: Box) -> Iterator[str]:
    """Run calls at random: all ranks know all messages, and each has its own order of calls."""
    agreed, own = random.Random(5), random.Random(box.me)
    plan = [
        (
            agreed.randrange(box.ranks),
            agreed.randrange(box.ranks),
            agreed.randrange(4),
            int(10 ** agreed.uniform(0, 4.5)),
        )
        for _ in range(600)
    ]
    sends = [(seed, each) for seed, each in enumerate(plan) if each[0] == box.me]
    keys: dict[tuple[int, int], list[int]] = {}
    for seed, (source, target, tag, _) in enumerate(plan):
        if target == box.me:
            keys.setdefault((source, tag), []).append(seed)
    polls, found = [], []
    while sends or keys:
        if sends and own.random() < 0.5:
            seed, (_, target, tag, count) = sends.pop(0)
            polls.append(box.send(values(seed, count), target, tag))
        elif keys:
            source, tag = key = own.choice(list(keys))
            seed = keys[key].pop(0)
            if not keys[key]:
                del keys[key]
            tensor = torch.empty(plan[seed][3])
            found.append((tensor, seed))
            polls.append(box.receive(tensor, source, tag))
        if polls and own.random() < 0.3:
            own.choice(polls)()
    own.shuffle(polls)
    wait(*polls)
    for tensor, seed in found:
        if not same(tensor, values(seed, plan[seed][3])):
            yield f"message {seed} of random traffic: {plan[seed]}"


def among_collectives(box: Box) -> Iterator[str]:
    """Collectives and messages in flight on one segment, polled in any order."""
    queue, collectives, own = WorkQueue(), DirectCollectives(box.segment), random.Random(box.me)
    left, right = (box.me - 1) % box.ranks, (box.me + 1) % box.ranks
    kernels, count = kernels_for(torch.int64, "SUM"), 3001
    for turn in range(20):
        total = torch.full((count,), box.me + turn)
        state = collectives.bind(collectives_state.ALL_REDUCE, count, 8, kernels)
        target = torch.empty(100 * turn)
        polls = [
            box.receive(target, left, turn),
            queue.bind(*begin_and_advance(), state)(total.data_ptr(), total.data_ptr(), None),
            box.send(values(10 * turn + box.me, 100 * turn), right, turn),
        ]
        deadline = time.monotonic() + jobs.PATIENCE
        while not all_done(own.sample(polls, 3)):
            if time.monotonic() > deadline:
                raise TimeoutError
        if not same(target, values(10 * turn + left, 100 * turn)):
            yield f"message of turn {turn} among collectives"
        if not bool((total == box.ranks * (box.ranks - 1) // 2 + turn * box.ranks).all()):
            yield f"all_reduce of turn {turn} among messages"


def exam(slot: int) -> list[str]:
    """Run all of the above on one segment."""
    me, ranks = own_rank(), int(os.environ["WORLD_SIZE"])
    group = Group("exam", tuple(range(ranks)), me)
    begin_and_advance()
    p2p_kernels.prepare()
    shape = Shape(ranks, channels=2, slot=slot, depth=3, area=1536 * ranks)
    box = Box(open_segment(jobs.connect(), group, shape, 60))
    parts = (every_dtype_and_size, large_both_ways, any_source, at_random, among_collectives)
    failures = [failure for part in parts for failure in part(box)]
    if not box.is_empty:
        failures.append("something is left")
    box.segment.close()
    return failures


@pytest.mark.parametrize(("ranks", "slot"), [(2, 128 << 10), (3, 1024), (4, 4096)])
def test_real_ranks(ranks: int, slot: int) -> None:
    for result in run_ranks("unit.test_shm_p2p:exam", ranks, args=[slot], via="torch", timeout=240):
        assert result.value == []


def _be_killed(folder: str, me: int, ranks: int) -> None:
    """Messages around a ring without end. Once none come any more, polls still return, and quickly."""
    store: Any = FileStore(str(Path(folder) / "store"), ranks)
    store.set_timeout(timedelta(seconds=20))
    box = Box(open_segment(store, Group("g", tuple(range(ranks)), me), jobs.small(ranks), 20))
    data, target = torch.ones(2000), torch.empty(2000)
    while True:
        polls = [box.send(data, (me + 1) % ranks), box.receive(target, None)]
        deadline = time.monotonic() + 1.5
        while not all_done(polls):
            if time.monotonic() > deadline:
                Path(folder, f"survived.{me}").touch()
                return
        Path(folder, f"sends.{me}").touch()


@pytest.mark.long
def test_polls_of_survivors_return_false_after_a_kill() -> None:
    p2p_kernels.prepare()  # before the first fork, and not in every child
    chance, ranks = random.Random(3), 3
    for _ in range(4):
        with tempfile.TemporaryDirectory() as folder:
            children = [jobs._forked(_be_killed, folder, me, ranks) for me in range(ranks)]
            wait_for_files(*(Path(folder, f"sends.{me}") for me in range(ranks)))
            time.sleep(chance.uniform(0, 0.05))
            victim = chance.randrange(ranks)
            os.kill(children[victim], signal.SIGKILL)
            assert not jobs.hanging(children)
            survivors = {f"survived.{rank}" for rank in range(ranks) if rank != victim}
            assert {path.name for path in Path(folder).glob("survived.*")} == survivors
