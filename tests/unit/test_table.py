"""Tuning tables: look-up, every mistake of a file, and the use of a table by ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import own_rank, run_ranks
from tiers import examples

import mcr_plus as mcr
from mcr_plus import registry
from mcr_plus.backends.gloo.backend import GlooBackend
from mcr_plus.config.reader import load
from mcr_plus.core.kinds import ALIASES, KINDS
from mcr_plus.errors import ConfigError
from mcr_plus.selection.checks import checked_tables, use_algorithms
from mcr_plus.tables.table import MAX_RULES, Query, Table, load_table, parse_table

K = 1024


def write(folder: Path, rules: str, head: str = "version: 1\nrules:\n") -> Path:
    path = folder / "table.yaml"
    path.write_text(head + rules)
    return path


def table(folder: Path, *rules: str) -> Table:
    return load_table(write(folder, "".join(f"  - {{{rule}}}\n" for rule in rules)))


def backend(found: Table, kind: str, nbytes: int | None, **more: Any) -> str | None:
    rule = found.lookup(Query(kind, nbytes, **more))
    return rule.backend if rule else None


EXAMPLE = (
    "kind: all_reduce, bytes: 0..64KiB, backend: mpi",
    "kind: all_reduce, bytes: 64KiB.., backend: gloo",
    'kind: "*", bytes: 0.., backend: local',
)


@pytest.mark.parametrize(
    ("kind", "nbytes", "expected"),
    [
        ("all_reduce", 0, "mpi"),
        ("all_reduce", 64 * K - 1, "mpi"),
        ("all_reduce", 64 * K, "gloo"),
        ("all_reduce", 1 << 40, "gloo"),
        ("all_reduce", None, "gloo"),
        ("broadcast", 5, "local"),
        ("barrier", 0, "local"),
    ],
)
def test_lookup(tmp_path: Path, kind: str, nbytes: int | None, expected: str) -> None:
    assert backend(table(tmp_path, *EXAMPLE), kind, nbytes) == expected


def test_a_rule_has_its_file_and_line(tmp_path: Path) -> None:
    rule = table(tmp_path, *EXAMPLE).lookup(Query("all_reduce", 64 * K))
    assert rule is not None
    assert (rule.lo, rule.hi) == (64 * K, None)
    assert rule.place == f"{tmp_path / 'table.yaml'}:4"


@pytest.mark.parametrize("name", ["gloo", "local", "mpi", "nccl"])
def test_an_algorithm_for_a_backend_without_algorithms(tmp_path: Path, name: str) -> None:
    """A table or a rule that names one raises before any operation runs."""
    what = f"backend '{name}:ring': {name} has no algorithms to choose from; expected '{name}' alone, or a "
    found = table(tmp_path, f"kind: all_reduce, bytes: 0.., backend: '{name}:ring'")
    config = load({"pipeline": [{"select": {"table": found.name}}, {"dispatch": {}}]})
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{found.name}:3: {what}')}.*: msccl"):
        checked_tables(config)
    rule = {"match": {"kind": "all_reduce"}, "backend": f"{name}:ring"}
    with pytest.raises(ConfigError, match=f"{re.escape(f'rules[0].backend: {what}')}.*: msccl"):
        use_algorithms(load({"rules": [rule]}))


def test_an_outside_backend_may_have_algorithms_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.BACKENDS, "quick", type("Quick", (GlooBackend,), {"has_algorithms": True}))
    found = table(tmp_path, "kind: all_reduce, bytes: 0.., backend: 'quick:ring'")
    config = load({"pipeline": [{"select": {"table": found.name}}, {"dispatch": {}}]})
    assert checked_tables(config) == [found]


def test_a_kind_without_rules_has_no_answer(tmp_path: Path) -> None:
    assert backend(table(tmp_path, *EXAMPLE[:2]), "broadcast", 8) is None


def test_a_kind_covers_its_vector_form_only(tmp_path: Path) -> None:
    found = table(
        tmp_path,
        "kind: gather_v, bytes: 0.., backend: gloo",
        "kind: gather, bytes: 0.., backend: mpi",
        "kind: scatter, bytes: 0.., backend: nccl",
    )
    assert backend(found, "gather_v", None) == "gloo"
    assert backend(found, "gather", 4) == "mpi"
    assert backend(found, "scatter_v", None) == "nccl"
    assert backend(found, "all_gather", 4) is None


@pytest.mark.parametrize(("spelling", "kind"), ALIASES.items())
def test_kinds_may_be_spelt_as_calls_spell_them(tmp_path: Path, spelling: str, kind: str) -> None:
    found = table(tmp_path, f"kind: {spelling}, bytes: 0.., backend: gloo")
    assert backend(found, kind, 8) == "gloo"
    with pytest.raises(ConfigError, match="overlaps"):
        table(tmp_path, *(f"kind: {name}, bytes: 0.., backend: gloo" for name in (spelling, kind)))


@pytest.mark.parametrize(
    ("narrow", "inside", "outside"),
    [
        ("dtype: float16", {"dtype": "float16"}, {"dtype": "float32"}),
        ("ranks: 2", {"ranks": 2}, {"ranks": 3}),
        ('ranks: ">=3"', {"ranks": 3}, {"ranks": 2}),
        ("ranks: 2..4", {"ranks": 3}, {"ranks": 4}),
        ("nodes: 1", {"nodes": 1}, {"nodes": 2}),
        ('nodes: ">=2"', {"nodes": 2}, {"nodes": 1}),
        ("ranks_per_node: 4", {"ranks_per_node": 4}, {"ranks_per_node": 3}),
        ('ranks_per_node: "<8"', {"ranks_per_node": 7}, {"ranks_per_node": 8}),
        ("device: cuda", {"device": "cuda"}, {"device": "cpu"}),
        ("in_place: true", {"kind": "all_reduce"}, {"kind": "all_gather"}),
        ("in_place: true", {"kind": "broadcast"}, {"kind": "all_to_all"}),
        ("in_place: true", {"kind": "reduce"}, {"kind": "reduce_scatter"}),
        ("in_place: false", {"kind": "scatter"}, {"kind": "all_reduce"}),
        ("in_place: false", {"kind": "all_gather_v"}, {"kind": "reduce"}),
        ("async: true", {"async_op": True}, {"async_op": False}),
        ("async: false", {"async_op": False}, {"async_op": True}),
        ("async: true, nodes: 2", {"async_op": True, "nodes": 2}, {"async_op": True, "nodes": 1}),
        ("async: true, nodes: 2", {"async_op": True, "nodes": 2}, {"async_op": False, "nodes": 2}),
    ],
)
def test_narrow_rules(tmp_path: Path, narrow: str, inside: dict[str, Any], outside: dict[str, Any]) -> None:
    found = table(
        tmp_path,
        f'kind: "*", {narrow}, bytes: 0.., backend: mpi',
        'kind: "*", bytes: 0.., backend: gloo',
    )
    answers = [backend(found, nbytes=8, **{"kind": "all_reduce", **query}) for query in (inside, outside)]
    assert answers == ["mpi", "gloo"]


# Kinds whose bytes, by the convention of nccl-tests, count all ranks together.
DIVIDED = {f"{kind}{form}" for kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
           for form in ("", "_v")}  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("recv", "barrier")])
def test_per_rank_divides_bytes_of_all_ranks(tmp_path: Path, kind: str) -> None:
    found = table(
        tmp_path,
        f"kind: {kind}, bytes: 0..1KiB, basis: per_rank, backend: mpi",
        f"kind: {kind}, bytes: 1KiB.., basis: per_rank, backend: gloo",
    )
    for ranks in (2, 3, 8):
        end = ranks * K if kind in DIVIDED else K
        answers = [backend(found, kind, nbytes, ranks=ranks) for nbytes in (end - 1, end, None)]
        assert answers == ["mpi", "gloo", "gloo"]


def test_the_total_is_not_divided(tmp_path: Path) -> None:
    found = table(
        tmp_path,
        "kind: all_gather, bytes: 0..1KiB, backend: mpi",
        "kind: all_gather, bytes: 1KiB.., basis: total, backend: gloo",
    )
    assert [backend(found, "all_gather", n, ranks=8) for n in (K - 1, K)] == ["mpi", "gloo"]


def test_algorithms(tmp_path: Path) -> None:
    found = table(
        tmp_path,
        "kind: all_reduce, bytes: 0.., backend: 'mpi:ring', measured: {'mpi:ring': {8B: 2}, mpi: {8B: 3}}",
    )
    rule = found.lookup(Query("all_reduce", 8))
    assert rule is not None
    assert rule.backend == "mpi:ring"
    assert rule.measured == {"mpi:ring": {8: 2.0}, "mpi": {8: 3.0}}


def test_ranges_may_stand_in_any_order(tmp_path: Path) -> None:
    found = table(
        tmp_path,
        "kind: reduce, bytes: 8.., backend: gloo",
        "kind: reduce, bytes: 0..4, backend: mpi",
        "kind: reduce, bytes: 4..8, backend: local",
    )
    assert [backend(found, "reduce", n) for n in (0, 3, 4, 7, 8)] == ["mpi", "mpi", "local", "local", "gloo"]


@pytest.mark.parametrize(
    ("rules", "line", "parts"),
    [
        (("bytes: 0..64KiB", "bytes: 128KiB.."), 4, ("rules[1].bytes", "no rule for 64KiB..128KiB")),
        (("bytes: 4..", ), 3, ("rules[0].bytes", "no rule for 0..4")),
        (("bytes: 0..4", "bytes: 4..1MiB"), 4, ("rules[1].bytes", "no rule for 1MiB..")),
        (("bytes: 0..8", "bytes: 4.."), 4, ("overlaps 0..8", "table.yaml:3")),
        (("bytes: 0..", "bytes: 8.."), 4, ("overlaps 0..", "table.yaml:3")),
        (("bytes: 0..", "bytes: 0.."), 4, ("overlaps", "table.yaml:3")),
        (("bytes: 8..16", "bytes: 16..", "bytes: 0..9"), 3, ("overlaps 0..9", "table.yaml:5")),
    ],
)  # fmt: skip
def test_gaps_and_overlaps(tmp_path: Path, rules: tuple[str, ...], line: int, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        table(tmp_path, *(f"kind: all_reduce, {rule}, backend: mpi" for rule in rules))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'table.yaml'}:{line}: rules[")
    assert "all_reduce" in text
    for part in parts:
        assert part in text


def test_other_keys_are_tiled_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"all_reduce float16: no rule for 8\.\."):
        table(
            tmp_path,
            "kind: all_reduce, dtype: float16, bytes: 0..8, backend: mpi",
            "kind: all_reduce, bytes: 0.., backend: mpi",
        )


@pytest.mark.parametrize(
    "rules",
    [
        ('kind: "*", bytes: 0.., backend: gloo', "kind: all_reduce, bytes: 0.., backend: mpi"),
        ("kind: gather, bytes: 0.., backend: gloo", "kind: gather_v, bytes: 0.., backend: mpi"),
        ("kind: send, bytes: 0.., backend: gloo", "kind: send, dtype: int8, bytes: 0.., backend: mpi"),
        ("kind: send, bytes: 0.., backend: gloo", "kind: send, device: cpu, bytes: 0.., backend: mpi"),
        (
            'kind: send, ranks: ">=2", bytes: 0.., backend: mpi',
            "kind: send, ranks: 4, bytes: 0.., backend: mpi",
        ),
        (
            'kind: "*", bytes: 0..8, backend: gloo',
            'kind: "*", bytes: 8.., backend: mpi',
            "kind: send, bytes: 0.., backend: mpi",
        ),
        (
            "kind: send, nodes: 1.., bytes: 0.., backend: gloo",
            "kind: send, nodes: 2, bytes: 0.., backend: mpi",
        ),
        (
            'kind: send, ranks_per_node: ">=2", bytes: 0.., backend: gloo',
            "kind: send, ranks_per_node: 2..8, bytes: 0.., backend: mpi",
        ),
        ("kind: reduce, bytes: 0.., backend: gloo", "kind: reduce, async: true, bytes: 0.., backend: mpi"),
        (
            'kind: "*", in_place: true, bytes: 0.., backend: gloo',
            "kind: all_reduce, bytes: 0.., backend: mpi",
        ),
        (
            "kind: all_reduce, in_place: true, bytes: 0.., backend: gloo",
            "kind: all_reduce, bytes: 0.., backend: mpi",
        ),
        (
            "kind: all_gather, bytes: 0.., backend: gloo",
            "kind: all_gather, bytes: 0.., basis: per_rank, backend: mpi",
        ),
        (
            "kind: gather, bytes: 0..8, backend: gloo",
            "kind: gather, bytes: 8.., backend: mpi",
            "kind: gather, ranks: 2, bytes: 0.., basis: per_rank, backend: mpi",
        ),
    ],
)
def test_rules_out_of_reach(tmp_path: Path, rules: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="out of reach") as caught:
        table(tmp_path, *rules)
    last = len(rules) + 2
    assert f"table.yaml:{last}: rules[{len(rules) - 1}]" in str(caught.value)
    assert "table.yaml:3" in str(caught.value)


def test_a_rule_partly_in_reach_is_fine(tmp_path: Path) -> None:
    found = table(
        tmp_path,
        'kind: "*", bytes: 0..8, backend: gloo',
        "kind: send, bytes: 0.., backend: mpi",
        'kind: "*", bytes: 8.., backend: local',
    )
    assert [backend(found, "send", n) for n in (7, 8)] == ["gloo", "mpi"]
    assert [backend(found, "recv", n) for n in (7, 8)] == ["gloo", "mpi"]  # as its send


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("kind: recv, bytes: 0.., backend: mpi", "kind: a recv is treated like its send; write 'send'"),
        ("kind: send, async: false, bytes: 0.., backend: mpi", "async: rules for send apply to synchronous"),
        ("kind: barrier, dtype: float32, bytes: 0.., backend: mpi", "dtype: a barrier has no data"),
        ("kind: barrier, bytes: 0..8, backend: mpi", "bytes: a barrier has no data"),
        ("kind: send, ranks: 2, nodes: 8, bytes: 0.., backend: mpi", "nodes: 8 of 2 ranks: not possible"),
        (
            "kind: send, ranks: 2..4, ranks_per_node: '>=4', bytes: 0.., backend: mpi",
            "ranks_per_node: 4.. of 2..4 ranks: not possible in any job",
        ),
        (
            "kind: send, ranks: 8, nodes: 2, ranks_per_node: 2, bytes: 0.., backend: mpi",
            "ranks: 8 ranks on 2 nodes with 2 on each: not possible in any job",
        ),
    ],
)
def test_rules_that_mean_no_operation(tmp_path: Path, rule: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        table(tmp_path, rule)
    assert f"table.yaml:3: rules[0].{told}" in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("nodes: 2", "nodes: 1"),
        ("nodes: 2..4", "nodes: 2.."),
        ("ranks: 2, nodes: 1", "ranks: 2"),
        ("ranks_per_node: 2", "ranks: 2"),
        ("async: true", "async: false"),
        ("async: true", "in_place: true"),
        ("in_place: false", "in_place: true"),
    ],
)
def test_keys_that_do_not_include_the_other_may_stand_in_either_order(
    tmp_path: Path, first: str, second: str
) -> None:
    rules = [f'kind: "*", {narrow}, bytes: 0.., backend: mpi' for narrow in (first, second)]
    assert len(table(tmp_path, *rules).rules) == 2
    included = first in ("nodes: 2..4", "ranks: 2, nodes: 1")
    if included:
        with pytest.raises(ConfigError, match="out of reach"):
            table(tmp_path, *reversed(rules))
    else:
        assert len(table(tmp_path, *reversed(rules)).rules) == 2


def test_first_match_wins_between_rules_of_different_bases(tmp_path: Path) -> None:
    found = table(
        tmp_path,
        "kind: gather, bytes: 0..64, backend: mpi",
        "kind: gather, ranks: 4, bytes: 0..32, basis: per_rank, backend: local",
        "kind: gather, ranks: 4, bytes: 32.., basis: per_rank, backend: nccl",
        "kind: gather, bytes: 64.., backend: gloo",
    )
    answers = [backend(found, "gather", nbytes, ranks=4) for nbytes in (63, 64, 127, 128)]
    assert answers == ["mpi", "local", "local", "nccl"]
    assert backend(found, "gather", 128, ranks=3) == "gloo"


@pytest.mark.parametrize(
    ("rule", "place", "what"),
    [
        (
            "kind: all_reduce, bytes: 0.., backend: ncll",
            "rules[0].backend",
            "unknown backend 'ncll'; known: ",
        ),
        ('kind: all_reduce, bytes: 0.., backend: "mpi:"', "rules[0].backend", "names no algorithm"),
        ("kind: all_reduce, bytes: 0.., backend: ncll", "rules[0].backend", "did you mean 'nccl'?"),
        ("kind: all_reduce, bytes: 0.., backend: 3", "rules[0].backend", "expected a string, got 3"),
        ("kind: allreduce, bytes: 0.., backend: mpi", "rules[0].kind", "did you mean 'all_reduce'?"),
        ("kind: [send], bytes: 0.., backend: mpi", "rules[0].kind", "unknown kind ['send']"),
        ("bytes: 0.., backend: mpi", "rules[0].kind", "missing"),
        ("kind: send, backend: mpi", "rules[0].bytes", "missing"),
        ("kind: send, bytes: 0..", "rules[0].backend", "missing"),
        ("kind: send, bytes: 0..64KB, backend: mpi", "rules[0].bytes", "wrong unit 'KB'"),
        ("kind: send, bytes: -5.., backend: mpi", "rules[0].bytes", "expected a size"),
        ("kind: send, bytes: -5, backend: mpi", "rules[0].bytes", "expected a size"),
        ("kind: send, bytes: .nan, backend: mpi", "rules[0].bytes", "expected a size"),
        ("kind: send, bytes: nan..inf, backend: mpi", "rules[0].bytes", "expected a size"),
        ("kind: send, bytes: 8..8, backend: mpi", "rules[0].bytes", "empty range"),
        ("kind: send, bytes: 9..8, backend: mpi", "rules[0].bytes", "empty range"),
        ("kind: send, bytes: 0..99999999999999999999, backend: mpi", "rules[0].bytes", "expected a size"),
        ("kind: send, bytes: true, backend: mpi", "rules[0].bytes", "expected a size"),
        ("kind: send, bytes: 0.., dtype: float, backend: mpi", "rules[0].dtype", "unknown dtype 'float'"),
        ("kind: send, bytes: 0.., device: tpu, backend: mpi", "rules[0].device", "known: cpu, cuda"),
        ("kind: send, bytes: 0.., ranks: 2KiB, backend: mpi", "rules[0].ranks", "expected a whole number"),
        (
            "kind: send, bytes: 0.., algorithm: ring, backend: mpi",
            "rules[0].algorithm",
            "unknown key 'algorithm'",
        ),
        ("kind: send, bytes: 0.., backend: 'ncll:ring'", "rules[0].backend", "unknown backend 'ncll:ring'"),
        ("kind: send, bytes: 0.., nodes: two, backend: mpi", "rules[0].nodes", "expected a whole number"),
        ("kind: send, bytes: 0.., nodes: 0, backend: mpi", "rules[0].nodes", "from 1 on"),
        ("kind: send, bytes: 0.., ranks: '<1', backend: mpi", "rules[0].ranks", "from 1 on"),
        ("kind: send, bytes: 0.., ranks_per_node: -1, backend: mpi", "rules[0].ranks_per_node", "got -1"),
        ("kind: send, bytes: 0.., ranks_per_node: 1.5, backend: mpi", "rules[0].ranks_per_node", "got 1.5"),
        ("kind: send, bytes: 0.., async: maybe, backend: mpi", "rules[0].async", "got 'maybe'"),
        ("kind: send, bytes: 0.., async: 1, backend: mpi", "rules[0].async", "got 1"),
        ("kind: send, bytes: 0.., async_op: true, backend: mpi", "rules[0].async_op", "known: async, "),
        ("kind: all_reduce, bytes: 0.., in_place: 'no', backend: mpi", "rules[0].in_place", "got 'no'"),
        (
            "kind: all_reduce, bytes: 0.., in_place: false, backend: mpi",
            "rules[0].in_place",
            "all_reduce always works in place",
        ),
        ("kind: send, bytes: 0.., in_place: true, backend: mpi", "rules[0].in_place", "send never works in"),
        (
            "kind: send, bytes: 0.., basis: perrank, backend: mpi",
            "rules[0].basis",
            "unknown basis 'perrank'; known: total, per_rank; did you mean 'per_rank'?",
        ),
        ("kind: send, bytes: 0.., basis: [total], backend: mpi", "rules[0].basis", "unknown basis ['total']"),
        (
            "kind: send, bytes: 0.., backend: mpi, measured: 7",
            "rules[0].measured",
            "expected a mapping, got 7",
        ),
        ("kind: send, bytes: 0.., backend: mpi, measured: {mpi: [8]}", "rules[0].measured.mpi", "got [8]"),
    ],
)
def test_bad_rules(tmp_path: Path, rule: str, place: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        table(tmp_path, rule)
    assert str(caught.value).startswith(f"{tmp_path / 'table.yaml'}:3: {place}: ")
    assert what in str(caught.value)


HEAD = """\
version: 1
fingerprint:
  ranks: 2
  {fact}
