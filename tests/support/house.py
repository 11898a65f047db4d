"""Counts of the library's size: lines, names, and modules loaded by a job.

    python tests/support/house.py
    python tests/support/house.py --modules    the page of the site that lists every module

Lines are those of files of the package, linked folders included. What a job loads is measured on rank 0 of
two, under torchrun; calls are Python calls of the package, by `sys.setprofile`. A wait counts each function
that it calls once, because the number of polls depends on when the other rank comes. So is the path of a
loss counted, on rank 0 of three.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "mcr_plus"
JOB: Final = """
import json, os, sys
import torch

def resident(*names):
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(names)) / 1024

def calls(run):
    count, polled = 0, None
    def note(frame, event, _):
        nonlocal count, polled
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if event == "call" and module.startswith("mcr_plus") and code not in (polled or ()):
            count += 1
            if polled is not None:
                polled.add(code)
        if module == "mcr_plus.engine.engine" and code.co_name == "_wait" and event in ("call", "return"):
            polled = set() if event == "call" else None
    sys.setprofile(note)
    run()
    sys.setprofile(None)
    return count

PRIVATE = "Private_Clean", "Private_Dirty"  # not shared with other ranks, as are pages of libraries
before, private = resident("Rss"), resident(*PRIVATE)
import mcr_plus as mcr
with mcr.init() as comm:
    x, y = torch.ones(4), torch.ones(9)
    first = calls(lambda: mcr.all_reduce(x))
    second = calls(lambda: mcr.all_reduce(y))
    ours = [module for name, module in sys.modules.items() if name[:8] == "mcr_plus"]
    files = [module.__file__ for module in ours if str(getattr(module, "__file__", "")).endswith(".py")]
    if comm.rank == 0:
        print(json.dumps({
            "modules": len(files), "lines": sum(sum(1 for _ in open(file)) for file in files),
            "first collective, calls": first, "next new signature, calls": second,
            "resident MiB": round(resident("Rss") - before, 1),
            "of which private MiB": round(resident(*PRIVATE) - private, 1),
        }))
"""


LOSS: Final = """
import json, os, signal, sys, threading
import torch
import mcr_plus as mcr

seen = set()

def note(frame, event, _):
    name = frame.f_globals.get("__name__", "")
    if event == "call" and name.startswith("mcr_plus."):
        seen.add(name)

with mcr.init() as comm:
    model = torch.nn.Linear(4, 2)
    model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in mcr.elastic(model, optimizer, steps=4):
        with step:
            if step.number == 2 and comm.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if step.number == 2 and not seen:
                threading.setprofile(note)
                sys.setprofile(note)
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            sys.setprofile(None)
    if mcr.get_rank() == 0:
        print(json.dumps({"modules": len(seen), "folders": len({name.split(".")[1] for name in seen})}))
"""


def sources() -> Iterator[Path]:
    """Yield the files of the package."""
    for place, _, names in os.walk(PACKAGE, followlinks=True):
        yield from (Path(place, name) for name in names if name.endswith(".py"))


def modules() -> str:
    """Return a page with every module and the first line of its docstring, folder by folder."""
    rows = ["# Modules", "", "Every module of `mcr_plus`, with the first line of its docstring."]
    folder = ""
    for path in sorted(sources(), key=lambda each: (each.parent, each)):
        place = path.parent.relative_to(PACKAGE.parent).as_posix()
        if place != folder:
            folder = place
            rows += ["", f"## {folder}/", "", "| module | content |", "|---|---|"]
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        rows.append(f"| `{path.stem}` | {text.partition(chr(10))[0]} |")
    return "\n".join(rows)


def words(paths: list[Path]) -> int:
    """Return the number of words of texts."""
    return sum(len(path.read_text().split()) for path in paths)


def counted(program: str, *launcher: str) -> dict[str, float]:
    """Return the counts that a job prints as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.py")
        job.write_text(program)
        command = [sys.executable, "-m", *launcher, str(job)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(next(line for line in done.stdout.splitlines() if line[:1] == "{"))
    return found


def names_kind(text: str, kind: str) -> bool:
    """Return whether code has the kind as a text or name, not in comments, docstrings or attributes."""
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if (
            token.type in (tokenize.NAME, tokenize.STRING)
            and token.string.strip("\"'") == kind
            and before != "."
        ):
            return True
        before = token.string
    return False


def main() -> None:
    """Print all counts, or the page of modules."""
    if sys.argv[1:] == ["--modules"]:
        print(modules())
        return
    files = sorted(sources())
    texts = {path: path.read_text() for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    classes = Counter(
        node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    shared = sorted(name for name, count in classes.items() if count > 1)
    scatter = [path for path, text in texts.items() if names_kind(text, "scatter")]
    apart = {"decisions", "reference"}
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in apart]
    docs = [ROOT / "README.md", *pages]
    print(f"library: {sum(text.count(chr(10)) for text in texts.values()):,} lines in {len(files)} files")
    print(f"class names used more than once: {len(shared)}: {', '.join(shared)}")
    named = ", ".join(str(path.relative_to(PACKAGE)) for path in scatter)
    print(f"files whose code names the kind `scatter`: {len(scatter)}: {named}")
    print(f"words of README.md and docs, decisions and reference apart: {words(docs):,}")
    for name, value in counted(JOB, "torch.distributed.run", "--nproc-per-node", "2").items():
        print(f"init and one all_reduce: {name}: {value:,}")
    for name, value in counted(LOSS, "mcr_plus.cli.main", "run", "-n", "3", "--min-ranks", "2").items():
        print(f"from the loss of a rank to the repeated step: {name}: {value:,}")


if __name__ == "__main__":
    main()
