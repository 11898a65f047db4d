"""The reference: every public name has an entry and a docstring with examples that run on two ranks."""

from __future__ import annotations

import inspect
import os
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import run_ranks
from torch_features import runs

import mcr_plus as mcr
from mcr_plus import autograd, horovod, spatial

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (mcr, autograd, spatial)
    for name in module.__all__
}
OF_API = {
    name: function
    for name, function in PUBLIC.items()
    if inspect.isfunction(function) and function.__module__.startswith("mcr_plus.api.")
}
OF_JOBS = {  # functions whose docstrings have errors and an example too
    f"mcr_plus.{name}": PUBLIC[f"mcr_plus.{name}"]
    for name in (
        "broadcast_parameters", "ddp_hook", "fsdp", "init", "new_group", "no_sync", "reset", "wrap",
    )
}  # fmt: skip
CONSTANTS = {name for name, value in PUBLIC.items() if isinstance(value, str)}


def entries() -> set[str]:
    """Return the names with an entry in the pages of the reference."""
    pages = "\n".join(path.read_text() for path in REFERENCE.glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))


def test_every_public_name_has_an_entry() -> None:
    found = entries()
    assert sorted(PUBLIC.keys() - CONSTANTS - found) == []
    assert horovod.__name__ in found  # which shows all that it exports
    operations = (REFERENCE / "operations.md").read_text()
    for name in CONSTANTS:
        assert f"`{name.removeprefix('mcr_plus.')}`" in operations


def test_plans_have_entries() -> None:
    """They are public, but not names of the package."""
    plans = {name.removeprefix("mcr_plus.plans.") for name in entries()}
    assert {"language.ModelPlan", "language.F", "named", "proof.prove", "search.search"} <= plans


def test_every_entry_exists() -> None:
    for name in entries():
        assert pydoc.locate(name) is not None, name


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - CONSTANTS))
def test_every_public_name_has_a_docstring(name: str) -> None:
    value = PUBLIC[name]
    assert inspect.getdoc(value)
    for method, function in vars(value).items() if inspect.isclass(value) else ():
        if inspect.isfunction(function) and not method.startswith("_"):
            assert inspect.getdoc(function), f"{name}.{method}"


@pytest.mark.parametrize("name", sorted(OF_JOBS))
def test_docstrings_have_errors_and_an_example(name: str) -> None:
    text = inspect.getdoc(OF_JOBS[name]) or ""
    assert "\nRaises:\n" in text
    assert "\nExample:\n    ```python\n" in text


@pytest.mark.parametrize("name", sorted(OF_API))
def test_docstrings_have_shapes_errors_and_an_example(name: str) -> None:
    text = inspect.getdoc(OF_API[name]) or ""
    assert "\nRaises:\n" in text
    assert "\nExample:\n    ```python\n" in text
    if "Tensor" in str(inspect.signature(OF_API[name]).parameters):
        assert re.search(r"shape|elements|pickle|`all_reduce`|`send`|`recv`", text)


def test_the_examples_of_docstrings_run(tmp_path: Path) -> None:
    programs = {name: examples(function) for name, function in (OF_API | OF_JOBS).items()}
    assert len(programs) >= 38
    assert all(programs.values())
    classes = {name: examples(value) for name, value in PUBLIC.items() if inspect.isclass(value)}
    programs |= {name: text for name, text in classes.items() if text}
    programs["with_halo"] = examples(mcr.Layout.with_halo)
    assert {"mcr_plus.spatial.Conv3d", "with_halo"} <= {name for name, text in programs.items() if text}
    programs = {name: text for name, text in programs.items() if runs(text)}
    run_ranks(run_examples, 2, args=[programs, str(tmp_path)], via="torch")


def examples(function: Any) -> str:
    """Return the programs in the docstring of a function."""
    return "\n".join(
        re.findall(r"^    ```python\n(.*?)^    ```$", inspect.getdoc(function) or "", re.S | re.M)
    )


def run_examples(programs: dict[str, str], folder: str) -> None:
    os.chdir(folder)  # for their files

    def run(name: str) -> None:
        code = compile(inspect.cleandoc("\n" + programs[name]), name, "exec")
        exec(code, {"torch": torch, "mcr": mcr, "autograd": autograd, "spatial": spatial})

    apart = [name for name, text in programs.items() if "init(" in text or "init_process_group(" in text]
    with mcr.init():
        for name in [each for each in programs if each not in apart]:
            run(name)
            mcr.barrier()
    for name in apart:  # examples that join and leave a job of their own
        run(name)


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for each in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(each)

    named = [page for page in pages(site["nav"]) if page != "modules.md"]  # which `make docs` writes
    assert [page for page in named if not (ROOT / page).exists()] == []
    written = {f"docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(page for page in written - set(named) if not page.startswith("docs/decisions/")) == []


@pytest.mark.parametrize("folder", ["docs/decisions", "docs/reference", "benchmarks/results"])
def test_an_index_names_every_page(folder: str) -> None:
    pages = {path.name for path in (ROOT / folder).glob("*.md")}
    links = re.findall(r"\]\(([\w.-]+\.md)\)", (ROOT / folder / "README.md").read_text())
    assert sorted(links) == sorted(pages - {"README.md"})
