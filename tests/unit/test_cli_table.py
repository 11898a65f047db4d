"""`mcr-plus table`: the output, files and exit status of each command."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from command import Answer, mcr_plus

from mcr_plus.tables.table import load_table, parse_table

TWO = """\
version: 1
fingerprint: {mpi: Open MPI 5.0.11, ranks: 2, nodes: 1}
rules:
  - kind: all_reduce
    bytes: 0..64KiB
    backend: mpi:recursive_doubling
    measured: {"mpi:recursive_doubling": {8B: 0.9, 4KiB: 1.7}, gloo: {8B: 205}}
  - {kind: all_reduce, bytes: 64KiB..1MiB, backend: "mpi:ring"}
  - {kind: all_reduce, bytes: 1MiB.., backend: "mpi:ring"}
"""
FOUR = TWO.replace("ranks: 2", "ranks: 4").replace("64KiB", "128KiB")


table = partial(mcr_plus, "table")


def worked(*words: object) -> Answer:
    answer = table(*words)
    assert answer.returncode == 0, answer.stderr
    return answer


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(TWO)
    return path


@pytest.fixture
def four(tmp_path: Path) -> Path:
    path = tmp_path / "four.yaml"
    path.write_text(FOUR)
    return path


def test_merge_writes_a_table(two: Path, four: Path, tmp_path: Path) -> None:
    output = tmp_path / "both.yaml"
    assert worked("merge", two, four, "-o", output) == (0, "", f"{output}: 6 rules\n")
    assert [str(rule.key) for rule in load_table(output).rules][::3] == [
        "all_reduce ranks 2", "all_reduce ranks 4",
    ]  # fmt: skip
    assert output.read_text().startswith("# merged: two.yaml, four.yaml\nversion: 1\n")


def test_merge_of_tables_that_disagree_needs_a_preference(two: Path, tmp_path: Path) -> None:
    other, output = tmp_path / "other.yaml", tmp_path / "both.yaml"
    other.write_text(TWO.replace("64KiB", "32KiB"))
    answer = table("merge", two, other, "-o", output)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"mcr-plus: {other}:4: rules: all_reduce: conflicts with {two}:4")
    assert not output.exists()
    worked("merge", two, other, "-o", output, "--prefer", "last")
    assert load_table(output).rules[0].hi == 32 * 1024


def test_diff_for_people_and_for_programs(two: Path, four: Path) -> None:
    lines = worked("diff", two, four).stdout.splitlines()
    assert lines[1].split() == ["item", "bytes", "first", "second", "expected", "note"]
    assert lines[2].split() == ["all_reduce", "64KiB..128KiB", "mpi:ring", "mpi:recursive_doubling"]
    assert lines[3].split() == ["ranks", "2", "4"]
    assert json.loads(worked("diff", two, four, "--json").stdout) == [
        {
            "key": {"kind": "all_reduce"}, "bytes": "64KiB..128KiB", "before": "mpi:ring",
            "after": "mpi:recursive_doubling", "only_in": None, "at": 64 * 1024, "before_us": None,
            "after_us": None,
        },
        {"fact": "ranks", "before": "2", "after": "4"},
    ]  # fmt: skip


def test_diff_of_equal_tables_prints_that_they_are_equal(two: Path) -> None:
    assert worked("diff", two, two).stdout == f"{two} and {two} make the same choices\n"
    assert json.loads(worked("diff", "--json", two, two).stdout) == []


def test_diff_names_the_table_that_has_a_key_alone(two: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(TWO + "  - {kind: barrier, bytes: 0.., backend: gloo}\n")
    assert "key only in the second" in worked("diff", two, other).stdout


def test_shrink_prints_or_writes(two: Path, tmp_path: Path) -> None:
    text = worked("shrink", two).stdout
    assert [rule.span() for rule in parse_table(text).rules] == ["0..64KiB", "64KiB.."]
    output = tmp_path / "small.yaml"
    assert worked("shrink", two, "-o", output).stdout == ""
    assert output.read_text() == text


def test_show_is_readable(two: Path) -> None:
    lines = worked("show", two).stdout.splitlines()
    assert ["mpi", "Open", "MPI", "5.0.11"] in [line.split() for line in lines]
    (row,) = [line for line in lines if "0..64KiB" in line]
    assert row.split(maxsplit=3)[:3] == ["all_reduce", "0..64KiB", "mpi:recursive_doubling"]
    assert row.endswith("mpi:recursive_doubling 0.9 to 1.7, gloo 205")


def test_export_reports_losses_on_stderr(two: Path, tmp_path: Path) -> None:
    answer = worked("export", two, "--format", "openmpi")
    assert "65536 4 0 0  # 64KiB and more: ring" in answer.stdout.splitlines()
    assert answer.stderr.splitlines() == [
        f"not exported: {two}: the fingerprint (mpi, ranks, nodes)",
        f"not exported: {two}: the measurements of 1 rule",
    ]
    output = tmp_path / "rules.conf"
    written = worked("export", two, "--format", "openmpi", "-o", output)
    assert written.stdout == ""
    assert written.stderr.splitlines()[-1] == f"{output}: openmpi of {two}"
    assert output.read_text() == answer.stdout


@pytest.mark.parametrize(
    ("format", "backend"),
    [
        ("nccl-csv", "nccl:ring/ll"),
        ("openmpi", "mpi:recursive_doubling"),
        ("ucc", "mpi:ucp/knomial"),
        ("oneccl", "mpi:ring"),
    ],
)
def test_every_format_can_be_written(tmp_path: Path, format: str, backend: str) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(f"version: 1\nrules: [{{kind: all_reduce, bytes: 0.., backend: '{backend}'}}]\n")
    assert worked("export", path, "--format", format).stdout


def test_export_of_a_part_is_written_with_status_1(tmp_path: Path) -> None:
    path, output = tmp_path / "table.yaml", tmp_path / "rules.conf"
    path.write_text(
        "version: 1\nfingerprint: {ranks: 2}\nrules:\n"
        "  - {kind: all_reduce, bytes: 0..64KiB, backend: 'mpi:ring', measured: {mpi: {8B: 1}}}\n"
        "  - {kind: all_reduce, bytes: 64KiB.., backend: gloo}\n"
        "  - {kind: broadcast, async: true, bytes: 0.., backend: 'mpi:chain'}\n"
    )
    answer = table("export", path, "--format", "openmpi", "-o", output)
    assert answer.returncode == 1
    assert "ring" in output.read_text()
    *lines, written, summary = answer.stderr.splitlines()
    assert [line.startswith("not exported: ") for line in lines] == [True] * 5
    assert written == f"{output}: openmpi of {path}"
    what = "not all of its rules can be exported as openmpi: see the 3 lines above"
    assert summary == f"mcr-plus: {path}: {what}"


def test_export_of_inexpressible_rules_is_one_line_and_status_1(two: Path, tmp_path: Path) -> None:
    output = tmp_path / "tuner.conf"
    answer = table("export", two, "--format", "nccl-csv", "-o", output)
    what = "nothing can be exported as nccl-csv: of 3 rules, 3 for other backends than nccl (mpi)"
    assert answer == (1, "", f"mcr-plus: {two}: {what}\n")
    assert not output.exists()


@pytest.mark.parametrize(
    ("format", "text", "backend", "choice"),
    [
        ("nccl-csv", "reduce,0,18446744073709551615,ring,ll,2,-1,-1\n", None, "nccl:ring/ll/2"),
        ("openmpi", "1 11 1 0 1 0 4 0 0\n", None, "mpi:binary"),
        ("ucc", "reduce:@dbt\n", None, "mpi:ucp/dbt"),
        ("oneccl", "CCL_REDUCE=tree\n", "gloo", "gloo:tree"),
        ("oneccl", "CCL_REDUCE=tree\n", "shm", "msccl:tree"),
    ],
)
def test_import(tmp_path: Path, format: str, text: str, backend: str | None, choice: str) -> None:
    file, output = tmp_path / "foreign.conf", tmp_path / "table.yaml"
    file.write_text(text)
    options = ["--backend", backend] if backend else []
    answer = worked("import", file, "--format", format, *options)
    (rule,) = parse_table(answer.stdout).rules
    assert rule.backend == choice
    first, *_, last = answer.stderr.splitlines()
    assert first == "imported: reduce: 1 rule with an algorithm"
    assert last.startswith("imported: no rule with an algorithm: all_reduce, ")
    worked("import", file, "--format", format, *options, "-o", output)
    assert output.read_text() == answer.stdout
    assert answer.stdout.startswith(f"# imported from foreign.conf ({format})\n")


def test_import_reports_losses_and_positions_of_mistakes_on_stderr(tmp_path: Path) -> None:
    file = tmp_path / "tuner.conf"
    file.write_text("reduce,0,9,ring,ll,2,-1,-1\nreduce,0,9,ring,ll,4,-1,-1,-1,1\n")
    answer = worked("import", file, "--format", "nccl-csv")
    assert answer.stderr.splitlines()[0] == f"not imported: {file}:2: out of reach behind others"
    file.write_text("reduce,0,9,ring,lll,2,-1,-1\n")
    answer = table("import", file, "--format", "nccl-csv")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"mcr-plus: {file}:1: no rules that a table can express")
    assert f"; {file}:1: unknown protocol 'lll'; known: ll, ll128, simple" in answer.stderr
    file.write_bytes(b"\xff\xfe")
    assert "not UTF-8 at byte 0" in table("import", file, "--format", "nccl-csv").stderr


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["merge", "two.yaml"],
        ["merge", "two.yaml", "-o", "x.yaml", "--prefer", "me"],
        ["diff", "two.yaml"],
        ["export", "two.yaml"],
        ["export", "two.yaml", "--format", "yaml"],
        ["export", "two.yaml", "--format", "ucc", "--backend", "ucc"],
        ["export", "two.yaml", "--format", "openmpi", "-o", "no/such/folder"],
        ["import", "two.yaml", "--format", "openmpi"],
        ["import", "missing.conf", "--format", "openmpi"],
        ["show", "missing.yaml"],
        ["shrink", "two.yaml", "-o", "no/such/folder"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_status_2(words: list[str], two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two.parent)
    answer = table(*words)
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr


def test_the_documented_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()
    (table,) = re.findall(r"^```yaml\n# two\.yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text(table)
    Path("four.yaml").write_text(table.replace("ranks: 2", "ranks: 4").replace("64KiB", "32KiB"))
    Path("nccl_tuner.conf").write_text("allreduce,0,18446744073709551615,ring,simple,8,-1,-1\n")
    commands = re.findall(r"^    mcr-plus table (.*)$", text, re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        worked(*command.split())
    assert len(load_table("small.yaml").rules) == len(load_table("both.yaml").rules)
