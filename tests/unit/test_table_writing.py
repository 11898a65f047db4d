"""Tables as files: any written table is read back unchanged, and a file is whole or missing."""

from __future__ import annotations

import math
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiers import examples

from mcr_plus.core.kinds import KINDS
from mcr_plus.core.units import MAX_INTEGER, Range, format_span, parse_range, parse_size, size_words
from mcr_plus.errors import ConfigError
from mcr_plus.tables.fingerprint import FACTS
from mcr_plus.tables.table import Table, TableKey, TableRule, contradiction, load_table, parse_table
from mcr_plus.tables.writing import (
    key_items,
    microseconds,
    rounded,
    save_table,
    size_name,
    table_text,
)

# Texts that YAML takes for another type, or for several values.
MISREAD = (
    "2.10", "yes", "1e5", "1.0e+5", "a: b", "null", "~", "", " a ", "0x1F", "012", "1_000", "12:30", "a, b",
    "[a]", "{a: 1}", "# no", "a #b", "- a", "*a", "&a", "!a", "%a", "@a", "`a", "'a'", '"a"', "a\nb", "a\tb",
    "---", "...", "<<", "=", "2026-01-01", ".nan", "on", "?", ": ", "|", ">", "µs", "a\u2028b", "\ufeff",
    "\x00", "🙂", "\x85", "\\", "2.13.0+cpu", "Open MPI 5.0.11", "Intel(R) Xeon(R) CPU @ 2.20GHz",
)  # fmt: skip

