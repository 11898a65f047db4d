"""The versions that `mcr-plus doctor` calls tested."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import versions
from typer.testing import CliRunner

from mcr_plus.cli import tested_versions
from mcr_plus.cli.main import app

ROOT = Path(__file__).parents[2]


def test_tested_versions_equal_the_table_in_the_docs() -> None:
    text = (ROOT / "docs/installation.md").read_text()
    rows = dict(re.findall(r"^\| (\S+) \| ([0-9., ]+) \|$", text, re.MULTILINE))
    assert {name: tuple(each.split(", ")) for name, each in rows.items()} == tested_versions.TESTED


def test_rows_of_the_runs_in_the_docs_are_rows_of_make_test_versions() -> None:
    table = (ROOT / "docs/installation.md").read_text().partition("| row | ")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([\w.-]+) \|", table, re.MULTILINE) == list(versions.ROWS)


@pytest.mark.parametrize(
    ("installed", "within"),
    [
        ("2.6.0", True),
        ("2.13.0+cpu", True),
        ("2.15.0", True),
        ("2.5.1", False),
        ("2.15.1", False),
        ("2.16.0a0", False),
    ],
)
def test_a_version_within_or_not(installed: str, within: bool) -> None:
    assert tested_versions.is_within(installed, ("2.6.0", "2.13.0", "2.15.0")) is within


def test_doctor_names_one_that_is_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tested_versions, "_installed", lambda name: {"torch": "99.1", "numpy": "2.4.6"}.get(name)
    )
    found = json.loads(CliRunner().invoke(app(), ["doctor", "--json"]).stdout)["tested_versions"]
    assert found["torch"]["version"] == "99.1"
    assert [found[name]["within_tested"] for name in ("torch", "numpy", "mpich")] == [False, True, None]
    lines = CliRunner().invoke(app(), ["doctor"], env={"COLUMNS": "200"}).stdout.splitlines()
    assert any("torch" in line and "99.1" in line and " no " in line for line in lines)
