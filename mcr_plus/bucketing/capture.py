"""Capture training steps of a running job by hooks.

Hooks of the model and the optimizer mark when modules need their parameters, gradients become ready and steps
end; the communicator reports the program's operations and waits. Marks are times of the host, or events on
the current stream if the parameters are on a device. At the end all ranks exchange their marks and construct
the same `CapturedStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch

from mcr_plus.board.base import Failure
from mcr_plus.bucketing import MEASURED
from mcr_plus.bucketing.costs import OVERHEAD
from mcr_plus.bucketing.step import (
    CapturedStep,
    IssueEvent,
    Mark,
    NeedEvent,
    RankStep,
    ReadyEvent,
    WaitEvent,
    model_hash,
)
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import dtype_name
from mcr_plus.core.message import Message
from mcr_plus.core.streams import Streams, device_types
from mcr_plus.core.units import whole_number
from mcr_plus.core.work import Info, Work
from mcr_plus.engine.hook import OperationHook
from mcr_plus.errors import InvalidArgument
from mcr_plus.job.init import current
from mcr_plus.pipeline.stage import Issue as BoundIssue

_ATTACHED: Final = "capture"
LEAST: Final = 3
"""Smallest number of captured steps; durations are medians over the steps."""


class _Seen(NamedTuple):
    """A recorded event, with times on the capture's clock. `number`: index of the operation, or -1."""

    event: ReadyEvent | NeedEvent | None  # None: an operation was issued, or waited for
    computed: str
    begin: Any
    end: Any
    number: int = -1
    is_wait: bool = False


class _CapturedOperation:
    """An operation of the program, without references to tensors. `end`: clock time of completion."""

    __slots__ = ("begin", "end", "gradients", "group", "match_tag", "nbytes", "peer", "signature")

    def __init__(self, group: Group, message: Message, begin: Any, gradients: tuple[str, ...]) -> None:
        self.group = group
        self.signature = message.signature
        self.nbytes = message.signature.nbytes
        if self.nbytes is None:
            self.nbytes = message.own_bytes()
        self.peer = None if message.peer is None else group.ranks[message.peer]
        self.match_tag = message.match_tag
        self.begin = begin
        self.end: Any = None
        self.gradients = gradients


def _on_stream(device: torch.device) -> Any:
    """Return an event recorded on the current stream of a device."""
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


