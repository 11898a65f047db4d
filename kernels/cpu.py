"""Compile CPU kernels, and run them on several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

import numba
import torch
from llvmlite import binding
from numba.core import event
from numba.core.ccallback import CFunc
from numba.core.runtime.nrt import rtsys
from numba.core.sigutils import normalize_signature
from numba.core.types import CPointer, unliteral

from mcr_plus.kernels import sources
from mcr_plus.kernels.compiling import compiling

_numba: Any = numba  # numba's partial annotations make type checkers report errors here
_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_GRAIN: Final = 256 << 10
"""Bytes of input for which another thread is worth waking."""


class _Watch(event.Listener):
    """Observes every compilation of our kernels, including kernels that were not prepared."""

    def __init__(self) -> None:
        self._open: list[ExitStack] = []  # numba compiles one function at a time, and callees inside it

    def on_start(self, event: Any) -> None:
        """Begin to watch the compilation of a function."""
        here = ExitStack()
        self._open.append(here)  # first, because numba calls `on_end` even if this function raises
        module: str = event.data["dispatcher"].py_func.__module__ or ""  # None for functions made by `exec`
        if module.startswith("mcr_plus."):
            here.enter_context(compiling(module.rpartition(".")[2]))

    def on_end(self, event: Any) -> None:  # noqa: ARG002
        """End watching: the function has been compiled, or compilation has failed."""
        self._open.pop().close()


event.register("numba:compile", _Watch())


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a kernel that runs without the GIL, cached on disk if a folder is writable.

    The kernel is compiled again if the function, or anything in the modules of `sources.modules`, has
    changed. `fastmath` is off, because it would remove checks for NaN and rounding by magic numbers.
    """
    try:
        kernel = _numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        return _without_literals(_numba.njit(**_OPTIONS)(function))
    _adapt(kernel._cache, function)
    return _without_literals(kernel)


def linked(function: Callable[..., Any]) -> Any:
    """Compile a function called by kernels, once for all of them; only kernels can call it."""
    return _without_literals(_numba.njit(no_cpython_wrapper=True, **_OPTIONS)(function))


def embedded(function: Callable[..., Any]) -> Any:
    """Compile a function called by kernels that LLVM inlines: for functions of numbers.

    numba's own inlining (see `inlined`) types and lowers a function again for every call.
    """
    return _numba.njit(no_cpython_wrapper=True, forceinline=True, **_OPTIONS)(function)


def _without_literals(kernel: Any) -> Any:
    """Compile calls from other kernels by the types of constants, not again for each value."""
    template = kernel.get_call_template

    def template_of(args: Any, kws: Any) -> Any:
        return template(tuple(map(unliteral, args)), {name: unliteral(each) for name, each in kws.items()})

    kernel.get_call_template = template_of
    return kernel


def c_function(signature: Any, function: Callable[..., Any]) -> Any:
    """Compile a C function, cached on disk like a kernel; other code calls its `address`."""
    try:
        made: Any = CFunc(
            function, normalize_signature(signature), locals={}, options={"error_model": "numpy"}
        )
        made.enable_caching()
        _adapt(made._cache, function)
        made.compile()
    except (RuntimeError, TypeError):  # no writable folder for the cache
        return _numba.cfunc(signature)(function)
    return made


def object_code(signature: Any, function: Callable[..., Any]) -> bytes:
    """Compile a C function of integers and addresses to position-independent code that needs no numba.

    It defines `run`, the function, and `call`, the same for CPython (METH_FASTCALL), see `images.Image`. The
    function may not raise.
    """
    if binding.llvm_version_info[0] < 15:
        raise RuntimeError("LLVM before version 15 does not read pointers without a type")
    kernel = linked(function)
    kernel.compile(signature)
    (overload,) = kernel.overloads.values()
    module = binding.parse_assembly(overload.library.get_llvm_str())
    module.link_in(binding.parse_assembly(_wrapped(overload.fndesc.mangled_name, signature.args)))
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name not in ("run", "call"):
            each.linkage = "internal"  # other images define the same names
    target = binding.Target.from_triple(binding.get_process_triple())
    codegen = overload.library.codegen
    machine = target.create_target_machine(
        cpu=codegen._get_host_cpu_name(), features=codegen._get_host_cpu_features(), opt=3, reloc="pic"
    )
    return machine.emit_object(module)  # type: ignore[no-any-return]


