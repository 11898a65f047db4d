"""How our CPU kernels are compiled and spread over threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

import numba
import torch
from numba.core import event
from numba.core.ccallback import CFunc
from numba.core.runtime.nrt import rtsys
from numba.core.sigutils import normalize_signature
from numba.core.types import unliteral

from mcr_plus.kernels import sources
from mcr_plus.kernels.compiling import compiling

_numba: Any = numba  # annotated in part, which type checkers take for a mistake of ours
_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_GRAIN: Final = 256 << 10
"""Bytes of input for which another thread is worth waking."""


class _Watch(event.Listener):
    """Sees every compilation of a kernel of ours, also of one that nothing has prepared."""

    def __init__(self) -> None:
        self._open: list[ExitStack] = []  # numba compiles one function at a time, those it calls inside it

    def on_start(self, event: Any) -> None:
        """A function is about to be compiled."""
        here = ExitStack()
        self._open.append(here)  # at once: numba calls `on_end` even where this raises
        module: str = event.data["dispatcher"].py_func.__module__ or ""  # None of what `exec` has made
        if module.startswith("mcr_plus."):
            here.enter_context(compiling(module.rpartition(".")[2]))

    def on_end(self, event: Any) -> None:  # noqa: ARG002
        """It has been compiled, or could not be."""
        self._open.pop().close()


event.register("numba:compile", _Watch())


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a kernel that runs without the GIL; kept on disk where there is a place for it.

    It is compiled again when the function has changed, or anything in the modules of `sources.modules`.

    Without `fastmath`, which would drop the checks for NaN and the rounding by magic numbers.
    """
    try:
        kernel = _numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        return _without_literals(_numba.njit(**_OPTIONS)(function))
    _adapt(kernel._cache, function)
    return _without_literals(kernel)


def linked(function: Callable[..., Any]) -> Any:
    """Compile a part of kernels once for all of them; only kernels can call it."""
    return _without_literals(_numba.njit(no_cpython_wrapper=True, **_OPTIONS)(function))


def embedded(function: Callable[..., Any]) -> Any:
    """The same, and LLVM puts the code in place of each call: for functions of numbers.

    numba's own inlining, see `inlined`, types and lowers a function again for every call.
    """
    return _numba.njit(no_cpython_wrapper=True, forceinline=True, **_OPTIONS)(function)


def _without_literals(kernel: Any) -> Any:
    """Compile calls from other kernels for the types of constants, not once more for their values."""
    template = kernel.get_call_template

    def template_of(args: Any, kws: Any) -> Any:
        return template(tuple(map(unliteral, args)), {name: unliteral(each) for name, each in kws.items()})

    kernel.get_call_template = template_of
    return kernel


def c_function(signature: Any, function: Callable[..., Any]) -> Any:
    """Compile a C function, kept on disk in the same way; its `address` is what other code calls."""
    try:
        made: Any = CFunc(
            function, normalize_signature(signature), locals={}, options={"error_model": "numpy"}
        )
        made.enable_caching()
        _adapt(made._cache, function)
        made.compile()
    except (RuntimeError, TypeError):  # no place to keep it
        return _numba.cfunc(signature)(function)
    return made


def _adapt(cache: Any, function: Callable[..., Any]) -> None:
    """Change how numba's cache of a function on disk is named, compared with the sources, and loaded."""
    # Here, and not at the first use: the files may have changed by then, unlike the modules in memory.
    file = cache._cache_file
    file._source_stamp = (file._source_stamp, sources.stamp(function.__module__))
    _name_by_key(file)
    _load_without_typing(cache)


def _name_by_key(file: Any) -> None:
    """Name files by what they contain.

    numba counts, and keeps the numbers in an index that it writes before a file. A process that reads the
    index between the two loads what had the number before: the code of another function of the same text, or
    of older sources. So do processes after two that compile such functions at once.
    """

    def path_of(key: object) -> str:
        return file._data_name(int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big"))  # type: ignore[no-any-return]

    def save(key: object, data: object) -> None:
        file._save_data(path_of(key), (file._source_stamp, data))

    def load(key: object) -> object:
        try:
            stamp, data = file._load_data(path_of(key))
        except OSError:
            return None
        return data if stamp == file._source_stamp else None

    file.save, file.load, file.flush = save, load, lambda: None


def _load_without_typing(cache: Any) -> None:
    """Load from this cache without numba's rules of typing, which take 0.25 s to import.

    Numba imports them before it looks into a cache, although only compiling needs them and imports them, too.
    Machine code from a cache needs nothing but the symbols of numba's runtime.
    """
    load = getattr(cache, "_load_overload", None)
    if load is None:  # a numba that looks into its caches in another way
        return

    def load_overload(signature: Any, context: Any) -> Any:
        rtsys.initialize(context)
        return load(signature, context)

    cache.load_overload = load_overload


inlined: Final[Any] = _numba.njit(inline="always", nogil=True, error_model="numpy")
"""For parts of a kernel that are compiled into it."""


@inlined
def put(source, target):  # type: ignore[no-untyped-def]
    """Copy one flat array to the beginning of another. `target[:] = source` takes seconds to compile."""
    for i in range(source.size):
        target[i] = source[i]


def spread(kernel: Callable[..., Any], blocks: int, nbytes: int, *args: object) -> list[Any]:
    """Call `kernel(*args, lo, hi)` for parts of `range(blocks)`, on as many threads as torch would use.

    Returns what each part returned, in the order of the parts.

    `nbytes`: of the input, so that small ones stay on the calling thread. Not numba's own threads: those of
    its default layer may not be entered from two threads at once.
    """
    threads = min(torch.get_num_threads(), blocks, nbytes // _GRAIN)
    if threads <= 1:
        return [kernel(*args, 0, blocks)]
    bounds = [blocks * index // threads for index in range(threads + 1)]
    pool = _pool(threads - 1)
    parts: list[Future[Any]] = [pool.submit(kernel, *args, lo, hi) for lo, hi in pairwise(bounds[1:])]
    first = kernel(*args, bounds[0], bounds[1])
    return [first, *(part.result() for part in parts)]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="mcr_plus-codec")
