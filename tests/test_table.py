"""Static tuning tables: look-up, and every way in which a file can be wrong."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcr_plus.errors import ConfigError
from mcr_plus.message import ALIASES
from mcr_plus.selection.table import MAX_RULES, Table, load_table

K = 1024


def write(folder: Path, rules: str, head: str = "version: 1\nrules:\n") -> Path:
    path = folder / "table.yaml"
    path.write_text(head + rules)
    return path


def table(folder: Path, *rules: str) -> Table:
    return load_table(write(folder, "".join(f"  - {{{rule}}}\n" for rule in rules)))


def backend(
    found: Table, kind: str, nbytes: int | None, dtype: str = "float32", ranks: int = 2
) -> str | None:
    rule = found.lookup(kind, nbytes, dtype, ranks, "cpu")
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


def test_a_rule_knows_its_place(tmp_path: Path) -> None:
    rule = table(tmp_path, *EXAMPLE).lookup("all_reduce", 64 * K, "float32", 2, "cpu")
    assert rule is not None
    assert (rule.lo, rule.hi) == (64 * K, None)
    assert rule.place == f"{tmp_path / 'table.yaml'}:4"


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
        ("dtype: float16", ("float16", 2, "cpu"), ("float32", 2, "cpu")),
        ("ranks: 2", ("float32", 2, "cpu"), ("float32", 3, "cpu")),
        ('ranks: ">=3"', ("float32", 3, "cpu"), ("float32", 2, "cpu")),
        ("ranks: 2..4", ("float32", 3, "cpu"), ("float32", 4, "cpu")),
        ("device: cuda", ("float32", 2, "cuda"), ("float32", 2, "cpu")),
    ],
)
def test_narrow_rules(
    tmp_path: Path, narrow: str, inside: tuple[str, int, str], outside: tuple[str, int, str]
) -> None:
    found = table(
        tmp_path,
        f"kind: all_reduce, {narrow}, bytes: 0.., backend: mpi",
        "kind: all_reduce, bytes: 0.., backend: gloo",
    )
    first, second = found.lookup("all_reduce", 8, *inside), found.lookup("all_reduce", 8, *outside)
    assert first is not None
    assert second is not None
    assert (first.backend, second.backend) == ("mpi", "gloo")


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
    assert backend(found, "recv", 8) == "local"


@pytest.mark.parametrize(
    ("rule", "place", "what"),
    [
        (
            "kind: all_reduce, bytes: 0.., backend: ncll",
            "rules[0].backend",
            "unknown backend 'ncll'; known: ",
        ),
        ("kind: all_reduce, bytes: 0.., backend: ncll", "rules[0].backend", "did you mean 'nccl'?"),
        ("kind: all_reduce, bytes: 0.., backend: 3", "rules[0].backend", "string"),
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
    ],
)
def test_bad_rules(tmp_path: Path, rule: str, place: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        table(tmp_path, rule)
    assert str(caught.value).startswith(f"{tmp_path / 'table.yaml'}:3: {place}: ")
    assert what in str(caught.value)


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
        ("version: 1\nrulez: []\n", "unknown key 'rulez'; known: version, rules; did you mean 'rules'?"),
        ("version: 1\nrules:\n  - {kind: send, bytes: 0..", "not valid YAML"),
        ("version: 1\nrules:\n  - !!python/object:os.system {}\n", "tag"),
        ("version: 1\nversion: 1\nrules: []\n", "written twice"),
        ("version: 1\nrules: [{kind: *all, bytes: 0.., backend: mpi}]\n", "alias"),
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
        # Cut between two entries, what is left can cover all sizes.
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
        rule = found.lookup("all_reduce", nbytes, "float32", 2, "cpu")
        assert rule is found.rules[sum(cut <= nbytes for cut in cuts)]
