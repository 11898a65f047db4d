"""The library without one ordering of streams: each wait, record, query and retention, in turn.

A mutant is made in the running process: the module's source is compiled again, with one statement replaced by
its arguments alone, or one query of an event by True, and the function around it gets the new code.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import mcr_plus

_HIERARCHICAL: Final = ("nccl, hierarchical, int8_block", "gloo, hierarchical, int8_block")
MODULES: Final[dict[str, tuple[str, ...]]] = {
    "communicator.arrays": ("nccl, arrays", "gloo, arrays"),
    "backends.nccl.link": ("nccl, plain", "nccl, fused", "nccl, int8_block"),
    "core.streams": ("nccl, fused", "gloo, fused", "nccl, int8_block", "gloo, int8_block"),
    "core.work": (
        "nccl, int8_block", "gloo, int8_block", "nccl, fused, int8_block", *_HIERARCHICAL,
        "nccl, arrays, int8_block", "gloo, arrays, int8_block",
    ),
    "engine.engine": ("nccl, plain",),
    "engine.streams": (
        "nccl, plain", "gloo, plain", "gloo, fused", "nccl, sign1, error feedback", "gloo, int8_block",
        "gloo, sign1, error feedback", "gloo, int_shared", *_HIERARCHICAL,
    ),
    "engine.work": ("nccl, plain", "nccl, int8_block"),
    "fusion.buffers": ("nccl, fused", "gloo, fused"),
    "fusion.stage": ("nccl, fused", "gloo, fused", "nccl, fused, int8_block"),
    "core.buffers": ("gloo, int_shared", "nccl, int_shared", "nccl, int8_block"),
}  # fmt: skip
"""The modules with orderings, each with the settings whose programs must find what is left out there."""
ELSEWHERE: Final = {
    **dict.fromkeys(("layout.buffers", "layout.mover"), "redistributions, which are not in the model"),
    "core.accelerators": "streams of other devices, on which `test_openreg.py` runs",
    "bucketing.capture": "an event for times alone",
    **dict.fromkeys(
        (
            "backends.gloo.backend", "backends.gloo.channel", "compression.delta", "core.threads",
            "job.rebind", "plans.checkpoint",
            "torch_backend.process_group", "training.reducer", "weight_sync.connection",
        ),
        "other methods of the same names",
    ),
}  # fmt: skip
"""The modules with statements that look like orderings and have no mutants, each with the reason."""
ORDERINGS: Final = {
    "record": "a record",
    "recorded": "a record",
    "wait_event": "a wait",
    "wait_stream": "a wait",
    "follow": "a wait",
    "order_current_stream": "a wait",
    "note_stream": "a wait",
    "__dlpack__": "a wait",
    "wait_for_end": "a wait",
    "keep": "a note for the allocator",
    "add": "a retention",
}
_ROOM: Final = "self._done or (self._end is not None and self._end.query())"
"""A query that orders nothing: how much room the device's queues have, which `test_nccl.py` tests."""
_RETENTIONS: Final = ("self._ran.append(function)", "self._held.append(space)", "self._pending.append(work)")
_CANDIDATE: Final = re.compile(
    "|".join([rf"\.({'|'.join(ORDERINGS)}|query)\(", *map(re.escape, _RETENTIONS)])
)


@dataclass(frozen=True)
class Mutant:
    """An omitted statement or query of the library. `what`: the kind of ordering."""

    module: str
    line: int
    text: str
    what: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.text}"


def _ordering(node: ast.stmt) -> str | None:
    """Return a statement's kind of ordering, None for another statement."""
    value = node.value if isinstance(node, (ast.Expr, ast.Assign)) else None
    if not isinstance(value, ast.Call):
        return None
    function = value.func
    if ast.unparse(node) in _RETENTIONS:
        return "a retention"
    if not isinstance(function, ast.Attribute):
        return None
    name = function.attr
    if name == "add" and "retained" not in ast.unparse(function):
        return None
    if name == "follow" and ast.unparse(function.value) == "background":
        return None  # a function after a call in the background
    if isinstance(node, ast.Assign) and name != "recorded":
        return None
    return ORDERINGS.get(name)


def _is_query(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "query"


def _mutants_of(name: str, source: str) -> list[Mutant]:
    """Return the mutants of the uses of streams in a module."""
    found, tree = list[Mutant](), ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and (what := _ordering(node)) is not None:
            found.append(Mutant(name, node.lineno, ast.unparse(node), what))
        elif isinstance(node, ast.expr) and _is_query(node):
            found.append(Mutant(name, node.lineno, ast.unparse(node), "a query"))
    skipped = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) == _ROOM:
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sorted((each for each in found if each.line not in skipped), key=lambda each: each.line)


def mutants() -> list[Mutant]:
    """Return all mutants in the order of the source."""
    found = list[Mutant]()
    for name in MODULES:
        found += _mutants_of(name, inspect.getsource(importlib.import_module(f"mcr_plus.{name}")))
    return found


def modules_with_orderings() -> set[str]:
    """Return the modules of the library with orderings, with or without mutants."""
    package = Path(mcr_plus.__file__).parent
    found = set[str]()
    for folder, _, files in os.walk(package, followlinks=True):
        for file in files:
            path = Path(folder, file)
            name = ".".join(path.relative_to(package).with_suffix("").parts)
            if path.suffix != ".py" or not _CANDIDATE.search(text := path.read_text()):
                continue
            if _mutants_of(name, text):
                found.add(name)
    return found


class _Without(ast.NodeTransformer):
    """Replaces the statement of a line by its operands, so that functions keep their variables."""

    def __init__(self, line: int) -> None:
        self.line = line

    def _replaced(self, node: Any) -> Any:
        if node.lineno != self.line or _ordering(node) is None:
            return self.generic_visit(node)
        operands = [node.value.func, *node.value.args]
        new: ast.stmt = ast.Expr(ast.Tuple(operands, ast.Load()))
        if isinstance(node, ast.Assign):
            new = ast.Assign(node.targets, ast.Constant(None))
        return ast.fix_missing_locations(ast.copy_location(new, node))

    visit_Expr = visit_Assign = _replaced  # noqa: N815 - the names of the visitor

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        is_meant = node.lineno == self.line and _is_query(node)
        return ast.copy_location(ast.Constant(True), node) if is_meant else node


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions of a module and the methods of its classes."""
    for each in list(vars(module).values()):
        if isinstance(each, FunctionType) and each.__module__ == module.__name__:
            yield each
        elif isinstance(each, type) and each.__module__ == module.__name__:
            for member in vars(each).values():
                function = member.fget if isinstance(member, property) else member
                if isinstance(function, FunctionType):
                    yield function


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Yield with the mutant in the library. Raises `LookupError` if no function has its line."""
    module = importlib.import_module(f"mcr_plus.{mutant.module}")
    tree = _Without(mutant.line).visit(ast.parse(inspect.getsource(module)))
    compiled = compile(tree, module.__file__ or "", "exec", dont_inherit=True, flags=_FUTURE)
    new = {(code.co_name, code.co_firstlineno): code for code in _codes(compiled)}
    changed: list[tuple[FunctionType, CodeType]] = []
    for function in _functions(module):
        old = function.__code__
        if old.co_filename != module.__file__:  # of a decorator
            continue
        last = max(line for code in _codes(old) for *_, line in code.co_lines() if line is not None)
        if old.co_firstlineno <= mutant.line <= last:
            changed.append((function, old))
            function.__code__ = new[old.co_name, old.co_firstlineno]
    if not changed:
        raise LookupError(str(mutant))
    try:
        yield
    finally:
        for function, old in changed:
            function.__code__ = old


_FUTURE: Final = __import__("__future__").annotations.compiler_flag
