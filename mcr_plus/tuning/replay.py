"""A rank that replays a captured step: `python -m mcr_plus.tuning.replay REQUEST.json`.

Operations are real, through the pipeline of the configuration. Sleeping replaces computation on a GPU;
spinning replaces computation on cores that communication shares. The step's gradients come from a model under
`mcr.wrap` with parameters of the same names and sizes. The events before a gradient run in the backward pass
that computes the gradient, so that buckets, plans and codecs apply as in the program. If there are more ranks
than were captured, they are copies of the captured ones, as in `mcr_plus.bucketing.network`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, cast

import torch
from torch import nn

import mcr_plus as mcr
from mcr_plus.bucketing.saved import SavedPlan
from mcr_plus.bucketing.step import (
    CapturedStep,
    ComputeEvent,
    Event,
    IssueEvent,
    ReadyEvent,
    Role,
    WaitEvent,
    model_hash,
)
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.gradient_policy import TAG
from mcr_plus.config.reader import dump, load
from mcr_plus.config.schema import TableRef
from mcr_plus.core.environment import launch_environment
from mcr_plus.core.kinds import KINDS, MAX, MESSAGES, PLAIN, Kind, dtype_name
from mcr_plus.core.work import Work
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.fusion.options import FuseOptions
from mcr_plus.tuning.operations import DTYPE_BY_NAME, TUNED, BenchCase, OpUnderTest, whole_size

_WARM: Final = 2
_TRIAL: Final = 40  # passes after which a trial of `plan: auto` has ended
_LEAST: Final = 4  # minimum bytes of an operation
_LATE: Final = 2e-3  # seconds after the end of a rest; a longer gap is not computation
_NOTHING: Final = torch.zeros((), device="cpu")

Action = Callable[[], object]


@dataclass(frozen=True)
class ReplayRequest:
    """Parameters of a replay; plain data. `step`: the captured step. `answer`: the file for results."""

    step: str
    answer: str
    config: str | None = None
    compute: Literal["sleep", "spin"] = "sleep"
    steps: int = 10


class _Gradient(torch.autograd.Function):
    """Returns the gradient of a parameter, after the actions that precede it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, param: torch.Tensor, before: Action) -> torch.Tensor:
        """Return `x`."""
        ctx.before, ctx.gradient = before, _NOTHING.to(param.dtype).expand_as(param)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Run the preceding actions, then return the gradient."""
        ctx.before()
        return grad_outputs[0], ctx.gradient, None


class _ReplayClock:
    """Rests instead of computing; a rest and the work of the replay take as long as the computation.

    A rest counts from the planned end of the previous rest, unless that is long ago: sleeps end late, and the
    captured computation includes the backward pass, which the replay also runs.
    """

    def __init__(self, compute: Literal["sleep", "spin"]) -> None:
        self._rest = time.sleep if compute == "sleep" else _spin
        self._due = 0.0

    def rest(self, seconds: float) -> None:
        """Rest until `seconds` after the previous rest was due."""
        now = time.perf_counter()
        self._due = (self._due if now - self._due < _LATE else now) + seconds
        if self._due > now:
            self._rest(self._due - now)

    def restart(self) -> None:
        """Restart the clock: the time since the last rest was not computation."""
        self._due = 0.0


class _Idle(torch.optim.Optimizer):
    """An optimizer that changes nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class Replay:
    """One rank's part of a step: events as calls, and a model whose parameters provide the gradients.

    Raises:
        InvalidArgument: the step cannot be extended to this number of ranks, has messages without a sender or
            receiver, or has gradients that differ between ranks or belong to several groups.
    """

    def __init__(self, step: CapturedStep, comm: Communicator, compute: Literal["sleep", "spin"]) -> None:
        self._step, self._comm = step, comm
        self._clock = _ReplayClock(compute)
        self._check()
        copy, origin = divmod(comm.rank, step.ranks)
        self._role = next(role for role in step.roles if origin in role.ranks)
        self._groups = self._opened(copy)
        self._pending: dict[int, Work] = {}
        self._sent = {name for each in _carrying(self._role) for name in each.gradients}
        self._replaced = {each.id for each in _replaced(self._role)}
        self.model: Any = nn.Module()
        self._params: dict[str, nn.Parameter] = {}
        for each in self._role.events:
            if isinstance(each, ReadyEvent) and each.param in self._sent:
                self._add(each)
        self._backward, self._after = self._parts()

    def _check(self) -> None:
        size, captured = self._comm.size, self._step.ranks
        whole = tuple(range(captured))
        issued = [each for role in self._step.roles for each in role.events if isinstance(each, IssueEvent)]
        groups = {each.group for each in issued}
        if any(each.kind in MESSAGES and len(set(each.group)) != 2 for each in issued):
            raise InvalidArgument(
                "a message without two ends, such as a receive from any rank, cannot be replayed"
            )
        if size % captured and (groups - {whole} or len(self._step.roles) > 1):
            raise InvalidArgument(
                f"-n: expected a multiple of the {captured} captured ranks, since these differ or use "
                f"several groups, got {size}"
            )
        carried = [tuple(n for each in _carrying(role) for n in each.gradients) for role in self._step.roles]
        of_groups = {each.group for role in self._step.roles for each in _carrying(role)}
        if len({frozenset(names) for names in carried}) > 1 or of_groups - {whole}:
            raise InvalidArgument(
                "some ranks lack gradients, or send them in groups; expected the same on all ranks"
            )

    def _opened(self, copy: int) -> dict[tuple[int, ...], Communicator]:
        """Return the communicators of groups, opened in the same order on all ranks. `copy`: of this rank."""
        captured, size = self._step.ranks, self._comm.size
        whole = tuple(range(captured))
        found = {whole: self._comm}
        issued = (each for role in self._step.roles for each in role.events if isinstance(each, IssueEvent))
        for group in sorted({each.group for each in issued} - {whole}):
            for number in range(size // captured):
                members = [rank + number * captured for rank in group]
                made = mcr.new_group(members)
                if number == copy:
                    found[group] = made
        return found

    def _add(self, ready: ReadyEvent) -> None:
        *folders, name = ready.param.split(".")
        module: Any = self.model
        for folder in folders:
            if folder not in module._modules:
                module.add_module(folder, nn.Module())
            module = module._modules[folder]
        dtype = DTYPE_BY_NAME.get(ready.like.split()[0], torch.float32)
        values = torch.zeros(max(1, ready.nbytes // dtype.itemsize), dtype=dtype, device="cpu")
        self._params[ready.param] = nn.Parameter(values)
        module.register_parameter(name, self._params[ready.param])

    # -- events -----------------------------------------------------------------------------------

    def _parts(self) -> tuple[list[tuple[str, list[Action]]], list[Action]]:
        """Return the actions before each gradient in the backward pass, and the actions after the pass.

        The actions of the forward pass precede the first gradient, because a step does not mark where the
        backward pass begins.
        """
        runs: list[Action] = []
        backward: list[tuple[str, list[Action]]] = []
        for each in self._role.events:
            if isinstance(each, ReadyEvent) and each.param in self._params:
                backward.append((each.param, runs))
                runs = []
            elif (action := self._action(each)) is not None:
                runs.append(action)
        return backward, runs

    def _action(self, event: Event) -> Action | None:
        if isinstance(event, ComputeEvent):
            seconds = event.seconds
            return lambda: self._clock.rest(seconds)
        if isinstance(event, IssueEvent) and event.id not in self._replaced:
            start = self._operation(event)
            return lambda: self._pending.__setitem__(event.id, cast("Work", start()))
        if isinstance(event, WaitEvent) and event.id not in self._replaced:
            return lambda: self._wait(event.id)
        return None

    def _wait(self, number: int) -> None:
        self._pending.pop(number).wait()
        self._clock.restart()

    def _operation(self, event: IssueEvent) -> Action:
        """Return a call that starts the same operation on zeros."""
        comm = self._groups[event.group]
        if event.kind in MESSAGES:
            place = comm.ranks.index(self._comm.rank)
            peer = comm.ranks[1 - place]
            values = torch.zeros(max(1, event.nbytes), dtype=torch.uint8, device="cpu")
            call = comm.isend if event.kind == "send" else comm.irecv
            return lambda: call(values, peer, label=event.tag)
        kind = event.kind.removesuffix("_v") if event.kind in KINDS else "barrier"
        if kind not in PLAIN:
            kind = "barrier"
        dtype = event.dtype if event.dtype in DTYPE_BY_NAME else "float32"
        nbytes = whole_size(kind, max(event.nbytes, _LEAST), dtype, comm.size)
        case = BenchCase(cast("Kind", kind), nbytes, dtype, async_op=True, tag=event.tag)
        return OpUnderTest(comm, case).start(TUNED)

    def step(self) -> None:
        """Run the step once."""
        self._clock.restart()
        if self._backward:
            x = torch.zeros(1, requires_grad=True, device="cpu")
            for name, runs in reversed(self._backward):  # the backward pass runs in reverse order
                x = cast("torch.Tensor", _Gradient.apply(x, self._params[name], _all(runs)))  # type: ignore[no-untyped-call]
            x.backward()
            self._clock.restart()  # the pass ends by waiting for the buckets
        for action in self._after:
            action()


def _all(actions: Sequence[Action]) -> Action:
    def run() -> None:
        for action in actions:
            action()

    return run


def _carrying(role: Role) -> list[IssueEvent]:
    return [each for each in role.events if isinstance(each, IssueEvent) and each.gradients]


def _replaced(role: Role) -> list[IssueEvent]:
    """Return the operations that `mcr.wrap` issues in the replay: gradients and outcome of the pass."""
    carrying = _carrying(role)
    sent = {each.tag for each in carrying} & {TAG}
    outcomes = [
        each
        for each in role.events
        if isinstance(each, IssueEvent) and each.tag in sent and not each.gradients
    ]
    return [*carrying, *outcomes]


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


# -- the job ------------------------------------------------------------------------------------------------


def pipeline_of(step: CapturedStep, path: str | None, folder: Path, ranks: int) -> Any:
    """Return the configuration of the replay, with a bucket plan converted to the replay's parameters.

    Raises: ConfigError: the plan is for another model or another number of ranks.
    """
    if path is None:
        return {"version": 1}
    config = load(path)
    stages = []
    for stage in config.pipeline:
        if isinstance(stage.options, FuseOptions) and (ref := stage.options.plan_file) is not None:
            plan = SavedPlan.load(ref.resolve(), ref.place)
            if plan.model != step.model:
                what = f"the plan is for model {plan.model}, and the step is of {step.model}"
                raise ConfigError(f"{ref.place}: {ref.text}: {what}")
            if plan.ranks != ranks:
                what = f"the plan is for {plan.ranks} ranks, and the replay has {ranks}"
                raise ConfigError(f"{ref.place}: {ref.text}: {what}")
            own = folder / "plan.json"
            plan.model_copy(update={"model": _own_model(step)}).save(own)
            changed = {"plan": TableRef(str(own), what="plan")}
            stage = replace(stage, options=stage.options.model_copy(update=changed))
        stages.append(stage)
    os.chdir(Path(path).parent)  # paths of tables are relative to it
    return dump(replace(config, pipeline=tuple(stages)))


def _own_model(step: CapturedStep) -> str:
    """Return the hash of the model of a replay."""
    sent = {name for each in _carrying(step.roles[0]) for name in each.gradients}
    found = []
    for each in step.roles[0].events:
        if isinstance(each, ReadyEvent) and each.param in sent:
            dtype = DTYPE_BY_NAME.get(each.like.split()[0], torch.float32)
            found.append((each.param, (max(1, each.nbytes // dtype.itemsize),), dtype_name(dtype)))
    return model_hash(found)


def run(request: ReplayRequest) -> None:
    """Run one rank; rank 0 writes the answer."""
    torch.set_num_threads(1)
    step = CapturedStep.load(request.step)
    with tempfile.TemporaryDirectory(prefix="mcr-replay-") as folder:
        config = pipeline_of(step, request.config, Path(folder), launch_environment().world_size)
        with mcr.init(config) as comm:
            answer = _measured(step, comm, request)
            if comm.rank == 0:
                Path(request.answer).write_text(json.dumps(answer))


def _measured(step: CapturedStep, comm: Communicator, request: ReplayRequest) -> dict[str, Any]:
    replay = Replay(step, comm, request.compute)
    if replay._params:
        mcr.wrap(replay.model, _Idle(replay.model.parameters()))
    for number in range(_WARM + _TRIAL):
        replay.step()
        if number >= _WARM - 1 and (mcr.plan_report() is not None or not _tries(comm)):
            break
    comm.barrier()
    cpu, began = time.process_time(), time.perf_counter()
    times = []
    for _ in range(request.steps):
        before = time.perf_counter()
        replay.step()
        times.append(time.perf_counter() - before)
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    slowest = torch.tensor([*times, share], dtype=torch.float64, device="cpu")
    comm.all_reduce(slowest, MAX, compress=False)
    *times, share = slowest.tolist()
    computed = max(
        sum(each.seconds for each in role.events if isinstance(each, ComputeEvent)) for role in step.roles
    )
    return {
        "ranks": comm.size,
        "steps": request.steps,
        "step_ms": 1e3 * median(times),
        "fastest_ms": 1e3 * min(times),
        "slowest_ms": 1e3 * max(times),
        "captured_ms": 1e3 * step.seconds,
        "captured_ranks": step.ranks,
        "compute_ms": 1e3 * computed,
        "cpu_share": share,
        "compute": request.compute,
        "plan": mcr.plan_report(),
    }


def _tries(comm: Communicator) -> bool:
    """Return True if a trial of buckets may be running."""
    fuse = comm.stage_options("fuse")
    return isinstance(fuse, FuseOptions) and fuse.plan == "auto" and comm.size > 1


if __name__ == "__main__":
    run(ReplayRequest(**json.loads(Path(sys.argv[1]).read_text())))
