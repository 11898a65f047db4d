"""The seam between stages: their base class, and the binding of the rest of the pipeline."""

from __future__ import annotations

# ruff: noqa: B027 (empty methods are defaults)
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from mcr_plus.backends.base import Backend
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.engine.issue import Issue as Issue
from mcr_plus.rendezvous.world import World

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config
    from mcr_plus.core.work import Work
    from mcr_plus.engine.group_runtime import GroupRuntime
    from mcr_plus.pipeline.pipeline import Pipeline
    from mcr_plus.pipeline.treatment import Treatment


Instead = Callable[[Signature], Issue | None]
"""Binds an operation that a stage derives from another one; None leaves it to the next stage."""


class Next(Protocol):
    """The rest of the pipeline, as a stage sees it while binding."""

    def __call__(self, signature: Signature) -> Issue:
        """The bound rest of the pipeline for `signature`, which may differ from the stage's own.

        With another kind, dtype or shape it is bound as an asynchronous operation, so that a stage may have
        several in flight.
        """
        ...

    def moving(self, signature: Signature, instead: Instead) -> Issue:
        """As the call, but what the next stage makes of the operation is bound by `instead` where it can."""
        ...

    def through(self, pipeline: Pipeline, signature: Signature) -> Issue:
        """Bind an operation of another group, by that group's pipeline, as a part of this one."""
        ...

    def treatment(self, signature: Signature) -> Treatment:
        """The treatment that later stages give an operation; binds nothing."""
        ...

    def note(self, text: str, details: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Record a decision and its reason, shown by `explain`; only `explain` evaluates the details."""
        ...


@dataclass(frozen=True)
class Context:
    """Arguments of a stage: configuration, the job, and one group.

    `backends` are those of the job, in fallback order. `runtime` is for dispatch, None while explaining.
    `parts`: the pipelines of the groups that were opened for the hierarchical stage, by their purpose.
    `place`: the rule whose options the stage has, as `file:line: rules[i]`; None with those of the pipeline.
    """

    config: Config
    world: World
    group: Group
    backends: Mapping[str, type[Backend]]
    runtime: GroupRuntime | None = None
    parts: Mapping[str, Pipeline] = field(default_factory=dict)
    place: str | None = None


class Stage(ABC):
    """A step of the pipeline, built once per group as `StageClass(options, context)`.

    A class attribute `Options`, a subclass of `mcr_plus.config.options.StageOptions`, is the model of its
    options in configurations; a stage without it takes none. `on_request`: it is in the pipeline only if a
    configuration names it; of interest for built-in stages alone, since others always have to be named.
    """

    on_request: ClassVar[bool] = False

    def __init__(self, options: Any, context: Context) -> None:
        """Called on all ranks of the group; `options` is an instance of `Options`."""

    @abstractmethod
    def bind(self, signature: Signature, next: Next) -> Issue | Callable[[Message], Work]:
        """Bind this stage to `signature`; called once for each.

        A stage with nothing to do returns `next(signature)` and costs nothing at run time. One that has
        something to do returns an `Issue`; it may bind `next` to other
        signatures and issue several operations. Its decisions may depend on the signature and the
        configuration alone. A plain callable is taken for the `start` of an `Issue`.
        """

    def treatment(self, signature: Signature, rest: Callable[[Signature], Treatment]) -> Treatment:
        """The treatment of an operation by this stage and the later ones; binds nothing.

        `rest(signature)` is the answer of the later stages. To be overridden by stages that change values.
        """
        return rest(signature)

    def flush(self) -> None:
        """Issue operations that are held back.

        Called at the end of the program and by `Communicator.flush`, at the same place on all ranks.
        """

    @property
    def buffer_bytes(self) -> int:
        """Bytes that are kept between operations."""
        return 0

    def state(self) -> Mapping[str, Any]:
        """Return the state that is kept between calls and belongs in the next job, for `mcr.state_dict`.

        Called on all ranks of the group while nothing is in flight. The names are the same on all ranks and
        in the next job. A value is a list of `StateTensor`, which is saved as a mapping from their names to
        CPU tensors, or plain data that can be pickled, equal on all ranks.
        """
        return {}

    def load_state(self, kept: MutableMapping[str, Any]) -> None:
        """Take over entries of the `state` of an earlier job, as they were saved.

        Called when the stage has been built, mostly with nothing in `kept`, and after each
        `mcr.load_state_dict`. `kept` is the same object each time and is shared by the stages of one name in
        the group, so a stage may hold on to it and look an entry up when an operation needs it. An entry that
        is left in it is saved again by `mcr.state_dict`; one with tensors is reported at the end of the job.
        """

    def forget_state(self, is_over: Callable[[str], bool]) -> None:
        """Drop entries of `state` and of `kept` by their names: nobody issues these operations any more.

        Called at the same point on all ranks of the group. Operations in flight end with what they have.
        """

    @property
    def needs_finish(self) -> bool:
        """Whether `finish` is to see this stage even if its group is closed before the job ends.

        Read when the group is closed; the stage is then kept until the end of the job.
        """
        return False

    @classmethod
    def finish(cls, stages: Sequence[Any]) -> None:
        """Called once with all stages of the class when the job ends in good order and nothing is in flight.

        On every rank; issues nothing. May raise `McrError`.
        """


def complete(stage: Any) -> Stage:
    """A stage, with the defaults of `Stage` for methods that it lacks."""
    return stage if isinstance(stage, Stage) else _CompletedStage(stage)


class _CompletedStage(Stage):
    """A stage of a class that is no `Stage`."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        for name in ("treatment", "flush", "state", "load_state"):
            if hasattr(stage, name):
                setattr(self, name, getattr(stage, name))

    def bind(self, signature: Signature, next: Next) -> Issue | Callable[[Message], Work]:
        return cast("Issue | Callable[[Message], Work]", self.stage.bind(signature, next))

    @property
    def buffer_bytes(self) -> int:
        return int(getattr(self.stage, "buffer_bytes", 0))

    @property
    def needs_finish(self) -> bool:
        return bool(getattr(self.stage, "needs_finish", False))

    @classmethod
    def finish(cls, stages: Sequence[Any]) -> None:
        by_class: dict[type[Any], list[Any]] = {}
        for each in stages:
            by_class.setdefault(type(each.stage), []).append(each.stage)
        for kind, alike in by_class.items():
            if hasattr(kind, "finish"):
                kind.finish(alike)
