"""UCC's TUNE strings, one variable per line.

    UCC_TL_UCP_TUNE=allreduce:0-4K:@knomial#allreduce:4K-inf:host:[2-8]:@sra_knomial
    UCC_TL_NCCL_TUNE=allreduce,bcast:cuda:inf

Tokens are separated by `#`; their fields are recognised by their form, in any order: collectives, memory
types, `lo-hi` sizes (half-open; K, M, G and T are binary), `[lo-hi]` numbers of ranks (both included), a
score and an `@algorithm`. A missing field matches everything. In a text without such variables, strings alone
are read as UCC_TL_UCP_TUNE. Between components the highest score wins. Other lines, and tokens with unknown
names or ranges that overlap others of their component (UCC drops the string), are reported and left out.

`ucc.conf` has sections such as `[vendor=intel model=skylake team_size=4 ppn=2 nnodes=2]`. Strings for TL/UCP
in them apply there, unless one stands outside of all sections. A table is for the first processor of a file.
Sections that UCC refuses are reported and left out with their strings. A text with a section, or with a colon
or spaces before the value of a variable, is read as `ucc.conf`, and others as a shell reads them.

Choices are `mpi:component/algorithm/score` (or those of another backend that uses UCC), with `*` for an
unnamed algorithm: `mpi:ucp/knomial`, `mpi:nccl/*/inf`. Numbers of algorithms, which change between releases,
stay numbers. Bytes of reduce_scatter are those of one rank; barriers, alltoallv, gatherv and scatterv are
looked up with 0 bytes. At a size that is the end of one range and the beginning of another, UCC uses the one
with the higher score, and tables the second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from mcr_plus.core.units import MAX_INTEGER, Range
from mcr_plus.errors import short, unknown
from mcr_plus.tables.areas import ALL_SIZES, intersection, overlap
from mcr_plus.tables.interchange.exchange import (
    Assignment,
    Exported,
    Exporter,
    ForeignCollective,
    Imported,
    TableFormat,
    algorithm_of,
    imported,
    mistake,
    rank_cells,
    reporting,
)
from mcr_plus.tables.interchange.ucc_conf import HEADER, Section, lines, section_of, split
from mcr_plus.tables.interchange.ucc_names import COMPONENT_OF, COMPONENTS, LISTED_ONLY
from mcr_plus.tables.table import DEVICES, Basis, Table, TableKey, TableRule

_LIBRARY: Final = "UCC"
COLLECTIVES: Final = {
    "all_reduce": ForeignCollective("allreduce"),
    "broadcast": ForeignCollective("bcast"),
    "reduce": ForeignCollective("reduce"),
    "all_gather": ForeignCollective("allgather"),
    "all_gather_v": ForeignCollective("allgatherv"),
    "reduce_scatter": ForeignCollective("reduce_scatter", basis="per_rank"),
    "reduce_scatter_v": ForeignCollective("reduce_scatterv"),
    "all_to_all": ForeignCollective("alltoall"),
    "all_to_all_v": ForeignCollective("alltoallv", sized=False),
    "gather": ForeignCollective("gather"),
    "gather_v": ForeignCollective("gatherv", sized=False),
    "scatter": ForeignCollective("scatter"),
    "scatter_v": ForeignCollective("scatterv", sized=False),
    "barrier": ForeignCollective("barrier", sized=False),
}
_KINDS: Final = {collective.name: kind for kind, collective in COLLECTIVES.items()}
_NO_KIND: Final = ("fanin", "fanout")
_MEMORY: Final = {"host": "cpu", "cuda": "cuda"}
_OTHER_MEMORY: Final = ("cuda_managed", "rocm", "rocm_managed", "cudamanaged", "rocmmanaged")
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_ANY: Final = "*"


class _Selection(NamedTuple):
    """The content of a choice: a component, its algorithm (`*` for its own choice) and its score, if any."""

    component: str
    algorithm: str = _ANY
    score: str = ""

    def text(self) -> str:
        if self.score:
            return f"{self.component}/{self.algorithm}/{self.score}"
        return f"{self.component}/{self.algorithm}"


# --- Out ------------------------------------------------------------------------------------------------


class _TuneToken(NamedTuple):
    sizes: Range
    ranks: tuple[Range, ...]  # empty: all
    selection: _Selection


def export(table: Table, backend: str) -> Exported:
    """Write the rules of a table that the format can express, and report the others."""
    out = Exporter(table, backend, _LIBRARY, COLLECTIVES, ("ranks", "device"))
    tokens: dict[_TuneToken, dict[str, list[str]]] = {}  # devices by collective
    for kind, collective in COLLECTIVES.items():
        for device in _devices(out.rules(kind)):
            for token in _tokens(out, kind, device):
                devices = tokens.setdefault(token, {}).setdefault(collective.name, [])
                devices += DEVICES if device is None else [device]
    lines = []
    for component, about in COMPONENTS.items():
        texts = [
            t
            for token, where in tokens.items()
            if token.selection.component == component
            for t in _texts(token, where)
        ]
        if texts:
            lines.append(f"UCC_{about.layer}_{component.upper()}_TUNE={'#'.join(texts)}")
    return out.exported(lines)


def _devices(rules: Iterable[TableRule]) -> list[str | None]:
    return [*DEVICES] if any(rule.key.device is not None for rule in rules) else [None]


def _tokens(out: Exporter, kind: str, device: str | None) -> Iterator[_TuneToken]:
    ranks_of: dict[tuple[Range, _Selection], list[Range]] = {}  # in ascending order
    for cell in rank_cells(out.rules(kind)):
        pieces = out.pieces(kind, cell, device)
        selections = [(sizes, rule, _selection_of(out, kind, rule)) for sizes, rule in pieces]
        for sizes, rule, selection in selections:
            if selection is not None:
                _append(ranks_of.setdefault((sizes, selection), []), cell or ALL_SIZES)
            elif (
                rule is not None
                and out.states_default(kind, rule)
                and not any(other for *_, other in selections)
            ):
                out.report(rule, f"left to {_LIBRARY}, which no token can express")
    for (sizes, selection), ranks in ranks_of.items():
        yield _TuneToken(sizes, () if ranks == [ALL_SIZES] else tuple(ranks), selection)


def _append(ranges: list[Range], more: Range) -> None:
    if ranges and ranges[-1].hi == more.lo:
        ranges[-1] = Range(ranges[-1].lo, more.hi)
    else:
        ranges.append(more)


def _selection_of(out: Exporter, kind: str, rule: TableRule | None) -> _Selection | None:
    algorithm = algorithm_of(rule.backend) if rule is not None else ""
    if rule is None or not algorithm:
        return None
    collective = COLLECTIVES[kind].name
    try:
        selection = _parse_selection(algorithm, collective)
    except ValueError as error:
        out.report(rule, f"{error}; left to {_LIBRARY}")
        return None
    named = selection.algorithm != _ANY and not _is_number(selection.algorithm)
    if named and collective in LISTED_ONLY.get(selection.component, ()):
        what = f"{_LIBRARY} takes no names of {selection.component} algorithms for {collective}"
        out.report(rule, f"{what}; left to {_LIBRARY}")
        return None
    return selection


def _parse_selection(text: str, collective: str) -> _Selection:
    """Read the algorithm of a choice; raises `ValueError` if it is malformed or unknown."""
    parts = text.split("/")
    if not 2 <= len(parts) <= 3 or parts[0] not in COMPONENTS:
        expected = f"component/algorithm/score, such as ucp/knomial or nccl/{_ANY}/inf"
        raise ValueError(f"unknown algorithm {short(text)}; expected {expected}, of {', '.join(COMPONENTS)}")
    selection = _Selection(*parts)
    _check_algorithm(selection, collective)
    if selection.score and not re.fullmatch(r"inf|[1-9]\d{0,8}", selection.score, re.ASCII):
        raise ValueError(f"unknown score {short(selection.score)}; expected a number from 1 on, or inf")
    if selection.algorithm == _ANY and not selection.score:
        raise ValueError(f"{text} selects nothing in {_LIBRARY}; expected an algorithm or a score")
    return selection


def _check_algorithm(selection: _Selection, collective: str) -> None:
    known = COMPONENTS[selection.component].algorithms.get(collective, ())
    if (
        selection.algorithm != _ANY
        and selection.algorithm not in known
        and not _is_number(selection.algorithm)
    ):
        names = known or (f"none, {selection.component} has one algorithm only",)
        raise ValueError(
            unknown(f"{selection.component} algorithm of {collective}", selection.algorithm, names)
        )


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d{1,3}", text, re.ASCII) is not None


def _texts(token: _TuneToken, where: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the token once for every combination of devices, with the collectives that have it."""
    for memory in dict.fromkeys(tuple(sorted(set(devices))) for devices in where.values()):
        collectives = [name for name, devices in where.items() if tuple(sorted(set(devices))) == memory]
        names = {device: name for name, device in _MEMORY.items()}
        fields = [
            ",".join(collectives),
            "" if len(memory) == len(DEVICES) else ",".join(names[device] for device in memory),
            "" if token.sizes == ALL_SIZES else f"{_size_text(token.sizes.lo)}-{_size_text(token.sizes.hi)}",
            f"[{','.join(map(_ranks_text, token.ranks))}]" if token.ranks else "",
            token.selection.score,
            "" if token.selection.algorithm == _ANY else f"@{token.selection.algorithm}",
        ]
        yield ":".join(field for field in fields if field)


