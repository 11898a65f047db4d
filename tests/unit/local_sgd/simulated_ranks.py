"""Ranks that are threads, with as much of a communicator as `mcr.local` needs: for its arithmetic alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from mcr_plus.core.group import Group


class _Work:
    def __init__(self, finish: Callable[[], None], nbytes: int) -> None:
        self._finish: Callable[[], None] | None = finish
        self.info = SimpleNamespace(bytes=nbytes, wire_bytes=nbytes)

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
        self._finish = None


def fill(output: torch.Tensor, collect: Callable[[], list[Any]]) -> None:
    output.copy_(torch.cat(collect()))


class _Exchange:
    """The posts of all ranks, by the number of the operation."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.posted: dict[int, dict[int, tuple[str, Any]]] = {}
        self.changed = threading.Condition()
        self.after: _Exchange | None = None

    def without(self, size: int) -> _Exchange:
        """Return the exchange of the world after this one."""
        with self.changed:
            self.after = self.after or _Exchange(size)
            return self.after

    def post(self, number: int, rank: int, kind: str, value: Any) -> None:
        with self.changed:
            self.posted.setdefault(number, {})[rank] = (kind, value)
            self.changed.notify_all()

    def collect(self, number: int) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.posted[number]) == self.size, timeout=20)
            found = self.posted[number]
        kinds = {kind for kind, _ in found.values()}
        assert len(kinds) == 1, f"operation {number}: ranks differ, {kinds}"
        return [found[rank][1] for rank in range(self.size)]


class Simulated:
    """One rank's communicator. `spoil`: changes this rank's mean of a pseudo-gradient."""

    name = "world"

    def __init__(self, exchange: _Exchange, rank: int) -> None:
        self._exchange, self.rank, self.size = exchange, rank, exchange.size
        self.ranks = tuple(range(self.size))
        self.state = SimpleNamespace(revoked=False)
        self.config = SimpleNamespace(options=lambda _: None)
        self.spoil: Callable[[torch.Tensor], object] | None = None
        self.opened = SimpleNamespace(numbers={}, all=(), group=Group(self.name, self.ranks, rank))
        self.succession = SimpleNamespace(successor=None)
        self._number = 0

    def successor(self) -> Simulated:
        return self.succession.successor or self

    def lose(self, rank: int) -> None:
        """Continue without a rank, like `mcr.shrink`; all other ranks make the same call."""
        self.state.revoked = True
        left = [each for each in self.ranks if each != rank]
        exchange = self._exchange.without(len(left))
        self.succession.successor = after = Simulated(exchange, left.index(self.rank))
        after.opened.numbers.update(self.opened.numbers)

    def _start(self, kind: str, value: Any) -> Callable[[], list[Any]]:
        number, self._number = self._number, self._number + 1
        self._exchange.post(number, self.rank, kind, value)
        return lambda: self._exchange.collect(number)

    def all_gather_object(self, obj: Any, *, tag: str | None = None) -> list[Any]:
        return self._start("objects", obj)()

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, **_: Any) -> _Work:
        collect = self._start("gather", input.clone())
        return _Work(lambda: fill(output, collect), output.nbytes)

    def send_bucket(self, values: torch.Tensor, op: str, *, members: int, **options: Any) -> _Work:
        collect = self._start(options["tag"], values.clone())

        def finish() -> None:
            values.copy_(torch.stack(collect()).mean(0))
            if self.spoil is not None:
                self.spoil(values)

        return _Work(finish, values.nbytes)

    def all_reduce(self, tensor: torch.Tensor, op: str, **_: Any) -> None:
        assert op == "AVG"
        tensor.copy_(torch.stack(self._start("all_reduce", tensor.clone())()).mean(0))

    def broadcast(self, tensor: torch.Tensor, src: int, **_: Any) -> None:
        tensor.copy_(self._start("broadcast", tensor.clone())()[src])

    def progress(self) -> None:
        """Drive nothing."""


def on_simulated_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Return the results of `function(communicator, *arguments)` by rank; raise the first error."""
    exchange = _Exchange(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        started = [pool.submit(function, Simulated(exchange, rank), *arguments) for rank in range(ranks)]
        return [each.result(timeout=60) for each in started]
