"""Read the file of a captured step (JSON, version 1), with errors that name file, line and key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcr_plus.bucketing.step import (
    MOST_BYTES,
    MOST_RANKS,
    VERSION,
    CapturedStep,
    ComputeEvent,
    Event,
    IssueEvent,
    NeedEvent,
    Probed,
    ReadyEvent,
    Role,
    Source,
    WaitEvent,
)
from mcr_plus.config.document import Keys, path_text, read_bytes
from mcr_plus.core.kinds import KINDS
from mcr_plus.errors import ConfigError, short

_LARGEST_FILE: Final = 1 << 28
T = TypeVar("T")


def read(path: Path) -> CapturedStep:
    """Read a file written by `CapturedStep.save`; see `CapturedStep.load`."""
    return read_json(path, VERSION, lambda content: _StepModel.model_validate_json(content).built(), "step")


def read_json(path: Path, version: int, build: Callable[[bytes], T], what: str) -> T:
    """Read a file of a version, checked and built by `build`; errors have file, line and key."""
    place = str(path)
    expected = f"a {what} that `{what}.save` wrote"
    content = read_bytes(path, place, most=_LARGEST_FILE)
    text, data = _decoded(content, place, what)
    if not isinstance(data, dict) or "version" not in data:
        raise ConfigError(f"{place}:1: version: missing; expected {expected}")
    if data["version"] != version:
        line, found = line_of(text, ("version",)), short(data["version"])
        raise ConfigError(f"{place}:{line}: version: {found}; expected {version}, which this release reads")
    try:
        return build(content)
    except ValidationError as error:
        problems = _problems(error, what)
    except _Wrong as error:
        problems = [(error.keys, str(error))]
    raise ConfigError(
        "\n".join(f"{place}:{line_of(text, keys)}: {path_text(keys)}: {what}" for keys, what in problems)
    )


class _Wrong(Exception):
    """Error that the types of fields cannot express, with the key."""

    def __init__(self, keys: Keys, text: str) -> None:
        super().__init__(text)
        self.keys = keys


class StrictModel(BaseModel):
    """Fields of a file: no others, no conversions, no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


Seconds = Annotated[float, Field(ge=0, le=1e13)]  # range of traces; sums must stay finite
_Share = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]
_Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
_Count = Annotated[int, Field(ge=1, le=MOST_RANKS)]


class _Compute(StrictModel):
    event: Literal["compute"]
    name: str
    seconds: Seconds


class _Ready(StrictModel):
    event: Literal["ready"]
    param: str
    nbytes: Bytes
    like: str = Field(pattern=r"\S")


class _Need(StrictModel):
    event: Literal["need"]
    module: str


class _Issue(StrictModel):
    event: Literal["issue"]
    id: int
    kind: str
    nbytes: Bytes
    group: tuple[_Rank, ...] = Field(min_length=1)
    tag: str | None = None
    seconds: Seconds | None = None
    gradients: tuple[str, ...] = ()
    dtype: str | None = None


class _Wait(StrictModel):
    event: Literal["wait"]
    id: int


_EVENTS: Final[dict[str, type[Event]]] = {
    "compute": ComputeEvent, "ready": ReadyEvent, "need": NeedEvent, "issue": IssueEvent, "wait": WaitEvent,
}  # fmt: skip


class _Role(StrictModel):
    ranks: tuple[_Rank, ...] = Field(min_length=1)
    events: tuple[Annotated[_Compute | _Ready | _Need | _Issue | _Wait, Field(discriminator="event")], ...]

    @property
    def unknown(self) -> set[str]:
        """Return the unknown kinds of operations, which become barriers."""
        return {each.kind for each in self.events if isinstance(each, _Issue) and each.kind not in KINDS}

    def built(self, ranks: int, keys: Keys) -> Role:
        events: list[Event] = []
        issued: set[int] = set()
        for index, model in enumerate(self.events):
            place = (*keys, "events", index)
            if isinstance(model, _Issue):
                if outside := [rank for rank in model.group if rank >= ranks]:
                    raise _Wrong((*place, "group"), f"rank {outside[0]}; expected ranks below {ranks}")
                if len(set(model.group)) < len(model.group):
                    raise _Wrong((*place, "group"), f"{short(model.group)}; expected each rank once")
                if absent := set(self.ranks).difference(model.group):
                    what = f"without rank {min(absent)}, which issues it; expected a group with it"
                    raise _Wrong((*place, "group"), what)
                if model.id in issued:
                    raise _Wrong((*place, "id"), f"{model.id} again; expected another for each operation")
                issued.add(model.id)
            elif isinstance(model, _Wait) and model.id not in issued:
                raise _Wrong((*place, "id"), f"{model.id} is not issued before; expected an issue's id")
            fields = model.model_dump(exclude={"event"})
            if isinstance(model, _Issue) and model.kind in self.unknown:
                fields |= {"kind": "barrier", "nbytes": 0}
            events.append(_EVENTS[model.event](**fields))
        return Role(self.ranks, tuple(events))


