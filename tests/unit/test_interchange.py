"""Tables of other libraries: against small models of how these read them, and against Open MPI itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiers import examples

from mcr_plus.core.units import Range
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.registry import TABLE_FORMATS
from mcr_plus.rendezvous.mpi_launcher import mpi_flavour, mpi_usable
from mcr_plus.tables.interchange import (
    export,
    import_,
    nccl,
    oneccl,
    openmpi,
    summary,
    ucc,
    ucc_names,
)
from mcr_plus.tables.table import Basis, Query, Table, TableKey, TableRule, parse_table
from mcr_plus.tables.writing import table_text

K = 1024
NAMES = tuple(TABLE_FORMATS)


def table(*rules: str, head: str = "") -> Table:
    lines = "".join(f"  - {{{rule}}}\n" for rule in rules)
    return parse_table(f"version: 1\n{head}rules:\n{lines}", "t.yaml")


def rules_of(found: Table) -> list[tuple[str, str, str]]:
    return [(str(rule.key), rule.span(), rule.backend) for rule in found.rules]


def choice(found: Table, query: Query) -> str | None:
    rule = found.lookup(query)
    return rule.backend if rule else None


def query(kind: str, nbytes: int | None, ranks: int = 2, nodes: int = 1, device: str = "cpu") -> Query:
    return Query(kind, nbytes, ranks=ranks, nodes=nodes, ranks_per_node=max(ranks // nodes, 1), device=device)


def bare(found: Table) -> list[tuple[TableKey, int, int | None, str]]:
    """What decides, in order."""
    return [(rule.key, rule.lo, rule.hi, rule.backend) for rule in found.rules]


def test_formats_and_backends_have_names() -> None:
    found = table("kind: all_reduce, bytes: 0.., backend: mpi")
    with pytest.raises(InvalidArgument, match="format: unknown table format 'nccl'; known: nccl-csv"):
        export("nccl", found)
    with pytest.raises(InvalidArgument, match="unknown backend 'ucc'; known: "):
        import_("ucc", "allreduce:inf", backend="ucc")


def test_choices_are_for_the_backend_that_is_named() -> None:
    found = import_("oneccl", "CCL_ALLREDUCE=ring\n", "ccl.env", backend="gloo").table
    assert rules_of(found) == [("all_reduce", "0..", "gloo:ring")]
    assert export("oneccl", found).text == ""
    assert export("oneccl", found, backend="gloo") == ('CCL_ALLREDUCE="ring"\n', ())


# --- What a table says and a format does not ------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "algorithm"),
    [
        ("nccl-csv", "nccl:ring/simple"),
        ("openmpi", "mpi:recursive_doubling"),
        ("ucc", "mpi:ucp/knomial"),
        ("oneccl", "mpi:ring"),
    ],
)
def test_export_reports_everything_that_the_format_cannot_express(format: str, algorithm: str) -> None:
    plain = algorithm.partition(":")[0]
    found = table(
        f"kind: all_reduce, dtype: float16, bytes: 0.., backend: '{algorithm}'",
        f"kind: all_reduce, async: true, bytes: 0.., backend: '{algorithm}', measured: {{gloo: {{8B: 1}}}}",
        f"kind: all_reduce, bytes: 0..8, backend: '{algorithm}'",
        "kind: all_reduce, bytes: 8.., backend: gloo",
        f"kind: broadcast, ranks_per_node: 4, bytes: 0.., backend: '{plain}:no such'",
        f"kind: send, bytes: 0.., backend: '{algorithm}'",
        f"kind: '*', bytes: 0.., backend: {plain}",
        head="fingerprint: {cpu: abacus}\nstrict: true\n",
    )
    lost = export(format, found).lost
    facts, lines = lost[:3], lost[3:]
    assert facts == (
        "t.yaml: the fingerprint (cpu)", "t.yaml: strict", "t.yaml: the measurements of 1 rule",
    )  # fmt: skip
    for line, start, what in [
        (
            5,
            "all_reduce float16 0..",
            "cannot express `dtype: float16`; left out, because another rule applies there",
        ),
        (
            6,
            "all_reduce async: true 0..",
            "cannot express `async: true`; left out, because another rule applies there",
        ),
        (8, "all_reduce 8..: gloo", f"not written; only rules of {plain} are"),
        (9, "broadcast ranks_per_node 4 0..", "cannot express `ranks_per_node: 4`"),
        (10, "send 0..", "no rules for send"),
        (11, "* 0..", "for which nothing is written"),
    ]:
        assert any(each.startswith(f"t.yaml:{line}: {start}") and what in each for each in lines), (
            line,
            lines,
        )
    assert not any(each.startswith("t.yaml:7:") for each in lines)


def test_rule_with_an_inexpressible_condition_applies_to_all_without_another_rule() -> None:
    found = table(
        "kind: all_reduce, ranks: 2, nodes: 1, bytes: 0.., backend: 'mpi:ring'",
        "kind: all_reduce, ranks: 2, nodes: 2, bytes: 0.., backend: 'mpi:rabenseifner'",
        "kind: all_reduce, bytes: 0.., backend: gloo",
    )
    text, lost = export("openmpi", found)
    assert ("all_reduce ranks 2", "0..", "mpi:ring") in rules_of(import_("openmpi", text).table)
    assert [line.partition(" cannot express ")[2] for line in lost if "cannot express" in line] == [
        "`nodes: 1`; written without it",
        "`nodes: 2`; left out, because another rule applies there",
    ]


# --- NCCL -----------------------------------------------------------------------------------------------

NCCL_SAMPLE = """\
# Single node: small messages by tree
allreduce,0,65535,tree,ll,2,1,-1
allreduce,65536,1048575,ring,ll128,4,4,32
allreduce,1048576,18446744073709551615,ring,simple,-1,-1,-1
broadcast,0,18446744073709551615,ring,simple,8,-1,16
reduce,0,4095,tree,simple,-1,-1,-1
reduce,4096,18446744073709551615,ring,simple,16,-1,-1
"""


def nccl_plugin(text: str, collective: str, nbytes: int, nodes: int, ranks: int) -> str | None:
    """What NCCL's example plugin decides: the first line that matches, both bounds included."""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        fields = line.split(",")
        lo, hi, channels, on_nodes, on_ranks = (int(fields[index]) for index in (1, 2, 5, 6, 7))
        if (
            fields[0] == collective
            and lo <= nbytes <= hi
            and on_nodes in (-1, nodes)
            and on_ranks in (-1, ranks)
        ):
            return f"{fields[3]}/{fields[4]}" + (f"/{channels}" if channels != -1 else "")
    return None


def nccl_choice(decided: str | None) -> str:
    return "nccl" if decided is None else f"nccl:{decided}"


def test_nccl_sample_round_trips() -> None:
    found, lost = import_("nccl-csv", NCCL_SAMPLE, "tuner.conf")
    assert lost == ()
    assert choice(found, query("all_reduce", 8, ranks=4, nodes=1)) == "nccl:tree/ll/2"
    rule = found.lookup(query("all_reduce", 8, ranks=4, nodes=1))
    assert rule is not None
    assert rule.place == "tuner.conf:2"
    text = export("nccl-csv", found).text
    assert sorted(text.splitlines()[1:]) == sorted(NCCL_SAMPLE.splitlines()[1:])
    assert bare(import_("nccl-csv", text).table) == bare(found)


def test_nccl_bounds_are_included_and_4_gib_is_not_the_end() -> None:
    found = import_("nccl-csv", "reduce,8,4294967295,ring,ll,-1,-1,-1\n").table
    assert rules_of(found) == [
        ("reduce", "0..8", "nccl"), ("reduce", "8B..4GiB", "nccl:ring/ll"), ("reduce", "4GiB..", "nccl"),
    ]  # fmt: skip


def test_nccl_first_match_wins_across_nodes_and_ranks() -> None:
    text = "allreduce,0,99,ring,ll,1,1,-1\nallreduce,0,99,tree,ll,2,-1,8\nallreduce,50,199,pat,ll,3,-1,-1\n"
    found = import_("nccl-csv", text).table
    assert choice(found, query("all_reduce", 10, ranks=8, nodes=1)) == "nccl:ring/ll/1"
    assert choice(found, query("all_reduce", 10, ranks=8, nodes=2)) == "nccl:tree/ll/2"
    assert choice(found, query("all_reduce", 99, ranks=4, nodes=2)) == "nccl:pat/ll/3"
    assert choice(found, query("all_reduce", 100, ranks=8, nodes=1)) == "nccl:pat/ll/3"
    assert choice(found, query("all_reduce", 200, ranks=8, nodes=1)) == "nccl"


def test_nccl_usual_operations_come_before_others() -> None:
    """Lines for several pipelined operations, or for registered buffers, apply where no other line does."""
    text = (
        "allreduce,0,99,tree,ll,1,-1,-1,4,1\nallreduce,0,49,ring,ll,1,-1,-1,1,0\n"
        "allreduce,5,9,pat,ll,1,-1,-1,-1\nreduce,0,99,tree,ll,-1,-1,-1,-1,1\nreduce,0,9,ring,ll,-1,-1,-1,3\n"
    )
    found, lost = import_("nccl-csv", text, "t.conf")
    assert rules_of(found) == [
        ("all_reduce", "0..50", "nccl:ring/ll/1/numPipeOps=1/regBuff=0"),
        ("all_reduce", "50..100", "nccl:tree/ll/1/numPipeOps=4/regBuff=1"),
        ("all_reduce", "100..", "nccl"),
        ("reduce", "0..100", "nccl:tree/ll/regBuff=1"),
        ("reduce", "100..", "nccl"),
    ]
    assert lost == ("t.conf:3: out of reach behind others", "t.conf:5: out of reach behind others")
    lines = export("nccl-csv", found).text.splitlines()
    assert lines[0].endswith("nRanks,numPipeOps,regBuff")
    assert lines[1:] == [
        "allreduce,0,49,ring,ll,1,-1,-1,1,0", "allreduce,50,99,tree,ll,1,-1,-1,4,1",
        "reduce,0,99,tree,ll,-1,-1,-1,-1,1",
    ]  # fmt: skip


def test_an_import_ends_with_what_each_kind_has() -> None:
    texts = {
        "nccl-csv": "allreduce,0,99,ring,ll,1,-1,-1,2,0\nallgather,0,99,ring,ll,1,-1,-1\n",
        "openmpi": "1 2 1 0 2 0 3 0 0 64 0 0 0\n",
        "ucc": "allreduce:@knomial#allreduce:cuda:0",
        "oneccl": "CCL_ALLREDUCE=ring",
    }
    for name, text in texts.items():
        *lines, last = summary(name, import_(name, text).table)
        left = ", 1 that leaves the choice to the library" if name in ("nccl-csv", "openmpi") else ""
        assert lines[0] == f"all_reduce: 1 rule with an algorithm{left}"
        assert last.startswith("no rule with an algorithm: broadcast, ")


def test_nccl_leaves_one_channel_where_no_line_stands() -> None:
    found = table(
        "kind: reduce, bytes: 0..8, backend: nccl", "kind: reduce, bytes: 8.., backend: 'nccl:ring/ll'"
    )
    text, (line,) = export("nccl-csv", found)
    assert text == (
        "# collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks\n"
        "reduce,8,18446744073709551615,ring,ll,-1,-1,-1\n"
    )
    assert line.startswith("t.yaml:3: reduce 0..8: nccl: no line can select NCCL's own choice: ")
    assert line.endswith("a wider line applies, or else one channel")


