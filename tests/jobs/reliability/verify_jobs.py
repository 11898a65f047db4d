"""Jobs with payloads that change on the way: programs of ranks for tests/jobs/reliability/test_verify.py."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from jobs.reliability.verify_faults import carries_checksum, faulty, flip_carried

import mcr_plus as mcr
from mcr_plus.backends.base import Poll, ReceivePoll, Start
from mcr_plus.backends.shm.backend import SharedMemoryChannel
from mcr_plus.backends.shm.queue import Run
from mcr_plus.core.kinds import KINDS as KINDS_OF_ALL
from mcr_plus.core.kinds import VECTOR, Kind, collective, plain_kind
from mcr_plus.core.message import Message, Signature
from mcr_plus.job.init import current
from mcr_plus.kernels import checksum
from mcr_plus.kernels.checksum_sizes import BLOCK
from mcr_plus.reliability.verify import checked, opening, verified_run
from mcr_plus.reliability.verify.channel import VerifiedChannel
from mcr_plus.reliability.verify.rows import LibraryRows
from mcr_plus.reliability.verify.steps import VerifiedStep


def config(*backends: str, verify: Any = "every", **options: Any) -> dict[str, Any]:
    """Return a pipeline with verification."""
    dispatch = {"verify": verify, "timeout": "20s", **options}
    return {"version": 1, "backends": list(backends), "pipeline": [{"select": {}}, {"dispatch": dispatch}]}


KINDS: Final[tuple[Kind, ...]] = tuple(
    kind for kind in KINDS_OF_ALL if kind not in ("send", "recv", "barrier")
)
# bool is left out: torch copies a byte of 3 as 1, so a flipped bit may be gone before it is sent.
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64)
PIECE: Final = 2 * BLOCK
SIZES: Final = (1, 5, 300, 9_000, 70_000)


def verified(name: str) -> VerifiedChannel:
    """Return the library of the group of all ranks."""
    channel = current().communicator.opened.runtime.channels[name].channel
    assert isinstance(channel, VerifiedChannel)
    return channel


def flip(tensor: torch.Tensor, draw: random.Random) -> int:
    """Flip one bit in memory; returns the number of its byte."""
    raw = tensor.view(-1).view(torch.uint8)
    at = draw.randrange(raw.numel())
    raw[at] ^= 1 << draw.randrange(8)
    return at


class Flipper:
    """Flips a bit in data that the steps of a verified operation hand to the library, or get from it.

    The next operation after `arm` has the flip, in step number `step` of this rank: `sent` between checksum
    and library, `arrived` when the library has ended. Steps bound earlier are not disturbed. If the functions
    that move data take the checksums, they flip the bit at the same places.
    """

    def __init__(self, channel: VerifiedChannel) -> None:
        self._bind = channel._steps.bind
        self.draw, self.in_pieces = random.Random(0), False
        self.place, self.step, self.done = "", 0, False
        channel._steps.bind = self.bind  # type: ignore[method-assign]
        self._run = channel._checking.run
        channel._checking.run = self.run  # type: ignore[method-assign]

    def run(self, channel: SharedMemoryChannel, signature: Signature, state: Any) -> Run:
        """See `Checking.run`."""
        return faulty(self, self._run(channel, signature, state), signature, state)

    def arm(self, place: str, step: int, draw: random.Random) -> None:
        self.place, self.step, self.draw, self.done = place, step, draw, False

    def _flip(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors and tensors[0].numel():
            flip(tensors[0], self.draw)
            self.done = True

    def bind(self, signature: Signature) -> VerifiedStep:
        step = self._bind(signature)
        step.start = partial(self._start, step.start)
        return step

    def _start(self, start: Start, message: Message) -> Poll:
        mine = self.place if self.step == 0 else ""
        self.step -= 1
        if mine == "sent":
            self._flip(message.inputs)
        poll, outputs = start(message), message.outputs
        if mine != "arrived":
            return poll
        ended = False

        def flipped() -> bool:
            nonlocal ended
            if not ended and poll():
                ended = True
                self._flip(outputs)
            return ended

        return flipped


def case(
    kind: Kind, rank: int, ranks: int, size: int, dtype: torch.dtype, root: int, backend: str
) -> Message:
    """Return an operation of a library, as the pipeline would hand it over."""
    row = collective(kind)
    is_root = rank == root
    uneven = kind in VECTOR
    counts = tuple(size + 3 * each for each in range(ranks)) if uneven else (size,) * ranks
    # all_to_all_v: a part depends on its receiver alone, so each receiver gets equal parts.
    own, total = counts[rank], sum(counts)
    parts = {"none": 0, "one": own, "each": total}
    sends, receives = row.buffers(root=is_root)
    taken, given = parts[sends], parts[receives]
    if plain_kind(kind) == "all_to_all":
        given = own * ranks
    value = torch.randint(0, 2, (taken,)).to(dtype) if taken else None
    out = torch.zeros(given, dtype=dtype) if given else None
    if row.in_place:
        out = value if value is not None else out
        if kind == "reduce" and not is_root:
            out = None
    nbytes = None if uneven else max(taken, given, size) * dtype.itemsize
    signature = Signature(
        kind, dtype, () if uneven else (size,), nbytes, "world", ranks, backend=backend,
        reduce_op="SUM" if row.reduces else None, root=root if row.rooted else None, async_op=True,
    )  # fmt: skip
    if not uneven and row.is_shared:
        signature = signature.replace(nbytes=total * dtype.itemsize)
    extras: dict[str, Any] = {}
    if uneven and sends == "each":
        extras["input_counts"] = counts
    if uneven and receives == "each":
        extras["output_counts"] = (own,) * ranks if plain_kind(kind) == "all_to_all" else counts
    inputs, outputs = ((each,) if each is not None else () for each in (value, out))
    return Message(signature, inputs, outputs, **extras)


def _cut_small() -> None:
    """Operations of some hundred kB run in pieces, over gloo as between hosts."""
    verified_run.PIECE = PIECE  # type: ignore[misc]
    checked.AREA = 3 * BLOCK  # type: ignore[misc]
    begin = verified_run.VerifiedRuns.__init__

    def between_hosts(
        self: verified_run.VerifiedRuns, steps: Any, group: Any, compare: Any, _: bool = False
    ) -> None:
        begin(self, steps, group, compare, between_hosts=True)

    verified_run.VerifiedRuns.__init__ = between_hosts  # type: ignore[method-assign,assignment]


def flips_in_pieces(backend: str, seed: int, operations: int) -> list[Any]:
    """`many_flips` in operations that run in up to five pieces."""
    _cut_small()
    kinds: tuple[Kind, ...] = ("all_reduce", "broadcast", "all_gather")
    return many_flips(backend, seed, operations, kinds, (70_001, 150_000), range(6), in_pieces=True)


def in_pieces(backend: str) -> list[bool]:
    """Return whether operations in pieces, and others between them, have NumPy's results."""
    torch.set_num_threads(1)
    _cut_small()
    right = []
    with mcr.init(config(backend)) as comm:
        for number, numel in enumerate((3, 40_000, 70_001, 98_304, 200_003)):
            inputs = [(np.arange(numel) * (rank + 2) + number) % 31 for rank in range(comm.size)]
            root = number % comm.size
            for dtype in (torch.float32, torch.int64, torch.bfloat16):
                for async_op in (False, True):
                    total, sent = (torch.tensor(inputs[comm.rank], dtype=dtype) for _ in range(2))
                    works = [
                        comm.all_reduce(total, async_op=async_op),
                        comm.broadcast(sent, root, async_op=async_op),
                    ]
                    for work in works:
                        if work is not None:
                            work.wait()
                    right.append(bool((total.double().numpy() == sum(inputs)).all()))
                    right.append(bool((sent.double().numpy() == inputs[root]).all()))
                own = torch.tensor(inputs[comm.rank], dtype=dtype)
                every = torch.zeros(comm.size * numel, dtype=dtype)
                comm.all_gather_into_tensor(every, own)
                right.append(bool((every.double().numpy() == np.concatenate(inputs)).all()))
            # Bytes of a bool may differ from 0 and 1.
            raw = torch.zeros(comm.size * numel, dtype=torch.uint8)
            own = torch.tensor(inputs[comm.rank], dtype=torch.uint8)
            comm.all_gather_into_tensor(raw.view(torch.bool), own.view(torch.bool))
            right.append(bool((raw.numpy() == np.concatenate(inputs)).all()))
    return right


