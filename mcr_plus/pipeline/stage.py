"""Base class `Stage`, and `Next`, which binds the stages that follow."""

from __future__ import annotations

# ruff: noqa: B027 (empty methods are defaults)
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

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
"""Function that binds an operation derived by a stage; None leaves it to the next stage."""


class Next(Protocol):
    """Rest of the pipeline after a stage, while the stage is being bound."""

    def __call__(self, signature: Signature) -> Issue:
        """Bind the rest of the pipeline to `signature`, which may differ from the stage's signature.

        An operation of another kind, dtype or shape is bound as asynchronous, so that a stage may have
        several in flight.
        """
        ...

    def moving(self, signature: Signature, instead: Instead) -> Issue:
        """Bind the rest of the pipeline, but let `instead` bind operations derived by the next stage."""
        ...

    def through(self, pipeline: Pipeline, signature: Signature) -> Issue:
        """Bind an operation of another group by the other group's pipeline, as a part of this operation."""
        ...

    def treatment(self, signature: Signature) -> Treatment:
        """Return the treatment that later stages give an operation, without binding it."""
        ...

    def note(self, text: str, details: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Record a decision and its reason for `explain`; only `explain` evaluates the details."""
        ...


@dataclass(frozen=True)
class Context:
    """Arguments of a stage: configuration, job and group.

    `backends`: the job's backends, in fallback order. `runtime`: used by dispatch, None while explaining.
    `parts`: the pipelines of the groups opened for the hierarchical stage, by purpose. `place`: the rule that
    sets the stage's options, as `file:line: rules[i]`; None if the options are the pipeline's.
    """

    config: Config
    world: World
    group: Group
    backends: Mapping[str, type[Backend]]
    runtime: GroupRuntime | None = None
    parts: Mapping[str, Pipeline] = field(default_factory=dict)
    place: str | None = None


class Stage(ABC):
    """Step of the pipeline, built once per group as `StageClass(options, context)`.

    The class attribute `Options`, a subclass of `mcr_plus.config.options.StageOptions`, is the model of the
    stage's options in configurations; a stage without it takes no options.
    """

    def __init__(self, options: Any, context: Context) -> None:
        """Build the stage, on all ranks of the group; `options` is an instance of `Options`."""

    @abstractmethod
    def bind(self, signature: Signature, next: Next) -> Issue | Callable[[Message], Work]:
        """Bind this stage to `signature`; called once per signature.

        A stage with nothing to do returns `next(signature)` and costs nothing at run time. Other stages
        return an `Issue`; they may bind `next` to other signatures and issue several operations. Decisions
        may depend only on the signature and the configuration. A plain callable becomes the `start` of an
        `Issue`.
        """

    def treatment(self, signature: Signature, rest: Callable[[Signature], Treatment]) -> Treatment:
        """Return the treatment of an operation by this stage and later stages, without binding it.

        `rest(signature)` returns the treatment by later stages. Stages that change values override this.
        """
        return rest(signature)

    def flush(self) -> None:
        """Issue operations that the stage holds back.

        Called at the end of the program and by `Communicator.flush`, at the same place on all ranks.
        """

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers kept between operations."""
        return 0

    def state(self) -> Mapping[str, Any]:
        """Return the state kept between calls that the next job needs, for `mcr.state_dict`.

        Called on all ranks of the group while nothing is in flight. Names are the same on all ranks and in
        the next job. A value is a list of `StateTensor`, saved as a mapping of names to CPU tensors, or plain
        data that can be pickled and is equal on all ranks.
        """
        return {}

    def load_state(self, kept: MutableMapping[str, Any]) -> None:
        """Take over entries of a saved `state`.

        Called after the stage is built, usually with `kept` empty, and after each `mcr.load_state_dict`.
        `kept` is the same object each time, shared by the group's stages of the same name, so a stage may
        keep it and look up an entry when an operation needs it. `mcr.state_dict` saves entries left in `kept`
        again; unused entries with tensors are reported at the end of the job.
        """

    def forget_state(self, is_over: Callable[[str], bool]) -> None:
        """Drop entries of `state` and `kept` by name, if their operations are never issued again.

        Called at the same point on all ranks of the group. Operations in flight keep the state they use.
        """

    @property
    def needs_finish(self) -> bool:
        """True if `finish` needs this stage even after its group has been closed.

        Read when the group is closed. If True, the stage is kept until the end of the job.
        """
        return False

    @classmethod
    def finish(cls, stages: Sequence[Any]) -> None:
        """Finish all stages of the class. Called once, when the job ends normally and nothing is in flight.

        Called on every rank; must not issue operations. May raise `McrError`.
        """


def complete(stage: Any) -> Stage:
    """Return the stage, with missing methods taken from `Stage`."""
    return stage if isinstance(stage, Stage) else _CompletedStage(stage)


class _CompletedStage(Stage):
    """Adapter of a stage whose class does not derive from `Stage`."""

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