rules:
  - kind: all_reduce
    bytes: 0..
    backend: mpi
    measured:
      gloo: {{8B: 200}}
      {choice}:
        8B: 0.9
        {point}
"""
GOOD = {"fact": "nodes: 1", "choice": "mpi", "point": "4KiB: 1.7"}


def test_the_valid_table_of_the_next_test_is_accepted() -> None:
    found = parse_table(HEAD.format(**GOOD), "t.yaml")
    assert found.fingerprint == {"ranks": ("2",), "nodes": ("1",)}
    assert found.rules[0].measured == {"gloo": {8: 200.0}, "mpi": {8: 0.9, 4 * K: 1.7}}
    assert found.strict is False
    assert parse_table("strict: true\n" + HEAD.format(**GOOD)).strict is True


@pytest.mark.parametrize(
    ("wrong", "line", "place", "what"),
    [
        ("choice: mqi", 11, "rules[0].measured.mqi", "unknown backend 'mqi'; known: gloo, "),
        ("choice: mqi", 11, "rules[0].measured.mqi", "did you mean 'mpi'?"),
        ("choice: 'mqi:ring'", 11, "rules[0].measured.mqi:ring", "unknown backend 'mqi:ring'"),
        ("point: '64KB: 2'", 13, "rules[0].measured.mpi.64KB", "wrong unit 'KB'; expected bytes or B, KiB"),
        ("point: 'big: 2'", 13, "rules[0].measured.mpi.big", "expected a size such as 64KiB"),
        ("point: '-8B: 2'", 13, "rules[0].measured.mpi.-8B", "expected a size such as 64KiB"),
        ("point: '8: 2'", 13, "rules[0].measured.mpi", "expected a name as key, got '8'"),
        ("point: '\"8\": 2'", 13, "rules[0].measured.mpi.8", "8 is written twice"),
        ("point: '4KiB: 0'", 13, "rules[0].measured.mpi.4KiB", "a number above 0, got 0"),
        ("point: '4KiB: -1.5'", 13, "rules[0].measured.mpi.4KiB", "a number above 0, got -1.5"),
        ("point: '4KiB: .nan'", 13, "rules[0].measured.mpi.4KiB", "a number above 0, got nan"),
        ("point: '4KiB: .inf'", 13, "rules[0].measured.mpi.4KiB", "a number above 0, got inf"),
        ("point: '4KiB: -.inf'", 13, "rules[0].measured.mpi.4KiB", "a number above 0, got -inf"),
        ("point: '4KiB: true'", 13, "rules[0].measured.mpi.4KiB", "a number above 0, got True"),
        ("point: '4KiB: fast'", 13, "rules[0].measured.mpi.4KiB", "a number above 0, got 'fast'"),
        ("point: '4KiB: 3 us'", 13, "rules[0].measured.mpi.4KiB", "a number above 0, got '3 us'"),
        ("point: '4KiB: [1]'", 13, "rules[0].measured.mpi.4KiB", "a number above 0, got [1]"),
        ("point: '4KiB:'", 13, "rules[0].measured.mpi.4KiB", "a number above 0, got None"),
        (f"point: '4KiB: 1{400 * '0'}'", 13, "rules[0].measured.mpi.4KiB", "a number of 401 digits"),
        ("fact: 'node: 1'", 4, "fingerprint.node", "unknown key 'node'; known: mcr_plus, torch, ranks, "),
        ("fact: 'node: 1'", 4, "fingerprint.node", "did you mean 'nodes'?"),
        ("fact: 'nodes: true'", 4, "fingerprint.nodes", "got True"),
        ("fact: 'nodes: {a: 1}'", 4, "fingerprint.nodes", "got {'a': 1}"),
        ("fact: 'nodes: []'", 4, "fingerprint.nodes", "got []"),
        ("fact: 'nodes: [1, [2]]'", 4, "fingerprint.nodes", "got [1, [2]]"),
        ("fact: 'nodes:'", 4, "fingerprint.nodes", "got None"),
        ("fact: 'torch: 2.10'", 4, "fingerprint.torch", "got 2.1; put versions in quotes"),
        ("fact: 'torch: [2.9.1, 2.10]'", 4, "fingerprint.torch", "put versions in quotes"),
    ],
)  # fmt: skip
def test_bad_measurements_and_facts(wrong: str, line: int, place: str, what: str) -> None:
    name, _, text = wrong.partition(": ")
    with pytest.raises(ConfigError) as caught:
        parse_table(HEAD.format(**GOOD | {name: text.removeprefix("'").removesuffix("'")}), "t.yaml")
    assert str(caught.value).startswith(f"t.yaml:{line}: {place}: ")
    assert what in str(caught.value)


ONE_RULE = "rules: [{kind: send, bytes: 0.., backend: mpi}]\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "expected a mapping at the root"),
        ("version: 1\n", "no rules"),
        ("version: 1\nrules: []\n", "no rules"),
        ("version: 1\nrules: {}\n", "expected a list"),
        ("version: 1\nrules: [7]\n", "expected a mapping, got 7"),
        ("version: 2\nrules: []\n", "unknown version 2; known: 1"),
        ("version: true\nrules: []\n", "unknown version True"),
        ("version: .nan\nrules: []\n", "unknown version nan"),
        ("rules: []\n", "missing; expected version: 1"),
        (
            "version: 1\nrulez: []\n",
            "unknown key 'rulez'; known: version, fingerprint, strict, rules; did you mean 'rules'?",
        ),
        ("version: 1\nrules:\n  - {kind: send, bytes: 0..", "not valid YAML"),
        ("version: 1\nrules:\n  - !other {}\n", "tag"),
        ("version: 1\nversion: 1\nrules: []\n", "written twice"),
        ("version: 1\nrules: [{kind: *all, bytes: 0.., backend: mpi}]\n", "alias"),
        ("version: 1\nstrict: 1\nrules: []\n", "strict: expected true or false, got 1"),
        ("version: 1\nstrict: 'true'\nrules: []\n", "strict: expected true or false, got 'true'"),
        ("version: 1\nstrict:\nrules: []\n", "strict: expected true or false, got None"),
        (f"version: 1\nfingerprint: here\n{ONE_RULE}", "fingerprint: expected a mapping, got 'here'"),
    ],
)
def test_corrupt_files(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        load_table(path)
    assert re.match(rf"{re.escape(str(path))}:\d+: \S+: ", str(caught.value))


def outcome(path: Path) -> str:
    """Tell the number of rules, or the file that the refusal names."""
    try:
        return f"{len(load_table(path).rules)} rules"
    except ConfigError as error:
        return str(error).split(":")[0]


def test_every_truncation_is_refused_or_a_whole_table(tmp_path: Path) -> None:
    text = write(tmp_path, "".join(f"  - {{{rule}}}\n" for rule in EXAMPLE)).read_text()
    for end in range(len(text)):
        path = tmp_path / "cut.yaml"
        path.write_text(text[:end])
        # A file cut between two entries can still cover all sizes.
        assert outcome(path) in (f"{path}", "2 rules", "3 rules")


def test_huge_binary_and_missing_files(tmp_path: Path) -> None:
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as file:
        file.truncate(1 << 30)  # sparse: takes no room
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_table(huge)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_table(binary)
    with pytest.raises(ConfigError, match="cannot read"):
        load_table(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_table(tmp_path)


def test_too_many_rules(tmp_path: Path) -> None:
    path = write(tmp_path, "[" + "1," * (MAX_RULES + 1) + "]", "version: 1\nrules: ")
    with pytest.raises(ConfigError, match=f"expected at most {MAX_RULES}"):
        load_table(path)


@given(
    cuts=st.lists(st.integers(1, 1 << 30), unique=True, max_size=6).map(sorted),
    sizes=st.lists(st.integers(0, 1 << 31), min_size=1, max_size=10),
)
def test_lookup_is_the_number_of_cuts_passed(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], sizes: list[int]
) -> None:
    ends = [0, *cuts, ""]
    rules = [f"kind: all_reduce, bytes: {lo}..{hi}, backend: mpi" for lo, hi in pairwise(ends)]
    found = table(tmp_path_factory.mktemp("tables"), *rules)
    for nbytes in sizes:
        rule = found.lookup(Query("all_reduce", nbytes))
        assert rule is found.rules[sum(cut <= nbytes for cut in cuts)]


# -- against every operation of a small world ----------------------------------------------------------------

WORLD = [
    Query(kind, nbytes, dtype, ranks, nodes, ranks // nodes, "cpu", async_op)
    for kind, nbytes, dtype, (ranks, nodes), async_op in product(
        ("all_reduce", "gather", "gather_v", "broadcast"),
        (0, 7, 8, 15, 16, 31, 32, 63, 64, None),
        ("float16", "float32"),
        ((2, 1), (2, 2), (4, 1), (4, 2), (8, 2)),
        (False, True),
    )
]
FILTERS: dict[str, dict[str, Callable[[Query], bool]]] = {
    "dtype": {"float16": lambda q: q.dtype == "float16"},
    "ranks": {"4": lambda q: q.ranks == 4, '"<=4"': lambda q: q.ranks <= 4, "3..": lambda q: q.ranks >= 3},
    "nodes": {"1": lambda q: q.nodes == 1, '">1"': lambda q: q.nodes > 1},
    "ranks_per_node": {"2": lambda q: q.ranks_per_node == 2, "1..4": lambda q: q.ranks_per_node < 4},
    "device": {"cpu": lambda q: True},
    "async": {"true": lambda q: q.async_op, "false": lambda q: not q.async_op},
    "basis": {"per_rank": lambda q: True, "total": lambda q: True},
}  # fmt: skip
KIND_FILTERS: dict[str, Callable[[str], bool]] = {
    '"*"': lambda kind: True,
    "gather": lambda kind: kind in ("gather", "gather_v"),
    "gather_v": lambda kind: kind == "gather_v",
    "all_reduce": lambda kind: kind == "all_reduce",
}


Written = tuple[str, dict[str, str], int, "int | None"]


@st.composite
def written_rules(draw: st.DrawFn) -> list[Written]:
    """Return rules in some order as (kind, conditions, lo, hi); the rules of a key cover every size once."""
    pieces: list[Written] = []
    seen = set()
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(list(KIND_FILTERS)))
        names = draw(st.lists(st.sampled_from(list(FILTERS)), unique=True, max_size=2))
        narrow = {name: draw(st.sampled_from(list(FILTERS[name]))) for name in names}
        key = (kind, *sorted(narrow.items() - {("basis", "total")}))
        if key in seen:
            continue
        seen.add(key)
        cuts = draw(st.lists(st.sampled_from([8, 16, 32]), unique=True, max_size=2).map(sorted))
        pieces += [(kind, narrow, lo, hi) for lo, hi in zip([0, *cuts], [*cuts, None], strict=True)]
    return list(draw(st.permutations(pieces)))


def meant(rule: Written, query: Query) -> bool:
    kind, narrow, lo, hi = rule
    size = query.nbytes
    if size is not None and narrow.get("basis") == "per_rank" and query.kind.startswith("gather"):
        size //= query.ranks
    in_range = hi is None if size is None else lo <= size < (hi or size + 1)
    return (
        in_range
        and KIND_FILTERS[kind](query.kind)
        and all(FILTERS[name][value](query) for name, value in narrow.items())
    )


def load_or_refuse(rules: list[Written]) -> Table | int:
    """Return the table of some rules, or the index of the rule that is refused as out of reach."""
    lines = [
        f"  - {{kind: {kind}, bytes: {lo}..{'' if hi is None else hi}, backend: mpi"
        + "".join(f", {name}: {value}" for name, value in narrow.items()) + "}\n"
        for kind, narrow, lo, hi in rules
    ]  # fmt: skip
    try:
        return parse_table("version: 1\nrules:\n" + "".join(lines))
    except ConfigError as error:
        refused = re.match(r"<table>:\d+: rules\[(\d+)\]: .* out of reach", str(error))
        if refused is None:
            raise
        return int(refused[1])


@given(written_rules())
@settings(max_examples=examples(300))
def test_lookup_and_reach_by_trying_every_operation(rules: list[Written]) -> None:
    """The first matching rule is found; a rule refused as out of reach is never the first."""
    first = {query: next((i for i, rule in enumerate(rules) if meant(rule, query)), None) for query in WORLD}
    found = load_or_refuse(rules)
    if isinstance(found, int):
        assert found not in first.values()
        return
    for query, index in first.items():
        assert found.lookup(query) is (None if index is None else found.rules[index])


# -- on ranks ------------------------------------------------------------------------------------------------

ON_RANKS = """\
version: 1
rules:
  - {kind: all_reduce, async: true, bytes: 0.., backend: gloo}
  - {kind: all_reduce, bytes: 0.., backend: mpi}
  - {kind: broadcast, nodes: 1, bytes: 0.., backend: gloo}
  - {kind: broadcast, nodes: 2, bytes: 0.., backend: mpi}
  - {kind: reduce, ranks_per_node: 2, bytes: 0.., backend: gloo}
  - {kind: reduce, ranks_per_node: 1, bytes: 0.., backend: mpi}
  - {kind: all_to_all, bytes: 0..64KiB, backend: mpi}
  - {kind: all_to_all, bytes: 64KiB..128KiB, backend: gloo}
  - {kind: all_to_all, bytes: 128KiB.., backend: mpi}
  - {kind: all_gather, bytes: 0..64KiB, basis: per_rank, backend: mpi}
  - {kind: all_gather, bytes: 64KiB.., basis: per_rank, backend: gloo}
  - {kind: "*", bytes: 0.., backend: mpi}