def many_flips(
    backend: str,
    seed: int,
    operations: int,
    kinds: Sequence[Kind] = KINDS,
    sizes: Sequence[int] = SIZES,
    steps: Sequence[int] = (0, 0, 1),
    in_pieces: bool = False,
) -> list[Any]:
    """Run random operations, most of them with a flipped bit on a random rank.

    The operations go to the library without the engine, whose group would fail after the first. Returns for
    each: its kind, whether this rank has flipped a bit, and the error of this rank.
    """
    torch.set_num_threads(1)
    shared, found = random.Random(seed), []
    with mcr.init(config(backend)) as comm:
        channel, ranks = verified(backend), comm.size
        flipper = Flipper(channel)
        flipper.in_pieces = in_pieces
        for number in range(operations):
            kind, dtype, size = shared.choice(kinds), shared.choice(DTYPES), shared.choice(sizes)
            root, victim, step = shared.randrange(ranks), shared.randrange(ranks), shared.choice(steps)
            place, is_wanted = shared.choice(("sent", "arrived")), shared.random() < 0.8
            message = case(kind, comm.rank, ranks, size, dtype, root, backend)
            armed = is_wanted and victim == comm.rank
            flipper.arm(place if armed else "", step, random.Random(f"{seed} {number}"))
            raised: list[Any] = []
            poll = channel.bind(message.signature)(message)
            try:
                with current().engine.lock:
                    while not poll():
                        current().engine.progress()
                        time.sleep(1e-4)  # three ranks that spin on two cores starve other processes
            except mcr.DataCorrupted as error:
                raised = [error.operation.split()[0], error.source, error.rank, error.library, error.block]
            found.append([kind, str(dtype), size, place, flipper.done, raised])
    return found


