"""Compiling of kernels: one process per host compiles and logs it, and deadlines of peers wait."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from command import mcr_plus
from ranks import has_come, run_ranks, wait_for_ranks

import mcr_plus as mcr
from mcr_plus.cli import warmup
from mcr_plus.kernels import compiling, sources
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

DEADLINE_S = 3.0
COMPILES_S = 5.0


def compiles_late(across: bool) -> dict[str, Any]:
    """Run on ranks: rank 1 compiles for longer than the deadline, in every way that rank 0 can wait."""
    if across:  # as between hosts
        mock.patch("mcr_plus.board.opening.map_shared", return_value=(None, None)).start()
    dispatch = {"dispatch": {"timeout": f"{DEADLINE_S}s"}}
    comm = mcr.init({"version": 1, "backends": ["msccl", "gloo"], "pipeline": [{"select": {}}, dispatch]})
    groups = {form: mcr.new_group([0, 1]) for form in ("sync", "asked", "known", "receive", "never")}
    values = {form: torch.full((5,), 1.0 + comm.rank) for form in groups}
    groups["known"].all_reduce(torch.zeros(5), backend="gloo")

    def use(form: str) -> float:
        """Returns how long it took."""
        groups[form].take_over()
        began = time.monotonic()
        if form == "receive" and comm.rank == 0:
            groups[form].recv(values[form], 1)
        elif form == "receive":
            groups[form].send(values[form], 0)
        else:
            library = None if form == "sync" else "gloo"
            work = groups[form].all_reduce(values[form], backend=library, async_op=form == "asked")
            while work is not None and not work.is_completed():
                time.sleep(0.01)
        return time.monotonic() - began

    forms = ("sync", "asked", "known", "receive")
    if comm.rank == 1:
        with compiling.compiling("a kernel"):
            has_come("compiling")
            time.sleep(COMPILES_S)
    wait_for_ranks("compiling", 1)
    with ThreadPoolExecutor(len(forms)) as pool:
        waited = list(pool.map(use, forms))
    text = ""
    groups["never"].take_over()
    if comm.rank == 0:
        try:
            groups["never"].all_reduce(values["never"])
        except mcr.CommTimeout as error:
            text = str(error)
        has_come("told")
    else:
        wait_for_ranks("told", 1)
    return {"waited": min(waited), "text": text, **{form: value.tolist() for form, value in values.items()}}


@pytest.mark.long
@pytest.mark.parametrize("across", [False, True], ids=["one host", "two hosts"])
def test_deadlines_exclude_the_compilation_of_a_peer(across: bool) -> None:
    first, second = run_ranks(compiles_late, 2, args=[across], via="torch")
    assert first.value["waited"] > 1.2 * DEADLINE_S
    for form in ("sync", "asked", "known"):
        assert first.value[form] == second.value[form] == [3.0] * 5
    assert first.value["receive"] == [2.0] * 5
    assert "missing ranks: [1]" in first.value["text"]


def libraries_without_kernels() -> list[bool]:
    """Run on ranks with libraries that need no compiler."""
    found = []
    for backends in (["gloo"], ["mpi", "gloo"]):
        with mcr.init(backends=backends if mpi_usable() else ["gloo"]) as comm:
            comm.all_reduce(torch.ones(4))
            found.append("numba" in sys.modules)
    return found


@pytest.mark.long
def test_no_compiler_where_no_kernel_is_used() -> None:
    # Imports read the variable, so the test needs a new process without earlier imports.
    for result in run_ranks(
        libraries_without_kernels, 2, env={"NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"}
    ):
        assert result.value == [False, False]


def test_one_of_many_threads_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path)
    inside, most, cold = 0, 0, 0

    def first_use(number: int) -> None:
        nonlocal inside, most, cold
        with compiling.preparing("it"):
            found = compiling._noted(next(tmp_path.iterdir()))
            cold += not found
            inside += not found
            most = max(most, inside)
            time.sleep(0.05)
            inside -= not found

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(first_use, range(16)))
    assert (most, cold) == (1, 1)


def test_loading_cached_kernels_is_announced_like_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiling, "watchers", [told.append])
    monkeypatch.setattr(compiling, "_loaded", set())
    with compiling.preparing("it"):  # compiles
        assert told == [True]
    compiling._loaded.clear()  # as in another process
    with compiling.preparing("it"):  # loads
        assert told == [True, False, True]
    with compiling.preparing("it"):  # prepares both
        assert told == [True, False, True, False]
    assert told == [True, False, True, False]


def test_one_thread_begins_while_another_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers must not be told the end of the first after the beginning of the second."""
    told: list[bool] = []
    ending, begun = threading.Event(), threading.Event()

    def watch(begins: bool) -> None:
        if not begins and not ending.is_set():
            ending.set()
            begun.wait(0.5)
        told.append(begins)

    def second() -> None:
        ending.wait()
        with compiling.compiling("another"):
            begun.set()

    monkeypatch.setattr(compiling, "watchers", [watch])
    thread = threading.Thread(target=second)
    thread.start()
    with compiling.compiling("one"):
        pass
    thread.join()
    assert told == [True, False, True, False]


IN_TWO_THREADS = """
import json, threading
import torch
from mcr_plus.compression.stage import prepare
from mcr_plus.compression.options import CompressOptions, codec_of
from mcr_plus.kernels import compiling

told, found = [], []
compiling.watchers.append(told.append)
together = threading.Barrier(2)

def use(seed):
    codec = codec_of(CompressOptions(codec="int8_block"))
    values = torch.linspace(-1, 1, 600) * (1 + seed)
    together.wait()
    prepare(codec)
    wire = torch.empty(codec.wire_numel(600), dtype=codec.wire_dtype)
    result = torch.empty(600)
    codec.decode(wire[: codec.encode(values, wire)], result)
    found.append((result - values).abs().max().item() / (1 + seed))

threads = [threading.Thread(target=use, args=[seed]) for seed in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps({"told": told, "found": found, "left": compiling._depth}))
"""


@pytest.mark.long
def test_two_threads_that_compile_the_same_kernel(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_TWO_THREADS],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=240,
    )
    told = json.loads(done.stdout)
    assert told["left"] == 0
    assert told["told"] == [True, False] * (len(told["told"]) // 2) != []
    assert len(told["found"]) == 2
    assert max(told["found"]) < 1 / 127


def test_long_compilation_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiling, "_LONG_S", 600.0)
    monkeypatch.setattr(compiling, "_silent", False)
    monkeypatch.setattr(compiling, "_known", set())
    monkeypatch.setattr(compiling, "watchers", [told.append])
    with compiling.preparing("short"):
        pass
    monkeypatch.setattr(compiling, "_LONG_S", 0.1)
    for number, what in enumerate(("int8_block", "int8_block", "topk")):
        with compiling.preparing(what):
            ends = time.monotonic() + (0.5 if number == 1 else 60)  # the second time it has been compiled
            while time.monotonic() < ends and len(caplog.records) < (1, 2, 2)[number]:
                time.sleep(0.01)
    first, second = caplog.records
    assert (first.name, first.levelno) == ("mcr_plus", logging.WARNING)
    assert f"those of int8_block (once; kept in {tmp_path})" in first.message
    assert f"those of topk (once; kept in {tmp_path})" in second.message
    assert told == [True, False] * 3


PAIR = {
    "kernel.py": """
import sys
from mcr_plus.kernels.cpu import compiled
from pair import beside
from pair.parts import grown

@compiled
def kernel(x):
    return grown(x) + beside.LESS

print(kernel(int(sys.argv[1])), sum(kernel.stats.cache_hits.values()))
""",
    "beside.py": "LESS = -1\n",
    "parts.py": """
from mcr_plus.kernels.cpu import inlined
from pair.factors import FACTOR

@inlined
def grown(x):
    return FACTOR * x + 1
""",
    "factors.py": "FACTOR = 2\n",
}
"""A package whose kernel is made of functions and constants of other files."""
FORKS = """
import os
import sys
import numba
import mcr_plus.kernels.cpu

numba.njit(lambda x: x + 1)(1)  # so that the compiler is imported once
for line in sys.stdin:
    if os.fork() == 0:
        sys.argv[1:] = [line]
        import pair.kernel
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
"""For every line an import of the package, in a process that has not imported any of it before."""


@pytest.mark.long
def test_a_kernel_is_compiled_again_when_what_it_is_made_of_has_changed(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    folder.mkdir()

    def edit(name: str, old: str, new: str) -> None:
        """Change a file like an editor or git, in the same second and with the same size."""
        times = (folder / name).stat()
        (folder / name).write_text(PAIR[name].replace(old, new))
        os.utime(folder / name, ns=(times.st_atime_ns, times.st_mtime_ns))

    # Python takes a module of the same size and second from its own cache.
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", FORKS], cwd=tmp_path, env=env,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def result_and_hits() -> list[int]:
        assert server.stdout is not None
        print("10", file=server.stdin, flush=True)
        return [int(each) for each in server.stdout.readline().split()]

    for name, text in PAIR.items():
        (folder / name).write_text(text)
    with server:
        assert result_and_hits() == [20, 0]
        assert result_and_hits() == [20, 1]
        edit("parts.py", "x + 1", "x + 5")  # the inlined function
        assert result_and_hits() == [24, 0]
        edit("factors.py", "2", "3")  # a constant of that function, from another file
        assert result_and_hits() == [34, 0]
        edit("beside.py", "1", "2")  # a constant of a module
        assert result_and_hits() == [33, 0]
        assert result_and_hits() == [33, 1]
    assert server.returncode == 0


def test_the_sources_of_a_kernel_are_those_of_all_that_is_compiled_into_it() -> None:
    for kernel in _kernels():
        covered = sources.modules(kernel.py_func.__module__)
        used = {each.py_func.__module__ for each in _called(kernel)}
        assert used <= covered, kernel.py_func.__qualname__


def test_the_sources_of_a_kernel_do_not_depend_on_what_was_imported_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise processes with different imports would compile the kernels of each other again."""
    folder = tmp_path / "some_package" / "kernels"
    folder.mkdir(parents=True)
    texts = {"earlier": "", "used": "", "kernel": "from some_package.kernels import used\n"}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("earlier", "kernel"):
        importlib.import_module(f"some_package.kernels.{name}")
    names = {f"some_package.kernels{name}" for name in ("", ".kernel", ".used")}
    assert sources.modules("some_package.kernels.kernel") == names


@pytest.mark.parametrize("name", ["above.py", "linked/below.py"])
def test_kernels_are_prepared_again_by_one_process_when_a_source_has_changed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    package.mkdir()
    elsewhere.mkdir()
    (package / "linked").symlink_to(elsewhere)
    (package / name).write_text("LESS = 1\n")
    monkeypatch.setattr(compiling, "_PACKAGE", package)
    before = compiling._state.__wrapped__()
    assert compiling._state.__wrapped__() == before
    (package / name).write_text("LESS = 10\n")
    assert compiling._state.__wrapped__() != before


PREPARES = """
import sys, time
from mcr_plus.kernels import compiling

compiling._LONG_S = 0.2
print("ready", flush=True)
sys.stdin.readline()
with compiling.preparing("it"):
    time.sleep(1.5)
"""


@pytest.mark.long
def test_without_a_terminal_only_the_compiling_process_logs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PREPARES]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    jobs = [
        subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()
    said = sorted(job.communicate(timeout=120)[1] for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0]
    assert said[0] == ""
    assert said[1].startswith("compiling kernels, now those of it (once; ")
    assert len(said[1].splitlines()) == 1


def test_numba_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that were not prepared count too."""
    from mcr_plus.kernels import cpu

    told: list[bool] = []
    monkeypatch.setattr(compiling, "watchers", [told.append])

    def kernel(x):  # type: ignore[no-untyped-def]
        return x + 1

    kernel.__module__ = "mcr_plus.kernels.it"
    assert cpu._numba.njit(kernel)(1) == 2
    assert told == [True, False]


@pytest.mark.long
def test_warmup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path)
    answer = mcr_plus("warmup", "--codec", "bf16", "--codec", "randk", "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    told = json.loads(answer.stdout)
    assert told["folder"] == str(tmp_path)
    assert [row["name"] for row in told["kernels"]] == ["bf16", "randk"]
    assert all(row["seconds"] >= 0 for row in told["kernels"])
    answer = mcr_plus("warmup", "--codec", "bf16")
    assert answer.stdout.splitlines()[0].startswith("1 of 1 bf16: ")
    answer = mcr_plus("warmup", "--only", "reductions", "--only", "randk", "--json")
    assert [row["name"] for row in json.loads(answer.stdout)["kernels"]] == ["reductions", "randk"]
    wrong = mcr_plus("warmup", "--only", "reduction")
    assert wrong.returncode == 2
    assert "did you mean 'reductions'" in wrong.stderr
    wrong = mcr_plus("warmup", "--codec", "bf61")
    assert wrong.returncode == 2
    assert "did you mean 'bf16'" in wrong.stderr


def _kernels() -> list[Any]:
    """Return the functions of the package that numba compiles where they are called."""
    from numba.core.dispatcher import Dispatcher  # some ranks must not have numba

    found: dict[int, Any] = {}
    root = os.path.dirname(mcr.__file__)
    for folder, _, names in os.walk(root, followlinks=True):
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            if "compiled\n" in path.read_text() and path.parent.name != "gpu":
                module = ".".join(("mcr_plus", *path.relative_to(root).with_suffix("").parts))
                values = vars(importlib.import_module(module)).values()
                found |= {id(each): each for each in values if isinstance(each, Dispatcher)}
    return [each for each in found.values() if "inline" not in each.targetoptions]


def _called(kernel: Any) -> Iterator[Any]:
    """The compiled functions that the code of one names."""
    from numba.core.dispatcher import Dispatcher

    known = kernel.py_func.__globals__
    for name in kernel.py_func.__code__.co_names:
        places = (known, *(vars(each) for each in known.values() if isinstance(each, ModuleType)))
        yield from (place[name] for place in places if isinstance(place.get(name), Dispatcher))


@pytest.mark.long
def test_warmup_leaves_no_kernel_out() -> None:
    from mcr_plus.backends.shm import collectives_kernels, p2p_checks, p2p_kernels

    for prepare in warmup.tasks(None).values():
        prepare()
    kernels = _kernels()
    assert len(kernels) > 50
    ready = {kernel for kernel in kernels if kernel.overloads}
    messages = (p2p_kernels.send_at, p2p_kernels.expect_at, p2p_kernels.advance_at)
    described = (collectives_kernels.begin_at, collectives_kernels.advance_at, *messages)
    images = (describe()[1] for describe in described)
    functions = (p2p_checks._carry_out, p2p_checks._carry_in, *images)
    carriers = [SimpleNamespace(py_func=each) for each in functions]
    found = [*ready, *carriers]  # functions for C are prepared as well but are no dispatchers
    while found:
        found = [each for kernel in found for each in _called(kernel) if each not in ready]
        ready.update(found)  # functions compiled into a kernel come from disk with it
    assert [kernel.py_func.__qualname__ for kernel in kernels if kernel not in ready] == []


def test_functions_without_a_module_can_be_compiled() -> None:
    """`exec` gives a function the module of its globals, and none where they have none."""
    from mcr_plus.kernels import cpu  # from here on it watches

    made: dict[str, Any] = {}
    exec("def twice(x): return x + x", made)
    assert made["twice"].__module__ in (None, "builtins")
    made["twice"].__module__ = None
    assert cpu._numba.njit(made["twice"])(21) == 42
    seen: list[bool] = []
    compiling.watchers.append(seen.append)
    try:
        ours = {"__name__": "mcr_plus.kernels.made_here"}
        exec("def thrice(x): return x + x + x", ours)
        assert cpu._numba.njit(ours["thrice"])(14) == 42
    finally:
        compiling.watchers.remove(seen.append)
    assert seen == [True, False]


def _adder(number: int) -> Any:
    """Return a C function that adds; all such functions have the same text."""

    from mcr_plus.kernels.cpu import c_function

    def add(value):  # type: ignore[no-untyped-def]
        return value + number

    return c_function("int64(int64)", add)


def test_functions_of_one_text_that_are_compiled_at_once_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes, both begin to write before either has, and the first one writes last."""
    from numba.core.caching import IndexDataCacheFile

    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    write: Any = IndexDataCacheFile._save_data
    writes: list[Any] = []
    with monkeypatch.context() as both:
        both.setattr(IndexDataCacheFile, "_load_index", lambda self: {})
        both.setattr(IndexDataCacheFile, "_save_data", lambda *args: writes.append(args))
        for number in (1, 2):
            assert _adder(number).ctypes(40) == 40 + number
    for args in reversed(writes):
        write(*args)
    assert [_adder(number).ctypes(40) for number in (1, 2)] == [41, 42]
    assert len(list(tmp_path.rglob("*.nbc"))) == 2