class Capture(OperationHook):
    """Result of `mcr.capture`: the captured `CapturedStep`, available after the block.

    `save(path)` writes the step as JSON; `step` is the `CapturedStep`. Attributes of the step are also
    available on this object.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, hold: bool
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise InvalidArgument(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidArgument(
                f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        if (count := whole_number(steps)) is None or count < LEAST:
            raise InvalidArgument(f"steps: {steps!r}; expected a number from {LEAST}, to take medians")
        self._model = model
        self._optimizer = optimizer
        self._steps = count
        self._hold = hold
        self._step: CapturedStep | None = None
        self._names = {id(param): name for name, param in model.named_parameters() if param.requires_grad}
        self._events = {  # built in advance: hooks run inside the measured time
            name: (
                ReadyEvent(name, param.nbytes, f"{dtype_name(param.dtype)} {param.device.type}"),
                name.rpartition(".")[0] or "model",
            )
            for name, param in model.named_parameters()
        }
        kinds = device_types()[1:]
        devices = (param.device for param in model.parameters() if param.device.type in kinds)
        self._device = next(devices, None)
        self._now: Callable[[], Any] = (
            perf_counter if self._device is None else partial(_on_stream, self._device)
        )
        self._active = False
        self._hooks: list[Any] = []
        self._comm: Communicator | None = None
        # State of the current step:
        self._began: Any = None
        self._doing = "start"
        self._seen: list[_Seen] = []
        self._operations: list[_CapturedOperation] = []
        self._needed: set[str] = set()
        self._tasks: dict[int, int] = {}  # parameter → backward pass in which its gradient became ready
        self._carried: tuple[str, ...] = ()
        # Completed steps: begin, end, recorded events, operations, and the name of the last computation.
        self._done: list[tuple[Any, Any, list[_Seen], list[_CapturedOperation], str]] = []

    # -- the block --------------------------------------------------------------------------------

    def __enter__(self) -> Capture:
        runtime = current()
        if _ATTACHED in runtime.attached:
            raise InvalidArgument("mcr.capture: another capture is running; expected one at a time")
        self._comm = comm = runtime.communicator.branch()
        asked = comm.all_gather_object((self._steps, self._hold), tag="capture")
        for rank, other in enumerate(asked):
            if other != asked[0]:
                comm.close()
                raise InvalidArgument(
                    f"mcr.capture: rank {rank} has steps={other[0]}, hold={other[1]}, and rank 0 "
                    f"steps={asked[0][0]}, hold={asked[0][1]}; expected the same on all ranks"
                )
        runtime.attached[_ATTACHED] = self
        self._active = True
        self._add_hooks()
        runtime.add_hook(self)
        self._began = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        runtime = current()
        runtime.attached.pop(_ATTACHED, None)
        comm, self._comm = self._comm, None
        assert comm is not None
        if kind is not None:
            if not comm.closed:  # peers raise an error with this rank's reason at the end of their block
                what = f"its block of mcr.capture has ended with {kind.__name__}: {error}"
                comm.state.board.mark_failed(Failure(0, what))
            runtime.leave(comm, clean=False)
            return
        with comm:
            steps = self._of_this_rank()
            own = model_hash(
                (name, param.shape, dtype_name(param.dtype))
                for name, param in self._model.named_parameters()
                if param.requires_grad and not getattr(param, "mcr_skip", False)
            )
            gathered: list[tuple[list[RankStep], str]] = comm.all_gather_object((steps, own), tag="capture")
        hashes = list(dict.fromkeys(of_rank for _, of_rank in gathered))
        whole = hashes[0] if len(hashes) == 1 else model_hash((each, (), "") for each in hashes)
        try:
            merged = CapturedStep.merged(
                {rank: seen for rank, (seen, _) in enumerate(gathered)},
                nodes=len(set(comm.hosts)), model=whole, by_caller=bool(comm.polled_by_caller),
                least=LEAST,
            )  # fmt: skip
        except InvalidArgument as wrong:
            raise InvalidArgument(f"mcr.capture: {wrong}") from None
        self._step = replace(merged, measured=runtime.attached.get(MEASURED, {}))

    def _add_hooks(self) -> None:
        # Hooks inside compiled modules would become part of the graph, and removing them would recompile it.
        compiled = {
            id(part)
            for module in self._model.modules()
            if module._compiled_call_impl is not None
            for part in module.modules()
        }
        for name, module in self._model.named_modules():
            if id(module) not in compiled and next(module.parameters(recurse=False), None) is not None:
                self._hooks.append(module.register_forward_pre_hook(self._needs(name or "model")))
        for param in self._model.parameters():
            if param.requires_grad:
                self._hooks.append(param.register_post_accumulate_grad_hook(self.ready))
        self._hooks.append(self._optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(self._optimizer.register_step_post_hook(self._after_step))

    def _stop(self) -> None:
        """Stop recording. Called by the optimizer's hook, which is removed at the end of the block."""
        if self._active:
            self._active = False
            current().remove_hook(self)
            for hook in self._hooks[:-1]:
                hook.remove()
            self._hooks = self._hooks[-1:]

    # -- hooks ------------------------------------------------------------------------------------

    def _needs(self, name: str) -> Callable[..., None]:
        def need(module: torch.nn.Module, inputs: Any) -> None:  # noqa: ARG001 - a hook
            if torch.compiler.is_compiling():  # recording would break the graph of an outer function
                return
            if self._active:
                if name not in self._needed:
                    self._needed.add(name)
                    now = self._now()
                    self._seen.append(_Seen(NeedEvent(name), self._doing, now, now))
                self._doing = name

        return need

    def _before_step(self, *_: Any) -> None:
        self._doing = "optimizer"

    def _after_step(self, *_: Any) -> None:
        if not self._active:
            return
        now = self._now()
        self._done.append((self._began, now, self._seen, self._operations, self._doing))
        self._seen, self._operations, self._needed, self._doing = [], [], set(), "start"
        self._began = now
        if len(self._done) == self._steps:
            self._stop()

    @property
    def holds(self) -> bool:
        """True if buckets are sent at the end of the pass, see `OperationHook`."""
        return self._active and self._hold

    def ready(self, param: torch.Tensor) -> None:
        """Record a ready gradient, see `OperationHook`. Only the first call counts: a reducer's, if any."""
        name, task = self._names.get(id(param)), torch._C._current_graph_task_id()
        if name is None or not self._active or self._tasks.get(id(param)) == task:
            return
        self._tasks[id(param)] = task
        now = self._now()
        event, module = self._events[name]
        self._seen.append(_Seen(event, module, now, now))
        self._doing = module

    def carries(self, params: Sequence[torch.Tensor]) -> None:
        """Store the gradients of the next operation, see `OperationHook`."""
        self._carried = tuple(self._names[id(param)] for param in params if id(param) in self._names)

    def bound(self, group: Group, issue: BoundIssue) -> BoundIssue:
        """Record the operations of a bound call, see `OperationHook`."""

        def start(message: Message) -> Work:
            if not self._active:
                return issue.start(message)
            operation, number = self._issued(group, message)
            work = issue.start(message)
            work.then(lambda: self._ended(operation))
            self._seen.append(_Seen(None, self._doing, operation.begin, self._now(), number))
            return _WatchedWork(work, self, operation, number)

        def run(message: Message) -> None:
            if not self._active:
                issue.run(message)
                return
            operation, number = self._issued(group, message)
            issue.run(message)
            begin, operation.end = operation.begin, self._now()
            self._seen.append(_Seen(None, self._doing, begin, begin, number))
            self._seen.append(_Seen(None, self._doing, begin, operation.end, number, is_wait=True))

        return BoundIssue(start, run)

    def _issued(self, group: Group, message: Message) -> tuple[_CapturedOperation, int]:
        gradients, self._carried = self._carried, ()
        operation = _CapturedOperation(group, message, self._now(), gradients)
        self._operations.append(operation)
        return operation, len(self._operations) - 1

    def _ended(self, operation: _CapturedOperation) -> None:
        operation.end = self._now()

    def waited(self, begin: Any, operation: _CapturedOperation, number: int) -> None:
        """Record that the program has waited since `begin` for an operation, possibly of an earlier step."""
        if self._active:
            is_known = number < len(self._operations) and self._operations[number] is operation
            known = number if is_known else -1
            self._seen.append(_Seen(None, self._doing, begin, self._now(), known, is_wait=True))

    def clock(self) -> Any:
        """Return the current time of the capture's clock."""
        return self._now()

    # -- the result -------------------------------------------------------------------------------

    def _of_this_rank(self) -> list[RankStep]:
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        return [self._resolved(*step) for step in self._done]

    def _resolved(
        self, began: Any, ended: Any, seen: list[_Seen], operations: list[_CapturedOperation], last: str
    ) -> RankStep:
        """Return a step with its times converted to seconds since its beginning."""
        keys = _keys(operations)
        final = {each.event.param: i for i, each in enumerate(seen) if isinstance(each.event, ReadyEvent)}
        marks: list[Mark] = []
        for index, each in enumerate(seen):
            begin, end = self._between(began, each.begin), self._between(began, each.end)
            if each.event is not None:  # accumulated gradients are ready after the last backward pass
                if not isinstance(each.event, ReadyEvent) or final[each.event.param] == index:
                    marks.append(Mark(each.event, each.computed, begin, end))
            elif each.number >= 0 and each.is_wait:
                marks.append(Mark(WaitEvent(each.number), each.computed, begin, end))
            elif each.number >= 0:
                operation = operations[each.number]
                seconds = None if operation.end is None else self._between(operation.begin, operation.end)
                event = _event(operation, each.number)
                issued = max(begin, end - OVERHEAD)  # before that, the program copied into buckets
                marks.append(Mark(event, each.computed, issued, end, seconds, keys[each.number]))
        return RankStep(self._between(began, ended), tuple(marks), last)

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1e3 if self._device is not None else end - begin)

    @property
    def step(self) -> CapturedStep:
        """Captured step. Raises `InvalidArgument` before the end of the block."""
        if self._step is None:
            raise InvalidArgument(
                "mcr.capture: the step is available once the block has ended without an error"
            )
        return self._step

    def save(self, path: Any) -> None:
        """Write the captured step as JSON; see `CapturedStep.save`."""
        self.step.save(path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.step, name)