class _Probed(StrictModel):
    kind: str
    sizes: tuple[Annotated[float, Field(ge=0, le=MOST_BYTES)], ...] = Field(min_length=1)
    seconds: tuple[Seconds, ...]
    shares: tuple[_Share, ...]

    def built(self, keys: Keys) -> Probed:
        if any(not low < high for low, high in pairwise(self.sizes)):
            raise _Wrong((*keys, "sizes"), f"{short(self.sizes)}; expected ascending bytes")
        for name, values in (("seconds", self.seconds), ("shares", self.shares)):
            if len(values) != len(self.sizes):
                raise _Wrong(
                    (*keys, name), f"{len(values)} values; expected {len(self.sizes)}, one for each size"
                )
        return Probed(self.kind, self.sizes, self.seconds, self.shares)


class _StepModel(StrictModel):
    version: Literal[1]
    source: Source
    ranks: _Count
    nodes: _Count
    model: str
    seconds: Seconds
    spread: _Share
    by_caller: bool
    notes: tuple[str, ...] = ()
    measured: dict[str, _Probed] = {}
    roles: tuple[_Role, ...] = Field(min_length=1)

    def built(self) -> CapturedStep:
        seen: dict[int, int] = {}
        for index, role in enumerate(self.roles):
            for rank in role.ranks:
                if rank >= self.ranks or rank in seen:
                    what = f"is in roles[{seen[rank]}] too" if rank in seen else "is beyond the last"
                    raise _Wrong(
                        ("roles", index, "ranks"),
                        f"rank {rank} {what}; expected each of the {self.ranks} ranks once",
                    )
                seen[rank] = index
        if not any(role.events for role in self.roles):
            raise _Wrong(("roles",), "no event; expected computing, gradients or operations")
        missing = next((rank for rank in range(self.ranks) if rank not in seen), None)
        if missing is not None:
            raise _Wrong(("roles",), f"rank {missing} is in no role; expected each of {self.ranks} ranks")
        roles = tuple(role.built(self.ranks, ("roles", index)) for index, role in enumerate(self.roles))
        events = [event for role in roles for event in role.events]
        if any(isinstance(each, IssueEvent) and each.gradients for each in events) and not any(
            isinstance(each, ReadyEvent) for each in events
        ):
            raise _Wrong(("roles",), "no gradient is ready; expected those that operations carry")
        unknown = sorted(set().union(*(role.unknown for role in self.roles)))
        notes = [f"an unknown operation, {short(kind)}, counts as a barrier" for kind in unknown]
        return CapturedStep(
            self.ranks, self.nodes, self.model, self.seconds, self.spread, roles, self.source, self.by_caller,
            (*self.notes, *notes),
            {name: each.built(("measured", name)) for name, each in self.measured.items()},
        )  # fmt: skip


def _decoded(content: bytes, place: str, what: str) -> tuple[str, Any]:
    """Return the text of a file, and its parsed JSON."""
    expected = f"expected a {what} that `{what}.save` wrote"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{place}: not JSON; {expected}") from None
    try:
        return text, json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}:{error.lineno}: not JSON: {error.msg}; expected a {what}") from None
    except RecursionError:
        raise ConfigError(f"{place}: not JSON; {expected}") from None
    except ValueError:  # Python converts at most 4,300 digits; this error has no position
        found = re.search(r"\d{4301}", text)
        line = text.count("\n", 0, found.start() if found else 0) + 1
        raise ConfigError(
            f"{place}:{line}: not JSON that can be read: a whole number of thousands of digits; {expected}"
        ) from None


def _problems(error: ValidationError, what: str) -> list[tuple[Keys, str]]:
    """Return keys and texts of pydantic's first errors; all missing fields of an object are one error."""
    found: list[tuple[Keys, str]] = []
    missing: dict[Keys, list[str]] = {}
    for each in error.errors(include_url=False)[:8]:
        # Remove the tags of unions from keys.
        keys = tuple(key for at, key in enumerate(each["loc"]) if not (at and key in _EVENTS))
        if each["type"] == "missing":
            missing.setdefault(keys[:-1], []).append(str(keys[-1]))
        else:
            text = f"{short(each['input'])}: {each['msg'][:1].lower()}{each['msg'][1:]}"
            found.append((keys, text))
    for keys, names in missing.items():
        place = (*keys, names[0]) if len(names) == 1 else keys
        fields = "field" if len(names) == 1 else f"fields {', '.join(names)}"
        found.append((place, f"missing {fields}; expected what `{what}.save` wrote"))
    # A list with wrong elements is also reported as too short.
    within = [keys for keys, _ in found]
    return [
        (keys, text)
        for keys, text in found
        if not any(other != keys and other[: len(keys)] == keys for other in within if keys)
    ]


def line_of(text: str, keys: Keys) -> int:
    """Return the line of the value at `keys` in a JSON document, or of the closest enclosing value."""
    decoder, at = json.JSONDecoder(), _after_space(text, 0)
    for key in keys:
        found = _member(decoder, text, at, key)
        if found is None:
            break
        at = found
    return text.count("\n", 0, at) + 1


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,:":
        at += 1
    return at


def _member(decoder: json.JSONDecoder, text: str, at: int, key: str | int) -> int | None:
    """Return the start of the value of `key` in the object or array at `at`; None if it is absent."""
    closing = {"{": "}", "[": "]"}.get(text[at])
    at, index = _after_space(text, at + 1), 0
    while closing is not None and text[at] != closing:
        name: Any = index
        if closing == "}":
            name, at = decoder.raw_decode(text, at)
            at = _after_space(text, at)
        if name == key:
            return at
        at, index = _after_space(text, decoder.raw_decode(text, at)[1]), index + 1
    return None
