"""The documents' programs run, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from ranks import run_ranks

from mcr_plus import config

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(where, text) of every fenced block of a language."""
    found = []
    for document in DOCUMENTS:
        pattern = rf"^```{language}\n(.*?)^```$"
        for match in re.finditer(pattern, document.read_text(), re.DOTALL | re.MULTILINE):
            line = document.read_text()[: match.start()].count("\n") + 1
            found.append((f"{document.name}:{line}", match.group(1)))
    return found


def run_text(text: str) -> None:
    exec(compile(text, "<document>", "exec"), {})


def test_python_blocks_run_on_two_ranks() -> None:
    programs = blocks("python")
    assert len(programs) >= 2
    for where, text in programs:
        results = run_ranks(run_text, 2, args=[text])
        assert all(result.stdout for result in results), where


@pytest.mark.parametrize(("where", "text"), blocks("yaml"))
def test_yaml_blocks_are_valid_configurations(where: str, text: str) -> None:
    if "pipeline" in yaml.safe_load(text):
        assert config.loads(text, where).pipeline
