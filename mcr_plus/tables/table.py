"""Tuning tables: the backend for each kind and size of operation, with the underlying measurements.

    version: 1
    fingerprint: {mpi: Open MPI 5.0.11, torch: 2.13.0, ranks: 2, nodes: 1}
    strict: false
    rules:
      - kind: all_reduce
        bytes: 0..64KiB
        backend: mpi
        measured:                                   # median microseconds by size
          mpi: {8B: 0.9, 4KiB: 1.7, 64KiB: 17}
          gloo: {8B: 205, 4KiB: 413, 64KiB: 441}
      - {kind: all_reduce, bytes: 64KiB.., backend: gloo}
      - {kind: "*", bytes: 0.., backend: gloo}      # all other kinds

`bytes` is half-open: `0..64KiB` ends before 64 KiB, `64KiB..` has no end. Bytes are counted as in nccl-tests
(the larger of a rank's input and output); with `basis: per_rank`, as the bytes that one rank contributes to
another, so that one rule can apply to several numbers of ranks. Optional keys narrow a rule: `dtype` (a name
such as float32), `ranks`, `nodes` and `ranks_per_node` (a number, or a range such as ">=8"), `device` (cpu or
cuda), `in_place` and `async` (true or false). `backend` may name an algorithm of the backend,
`name:algorithm`. In a fingerprint, versions of two numbers need quotes: YAML reads 2.10 as 2.1.

Rules that share all of these keys must cover all sizes once: a gap or an overlap is an error. Rules are tried
in the order of the file, and the first match wins, so narrow rules come first; an unreachable rule is an
error. A kind covers its vector form (`all_gather` covers `all_gather_v`); vector operations have no common
size on all ranks and use the rule without an end, unless the select stage has a size for them
(`vector_size`). `send` covers both ends of a message, synchronous or not. `backend: built-in` leaves
operations to the built-in preference, as `tune` does for sizes far from the measured ones. `reason` is one
line of text, which `explain` shows if the measurements favour another choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf

from mcr_plus import registry
from mcr_plus.config.document import (
    Document,
    Keys,
    Mistakes,
    check_keys,
    check_version,
    list_at,
    mapping_at,
    parse_document,
    read_document,
)
from mcr_plus.config.names import (
    DTYPE_NAMES,
    kind_matches,
    kind_name,
    read_backend,
    refuse_recv,
    stored_backend,
)
from mcr_plus.config.options import StageOptions, validate
from mcr_plus.core.kinds import ALIASES, IN_PLACE, KINDS, SHARED
from mcr_plus.core.units import (
    MAX_INTEGER,
    Range,
    format_size,
    format_span,
    parse_count,
    parse_range,
    parse_size,
)
from mcr_plus.errors import short, unknown
from mcr_plus.tables import BUILT_IN as BUILT_IN
from mcr_plus.tables.fingerprint import FACTS, Fingerprint

DEVICES = ("cpu", "cuda")
MAX_RULES = 2048  # the check for unreachable rules compares all pairs of keys
CLEAR: Final = 1.005
"""Times with a smaller ratio count as equal."""
REACH: Final = 2
"""Measurements apply up to this multiple of the largest measured size."""

Basis = Literal["total", "per_rank"]
Curves = Mapping[str, Mapping[int, float]]
"""Median microseconds by size in bytes, for each choice (`name` or `name:algorithm`)."""


class Query(NamedTuple):
    """Properties of an operation that rules can match; equal on all ranks of the group.

    `nbytes` is None if sizes differ between ranks. `ranks_per_node` is the largest number of the group's
    ranks on one host.
    """

    kind: str
    nbytes: int | None
    dtype: str = "float32"
    ranks: int = 2
    nodes: int = 1
    ranks_per_node: int = 2
    device: str = "cpu"
    async_op: bool = False

    def size(self, basis: Basis) -> int | None:
        """Return the bytes in this basis; the vector form of a kind is counted like the kind."""
        if self.nbytes is None or basis == "total" or self.kind.removesuffix("_v") not in SHARED:
            return self.nbytes
        return self.nbytes // self.ranks


@dataclass(frozen=True)
class TableKey:
    """Common keys of rules that together cover all sizes; None matches everything."""

    kind: str
    dtype: str | None = None
    ranks: Range | None = None
    nodes: Range | None = None
    ranks_per_node: Range | None = None
    device: str | None = None
    in_place: bool | None = None
    async_op: bool | None = None
    basis: Basis = "total"

    def covers(self, query: Query) -> bool:
        """Return whether the key matches an operation."""
        return (
            kind_matches(self.kind, query.kind)
            and self.dtype in (None, query.dtype)
            and _within(self.ranks, query.ranks)
            and _within(self.nodes, query.nodes)
            and _within(self.ranks_per_node, query.ranks_per_node)
            and self.device in (None, query.device)
            and self.in_place in (None, query.kind in IN_PLACE)
            and self.async_op in (None, query.async_op)
        )

    def includes(self, other: TableKey) -> bool:
        """Return whether the key matches every operation that `other` matches."""
        return (
            kind_matches(self.kind, other.kind)
            and self.dtype in (None, other.dtype)
            and _includes(self.ranks, other.ranks)
            and _includes(self.nodes, other.nodes)
            and _includes(self.ranks_per_node, other.ranks_per_node)
            and self.device in (None, other.device)
            and self.in_place in (None, other.works_in_place())
            and self.async_op in (None, other.async_op)
        )

    def works_in_place(self) -> bool | None:
        """Return whether the matching operations work in place; None if only some do."""
        return self.in_place if self.kind == "*" else self.kind in IN_PLACE

    def __str__(self) -> str:
        """Return the key as shown in errors: `all_reduce float32 ranks 2..3 on cpu`."""
        numbers = {"ranks": self.ranks, "nodes": self.nodes, "ranks_per_node": self.ranks_per_node}
        flags = {"in_place": self.in_place, "async": self.async_op}
        parts = (
            self.kind,
            self.dtype,
            *(f"{name} {value}" for name, value in numbers.items() if value is not None),
            self.device and f"on {self.device}",
            *(f"{name}: {str(value).lower()}" for name, value in flags.items() if value is not None),
            "per rank" if self.basis == "per_rank" else None,
        )
        return " ".join(part for part in parts if part)


def _within(numbers: Range | None, number: int) -> bool:
    return numbers is None or numbers.covers(number)


def _includes(outer: Range | None, inner: Range | None) -> bool:
    if outer is None or inner is None:
        return outer is None
    return outer.lo <= inner.lo and (outer.hi is None or (inner.hi is not None and inner.hi <= outer.hi))


@dataclass(frozen=True)
class TableRule:
    """One entry of a table: `backend` for operations from `lo` bytes up to, not including, `hi` bytes.

    `backend` is `name`, `name:algorithm` or `BUILT_IN`. `measured` has the measurements in this range, both
    ends included, of the chosen backend and of others. `reason`: one line of text for a choice that the
    measurements do not favour.
    """

    backend: str
    lo: int
    hi: int | None
    key: TableKey
    measured: Curves = field(default_factory=dict, hash=False)
    reason: str = field(default="", hash=False)
    place: str = field(default="", compare=False)

    @property
    def sizes(self) -> Range:
        """Return the range of sizes in bytes."""
        return Range(self.lo, self.hi)

    def measured_to(self, nbytes: int | None) -> int | None:
        """Return the largest measured size if `nbytes` is too large for the measurements; otherwise None."""
        largest = max((size for curve in self.measured.values() for size in curve), default=0)
        return largest if largest and nbytes is not None and nbytes > REACH * largest else None

    def advantage(self, other: str) -> float | None:
        """Return the time of `other` divided by the time of the rule's choice.

        The result is the geometric mean over the rule's sizes at which both were measured; None without such
        a size.
        """
        own, rival = self.measured.get(self.backend, {}), self.measured.get(other, {})
        ratios = [rival[size] / own[size] for size in own if size in rival and self.sizes.covers(size)]
        return geometric_mean(ratios) if ratios else None

    def span(self) -> str:
        """Return the range as written in files and errors: `0..64KiB`."""
        return format_span(self.lo, self.hi)


@dataclass(frozen=True)
class Table:
    """A checked table; `name` is the file.

    `strict`: a job that differs from the fingerprint refuses the table; otherwise it logs a warning.
    """

    rules: tuple[TableRule, ...]
    name: str = field(default="<table>", compare=False)
    fingerprint: Fingerprint = field(default_factory=dict, hash=False)
    strict: bool = False

    def lookup(self, query: Query) -> TableRule | None:
        """Return the first rule that matches an operation, or None.

        An operation without a size matches rules without an end.
        """
        for rule in self.rules:
            if rule.sizes.covers(query.size(rule.key.basis)) and rule.key.covers(query):
                return rule
        return None

    def by_key(self) -> dict[TableKey, list[TableRule]]:
        """Return the rules of every key, in the order of the table."""
        groups: dict[TableKey, list[TableRule]] = {}
        for rule in self.rules:
            groups.setdefault(rule.key, []).append(rule)
        return groups


def load_table(path: str | Path) -> Table:
    """Read and check a table file; raise `ConfigError` with `file:line: path:` for every mistake."""
    return _table(read_document(path))


def parse_table(text: str, name: str = "<table>") -> Table:
    """Read a table from YAML text; `name` replaces the file in errors."""
    return _table(parse_document(text, name, Path()))


def _table(document: Document) -> Table:
    if "pipeline" in document.data:
        raise document.error((), "this is a configuration; expected a tuning table, such as `tune -o` writes")
    mistakes = Mistakes()
    known = ("version", "fingerprint", "strict", "rules")
    mistakes.collect(lambda: check_keys(document, (), known), None)
    mistakes.collect(lambda: check_version(document.data.get("version"), document), None)
    strict = mistakes.collect(lambda: _strict(document), False)
    count = mistakes.collect(lambda: _count(document), 0)
    checked = [mistakes.collect(partial(_rule, document, ("rules", index)), None) for index in range(count)]
    rules = tuple(rule for rule in checked if rule is not None)
    if len(rules) == count:  # otherwise an invalid rule would also be reported as a gap
        mistakes.collect(lambda: _check_tiling(rules, document), None)
        mistakes.collect(lambda: _check_reachable(rules, document), None)
    fingerprint = mistakes.collect(lambda: _fingerprint(document), {})
    mistakes.raise_all()
    return Table(rules, document.name, fingerprint, strict)


def _strict(document: Document) -> bool:
    strict = document.data.get("strict", False)
    if not isinstance(strict, bool):
        raise document.error(("strict",), f"expected true or false, got {short(strict)}")
    return strict


def _count(document: Document) -> int:
    items = list_at(document, "rules")
    if not items:
        raise document.error(("rules",), "no rules; expected a list of at least one")
    if len(items) > MAX_RULES:
        raise document.error(("rules",), f"{len(items)} rules; expected at most {MAX_RULES}")
    return len(items)


def _fingerprint(document: Document) -> Fingerprint:
    if "fingerprint" not in document.data:
        return {}
    other_names = [name for name in mapping_at(document, ("fingerprint",)) if stored_backend(name) != name]
    check_keys(document, ("fingerprint",), (*FACTS, *registry.names("backends"), *other_names))
    facts = {}
    for name, value in mapping_at(document, ("fingerprint",)).items():
        values = value if isinstance(value, list) else [value]
        # a float may be a version that has lost its last zero: YAML reads 2.10 as 2.1
        wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, (str, int))]
        if wrong or not values:
            what = "expected a string or a whole number, or a list of them"
            hint = "; put versions in quotes" if any(isinstance(v, float) for v in wrong) else ""
            raise document.error(("fingerprint", name), f"{what}, got {short(value)}{hint}")
        facts[stored_backend(name)] = tuple(str(v) for v in values)
    return facts


def _one_of(what: str, known: Sequence[str]) -> BeforeValidator:
    def check(value: object) -> object:
        if value not in known:
            raise ValueError(unknown(what, value, known))
        return value

    return BeforeValidator(check)


def _counts(value: object) -> Range:
    numbers = parse_range(value, parse_count)
    if numbers.hi is not None and numbers.hi <= 1:
        raise ValueError(f"{short(value)} matches no job; expected a range with numbers from 1 on")
    return numbers


Counts = Annotated[InstanceOf[Range], BeforeValidator(_counts)]


def _line(value: str) -> str:
    if not value.isprintable():
        raise ValueError(f"{short(value)} is not a line of text")
    return value


class _RuleModel(StageOptions):
    kind: Annotated[
        str, AfterValidator(kind_name), AfterValidator(refuse_recv), _one_of("kind", ("*", *KINDS, *ALIASES))
    ]
    bytes: Annotated[InstanceOf[Range], BeforeValidator(parse_range)]
    backend: str
    dtype: Annotated[str, _one_of("dtype", DTYPE_NAMES)] | None = None
    ranks: Counts | None = None
    nodes: Counts | None = None
    ranks_per_node: Counts | None = None
    device: Annotated[str, _one_of("device", DEVICES)] | None = None
    in_place: bool | None = None
    async_op: Annotated[bool | None, Field(alias="async")] = None
    basis: Annotated[Basis, _one_of("basis", ("total", "per_rank"))] = "total"
    measured: dict[str, Any] | None = None
    reason: Annotated[str, AfterValidator(_line)] = ""


def _rule(document: Document, keys: Keys) -> TableRule:
    data: dict[str, Any] = mapping_at(document, keys)
    model = validate(_RuleModel, data, document, keys)
    choice = model.backend
    if choice != BUILT_IN:
        choice = read_backend(choice, document, (*keys, "backend"))
    key = TableKey(
        model.kind, model.dtype, model.ranks, model.nodes, model.ranks_per_node, model.device,
        model.in_place, model.async_op, model.basis,
    )  # fmt: skip
    if (problem := contradiction(key, model.bytes)) is not None:
        raise document.error((*keys, problem[0]), problem[1])
    measured = _measured(document, (*keys, "measured")) if model.measured else {}
    sizes = model.bytes
    return TableRule(choice, sizes.lo, sizes.hi, key, measured, model.reason, document.place(keys))


def contradiction(key: TableKey, sizes: Range) -> tuple[str, str] | None:
    """Return a field because of which a rule matches no operation, and an error text; or None."""
    if key.in_place not in (None, key.works_in_place()):
        works = "always works" if key.works_in_place() else "never works"
        return "in_place", f"{key.kind} {works} in place, so the rule matches no operation"
    if key.kind == "send" and key.async_op is not None:
        return "async", "rules for send apply to synchronous and asynchronous messages; expected none"
    if key.kind == "barrier" and (key.dtype is not None or sizes != Range(0)):
        name = "bytes" if key.dtype is None else "dtype"
        return name, "a barrier has no data; expected 'bytes: 0..' and no dtype"
    return _impossible_scale(key)


def _impossible_scale(key: TableKey) -> tuple[str, str] | None:
    """Return the result of `contradiction` for numbers of ranks, nodes and ranks per node."""
    ranks, nodes, per_node = (numbers or Range(1) for numbers in (key.ranks, key.nodes, key.ranks_per_node))
    for name, numbers in (("nodes", nodes), ("ranks_per_node", per_node)):
        if ranks.hi is not None and numbers.lo >= ranks.hi:
            return name, f"{numbers} of {ranks} ranks: not possible in any job"
    if nodes.hi is not None and per_node.hi is not None and ranks.lo > (nodes.hi - 1) * (per_node.hi - 1):
        return "ranks", f"{ranks} ranks on {nodes} nodes with {per_node} on each: not possible in any job"
    return None


def _measured(document: Document, keys: Keys) -> Curves:
    curves: dict[str, dict[int, float]] = {}
    for text in mapping_at(document, keys):
        choice = read_backend(text, document, (*keys, text))
        if choice in curves:
            raise document.error((*keys, text), f"{choice!r} is written twice; expected it once")
        curves[choice] = _points(document, (*keys, text))
    return curves


def _points(document: Document, keys: Keys) -> dict[int, float]:
    points: dict[int, float] = {}
    for name, value in mapping_at(document, keys).items():
        size, time = _point(document, (*keys, name), value)
        if size in points:
            raise document.error((*keys, name), f"{format_size(size)} is written twice; expected it once")
        points[size] = time
    return points


def _point(document: Document, keys: Keys, value: object) -> tuple[int, float]:
    try:
        size = parse_size(keys[-1])
    except ValueError as error:
        raise document.error(keys, str(error)) from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_INTEGER:
        raise document.error(keys, f"expected microseconds, a number above 0, got {short(value)}")
    return size, float(value)


def _indices(rules: Sequence[TableRule]) -> dict[TableKey, list[int]]:
    groups: dict[TableKey, list[int]] = {}
    for index, rule in enumerate(rules):
        groups.setdefault(rule.key, []).append(index)
    return groups


def _check_tiling(rules: Sequence[TableRule], document: Document) -> None:
    """Refuse gaps and overlaps among the rules of every key."""
    for key, indices in _indices(rules).items():
        end: int | None = 0
        last = -1
        for index in sorted(indices, key=lambda i: (rules[i].lo, i)):
            keys = ("rules", index, "bytes")
            if end is None or rules[index].lo < end:
                what = f"{key}: {rules[index].span()} overlaps {rules[last].span()} of {rules[last].place}"
                raise document.error(keys, f"{what}; expected every size once")
            if rules[index].lo > end:
                raise document.error(keys, _gap(key, end, rules[index].lo))
            end, last = rules[index].hi, index
        if end is not None:
            raise document.error(("rules", last, "bytes"), _gap(key, end, None))


def _gap(key: TableKey, lo: int, hi: int | None) -> str:
    return f"{key}: no rule for {format_span(lo, hi)}; expected every size from 0 on once"


def _check_reachable(rules: Sequence[TableRule], document: Document) -> None:
    """Refuse a rule if earlier rules, with keys that include its key, cover all of its sizes."""
    by_key = _indices(rules)
    for key, indices in by_key.items():
        wider = [i for other in by_key if other != key and other.includes(key) for i in by_key[other]]
        for index in indices:
            rule, earlier = rules[index], [rules[i] for i in sorted(wider) if i < index]
            if _covered(rule, earlier):
                places = ", ".join(r.place for r in earlier if _overlap(r, rule))
                what = f"{key}: out of reach, {rule.span()} goes to earlier rules ({places})"
                raise document.error(("rules", index), f"{what}; expected narrow rules before wide ones")


def _overlap(one: TableRule, other: TableRule) -> bool:
    return (one.hi is None or other.lo < one.hi) and (other.hi is None or one.lo < other.hi)


def _covered(rule: TableRule, earlier: Sequence[TableRule]) -> bool:
    """Return whether earlier rules cover `rule`; rules of the other basis must cover every size."""
    other: Basis = "total" if rule.key.basis == "per_rank" else "per_rank"
    return _takes(earlier, rule.key.basis, rule.sizes) or _takes(earlier, other, Range(0))


def _takes(rules: Iterable[TableRule], basis: Basis, sizes: Range) -> bool:
    """Return whether the rules of one basis together cover a range of sizes."""
    reached = sizes.lo
    for rule in sorted((rule for rule in rules if rule.key.basis == basis), key=lambda r: r.lo):
        if rule.lo > reached:
            return False
        if rule.hi is None:
            return True
        reached = max(reached, rule.hi)
        if sizes.hi is not None and reached >= sizes.hi:
            return True
    return False
