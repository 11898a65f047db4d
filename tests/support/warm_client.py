"""Client that has a rank forked from a process with torch imported (`warm.py`), and ends as the rank does.

    python -I -S warm_client.py FOLDER WORDS…

A launcher starts this instead of `python WORDS…`. The rank has this process's environment, folder and open
files; signals are passed on; if this process is killed, so is the rank. A rank that needs another environment
during its imports is started the ordinary way. Standard library only, to cost milliseconds.
"""

from __future__ import annotations

# Few imports, because every rank of every test pays for them: no typing, json, re or pathlib, and only the C
# parts of socket and signal, which need no enum.
import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import os
import sys

SERVERS = 2
QUICK = "--quick"  # the first word of programs that end without teardown
LENGTH = 4  # bytes of the length before a request
_READ_BY_IMPORTS = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMBA_", "TRITON_", "TORCH_", "CUDA_"),
    *("LD_PRELOAD", "PYTHON", "MCR_MASQUERADE"),
)
_BUT = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCH_NCCL_")  # torchrun sets one, for groups of NCCL
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_FORWARDED = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2)


def read_by_imports(environ: dict[str, str]) -> dict[str, str]:
    """Return the part of an environment that cannot change any more once torch is imported."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_BY_IMPORTS) and not name.startswith(_BUT)
    }


def join(folder: str, words: list[str]) -> int:
    """Have a rank forked, and end like it."""
    rank = next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)
    with open(f"{folder}/environment", "rb") as file:
        same = read_by_imports(dict(os.environ)) == marshal.load(file)
    connection = _connected(f"{folder}/{rank % SERVERS}") if same else None
    if connection is None:
        os.execv(sys.executable, [sys.executable, *words[words[:1] == [QUICK] :]])
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = sorted(number for number in files if number != connection.fileno() and _is_open(number))
    asked = {
        "words": words,
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
        "cores": list(os.sched_getaffinity(0)),
        "pid": os.getpid(),
    }
    text = marshal.dumps(asked)
    numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)]
    connection.sendmsg([len(text).to_bytes(LENGTH, sys.byteorder)], rights)
    connection.sendall(text)
    child = int(_line(connection))
    for number in _FORWARDED:
        _signal.signal(number, lambda number, _: os.kill(child, number))
    code = int(_line(connection) or -_signal.SIGKILL)
    if code >= 0:
        return code
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code != _signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


def _line(connection: _socket.socket) -> bytes:
    """Return the other end's text up to the next end of a line; empty once it is gone."""
    said = b""
    while not said.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            return b""
        said += part
    return said


def _connected(path: str) -> _socket.socket | None:
    connection = _socket.socket(_socket.AF_UNIX)
    connection.settimeout(60)  # a process that imports does not accept yet
    try:
        connection.connect(path)
    except OSError:
        return None
    connection.settimeout(None)
    return connection


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(join(sys.argv[1], sys.argv[2:]))