texts = st.sampled_from(MISREAD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
reasons = texts.filter(str.isprintable)
algorithms = texts.filter(bool)
choices = st.sampled_from(["mpi", "gloo", "nccl"]) | st.builds("mpi:{}".format, algorithms)
sizes = st.integers(0, 40).map(lambda power: 1 << power) | st.integers(0, MAX_INTEGER)
times = st.floats(1e-3, 1e9) | st.floats(1e-300, 1e18) | st.integers(1, 10**12)
curves = st.dictionaries(choices, st.dictionaries(sizes, times, max_size=6), max_size=3)
fingerprints = st.dictionaries(
    st.sampled_from([*FACTS, "mpi", "gloo", "nccl"]),
    st.lists(texts, min_size=1, max_size=3, unique=True).map(tuple),
)


def ranges(*found: Range) -> st.SearchStrategy[Range | None]:
    return st.none() | st.sampled_from(found)


# Ranges that do not include each other, so a rule is in reach unless an earlier key is wider.
counts = ranges(Range(1, 2), Range(2, 3), Range(4, 9), Range(16, None))


@st.composite
def keys(draw: st.DrawFn) -> TableKey:
    kind = draw(
        st.sampled_from(
            ["*", *(kind for kind in KINDS if not kind.endswith("_v") and kind not in ("recv", "barrier"))]
        )
    )
    return TableKey(
        kind,
        draw(st.none() | st.sampled_from(["float32", "bfloat16", "int8"])),
        draw(counts),
        draw(counts),
        draw(counts),
        draw(st.none() | st.sampled_from(["cpu", "cuda"])),
        draw(st.none() | st.booleans()) if kind == "*" else None,
        draw(st.none() | st.booleans()),
    )


@st.composite
def rules_of(draw: st.DrawFn, key: TableKey) -> list[TableRule]:
    """Rules of one key that cover all sizes once."""
    basis = draw(st.sampled_from(["total", "per_rank"]))
    cuts = draw(st.lists(st.integers(1, MAX_INTEGER), max_size=3, unique=True).map(sorted))
    ends = [*pairwise([0, *cuts]), (cuts[-1] if cuts else 0, None)]
    return [
        TableRule(draw(choices), lo, hi, replace(key, basis=basis), draw(curves), draw(reasons))  # type: ignore[arg-type]
        for lo, hi in ends
    ]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    found = draw(st.lists(keys(), min_size=1, max_size=4, unique=True))
    assume(all(contradiction(key, Range(0)) is None for key in found))
    # The narrowest first, and kinds before the rules for all kinds: then every rule is in reach.
    found.sort(key=lambda key: (key.kind == "*", -len(key_items(key))))
    rules = tuple(rule for key in found for rule in draw(rules_of(key)))
    return Table(rules, "t", draw(fingerprints), draw(st.booleans()))


def as_read(table: Table) -> Table:
    """Return a table with its times as in a file."""
    return replace(table, rules=tuple(replace(rule, measured=rounded(rule.measured)) for rule in table.rules))


@given(tables(), st.lists(texts, max_size=2))
@settings(max_examples=examples(300))
def test_written_tables_are_read_back(table: Table, comment: list[str]) -> None:
    printable = [line for line in comment if line.replace("\n", "").isprintable()]
    text = table_text(table, comment=printable)
    found = parse_table(text)
    assert found == as_read(table)
    assert found.fingerprint == table.fingerprint
    assert [rule.measured for rule in found.rules] == [rounded(rule.measured) for rule in table.rules]
    assert table_text(found, comment=printable) == text


@pytest.mark.parametrize("value", MISREAD)
def test_values_that_yaml_would_misread(value: str) -> None:
    rule = TableRule(f"mpi:{value or 'a'}", 0, None, TableKey("send"), {f"gloo:{value or 'a'}": {8: 1.0}})
    for values in ((value,), (value, "a"), ("a", value)):
        table = Table((rule,), fingerprint={"cpu": values, "mpi": values})
        assert parse_table(table_text(table)) == table


def test_the_text_is_one_line_for_every_fact() -> None:
    key = TableKey("all_reduce", "float32", Range(2, 3), Range(1, 5), Range(2, None), "cpu", True, False)
    measured = {"gloo": {1 << 16: 441.0, 8: 205.04}, "mpi:ring": {8: 0.9, 0: 1234.56}}
    table = Table(
        (
            TableRule("mpi:ring", 0, 1 << 16, key, measured),
            TableRule("gloo", 1 << 16, None, key),
            TableRule("gloo", 0, None, TableKey("*", basis="per_rank")),
        ),
        fingerprint={"torch": ("2.10",), "ranks": ("2", "4"), "mpi": ("Open MPI 5.0.11",)},
        strict=True,
    )
    assert table_text(table, comment=["one", "", "two\nthree"]).splitlines() == [
        "# one",
        "#",
        "# two",
        "# three",
        "version: 1",
        "fingerprint:",
        "  torch: '2.10'",
        "  ranks: [2, 4]",
        "  mpi: Open MPI 5.0.11",
        "strict: true",
        "rules:",
        "  - kind: all_reduce",
        "    dtype: float32",
        "    ranks: 2",
        "    nodes: 1..5",
        "    ranks_per_node: 2..",
        "    device: cpu",
        "    in_place: true",
        "    async: false",
        "    bytes: 0..64KiB",
        "    backend: mpi:ring",
        "    measured:",
        "      gloo: {8B: 205, 64KiB: 441}",
        "      mpi:ring: {0B: 1235, 8B: 0.9}",
        "  - kind: all_reduce",
        "    dtype: float32",
        "    ranks: 2",
        "    nodes: 1..5",
        "    ranks_per_node: 2..",
        "    device: cpu",
        "    in_place: true",
        "    async: false",
        "    bytes: 64KiB..",
        "    backend: gloo",
        "  - kind: '*'",
        "    basis: per_rank",
        "    bytes: 0..",
        "    backend: gloo",
    ]
    assert parse_table(table_text(table)) == as_read(table)


@given(times)
def test_times_have_four_digits_and_no_exponent(time: float) -> None:
    text = microseconds(time)
    assert set(text) <= set("0123456789.")
    assert len(text.replace(".", "").strip("0")) <= 4
    # half a unit of the fourth digit, and a float's rounding
    assert abs(float(text) - time) <= 0.5 * 10.0 ** (math.floor(math.log10(time)) - 3) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("time", "text"),
    [(0.9, "0.9"), (205, "205"), (1e5, "100000"), (12.3456, "12.35"), (12345.6, "12350"), (99999.0, "100000"),
     (0.000123456, "0.0001235"), (1e-9, "0.000000001")],
)  # fmt: skip
def test_times_as_text(time: float, text: str) -> None:
    assert microseconds(time) == text


