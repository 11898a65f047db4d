"""Tensors of the library itself name their device, so the program's default device does not matter.

`torch.set_default_device("cuda")`, or `with torch.device("cuda")` around a call, would move them otherwise.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import mcr_plus

ROOT: Final = Path(mcr_plus.__path__[0]).resolve()
MAKERS: Final = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip

CANDIDATE: Final = re.compile(rf"\btorch\s*\.\s*({'|'.join(MAKERS)})\b")


def _unnamed(source: str) -> Iterator[int]:
    """Return the lines with a call such as `torch.zeros(…)` without a device."""
    if not CANDIDATE.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
            and not any(word.arg in ("device", None) for word in node.keywords)
        ):
            yield node.lineno


def test_every_new_tensor_names_its_device() -> None:
    files = {path.resolve() for path in ROOT.rglob("*.py")}
    assert len(files) > 300
    found = [f"{path}:{line}" for path in sorted(files) for line in _unnamed(path.read_text())]
    assert found == []


def test_calls_are_found() -> None:
    lines = "torch.zeros(3)", "torch.ones(1, device=x)", "torch.tensor([1], **like)", "numpy.zeros(3)"
    assert list(_unnamed("\n".join([*lines, "x = torch.full((2,), 7.0)"]))) == [1, 5]
