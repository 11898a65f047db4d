"""Algorithm files run by brute force: numbers instead of proofs, in an order drawn at random.

Shares nothing with the package: XML by ElementTree, buffers and their aliases as numpy views, every rule
spelt again. Two tiles run after one another on the same queues with nothing in between.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any
from xml.etree import ElementTree

import numpy as np

TILES = 2


class Wrong(Exception):
    """A run hung, or ended with wrong numbers."""


def check(text: str, *, in_place: bool, seeds: int, slots: int = 2) -> None:
    """Run an algorithm in `seeds` orders; raises `Wrong` if one hangs or ends with wrong numbers."""
    root = ElementTree.fromstring(text)
    for seed in range(seeds):
        _Job(root, in_place, random.Random(seed), slots).run()


class _Memory:
    """Buffers of one rank for one tile; buffers that a call does not give hold garbage."""

    def __init__(self, kind: str, rank: int, ranks: int, chunks: int, root: int, scratch: int, place: bool):
        part = chunks // ranks
        whole_in = kind in ("allreduce", "reducescatter", "alltoall", "broadcast", "reduce", "scatter")
        whole_out = kind in ("allreduce", "allgather", "alltoall", "broadcast", "reduce", "gather")
        self.i = _garbage(chunks if whole_in else part)
        self.o = _garbage(chunks if whole_out else part)
        self.s = _garbage(scratch)
        if place and whole_in and whole_out:
            self.o = self.i
        elif place and whole_in and (kind == "reducescatter" or rank == root):
            self.o = self.i[rank * part : (rank + 1) * part]
        elif place and whole_out and (kind == "allgather" or rank == root):
            self.i = self.o[rank * part : (rank + 1) * part]


def _garbage(size: int) -> Any:
    return np.random.randint(1 << 40, 1 << 50, size)


class _Job:
    def __init__(self, root: ElementTree.Element, in_place: bool, rng: random.Random, slots: int) -> None:
        self.kind = root.attrib["coll"]
        self.ranks = int(root.attrib["ngpus"])
        self.chunks = int(root.attrib["nchunksperloop"])
        self.root = int(root.attrib.get("root", 0))
        self.in_place, self.rng, self.slots = in_place, rng, slots
        # An executor may receive and forward in one action, or in two.
        self.split = rng.random() < 0.5
        gpus = list(root)
        np.random.seed(rng.randrange(1 << 31))
        self.memory = [
            [
                _Memory(
                    self.kind, r, self.ranks, self.chunks, self.root, int(gpu.attrib["s_chunks"]), in_place
                )
                for r, gpu in enumerate(gpus)
            ]
            for _ in range(TILES)
        ]
        self.given = [[memory.i.copy() for memory in tile] for tile in self.memory]
        self.queues: dict[tuple[int, int, int], deque[Any]] = {}
        self.threads = [
            _Thread(rank, number, tb) for rank, gpu in enumerate(gpus) for number, tb in enumerate(gpu)
        ]
        self.by_id = {(thread.rank, thread.number): thread for thread in self.threads}

    def run(self) -> None:
        """Advance thread blocks by random priorities that sometimes change."""
        priority = {id(thread): self.rng.random() for thread in self.threads}
        steady = self.rng.random() < 0.7
        while live := [thread for thread in self.threads if thread.tile < TILES]:
            live.sort(key=lambda thread: priority[id(thread)])
            for thread in live:
                if self.advance(thread):
                    if not steady or self.rng.random() < 0.05:
                        priority[id(thread)] = self.rng.random()
                    break
            else:
                raise Wrong("hangs")
        self.check_results()

    def advance(self, thread: _Thread) -> bool:
        if thread.held is not None:
            return self.push(thread, thread.held)
        step = thread.steps[thread.at]
        depends = int(step["depid"])
        if depends >= 0:
            other = self.by_id[thread.rank, depends]
            if (other.tile, other.at) <= (thread.tile, int(step["deps"])):
                return False
        kind, count = step["type"], int(step["cnt"])
        receives, sends = kind in ("r", "rcs", "rrs", "rrc", "rrcs"), kind in ("s", "rcs", "rrs", "rrcs")
        inbox = self.queue(thread.receive, thread.rank, thread.channel)
        if receives and not inbox:
            return False
        whole = not (self.split and receives)
        if sends and whole and len(self.queue(thread.rank, thread.send, thread.channel)) >= self.slots:
            return False
        received = inbox.popleft() if receives else None
        if received is not None and received.size != count:
            raise Wrong("a message of another length")
        data = self.compute(self.memory[thread.tile][thread.rank], step, received)
        if sends:
            thread.held = data
            if whole:
                self.push(thread, data)
        else:
            thread.next()
        return True

    def compute(self, memory: _Memory, step: dict[str, str], data: Any) -> Any:
        """Do a step on memory; return the data that it may send."""
        kind, count = step["type"], int(step["cnt"])
        source = slice(int(step["srcoff"]), int(step["srcoff"]) + count)
        target = slice(int(step["dstoff"]), int(step["dstoff"]) + count)
        if kind in ("s", "cpy", "re"):
            data = getattr(memory, step["srcbuf"])[source].copy()
        elif kind in ("rrs", "rrc", "rrcs"):
            data = data + getattr(memory, step["srcbuf"])[source]
        if kind in ("r", "rcs", "rrc", "rrcs", "cpy"):
            getattr(memory, step["dstbuf"])[target] = data
        elif kind == "re":
            getattr(memory, step["dstbuf"])[target] += data
        return data

    def queue(self, source: int, target: int, channel: int) -> deque[Any]:
        return self.queues.setdefault((source, target, channel), deque())

    def push(self, thread: _Thread, data: Any) -> bool:
        queue = self.queue(thread.rank, thread.send, thread.channel)
        if len(queue) >= self.slots:
            return False
        queue.append(data)
        thread.held = None
        thread.next()
        return True

    def check_results(self) -> None:
        if any(self.queues.values()):
            raise Wrong("a message is left")
        for memory, given in zip(self.memory, self.given, strict=True):
            for rank in range(self.ranks):
                expected = self.expected(rank, given)
                if expected is not None and not np.array_equal(memory[rank].o, expected):
                    raise Wrong(f"rank {rank} ends with wrong numbers")
                if not self.in_place and not np.array_equal(memory[rank].i, given[rank]):
                    raise Wrong(f"rank {rank} wrote its input")

    def expected(self, rank: int, given: list[Any]) -> Any:
        part = self.chunks // self.ranks
        mine = slice(rank * part, (rank + 1) * part)
        if self.kind in ("reduce", "gather") and rank != self.root:
            return given[rank] if self.kind == "reduce" and self.in_place else None
        if self.kind in ("allreduce", "reduce"):
            return np.sum(given, axis=0)
        if self.kind == "reducescatter":
            return np.sum(given, axis=0)[mine]
        if self.kind in ("allgather", "gather"):
            return np.concatenate(given)
        if self.kind == "alltoall":
            return np.concatenate([each[mine] for each in given])
        return given[self.root] if self.kind == "broadcast" else given[self.root][mine]


class _Thread:
    def __init__(self, rank: int, number: int, tb: ElementTree.Element) -> None:
        self.rank, self.number = rank, number
        self.send, self.receive = int(tb.attrib["send"]), int(tb.attrib["recv"])
        self.channel = int(tb.attrib["chan"])
        self.steps = [step.attrib for step in tb]
        self.tile = 0 if self.steps else TILES
        self.at = 0
        self.held: Any = None

    def next(self) -> None:
        self.at += 1
        if self.at == len(self.steps):
            self.tile, self.at = self.tile + 1, 0
