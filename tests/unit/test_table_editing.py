"""Editing tables: look-ups are the judge, on every operation that rules can tell apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiers import examples

from mcr_plus.core.units import Range
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.tables.areas import areas
from mcr_plus.tables.differences import Change, diff
from mcr_plus.tables.merging import merge, shrink
from mcr_plus.tables.table import Basis, Query, Table, TableKey, TableRule, parse_table
from mcr_plus.tables.writing import table_text

K = 1024
BASES: tuple[Basis, ...] = ("total", "per_rank")
CUTS = (4, 8, 40)
CHOICES = ("mpi", "gloo", "mpi:ring", "built-in")


def table(*rules: str, name: str = "t.yaml", head: str = "") -> Table:
    lines = "".join(f"  - {{{rule}}}\n" for rule in rules)
    return parse_table(f"version: 1\n{head}rules:\n{lines}", name)


def choice(found: Table, query: Query) -> str | None:
    rule = found.lookup(query)
    return rule.backend if rule else None


SCALES = ((1, 1), (2, 1), (2, 2), (4, 1), (5, 2))


def every_query(
    kinds: tuple[str, ...] = ("all_reduce", "all_gather", "all_gather_v"),
    scales: Iterable[tuple[int, int]] = SCALES,
) -> Iterator[Query]:
    """Return one operation of every sort that the generated keys tell apart, at and around every bound."""
    for kind, dtype, (ranks, nodes), async_op in product(
        kinds, ("float32", "float16"), scales, (False, True)
    ):
        counted = {cut * times for cut in (0, *CUTS) for times in (1, ranks)}
        sizes = sorted({max(size - less, 0) for size in counted for less in (0, 1)})
        for nbytes in [*sizes, *([None] if kind.endswith("_v") else [])]:  # with vector_size they have one
            yield Query(kind, nbytes, dtype, ranks, nodes, max(ranks // nodes, 1), "cpu", async_op)


QUERIES = tuple(every_query())
# "*" covers kinds without rules, and no rule knows that one rank is on one host
KINDS = ("all_reduce", "all_gather", "all_gather_v", "broadcast")
ALL_QUERIES = tuple(every_query(KINDS, tuple(product((1, 2, 3, 4, 5), (1, 2)))))


@st.composite
def keys(draw: st.DrawFn, basis: Basis) -> TableKey:
    return TableKey(
        draw(st.sampled_from(("*", "all_reduce", "all_gather", "all_gather_v"))),
        draw(st.sampled_from((None, None, "float16"))),
        draw(st.sampled_from((None, None, Range(2, 3), Range(2, 5), Range(4)))),
        draw(st.sampled_from((None, None, Range(1, 2)))),
        async_op=draw(st.sampled_from((None, None, True))),
        basis=basis,
    )


@st.composite
def tables(
    draw: st.DrawFn, basis: Basis = "total", *, grouped: bool = False, measured: bool = False
) -> Table:
    """Return a valid table; its rules may stand in any order that the checks allow, unless `grouped`."""
    chosen = draw(st.lists(keys(basis), min_size=1, max_size=4, unique=True))
    chosen.sort(key=lambda key: sum(other.includes(key) for other in chosen), reverse=True)
    groups = []
    for key in chosen:
        cuts = sorted(draw(st.sets(st.sampled_from(CUTS), max_size=3)))
        rules = []
        for lo, hi in pairwise([0, *cuts, None]):
            assert lo is not None
            curves = (
                {draw(st.sampled_from(CHOICES)): {lo + 1: 5.0}} if measured and draw(st.booleans()) else {}
            )
            rules.append(TableRule(draw(st.sampled_from(CHOICES)), lo, hi, key, curves))
        groups.append(rules)
    rules = [rule for group in groups for rule in group]
    if not grouped:
        rules = draw(st.permutations(rules))
    try:
        return parse_table(table_text(Table(tuple(rules))), "generated")
    except ConfigError:
        assume(False)
        raise


def is_grouped(found: Table) -> bool:
    """Return whether the rules of every key stand together."""
    order = [rule.key for rule in found.rules]
    return all(
        order[index] == order[index - 1] or order[index] not in order[:index]
        for index in range(1, len(order))
    )


def neighbours(found: Table) -> Iterator[tuple[TableRule, TableRule]]:
    for rules in found.by_key().values():
        yield from pairwise(sorted(rules, key=lambda rule: rule.lo))


# --- shrink ---------------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=examples(150))
@given(tables(measured=True))
def test_shrinking_changes_no_lookup(found: Table) -> None:
    small = shrink(found)
    for query in QUERIES:
        assert choice(small, query) == choice(found, query), query
    assert len(small.rules) <= len(found.rules)
    assert shrink(small) == small
    assert parse_table(table_text(small)) == small


def test_shrinking_keeps_reasons() -> None:
    head = "version: 1\nrules:\n"
    sizes = {
        "0..8": ", reason: as told",
        "8..16": "",
        "16..32": ", reason: it waits",
        "32..": ", reason: as told",
    }
    rules = [f"  - {{kind: send, bytes: {span}, backend: mpi{reason}}}\n" for span, reason in sizes.items()]
    (rule,) = shrink(parse_table(head + "".join(rules))).rules
    assert (rule.lo, rule.hi) == (0, None)
    assert set(rule.reason.split("; ")) == {"as told", "it waits"}


@settings(max_examples=examples(60))
@given(tables("per_rank"))
def test_shrinking_changes_no_lookup_per_rank(found: Table) -> None:
    small = shrink(found)
    for query in QUERIES:
        assert choice(small, query) == choice(found, query), query


@settings(max_examples=examples(60))
@given(tables("per_rank", grouped=True), tables(grouped=True))
def test_shrinking_changes_no_lookup_of_both_kinds_of_bytes(one: Table, other: Table) -> None:
    try:
        both = parse_table(table_text(Table((*one.rules, *other.rules))))
    except ConfigError:
        assume(False)
    small = shrink(both)
    for query in QUERIES:
        assert choice(small, query) == choice(both, query), query


@settings(max_examples=examples(100))
@given(tables(grouped=True, measured=True))
def test_shrinking_leaves_no_neighbours_that_choose_alike(found: Table) -> None:
    small = shrink(found)
    assert all(one.backend != other.backend for one, other in neighbours(small))
    assert is_grouped(small)


def points(found: Table) -> set[tuple[TableKey, str, int, float]]:
    return {
        (rule.key, name, size, time)
        for rule in found.rules
        for name, curve in rule.measured.items()
        for size, time in curve.items()
    }


@settings(max_examples=examples(60))
@given(tables(measured=True))
def test_shrinking_keeps_every_measurement(found: Table) -> None:
    assert points(shrink(found)) == points(found)


def test_shrink_joins_and_drops() -> None:
    found = table(
        "kind: all_reduce, dtype: float16, bytes: 0..4, backend: mpi",
        "kind: all_reduce, dtype: float16, bytes: 4.., backend: mpi",
        "kind: all_reduce, ranks: 2, bytes: 0.., backend: mpi, measured: {mpi: {8B: 1}}",
        "kind: all_reduce, bytes: 8.., backend: gloo",
        "kind: all_reduce, bytes: 0..4, backend: mpi",
        "kind: all_reduce, bytes: 4..8, backend: mpi",
    )
    small = shrink(found)
    assert [(str(rule.key), rule.span(), rule.backend) for rule in small.rules] == [
        ("all_reduce float16", "0..", "mpi"),  # decides from 8 bytes on
        ("all_reduce ranks 2", "0..", "mpi"),
        ("all_reduce", "0..8", "mpi"),
        ("all_reduce", "8..", "gloo"),
    ]


def test_shrink_drops_a_redundant_key() -> None:
    narrow = "kind: all_reduce, dtype: float16, bytes: 0.., backend: mpi"
    wide = ("kind: all_reduce, bytes: 0..8, backend: mpi", "kind: all_reduce, bytes: 8.., backend: mpi")
    assert [rule.key.dtype for rule in shrink(table(narrow, *wide)).rules] == [None]
    other = "kind: all_reduce, ranks: 2, bytes: 0.., backend: gloo"
    kept = shrink(table(narrow, other, *wide))  # without it, float16 on two ranks would go to gloo
    assert [rule.key.dtype for rule in kept.rules] == ["float16", None, None]


def test_shrink_keeps_interleaved_rules() -> None:
    found = table(
        'kind: "*", bytes: 0..8, backend: gloo',
        "kind: send, bytes: 0..16, backend: mpi",
        "kind: send, bytes: 16.., backend: mpi",
        'kind: "*", bytes: 8.., backend: gloo',
    )
    small = shrink(found)
    assert [(rule.key.kind, rule.span()) for rule in small.rules] == [
        ("*", "0..8"),
        ("send", "0.."),
        ("*", "8.."),
    ]
    for nbytes in (0, 4, 7, 8, 16):
        for kind in ("send", "recv"):
            assert choice(small, Query(kind, nbytes)) == choice(found, Query(kind, nbytes))


# --- diff -----------------------------------------------------------------------------------------------


def covers(change: Change, query: Query) -> bool:
    key = change.key
    return key is not None and key.covers(query) and change.sizes.covers(query.size(key.basis))


@settings(max_examples=examples(80))
@given(st.sampled_from(BASES).flatmap(lambda basis: st.tuples(tables(basis), tables(basis))))
def test_diff_names_exactly_the_differences(pair: tuple[Table, Table]) -> None:
    a, b = pair
    changes = [change for change in diff(a, b) if change.before != change.after]
    found = [(query, choice(a, query), choice(b, query)) for query in ALL_QUERIES]
    for query, old, new in found:
        fitting = (covers(c, query) for c in changes if (c.before, c.after) == (old, new))
        assert old == new or any(fitting), query
    for change in changes:
        pair_of = (change.before, change.after)
        assert any((old, new) == pair_of and covers(change, query) for query, old, new in found), str(change)


@settings(max_examples=examples(60))
@given(tables())
def test_a_table_does_not_differ_from_itself(found: Table) -> None:
    assert diff(found, found) == []
    assert not [change for change in diff(found, shrink(found)) if change.before != change.after]


def test_diff_splits_at_the_bounds_of_both_and_joins_equal_ranges() -> None:
    a = table(
        "kind: all_reduce, bytes: 0..4KiB, backend: mpi",
        "kind: all_reduce, bytes: 4KiB..16KiB, backend: gloo",
        "kind: all_reduce, bytes: 16KiB..64KiB, backend: gloo",
        "kind: all_reduce, bytes: 64KiB.., backend: mpi",
    )
    b = table(
        "kind: all_reduce, bytes: 0..8KiB, backend: mpi",
        "kind: all_reduce, bytes: 8KiB..32KiB, backend: nccl",
        "kind: all_reduce, bytes: 32KiB.., backend: mpi",
    )
    assert [(c.span(), c.before, c.after) for c in diff(a, b)] == [
        ("4KiB..8KiB", "gloo", "mpi"),
        ("8KiB..32KiB", "gloo", "nccl"),
        ("32KiB..64KiB", "gloo", "mpi"),
    ]


def test_diff_has_times_of_measured_sizes() -> None:
    a = table(
        "kind: all_reduce, bytes: 0.., backend: mpi, measured: {mpi: {1KiB: 10, 3KiB: 30}, gloo: {1KiB: 7}}"
    )
    b = table("kind: all_reduce, bytes: 0..2KiB, backend: mpi, measured: {gloo: {1KiB: 5}}",
              "kind: all_reduce, bytes: 2KiB.., backend: gloo, measured: {gloo: {3KiB: 9}}")  # fmt: skip
    (change,) = diff(a, b)
    assert (change.span(), change.at) == ("2KiB..", 3 * K)
    assert (change.before_us, change.after_us) == (30, 9)
    assert str(change) == "all_reduce 2KiB..: mpi → gloo (30 µs → 9 µs at 3KiB)"
    (unknown,) = diff(table("kind: all_reduce, bytes: 0.., backend: nccl"), a)
    assert (unknown.before_us, unknown.after_us, unknown.at) == (None, 30, 3 * K)


def test_diff_lists_unmatched_keys_and_facts() -> None:
    a = table(
        "kind: all_reduce, dtype: float16, bytes: 0.., backend: mpi",
        "kind: all_reduce, dtype: int8, bytes: 0.., backend: gloo",
        "kind: all_reduce, bytes: 0.., backend: gloo",
        head="fingerprint: {ranks: 2, cpu: abacus, mpi: Open MPI 5.0.11}\n",
    )
    b = table(
        "kind: all_reduce, bytes: 0.., backend: gloo",
        "kind: reduce, bytes: 0.., backend: mpi",
        head="fingerprint: {ranks: [2, 4], cpu: abacus}\nstrict: true\n",
    )
    assert [str(change) for change in diff(a, b)] == [
        "all_reduce float16 0..: mpi → gloo (key only in the first table)",
        "all_reduce int8 0..: gloo → gloo (key only in the first table)",
        "reduce 0..: - → mpi (key only in the second table)",
        "ranks: 2 → 2, 4",
        "mpi: Open MPI 5.0.11 → -",
        "strict: false → true",
    ]


def test_diff_finds_effects_of_the_order_of_rules() -> None:
    one = "kind: all_reduce, dtype: float16, bytes: 0.., backend: mpi"
    other = "kind: all_reduce, ranks: 2, bytes: 0.., backend: gloo"
    (change,) = diff(table(one, other), table(other, one))
    assert str(change) == "all_reduce float16 ranks 2 0..: mpi → gloo"


def test_diff_compares_bytes_per_rank_with_total_bytes_at_a_fixed_number_of_ranks() -> None:
    total = table(
        "kind: all_gather, ranks: 4, bytes: 0..400, backend: mpi",
        "kind: all_gather, ranks: 4, bytes: 400.., backend: gloo",
    )
    per_rank = table(
        "kind: all_gather, ranks: 4, basis: per_rank, bytes: 0..150, backend: mpi",
        "kind: all_gather, ranks: 4, basis: per_rank, bytes: 150.., backend: gloo",
    )
    changes = [str(change) for change in diff(total, per_rank) if change.before != change.after]
    assert "all_gather ranks 4 400..600: gloo → mpi (key only in the first table)" in changes


# --- merge ----------------------------------------------------------------------------------------------


def measured_on(ranks: int, found: Table, nodes: int = 1) -> Table:
    facts = {"ranks": ranks, "nodes": nodes, "ranks_per_node": ranks // nodes, "mpi": "Open MPI 5.0.11"}
    return replace(found, fingerprint={name: (str(value),) for name, value in facts.items()})


@pytest.mark.long
@settings(max_examples=examples(60))
@given(tables(grouped=True), tables(grouped=True))
def test_tables_of_other_scales_do_not_shadow_one_another(one: Table, other: Table) -> None:
    pair = [
        Table(tuple(replace(rule, key=replace(rule.key, ranks=None, nodes=None)) for rule in found.rules))
        for found in (one, other)
    ]
    try:
        for found in pair:
            parse_table(table_text(found))
    except ConfigError:
        assume(False)
    small, large = measured_on(2, pair[0]), measured_on(4, pair[1], nodes=2)
    both = merge([small, large])
    assert parse_table(table_text(both)) == both
    assert dict(both.fingerprint) == {
        "ranks": ("2", "4"), "nodes": ("1", "2"), "ranks_per_node": ("2",), "mpi": ("Open MPI 5.0.11",),
    }  # fmt: skip
    for query in QUERIES:
        for found, ranks, nodes in ((small, 2, 1), (large, 4, 2)):
            asked = query._replace(ranks=ranks, nodes=nodes, ranks_per_node=2)
            assert choice(both, asked) == choice(found, asked), asked
        assert choice(both, query._replace(ranks=3, nodes=1)) is None


def test_merged_rules_get_only_the_keys_they_lack_and_tables_differ_in() -> None:
    one = measured_on(2, table("kind: reduce, bytes: 0.., backend: mpi"))
    other = measured_on(4, table('kind: reduce, ranks: ">=3", bytes: 0.., backend: gloo'))
    assert [str(rule.key) for rule in merge([one, other]).rules] == [
        "reduce ranks 2 ranks_per_node 2",
        "reduce ranks 3.. ranks_per_node 4",
    ]


def test_a_table_without_numbers_of_ranks_stands_behind_those_that_have_them() -> None:
    general = table("kind: reduce, bytes: 0.., backend: gloo", name="general.yaml")
    both = merge([general, measured_on(2, table("kind: reduce, bytes: 0.., backend: mpi"))])
    assert choice(both, Query("reduce", 8, ranks=2)) == "mpi"
    assert choice(both, Query("reduce", 8, ranks=3, ranks_per_node=3)) == "gloo"


def test_narrow_rules_come_first_whichever_table_they_are_from() -> None:
    wide = table('kind: "*", dtype: int8, bytes: 0.., backend: mpi', 'kind: "*", bytes: 0.., backend: gloo')
    narrow = table("kind: reduce, bytes: 0..8, backend: mpi", "kind: reduce, bytes: 8.., backend: nccl")
    for both in (merge([wide, narrow]), merge([narrow, wide])):
        assert choice(both, Query("reduce", 4)) == "mpi"
        assert choice(both, Query("reduce", 8)) == "nccl"
        assert choice(both, Query("broadcast", 8)) == "gloo"


def test_tables_that_disagree_are_refused_with_both_places() -> None:
    one = table("kind: reduce, bytes: 0.., backend: mpi", name="one.yaml")
    other = table(
        "kind: send, bytes: 0.., backend: mpi", "kind: reduce, bytes: 0.., backend: gloo", name="two.yaml"
    )
    with pytest.raises(ConfigError, match=r"^two\.yaml:4: rules: reduce: .* one\.yaml:3; expected") as caught:
        merge([one, other])
    assert "--prefer first or last" in str(caught.value)
    assert choice(merge([one, other], prefer="first"), Query("reduce", 8)) == "mpi"
    assert choice(merge([one, other], prefer="last"), Query("reduce", 8)) == "gloo"
    per_rank = table("kind: all_gather, basis: per_rank, bytes: 0.., backend: mpi")
    with pytest.raises(ConfigError, match="conflicts with"):  # the same operations, counted otherwise
        merge([table("kind: all_gather, bytes: 0.., backend: gloo"), per_rank])


def test_rules_that_agree_are_one_with_the_measurements_of_both() -> None:
    one = table("kind: reduce, bytes: 0.., backend: mpi, measured: {mpi: {8B: 1, 16B: 2}}")
    other = table("kind: reduce, bytes: 0.., backend: mpi, measured: {mpi: {8B: 3}, gloo: {8B: 9}}")
    for prefer, first in ((None, 1), ("first", 1), ("last", 3)):
        (rule,) = merge([one, other], prefer=prefer).rules  # type: ignore[arg-type]
        assert rule.measured == {"mpi": {8: first, 16: 2}, "gloo": {8: 9}}


def test_merge_does_not_void_strictness() -> None:
    strict = table("kind: reduce, bytes: 0.., backend: mpi", head="fingerprint: {mpi: a}\nstrict: true\n")
    plain = table("kind: gather, bytes: 0.., backend: mpi")
    with pytest.raises(ConfigError, match="strict, but the tables have no fact in common"):
        merge([strict, plain])


def test_merge_keeps_strictness_and_the_facts_that_all_state() -> None:
    one = table(
        "kind: reduce, bytes: 0.., backend: mpi", head="fingerprint: {mpi: a, cpu: x}\nstrict: true\n"
    )
    other = table("kind: send, bytes: 0.., backend: mpi", head="fingerprint: {mpi: b}\n")
    both = merge([one, other])
    assert both.strict
    assert dict(both.fingerprint) == {"mpi": ("a", "b")}
    assert both.rules[0].place == "t.yaml:5"


def test_rules_between_each_other_cannot_be_merged() -> None:
    tangled = table(
        'kind: "*", bytes: 0..8, backend: gloo',
        "kind: send, bytes: 0.., backend: mpi",
        'kind: "*", bytes: 8.., backend: local',
    )
    assert merge([tangled]) == tangled
    with pytest.raises(ConfigError, match=r"t\.yaml:3: rules: \* and send \(t\.yaml:4\) are interleaved"):
        merge([tangled, table("kind: reduce, dtype: int8, bytes: 0.., backend: mpi")])


def test_orders_that_contradict_each_other_cannot_be_merged() -> None:
    def rules(*parts: str) -> list[str]:
        return [
            f"kind: reduce, {part}, bytes: 0.., backend: {name}"
            for part, name in zip(parts, ("mpi", "gloo"), strict=True)
        ]

    one = table(*rules("dtype: int8", "ranks: 2"))
    other = table(*rules("ranks: 2..4", "dtype: int8, nodes: 1"))
    with pytest.raises(ConfigError, match="no order puts narrow keys first"):
        merge([one, other])


@pytest.mark.parametrize(
    ("given_tables", "prefer"), [([], None), ([table("kind: send, bytes: 0.., backend: mpi")], "me")]
)
def test_merge_refuses_bad_arguments(given_tables: list[Table], prefer: str | None) -> None:
    with pytest.raises(InvalidArgument, match=r"expected at least one table|known: first, last"):
        merge(given_tables, prefer=prefer)  # type: ignore[arg-type]


def test_keys_with_too_many_overlaps_are_refused() -> None:
    numbers = [Range(number, number + 1) for number in range(1, 4)]
    keys = [TableKey("reduce", ranks=each) for each in numbers]
    keys += [TableKey("reduce", nodes=each) for each in numbers]
    assert len(areas(keys, limit=15)) == 15  # nine pairs
    with pytest.raises(ConfigError, match=r"^t\.yaml: rules: keys have more than 14 intersections"):
        areas(keys, "t.yaml", limit=14)
