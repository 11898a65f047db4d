"""Copies of each rank's shards on another rank, its buddy, so that shards without replicas survive a death.

Every few steps a rank copies its shards between two steps, and a thread sends the changes since the copy
before (`kernels.delta`, lossless) on a connection of its own, beside the computation. The buddy is a rank of
another host if all ranks have one at the same distance, else the next rank.

A copy replaces the one before only once all ranks have said that they received theirs. So at any moment there
is a step of which every living rank has its own shards, and of every dead rank the buddy has them.

Memory: a rank keeps its own shards and those of another one twice while a copy travels, else once. While it
travels, the changes are in memory on both ranks, too; the first copy is as large as the shards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

import torch

from mcr_plus.core.deadline import Deadline, until
from mcr_plus.elasticity import state_stream
from mcr_plus.elasticity.state_stream import accepted
from mcr_plus.errors import BackendError, PeerLost, phrase_ranks
from mcr_plus.job.runtime import Runtime
from mcr_plus.kernels import delta
from mcr_plus.kernels.digest import digest
from mcr_plus.rendezvous import stream as links
from mcr_plus.rendezvous.network import host_address
from mcr_plus.training.fsdp_state import Offer, RankShards, ShardPiece

_LOSS_SHOWS: Final = 5.0  # s after the end of a connection in which the death that ended it shows
_NAP: Final = 0.002
_LOOPBACK: Final = "127.0.0.1"
_Values = dict[ShardPiece, torch.Tensor]


class Buddies:
    """The copies that a rank sends and receives in one world; making it is collective."""

    def __init__(self, runtime: Runtime) -> None:
        comm, hosts = runtime.communicator, runtime.world.hosts
        size = comm.size
        alone = [d for d in range(1, size) if all(hosts[r] != hosts[r - d] for r in range(size))]
        self._runtime = runtime
        self.own: dict[int, Offer] = {}  # by step; in CPU memory
        self.theirs: dict[int, Offer] = {}
        self._problem = ""
        self._closed = False
        self._waiting: SimpleQueue[Offer | None] = SimpleQueue()
        self._listener = links.listen(_LOOPBACK if len(set(hosts)) == 1 else host_address())
        places = comm.all_gather_object(self._listener.getsockname()[:2], tag="elastic")
        self._ward: tuple[str, int] = places[(comm.rank - next(iter(alone), 1)) % size]
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=f"mcr_plus-buddy-{name}", daemon=True)
            for name, each in (("sends", self._send_all), ("receives", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def copy(self, shards: RankShards, tensors: list[torch.Tensor]) -> None:
        """Copy this rank's shards, and begin to send the copy; called between two steps."""
        made = shards, [each.detach().to("cpu", copy=True).contiguous() for each in tensors]
        self.own[shards.step] = made
        self._waiting.put(made)

    @property
    def received(self) -> int:
        """The last step of which the other rank's copy is complete here; -1 if there is none."""
        return max(list(self.theirs), default=-1)  # a list: a thread adds to it

    def keep_from(self, step: int) -> None:
        """Drop the copies before a step: all ranks have received the copies of that step."""
        for copies in (self.own, self.theirs):
            for each in [each for each in list(copies) if each < step]:
                del copies[each]

    def wait(self, step: int) -> None:
        """Wait until the other rank's copy of a step is here, or a rank is lost.

        Raises `BackendError` if a connection has failed, and no rank is lost.
        """
        runtime, limit = self._runtime, self._runtime.world.timeout
        until(lambda: self.received >= step or self._problem or runtime.lost_ranks(), Deadline(limit), _NAP)
        if self.received >= step:
            return
        if lost := until(runtime.lost_ranks, Deadline(_LOSS_SHOWS), _NAP):
            raise PeerLost(f"elastic: {phrase_ranks(list(lost))} lost", list(lost))
        problem = self._problem or f"nothing has come within {limit:g} s"
        raise BackendError(f"elastic: copies of shards do not reach this rank, their buddy: {problem}")

    def offers(self) -> list[Offer]:
        """Return all copies here."""
        return [*self.own.values(), *self.theirs.values()]

    def close(self) -> None:
        """End the connections; the copies stay."""
        self._closed = True
        self._waiting.put(None)
        for thread in self._threads:
            thread.join(5.0)
        self._listener.close()

    # -- the threads ------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # for example a lost connection, or MemoryError
            self._problem = self._problem or f"{type(error).__name__}: {error}"

    def _send_all(self) -> None:
        world = self._runtime.world
        link = accepted(self._listener, world.secret, "buddy", lambda: self._closed)
        base: _Values = {}
        try:
            while (made := self._waiting.get()) is not None:
                shards, values = made
                current = dict(zip(shards.pieces, values, strict=True))
                wires = [encoded(each, base.get(piece), shards.step + 1) for piece, each in current.items()]
                state = {"shards": shards, "wires": wires}
                state_stream.send(link, state_stream.referring(state_stream.COPY, state))
                base = current
        finally:
            link.close()

    def _receive_all(self) -> None:
        world = self._runtime.world
        link = links.connect(self._ward, world.secret, world.rank, lambda: self._closed, tries=3)
        base: _Values = {}
        try:
            while not self._closed:
                _, state = state_stream.receive(link)
                shards: RankShards = state["shards"]
                pairs = zip(shards.pieces, state["wires"], strict=True)
                base = {piece: decoded(wire, piece, base.get(piece)) for piece, wire in pairs}
                self.theirs[shards.step] = shards, list(base.values())
        finally:
            link.close()


def encoded(values: torch.Tensor, base: torch.Tensor | None, version: int) -> torch.Tensor:
    """Return a payload of `kernels.delta`, flat uint8, that turns `base` (None: nothing) into `values`."""
    new = _flat(values)
    wire = torch.empty(delta.most_nbytes(new.numel(), new.element_size()), dtype=torch.uint8, device="cpu")
    if base is None:
        used = delta.encode_anchor(new, wire, version)
    else:
        old = _flat(base)
        used = delta.encode(new, old, wire, (version - 1, version), digest(old))
    return wire[:used].clone()  # without the rest, until all pieces are sent


def decoded(wire: torch.Tensor, piece: ShardPiece, base: torch.Tensor | None) -> torch.Tensor:
    """Return the values of a payload; `base` stays. Raises `BackendError` if the payload is damaged."""
    new = torch.zeros(piece.shape, dtype=piece.dtype, device="cpu") if base is None else base.clone()
    flat = _flat(new)
    head = delta.header_of(wire)
    if not head.is_anchor and head.base_digest != digest(flat):
        raise BackendError(f"a copy of '{piece.name[1]}' is based on other values than the ones held here")
    delta.apply(wire, flat)
    return new


def _flat(values: torch.Tensor) -> torch.Tensor:
    flat = values.reshape(-1)
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat
