"""Classes and files stay short, or say why not; classes have names of their own; options are marked."""

from __future__ import annotations

import ast
import os
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Annotated

import pytest
from house import names_kind
from pydantic import BaseModel

from mcr_plus.compression.options import CompressOptions
from mcr_plus.config.options import Scope, StageOptions, options_marked
from mcr_plus.engine.options import DispatchOptions

ROOT = Path(__file__).parents[2]
MOST_METHODS = 30
MOST_LINES = 500
ONE_PER_KIND = {
    "torch_backend/process_group.py: McrProcessGroup": "one method for each operation of c10d's ProcessGroup",
}

SHARED: dict[str, str] = {}
"""Names of several classes, private ones included, and for each the reason; at most 15."""
VAGUE = {"Job", "Part", "Operation", "Step", "Entry", "Sent", "Kept", "Had", "Place", "Found"}


NAME_A_KIND = {
    "__init__.py": "public names",
    "api/collectives.py": "the public function",
    "communicator/calls.py": "the checks of its arguments",
    "communicator/operations.py": "the method of a group",
    "compression/delta.py": "kinds whose receivers can ask the sender for all values",
    "core/foreign_names.py": "names of other libraries",
    "core/kinds.py": "the table",
    "hierarchy/decompose.py": "steps of a broadcast",
    "msccl/generators.py": "an algorithm for it",
    "tables/interchange/openmpi.py": "the table of a format",
    "tables/interchange/ucc.py": "the table of a format",
    "torch_backend/process_group.py": "the method of c10d",
}
"""The files whose code may name the kind `scatter`, and why; others ask `core.kinds`."""


@cache
def sources(folder: str) -> dict[str, str]:
    """Return the text of the modules in a folder, also through links, by path."""
    return {
        str(path.relative_to(ROOT / folder)): path.read_text()
        for place, _, names in os.walk(ROOT / folder, followlinks=True)
        for path in (Path(place) / name for name in names)
        if path.suffix == ".py"
    }


def methods(body: list[ast.stmt]) -> set[str]:
    """Return the names of methods, each once: overloads and setters share theirs."""
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def large_classes() -> dict[str, int]:
    return {
        f"{file}: {node.name}": count
        for file, text in sources("mcr_plus").items()
        if text.count("def ") > MOST_METHODS  # parsing all files takes seconds
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and (count := len(methods(node.body))) > MOST_METHODS
    }


def reason_is_missing(text: str) -> bool:
    head = text.partition("\nfrom __future__")[0]  # a comment where the docstring is part of the reference
    return text.count("\n") > MOST_LINES and "Long because" not in head


def test_there_is_something_to_check() -> None:
    files = sources("mcr_plus")
    assert len(files) > 250
    assert {"communicator/communicator.py", "compression/stage.py", "kernels/int4_block.py"} <= files.keys()


def test_classes_have_few_methods() -> None:
    """An exception for a class that has become small must be removed, too."""
    assert large_classes().keys() == ONE_PER_KIND.keys(), large_classes()


def class_names() -> Counter[str]:
    """Return the number of the library's classes by name."""
    nodes = (node for text in sources("mcr_plus").values() for node in ast.walk(ast.parse(text)))
    return Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))


def test_classes_have_names_of_their_own() -> None:
    """A search by name finds one class. A name that is no longer shared must leave the list, too."""
    names = class_names()
    assert len(names) > 700
    assert {name for name, count in names.items() if count > 1} == SHARED.keys()
    assert len(SHARED) <= 15


def test_names_of_classes_say_what_they_are() -> None:
    """An adjective goes with a vague noun, also in a private name: `TuningJob`, `CapturedStep`."""
    assert not [name for name in class_names() if name.strip("_") in VAGUE]


def test_few_files_name_a_kind() -> None:
    """A file that names the kind no more must go from the list, too."""
    assert {file for file, text in sources("mcr_plus").items() if names_kind(text, "scatter")} == {
        *NAME_A_KIND
    }
    assert len(NAME_A_KIND) <= 12


@pytest.mark.parametrize("folder", ["mcr_plus", "benchmarks", "examples"])
def test_long_files_give_a_reason(folder: str) -> None:
    missing = [file for file, text in sources(folder).items() if reason_is_missing(text)]
    assert not missing, f"more than {MOST_LINES} lines, and no 'Long because' at the head: {missing}"


def test_only_the_head_of_a_long_file_counts() -> None:
    start, rest = '"""A module."""\n', "from __future__ import annotations\n" + MOST_LINES * "x = 1\n"
    assert reason_is_missing(start + rest + "# Long because it tests.\n")
    assert not reason_is_missing(start + "# Long because it tests.\n" + rest)
    assert not reason_is_missing(start + MOST_LINES // 2 * "x = 1\n")


def unmarked(model: type[BaseModel], *scopes: Scope) -> list[str]:
    """Return the options of a model that have none of these marks, or several."""
    marked = [name for scope in scopes for name in options_marked(model, scope)]
    return [name for name in model.model_fields if marked.count(name) != 1]


def test_options_are_marked() -> None:
    assert not unmarked(CompressOptions, Scope.WIRE, Scope.LOCAL)
    assert not unmarked(DispatchOptions, Scope.JOB, Scope.GROUP)


def test_a_new_option_needs_a_mark() -> None:
    class More(CompressOptions):
        forgotten: int | None = None
        both: Annotated[int, Scope.WIRE, Scope.LOCAL] = 0
        marked: Annotated[int, Scope.WIRE] = 0

    assert unmarked(More, Scope.WIRE, Scope.LOCAL) == ["forgotten", "both"]
    assert not options_marked(StageOptions, Scope.LOCAL)