def _size_text(size: int | None) -> str:
    if size is None:
        return "inf"
    unit = max((u for u in _UNITS if u != "b" and size % _UNITS[u] == 0), key=_UNITS.__getitem__)
    return f"{size // _UNITS[unit]}{unit.upper()}" if size else "0"


def _ranks_text(ranks: Range) -> str:
    return f"{max(ranks.lo, 1)}-{'inf' if ranks.hi is None else ranks.hi - 1}"


# --- In -------------------------------------------------------------------------------------------------


@dataclass
class _Fields:
    """The fields of a token, set as they are recognised."""

    collectives: list[str] | None = None
    memory: list[str] | None = None
    score: str | None = None
    sizes: list[Range] | None = None
    ranks: list[Range] | None = None
    algorithm: str | None = None


class _ScoredRule(NamedTuple):
    """A rule, with the component and score that decide its precedence, and the section that it is from."""

    rule: TableRule
    component: str
    score: float
    section: str = ""


def import_(text: str, name: str, backend: str) -> Imported:
    """Read TUNE strings into a table; raises `ConfigError` if no rule is left."""
    lost: list[str] = []
    tuned = [*_tuned(text, name, lost)]
    last = {(section.text, component): each for section, component, each in tuned if each.variable}
    entries: list[_ScoredRule] = []
    for section, component, assignment in tuned:
        if not assignment.variable and last:
            lost.append(f"{name}:{assignment.line}: no VARIABLE=value: {short(assignment.value)}")
            continue
        later = last.get((section.text, component), assignment).line
        if later != assignment.line:
            what = f"{assignment.variable} is set again in line {later}, which a shell takes"
            lost.append(f"{name}:{assignment.line}: {what}; UCC refuses a ucc.conf that has both")
            continue
        for token in split(assignment.value, "#"):
            with reporting(lost):
                entries += [*_entries(token, component, section, name, assignment.line, backend, lost)]
    outer = last.get(("", "ucp"))
    if outer is not None and outer.value and any(entry.section for entry in entries):
        lost.append(f"{name}:{outer.line}: UCC takes this string for TL/UCP instead of those in sections")
        entries = [entry for entry in entries if not entry.section]
    else:
        lost += _rivals({section: each.line for section, _, each in tuned if section.text}, name)
    entries = _without_overlaps(entries, lost)
    ranked = sorted(entries, key=lambda entry: (not entry.section, -entry.score))
    return imported([entry.rule for entry in ranked], lost, backend, name)


