"""`Pipeline`: the stages of a group, bound once to each signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from mcr_plus import registry
from mcr_plus.core.kinds import Sums, dtype_name
from mcr_plus.core.message import Signature
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.pipeline.stage import Context, Instead, Issue, Stage, complete
from mcr_plus.pipeline.treatment import Treatment

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config, Rule


@dataclass(frozen=True)
class Note:
    """Decision of a stage about a signature; `place` is the rule's `file:line`, if a rule applied."""

    stage: str
    signature: Signature
    text: str
    place: str | None = None
    details: Callable[[], Mapping[str, Any]] = dict


@dataclass
class BoundChain:
    """Chain of stages bound to a signature, with the notes that explain it."""

    signature: Signature
    issue: Issue
    notes: list[Note] = field(default_factory=list)


class Pipeline:
    """Stages of one group. Rules may change a stage's options; each variant is built on first use."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._names = [spec.name for spec in context.config.pipeline]
        self._stages: dict[tuple[str, str | None], Stage] = {}

    @property
    def libraries(self) -> list[str]:
        """Names of the group's backends, in fallback order; none without a job."""
        channels = {} if self._context.runtime is None else self._context.runtime.channels
        return [name for name in self._context.backends if name in channels]

    def bind(self, signature: Signature) -> BoundChain:
        """Bind all stages to `signature`. Raises `Unsupported` if no library can run it.

        Its `sums` may be those of the call; the result's signature has those that apply.
        """
        config, notes = self._context.config, list[Note]()
        wanted = "fast" if signature.reduce_op is None else signature.sums or config.sums_for(signature)
        signature = signature.replace(sums=_sums_of(signature, config))
        if wanted != "fast" and signature.sums is None:
            what = f"{signature.reduce_op} of {dtype_name(signature.dtype)}"
            text = f"{what} is exact in every order, so sums: {wanted} changes nothing"
            notes.append(Note("sums", signature, text))
        return BoundChain(signature, self._bind_from(0, signature, notes), notes)

    @cached_property
    def explaining(self) -> Pipeline:
        """Pipeline of the same stages without a job: binding it has no effect."""
        return Pipeline(replace(self._context, runtime=None))

    def expected_us(self, signature: Signature) -> float | None:
        """Return the expected microseconds of all library operations for `signature`; None if unknown.

        Binds to no library, so each rank may pass any signature.
        """
        steps = [note.details() for note in self.explaining.bind(signature).notes]
        times = [step["expected_us"] for step in steps if "expected_us" in step]
        return None if None in times or not times else sum(times)

    def treatment(self, signature: Signature) -> Treatment:
        """Return the treatment that the stages give an operation, without binding it."""
        return self._treated_from(0, signature)

    def flush(self) -> None:
        """Let every stage issue its pending buckets, in pipeline order."""
        for name in self._names:
            for (owner, _), stage in list(self._stages.items()):
                if owner == name:
                    stage.flush()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that stages keep."""
        return sum(stage.buffer_bytes for stage in self._stages.values())

    @property
    def stages(self) -> list[Stage]:
        """Every stage built so far, including variants for rules."""
        return list(self._stages.values())

    def state(self) -> dict[tuple[str, str], Any]:
        """Return the state entries of all stages, by stage name and entry name."""
        return {
            (name, entry): value
            for (name, _), stage in self._stages.items()
            for entry, value in stage.state().items()
        }

    def load_state(self) -> None:
        """Let every stage read the state loaded for it."""
        if self._context.runtime is not None:
            for (name, _), stage in self._stages.items():
                stage.load_state(self._context.runtime.restored.setdefault(name, {}))

    def forget_state(self, is_over: Callable[[str], bool]) -> None:
        """Let every stage drop the state of operations that are over, by name."""
        for stage in self._stages.values():
            stage.forget_state(is_over)

    def _bind_from(
        self, index: int, signature: Signature, notes: list[Note], instead: Instead | None = None
    ) -> Issue:
        if index == len(self._names):
            raise ConfigError(f"pipeline: stage '{self._names[-1]}' is last but passes operations on")
        rule = self._rule(signature)
        if rule is not None and rule.backend is not None and signature.backend is None:
            signature = signature.replace(backend=rule.backend)
        name = self._names[index]
        touched = rule is not None and (
            rule.options(name) is not None or (name == "select" and (rule.backend or rule.sums))
        )
        if name == "compress" and signature.compress is not None:
            touched = False  # the call or the gradient's policy decides
        place = rule.place if rule is not None and touched else None

        def bind(changed: Signature, later: Instead | None = None) -> Issue:
            changed = _in_flight(changed, signature)
            moved = None if instead is None else instead(changed)
            return self._bind_from(index + 1, changed, notes, later) if moved is None else moved

        following = _Next(
            bind,
            lambda text, details: notes.append(Note(name, signature, text, place, details or dict)),
            partial(self._treated_from, index + 1),
            notes,
        )
        issue = self._stage(name, rule).bind(signature, following)
        return issue if isinstance(issue, Issue) else Issue(issue)

    def _treated_from(self, index: int, signature: Signature) -> Treatment:
        if index == len(self._names):
            return Treatment(compress=signature.compress)
        stage = self._stage(self._names[index], self._rule(signature))
        return stage.treatment(signature, partial(self._treated_from, index + 1))

    def _rule(self, signature: Signature) -> Rule | None:
        return self._context.config.rule_for(
            signature.kind,
            signature.nbytes,
            dtype_name(signature.dtype),
            signature.tag,
            ranks=signature.ranks,
        )

    def _stage(self, name: str, rule: Rule | None) -> Stage:
        overridden = rule is not None and rule.options(name) is not None
        key = (name, rule.place if overridden and rule is not None else None)
        stage = self._stages.get(key)
        if stage is None:
            factory: Any = registry.get("stages", name)
            options = self._context.config.options(name, rule)
            context = replace(self._context, place=key[1])
            stage = self._stages[key] = complete(factory(options, context))
            if self._context.runtime is not None:
                stage.load_state(self._context.runtime.restored.setdefault(name, {}))
        return stage


def finish(stages: Iterable[Stage]) -> None:
    """Call `Stage.finish` of each class once, with all its stages."""
    by_class: dict[type[Stage], list[Stage]] = {}
    for stage in stages:
        by_class.setdefault(type(stage), []).append(stage)
    for kind, alike in by_class.items():
        kind.finish(alike)


def _sums_of(signature: Signature, config: Config) -> Sums | None:
    """Return the order of additions of an operation; None if it is the library's, or does not matter."""
    op, dtype = signature.reduce_op, signature.dtype
    adds = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
    if not adds or op not in ("SUM", "AVG", "PRODUCT"):
        return None
    sums = signature.sums or config.sums_for(signature)
    if sums == "exact" and (op == "PRODUCT" or (dtype is not None and dtype.is_complex)):
        if signature.sums is not None:
            raise InvalidArgument(
                f"sums: exact is for SUM and AVG of real values; got {signature.describe()}"
            )
        return "fixed"
    return None if sums == "fast" else sums