"""


PARTS = (2, 16 * K, 512 * K)  # by its own size, rank 0 would choose mpi, gloo, mpi


def uneven_all_to_all(comm: mcr.Communicator, part: int) -> list[float]:
    """Rank 0 keeps `part` floats and everything else is one float; returns how many came from each rank."""
    splits = [part if comm.rank == 0 else 1, 1]
    output = torch.full((sum(splits),), -1.0)
    mcr.all_to_all_single(output, torch.full((sum(splits),), float(comm.rank)), splits, splits)
    return [float((output == origin).sum()) for origin in (0, 1)]


def select_by(folder: str, **options: str) -> dict[str, Any]:
    """Return a configuration that selects by the table in `folder`."""
    select = {"table": f"{folder}/table.yaml", **options}
    pipeline = [{"select": select}, {"dispatch": {"timeout": "20s", "check": "every"}}]
    return {"version": 1, "backends": ["mpi", "gloo"], "pipeline": pipeline}


def by_vector_size(folder: str) -> dict[str, Any]:
    """The backends of all_to_alls, of up to 2 MiB on one rank and 8 bytes on the other, by vector size."""
    found: dict[str, Any] = {}
    for size in (None, "63KiB", "64KiB", "128KiB"):
        with mcr.init(select_by(folder, **({} if size is None else {"vector_size": size}))) as comm:
            with mcr.record() as log:
                counts = [uneven_all_to_all(comm, part) for part in PARTS]
            assert counts == [[part if comm.rank == 0 else 1, 1] for part in PARTS]
        found[str(size)] = [record.backend for record in log.records]
        found["bytes"] = [record.bytes for record in log.records]
    return found


def by_other_keys(folder: str, *, two_hosts: bool) -> list[str]:
    """Return the backends of one operation of each sort, on one host or as if on two."""
    host = f"host{own_rank() * two_hosts}"
    with (
        mock.patch("mcr_plus.job.init.host_name", return_value=host),
        mcr.init(select_by(folder)) as comm,
    ):
        x, part = torch.ones(4), torch.ones(16 * K)
        with mcr.record() as log:
            mcr.all_reduce(x)
            work = mcr.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
            mcr.all_reduce(x)
            mcr.broadcast(x, 0)
            mcr.reduce(x, 0)
            mcr.all_gather_into_tensor(torch.empty(2 * 16 * K - 2), part[1:])
            mcr.all_gather_into_tensor(torch.empty(2 * 16 * K), part)
            mcr.barrier()
        assert comm.rank == 1 or x.tolist() == [16.0] * 4
    return [record.backend for record in log.records]


def one_host(folder: str) -> dict[str, Any]:
    return {"sizes": by_vector_size(folder), "keys": by_other_keys(folder, two_hosts=False)}


def two_hosts(folder: str) -> list[str]:
    return by_other_keys(folder, two_hosts=True)


def test_vector_sizes_and_narrow_rules_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text(ON_RANKS)
    results = run_ranks(one_host, 2, args=[str(tmp_path)])
    local = [result.value["sizes"].pop("bytes") for result in results]
    assert local == [[4 * part + 4 for part in PARTS], [8, 8, 8]]
    for result in results:
        assert result.value["sizes"] == {
            "None": ["mpi"] * 3,
            "63KiB": ["mpi"] * 3,
            "64KiB": ["gloo"] * 3,
            "128KiB": ["mpi"] * 3,
        }
        assert result.value["keys"] == ["mpi", "gloo", "mpi", "gloo", "gloo", "mpi", "gloo", "mpi"]


def test_rules_for_hosts_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text(ON_RANKS)
    for result in run_ranks(two_hosts, 2, args=[str(tmp_path)]):
        assert result.value == ["mpi", "gloo", "mpi", "mpi", "mpi", "mpi", "gloo", "mpi"]


def test_shm_is_another_name_of_msccl(tmp_path: Path) -> None:
    rule = (
        '  - {kind: all_reduce, bytes: 0.., backend: "NAME:ring", measured: {NAME: {8B: 2}, gloo: {8B: 3}}}\n'
    )
    head = "version: 1\nfingerprint: {NAME: mcr_plus 1}\nrules:\n"
    written, stored = (
        load_table(write(tmp_path, rule.replace("NAME", name), head.replace("NAME", name)))
        for name in ("shm", "msccl")
    )
    assert written == stored
    assert written.rules[0].backend == "msccl:ring"
    assert list(written.rules[0].measured) == ["msccl", "gloo"]
    twice = "kind: all_reduce, bytes: 0.., backend: gloo, measured: {shm: {8B: 2}, msccl: {8B: 3}}"
    with pytest.raises(ConfigError, match="'msccl' is written twice"):
        table(tmp_path, twice)