def _tuned(text: str, name: str, lost: list[str]) -> Iterator[tuple[Section, str, Assignment]]:
    """Yield the TUNE strings of one processor, with section and component; report what else there is."""
    section, processor = Section(), ""
    skipped: dict[str, list[int]] = {}  # lines by the reason
    indented: list[int] = []
    for assignment in lines(text, indented):
        place = f"{name}:{assignment.line}"
        if assignment.variable == HEADER:
            section = section_of(assignment.value)
            processor = processor or section.processor
            if section.refused:
                what = f"{section.refused}; UCC refuses a ucc.conf with this section, which is skipped"
                lost.append(f"{place}: [{section.text}]: {what}")
            elif section.processor not in ("", processor):
                what = f"sections for {section.processor}: a table is for one processor, here {processor}"
                skipped.setdefault(what, []).append(assignment.line)
            elif section.more:
                what = f"tables cannot express {', '.join(section.more)}; read without it"
                lost.append(f"{place}: [{section.text}]: {what}")
        elif section.refused or section.processor not in ("", processor):
            continue
        elif (component := COMPONENT_OF.get(assignment.variable)) is None:
            what = f"{assignment.variable}: no TUNE string"
            if assignment.variable.endswith("_TUNE"):
                what = unknown("variable", assignment.variable, tuple(COMPONENT_OF)[1:])
            skipped.setdefault(what, []).append(assignment.line)
        elif section.text and component != "ucp":
            lost.append(f"{place}: {assignment.variable}: UCC takes strings for TL/UCP alone from a section")
        else:
            yield section, component, assignment
    if indented:
        skipped["indented: UCC takes the line for more of the variable before it and refuses it"] = indented
    for what, places in skipped.items():
        lost.append(f"{name}:{places[0]}: {what}" + f" ({len(places)} times)" * (len(places) > 1))


