"""Persistent operations: bound to their tensors once and run many times."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from mcr_plus.communicator.calls import BUILDERS, CallOptions
from mcr_plus.communicator.fast_calls import native_run
from mcr_plus.communicator.tensors import as_tensor, is_on_device, is_plain
from mcr_plus.core.message import Message
from mcr_plus.core.work import Work
from mcr_plus.errors import InvalidArgument, unknown

if TYPE_CHECKING:
    from mcr_plus.communicator.arrays import Loan
    from mcr_plus.communicator.calls import Call
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.communicator.prepared import Prepared

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

KINDS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
)


class PersistentOp(Protocol):
    """The result of `mcr.persistent`."""

    def __call__(self) -> None:
        """Run the operation; return when its result may be used."""
        ...

    def start(self) -> Work:
        """Start the operation. Its `Work` must be complete before the next start or call."""
        ...


def check_persistent(kind: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise `InvalidArgument` for an operation without a persistent form, or a non-contiguous tensor."""
    if kind not in KINDS:
        raise InvalidArgument(f"kind: {unknown('persistent operation', kind, KINDS)}")
    if "async_op" in options:
        raise InvalidArgument("async_op: call op() for a synchronous run, op.start() for an asynchronous one")
    for index, tensor in enumerate(tensors):
        if hasattr(tensor, "__dlpack__") and not is_plain(as_tensor(tensor, f"tensors[{index}]")):
            raise InvalidArgument(f"tensors[{index}]: a persistent operation needs contiguous tensors")


class PersistentBinding:
    """Kind, arguments and options of a persistent operation, to bind it again for another group.

    The program holds a `partial`, so that a call costs no extra Python frame. After the world has changed,
    the same `partial` is bound to the group's successor.
    """

    def __init__(self, kind: str, options: dict[str, Any], ranks: int) -> None:
        self._kind, self._options = kind, options
        self._ranks = ranks  # number of ranks that the tensors were made for
        self._arguments: dict[str, Any] = {}
        self._root: str | None = None  # name of the root argument
        self._lost: int | None = None  # rank of the root, if it has been lost
        self._stub: Any = None
        self._loan: Loan | None = None  # device arrays of another library
        self._memory: list[Any] = []

    @classmethod
    def of(
        cls, group: Communicator, kind: str, tensors: tuple[Any, ...], options: dict[str, Any]
    ) -> PersistentOp:
        """See `Communicator.persistent`."""
        loan = group.opened.arrays.loan(tensors) if any(map(is_on_device, tensors)) else None
        if loan is not None:
            tensors = loan.arguments
        check_persistent(kind, tensors, options)
        own = {name: options.pop(name) for name in options.keys() - CallOptions.__annotations__.keys()}
        self, builder = cls(kind, options, group.size), BUILDERS[kind]
        self._memory = [_pinned(as_tensor(each, kind)) for each in tensors if hasattr(each, "__dlpack__")]
        self._loan = loan
        operation, start = self._bound(group, builder(group.opened.group, *tensors, **own))
        arguments = inspect.signature(builder).bind(group, *tensors, **own).arguments
        self._arguments = {name: value for name, value in arguments.items() if name != "group"}
        self._root = next((name for name in ("src", "dst") if name in arguments), None)
        self._become(operation, operation, start, group)
        group.persistents.add(operation)
        return cast("PersistentOp", operation)

    def _bound(self, group: Communicator, call: Call) -> tuple[Any, Any]:
        options = cast("CallOptions", self._options)
        now, later = (group.prepared(call, async_op, options) for async_op in (False, True))
        run, start = _bound(now, later, call.inputs)
        if self._loan is None:
            return run, start
        again = partial(group.opened.arrays.again, self._loan)
        return partial(_start_and_wait, again, partial(_start_again, now, call.inputs)), partial(again, start)

    def _become(self, operation: Any, run: Any, start: Any, group: object) -> None:
        """Change a `partial` in place, by `__setstate__`, which unpickling uses."""
        kept = {"start": start, "group": group, "origin": self}
        operation.__setstate__((run.func, run.args, run.keywords, kept))

    def move(self, operation: Any, group: Communicator, ranks: Mapping[int, int]) -> None:
        """Have the next call bind the operation to this group. `move` is local, the next call is collective.

        `ranks`: rank in the old world → rank in the new world, for each surviving rank.
        """
        if self._root is not None and self._lost is None:
            root = int(self._arguments[self._root])
            self._lost = None if root in ranks else root
            self._arguments[self._root] = ranks.get(root, -1)
        alive = weakref.ref(operation)

        def bound() -> Any:
            if self._lost is not None:
                raise InvalidArgument(
                    f"persistent {self._kind}: its root, rank {self._lost} of an earlier world, has been "
                    "lost; make the operation again, with another root"
                )
            try:
                run, start = self._bound(group, BUILDERS[self._kind](group.opened.group, **self._arguments))
            except InvalidArgument as error:
                raise InvalidArgument(
                    f"persistent {self._kind}: its tensors were made for {self._ranks} ranks and do not fit "
                    f"the {group.size} that are left ({error}); make the operation again, with other tensors"
                ) from error
            operation = alive()
            self._become(operation, run, start, group)
            return operation

        self._stub = lambda: bound()()  # keeps the stub alive: `_become` replaces it while it runs
        self._become(operation, partial(self._stub), lambda: bound().start(), group)
        group.persistents.add(operation)