def _wrapped(name: str, types: Sequence[Any]) -> str:
    """Return LLVM assembly of `run` and `call` for a function of numba with these arguments."""
    addresses = [isinstance(each, CPointer) for each in types]
    words = ", ".join(f"i64 %w{index}" for index in range(len(types)))
    declared = ", ".join("ptr" if each else "i64" for each in addresses)
    passed = ", ".join(f"ptr %p{at}" if each else f"i64 %w{at}" for at, each in enumerate(addresses))
    pointers = [f"%p{at} = inttoptr i64 %w{at} to ptr" for at, each in enumerate(addresses) if each]
    taken = []
    for at, address in enumerate(addresses):
        taken += [f"%s{at} = getelementptr ptr, ptr %arguments, i64 {at}", f"%o{at} = load ptr, ptr %s{at}"]
        if address:  # numpy's array begins with the address of its data
            taken.append(f"%d{at} = getelementptr i8, ptr %o{at}, i64 {object.__basicsize__}")
            taken.append(f"%w{at} = load i64, ptr %d{at}")
        else:
            taken.append(f"%w{at} = call i64 @PyLong_AsLongLong(ptr %o{at})")
    return "\n".join(
        (
            f'declare i32 @"{name}"(ptr, ptr, {declared})',
            "declare i64 @PyLong_AsLongLong(ptr)",
            "declare ptr @PyLong_FromLongLong(i64)",
            "declare ptr @PyEval_SaveThread()",
            "declare void @PyEval_RestoreThread(ptr)",
            "define void @NRT_MemInfo_call_dtor(ptr %0) {",  # arrays of addresses own no memory
            "ret void",
            "}",
            f"define i64 @run({words}) {{",
            "%result = alloca i64",
            "%error = alloca ptr",
            *pointers,
            f'%status = call i32 @"{name}"(ptr %result, ptr %error, {passed})',
            "%value = load i64, ptr %result",
            "ret i64 %value",
            "}",
            "define ptr @call(ptr %self, ptr %arguments, i64 %count) {",
            *taken,
            "%thread = call ptr @PyEval_SaveThread()",
            f"%value = call i64 @run({words})",
            "call void @PyEval_RestoreThread(ptr %thread)",
            "%made = call ptr @PyLong_FromLongLong(i64 %value)",
            "ret ptr %made",
            "}",
        )
    )


def _adapt(cache: Any, function: Callable[..., Any]) -> None:
    """Change how numba's disk cache of a function is named, compared with sources, and loaded."""
    # Now, not at the first use: until then, files may change while modules in memory do not.
    file = cache._cache_file
    file._source_stamp = (file._source_stamp, sources.stamp(function.__module__))
    _name_by_key(file)
    _load_without_typing(cache)


def _name_by_key(file: Any) -> None:
    """Name cache files by their content.

    numba numbers files, and writes the numbers to an index before it writes a file. A process that reads the
    index in between loads the file that had the number before: code of another function with the same text,
    or of older sources. The same can happen after two processes have compiled such functions at once.
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
    """Load from this cache without numba's typing rules, which take 0.25 s to import.

    numba imports the rules before it looks into a cache, although only compilation needs them, and imports
    them itself. Cached machine code needs only the symbols of numba's runtime.
    """
    load = getattr(cache, "_load_overload", None)
    if load is None:  # a version of numba with a different cache
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

    Returns the results in the order of the parts. `nbytes`: bytes of the input; small inputs stay on the
    calling thread. numba's own threads are not used, because two threads must not enter its default threading
    layer at once.
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
