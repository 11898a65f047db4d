"""Ranks forked from processes that have imported torch, which saves the seconds of the import.

`Nursery()` starts two of them, so that neighbouring ranks do not share random values drawn at the start of a
process, such as the salt of `hash()`. A launcher starts `command(words)` instead of `python words…`; see
`warm_client.py`. `python warm.py SOCKET` is one of the two.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib.util
import marshal
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any, Final

import warm_client
from warm_client import LENGTH, QUICK, SERVERS, read_by_imports

_IMPORTS: Final = (
    *("pytest", "hypothesis", "torch.distributed.fsdp", "torch.distributed.tensor", "numba", "mpi4py"),
    "torch._dynamo",  # which the first optimizer imports, for a second
    *(
        "mcr_plus.job.init",
        "mcr_plus.api.collectives",
        "mcr_plus.torch_backend.process_group",
        "mcr_plus.api.state",
    ),
    *(
        "mcr_plus.observe.explain",
        "mcr_plus.observe.record",
        "mcr_plus.training.wrap",
        "mcr_plus.training.ddp",
    ),
    *("mcr_plus.backends.gloo.backend", "mcr_plus.backends.mpi.backend", "mcr_plus.backends.shm.backend"),
    *("mcr_plus.backends.local", "mcr_plus.backends.msccl", "mcr_plus.backends.nccl.backend"),
    *("mcr_plus.bucketing.api", "mcr_plus.job.rebind", "mcr_plus.bucketing.capture"),
    *("mcr_plus.compression.stage", "mcr_plus.fusion.stage", "mcr_plus.hierarchy.stage"),
    *("mcr_plus.selection.stage", "mcr_plus.selection.online", "mcr_plus.layout"),
)
_NAMESPACES: Final = ("net", "uts")  # namespaces of simulated hosts, see benchmarks/hosts.py
_OUT_OF_THE_WAY: Final = 1000  # descriptor numbers that no rank is given


class Nursery:
    """The processes from which ranks are forked, until `close` or the end of their creator.

    With `folder`, uses processes that another process has created and will end.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder or tempfile.mkdtemp(prefix="mcr-warm-")
        self._servers: list[subprocess.Popen[bytes]] = []
        if folder is None:
            self._start()

    def _start(self) -> None:
        environ = self.environ
        Path(self.folder, "environment").write_bytes(marshal.dumps(read_by_imports(environ)))
        self._servers = [
            subprocess.Popen(
                [sys.executable, __file__, f"{self.folder}/{index}"],
                env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )
            for index in range(SERVERS)
        ]  # fmt: skip
        atexit.register(self.close)

    def command(self, words: list[str]) -> list[str]:
        """Return the words that start `python words…` from here."""
        return [sys.executable, "-I", "-S", warm_client.__file__, self.folder, *words]

    @property
    def environ(self) -> dict[str, str]:
        """Return this process's environment, with launchers' variables, for processes to fork."""
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    @property
    def python(self) -> str:
        """Return a program that runs a Python file from here; without teardown if it succeeds."""
        path = Path(self.folder, "python")
        if not path.exists():
            written = Path(self.folder, f"python.{os.getpid()}")
            written.write_text(f'#!/bin/sh\nexec {shlex.join(self.command([QUICK]))} "$@"\n')
            written.chmod(0o700)
            written.rename(path)  # other workers of pytest write it too
        return str(path)

    def close(self) -> None:
        """End the processes, and all ranks forked from them."""
        for server in self._servers:
            server.kill()
            server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


# -- processes that fork ranks
# ----------------------------------------------------------------------------------


def serve(path: str) -> list[str]:
    """Fork ranks forever; in each of them, return the words that it should run."""
    _die_with_parent()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    for name in _IMPORTS:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    _compile()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # a rank would copy half of the shared memory to run them
    gc.collect()
    gc.freeze()  # collections in ranks need not visit, and so copy, shared objects
    return _Server(listener).serve()


class _Server:
    """Forks a rank for every connection, and reports its pid and its end through the connection."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._ranks: dict[int, socket.socket] = {}

    def serve(self) -> list[str]:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    words = self._fork()
                    if words is not None:
                        return words
                elif isinstance(key.fileobj, int):
                    self._end(key.fileobj, key.data)
                elif key.data in self._ranks:  # a client sends nothing more: it is gone
                    self._selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)

    def _fork(self) -> list[str] | None:
        """Fork a rank; in the rank, return the words that it should run."""
        connection = self._listener.accept()[0]
        try:
            asked, files = _read(connection)
        except OSError:  # its client has died
            connection.close()
            return None
        rank = os.fork()
        if rank == 0:
            _die_with_parent()
            self._selector.close()
            for each in (self._listener, connection, *self._ranks.values()):
                each.detach()  # `_become` closes them all
            return _become(asked, files)
        for number in files:
            os.close(number)
        self._ranks[rank] = connection
        self._selector.register(os.pidfd_open(rank), selectors.EVENT_READ, rank)
        self._selector.register(connection, selectors.EVENT_READ, rank)
        _tell(connection, rank)
        return None

    def _end(self, pidfd: int, rank: int) -> None:
        connection = self._ranks.pop(rank)
        _tell(connection, os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        connection.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _compile() -> None:
    """Compile the machine code with which every job over shared memory, or with buckets, begins."""
    from mcr_plus.backends.shm import interpreter_kernels, p2p_kernels
    from mcr_plus.backends.shm.collectives import begin_and_advance
    from mcr_plus.kernels import pack

    begin_and_advance()
    for module in (interpreter_kernels, p2p_kernels, pack):
        module.prepare()


def _read(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, files, _, _ = socket.recv_fds(connection, LENGTH, 250)
    text, left = b"", int.from_bytes(head, sys.byteorder) if len(head) == LENGTH else 1
    while len(text) < left:
        part = connection.recv(left - len(text))
        if not part:
            raise OSError("gone")
        text += part
    return marshal.loads(text), files


def _tell(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(b"%d\n" % number)
    except OSError:
        pass


def _become(asked: dict[str, Any], files: list[int]) -> list[str]:
    """Take over the client's files, environment, folder, cores and network."""
    _enter(asked["pid"])
    os.sched_setaffinity(0, asked["cores"])
    kept = [fcntl.fcntl(number, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for number in files]
    os.closerange(3, _OUT_OF_THE_WAY)
    for number, at in zip(asked["files"], kept, strict=True):
        os.dup2(at, number)
        os.close(at)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    added = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[1:1] = [part for part in added if part not in sys.path]
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    words: list[str] = asked["words"]
    return words


def _enter(pid: int) -> None:
    """Move to the simulated host of process `pid`."""
    for name in _NAMESPACES:
        place = f"/proc/{pid}/ns/{name}"
        if os.readlink(place) != os.readlink(f"/proc/self/ns/{name}"):
            with open(place) as namespace:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace.fileno(), 0):  # os has it from Python 3.12 on
                    raise OSError(ctypes.get_errno(), place)


def run(words: list[str]) -> None:
    """Run `python [-m mpi4py] program…` or `python -m module…`; with QUICK first, without teardown."""
    if words[:1] == [QUICK]:
        try:
            run(words[1:])
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            end_without_teardown(ended.code if isinstance(ended.code, int) else ended.code is not None)
        end_without_teardown()
    elif words[:2] == ["-m", "mpi4py"]:
        from mpi4py.run import main

        sys.argv = words[1:]
        main()
    elif words[:1] == ["-m"]:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")


def end_without_teardown(code: int = 0) -> None:
    """End like the interpreter, but leave modules and objects to the operating system.

    If MPI still has to be ended after a failure, the interpreter ends it as usual.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi4py, mpi = sys.modules.get("mpi4py"), sys.modules.get("mpi4py.MPI")
    # Unless the library ends MPI, mpi4py ends it with the interpreter.
    ends_here = mpi4py is not None and mpi4py.rc.finalize is not False
    if ends_here and mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        if code:
            raise SystemExit(code)
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run(serve(sys.argv[1]))