def test_nccl_gathers_have_no_vector_form() -> None:
    found = import_("nccl-csv", "allgather,0,18446744073709551615,ring,ll,-1,-1,-1\n").table
    assert rules_of(found) == [("all_gather_v", "0..", "nccl"), ("all_gather", "0..", "nccl:ring/ll")]
    assert export("nccl-csv", found).lost == ()
    (line,) = export("nccl-csv", table("kind: all_gather, bytes: 0.., backend: 'nccl:ring/ll'")).lost
    assert "no rules for all_gather_v" in line


def test_nccl_lists_numbers_and_takes_open_ranges_for_all() -> None:
    found = table("kind: reduce, ranks: 2..4, nodes: 1, bytes: 0.., backend: 'nccl:ring/ll'")
    lines = export("nccl-csv", found).text.splitlines()[1:]
    assert [line.split(",")[6:] for line in lines] == [["1", "2"], ["1", "3"]]
    text, lost = export("nccl-csv", table("kind: reduce, ranks: '>=8', bytes: 0.., backend: 'nccl:ring/ll'"))
    assert text.splitlines()[1].split(",")[6:] == ["-1", "-1"]
    assert "cannot express `ranks: 8..`; written without it" in lost[0]


def test_nccl_export_omits_a_line_only_if_no_later_line_overrides_it() -> None:
    found = table(
        "kind: reduce, ranks: 8, bytes: 0.., backend: 'nccl:ring/ll'",
        "kind: reduce, nodes: 1, bytes: 0.., backend: 'nccl:tree/ll'",
        "kind: reduce, bytes: 0.., backend: 'nccl:ring/ll'",
    )
    text = export("nccl-csv", found).text
    for nodes, ranks, decided in ((1, 8, "ring/ll"), (2, 8, "ring/ll"), (1, 4, "tree/ll"), (2, 4, "ring/ll")):
        assert nccl_plugin(text, "reduce", 8, nodes, ranks) == decided


@pytest.mark.parametrize(
    "algorithm", ["loop/ll", "ring", "ring/tcp", "ring/ll/0", "ring/ll/x", "ring/ll/8/9"]
)
def test_nccl_unknown_algorithms_of_a_table_are_lost(algorithm: str) -> None:
    text, (line,) = export("nccl-csv", table(f"kind: reduce, bytes: 0.., backend: 'nccl:{algorithm}'"))
    assert len(text.splitlines()) == 1
    assert line.startswith(
        f"t.yaml:3: reduce 0..: nccl:{algorithm}: unknown algorithm '{algorithm}'; expected"
    )


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (
            "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks",
            "unknown collective",
        ),
        ("Allreduce,0,8,ring,ll,1,1,1", "unknown collective 'Allreduce'; known: allreduce"),
        ("alltoall,0,8,ring,ll,1,1,1", "unknown collective 'alltoall'"),
        ("allreduce,0,8,rings,ll,1,1,1", "unknown algorithm 'rings'; known: tree, ring"),
        ("allreduce,0,8,ring,LL,1,1,1", "unknown protocol 'LL'; known: ll, ll128, simple"),
        ("allreduce,0,8,ring,ll,1,1", "7 fields; expected 8 to 10"),
        ("allreduce,,8,ring,ll,1,1,1", "7 fields; expected 8 to 10"),
        ("allreduce,9,8,ring,ll,1,1,1", "max_bytes: 8 is below min_bytes, 9"),
        (f"allreduce,{2**63},{2**64 - 1},ring,ll,1,1,1", "min_bytes: no operation has 9223372036854775808"),
        ("allreduce,0,8,ring,ll,0,1,1", "channels: expected -1 or a whole number from 1 on, got '0'"),
        ("allreduce,0,8,ring,ll,1,4294967298,1", "nNodes: expected a number of 32 bits, got '4294967298'"),
        ("allreduce,0,8,ring,ll,1,-2,1", "nNodes: expected"),
        ("allreduce,0,8,ring,ll,1,1,1,1,2", "regBuff: NCCL passes 0 or 1, so 2 never applies"),
        ("allreduce,0,8,ring,ll,1,1,1,0,1", "numPipeOps: NCCL passes a number from 1 on, so 0 never applies"),
        ("allreduce,0,8,ring,ll,1,1,1," + " " * 250, "characters; expected at most 255"),
        (" # a comment that NCCL does not know for one", "1 fields; expected"),
    ],
)
def test_nccl_skips_and_reports_entries_that_the_plugin_would_misread(line: str, what: str) -> None:
    with pytest.raises(ConfigError, match=r"^tuner\.conf:1: no rules .*; tuner\.conf:3: ") as caught:
        import_("nccl-csv", f"# comment\n\n{line}\n", "tuner.conf")
    assert what in str(caught.value)
    found, (lost,) = import_("nccl-csv", f"{line}\nreduce,0,{2**64 - 1},ring,ll,1,-1,-1\n", "tuner.conf")
    assert lost.startswith("tuner.conf:1: ")
    assert what in lost
    assert rules_of(found) == [("reduce", "0..", "nccl:ring/ll/1")]


@pytest.mark.parametrize(
    ("line", "as_if", "what"),
    [
        ("allreduce,0,8,ring,ll,2,1,4,", "allreduce,0,8,ring,ll,2,1,4", ""),
        ("allreduce,0,8,ring,ll,2,1,4,-1,1,,", "allreduce,0,8,ring,ll,2,1,4,-1,1", ""),
        ("allreduce,0,8,ring,ll,2,1,4  # small", "allreduce,0,8,ring,ll,2,1,4", ""),
        ("allreduce,\v0,+8,ring,ll,02,1,4\r", "allreduce,0,8,ring,ll,2,1,4", ""),
        (
            "allreduce,0,8,ring,ll,2,1,4 all",
            "allreduce,0,8,ring,ll,2,1,4",
            "nRanks: the plugin reads '4 all' as 4",
        ),
        (
            "allreduce,0,8K,ring,ll,2,1,4",
            "allreduce,0,8,ring,ll,2,1,4",
            "max_bytes: the plugin reads '8K' as 8",
        ),
        ("allreduce,zero,8,ring,ll,2,1,4", "allreduce,0,8,ring,ll,2,1,4", "reads 'zero' as 0"),
        (
            "allreduce,0,-1,ring,ll,2,1,4",
            f"allreduce,0,{2**64 - 1},ring,ll,2,1,4",
            f"reads '-1' as {2**64 - 1}",
        ),
        (f"allreduce,0,{2**64},ring,ll,2,1,4", f"allreduce,0,{2**64 - 1},ring,ll,2,1,4", f"as {2**64 - 1}"),
        (
            "allreduce,0,8,ring,ll,,2,-1,4,-1",
            "allreduce,0,8,ring,ll,2,-1,4,-1",
            "skips empty fields, and reads here channels=2, nNodes=-1, nRanks=4, numPipeOps=-1",
        ),
        (
            "allreduce,0,8,ring,ll,2,1,4,-1,1,x,y",
            "allreduce,0,8,ring,ll,2,1,4,-1,1",
            "the plugin skips what follows regBuff: 'x,y'",
        ),
    ],
)
def test_nccl_lines_are_read_as_strtok_and_atoi_read_them(line: str, as_if: str, what: str) -> None:
    found, lost = import_("nccl-csv", f"# comment\n{line}\n", "f")
    assert rules_of(found) == rules_of(import_("nccl-csv", as_if).table)
    assert [each.startswith("f:2: ") and what in each for each in lost] == [True] * bool(what)


@pytest.mark.parametrize("end", [", ", ",\r", ",# small"])
def test_nccl_text_without_a_number_in_the_ninth_field_is_0(end: str) -> None:
    with pytest.raises(ConfigError, match=r"numPipeOps: the plugin reads .* as 0; .*so 0 never applies"):
        import_("nccl-csv", f"allreduce,0,8,ring,ll,2,1,4{end}")


@st.composite
def nccl_texts(draw: st.DrawFn) -> str:
    lines = []
    for _ in range(draw(st.integers(1, 6))):
        lo = draw(st.integers(0, 20))
        hi = draw(st.one_of(st.integers(lo, 25), st.just((1 << 64) - 1)))
        fields = [
            draw(st.sampled_from(("allreduce", "broadcast", "allgather"))), lo, hi,
            draw(st.sampled_from(nccl.ALGORITHMS)), draw(st.sampled_from(nccl.PROTOCOLS)),
            *(draw(st.sampled_from(numbers)) for numbers in ((-1, 1, 8), (-1, 1, 2), (-1, 2, 4))),
        ]  # fmt: skip
        lines.append(",".join(map(str, fields)))
    return "\n".join(lines) + "\n"


NCCL_CASES = tuple(
    product(("all_reduce", "broadcast", "all_gather"), range(27), ((2, 1), (2, 2), (4, 1), (4, 2), (8, 2)))
)


@settings(max_examples=examples(80))
@given(nccl_texts())
def test_nccl_import_decides_as_the_plugin_does(text: str) -> None:
    found = import_("nccl-csv", text).table
    again = import_("nccl-csv", export("nccl-csv", found).text).table
    for kind, nbytes, (ranks, nodes) in NCCL_CASES:
        ours = choice(found, query(kind, nbytes, ranks, nodes))
        theirs = nccl_plugin(text, nccl.COLLECTIVES[kind].name, nbytes, nodes, ranks)
        assert ours == nccl_choice(theirs) or (ours is None and theirs is None), (kind, nbytes, ranks, nodes)
        assert (choice(again, query(kind, nbytes, ranks, nodes)) or "nccl") == (ours or "nccl")


# --- Tables made up for every format --------------------------------------------------------------------

PER_RANK = {"oneccl": ("all_gather", "reduce_scatter", "all_to_all"), "ucc": ("reduce_scatter",)}
SIZED = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather")


def algorithms(format: str, kind: str) -> list[str]:
    """Some choices with an algorithm."""
    if format == "nccl-csv":
        return [f"nccl:{a}/{p}{c}" for a, p, c in product(("ring", "tree"), ("ll", "simple"), ("", "/4"))]
    if format == "openmpi":
        name = openmpi.COLLECTIVES[kind].name
        some = ("two_proc", "recursive_doubling", "neighbor") if "gather" in name else ("two_proc",)
        names = [
            each for each in openmpi.ALGORITHMS[name][1:] if each not in some
        ]  # not on all numbers of ranks
        return [
            f"mpi:{name}{more}" for name in names for more in ("", "/segment=8KiB", "/fanout=2/requests=3")
        ]
    if format == "oneccl":
        return [f"mpi:{name}" for name in oneccl.ALGORITHMS[oneccl.COLLECTIVES[kind].name]]
    name = ucc.COLLECTIVES[kind].name
    known = (
        () if name == "gather" else ucc_names.COMPONENTS["ucp"].algorithms.get(name, ())
    )  # listed, but not taken
    named = [f"mpi:ucp/{each}" for each in known]
    return [*named, "mpi:ucp/7", "mpi:nccl/*/inf", "mpi:ucp/*/50"]


@st.composite
def expressible(draw: st.DrawFn, format: str, ranks: st.SearchStrategy[Range | None]) -> Table:
    """A table whose rules a format can say, but for the order of keys."""
    known = [kind for kind in SIZED if kind in FORMATS_COLLECTIVES[format]]
    chosen = draw(st.lists(st.tuples(st.sampled_from(known), ranks), min_size=1, max_size=4, unique=True))
    chosen.sort(key=lambda pair: (known.index(pair[0]), pair[1] is None))
    rules = []
    for kind, numbers in chosen:
        basis: Basis = "per_rank" if kind in PER_RANK.get(format, ()) else "total"
        key = TableKey(kind, ranks=numbers, basis=basis)
        cuts = sorted(draw(st.sets(st.integers(1, 40), max_size=3)))
        options = algorithms(format, kind)
        for lo, hi in pairwise([0, *cuts, None]):
            assert lo is not None
            rules.append(TableRule(draw(st.sampled_from(options)), lo, hi, key))
    try:
        return parse_table(table_text(Table(tuple(rules))))
    except ConfigError:
        assume(False)
        raise