def _rivals(sections: Mapping[Section, int], name: str) -> Iterator[str]:
    """Yield a line for every section that may apply to teams of an earlier one."""
    teams = {section: TableKey("*", ranks=section.ranks, nodes=section.nodes) for section in sections}
    for at, (one, line) in enumerate(sections.items()):
        for other in [*sections][:at]:
            if overlap(teams[one], teams[other]) and not (one.more and other.more):
                what = f"[{one.text}] and [{other.text}] may apply to the same ranks"
                yield f"{name}:{line}: {what}; UCC takes the string of one, by the order of a hash table"
                break


def _entries(
    token: str, component: str, section: Section, name: str, line: int, backend: str, lost: list[str]
) -> Iterator[_ScoredRule]:
    """Yield the rules of one token."""
    fields = _read(token, name, line)
    place = f"{name}:{line}"
    if fields.score is None and fields.algorithm is None:
        lost.append(f"{place}: {token}: neither a score nor an algorithm, so UCC ignores it")
        return
    if fields.score == "0":
        lost.append(f"{place}: {token}: disables {component} there, which a table cannot express")
        return
    if fields.algorithm is not None and fields.collectives is None:
        raise mistake(
            name, line, f"{token}: @{fields.algorithm} without a collective; expected one before it"
        )
    selection = _Selection(component, fields.algorithm or _ANY, fields.score or "")
    score = float(fields.score or COMPONENTS[component].score)
    for collective in [_ANY] if fields.collectives is None else fields.collectives:
        _check_selection(selection, collective, name, line)
        if collective in _NO_KIND:
            lost.append(f"{place}: {token}: tables have no {collective}")
            continue
        for key in _keys(fields, section, collective, place, token, lost):
            for sizes in _sizes(fields, collective, place, token, lost):
                basis = COLLECTIVES[_KINDS[collective]].basis if collective != _ANY else "total"
                own_basis: Basis = "total" if sizes == ALL_SIZES else basis
                full = replace(key, basis=own_basis)
                rule = TableRule(f"{backend}:{selection.text()}", sizes.lo, sizes.hi, full, place=place)
                yield _ScoredRule(rule, component, score, section.text)


def _check_selection(selection: _Selection, collective: str, name: str, line: int) -> None:
    try:
        _check_algorithm(selection, collective)
    except ValueError as error:
        raise mistake(name, line, str(error)) from None


def _keys(
    fields: _Fields, section: Section, collective: str, place: str, token: str, lost: list[str]
) -> Iterator[TableKey]:
    devices: list[str | None] = [None]
    if fields.memory is not None:
        known = sorted({_MEMORY[memory] for memory in fields.memory if memory in _MEMORY})
        other = [memory for memory in fields.memory if memory not in _MEMORY]
        if other:
            lost.append(f"{place}: {token}: tables have no memory type {', '.join(other)}")
        devices = [None] if len(known) == len(DEVICES) else [*known]
    kind = _ANY if collective == _ANY else _KINDS[collective]
    ranges: list[Range | None] = [*fields.ranks] if fields.ranks is not None else [section.ranks]
    if fields.ranks is not None and section.ranks is not None:
        ranges = [both for each in fields.ranks if (both := intersection(each, section.ranks)) is not None]
    for device in devices:
        for ranks in ranges:
            yield TableKey(kind, ranks=ranks, nodes=section.nodes, device=device)


def _sizes(fields: _Fields, collective: str, place: str, token: str, lost: list[str]) -> list[Range]:
    sizes = fields.sizes or [ALL_SIZES]
    if collective == _ANY or COLLECTIVES[_KINDS[collective]].sized:
        return sizes
    if sizes == [ALL_SIZES] or any(span.covers(0) for span in sizes):
        if sizes != [ALL_SIZES]:
            lost.append(
                f"{place}: {token}: {collective} is looked up as if of 0 bytes, so this applies to all sizes"
            )
        return [ALL_SIZES]
    lost.append(f"{place}: {token}: {collective} is looked up as if of 0 bytes, so this never applies")
    return []


def _read(token: str, name: str, line: int) -> _Fields:
    """Recognise the fields of a token by their form, as UCC does."""
    fields = _Fields()
    try:
        for text in split(token, ":"):
            _recognise(text.lower(), fields)
    except ValueError as error:
        raise mistake(name, line, f"{short(token)}: {error}") from None
    return fields


