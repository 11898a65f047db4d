"""Backend for groups of one rank: every collective is a copy."""

from __future__ import annotations

from collections import defaultdict, deque

import torch

from mcr_plus.backends.base import (
    NATIVE,
    Availability,
    Backend,
    Channel,
    Poll,
    ReceivePoll,
    Start,
    Support,
    done,
)
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import Unsupported
from mcr_plus.rendezvous.world import World


def _copy(message: Message) -> Poll:
    for source, target in zip(message.inputs, message.outputs, strict=True):
        if target is not source and target.data_ptr() != source.data_ptr():
            target.copy_(source.view(target.shape))
    return done


def _nothing(message: Message) -> Poll:  # noqa: ARG001 - a Start
    return done


class _MatchingQueue:
    """Messages of a rank to itself, matched in order by tag."""

    def __init__(self) -> None:
        self._sent: dict[int, deque[torch.Tensor]] = defaultdict(deque)

    def send(self, message: Message) -> Poll:
        self._sent[message.match_tag].append(message.inputs[0].clone())
        return done

    def receive(self, message: Message) -> Poll:
        return _LocalReceive(self._sent[message.match_tag], message.outputs[0])


class _LocalReceive(ReceivePoll):
    """Poll of a receive."""

    source = 0

    def __init__(self, sent: deque[torch.Tensor], target: torch.Tensor) -> None:
        self._sent = sent
        self._target = target

    def __call__(self) -> bool:
        if not self._sent:
            return False
        value, target = self._sent.popleft(), self._target
        if value.dtype != target.dtype or value.numel() != target.numel():
            raise ValueError(
                f"received {value.numel()} × {value.dtype}, expected {target.numel()} × {target.dtype}"
            )
        target.copy_(value.view(target.shape))
        return True


class _LocalChannel(Channel):
    def __init__(self) -> None:
        self._messages = _MatchingQueue()

    def bind(self, signature: Signature) -> Start:
        if signature.kind == "send":
            return self._messages.send
        if signature.kind == "recv":
            return self._messages.receive
        return _nothing if signature.kind == "barrier" else _copy

    def close(self) -> None:
        pass


class LocalBackend(Backend):
    """Groups of one rank, for CPU and CUDA tensors (copies on the current stream)."""

    name = "local"
    on_stream = False
    has_algorithms = False
    spins = 1

    def __init__(self, world: World) -> None:
        pass

    @classmethod
    def availability(cls) -> Availability:
        """Report the backend as available everywhere."""
        return Availability(True, torch.__version__)

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        """Support all operations, in groups of one rank."""
        if signature.algorithm is not None:
            return Support("no", f"algorithm '{signature.algorithm}'; local has none to choose from")
        if signature.ranks != 1:
            return Support("no", f"groups of {signature.ranks} ranks; local is for groups of one")
        return NATIVE

    def open(self, group: Group) -> Channel:
        """See `Backend.open`."""
        if group.size != 1:
            raise Unsupported(f"backend local on a group of {group.size} ranks; it is for groups of one")
        return _LocalChannel()

    def progress(self) -> None:
        """Do nothing: every operation is complete at once."""

    def close(self, clean: bool) -> None:
        """Do nothing."""