FORMATS_COLLECTIVES: Mapping[str, Mapping[str, object]] = {
    "nccl-csv": nccl.COLLECTIVES,
    "openmpi": openmpi.COLLECTIVES,
    "ucc": ucc.COLLECTIVES,
    "oneccl": oneccl.COLLECTIVES,
}
NUMBERS = {
    "nccl-csv": st.sampled_from((None, Range(2, 3), Range(4, 5))),
    "openmpi": st.sampled_from((None, Range(2, 3), Range(2, 5), Range(4))),
    "ucc": st.sampled_from((None, Range(2, 3), Range(2, 5), Range(4))),
    "oneccl": st.none(),
}


@pytest.mark.long
@settings(max_examples=examples(160))
@given(st.sampled_from(NAMES).flatmap(lambda f: st.tuples(st.just(f), expressible(f, NUMBERS[f]))))
def test_expressible_rules_survive_a_round_trip(case: tuple[str, Table]) -> None:
    name, found = case
    text, lost = export(name, found)
    again, lost_again = import_(name, text, "again")
    assert lost_again == ()
    vector = r"no rules for \w+_v$|(no|of) (allgatherv|alltoallv|reduce_scatterv?|ALLGATHERV|ALLTOALLV)\b"
    assert not [line for line in lost if not re.search(f"{vector}| instead of ", line)]
    for kind, ranks, nbytes in product(SIZED, (2, 3, 4, 5), [0, *range(1, 200, 3)]):
        asked = query(kind, nbytes, ranks)
        before = choice(found, asked)
        assert before is None or choice(again, asked) == before, asked
    for kind, ranks in product(("all_gather_v", "reduce_scatter_v", "all_to_all_v"), (2, 4, 5)):
        before = choice(found, query(kind, None, ranks))
        assert lost or before is None or choice(again, query(kind, None, ranks)) == before


@settings(max_examples=examples(60))
@given(st.sampled_from(NAMES).flatmap(lambda f: st.tuples(st.just(f), expressible(f, st.none()))))
def test_tables_without_ranks_round_trip(case: tuple[str, Table]) -> None:
    name, found = case
    again = import_(name, export(name, found).text, "again").table
    joined = [rule for rule in bare(again) if not rule[0].kind.endswith("_v")]
    expected: list[tuple[TableKey, int, int | None, str]] = []
    for key, lo, hi, backend in bare(found):
        if expected and expected[-1][0] == key and expected[-1][3] == backend:
            expected[-1] = (key, expected[-1][1], hi, backend)
        else:
            expected.append((key, lo, hi, backend))
    by_kind = [
        [(r[1:]) for r in rules if r[0].kind == kind] for rules in (joined, expected) for kind in SIZED
    ]
    assert by_kind[: len(SIZED)] == by_kind[len(SIZED) :]


# --- Open MPI -------------------------------------------------------------------------------------------

OPENMPI_SAMPLE = """\
2  # collectives
2  # allreduce
2  # communicator sizes
0  # small jobs
2
0 3 0 0
65536 4 0 0
64
3
0 0 0 0       # Open MPI's own choice
8192 6 0 0
1048576 5 4 131072
7  # bcast
1
0
1
0 6 0 0
"""


def numbers_of(text: str) -> list[int]:
    lines = [line.partition("#")[0] for line in text.splitlines() if not line.startswith("rule-file")]
    return [int(word) for line in lines for word in line.split()]


def open_mpi(text: str, collective: int, size: int, ranks: int) -> tuple[int, ...]:
    """What Open MPI decides by a file of version 1: the last block and row not above what is asked for."""
    numbers = iter(numbers_of(text))
    decided: tuple[int, ...] = (0, 0, 0)
    for _ in range(next(numbers)):
        number = next(numbers)
        blocks = []
        for _ in range(next(numbers)):
            first = next(numbers)
            blocks.append((first, [tuple(next(numbers) for _ in range(4)) for _ in range(next(numbers))]))
        if number == collective:
            block = next((rows for first, rows in reversed(blocks) if first <= ranks), blocks[0][1])
            decided = next((row[1:] for row in reversed(block) if row[0] <= size), (0, 0, 0))
    return decided


def open_mpi_choice(collective: str, decided: tuple[int, ...]) -> str:
    algorithm, fanout, segment = decided
    if not algorithm:
        return "mpi"
    parts = [openmpi.ALGORITHMS[collective][algorithm]]
    parts += [f"fanout={fanout}"] if fanout else []
    parts += [f"segment={segment // K}KiB"] if segment else []
    return f"mpi:{'/'.join(parts)}"


def test_openmpi_sample_round_trips() -> None:
    found, lost = import_("openmpi", OPENMPI_SAMPLE, "rules.conf")
    assert lost == ()
    assert rules_of(found) == [
        ("all_reduce ranks 0..64", "0..64KiB", "mpi:recursive_doubling"),
        ("all_reduce ranks 0..64", "64KiB..", "mpi:ring"),
        ("all_reduce ranks 64..", "0..8KiB", "mpi"),
        ("all_reduce ranks 64..", "8KiB..1MiB", "mpi:rabenseifner"),
        ("all_reduce ranks 64..", "1MiB..", "mpi:segmented_ring/fanout=4/segment=128KiB"),
        ("broadcast", "0..", "mpi:binomial"),
    ]
    assert [rule.place for rule in found.rules][:2] == ["rules.conf:6", "rules.conf:7"]
    text, (line,) = export("openmpi", found)
    assert line.endswith("without a segment for each rank Open MPI runs ring instead of segmented_ring")
    assert numbers_of(text) == numbers_of(OPENMPI_SAMPLE)


def test_openmpi_collectives_are_those_our_backend_calls() -> None:
    """MPI has two reduce_scatters: equal shares are reduce_scatter_block, and counts are reduce_scatter."""
    text = "2 12 1 0 1 0 3 0 0 13 1 0 1 0 2 0 0"
    assert rules_of(import_("openmpi", text).table) == [
        ("reduce_scatter_v", "0..", "mpi:ring"), ("reduce_scatter", "0..", "mpi:recursive_doubling"),
    ]  # fmt: skip


def test_openmpi_version_2_has_requests_in_the_same_line() -> None:
    text = "rule-file-version-2\n1\n3\n1\n0\n3\n0 1 0 0 7\n8 2 0 0\n16 4 0 0 9 # last\n"
    found = import_("openmpi", text).table
    assert [rule.backend for rule in found.rules] == [
        "mpi", "mpi:linear/requests=7", "mpi:pairwise", "mpi:linear_sync/requests=9",
    ]  # fmt: skip
    written = export("openmpi", found).text
    assert written.startswith("rule-file-version-2\n")
    assert bare(import_("openmpi", written).table) == bare(found)
    with pytest.raises(ConfigError, match="unknown alltoall algorithm 8"):
        import_("openmpi", text.removeprefix("rule-file-version-2\n"))


def test_openmpi_numbers_are_read_as_c_reads_them() -> None:
    found = import_("openmpi", "1 2 1 0 2 0 0x3 0 0 010 4 0 0").table
    assert rules_of(found) == [
        ("all_reduce", "0..8", "mpi:recursive_doubling"),
        ("all_reduce", "8..", "mpi:ring"),
    ]


def test_openmpi_collectives_without_a_size() -> None:
    text = "3 4 1 0 2 0 1 0 0 64 2 0 0\n6 1 0 1 0 6 0 0\n15 1 0 2 0 1 0 0\n4096 2 0 0\n"
    found, lost = import_("openmpi", text, "r")
    assert rules_of(found) == [
        ("all_to_all_v", "0..", "mpi:basic_linear"), ("barrier", "0..", "mpi:tree"),
        ("scatter_v", "0..", "mpi"), ("scatter", "0..", "mpi:basic_linear"),
    ]  # fmt: skip
    assert lost == (
        "r:1: alltoallv from 64 bytes on: it is looked up as if of 0 bytes, the first row applies",
        "r:4: scatter from 4096 bytes on: only the root has the size, the first row applies",
    )


def test_openmpi_scatter_gets_no_rules_by_size() -> None:
    """Ranks other than the root would follow the row of 0 bytes, and hang."""
    found = table(
        "kind: scatter, bytes: 0..8, backend: 'mpi:binomial'",
        "kind: scatter, bytes: 8.., backend: 'mpi:linear_nb'",
    )
    text, lost = export("openmpi", found)
    assert numbers_of(text)[-4:] == [0, 0, 0, 0]
    assert sum("ignores the size of scatter" in line for line in lost) == 2
    same = table("kind: scatter, bytes: 0.., backend: 'mpi:binomial'")
    assert numbers_of(export("openmpi", same).text)[-4:] == [0, 2, 0, 0]


def test_openmpi_vector_operations_follow_the_rule_without_an_end() -> None:
    found = table(
        "kind: all_gather, bytes: 0..8, backend: 'mpi:bruck'",
        "kind: all_gather, bytes: 8.., backend: 'mpi:ring'",
    )
    text, lost = export("openmpi", found)
    assert lost == ()
    assert open_mpi(text, 1, 0, 2)[0] == openmpi.ALGORITHMS["allgatherv"].index("ring")
    again = import_("openmpi", text).table
    assert choice(again, query("all_gather_v", None)) == "mpi:ring"


def test_built_in_preference_is_left_to_the_library_with_a_note() -> None:
    found = table(
        "kind: all_gather, bytes: 0..8, backend: 'mpi:bruck'",
        "kind: all_gather, bytes: 8.., backend: built-in",
    )
    text, lost = export("openmpi", found)
    what = "not written; Open MPI chooses instead of the built-in preference"
    assert lost == (f"t.yaml:4: all_gather 8..: built-in: {what}",)
    assert open_mpi(text, 0, 4, 2)[0] == openmpi.ALGORITHMS["allgather"].index("bruck")
    assert open_mpi(text, 0, 8, 2)[0] == 0


def test_openmpi_counts_one_share_of_allgatherv() -> None:
    text = "1 1 1 0 2 0 2 0 0 100 3 0 0"
    found, lost = import_("openmpi", text)
    assert lost == ()
    assert choice(found, query("all_gather_v", 399, ranks=4)) == "mpi:bruck"
    assert choice(found, query("all_gather_v", 400, ranks=4)) == "mpi:ring"
    assert numbers_of(export("openmpi", found).text) == numbers_of(text)
    total = table(
        "kind: all_gather_v, bytes: 0..8, backend: 'mpi:ring'", "kind: all_gather_v, bytes: 8.., backend: mpi"
    )
    assert "counts the bytes of all_gather_v per rank" in export("openmpi", total).lost[0]


def test_openmpi_per_rank_rules_need_one_number_of_ranks() -> None:
    rules = [
        f"kind: all_to_all, {{}}basis: per_rank, bytes: {span}, backend: 'mpi:{name}'"
        for span, name in (("0..100", "linear"), ("100..", "pairwise"))
    ]
    text, lost = export("openmpi", table(*(rule.format("ranks: 4, ") for rule in rules)))
    assert [open_mpi(text, 3, size, 4)[0] for size in (399, 400)] == [1, 2]
    assert all("all_to_all_v" in line for line in lost)
    assert "counts the bytes of all_to_all in total" in " ".join(
        export("openmpi", table(*(r.format("") for r in rules))).lost
    )


