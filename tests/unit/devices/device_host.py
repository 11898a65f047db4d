"""Objects that simulated ranks share besides NCCL: a library for host memory, a board, a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from unit.devices.device_model import Shared
from unit.devices.device_tensors import ranges

from mcr_plus.backends.base import NATIVE, Backend, Channel, Poll, Preference, Start, Support
from mcr_plus.board.base import GroupBoard, PeerStatus
from mcr_plus.core.c10d import HashStore
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import BackendError

if TYPE_CHECKING:
    from unit.devices.device_ranks import Job
    from unit.devices.fake_nccl import Simulator


@dataclass
class HostOperation:
    """An operation of the host library with the messages of each rank."""

    messages: dict[int, Message] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)  # the library's thread on a rank, for the detector
    entry: Any = None
    done: bool = False


class HostLibrary(Backend):
    """A library that reads and writes host memory at any time between an operation's start and its end."""

    name = "gloo"
    on_stream = False
    spins = 1
    host_driven = True
    preference = Preference(cpu=0, cuda=2)

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self.rank = job, rank

    @classmethod
    def availability(cls) -> Any:
        raise NotImplementedError

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        return NATIVE

    def open(self, group: Group) -> Channel:
        return HostChannel(self._job, group)

    def progress(self) -> None:
        pass

    def close(self, clean: bool) -> None:
        pass


class HostChannel(Channel):
    def __init__(self, job: Job, group: Group) -> None:
        self._job, self._group, self._count = job, group, 0
        self._shared = Shared(("operations", group.name), frozenset(group.ranks))
        self._sent: dict[Any, int] = {}

    def close(self) -> None:
        pass

    def bind(self, signature: Signature) -> Start:
        def start(message: Message) -> Poll:
            job, me, group = self._job, self._group.rank, self._group
            if self._count == job.fails - 1:
                raise BackendError("the host library has failed")
            machine = job.simulator
            if signature.is_p2p:
                ends = (me, message.peer) if signature.kind == "send" else (message.peer, me)
                path = ends, message.match_tag
                self._sent[path] = self._sent.get(path, 0) + 1
                key: Any = (group.name, path, self._sent[path])
                needed = {each for each in ends if each is not None}
            else:
                self._count += 1
                key, needed = (group.name, self._count), set(range(group.size))
            operation = job.operations.setdefault(key, HostOperation())
            operation.messages[me] = message
            user = operation.users[me] = machine.detector.new("host library")
            reads = [each for t in message.inputs for each in ranges(t)]
            writes = [each for t in message.outputs for each in ranges(t)]
            machine.detector.order(user, machine.host())
            machine.detector.launch(user, f"{signature.kind} begins", reads, writes)
            machine.note(("begins", key))
            machine.share(self._shared)

            def poll() -> bool:
                if operation.messages.keys() < needed:
                    machine.look(self._shared)
                    return False
                if not machine.behind((key, 1)):
                    if not machine.decide(key):
                        return False
                    machine.reached((key, 1))
                if not operation.done:
                    for rank, each in operation.messages.items():
                        inside = [r for t in each.inputs for r in ranges(t)]
                        outside = [r for t in each.outputs for r in ranges(t)]
                        machine.detector.launch(operation.users[rank], signature.kind, inside, outside)
                    move(signature, [operation.messages[rank] for rank in sorted(needed)])
                    operation.done = True
                machine.detector.order(machine.host(), operation.users[me])
                return True

            return poll

        return start


def move(signature: Signature, messages: Sequence[Message]) -> None:
    """Run one operation of the host library, given all ranks' messages in the order of ranks."""
    kind, size, root = signature.kind.removesuffix("_v"), len(messages), signature.root or 0
    given = [message.inputs[0].reshape(-1).clone() for message in messages if message.inputs]

    def parts(rank: int, values: torch.Tensor) -> Sequence[torch.Tensor]:
        counts = list(messages[rank].input_counts or [values.numel() // size] * size)
        return torch.split(values, counts)

    def result(rank: int) -> torch.Tensor:
        if kind in ("all_reduce", "reduce", "reduce_scatter"):
            stacked = torch.stack(given)
            total = stacked.amax(0) if signature.reduce_op == "MAX" else stacked.sum(0)
            total = (total / size if signature.reduce_op == "AVG" else total).to(stacked.dtype)
            return parts(rank, total)[rank] if kind == "reduce_scatter" else total
        if kind in ("all_gather", "gather"):
            return torch.cat(given)
        if kind == "all_to_all":
            return torch.cat([parts(sender, values)[rank] for sender, values in enumerate(given)])
        if kind == "scatter":
            return parts(root, given[0])[rank]
        assert kind in ("broadcast", "send", "recv"), kind
        return given[root if kind == "broadcast" and len(given) == size else 0]

    for rank, message in enumerate(messages):
        if message.outputs and (kind != "reduce" or rank == root):
            message.outputs[0].view(-1).copy_(result(rank))


class ModelBoard(GroupBoard):
    """A board that ranks share in memory."""

    def __init__(self, job: Job, group: Group) -> None:
        super().__init__()
        self._job, self._rank, self._size, self._name = job, group.rank, group.size, group.name
        self._posted: dict[tuple[int, int], int] = job.boards.setdefault(group.name, {})
        self._shared = Shared(("board", group.name), frozenset(group.ranks))

    def post(self, sequence: int, digest: int, text: bytes) -> None:
        self._posted[self._rank, sequence] = digest
        self._job.simulator.note(("posts", sequence, self._name))
        self._job.simulator.share(self._shared)

    def read(self, rank: int, sequence: int) -> PeerStatus:
        return PeerStatus(sequence, self._posted.get((rank, sequence)))

    def all_match(self, sequence: int, digest: int) -> bool:
        machine, place = self._job.simulator, (self._shared.name, sequence + 1)
        if not all(self._posted.get((rank, sequence)) == digest for rank in range(self._size)):
            machine.look(self._shared)
            return False
        if not machine.behind(place):  # posts may be seen late
            if not machine.decide(place):
                return False
            machine.reached(place)
        return True


class ModelStore(HashStore):
    """A store; its changes let paused ranks continue."""

    _shared = Shared("store")

    def __init__(self, machine: Simulator) -> None:
        super().__init__()
        self._machine = machine

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        self._machine.note(("sets", key))
        self._machine.touch(self._shared)
        self._machine.share(self._shared)

    def check(self, keys: list[str]) -> bool:
        self._machine.look(self._shared)
        return super().check(keys)

    def get(self, key: str) -> bytes:
        self._machine.look(self._shared)
        return super().get(key)