def _recognise(text: str, fields: _Fields) -> None:
    """Set the field with the form of a text; raises `ValueError` if no field has it, or it is already set."""
    items = split(text, ",")
    memory = (*_MEMORY, *_OTHER_MEMORY)
    if fields.collectives is None and all(item in _KINDS or item in _NO_KIND for item in items):
        fields.collectives = items
    elif fields.memory is None and all(item in memory for item in items):
        fields.memory = items or None
    elif fields.score is None and re.fullmatch(r"inf|\d{1,9}", text, re.ASCII):
        fields.score = text.lstrip("0") or "0"
    elif fields.sizes is None and text[0] not in "[@" and all(len(split(item, "-")) == 2 for item in items):
        fields.sizes = [_size_range(item) for item in items]
    elif fields.ranks is None and re.fullmatch(r"\[.*\]", text):
        fields.ranks = [_rank_range(item.removesuffix("]")) for item in split(text[1:], ",")]
    elif fields.algorithm is None and re.fullmatch(r"@[\w-]*", text, re.ASCII):
        fields.algorithm = text[1:] or "0"
    else:
        known = ", ".join((*_KINDS, *_NO_KIND))
        what = f"unknown field {short(text)}, or a second one of its kind"
        lists = f"collectives ({known}), memory types ({', '.join(memory)})"
        raise ValueError(f"{what}; expected {lists}, lo-hi, [lo-hi], a score or @algorithm")


def _size_range(text: str) -> Range:
    lo, hi = (_size(end) for end in split(text, "-"))
    if lo is None or (hi is not None and hi <= lo):
        raise ValueError(f"empty range {short(text)}; expected the smaller size first")
    return Range(lo, hi)


def _size(text: str) -> int | None:
    if text in ("inf", "auto"):
        return None
    match = re.fullmatch(r"\s*\+?(\d{1,40})(?:([bkmgt])(?:b.*)?)?", text, re.ASCII)
    if match is None:
        raise ValueError(f"expected a size such as 4K or inf, got {short(text)}")
    return min(int(match.group(1)) * _UNITS[match.group(2) or ""], MAX_INTEGER)


def _rank_range(text: str) -> Range:
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}|inf))?", "-".join(split(text, "-")), re.ASCII)
    if match is None:
        raise ValueError(f"expected numbers of ranks such as 2-8, 4 or 16-inf, got {short(text)}")
    lo, hi = int(match.group(1)), match.group(2) or match.group(1)
    if hi != "inf" and int(hi) < max(lo, 1):
        raise ValueError(f"empty range {short(text)}; expected the smaller number first")
    return Range(lo, None if hi == "inf" else int(hi) + 1)


def _without_overlaps(entries: list[_ScoredRule], lost: list[str]) -> list[_ScoredRule]:
    """Return the rules without those that UCC refuses or cannot order; report these, and fallbacks of UCC."""
    kept: list[_ScoredRule] = []
    for one in entries:
        others = [each for each in kept if one.section == each.section and _collide(one.rule, each.rule)]
        if problem := next((what for other in others if (what := _conflict(one, other))), ""):
            lost.append(f"{one.rule.place}: {problem}")
            continue
        for other in others:
            first, second = (one, other) if one.score > other.score else (other, one)
            what = f"{first.component} has the higher score; tables cannot express UCC's fallback to this"
            lost.append(f"{second.rule.place}: {second.rule.key} {second.rule.span()}: {what}")
        kept.append(one)
    return kept


def _conflict(one: _ScoredRule, other: _ScoredRule) -> str:
    """Say why the later of two rules that overlap is lost; empty if their scores decide."""
    both = f"{one.rule.key} {one.rule.span()} overlaps {other.rule.span()} of"
    if one.component == other.component:
        return f"{both} {other.rule.place}, which is kept; UCC refuses overlapping ranges of one component"
    if one.score == other.score:
        kept = f"{other.component} in {other.rule.place} with the same score, which is kept"
        return f"{both} {kept}; the order of UCC's components decides"
    return ""


def _collide(one: TableRule, other: TableRule) -> bool:
    """Return whether two rules overlap; in UCC a kind does not cover its vector form."""
    if _ANY not in (one.key.kind, other.key.kind) and one.key.kind != other.key.kind:
        return False
    return overlap(one.key, other.key) and intersection(one.sizes, other.sizes) is not None


FORMAT: Final = TableFormat("mpi", COLLECTIVES, export, import_)