def flipped_messages(channel: VerifiedChannel, place: Callable[[], str], draw: random.Random) -> list[int]:
    """Make the library's own sends and receives flip a bit where `place` names theirs; returns the places."""
    own: Any = channel._own
    places = flip_carried(own, place, draw)
    bind: Callable[[Signature], Start] = own.bind

    def bind_flipping(signature: Signature) -> Start:
        start = bind(signature)

        def begin(message: Message) -> Poll:
            mine = place()
            if mine == "sent" and signature.kind == "send":
                places.append(flip(message.inputs[0], draw))
            poll, outputs = start(message), message.outputs
            if mine != "arrived" or signature.kind != "recv":
                return poll
            return FlippingPoll(poll, lambda: places.append(flip(outputs[0], draw)))

        return begin

    own.bind = bind_flipping
    return places


class FlippingPoll(ReceivePoll):
    """The poll of a receive that changes the arrived data."""

    def __init__(self, poll: Poll, change: Callable[[], object]) -> None:
        self._poll, self._change, self._ended = poll, change, False

    def __call__(self) -> bool:
        if not self._ended and self._poll():
            self._ended = True
            self.source = getattr(self._poll, "source", None)
            self._change()
        return self._ended


def many_messages(backend: str, seed: int, messages: int) -> list[Any]:
    """Messages from each rank to the next, in batches with a few tags, received from it or from any source.

    As `many_flips`; of a message its receiver knows.
    """
    torch.set_num_threads(1)
    shared, found = random.Random(seed), []
    with mcr.init(config(backend)) as comm:
        channel, ranks = verified(backend), comm.size
        place = ""
        draw = random.Random(f"{seed} {comm.rank}")
        flips = flipped_messages(channel, lambda: place, draw)
        source, target = (comm.rank - 1) % ranks, (comm.rank + 1) % ranks
        for _ in range(messages // 3):
            polls, kept = list[tuple[Poll, str]](), list[Message]()
            from_any = shared.random() < 0.3
            batch = [(shared.choice(SIZES), shared.randrange(2)) for _ in range(3)]
            for size, tag in batch:
                where, victim = shared.choice(("sent", "arrived", "")), shared.randrange(ranks)
                is_sender = victim == comm.rank
                place = where if where == "sent" and is_sender else ""
                sends = signature_of("send", size, backend, ranks)
                kept.append(Message(sends, (torch.rand(size),), peer=target, match_tag=tag))
                polls.append((channel.bind(sends)(kept[-1]), "send"))
                place = where if where == "arrived" and victim == source else ""
                of_me = where if victim == source else ""
                receives = signature_of("recv", size, backend, ranks)
                out = torch.empty(size)
                peer = None if from_any else source
                message = Message(receives, (), (out,), peer=peer, match_tag=tag)
                polls.append((channel.bind(receives)(message), of_me or "none"))
            if shared.random() < 0.5:
                polls.reverse()
            for poll, what in polls:
                raised: list[Any] = []
                try:
                    with current().engine.lock:
                        while not poll():
                            current().engine.progress()
                except mcr.DataCorrupted as error:
                    raised = [error.source, error.rank, error.library]
                if what != "send":
                    found.append([what, source, comm.rank, raised])
        comm.barrier()
    return [found, len(flips)]


def mismatched_message(backend: str, sent: int, wanted: int) -> list[str]:
    """Return the error of a receive of another size than its message."""
    with mcr.init(config(backend)) as comm:
        try:
            comm.send(torch.ones(sent), 1) if comm.rank == 0 else comm.recv(torch.ones(wanted), 0)
            comm.barrier()
        except mcr.McrError as error:
            return [type(error).__name__, str(error)]
    return []


def signature_of(kind: Kind, size: int, backend: str, ranks: int) -> Signature:
    """Return the signature of a message of float32."""
    return Signature(kind, torch.float32, (size,), 4 * size, "world", ranks, backend=backend, async_op=True)


def through_the_api(backend: str) -> list[Any]:
    """Run the calls of a program, each in a world of its own; a bit flips on the last rank."""
    torch.set_num_threads(1)
    pipeline = [
        {"fuse": {}},
        {"compress": {"codec": "none"}},
        {"select": {}},
        {"dispatch": {"verify": "every"}},
    ]
    found = []
    with mcr.init({"version": 1, "backends": [backend], "pipeline": pipeline}):
        for name, call in CALLS.items():
            comm = current().communicator
            channel, is_victim = verified(backend), comm.rank == comm.size - 1
            error: Any = None
            place: list[str] = []  # of a damaged message
            flipped_messages(channel, lambda: place[0] if place else "", random.Random(7))  # noqa: B023
            flipper = Flipper(channel)
            call(comm)  # undamaged data passes
            place += ["arrived"] * is_victim
            flipper.arm("arrived" if is_victim and name != "recv" else "", 0, random.Random(name))
            try:
                call(comm)
                comm.barrier()  # where a sender is told
            except mcr.McrError as raised:
                error = raised
            facts = vars(error) if isinstance(error, mcr.DataCorrupted) else {}
            known = [facts.get(key) for key in ("rank", "source", "library", "block", "group")]
            found.append([name, type(error).__name__, *known, str(error)])
            mcr.reset()
    return found


def _message(comm: mcr.Communicator) -> None:
    value = torch.ones(40_000)
    if comm.rank == 0:
        comm.send(value, comm.size - 1)
    elif comm.rank == comm.size - 1:
        comm.recv(value, 0)


def _persistent(comm: mcr.Communicator) -> None:
    if "op" not in comm.attached:
        comm.attached["op"] = comm.persistent("all_reduce", torch.ones(5000))
    comm.attached["op"]()


def _fused(comm: mcr.Communicator) -> None:
    works = [comm.all_reduce(torch.ones(4000), async_op=True) for _ in range(3)]
    for work in works:
        assert work is not None
        work.wait()


def _async(comm: mcr.Communicator) -> None:
    work = comm.all_reduce(torch.ones(300_000), async_op=True, tag="async")
    assert work is not None
    work.wait()


CALLS: Final[dict[str, Callable[[mcr.Communicator], Any]]] = {
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(3)),
    "all_reduce async": _async,
    "all_reduce fused": _fused,
    "all_reduce persistent": _persistent,
    "all_reduce int8_block": lambda comm: comm.all_reduce(torch.rand(100_000), compress="int8_block"),
    "all_reduce_coalesced": lambda comm: comm.all_reduce_coalesced([torch.ones(9), torch.ones(5000)]),
    "broadcast": lambda comm: comm.broadcast(torch.ones(50_000), 0),
    "recv": _message,
}


