"""What the formats share: what they return, which rules of a table they can be told, and env-style text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

from mcr_plus.config import kind_matches
from mcr_plus.errors import ConfigError
from mcr_plus.message import KINDS, VECTOR
from mcr_plus.selection.editing import (
    ALL_SIZES,
    Piece,
    areas,
    by_choice,
    checked,
    counts_all_ranks,
    cover,
    single,
    tile,
)
from mcr_plus.selection.table import BUILT_IN, IN_PLACE, Basis, Table, TableKey, TableRule
from mcr_plus.selection.writing import key_items
from mcr_plus.units import Range

_MOST_NUMBERS = 64  # rows written for one rule that holds for several numbers of ranks


class Exported(NamedTuple):
    """Text in another library's format, and what of the table it does not say: a line each, with place."""

    text: str
    lost: tuple[str, ...]


class Imported(NamedTuple):
    """A table, and what of the text it does not say: a line each, with place."""

    table: Table
    lost: tuple[str, ...]


@dataclass(frozen=True)
class Format:
    """One format: its name, the backend whose rules it holds unless another is named, and its functions.

    `export(table, backend)` and `import_(text, name, backend)`; `name` stands for the file in errors.
    """

    name: str
    backend: str
    export: Callable[[Table, str], Exported]
    import_: Callable[[str, str, str], Imported]


@dataclass(frozen=True)
class Collective:
    """What a library calls a kind, and how it counts its bytes.

    `sized` False: it is looked up as if it had no bytes, so that one choice holds for all sizes.
    """

    name: str
    basis: Basis = "total"
    sized: bool = True


def mistake(name: str, line: int, what: str) -> ConfigError:
    """Return an error that begins with `file:line:`."""
    return ConfigError(f"{name}:{line}: {what}")


def algorithm_of(choice: str | None) -> str:
    """Return the algorithm's part of `name:algorithm`; empty if the library may choose."""
    return (choice or "").partition(":")[2]


# --- Out ------------------------------------------------------------------------------------------------