def test_openmpi_reports_losses_of_its_format() -> None:
    text = "2\n8 1 0 1 0 1 0 0\n2 2 0 1 0 1 0 0\n1 1 0 2 0 0\n"
    found, lost = import_("openmpi", text, "r")
    assert rules_of(found) == [("all_reduce ranks 1..", "0..", "mpi:nonoverlapping")]
    assert lost == ("r:2: tables have no exscan", "r:3: no communicator has so few ranks as 0")


@pytest.mark.parametrize(
    "algorithm",
    ["no such", "ring/segments=8", "ring/segment=8KB", "ring/fanout=-1", "ring/fanout=1/fanout=2", "ignore"],
)
def test_openmpi_unknown_algorithms_of_a_table_are_lost(algorithm: str) -> None:
    text, (line,) = export("openmpi", table(f"kind: all_reduce, bytes: 0.., backend: 'mpi:{algorithm}'"))
    assert numbers_of(text) == [1, 2, 1, 0, 1, 0, 0, 0, 0]
    assert line.startswith("t.yaml:3: all_reduce 0..: mpi:")
    assert line.endswith("; left to Open MPI")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "the file ends here; expected the number of collectives"),
        ("1\n2\n1\n0\n2\n0 3 0 0\n", 6, "the file ends here; expected a message size"),
        (
            "1\n2\n1\n0\n1\n8 3 0 0\n",
            6,
            "the first message size is 8; expected 0, or Open MPI drops the whole file",
        ),
        ("1\n2\n1\n0\n1\n0 ring 0 0\n", 6, "expected an algorithm, a whole number, got 'ring'"),
        ("1\n2\n1\n0\n1\n0 7 0 0\n", 6, "unknown allreduce algorithm 7; known: 0 ignore, 1 basic_linear"),
        ("1\n2\n1\n0\n1\n0 -1 0 0\n", 6, "got '-1'"),
        (
            "1\n22\n1\n0\n1\n0 1 0 0\n",
            2,
            "expected the number of a collective, a whole number up to 21, got '22'",
        ),
        ("23\n", 1, "expected the number of collectives"),
        (
            "1\n2\n1\n0\n3\n0 1 0 0\n9 1 0 0\n9 2 0 0\n",
            8,
            "a message size: 9 after 9; expected ascending ones",
        ),
        ("1\n2\n2\n4\n1\n0 1 0 0\n2\n1\n0 1 0 0\n", 7, "a communicator size: 2 after 4"),
        ("2\n2\n1\n0\n1\n0 1 0 0\n2\n1\n0\n1\n0 1 0 0\n", 7, "collective 2 (allreduce) is also in line 2"),
        ("1\n2\n1\n0\n1\n0 1 0 0\n9\n", 7, "expected the end of the file, got '9'"),
        ("rule-file-version-3\n0\n", 1, "unknown version 3; known: 1, 2"),
        ("# late\nrule-file-version-2\n1\n", 2, "got 'rule-file-version-2'"),
        ("0\n", 1, "no rules that a table can express"),
    ],
)
def test_openmpi_refuses_entries_that_it_would_skip_or_drop(text: str, line: int, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rules\.conf:{line}: ") as caught:
        import_("openmpi", text, "rules.conf")
    assert what in str(caught.value)


@st.composite
def openmpi_texts(draw: st.DrawFn) -> str:
    chosen = draw(
        st.lists(st.sampled_from(("allreduce", "bcast", "alltoall")), min_size=1, max_size=3, unique=True)
    )
    lines = [str(len(chosen))]
    for collective in chosen:
        firsts = sorted(draw(st.sets(st.integers(0, 6), min_size=1, max_size=3)))
        lines += [str(openmpi.NUMBERS[collective]), str(len(firsts))]
        for first in firsts:
            sizes = [0, *sorted(draw(st.sets(st.integers(1, 40), max_size=3)))]
            lines += [str(first), str(len(sizes))]
            for size in sizes:
                algorithm = draw(st.integers(0, len(openmpi.ALGORITHMS[collective]) - 1))
                fanout, segment = draw(st.sampled_from((0, 2))), draw(st.sampled_from((0, 4096)))
                lines.append(f"{size} {algorithm} {fanout} {segment}")
    return "\n".join(lines) + "\n"


@settings(max_examples=examples(80))
@given(openmpi_texts())
def test_openmpi_import_and_export_decide_as_open_mpi_does(text: str) -> None:
    found = import_("openmpi", text).table
    written = export("openmpi", found).text
    for kind, ranks, nbytes in product(
        ("all_reduce", "broadcast", "all_to_all"), range(1, 8), range(0, 44, 2)
    ):
        name = openmpi.COLLECTIVES[kind].name
        decided = open_mpi(text, openmpi.NUMBERS[name], nbytes, ranks)
        ours = choice(found, query(kind, nbytes, ranks))
        expected = open_mpi_choice(name, decided)
        if "two_proc" in expected and ranks != 2:  # Open MPI raises
            expected = "mpi"
        assert (ours or "mpi") == expected, (kind, ranks, nbytes)
        again = open_mpi(written, openmpi.NUMBERS[name], nbytes, ranks)
        if ranks > 1:  # a block of 0 stands for one rank as well, where Open MPI looks nothing up
            assert open_mpi_choice(name, again) == expected


@pytest.mark.parametrize("kind", ["all_gather", "all_gather_v", "all_to_all", "barrier"])
def test_openmpi_two_proc_is_for_two_ranks(kind: str) -> None:
    """It raises on three: see `test_open_mpi_runs_the_algorithms_of_an_exported_file`."""
    name = openmpi.COLLECTIVES[kind].name
    for ranks, lost in (("", 1), ("ranks: 2, ", 0), ("ranks: 3.., ", 1), ("ranks: 2..9, ", 1)):
        text, lines = export("openmpi", table(f"kind: {kind}, {ranks}bytes: 0.., backend: 'mpi:two_proc'"))
        lines = tuple(line for line in lines if "has no alltoallv" not in line)
        assert len(lines) == lost, lines
        assert all("two_proc raises on other numbers of ranks than 2" in line for line in lines)
        for number in range(2, 12):
            decided = open_mpi_choice(name, open_mpi(text, openmpi.NUMBERS[name], 0, number))
            assert decided == ("mpi:two_proc" if number == 2 and "3.." not in ranks else "mpi")
    number = openmpi.ALGORITHMS[name].index("two_proc")
    found, (line,) = import_("openmpi", f"1 {openmpi.NUMBERS[name]} 1 0 1 0 {number} 0 0\n", "r.conf")
    assert line == "r.conf:1: two_proc raises on other numbers of ranks than 2; for these alone"
    assert [choice(found, query(kind, 0, ranks)) for ranks in (2, 3)] == ["mpi:two_proc", "mpi"]
    blocks = f"1 {openmpi.NUMBERS[name]} 2 2 1 0 {number} 0 0 3 1 0 1 0 0\n"  # the first is for 2 alone
    found, lines = import_("openmpi", blocks, "r.conf")
    assert not lines
    assert choice(found, query(kind, 0, 2)) == "mpi:two_proc"


@pytest.mark.parametrize(
    ("kind", "algorithm", "fitting", "others"),
    [
        ("all_gather", "recursive_doubling", ("4", "8"), ("", "6", "2..5", "4..")),
        ("all_gather", "neighbor", ("4", "6"), ("", "3", "4..6")),
        ("all_gather_v", "neighbor", ("4", "6"), ("", "3", "4..6")),
    ],
)
def test_openmpi_algorithms_that_give_way_on_some_numbers_of_ranks(
    kind: str, algorithm: str, fitting: tuple[str, ...], others: tuple[str, ...]
) -> None:
    for ranks in (*fitting, *others):
        key = f"ranks: {ranks}, " if ranks else ""
        found = table(f"kind: {kind}, {key}bytes: 0.., basis: per_rank, backend: 'mpi:{algorithm}'")
        lost = [line for line in export("openmpi", found).lost if "has no allgatherv" not in line]
        assert [f"instead of {algorithm}" in line for line in lost] == [True] * (ranks in others), (
            ranks,
            lost,
        )


@pytest.mark.parametrize(
    ("kind", "algorithm", "key", "said"),
    [
        ("all_reduce", "ring", "bytes: 0..", "fewer elements than ranks Open MPI runs recursive_doubling"),
        ("all_reduce", "ring", "bytes: 4KiB..", ""),
        ("all_reduce", "ring", "ranks: 3, bytes: 32..", "fewer elements than ranks Open MPI runs"),
        ("all_reduce", "ring", "ranks: 3, bytes: 48..", ""),
        ("all_reduce", "rabenseifner", "bytes: 0..", "the number of ranks Open MPI runs basic_linear"),
        ("all_reduce", "rabenseifner", "ranks: 4, bytes: 63..", "the number of ranks Open MPI runs basic"),
        ("all_reduce", "rabenseifner", "ranks: 4, bytes: 64..", ""),
        ("all_reduce", "rabenseifner", "ranks: 3, bytes: 32..", ""),
        ("reduce", "rabenseifner", "bytes: 0..", "the number of ranks Open MPI runs linear"),
        ("broadcast", "scatter_allgather", "bytes: 0..", "elements than ranks Open MPI runs basic_linear"),
        ("all_reduce", "segmented_ring", "bytes: 1GiB..", "without segments Open MPI runs ring"),
        ("all_reduce", "segmented_ring/segment=1KiB", "ranks: 4, bytes: 4KiB..", ""),
        ("all_reduce", "segmented_ring/segment=1KiB", "ranks: 4, bytes: 4000..", "a segment for each rank"),
        ("broadcast", "split_binary_tree/segment=1KiB", "bytes: 2KiB..", ""),
        ("broadcast", "split_binary_tree/segment=1KiB", "bytes: 1KiB..", "for each half Open MPI runs chain"),
        ("broadcast", "split_binary_tree", "bytes: 0..", "with one element Open MPI runs chain"),
        ("broadcast", "split_binary_tree", "bytes: 32..", ""),
    ],
)
def test_openmpi_algorithms_that_give_way_for_small_messages(
    kind: str, algorithm: str, key: str, said: str
) -> None:
    ranks, lo = re.fullmatch(r"(.*)bytes: (\w+)\.\.", key).groups()  # type: ignore[union-attr]
    rules = [f"kind: {kind}, {key}, backend: 'mpi:{algorithm}'"]
    if lo != "0":
        rules.append(f"kind: {kind}, {ranks}bytes: 0..{lo}, backend: mpi")
    lost = [line for line in export("openmpi", table(*rules)).lost if " instead of " in line]
    assert [said in line for line in lost] == [True] * bool(said), lost


# --- Open MPI itself ------------------------------------------------------------------------------------

LAUNCHER = mpi_flavour()
needs_open_mpi = pytest.mark.skipif(
    not mpi_usable() or LAUNCHER is None or LAUNCHER.flavour != "openmpi" or LAUNCHER.major != 5,
    reason="needs mpi4py and Open MPI 5",
)
CALLS = 10
PROGRAM = f"""
import sys
import numpy
from mpi4py import MPI
values = numpy.ones(int(sys.argv[1]) // 8)
result = numpy.empty_like(values)
for _ in range({CALLS}):
    MPI.COMM_WORLD.Allreduce(values, result)
assert (result == MPI.COMM_WORLD.size).all()
"""


def mpi_environment() -> dict[str, str]:
    """Ours, without what an MPI job around us may have left in it."""
    mine = re.compile(r"OMPI_|PMIX_|PRTE_|MCR_JOB")
    return {name: value for name, value in os.environ.items() if not mine.match(name)}


def messages(rules: str, nbytes: int) -> int:
    """How many messages rank 0 of 2 sends in ten allreduces under a rules file, as Open MPI counts them."""
    assert LAUNCHER is not None
    with tempfile.TemporaryDirectory(prefix="mcr-") as folder:  # short: MPI puts sockets in it
        path, counts = Path(folder) / "rules.conf", Path(folder) / "count"
        path.write_text(rules)
        settings = {
            "pml": "ob1,monitoring", "btl": "self,sm", "coll_tuned_use_dynamic_rules": "1",
            "coll_tuned_dynamic_rules_filename": str(path), "pml_monitoring_enable": "2",
            "pml_monitoring_enable_output": "3", "pml_monitoring_filename": str(counts),
        }  # fmt: skip
        options = [word for name, value in settings.items() for word in ("--mca", name, value)]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = [LAUNCHER.path, *root, "--oversubscribe", "--bind-to", "none", *options, "-n", "2"]
        answer = subprocess.run(
            [*command, sys.executable, "-c", PROGRAM, str(nbytes)], capture_output=True, text=True,
            timeout=300, check=False, stdin=subprocess.DEVNULL, env={**mpi_environment(), "TMPDIR": folder},
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        assert "rule" not in answer.stderr, answer.stderr
        counted = Path(f"{counts}.0.prof").read_text()
    found = re.search(r"^C\t0\t1\t\d+ bytes\t(\d+) msgs sent", counted, re.MULTILINE)
    assert found is not None, counted
    total = re.search(r"^I\t0\t1\t\d+ bytes\t(\d+) msgs sent", counted, re.MULTILINE)
    assert total is not None, counted
    return int(total.group(1))


@pytest.mark.long
@needs_open_mpi
def test_open_mpi_follows_an_exported_file() -> None:
    """On two ranks, recursive doubling sends one message, a ring two halves: their number tells which."""
    found = table(
        "kind: all_reduce, bytes: 0..4KiB, backend: 'mpi:recursive_doubling'",
        "kind: all_reduce, bytes: 4KiB.., backend: 'mpi:ring'",
        "kind: all_gather, bytes: 0.., backend: 'mpi:ring'",  # what follows must be read to the end
    )
    text, lost = export("openmpi", found)
    assert lost == ()
    assert messages(text, 4 * K - 8) == CALLS
    assert messages(text, 4 * K) == 2 * CALLS
    other = export("openmpi", table("kind: all_reduce, bytes: 0.., backend: 'mpi:ring'")).text
    assert messages(other, 4 * K - 8) == 2 * CALLS
    broken = other.replace("0 4 0 0", "8 4 0 0")  # the first size is not 0: Open MPI drops the file
    assert broken != other
    assert messages(broken, 4 * K - 8) == CALLS


@pytest.mark.long
@needs_open_mpi
def test_open_mpi_follows_a_file_of_version_2_and_of_several_communicator_sizes() -> None:
    found = table(
        "kind: all_reduce, ranks: 2, bytes: 0.., backend: 'mpi:ring/requests=4'",
        "kind: all_reduce, bytes: 0.., backend: 'mpi:recursive_doubling'",
    )
    text = export("openmpi", found).text
    assert text.startswith("rule-file-version-2\n")
    assert messages(text, 4 * K) == 2 * CALLS
    three = table(
        "kind: all_reduce, ranks: 3, bytes: 0.., backend: 'mpi:ring'",
        "kind: all_reduce, bytes: 0.., backend: 'mpi:recursive_doubling'",
    )
    assert messages(export("openmpi", three).text, 4 * K) == CALLS
    only_three = "1 2 1\n3 1\n0 4 0 0\n"  # the first block holds for smaller communicators too
    assert messages(only_three, 4 * K) == 2 * CALLS
    assert choice(import_("openmpi", only_three).table, query("all_reduce", 4 * K)) == "mpi:ring"


COMBINING = """
import sys
import hashlib
import numpy
from mpi4py import MPI

def combine(one, other, datatype):  # neither associative nor commutative: the result shows the order
    left, right = numpy.frombuffer(one, numpy.uint32), numpy.frombuffer(other, numpy.uint32)
    right[:] = left * numpy.uint32(31) + right * numpy.uint32(17) + numpy.uint32(1)

operation = MPI.Op.Create(combine, commute=True)  # or Open MPI leaves most algorithms out
world = MPI.COMM_WORLD
pair = world.Split(world.rank // 2, world.rank)
for comm in (world, pair):
    whole = numpy.empty(comm.size, numpy.int64)
    comm.Allgather(numpy.full(1, comm.rank), whole)
    assert whole.tolist() == list(range(comm.size))
for name in sys.argv[2:]:
    for nbytes in map(int, sys.argv[1].split(",")):
        count = nbytes // 4
        parts = world.size if name == "Reduce_scatter_block" else 1
        values = numpy.arange(count * parts, dtype=numpy.uint32) + numpy.uint32(1000 * world.rank)
        result = numpy.zeros(count, numpy.uint32)
        getattr(world, name)(values, result, op=operation)
        if world.rank == 0:
            print(name, nbytes, hashlib.sha256(result.tobytes()).hexdigest()[:16], flush=True)
"""


def orders(
    ranks: int,
    sizes: Sequence[int],
    names: Sequence[str],
    rules: str = "",
    forced: Mapping[str, int] | None = None,
) -> dict[tuple[str, int], str]:
    """What rank 0 has after reductions that show their order, under rules and forced algorithms."""
    assert LAUNCHER is not None
    with tempfile.TemporaryDirectory(prefix="mcr-") as folder:
        path = Path(folder) / "rules.conf"
        path.write_text(rules or "0\n")
        settings = {
            "btl": "self,sm", "coll_tuned_use_dynamic_rules": "1",
            "coll_tuned_dynamic_rules_filename": str(path),
            "coll_tuned_reduce_algorithm_chain_fanout": "1",  # of what is forced; in a file, 0 is 1
            **{f"coll_tuned_{name}_algorithm": str(number) for name, number in (forced or {}).items()},
        }  # fmt: skip
        options = [word for name, value in settings.items() for word in ("--mca", name, value)]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = [LAUNCHER.path, *root, "--oversubscribe", "--bind-to", "none", *options, "-n", str(ranks)]
        answer = subprocess.run(
            [*command, sys.executable, "-c", COMBINING, ",".join(map(str, sizes)), *names],
            capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL,
            env={**mpi_environment(), "TMPDIR": folder},
        )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    lines = [line.split() for line in answer.stdout.splitlines()]
    return {(name, int(nbytes)): order for name, nbytes, order in lines}


@needs_open_mpi
def test_open_mpi_runs_the_algorithms_of_an_exported_file() -> None:
    """On three ranks and two of them; all_gathers are right, although `two_proc` raises on three."""
    found = table(
        "kind: all_reduce, bytes: 0..4KiB, backend: 'mpi:recursive_doubling'",
        "kind: all_reduce, bytes: 4KiB.., backend: 'mpi:ring'",
        "kind: reduce, bytes: 0..4KiB, backend: 'mpi:binomial'",
        "kind: reduce, bytes: 4KiB.., backend: 'mpi:linear'",
        "kind: all_gather, bytes: 0.., backend: 'mpi:two_proc'",
    )
    text = export("openmpi", found).text
    sizes, names = (4 * K - 8, 4 * K), ("Allreduce", "Reduce")
    by_rules = orders(3, sizes, names, text)
    first = orders(3, sizes, names, text, {"allreduce": 3, "reduce": 5})  # what is forced wins over the file
    second = orders(3, sizes, names, forced={"allreduce": 4, "reduce": 1})
    assert all(first[key] != second[key] for key in first)
    assert by_rules == {key: (first if key[1] < 4 * K else second)[key] for key in by_rules}


@pytest.mark.long
@needs_open_mpi
def test_open_mpi_runs_another_algorithm_for_fewer_elements_than_ranks() -> None:
    """As the report of an export says: one element, and more than there are ranks, on four ranks."""
    sizes = (4, 4 * K)
    for name, kind, number in (
        ("Allreduce", "allreduce", 6),
        ("Allreduce", "allreduce", 4),
        ("Reduce", "reduce", 7),
    ):
        algorithm = openmpi.ALGORITHMS[kind][number]
        other = openmpi.ALGORITHMS[kind].index(openmpi._FEW[kind, algorithm])
        own, instead = (orders(4, sizes, [name], forced={kind: each}) for each in (number, other))
        assert [own[name, size] == instead[name, size] for size in sizes] == [True, False], algorithm


@pytest.mark.long
@needs_open_mpi
@pytest.mark.parametrize("ranks", [3, 4])
def test_open_mpi_runs_each_algorithm_of_an_exported_file(ranks: int) -> None:
    """Each of three reductions, below and above a limit, as the number that is forced."""
    kinds = {"all_reduce": "Allreduce", "reduce": "Reduce", "reduce_scatter": "Reduce_scatter_block"}
    sizes = (4 * K - 8, 4 * K)
    numbers = {kind: openmpi.ALGORITHMS[openmpi.COLLECTIVES[kind].name] for kind in kinds}
    for number in range(1, max(map(len, numbers.values()))):
        chosen = {kind: names[number] for kind, names in numbers.items() if number < len(names)}
        names = [kinds[kind] for kind in chosen]
        forced = orders(
            ranks, sizes, names, forced={openmpi.COLLECTIVES[kind].name: number for kind in chosen}
        )
        for size, spans in ((sizes[0], ("0..{}", "{}..")), (sizes[1], ("{}..", "0..{}"))):
            rules = []
            for kind, name in chosen.items():
                parts = ranks if kind == "reduce_scatter" else 1  # whose bytes are those of all parts
                own, other = (span.format(f"{4 * parts}KiB") for span in spans)
                rules.append(f"kind: {kind}, bytes: {own}, backend: 'mpi:{name}'")
                rules.append(f"kind: {kind}, bytes: {other}, backend: mpi")
            found = orders(ranks, [size], names, export("openmpi", table(*rules)).text)
            assert found == {key: order for key, order in forced.items() if key[1] == size}, rules


@needs_open_mpi
def test_algorithm_numbers_are_those_of_the_installed_open_mpi() -> None:
    assert LAUNCHER is not None
    tool = Path(LAUNCHER.path).with_name("ompi_info")
    if not tool.exists():
        pytest.skip("needs ompi_info beside mpiexec")
    answer = subprocess.run(
        [tool, "--param", "coll", "tuned", "--level", "9"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    pattern = r'"coll_tuned_(\w+)_algorithm" .*\n(?:.*\n)?? +Valid values: (.*)'
    found = {name: values.split(", ") for name, values in re.findall(pattern, answer.stdout)}
    ours = {
        name: [f"{number}|{each}" for number, each in enumerate(names)]
        for name, names in openmpi.ALGORITHMS.items()
    }
    assert {name: found[name] for name in ours} == ours


# --- UCC ------------------------------------------------------------------------------------------------

UCC_SAMPLE = """\
UCC_TL_UCP_TUNE=allreduce:host:0-4K:@knomial#allreduce:host:4K-inf:[2-8,16-inf]:@sra_knomial#bcast:cuda:0-1M:@0
UCC_TL_NCCL_TUNE=allreduce,allgather:cuda:inf
"""


def ucc_size(text: str) -> float:
    units = {"k": K, "m": K * K}
    return float("inf") if text == "inf" else int(text.rstrip("km")) * units.get(text[-1], 1)


def ucc_model(text: str, collective: str, memory: str, nbytes: int, ranks: int) -> str | None:
    """What UCC decides: the highest score of the tokens that match; sizes half-open, ranks not."""
    best: tuple[float, str] | None = None
    for line in text.lower().splitlines():
        variable, _, value = line.partition("=")
        component = variable.split("_")[2]
        for token in value.split("#"):
            score, algorithm, matches = {"ucp": 10.0, "nccl": 20.0}[component], "*", True
            named = ""
            for field in token.split(":"):
                if field.startswith("@"):
                    algorithm = field[1:]
                elif field.startswith("["):
                    ends = [part.split("-") for part in field[1:-1].split(",")]
                    matches &= any(float(each[0]) <= ranks <= float(each[-1]) for each in ends)
                elif field == "inf" or field.isdigit():
                    score, named = float(field), f"/{field}"
                elif "-" in field:
                    lo, hi = map(ucc_size, field.split("-"))
                    matches &= lo <= nbytes < hi
                elif field.split(",")[0] in ("host", "cuda"):
                    matches &= memory in field.split(",")
                else:
                    matches &= collective in field.split(",")
            if matches and score > 0 and (best is None or score > best[0]):
                best = (score, f"mpi:{component}/{algorithm}{named}")
    return best[1] if best else None


def test_ucc_sample_round_trips() -> None:
    found, lost = import_("ucc", UCC_SAMPLE, "ucc.env")
    assert lost == ()
    assert export("ucc", found) == (UCC_SAMPLE, ())


def test_ucc_fields_may_stand_in_any_order_and_case() -> None:
    text = "allreduce:0-4K:@knomial"
    for other in ("@Knomial:0-4k:ALLREDUCE", "0b-4096:@knomial:allreduce", "allreduce:@knomial:0-4KB"):
        assert bare(import_("ucc", other).table) == bare(import_("ucc", text).table)
    assert rules_of(import_("ucc", f'export UCC_TL_UCP_TUNE="{text}"').table) == [
        ("all_reduce", "0..4KiB", "mpi:ucp/knomial"), ("all_reduce", "4KiB..", "mpi"),
    ]  # fmt: skip


def test_ucc_ranges_are_half_open_and_ranks_are_not() -> None:
    found = import_("ucc", "allreduce:8-16:[2-4]:@dbt").table
    assert [choice(found, query("all_reduce", n)) for n in (7, 8, 15, 16)] == [
        "mpi",
        "mpi:ucp/dbt",
        "mpi:ucp/dbt",
        "mpi",
    ]
    assert [choice(found, query("all_reduce", 8, ranks=n)) for n in (2, 4, 5)] == [
        "mpi:ucp/dbt",
        "mpi:ucp/dbt",
        None,
    ]


def test_ucc_highest_score_wins_between_components() -> None:
    text = (
        "UCC_TL_UCP_TUNE=allreduce:0-64:50:@dbt#allreduce:64-inf:@knomial\n"
        "UCC_TL_NCCL_TUNE=allreduce:8-inf:20\n"
    )
    found, lost = import_("ucc", text, "u")
    assert rules_of(found) == [
        ("all_reduce", "0..64", "mpi:ucp/dbt/50"), ("all_reduce", "64..", "mpi:nccl/*/20"),
    ]  # fmt: skip
    assert (
        "u:2: all_reduce 8..: ucp has the higher score; tables cannot express UCC's fallback to this" in lost
    )


def test_ucc_keeps_the_first_of_rules_that_only_its_order_of_components_decides() -> None:
    text = "UCC_TL_UCP_TUNE=allreduce:20\nUCC_TL_NCCL_TUNE=allreduce:8-inf:20#bcast:20\n"
    found, (lost,) = import_("ucc", text, "u")
    assert lost.startswith(
        "u:2: all_reduce 8.. overlaps 0.. of ucp in u:1 with the same score, which is kept"
    )
    assert rules_of(found) == [("all_reduce", "0..", "mpi:ucp/*/20"), ("broadcast", "0..", "mpi:nccl/*/20")]
    text = "UCC_TL_SHARP_TUNE=allreduce:inf\nUCC_TL_UCP_TUNE=allreduce:inf#bcast:@knomial\n"
    found, (lost,) = import_("ucc", text, "u")
    assert "of sharp in u:1 with the same score, which is kept" in lost
    assert [rule.backend for rule in found.rules] == ["mpi:sharp/*/inf", "mpi:ucp/knomial"]


def test_ucc_keeps_the_first_of_overlapping_ranges_of_one_component() -> None:
    found, (lost,) = import_("ucc", "allreduce:0-8:@dbt#allreduce:4-inf:@knomial", "u")
    assert lost == (
        "u:1: all_reduce 4.. overlaps 0..8 of u:1, which is kept; UCC refuses overlapping ranges of one "
        "component"
    )
    assert rules_of(found) == [("all_reduce", "0..8", "mpi:ucp/dbt"), ("all_reduce", "8..", "mpi")]
    assert "overlapping" in import_("ucc", "allreduce:@dbt#inf").lost[0]
    assert import_("ucc", "allreduce:0-8:[2-4]:@dbt#allreduce:0-8:[5-inf]:@knomial").lost == ()


def test_ucc_reports_losses_of_its_format() -> None:
    text = (
        "allreduce:@dbt:cuda_managed,host#bcast:0-4K#reduce:0:4K-inf#fanin:inf"
        "#alltoallv:4K-inf:@hybrid#barrier:0-8:9"
    )
    found, lost = import_("ucc", text, "u")
    assert rules_of(found) == [("all_reduce on cpu", "0..", "mpi:ucp/dbt"), ("barrier", "0..", "mpi:ucp/*/9")]
    assert [line.partition(": ")[2] for line in lost] == [
        "allreduce:@dbt:cuda_managed,host: tables have no memory type cuda_managed",
        "bcast:0-4K: neither a score nor an algorithm, so UCC ignores it",
        "reduce:0:4K-inf: disables ucp there, which a table cannot express",
        "fanin:inf: tables have no fanin",
        "alltoallv:4K-inf:@hybrid: alltoallv is looked up as if of 0 bytes, so this never applies",
        "barrier:0-8:9: barrier is looked up as if of 0 bytes, so this applies to all sizes",
    ]


def test_ucc_token_without_collective_is_for_all() -> None:
    found = import_("ucc", "UCC_TL_NCCL_TUNE=cuda:inf\nUCC_TL_UCP_TUNE=allgather:host:@ring\n").table
    assert choice(found, query("barrier", 0, device="cuda")) == "mpi:nccl/*/inf"
    assert choice(found, query("all_gather", 8)) == "mpi:ucp/ring"
    assert choice(found, query("all_gather_v", None)) == "mpi"  # UCC's allgatherv has rules of its own
    assert choice(found, query("all_gather_v", None, device="cuda")) == "mpi:nccl/*/inf"


def test_ucc_counts_one_share_of_reduce_scatter() -> None:
    found = import_("ucc", "reduce_scatter:0-100:@ring").table
    assert choice(found, query("reduce_scatter", 399, ranks=4)) == "mpi:ucp/ring"
    assert choice(found, query("reduce_scatter", 400, ranks=4)) == "mpi"
    assert export("ucc", found) == ("UCC_TL_UCP_TUNE=reduce_scatter:0-100:@ring\n", ())


@pytest.mark.parametrize(
    "algorithm",
    ["dbt", "ucq/dbt", "ucp/tree", "ucp/dbt/0", "ucp/dbt/1/2", "ucp/*", "sharp/ring", "ucp/dbt/x"],
)
def test_ucc_unknown_algorithms_of_a_table_are_lost(algorithm: str) -> None:
    text, (line,) = export("ucc", table(f"kind: all_reduce, bytes: 0.., backend: 'mpi:{algorithm}'"))
    assert text == ""
    assert line.startswith(f"t.yaml:3: all_reduce 0..: mpi:{algorithm}: ")
    assert line.endswith("; left to UCC")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("UCC_TL_UPC_TUNE=allreduce:inf", "unknown variable 'UCC_TL_UPC_TUNE'; known: UCC_TL_UCP_TUNE"),
        ("UCC_TL_HIER_TUNE=allreduce:inf", "did you mean 'UCC_CL_HIER_TUNE'?"),
        ("UCC_CLS=all", "UCC_CLS: no TUNE string"),
        ("allreduec:inf", "unknown field 'allreduec'"),
        ("allreduce:@rings", "unknown ucp algorithm of allreduce 'rings'; known: knomial"),
        ("UCC_TL_SHARP_TUNE=allreduce:@ring", "known: none, sharp has one algorithm only"),
        ("@knomial", "@knomial without a collective"),
        ("allreduce:0-4P:inf", "expected a size such as 4K or inf, got '4p'"),
        ("allreduce:4K-4K:inf", "empty range '4k-4k'"),
        ("allreduce:inf-4K:3", "empty range"),
        ("allreduce:[8-2]:inf", "empty range '8-2'"),
        ("allreduce:[x]:inf", "expected numbers of ranks such as 2-8"),
        ("allreduce:1:2", "unknown field '2', or a second one of its kind"),
        ("allreduce:gpu:inf", "memory types (host, cuda, cuda_managed, rocm, rocm_managed, "),
        ("allreduce :inf", "unknown field 'allreduce '"),
        ("allreduce:[2-4,]:inf", "expected numbers of ranks such as 2-8"),
        ("allreduce:0-4k-8k:inf", "unknown field '0-4k-8k'"),
    ],
)
def test_ucc_unknown_names_cost_their_rule_alone(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=r"^ucc\.env:1: no rules that a table can express") as caught:
        import_("ucc", f"# comment\n{text}\n", "ucc.env")
    assert what in str(caught.value)
    good, of = ("UCC_TL_SELF_TUNE=reduce:inf", "self") if "=" in text else ("reduce:inf", "ucp")
    found, lost = import_("ucc", f"{good}\n{text}\n", "ucc.env")
    assert rules_of(found) == [("reduce", "0..", f"mpi:{of}/*/inf")]
    assert all(line.startswith("ucc.env:2: ") for line in lost)
    assert what in "; ".join(lost)


@pytest.mark.parametrize(
    ("format", "rule"),
    [
        ("ucc", "UCC_TL_UCP_TUNE=bcast:@knomial"),
        ("ucc", "export UCC_TL_UCP_TUNE='bcast:@knomial'"),
        ("oneccl", "export CCL_BCAST=ring"),
        ("nccl-csv", "broadcast,0,8,ring,ll,1,1,1"),
    ],
)
@pytest.mark.parametrize(
    "junk",
    ["nonsense", "set -e", "mpirun -n 2 ./a.out", "mpirun -x UCC_TL_UCP_TUNE=bcast:@dbt ./a", "fi", "10"],
)
@pytest.mark.parametrize("before", [False, True])
def test_a_line_that_is_no_rule_costs_that_line_alone(
    format: str, rule: str, junk: str, before: bool
) -> None:
    alone = import_(format, rule, "job.sh")
    found, lost = import_(format, f"{junk}\n{rule}\n" if before else f"{rule}\n{junk}\n", "job.sh")
    assert rules_of(found) == rules_of(alone.table)
    (said,) = [line for line in lost if line not in alone.lost]
    assert said.startswith(f"job.sh:{1 if before else 2}: ")
    assert "set again" not in said
    assert junk in said or format == "nccl-csv"


@pytest.mark.parametrize(
    ("format", "rule"),
    [
        ("ucc", "UCC_TL_UCP_TUNE=bcast:@knomial"),
        ("oneccl", "CCL_BCAST=ring"),
        ("nccl-csv", "broadcast,0,8,ring,ll,1,1,1"),
        ("openmpi", "1\n7\n1\n0\n1\n0 3 0 0"),
    ],
)
def test_a_byte_order_mark_costs_nothing(format: str, rule: str) -> None:
    found, lost = import_(format, f"\ufeff{rule}\n", "f")
    assert (rules_of(found), lost) == (rules_of(import_(format, rule, "f").table), ())


def test_a_value_without_quotes_ends_at_a_space_as_in_a_shell() -> None:
    for line in ("UCC_TL_UCP_TUNE=bcast:@dbt mpirun ./a", 'export UCC_TL_UCP_TUNE="bcast:@dbt" # best'):
        found, (lost,) = import_("ucc", line, "j")
        assert rules_of(found) == [("broadcast", "0..", "mpi:ucp/dbt")]
        assert lost.startswith("j:1: no VARIABLE=value: '")
    several = import_("oneccl", "export CCL_BCAST=ring CCL_REDUCE='tree'", "j")
    assert rules_of(several.table) == [("broadcast", "0..", "mpi:ring"), ("reduce", "0..", "mpi:tree")]
    assert several.lost == ()


def test_ucc_strings_alone_add_up() -> None:
    found, lost = import_("ucc", "bcast:@dbt\nnonsense\nreduce:@dbt\n", "u")
    assert rules_of(found) == [("broadcast", "0..", "mpi:ucp/dbt"), ("reduce", "0..", "mpi:ucp/dbt")]
    assert len(lost) == 1
    assert lost[0].startswith("u:2: 'nonsense': unknown field")


def test_ucc_takes_every_name_that_it_registers() -> None:
    """Those that `ucc_info -A` lists; some of them no string of UCC may have, so they are not written."""
    for component, about in ucc_names.COMPONENTS.items():
        for collective, names in about.algorithms.items():
            kind = next((kind for kind, each in ucc.COLLECTIVES.items() if each.name == collective), None)
            for name in names:
                text = f"UCC_{about.layer}_{component.upper()}_TUNE={collective}:@{name}\n"
                if kind is None:
                    with pytest.raises(ConfigError, match=f"tables have no {collective}"):
                        import_("ucc", text)
                    continue
                found, lost = import_("ucc", text)
                assert lost == ()
                assert found.rules[-1].backend == f"mpi:{component}/{name}"
                written = export("ucc", found)
                is_listed = collective in ("barrier", "gather", "gatherv", "scatterv") or (
                    component == "cuda" and collective.startswith("reduce_scatter")
                )
                assert written.text == ("" if is_listed else text)
                assert bool(written.lost) == is_listed


UCC_CONF = """\
UCC_CL_BASIC_TLS=^sharp,nccl  ; all but these

#Intel Skylake:
[vendor=intel model=skylake team_size=4 ppn=2 nnodes=2]
UCC_TL_UCP_ALLREDUCE_KN_RADIX=2
UCC_TL_UCP_TUNE=allreduce:0-4k:@0#allreduce:4k-inf:@sra_knomial

[vendor=intel model=skylake ppn=8 nnodes=1]
UCC_TL_UCP_TUNE = bcast:[2-8]:@dbt

[vendor=amd model=rome team_size=2 ppn=1 nnodes=2]
UCC_TL_UCP_TUNE=allreduce:@1

[vendor=intel model=skylake nnodes=4 sock=2]
UCC_TL_CUDA_TUNE=allreduce:inf
UCC_TL_UCP_TUNE=reduce:@srg
"""


def test_ucc_conf_has_sections_and_other_variables() -> None:
    found, lost = import_("ucc", UCC_CONF, "ucc.conf")
    assert [(str(rule.key), rule.span(), rule.backend) for rule in found.rules if ":" in rule.backend] == [
        ("all_reduce ranks 4 nodes 2", "0..4KiB", "mpi:ucp/0"),
        ("all_reduce ranks 4 nodes 2", "4KiB..", "mpi:ucp/sra_knomial"),
        ("broadcast ranks 8 nodes 1", "0..", "mpi:ucp/dbt"),
        ("reduce nodes 4", "0..", "mpi:ucp/srg"),
    ]
    assert lost == (
        "ucc.conf:14: [vendor=intel model=skylake nnodes=4 sock=2]: tables cannot express sock=2; "
        "read without it",
        "ucc.conf:15: UCC_TL_CUDA_TUNE: UCC takes strings for TL/UCP alone from a section",
        "ucc.conf:1: UCC_CL_BASIC_TLS: no TUNE string",
        "ucc.conf:5: UCC_TL_UCP_ALLREDUCE_KN_RADIX: no TUNE string",
        "ucc.conf:11: sections for vendor=amd model=rome: a table is for one processor, "
        "here vendor=intel model=skylake",
    )
    found, lost = import_("ucc", f"UCC_TL_UCP_TUNE=allreduce:@dbt\n{UCC_CONF}", "ucc.conf")
    assert [rule.backend for rule in found.rules] == ["mpi:ucp/dbt"]
    assert lost[-1] == "ucc.conf:1: UCC takes this string for TL/UCP instead of those in sections"


@pytest.mark.parametrize(
    "text",
    [
        "[team_size=4]\n{}",
        "[ team_size=4  ] ; four\n{}",
        "[team_size==4=5]# four\n{}",
        "[team_size=+4-4] four\r\n{}\r\n",
        "[team_size=8 team_size=-4]\n   {}  ; indented, but the first\n",
        "[vendor=x]\n[team_size=4]\n{}",
        "; [team_size=8]\n\ufeff"[:-1] + "[team_size=4]\n# [team_size=8]\n  ; [team_size=8]\n{}",
    ],
)
@pytest.mark.parametrize(
    "string",
    [
        "UCC_TL_UCP_TUNE=allreduce:@knomial",
        "UCC_TL_UCP_TUNE : allreduce:@knomial",
        "UCC_TL_UCP_TUNE:AllReduce:@KNOMIAL ;comment",
        "UCC_TL_UCP_TUNE\t=\tallreduce::@knomial:#",
        "UCC_TL_UCP_TUNE = #:allreduce,,:@knomial##,",
    ],
)
def test_ucc_conf_is_read_as_inih_and_strtok_read_it(text: str, string: str) -> None:
    found, lost = import_("ucc", text.format(string), "u")
    assert rules_of(found) == [("all_reduce ranks 4", "0..", "mpi:ucp/knomial")]
    assert "neither a score" in str(lost) if string.endswith(",") else lost == ()


def test_a_line_of_a_shell_goes_on_after_a_backslash() -> None:
    text = "# a comment \\\nexport UCC_TL_UCP_TUNE=allreduce:@dbt\\\n#bcast:@knomial\nA=b c\\"
    found = import_("ucc", text)
    whole = import_("ucc", "UCC_TL_UCP_TUNE=allreduce:@dbt#bcast:@knomial")
    assert rules_of(found.table) == rules_of(whole.table)
    assert any(":4: " in line for line in found.lost)


def test_ucc_strings_have_no_empty_pieces() -> None:
    for one, other in (
        ("allreduce:0--4k-:@dbt", "allreduce:0-4k:@dbt"),
        ("allreduce: 0-+4kb x:@dbt", "allreduce:0-4k:@dbt"),
        ("allreduce:4k-auto:@dbt", "allreduce:4k-inf:@dbt"),
        ("allreduce:[,2--4,-8-,]:@dbt", ""),
        ("allreduce:[,2--4,,-8-]:@dbt", "allreduce:[2-4,8]:@dbt"),
        ("allreduce:@", "allreduce:@0"),
        ("allreduce:010", "allreduce:10"),
        ("allreduce,,bcast:,:host,,:@dbt", "allreduce,bcast:host:@dbt"),
        ("allreduce:CudaManaged,RocmManaged,cuda:@dbt", "allreduce:cuda:@dbt"),
        ("allreduce:@dbt;", "allreduce:@dbt"),
        ("allreduce:4k-18446744073709551615:@dbt", f"allreduce:4k-{2**63 - 1}:@dbt"),
    ):
        text = f"export UCC_TL_UCP_TUNE='{one}'\nexport UCC_TL_CUDA_TUNE=\n"
        if other:
            assert rules_of(import_("ucc", text).table) == rules_of(import_("ucc", other).table)
        else:
            with pytest.raises(ConfigError, match="expected numbers of ranks"):
                import_("ucc", text)
    assert import_("ucc", "UCC_TL_UCP_TUNE=allreduce:@dbt#\nUCC_TL_CUDA_TUNE=\n").lost == ()
    two = import_("ucc", "UCC_TL_UCP_TUNE=bcast:@dbt;export UCC_TL_CUDA_TUNE=reduce:inf\n")
    assert {rule.backend for rule in two.table.rules} == {"mpi:ucp/dbt", "mpi:cuda/*/inf"}


@pytest.mark.parametrize(
    "header",
    [
        "[team_size=4",
        "[team_size=4 ; four]",
        "[team_size=4\tnnodes=2]",
        "[team_size=]",
        "[team_size]",
        "[=]",
        "[Team_size=4]",
        "[MODEL=rome]",
        "[team_size=4-inf]",
        "[team_size=2-4-8]",
        "[team_size=4x team_size=4]",
        "[team_size=8-2]",
        "[team_size=0]",
        "[sock=x]",
        "[4]",
        "[4]: four",
        "[-f x]",
        "  [nodes=4] ; indented",
    ],
)
def test_strings_of_a_ucc_section_that_cannot_be_read_apply_nowhere(header: str) -> None:
    string = "UCC_TL_UCP_TUNE=allreduce:@dbt\n"
    with pytest.raises(ConfigError, match=r"u:1: \[.*UCC refuses a ucc\.conf with this section"):
        import_("ucc", f"{header}\n{string}", "u")
    found, lost = import_(
        "ucc", f"[nnodes=3]\nUCC_TL_UCP_TUNE=bcast:@dbt\n{header}\n{string}[]\nUCC_X=1\n", "u"
    )
    assert rules_of(found) == [("broadcast nodes 3", "0..", "mpi:ucp/dbt")]
    assert any(line.startswith("u:3: [") for line in lost)
    assert "set again" not in str(lost)


def test_ucc_sections_are_told_apart_by_their_names() -> None:
    one, other = "UCC_TL_UCP_TUNE=allreduce:@dbt\n", "UCC_TL_UCP_TUNE=allreduce:@knomial\n"
    found, lost = import_("ucc", f"[team_size=2-8]\n{one}[ team_size=4 ]\n{other}", "u")
    assert rules_of(found)[0] == ("all_reduce ranks 2..9", "0..", "mpi:ucp/dbt")
    assert lost[0] == (
        "u:4: [ team_size=4 ] and [team_size=2-8] may apply to the same ranks; "
        "UCC takes the string of one, by the order of a hash table"
    )
    found, lost = import_("ucc", f"[team_size=4]\n{one}[team_size=8]\n[team_size=4]\n{other}", "u")
    assert rules_of(found) == [("all_reduce ranks 4", "0..", "mpi:ucp/knomial")]
    assert lost == (
        "u:2: UCC_TL_UCP_TUNE is set again in line 5, which a shell takes; "
        "UCC refuses a ucc.conf that has both",
    )
    found, lost = import_("ucc", f"[team_size=4]\n{one}[]\nUCC_TL_UCP_TUNE=\n", "u")
    assert (rules_of(found), lost) == ([("all_reduce ranks 4", "0..", "mpi:ucp/dbt")], ())
    found, lost = import_("ucc", f"[team_size=4]\nUCC_X=1\n  {one}", "u")
    assert rules_of(found) == [("all_reduce ranks 4", "0..", "mpi:ucp/dbt")]
    assert "u:3: indented: UCC takes the line for more of the variable before it and refuses it" in lost


def test_a_test_in_a_shell_script_is_no_ucc_section() -> None:
    for test in ('[ -z "$X" ] && set -e', "[[ -f x ]] || exit", "if [ -f x ]; then"):
        found, lost = import_("ucc", f"{test}\n  export UCC_TL_UCP_TUNE='allreduce:@dbt'\n", "u")
        assert rules_of(found) == [("all_reduce", "0..", "mpi:ucp/dbt")]
        assert all(line.startswith("u:1: no VARIABLE=value: ") for line in lost)
    found, lost = import_("ucc", "[2-8]:allreduce:@dbt\n", "u")  # a string alone
    assert rules_of(found) == [("all_reduce ranks 2..9", "0..", "mpi:ucp/dbt")]


def test_ucc_takes_the_later_value_of_a_variable() -> None:
    text = "export UCC_TL_UCP_TUNE=allreduce:@dbt\nexport UCC_TL_UCP_TUNE=bcast:@knomial\n"
    found, (lost,) = import_("ucc", text, "u")
    assert lost.startswith("u:1: UCC_TL_UCP_TUNE is set again in line 2, which a shell takes; UCC refuses ")
    assert rules_of(found) == [("broadcast", "0..", "mpi:ucp/knomial")]
    assert "set again" not in str(import_("ucc", UCC_CONF, "u").lost)  # once in each section


@st.composite
def ucc_texts(draw: st.DrawFn) -> str:
    lines = []
    for component in draw(st.sampled_from((("ucp",), ("nccl",), ("ucp", "nccl")))):
        tokens = []
        for collective in draw(st.sets(st.sampled_from(("allreduce", "bcast", "gather")), min_size=1)):
            cuts = [0, *sorted(draw(st.sets(st.integers(1, 40), max_size=2))), None]
            for lo, hi in pairwise(cuts):
                fields = [collective, draw(st.sampled_from(("host", "cuda", "host,cuda")))]
                fields.append(f"{lo}-{'inf' if hi is None else hi}")
                if draw(st.booleans()):
                    fields.append(draw(st.sampled_from(("[2-3]", "[4]", "[2-2,4-inf]"))))
                fields.append(
                    draw(st.sampled_from({"ucp": ("5", "12", "30"), "nccl": ("7", "13", "inf")}[component]))
                )
                if component == "ucp" and draw(st.booleans()):
                    fields.append("@0" if collective == "gather" else "@knomial")
                tokens.append(":".join(draw(st.permutations(fields))))
        lines.append(f"UCC_TL_{component.upper()}_TUNE={'#'.join(tokens)}")
    return "\n".join(lines) + "\n"


@settings(max_examples=examples(80))
@given(ucc_texts())
def test_ucc_import_and_export_decide_as_ucc_does(text: str) -> None:
    found = import_("ucc", text).table
    written = export("ucc", found).text
    cases = product(("all_reduce", "broadcast", "gather"), ("cpu", "cuda"), range(1, 6), range(0, 44, 2))
    for kind, device, ranks, nbytes in cases:
        name, memory = ucc.COLLECTIVES[kind].name, {"cpu": "host", "cuda": "cuda"}[device]
        theirs = ucc_model(text, name, memory, nbytes, ranks)
        assert (choice(found, query(kind, nbytes, ranks, device=device)) or "mpi") == (theirs or "mpi")
        assert ucc_model(written, name, memory, nbytes, ranks) == theirs


# --- oneCCL ---------------------------------------------------------------------------------------------

ONECCL_SAMPLE = """\
CCL_ALLREDUCE="recursive_doubling:0-8192;rabenseifner:8193-1048576;ring:1048577-max"
CCL_BCAST="double_tree"
CCL_ALLTOALL="scatter:4096-max"
"""


def oneccl_model(text: str, variable: str, size: int) -> str | None:
    """What oneCCL decides: entries are painted over each other, in order."""
    value = dict(line.split("=", 1) for line in text.splitlines())[variable].strip('"')
    decided = None
    for entry in value.split(";"):
        algorithm, _, sizes = entry.partition(":")
        lo, hi = sizes.split("-") if sizes else ("0", "max")
        if int(lo) <= size <= (float("inf") if hi == "max" else int(hi)):
            decided = algorithm
    return decided


def test_oneccl_sample_round_trips() -> None:
    found, lost = import_("oneccl", ONECCL_SAMPLE, "ccl.env")
    assert lost == ()
    assert rules_of(found) == [
        ("all_reduce", "0..8193", "mpi:recursive_doubling"),
        ("all_reduce", "8193..1048577", "mpi:rabenseifner"),
        ("all_reduce", "1048577..", "mpi:ring"),
        ("broadcast", "0..", "mpi:double_tree"),
        ("all_to_all_v", "0..", "mpi"),
        ("all_to_all per rank", "0..4KiB", "mpi"),
        ("all_to_all per rank", "4KiB..", "mpi:scatter"),
    ]
    assert export("oneccl", found) == (ONECCL_SAMPLE, ())


def test_oneccl_later_entries_override_earlier_ones() -> None:
    found, lost = import_(
        "oneccl", "CCL_REDUCE=tree:0-99;ring:50-max;direct:60-69\nCCL_BCAST=ring:0-8;naive\n", "c"
    )
    assert [choice(found, query("reduce", n)) for n in (49, 50, 60, 69, 70, 100)] == [
        "mpi:tree", "mpi:ring", "mpi:direct", "mpi:direct", "mpi:ring", "mpi:ring",
    ]  # fmt: skip
    assert choice(found, query("broadcast", 4)) == "mpi:naive"
    assert lost == ("c:2: out of reach behind others",)


def test_oneccl_counts_one_share() -> None:
    found = import_("oneccl", "CCL_ALLGATHER=ring:0-99;naive:100-max\n").table
    assert [choice(found, query("all_gather", n, ranks=4)) for n in (399, 400)] == ["mpi:ring", "mpi:naive"]
    rules = [
        f"kind: all_gather, ranks: 4, bytes: {span}, backend: 'mpi:{name}'"
        for span, name in (("0..400", "ring"), ("400..", "naive"))
    ]
    text, lost = export("oneccl", table(*rules))
    assert text.splitlines()[0] == 'CCL_ALLGATHER="ring:0-99;naive:100-max"'
    assert all("cannot express `ranks: 4`; written without it" in line for line in lost)
    assert len(lost) == 2


def test_oneccl_shares_of_a_size_that_does_not_divide() -> None:
    rules = ("bytes: 0..401, backend: 'mpi:ring'", "bytes: 401.., backend: 'mpi:naive'")
    found = table(*(f"kind: all_gather, ranks: 4, {rule}" for rule in rules))
    assert export("oneccl", found).text.startswith(
        'CCL_ALLGATHER="ring:0-100;naive:101-max"'
    )  # 4 × 100 < 401


def test_oneccl_reports_losses_of_its_format() -> None:
    text = "CCL_ALLREDUCE_SCALEOUT=ring\nCCL_ALLTOALLV=naive:0-max;scatter:8-max\n"
    found, lost = import_("oneccl", text, "c")
    assert rules_of(found) == [("all_to_all_v", "0..", "mpi:naive")]
    assert lost == (
        "c:1: CCL_ALLREDUCE_SCALEOUT: tables have no separate choice for communication between hosts",
        "c:2: scatter:8-max: ALLTOALLV is looked up as if of 0 bytes",
    )
    (line,) = export("oneccl", table("kind: reduce, bytes: 0.., backend: mpi")).lost
    assert line == "t.yaml:3: reduce 0..: mpi: left to oneCCL, which no variable can express"
    (line,) = export("oneccl", table("kind: reduce, bytes: 0.., backend: 'mpi:rings'")).lost
    assert "oneCCL has no REDUCE algorithm 'rings'; known: direct" in line


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("CCL_ALLREDUCES=ring", "unknown variable 'CCL_ALLREDUCES'; known: CCL_ALLREDUCE"),
        ("CCL_LOG_LEVEL=info", "unknown variable"),
        ("ring:0-8", "no VARIABLE=value: 'ring:0-8'"),
        ("CCL_ALLREDUCE=rings", "unknown algorithm 'rings'; known: direct"),
        ("CCL_ALLREDUCE=Ring", "unknown algorithm 'Ring'"),
        ("CCL_ALLREDUCE=ring:0-8K", "expected bytes such as 0-8192 or 8193-max, got '0-8K'"),
        ("CCL_ALLREDUCE=ring:8", "expected bytes"),
        ("CCL_ALLREDUCE=ring:", "expected bytes"),
        ("CCL_ALLREDUCE=ring:9-8", "'9-8' is empty"),
        ("CCL_ALLREDUCE=ring:0-8;;", "unknown algorithm ''"),
        ("CCL_ALLREDUCE='ring:0-8; topo:9-max'", "unknown algorithm ' topo'"),
        ("CCL_BARRIER=tree", "unknown algorithm 'tree'; known: direct, ring"),
    ],
)
def test_oneccl_skips_and_reports_unknown_names(text: str, what: str) -> None:
    found, (lost,) = import_("oneccl", f"# comment\n{text}\nCCL_REDUCE=tree\n", "ccl.env")
    assert lost.startswith("ccl.env:2: ")
    assert what in lost
    assert rules_of(found) == [("reduce", "0..", "mpi:tree")]


