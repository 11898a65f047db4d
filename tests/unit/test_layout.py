"""The three top-level folders, their links inside the package, and forbidden contents of files."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutate import MUTATIONS, Mutation
from tiers import STALE

ROOT = Path(__file__).parents[2]
LINKED = ("kernels", "fusion", "compression")
SOURCES = ("mcr_plus", *LINKED, "tests", "benchmarks", "examples")
_FOLDERS = f"(?:{'|'.join(LINKED)})"
CANDIDATE = re.compile(rf"^\s*(?:from\s+(?:\.|{_FOLDERS}\b)|import\s+(?:.*,\s*)?{_FOLDERS}\b)", re.MULTILINE)
# A path below a home or build folder; system paths such as /proc and /dev/shm are allowed.
PERSONAL_PATH = re.compile(r"[\"'\s(=](/(?:home|root|Users|work|workspace|mnt|opt|builds?)/\S+)")


def python_files() -> list[Path]:
    """Every Python file once: the links are not followed."""
    return sorted(path for folder in SOURCES for path in _walk(ROOT / folder))


def _walk(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder, followlinks=False):
        yield from (Path(place) / name for name in names if name.endswith(".py"))


def text_files() -> list[Path]:
    """Files that git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative_and_resolves_to_the_folder(name: str) -> None:
    link = ROOT / "mcr_plus" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert link.is_dir()


@pytest.mark.parametrize("name", LINKED)
def test_folder_has_no_init(name: str) -> None:
    """A regular package at the root would shadow the standard library's `compression` (Python 3.14)."""
    assert not (ROOT / name / "__init__.py").exists()


@pytest.mark.parametrize("name", LINKED)
def test_folder_imports_as_part_of_the_package(name: str) -> None:
    module = importlib.import_module(f"mcr_plus.{name}")
    assert {Path(place).resolve() for place in module.__path__} == {ROOT / name}


def test_imports_are_absolute_and_those_of_linked_folders_go_through_the_package() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files()
        if CANDIDATE.search(text := path.read_text())  # parsing all files takes ten seconds
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom) and _is_wrong(node)
    ]
    assert not wrong


def _is_wrong(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif node.level:
        return True
    else:
        modules = [node.module or ""]
    return any(module.split(".")[0] in LINKED for module in modules)


def test_no_personal_paths() -> None:
    found = []
    for path in text_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match}" for match in PERSONAL_PATH.findall(text)]
    assert found == []


def test_variants_that_are_marked_as_short_exist(request: pytest.FixtureRequest) -> None:
    assert request.config.stash[STALE] == []


def test_helpers_of_one_test_module_are_beside_it() -> None:
    """Programs that people run are in tests/support as well."""
    texts = {path: path.read_text() for path in python_files()}
    beside = {}
    for path in (ROOT / "tests" / "support").glob("*.py"):
        uses = re.compile(rf"^\s*(?:from|import) {path.stem}\b|\"{path.stem}\.py\"", re.MULTILINE)
        users = [each.stem for each, text in texts.items() if path.stem in text and uses.search(text)]
        if len(users) == 1 and users[0].startswith("test_") and "\n    python tests/" not in texts[path]:
            beside[path.name] = users[0]
    assert beside == {}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_applies_to_the_current_source(mutation: Mutation) -> None:
    text = (ROOT / "mcr_plus" / mutation.path).read_text()
    assert text.count(mutation.old) == 1
    assert mutation.old != mutation.new