def _pinned(tensor: torch.Tensor) -> Any:
    """Return an object that pins the memory of a CPU tensor, because libraries hold its address.

    `tensor.resize_` raises from now on; after `tensor.data = other` the old memory stays in use.
    """
    if not tensor.is_cpu:
        return None
    # Not a view of the tensor, whose strides may be any.
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).numpy()


def _bound(now: Prepared, later: Prepared, given: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Return functions that run and start an operation, on a persistent request if its chain is one call.

    `now` is the synchronous call, `later` the asynchronous one; neither has been issued. `given`: its inputs,
    of which each of them has a copy where they overlap the outputs.
    """
    copies = [
        [
            (copy, tensor)
            for copy, tensor in zip(ready.message.inputs, given, strict=True)
            if copy is not tensor
        ]
        for ready in (now, later)
    ]
    operation = now.issue.operation
    native = None if operation is None else operation.persistent(now.message)
    issue, signature = later.issue, later.message.signature
    run: Any = partial(now.issue.run, now.message)
    if operation is not None and not operation.inline:  # its handle drops the message's tensors
        run = partial(
            _run_again, now.issue.run, now.message.with_tensors(now.message.inputs, now.message.outputs)
        )
    if (compiled := native_run(now)) is not None:
        tensors = tuple(dict.fromkeys((*now.message.outputs, *now.message.inputs)))
        compiled.fix(run, tensors, tuple(tensor.data_ptr() for tensor in tensors))
        run = partial(compiled)
    if native is not None:
        issue, bare = native
        run, signature = partial(bare), now.message.signature
    # Kept alive by the closure: the library's request refers to these tensors, and handles drop theirs.
    inputs, outputs, extras = later.message.inputs, later.message.outputs, later.message.extras
    latest: list[Work] = []

    def start() -> Work:
        if latest and not latest[0].is_completed():
            raise InvalidArgument("the persistent operation is still pending; wait for its Work first")
        _copy(copies[native is None])  # a request reads the tensors of `now`
        latest[:] = [issue.start(Message(signature, inputs, outputs, **extras))]
        return latest[0]

    return (partial(_copy_and_run, copies[0], run) if copies[0] else run), start


def _copies(message: Message, given: Sequence[torch.Tensor]) -> Pairs:
    """Return the message's inputs that are copies, each with its original."""
    pairs = zip(message.inputs, given, strict=True)
    return [(copy, tensor) for copy, tensor in pairs if copy is not tensor]


def _copy(pairs: Pairs) -> None:
    for copy, tensor in pairs:
        copy.copy_(tensor)


def _copy_and_run(pairs: Pairs, run: Callable[[], None]) -> None:
    _copy(pairs)
    run()


def _start_and_wait(again: Callable[[Callable[[], Work]], Work], start: Callable[[], Work]) -> None:
    again(start).wait()


def _start_again(ready: Prepared, given: Sequence[torch.Tensor]) -> Work:
    message = ready.message
    _copy(_copies(message, given))
    return ready.issue.start(message.with_tensors(message.inputs, message.outputs))


def _run_again(run: Callable[[Message], None], message: Message) -> None:
    run(message.with_tensors(message.inputs, message.outputs))