def one_in_three(backend: str) -> dict[str, Any]:
    """Return the numbers of the verified calls: one in three should be verified."""
    torch.set_num_threads(1)
    own = config(backend, verify=3)
    own["rules"] = [{"match": {"tag": "trusted"}, "dispatch": {"verify": "off"}}]
    with mcr.init(own) as comm:
        channel, is_right = verified(backend), True

        def verified_calls(call: Callable[[], None], count: Callable[[], int]) -> list[int]:
            numbers = []
            for number in range(1, 10):
                before = count()
                call()
                numbers += [number] * (count() > before)
            return numbers

        def reduced(**options: Any) -> None:
            nonlocal is_right
            value = torch.full((7,), comm.rank + 1.0)
            comm.all_reduce(value, **options)
            is_right &= bool((value == sum(range(1, comm.size + 1))).all())

        asked = 0

        def counted(of: object, name: str) -> None:
            function = getattr(of, name)

            def call(*args: Any) -> Any:
                nonlocal asked
                asked += 1
                return function(*args)

            setattr(of, name, call)

        counted(channel._messages, "_message")  # the messages that MPI sends after them
        counted(checksum, "of_blocks")  # of gloo's messages
        counted(checksum, "first_changed")

        def messages() -> None:
            nonlocal asked
            value = torch.ones(3)
            comm.send(value, 1) if comm.rank == 0 else comm.recv(value, 0)
            if isinstance(channel._own, SharedMemoryChannel):  # no message is asked for
                asked += carries_checksum(channel._own, 1 - comm.rank, incoming=comm.rank == 1)

        return {
            "collectives": verified_calls(reduced, lambda: channel._rows.number),
            "messages": verified_calls(messages, lambda: asked),
            "off by rule": verified_calls(lambda: reduced(tag="trusted"), lambda: channel._rows.number),
            "sums": is_right,
        }


