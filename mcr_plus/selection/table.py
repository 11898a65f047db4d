"""Static tuning tables: which backend takes an operation of which kind and size.

    version: 1
    rules:
      - {kind: all_reduce, bytes: 0..64KiB, backend: mpi}
      - {kind: all_reduce, bytes: 64KiB.., backend: gloo}
      - {kind: "*", bytes: 0.., backend: gloo}      # kinds without rules of their own

`bytes` is half-open: `0..64KiB` ends before 64 KiB, `64KiB..` has no end. Optional keys narrow a rule:
`dtype` (a name such as float32), `ranks` (a number, or a range such as ">=8"), `device` (cpu or cuda).
The rules that share kind, dtype, ranks and device must cover all sizes once: a gap or an overlap is
refused. Rules are tried in the order of the file and the first that matches wins, so narrow ones stand
first; a rule that can never be reached is refused. A kind covers its vector form (`all_gather` covers
`all_gather_v`); vector operations have no size that all ranks share and take the rule without an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, InstanceOf

from mcr_plus.config import DTYPE_NAMES, StageOptions, check_backend, kind_matches, kind_name, validate
from mcr_plus.document import Document, Keys, check_keys, check_version, list_at, mapping_at, read_document
from mcr_plus.errors import unknown
from mcr_plus.message import ALIASES, KINDS
from mcr_plus.units import Range, format_size, parse_count, parse_range

DEVICES = ("cpu", "cuda")
MAX_RULES = 2048  # checking for rules out of reach compares all pairs of keys


@dataclass(frozen=True)
class TableKey:
    """What the rules that together cover all sizes have in common; None does not restrict."""

    kind: str
    dtype: str | None = None
    ranks: Range | None = None
    device: str | None = None

    def covers(self, kind: str, dtype: str, ranks: int, device: str) -> bool:
        """Tell whether an operation belongs here."""
        return (
            kind_matches(self.kind, kind)
            and self.dtype in (None, dtype)
            and (self.ranks is None or self.ranks.covers(ranks))
            and self.device in (None, device)
        )

    def includes(self, other: TableKey) -> bool:
        """Tell whether every operation that belongs to `other` belongs here too."""
        return (
            kind_matches(self.kind, other.kind)
            and self.dtype in (None, other.dtype)
            and (self.ranks is None or (other.ranks is not None and _includes(self.ranks, other.ranks)))
            and self.device in (None, other.device)
        )

    def __str__(self) -> str:
        """Name the key as an error does: `all_reduce float32 ranks 2..3 on cpu`."""
        ranks, device = self.ranks and f"ranks {self.ranks}", self.device and f"on {self.device}"
        parts = (self.kind, self.dtype, ranks, device)
        return " ".join(part for part in parts if part)


def _includes(outer: Range, inner: Range) -> bool:
    return outer.lo <= inner.lo and (outer.hi is None or (inner.hi is not None and inner.hi <= outer.hi))


@dataclass(frozen=True)
class TableRule:
    """One line of a table: operations of `lo` up to, not including, `hi` bytes go to `backend`."""

    backend: str
    lo: int
    hi: int | None
    key: TableKey
    place: str = field(compare=False)

    @property
    def sizes(self) -> Range:
        """The range of sizes in bytes."""
        return Range(self.lo, self.hi)


@dataclass(frozen=True)
class Table:
    """A checked table; `name` is the file it was read from."""

    rules: tuple[TableRule, ...]
    name: str = field(compare=False)

    def lookup(self, kind: str, nbytes: int | None, dtype: str, ranks: int, device: str) -> TableRule | None:
        """Return the first rule for an operation, None when the table says nothing about it.

        `nbytes` is None when sizes differ between ranks: then the rule without an end is meant.
        """
        for rule in self.rules:
            if rule.sizes.covers(nbytes) and rule.key.covers(kind, dtype, ranks, device):
                return rule
        return None


def load_table(path: str | Path) -> Table:
    """Read and check a table file; raises `ConfigError` with `file:line: path:` for whatever is wrong."""
    document = read_document(path)
    check_keys(document, (), ("version", "rules"))
    check_version(document.data.get("version"), document)
    count = _count(document)
    rules = tuple(_rule(document, ("rules", index)) for index in range(count))
    _check_tiling(rules, document)
    _check_reachable(rules, document)
    return Table(rules, document.name)


def _count(document: Document) -> int:
    items = list_at(document, "rules")
    if not items:
        raise document.error(("rules",), "no rules; expected a list of at least one")
    if len(items) > MAX_RULES:
        raise document.error(("rules",), f"{len(items)} rules; expected at most {MAX_RULES}")
    return len(items)


def _name_of(what: str, known: Sequence[str]) -> BeforeValidator:
    def check(value: object) -> object:
        if value not in known:
            raise ValueError(unknown(what, value, known))
        return value

    return BeforeValidator(check)


def _counts(value: object) -> Range:
    return parse_range(value, parse_count)


class _RuleModel(StageOptions):
    kind: Annotated[str, AfterValidator(kind_name), _name_of("kind", ("*", *KINDS, *ALIASES))]
    bytes: Annotated[InstanceOf[Range], BeforeValidator(parse_range)]
    backend: str
    dtype: Annotated[str, _name_of("dtype", DTYPE_NAMES)] | None = None
    ranks: Annotated[InstanceOf[Range], BeforeValidator(_counts)] | None = None
    device: Annotated[str, _name_of("device", DEVICES)] | None = None


def _rule(document: Document, keys: Keys) -> TableRule:
    data: dict[str, Any] = mapping_at(document, keys)
    model = validate(_RuleModel, data, document, keys)
    check_backend(model.backend, document, (*keys, "backend"))
    key = TableKey(model.kind, model.dtype, model.ranks, model.device)
    return TableRule(model.backend, model.bytes.lo, model.bytes.hi, key, document.place(keys))


def _by_key(rules: Sequence[TableRule]) -> dict[TableKey, list[int]]:
    groups: dict[TableKey, list[int]] = {}
    for index, rule in enumerate(rules):
        groups.setdefault(rule.key, []).append(index)
    return groups


def _check_tiling(rules: Sequence[TableRule], document: Document) -> None:
    """Refuse gaps and overlaps among the rules of every key."""
    for key, indices in _by_key(rules).items():
        end: int | None = 0
        last = -1
        for index in sorted(indices, key=lambda i: (rules[i].lo, i)):
            keys = ("rules", index, "bytes")
            if end is None or rules[index].lo < end:
                what = f"{key}: {_sizes(rules[index])} overlaps {_sizes(rules[last])} of {rules[last].place}"
                raise document.error(keys, f"{what}; expected every size once")
            if rules[index].lo > end:
                raise document.error(keys, _gap(key, end, rules[index].lo))
            end, last = rules[index].hi, index
        if end is not None:
            raise document.error(("rules", last, "bytes"), _gap(key, end, None))


def _gap(key: TableKey, lo: int, hi: int | None) -> str:
    missing = f"{format_size(lo)}..{'' if hi is None else format_size(hi)}"
    return f"{key}: no rule for {missing}; expected every size from 0 on once"


def _sizes(rule: TableRule) -> str:
    return f"{format_size(rule.lo)}..{'' if rule.hi is None else format_size(rule.hi)}"


def _check_reachable(rules: Sequence[TableRule], document: Document) -> None:
    """Refuse a rule all of whose sizes go to earlier rules with keys that include its own."""
    by_key = _by_key(rules)
    for key, indices in by_key.items():
        wider = [i for other in by_key if other != key and other.includes(key) for i in by_key[other]]
        for index in indices:
            rule, earlier = rules[index], [rules[i] for i in sorted(wider) if i < index]
            if _covered(rule, earlier):
                places = ", ".join(r.place for r in earlier if _meet(r, rule))
                what = f"{key}: out of reach, {_sizes(rule)} goes to earlier rules ({places})"
                raise document.error(("rules", index), f"{what}; expected narrow rules before wide ones")


def _meet(one: TableRule, other: TableRule) -> bool:
    return (one.hi is None or other.lo < one.hi) and (other.hi is None or one.lo < other.hi)


def _covered(rule: TableRule, earlier: Sequence[TableRule]) -> bool:
    reached = rule.lo
    for other in sorted(earlier, key=lambda r: r.lo):
        if other.lo > reached:
            return False
        if other.hi is None:
            return True
        reached = max(reached, other.hi)
        if rule.hi is not None and reached >= rule.hi:
            return True
    return False