class Outgoing:
    """The rules of a table that one library can be told, and a list of what it cannot.

    Rules of other backends are none of its business. A rule that is restricted to what the format cannot say
    (`says` has what it can) is taken as if it held for all, but only where no other rule tells what does.
    `numbers`: of ranks and nodes the format can say single numbers only.
    """

    def __init__(
        self,
        table: Table,
        backend: str,
        library: str,
        collectives: Mapping[str, Collective],
        says: Sequence[str],
        *,
        numbers: bool = False,
    ) -> None:
        """Take the rules of `backend` out of a table."""
        self._lost = [(-1, line) for line in facts_without_place(table)]
        self._index = {id(rule): index for index, rule in enumerate(table.rules)}
        self._backend, self._library = backend, library
        self._collectives, self._says, self._numbers = collectives, says, numbers
        self._kinds_in_table = {rule.key.kind for rule in table.rules}
        self._exact: dict[str, list[TableRule]] = {kind: [] for kind in collectives}
        self._widened: dict[str, list[TableRule]] = {kind: [] for kind in collectives}
        self._origin: dict[int, tuple[TableRule, str]] = {}  # by id: equal rules are not the same one
        self._used: set[int] = set()
        for rule in table.rules:
            self._take(rule)

    def rules(self, kind: str) -> list[TableRule]:
        """The rules that matter for a kind, reduced to what the format says; the first that matches wins."""
        return self._exact[kind] + self._widened[kind]

    def names(self, kind: str) -> bool:
        """Tell whether a rule is for this very kind."""
        return any(rule.key.kind == kind for rule in self.rules(kind))

    def says_plainly(self, kind: str, rule: TableRule | None) -> bool:
        """Tell whether a rule leaves this very kind to the library, which reading the text would not add."""
        if rule is None or rule.key.kind != kind or algorithm_of(rule.backend):
            return False
        base = kind.removesuffix("_v")
        return base == kind or not any(algorithm_of(each.backend) for each in self._exact.get(base, ()))

    def pieces(self, kind: str, ranks: Range | None = None, device: str | None = None) -> list[Piece]:
        """Which rule takes which sizes, as the library counts them."""
        collective = self._collectives[kind]
        area = TableKey(kind, ranks=ranks, device=device, basis=collective.basis)
        return self.pieces_of(kind, area)

    def pieces_of(self, kind: str, area: TableKey) -> list[Piece]:
        """The same for any area of a kind."""
        pieces = cover(self.rules(kind), area)
        if not self._collectives[kind].sized:
            pieces = [Piece(ALL_SIZES, self._only(kind, pieces))]
        self._used.update(id(piece.rule) for piece in pieces)
        return by_choice(pieces)

    def say(self, rule: TableRule, what: str) -> None:
        """Note something that is lost of a rule, once."""
        source = self._origin.get(id(rule), (rule, ""))[0]
        line = (self._index[id(source)], f"{_where(source)}: {what}")
        if line not in self._lost:
            self._lost.append(line)

    def exported(self, lines: Iterable[str]) -> Exported:
        """Return the lines, written one after another, and what is lost."""
        written = list(lines)  # writing them finds out what is lost
        restricted: dict[int, tuple[TableRule, str, bool]] = {}
        for rule in (rule for rules in self._widened.values() for rule in rules):
            source, unsaid = self._origin[id(rule)]
            used = id(rule) in self._used or restricted.get(id(source), (source, "", False))[2]
            restricted[id(source)] = (source, unsaid, used)
        for source, unsaid, used in restricted.values():
            how = "written as if it held for all" if used else "left out, since another rule takes its place"
            self.say(source, f"{self._library} cannot tell `{unsaid}`; {how}")
        lost = tuple(line for _, line in sorted(self._lost, key=lambda each: each[0]))
        return Exported("".join(f"{line}\n" for line in written), lost)

    def _take(self, rule: TableRule) -> None:
        name, _, algorithm = rule.backend.partition(":")
        if name == BUILT_IN:
            self.say(rule, f"not written; what is left to our preference is left to {self._library}'s")
            return
        if name != self._backend:
            self.say(rule, f"not written; only rules of {self._backend} are")
            return
        meant = [kind for kind in KINDS if _means(rule.key, kind)]
        absent = [kind for kind in meant if kind not in self._collectives and self._is_asked(rule, kind)]
        if absent and algorithm:
            self.say(rule, f"{self._library} has no rules for {', '.join(absent)}")
        if rule.key.kind == "*" and not algorithm:
            self.say(rule, f"left to {self._library}, for which nothing is written")
        for kind in meant:
            if kind in self._collectives:
                self._take_for(rule, kind)

    def _is_asked(self, rule: TableRule, kind: str) -> bool:
        """Whether operations of a kind come to this rule: those without a size only where it has no end."""
        if rule.key.kind == kind or kind not in VECTOR:
            return True
        return rule.hi is None and kind not in self._kinds_in_table

    def _take_for(self, rule: TableRule, kind: str) -> None:
        taken = rule
        if kind in VECTOR and rule.key.kind != kind:
            if rule.hi is not None:
                return
            taken = replace(rule, lo=0)  # without a size, the rule without an end is meant
        counted = _counted(taken, kind, self._collectives[kind].basis)
        if counted is None:
            basis = "per rank" if rule.key.basis == "total" else "in total"
            self.say(rule, f"{self._library} counts the bytes of {kind} {basis}, which depends on the ranks")
            return
        unsaid = {
            name: value
            for name, value in key_items(rule.key).items()
            if name not in ("kind", "basis", "in_place", *self._says)
        }
        for key, more in self._reduced(counted.key):
            reduced = replace(counted, key=key)
            text = ", ".join(f"{name}: {_shown(value)}" for name, value in (unsaid | more).items())
            self._origin[id(reduced)] = (rule, text)
            (self._widened if text else self._exact)[kind].append(reduced)

    def _reduced(self, key: TableKey) -> Iterator[tuple[TableKey, dict[str, object]]]:
        """The key without what the format cannot say, and what of `ranks` and `nodes` that is."""
        more: dict[str, object] = {}
        wanted: dict[str, list[Range | None]] = {}
        for name, value in (("ranks", key.ranks), ("nodes", key.nodes)):
            wanted[name] = [None]
            if name in self._says and value is not None:
                wanted[name] = [*_numbers(value)] or [None] if self._numbers else [_from_one(value)]
                more |= {name: value} if self._numbers and wanted[name] == [None] else {}
        device = key.device if "device" in self._says else None
        for ranks, nodes in product(wanted["ranks"], wanted["nodes"]):
            yield TableKey(key.kind, ranks=ranks, nodes=nodes, device=device, basis=key.basis), more

    def _only(self, kind: str, pieces: Sequence[Piece]) -> TableRule | None:
        """The one rule for all sizes of a kind that the library looks up without a size."""
        different = by_choice(pieces)
        if len(different) == 1:
            return pieces[0].rule
        if kind in VECTOR:
            asked, other = pieces[-1].rule, pieces[:-1]  # ours have no size either: the rule without an end
            other = [piece for piece in other if piece.rule is not None and piece.rule.key.kind == kind]
        elif kind == "barrier":
            asked, other = pieces[0].rule, pieces[1:]
        else:
            asked, other = None, list(pieces)
        for piece in other:
            if piece.rule is not None:
                self._used.add(id(piece.rule))
                self.say(
                    piece.rule, f"{self._library} knows no sizes of {kind}, so one choice must hold for all"
                )
        return asked


def rank_cells(rules: Iterable[TableRule]) -> list[Range | None]:
    """Ranges of ranks within which the same rules hold, in order; `[None]` if no rule asks for ranks."""
    ranges = [rule.key.ranks for rule in rules if rule.key.ranks is not None]
    cuts = sorted({cut for each in ranges for cut in (each.lo, each.hi) if cut is not None and cut > 1})
    if not cuts:
        return [None]
    return [Range(lo or 0, hi) for lo, hi in pairwise([0, *cuts, None])]


