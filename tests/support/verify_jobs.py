"""Jobs whose payloads change on the way: what ranks run, for tests/jobs/test_verify.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import torch

import mcr_plus as mcr
from mcr_plus.backends.base import Poll
from mcr_plus.core.kinds import KINDS as KINDS_OF_ALL
from mcr_plus.core.kinds import VECTOR, Kind, collective, plain_kind
from mcr_plus.core.message import Message, Signature
from mcr_plus.dispatch.verify.channel import VerifiedChannel
from mcr_plus.runtime.init import current


def config(*backends: str, verify: Any = "every", **options: Any) -> dict[str, Any]:
    """A pipeline with verification."""
    dispatch = {"verify": verify, "timeout": "20s", **options}
    return {"version": 1, "backends": list(backends), "pipeline": [{"select": {}}, {"dispatch": dispatch}]}


def smoke(backend: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    with mcr.init(config(backend)) as comm:
        for size in (2, 5000, 100_000):
            x = torch.arange(size, dtype=torch.float32) + comm.rank
            comm.all_reduce(x)
            assert x[1] == sum(range(comm.size)) + comm.size
        return {"x": float(x[1])}


KINDS: Final[tuple[Kind, ...]] = tuple(kind for kind in KINDS_OF_ALL if kind not in ("send", "recv", "barrier"))
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)
SIZES: Final = (1, 5, 300, 9_000, 70_000)


def verified(name: str) -> VerifiedChannel:
    """The library of the group of all ranks."""
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
    """Flips a bit in what the steps of a verified operation hand to the library, or get from it.

    The next one after `arm`, in step number `step` of this rank: `sent` before the library has the tensor and
    after its digest was taken, `arrived` when the library has ended.
    """

    def __init__(self, channel: VerifiedChannel) -> None:
        self._poll = channel._library.poll
        self.draw = random.Random(0)
        self.place, self.step, self.done = "", 0, False
        channel._library.poll = self.poll  # type: ignore[method-assign]

    def arm(self, place: str, step: int, draw: random.Random) -> None:
        self.place, self.step, self.draw, self.done = place, step, draw, False

    def _flip(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors and tensors[0].numel():
            flip(tensors[0], self.draw)
            self.done = True

    def poll(self, message: Message) -> Poll:
        mine = self.place if self.step == 0 else ""
        self.step -= 1
        if mine == "sent":
            self._flip(message.inputs)
        poll, outputs = self._poll(message), message.outputs
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


def case(kind: Kind, rank: int, ranks: int, size: int, dtype: torch.dtype, root: int, backend: str) -> Message:
    """An operation of a library, as the pipeline would hand it over."""
    row = collective(kind)
    is_root = rank == root
    uneven = kind in VECTOR
    counts = tuple(size + 3 * each for each in range(ranks)) if uneven else (size,) * ranks
    # all_to_all_v: what goes to a rank depends on that rank alone, so each gets equal parts.
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
    signature = Signature(
        kind, dtype, () if uneven else (size,), None if uneven else max(taken, given, size) * dtype.itemsize, "world",
        ranks, backend=backend, reduce_op="SUM" if row.reduces else None, root=root if row.rooted else None,
        async_op=True,
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


def many_flips(backend: str, seed: int, operations: int, kinds: Sequence[Kind] = KINDS) -> list[Any]:
    """Random operations, most of them with a flipped bit on a random rank.

    They are handed to the library below the engine, whose group would be failed after the first.
    Returns for each: its kind, whether this rank has flipped a bit, and what was raised here.
    """
    torch.set_num_threads(1)
    shared, found = random.Random(seed), []
    with mcr.init(config(backend)) as comm:
        channel, ranks = verified(backend), comm.size
        flipper = Flipper(channel)
        for number in range(operations):
            kind, dtype, size = shared.choice(kinds), shared.choice(DTYPES), shared.choice(SIZES)
            root, victim, step = shared.randrange(ranks), shared.randrange(ranks), shared.choice((0, 0, 1))
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
            except mcr.DataCorrupted as error:
                raised = [error.operation.split()[0], error.source, error.rank, error.library, error.block]
            found.append([kind, str(dtype), size, place, flipper.done, raised])
    return found