def on_two_hosts(backend: str) -> dict[str, Any]:
    """Exchange checksums like ranks of several hosts; then change the checksums themselves."""
    torch.set_num_threads(1)
    raised = []
    opening.__dict__["made"] = lambda size, name: (None, None, "")  # no shared memory
    with mcr.init(config(backend)) as comm:
        channel = verified(backend)
        for size in (5, 70_000):
            value = torch.full((size,), comm.rank + 1.0)
            comm.all_reduce(value)
            raised.append("" if bool((value == 3).all()) else "wrong")
        rows = channel._rows
        assert isinstance(rows, LibraryRows)
        agree = rows.agree

        def damaged() -> bool:
            rows._all[1, 0] ^= 1 << 40
            return agree()

        rows.agree = damaged  # type: ignore[method-assign]
        try:
            comm.broadcast(torch.ones(3), 0)
        except mcr.McrError as error:
            raised += [
                type(error).__name__,
                "checksums" if "the checksums themselves" in str(error) else str(error),
            ]
        return {"rows": [type(rows).__name__], "raised": raised}


def other_roots(backend: str) -> list[str]:
    """Return the error of broadcasts with each rank as its own root."""
    with mcr.init(config(backend)) as comm:
        value = torch.ones(3)
        for root in (0, 1, 0, 1):  # ranks compare the first of each before they start it
            comm.broadcast(value, root)
        try:
            comm.broadcast(value, comm.rank)
        except mcr.McrError as error:
            return [type(error).__name__, str(error)]
    return []


def configured_unlike() -> list[str]:
    """Only the first rank verifies."""
    verify = "every" if os.environ["RANK"] == "0" else "off"
    try:
        mcr.init(config("gloo", verify=verify))
    except mcr.McrError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def channels_without(backend: str) -> list[Any]:
    """Return the class of a channel, whether synchronous operations are inline, and the engine's setting."""
    with mcr.init(config(backend, verify="off")) as comm:
        comm.all_reduce(torch.ones(2))
        runtime = current().communicator.opened.runtime
        (issue,) = runtime.operations.values()
        assert issue.operation is not None
        slot = runtime.channels[backend]
        return [type(slot.channel).__name__, issue.operation.inline, len(current().engine.wrappers)]


def after_a_death(backend: str) -> list[Any]:
    """Let the last rank die; return the errors of the others."""
    with mcr.init(config(backend)) as comm:
        value = torch.ones(70_000)
        comm.all_reduce(value)
        if comm.rank == comm.size - 1:
            comm.all_reduce(value)  # the others are in the loop below
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(2):
                comm.all_reduce(value)
        except mcr.PeerLost as error:
            return [list(error.ranks)]
        return []


def by_an_algorithm(backend: str) -> list[Any]:
    """The algorithms that verified operations have bound, and whether an all_gather's result is right."""
    torch.set_num_threads(1)
    with mcr.init(config(backend)) as comm:
        channel: Any = verified(backend)._steps.channel
        bind, bound = channel._bind_algorithm, []

        def noted(signature: Signature) -> Start:
            bound.append(signature.algorithm)
            start: Start = bind(signature)
            return start

        channel._bind_algorithm = noted
        out = torch.zeros(3 * comm.size)
        comm.all_gather_into_tensor(out, torch.full((3,), comm.rank + 1.0), backend=f"{backend}:ring")
        return [bound, out.tolist()]
