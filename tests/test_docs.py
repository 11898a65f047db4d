"""The documents' programs run, on two ranks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from ranks import run_ranks

from mcr_plus import config

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


# Variables on the page that not we read, but what we use.
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


def run_text(text: str) -> None:
    exec(compile(text, "<document>", "exec"), {})


def test_python_blocks_run_on_two_ranks() -> None:
    files = re.compile(r"# \w+\.py\n")  # not programs: other tests run them
    programs = [(where, text) for where, text in blocks("python") if not files.match(text)]
    assert len(programs) >= 2
    for where, text in programs:
        results = run_ranks(run_text, 2, args=[text])
        assert all(result.stdout for result in results), where


@pytest.mark.parametrize(("where", "text"), blocks("yaml"))
def test_yaml_blocks_are_valid_configurations(where: str, text: str) -> None:
    if "pipeline" in yaml.safe_load(text):
        assert config.loads(text, where).pipeline


def variables(path: Path) -> set[str]:
    """Names of variables of the environment that stand as texts in a program."""
    texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    names = r"RANK|WORLD_SIZE|(MCR|OMPI|PMI|PMIX|MPI|SLURM|TORCH\w*|MASTER|GLOO|LOCAL)_[A-Z_]*[A-Z]"
    return {text for text in texts if isinstance(text, str) and re.fullmatch(names, text)}


def test_every_variable_of_the_environment_is_described() -> None:
    folder = ROOT / "mcr_plus"
    ours = {
        name for path in (folder / "launch").glob("*.py") for name in variables(path) if name[:4] == "MCR_"
    }
    read = variables(folder / "environment.py") | ours
    described = set(re.findall(r"`([A-Z][A-Z_]+)`", (ROOT / "docs" / "environment.md").read_text()))
    assert sorted(read - described) == []
    assert sorted(described - read - OF_OTHERS) == []