@given(sizes)
def test_sizes_as_keys(nbytes: int) -> None:
    assert parse_size(size_name(nbytes)) == nbytes
    assert not size_name(nbytes).isdigit()  # YAML would take it for a number


# -- files ---------------------------------------------------------------------------------------------------

OLD = Table((TableRule("gloo", 0, None, TableKey("*")),))
NEW = Table(
    (TableRule("mpi", 0, None, TableKey("*"), {"mpi": {1 << i: i + 1.0 for i in range(20)}}),),
    fingerprint={"cpu": ("µs 🙂",)},
)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o027])
def test_a_saved_table_loads_and_has_the_mode_of_any_other_file(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "table.yaml"
    path.touch(mode=0o600)
    with umask(mask):
        save_table(NEW, path, comment=["measured µs"])
        other = tmp_path / "other"
        other.touch()
        assert os.umask(mask) == mask
    assert load_table(path) == NEW
    assert path.read_bytes() == table_text(NEW, comment=["measured µs"]).encode("utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode) == 0o666 & ~mask
    assert sorted(found.name for found in tmp_path.iterdir()) == ["other", "table.yaml"]


@pytest.mark.long
def test_the_locale_does_not_matter(tmp_path: Path) -> None:
    program = (
        "import sys; from mcr_plus.tables.table import load_table, parse_table\n"
        "from mcr_plus.tables.writing import save_table\n"
        "save_table(load_table(sys.argv[1]), sys.argv[2], comment=['\\xb5s'])\n"
    )
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    save_table(NEW, old)
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program, old, new], env=plain, check=True, timeout=300)
    assert new.read_bytes() == "# µs\n".encode() + old.read_bytes()


@contextmanager
def no_file_larger_than(nbytes: int) -> Iterator[None]:
    """Act like a full disk: a write beyond `nbytes` fails (Python ignores the signal that comes with it)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    save_table(OLD, path)
    before = path.read_bytes()
    assert len(before) < 100 < len(table_text(NEW))
    with (
        no_file_larger_than(100),
        pytest.raises(ConfigError, match=r"table\.yaml: cannot write: File too large"),
    ):
        save_table(NEW, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_an_interrupt_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], at: str
) -> None:
    path = tmp_path / "table.yaml"
    save_table(OLD, path)

    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, at, interrupted)
    with pytest.raises(error):
        save_table(NEW, path)
    assert load_table(path) == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_tables_that_cannot_be_text_leave_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    save_table(OLD, path)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        save_table(OLD, path, comment=["\ud800"])
    assert load_table(path) == OLD
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("absent/table.yaml", "No such file or directory"), ("folder", "directory"), (".", "directory")],
)
def test_places_that_cannot_be_written(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    with pytest.raises(ConfigError, match=f"cannot write: .*{reason}") as caught:
        save_table(NEW, path)
    assert str(caught.value).startswith(f"{path}: ")
    assert [found.name for found in tmp_path.rglob("*")] == ["folder"]


@pytest.mark.parametrize(
    ("lo", "hi", "text"),
    [
        (0, 65536, "0..64KiB"),
        (89, 38912, "89B..38KiB"),
        (1024, 65537, "1KiB..65537B"),
        (100, 34001, "100..34001"),
        (1 << 20, None, "1MiB.."),
        (96, None, "96.."),
    ],
)
def test_a_range_is_not_read_with_the_unit_of_its_other_end(lo: int, hi: int | None, text: str) -> None:
    assert format_span(lo, hi) == text
    assert parse_range(text) == Range(lo, hi)
    assert size_words(lo).endswith((" B", " KiB", " MiB"))