class _WatchedWork(Work):
    """Handle of a program's operation that records when the program waits for it."""

    __slots__ = ("_capture", "_number", "_operation", "_was_waited_for", "_work")

    def __init__(self, work: Work, capture: Capture, operation: _CapturedOperation, number: int) -> None:
        self._work = work
        self._capture = capture
        self._operation = operation
        self._number = number
        self._was_waited_for = False

    def _note(self, begin: Any) -> None:
        if not self._was_waited_for:
            self._was_waited_for = True
            if self._operation.signature.kind == "recv":
                self._operation.peer = self._work.source_rank()
            self._capture.waited(begin, self._operation, self._number)

    def wait(self, timeout: Any = None) -> None:
        begin = self._capture.clock()
        self._work.wait(timeout)
        self._note(begin)

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            self._note(self._capture.clock())
        return done

    @property
    def streams(self) -> Streams | None:
        return self._work.streams

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def then(self, function: Callable[[], None]) -> Work:
        self._work.then(function)
        return self

    @property
    def info(self) -> Info:
        return self._work.info

    def probe(self) -> bool:
        return self._work.probe()

    def source_rank(self) -> int | None:
        return self._work.source_rank()


def _ends(operation: _CapturedOperation) -> tuple[int, ...]:
    """Return the sender and the receiver of a message, as ranks of the job; an unknown sender is omitted."""
    me, peer = operation.group.ranks[operation.group.rank], operation.peer
    if peer is None:
        return (me,)
    return (me, peer) if operation.signature.kind == "send" else (peer, me)


def _keys(operations: Sequence[_CapturedOperation]) -> list[str]:
    """Return a key for each operation, equal on all its ranks: group or pair of ranks, and index in it."""
    counts: dict[str, int] = {}
    keys = []
    for operation in operations:
        name = operation.group.name
        if operation.signature.is_p2p:
            ends = _ends(operation)
            name = f"{'>'.join(map(str, ends))} tag {operation.match_tag} in {name}"
            if len(set(ends)) == 1:  # a message to itself, or a receive from an unknown sender
                name = f"{operation.signature.kind} {name}"
        counts[name] = number = counts.get(name, 0) + 1
        keys.append(f"{name}#{number}")
    return keys


def _event(operation: _CapturedOperation, number: int) -> IssueEvent:
    signature = operation.signature
    ranks = _ends(operation) if signature.is_p2p else operation.group.ranks
    return IssueEvent(
        number, signature.kind, operation.nbytes or 0, ranks, signature.tag, None, operation.gradients,
        None if signature.dtype is None else dtype_name(signature.dtype),
    )  # fmt: skip
