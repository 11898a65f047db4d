"""Folders import only lower folders. import-linter would leave out folders without `__init__.py`."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mcr_plus"
AT_THE_ROOT = {
    "__init__",
    "__main__",
    "autograd",
    "dtensor",
    "errors",
    "expert",
    "interfaces",
    "registry",
    "spatial",
    "torchft",
}  # autograd, dtensor, expert, interfaces, spatial and torchft only forward

FACADES = {"__init__", "autograd", "dtensor", "expert", "interfaces", "spatial", "torchft"}

# From the top to the bottom. Folders of one row do not import each other.
ORDER = (
    {"__main__"},
    {"cli"},
    {"tuning"},
    FACADES,
    {"engines", "plans"},
    {"elasticity", "horovod", "owners", "parallel", "simulate", "weight_sync"},
    {"layout", "local_sgd", "reproducible"},
    {"training"},
    {"api", "bucketing", "observe", "torch_backend"},
    {"job"},
    {"communicator"},
    {"hierarchy"},
    {"compression", "fusion", "selection"},
    {"pipeline", "reliability", "trials"},
    {"engine"},
    {"board", "tables"},
    {"backends", "launch"},
    {"msccl", "rendezvous"},
    {"config", "hosts", "membership", "waiting"},
    {"kernels"},
    {"core", "registry"},
    {"errors"},
)
# Removable folders, and the removable folders that each uses. The path of an operation uses none.
CAPABILITIES: dict[str, set[str]] = {
    "bucketing": set(),
    "cli": {
        "bucketing",
        "launch",
        "layout",
        "observe",
        "parallel",
        "plans",
        "reliability",
        "reproducible",
        "simulate",
        "tuning",
    },
    "elasticity": {"local_sgd", "training"},
    "engines": {"layout", "weight_sync"},
    "horovod": {"observe", "training"},
    "launch": set(),
    "layout": set(),
    "local_sgd": {"training"},
    "observe": set(),
    "owners": {"layout"},
    "parallel": {"layout"},
    "plans": {"bucketing", "layout", "parallel"},
    "reliability": set(),
    "reproducible": {"observe"},
    "simulate": {"bucketing"},
    "training": {"bucketing"},
    "tuning": {"bucketing", "observe"},
    "weight_sync": {"layout"},
}
HEIGHT = {name: -row for row, names in enumerate(ORDER) for name in names}
STAGES = {"fusion", "hierarchy", "compression", "selection"}

When = Literal["loading", "running", "typing"]


class Import(NamedTuple):
    file: str
    line: int
    importer: str
    imported: str
    when: When
    module: str


@cache
def imports() -> list[Import]:
    """Every import of a part of the package by another: at loading, in a function that runs, or for types."""
    found: list[Import] = []
    for place, _, names in os.walk(PACKAGE, followlinks=True):
        for name in sorted(names):
            path = Path(place) / name
            if path.suffix == ".py":
                parts = path.relative_to(PACKAGE).with_suffix("").parts
                file = str(path.relative_to(ROOT))
                for node, when in _walk(ast.parse(path.read_text()), "loading"):
                    module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
                    found += [
                        Import(file, node.lineno, parts[0], imported, when, module)
                        for imported in _folders(node)
                    ]
    return found


def _walk(node: ast.AST, when: When) -> Iterator[tuple[ast.Import | ast.ImportFrom, When]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, when
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for each in child.body:
                if isinstance(each, ast.Import | ast.ImportFrom):
                    yield each, "typing"
        elif not isinstance(child, ast.expr):  # which are most of a tree, and hold no import
            in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            inside: When = "running" if in_function else when
            yield from _walk(child, inside)


def _folders(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        base = (node.module or "").split(".")
        for alias in node.names if base[0] == "mcr_plus" else ():
            inside = len(base) == 1 and alias.name in HEIGHT
            yield base[1] if len(base) > 1 else alias.name if inside else "__init__"
    elif isinstance(node, ast.Import):
        for alias in node.names:
            parts = alias.name.split(".")
            if parts[0] == "mcr_plus":
                yield parts[1] if len(parts) > 1 else "__init__"


def test_there_is_something_to_check() -> None:
    across = [each for each in imports() if each.importer != each.imported]
    assert len({(each.importer, each.imported, each.when) for each in across}) > 100
    assert {each.when for each in across} == {"loading", "running", "typing"}


def test_imports_point_downwards() -> None:
    upward = [
        f"{each.file}:{each.line}: {each.importer} imports {each.imported} ({each.when})"
        for each in imports()
        if each.importer != each.imported and HEIGHT[each.imported] >= HEIGHT[each.importer]
    ]
    assert not upward, "\n".join(upward)


def test_no_stage_imports_another() -> None:
    """The one exception: options of a codec, which are options of `hierarchical` too (decision 24)."""
    between = [
        f"{each.file}:{each.line}: {each.module}"
        for each in imports()
        if {each.importer, each.imported} <= STAGES and each.importer != each.imported
    ]
    assert {each.partition(": ")[2] for each in between} == {"mcr_plus.compression.options"}, between


def test_the_core_imports_no_capability() -> None:
    wrong = [
        f"{each.file}:{each.line}: {each.module} ({each.when})"
        for each in imports()
        if each.importer not in CAPABILITIES.keys() | FACADES | {"__main__"} and each.imported in CAPABILITIES
    ]
    assert not wrong, "\n".join(wrong)


def test_capabilities_use_those_that_are_listed() -> None:
    uses: dict[str, set[str]] = {name: set() for name in CAPABILITIES}
    for each in imports():
        if each.importer in CAPABILITIES and each.imported in CAPABILITIES.keys() - {each.importer}:
            uses[each.importer].add(each.imported)
    assert uses == CAPABILITIES


def test_every_folder_has_its_place_and_few_files_lie_at_the_root() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {path.stem for path in PACKAGE.glob("*.py")} == AT_THE_ROOT
    assert folders | AT_THE_ROOT == set(HEIGHT)