def _in_flight(changed: Signature, own: Signature) -> Signature:
    """Mark a changed signature as asynchronous, because a stage may have several operations in flight."""
    same = changed.kind == own.kind and changed.dtype == own.dtype and changed.shape == own.shape
    return changed if same else changed.replace(async_op=True)


_Details = Callable[[], Mapping[str, Any]]


class _Next:
    """See `stage.Next`."""

    __slots__ = ("_bind", "_note", "_notes", "_treatment")

    def __init__(
        self,
        bind: Callable[[Signature, Instead | None], Issue],
        note: Callable[[str, _Details | None], None],
        treatment: Callable[[Signature], Treatment],
        notes: list[Note],
    ) -> None:
        self._bind = bind
        self._note = note
        self._treatment = treatment
        self._notes = notes

    def __call__(self, signature: Signature) -> Issue:
        return self._bind(signature, None)

    def moving(self, signature: Signature, instead: Instead) -> Issue:
        return self._bind(signature, instead)

    def through(self, pipeline: Pipeline, signature: Signature) -> Issue:
        bound = pipeline.bind(signature)
        self._notes.extend(bound.notes)
        return bound.issue

    def treatment(self, signature: Signature) -> Treatment:
        return self._treatment(signature)

    def note(self, text: str, details: _Details | None = None) -> None:
        self._note(text, details)
