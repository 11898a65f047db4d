"""The documents' programs run, on two ranks."""

from __future__ import annotations

import ast
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from ranks import run_ranks
from torch_features import runs
from unit.test_import_order import CAPABILITIES

import mcr_plus as mcr
from mcr_plus.compression.options import codec_names
from mcr_plus.config import reader as config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
]


# Variables on the page that other software reads.
OF_OTHERS = {
    "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_TLS",
    "FI_TCP_IFACE", "I_MPI_FABRICS", "NO_COLOR", "TMPDIR", "NUMBA_CACHE_DIR",
}  # fmt: skip


def blocks(language: str) -> list[tuple[str, str]]:
    """(where, text) of every fenced block of a language."""
    found = []
    for document in DOCUMENTS:
        pattern = rf"^```{language}\n(.*?)^```$"
        for match in re.finditer(pattern, document.read_text(), re.DOTALL | re.MULTILINE):
            line = document.read_text()[: match.start()].count("\n") + 1
            found.append((f"{document.name}:{line}", match.group(1)))
    return found


def run_text(text: str, folder: str) -> None:
    os.chdir(folder)  # for its files
    exec(compile(text, "<document>", "exec"), {})


@pytest.mark.long
def test_python_blocks_run_on_two_ranks(tmp_path: Path) -> None:
    files = re.compile(r"# \w+\.py\n")  # not programs: other tests run them
    programs = [(where, text) for where, text in blocks("python") if not files.match(text) and runs(text)]
    assert len(programs) >= 2
    for where, text in programs:
        results = run_ranks(run_text, 2, args=[text, str(tmp_path)])
        lines = [result.stdout.count("\n") for result in results]
        assert any(lines), where
        assert sum(count > 1 for count in lines) <= 1, f"{where}: the lines of ranks run into each other"


@pytest.mark.parametrize(("where", "text"), blocks("yaml"))
def test_yaml_blocks_are_valid_configurations(where: str, text: str) -> None:
    if "pipeline" in yaml.safe_load(text):
        assert config.loads(text, where).pipeline


def table_of_codecs() -> dict[str, tuple[str, str]]:
    """Return the page's figures of each codec: payload, and all_reduce on two ranks; "" for no figure."""
    page = (ROOT / "docs" / "compression.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \| ([\d.]*) ?\| ([\d.]+) \|", page, re.MULTILINE)
    return {name: (payload, reduced) for cell, payload, reduced in rows for name in re.findall(r"\w+", cell)}


def shares_by_codec(codecs: list[str]) -> dict[str, list[str]]:
    """Bytes on the wire of a broadcast and of an all_reduce, as shares of the tensor's."""
    found = {}
    with mcr.init() as comm:
        torch.manual_seed(comm.rank)
        for codec in codecs:
            x = torch.randn(512, 512)
            with mcr.record() as log:
                with suppress(mcr.Unsupported):  # codecs of all_reduce alone
                    mcr.broadcast(x.clone(), 0, compress=codec)
                moved = len(log.records)
                mcr.all_reduce(x, compress=codec)
            both = log.records[:moved], log.records[moved:]
            found[codec] = [f"{sum(each.wire_bytes for each in some) / x.nbytes:.3g}" for some in both]
    return found


@pytest.mark.long
def test_the_figures_of_codecs_are_those_of_a_run() -> None:
    claimed = table_of_codecs()
    assert sorted(claimed) == sorted(set(codec_names()) - {"none", "delta"})  # its share is of the values
    for result in run_ranks(shares_by_codec, 2, args=[list(claimed)]):
        for codec, (payload, reduced) in claimed.items():
            assert result.value[codec] == [payload or "0", reduced], codec


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.name))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in targets:
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        path = document.parent / name if name else document
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == pages


def test_every_folder_of_the_package_has_its_place_and_tests() -> None:
    page = (ROOT / "docs" / "where.md").read_text()
    # A folder of an older tree may remain with compiled files alone.
    folders = {path.parent.name for path in (ROOT / "mcr_plus").glob("*/*.py")}
    named = [
        cell
        for row in re.findall(r"^\|[^|]*\|([^|]*)\|", page, re.MULTILINE)
        for cell in row.split("`")[1::2]
    ]
    assert sorted(named) == sorted(folders)
    assert set(named[: len(CAPABILITIES)]) == set(CAPABILITIES)
    for test in re.findall(r"`([\w/]+/test_\w+\.py)`", page):
        assert (ROOT / "tests" / test).exists(), test


def variables(path: Path) -> set[str]:
    """Return the names of environment variables in the texts of a program."""
    texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    names = r"RANK|WORLD_SIZE|(MCR|OMPI|PMI|PMIX|MPI|SLURM|TORCH\w*|MASTER|GLOO|LOCAL|RAY|PET)_[A-Z_]*[A-Z]"
    return {text for text in texts if isinstance(text, str) and re.fullmatch(names, text)}


def test_every_variable_of_the_environment_is_described() -> None:
    folder = ROOT / "mcr_plus"
    ours = {
        name for path in (folder / "launch").glob("*.py") for name in variables(path) if name[:4] == "MCR_"
    }
    read = variables(folder / "core" / "environment.py") | ours
    described = set(re.findall(r"`([A-Z][A-Z_]+)`", (ROOT / "docs" / "environment.md").read_text()))
    assert sorted(read - described) == []
    assert sorted(described - read - OF_OTHERS) == []