def test_oneccl_entries_end_with_a_semicolon_and_have_no_spaces_between_them() -> None:
    assert import_("oneccl", "CCL_REDUCE=tree:0-8;\n", "c").lost == ()
    found, (lost,) = import_("oneccl", "CCL_REDUCE = tree:0-8 ; topo:9-max\n", "c")
    assert rules_of(found)[0] == ("reduce", "0..9", "mpi:tree")
    assert lost == "c:1: no VARIABLE=value: '; topo:9-max'; a value has no spaces between its entries"


def test_oneccl_takes_the_later_value_of_a_collective() -> None:
    found, lost = import_("oneccl", "CCL_BCAST=ring\nCCL_BROADCAST=naive\n", "c")
    assert lost == ("c:1: broadcast is set again in line 2, which is taken",)
    assert rules_of(found) == [("broadcast", "0..", "mpi:naive")]


@st.composite
def oneccl_texts(draw: st.DrawFn) -> str:
    lines = []
    for name in sorted(draw(st.sets(st.sampled_from(("ALLREDUCE", "REDUCE", "BCAST")), min_size=1))):
        entries = []
        for _ in range(draw(st.integers(1, 5))):
            lo = draw(st.integers(0, 30))
            hi = draw(st.one_of(st.integers(lo, 40).map(str), st.just("max")))
            sizes = draw(st.sampled_from(("", f":{lo}-{hi}")))
            entries.append(f"{draw(st.sampled_from(oneccl.ALGORITHMS[name]))}{sizes}")
        lines.append(f'CCL_{name}="{";".join(entries)}"')
    return "\n".join(lines) + "\n"


@settings(max_examples=examples(80))
@given(oneccl_texts())
def test_oneccl_import_and_export_decide_as_oneccl_does(text: str) -> None:
    found = import_("oneccl", text).table
    written = export("oneccl", found).text
    for line in text.splitlines():
        variable = line.partition("=")[0]
        kind = {"CCL_ALLREDUCE": "all_reduce", "CCL_REDUCE": "reduce", "CCL_BCAST": "broadcast"}[variable]
        for nbytes in range(44):
            theirs = oneccl_model(text, variable, nbytes)
            assert choice(found, query(kind, nbytes)) == (f"mpi:{theirs}" if theirs else "mpi")
            assert oneccl_model(written, variable, nbytes) == theirs