def facts_without_place(table: Table) -> Iterator[str]:
    """Lines for what no format has a place for and no choice depends on."""
    if table.fingerprint:
        yield f"{table.name}: the fingerprint ({', '.join(table.fingerprint)})"
    if table.strict:
        yield f"{table.name}: strict"
    measured = sum(bool(rule.measured) for rule in table.rules)
    if measured:
        yield f"{table.name}: the measurements of {measured} rule{'s' if measured > 1 else ''}"
    reasons = sum(bool(rule.reason) for rule in table.rules)
    if reasons:
        yield f"{table.name}: the reasons of {reasons} rule{'s' if reasons > 1 else ''}"


def _where(rule: TableRule) -> str:
    return f"{rule.place or '<table>'}: {rule.key} {rule.span()}: {rule.backend}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _means(key: TableKey, kind: str) -> bool:
    return kind_matches(key.kind, kind) and key.in_place in (None, kind in IN_PLACE)


def _from_one(numbers: Range) -> Range | None:
    """A range of ranks with 0 in it if it begins at 1, since all jobs have one at least; None for all."""
    lo = 0 if numbers.lo <= 1 else numbers.lo
    return None if (lo, numbers.hi) == (0, None) else Range(lo, numbers.hi)


def _numbers(numbers: Range) -> Iterator[Range]:
    """Every number of a range as a range of its own; none if there are too many."""
    if numbers.hi is not None and numbers.hi - numbers.lo <= _MOST_NUMBERS:
        for number in range(max(numbers.lo, 1), numbers.hi):
            yield Range(number, number + 1)


def _counted(rule: TableRule, kind: str, basis: Basis) -> TableRule | None:
    """The rule in bytes of another basis; None if only the number of ranks could tell."""
    key = replace(rule.key, basis=basis)
    if rule.key.basis == basis or rule.sizes == ALL_SIZES or not counts_all_ranks(kind):
        return replace(rule, key=key)
    ranks = single(rule.key.ranks)
    if ranks is None:
        return None
    ends = (rule.lo, rule.hi)
    if basis == "total":
        lo, hi = (None if end is None else end * ranks for end in ends)
    else:  # so many bytes of every rank are `ranks` times as many in total
        lo, hi = (None if end is None else -(-end // ranks) for end in ends)
    return None if lo is None or lo == hi else replace(rule, key=key, lo=lo, hi=hi)


# --- In -------------------------------------------------------------------------------------------------


def imported(rules: Sequence[TableRule], lost: list[str], backend: str, name: str) -> Imported:
    """Make the table of rules in their order of precedence, which may overlap and leave gaps.

    Sizes and vector forms that the text leaves to the library go to `backend`, without an algorithm.
    """
    if not rules:
        raise mistake(name, 1, "; ".join(["no rules that a table can say; expected at least one", *lost]))
    every = [*_vector_forms(rules, backend), *rules]
    order = list(dict.fromkeys(rule.key.kind.removesuffix("_v") for rule in rules))
    tiled = sorted(tile(every, backend, name), key=lambda rule: _position(rule.key.kind, order))
    used = {
        id(piece.rule) for area in areas((rule.key for rule in every), name) for piece in cover(every, area)
    }
    lost += [f"{rule.place}: out of reach behind others" for rule in rules if id(rule) not in used]
    return Imported(checked(Table(tuple(tiled), name)), tuple(lost))


def _position(kind: str, order: Sequence[str]) -> tuple[bool, int]:
    """Kinds as the text has them, and what holds for all of them last."""
    return kind == "*", order.index(kind.removesuffix("_v"))


def _vector_forms(rules: Sequence[TableRule], backend: str) -> Iterator[TableRule]:
    """Rules to stand first, for vector forms: a kind's rules cover them with us, but not in the library."""
    for kind, place in {rule.key.kind: rule.place for rule in reversed(rules)}.items():
        vector = f"{kind}_v"
        if vector in VECTOR:
            for rule in rules:
                if rule.key.kind == vector:
                    yield rule
                elif rule.key.kind == "*":
                    yield replace(rule, key=replace(rule.key, kind=vector))
            yield TableRule(backend, 0, None, TableKey(vector), place=place)


class Assignment(NamedTuple):
    """A line of the form `VARIABLE=value`; `variable` is empty for a value alone."""

    line: int
    variable: str
    value: str


_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*)", re.ASCII)


def assignments(text: str) -> Iterator[Assignment]:
    """Read lines of an environment: `export` and quotes may be there; `#` begins a comment line."""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        found = _ASSIGNMENT.fullmatch(line)
        variable, value = found.groups() if found else ("", line)
        if len(value) > 1 and value[0] in "\"'" and value[-1] == value[0]:
            value = value[1:-1]
        yield Assignment(number, variable, value)
