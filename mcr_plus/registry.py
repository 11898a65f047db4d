"""Registry of exchangeable parts by name: one dict per kind, plus entry points of other packages.

Another package adds to a kind through the entry point group of that kind:

    [project.entry-points."mcr_plus.codecs"]
    sketch = "my_package.sketch:Sketch"

Built-in objects are named as `module:attr` and imported on first use, so that looking up one backend never
imports the library of another.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from mcr_plus.errors import Unsupported, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
STAGES: dict[str, object] = {
    "fuse": "mcr_plus.fusion.stage:FuseStage",
    "hierarchical": "mcr_plus.hierarchy.stage:HierarchicalStage",
    "compress": "mcr_plus.compression.on_use:CompressOnUse",
    "select": "mcr_plus.selection.stage:SelectStage",
    "dispatch": "mcr_plus.pipeline.dispatch:DispatchStage",
}
STAGE_ORDER: tuple[str, ...] = tuple(STAGES)
"""Order of built-in stages in a pipeline; other stages may be anywhere before `dispatch`."""
DEFAULT_STAGES: tuple[str, ...] = ("hierarchical", "compress", "select", "dispatch")
"""Stages of the default pipeline. `fuse` requires all ranks to wait at the same places of the program."""
CODECS: dict[str, object] = {
    "bf16": "mcr_plus.compression.cast:Bf16",
    "fp16": "mcr_plus.compression.cast:Fp16",
    "fp8_block": "mcr_plus.compression.fp8_block:Fp8Block",
    "int4_block": "mcr_plus.compression.int4_block:Int4Block",
    "int2_block": "mcr_plus.compression.int2_block:Int2Block",
    "delta": "mcr_plus.compression.delta:Delta",
    "exp_window": "mcr_plus.compression.exp_window:ExpWindow",
    "randk": "mcr_plus.compression.randk:RandK",
    "topk": "mcr_plus.compression.topk:TopK",
    "int8_block": "mcr_plus.compression.int8_block:Int8Block",
    "int_shared": "mcr_plus.compression.int_shared:IntShared",
    "powersgd": "mcr_plus.compression.powersgd:PowerSGD",
    "sign1": "mcr_plus.compression.sign1:Sign1",
}
BACKENDS: dict[str, object] = {
    "nccl": "mcr_plus.backends.nccl:NcclBackend",
    "msccl": "mcr_plus.backends.msccl:backend",
    "mpi": "mcr_plus.backends.mpi.backend:MpiBackend",
    "gloo": "mcr_plus.backends.gloo.backend:GlooBackend",
    "local": "mcr_plus.backends.local:LocalBackend",
}
BACKEND_ORDER: tuple[str, ...] = tuple(BACKENDS)
"""Default order of built-in backends, if a configuration names none; other backends follow."""
OTHER_NAMES: dict[str, dict[str, str]] = {"backends": {"shm": "msccl"}}
"""Aliases that users may write → the names stored and shown."""
HOOKS: dict[str, object] = {
    "bucketing": "mcr_plus.bucketing.hook:BucketingHook",
    "digests": "mcr_plus.reproducible.hook:DigestHook",
    "observe": "mcr_plus.observe.hook:ObserveHook",
    "training": "mcr_plus.training.hook:TrainingHook",
}
"""Hooks of capabilities that take part in each job, see `mcr_plus.job.hooks.JobHook`."""
WRAPPERS: dict[str, object] = {
    "failover": "mcr_plus.reliability.failover.opening:open_failover",
    "verify": "mcr_plus.reliability.verify.opening:open_verification",
}
"""Functions that wrap library channels in groups with their option, see `mcr_plus.engine.channel_wrapper`."""
SINKS: dict[str, object] = {
    "prometheus": "mcr_plus.observe.prometheus:PROMETHEUS",
    "otlp": "mcr_plus.observe.otlp:OTLP",
}
"""Options under `observe:` that open a sink for metrics, see `mcr_plus.observe.sinks.SinkOption`."""
TABLE_FORMATS: dict[str, object] = {
    "nccl-csv": "mcr_plus.tables.interchange.nccl:FORMAT",
    "openmpi": "mcr_plus.tables.interchange.openmpi:FORMAT",
    "ucc": "mcr_plus.tables.interchange.ucc:FORMAT",
    "oneccl": "mcr_plus.tables.interchange.oneccl:FORMAT",
}
"""Other libraries' formats of tables, see `mcr_plus.tables.interchange.exchange.TableFormat`."""
REPRODUCIBLE: dict[str, str] = {
    "sums over this library": "mcr_plus.reproducible.steps:ordered_sum",
    "accumulate='exact'": "mcr_plus.reproducible.accumulators:ExactPasses",
}
"""Classes by what needs them: those that need them may not import them."""
OBSERVE: str = "mcr_plus.observe.options:observe_options"
"""Function that returns the options under `observe:`, by name, because `config` may not import `observe`."""
REGISTRIES: dict[str, dict[str, object]] = {
    "stages": STAGES, "codecs": CODECS, "backends": BACKENDS, "hooks": HOOKS, "wrappers": WRAPPERS,
    "sinks": SINKS, "table_formats": TABLE_FORMATS,
}  # fmt: skip

_found: dict[str, dict[str, EntryPoint]] = {}  # by kind; see refresh()


def names(kind: str) -> tuple[str, ...]:
    """Return all known names of a kind, such as "codecs", sorted, without importing their objects."""
    return tuple(sorted({*_registry(kind), *_entry_points(kind)}))


def stored_name(kind: str, name: str) -> str:
    """Return the name stored and shown for `name`: `msccl` for the backend `shm`."""
    return OTHER_NAMES.get(kind, {}).get(name, name)


def get(kind: str, name: str) -> object:
    """Return the object registered under `name`, imported on first use.

    Raises `Unsupported` with the known names for an unknown name, or with the module that cannot be imported.
    """
    registry, name = _registry(kind), stored_name(kind, name)
    if name in registry:
        entry = registry[name]
        return _import(kind, name, entry) if isinstance(entry, str) else entry
    points = _entry_points(kind)
    if name not in points:
        raise Unsupported(unknown(label(kind), name, names(kind)))
    return _load(points[name])


def checked(kind: str, name: str, expected: type[T]) -> T:
    """Return the result of `get`; raise `Unsupported` also if it is not an object of the expected class."""
    found = get(kind, name)
    if not isinstance(found, expected):
        raise Unsupported(f"{label(kind)} {name!r} is {found!r}; expected a {expected.__name__}")
    return found


def installed(kind: str) -> list[object]:
    """Return all objects of a kind, imported; capabilities that are not installed are left out."""
    return [get(kind, name) for name in names(kind) if is_installed(kind, name)]


def observe_options() -> Any:
    """Return the pydantic model of the options under `observe:`; None if `observe/` is not installed."""
    model: Any = _import("observer", "observe", OBSERVE) if _is_here(OBSERVE) else None
    return model and model()


def reproducible(what: str) -> Any:
    """Return the class of `REPRODUCIBLE`; raise `Unsupported` if the folder is not installed."""
    if not _is_here(REPRODUCIBLE[what]):
        raise Unsupported(f"{what}: needs the folder `reproducible`, which is not installed")
    return _import("reduction", what, REPRODUCIBLE[what])


def is_installed(kind: str, name: str) -> bool:
    """Return False for a built-in object of a capability that is not installed."""
    return _is_here(_registry(kind).get(name))


def _is_here(reference: object) -> bool:
    """Return False for the `module:attr` text of a folder that does not exist."""
    if not isinstance(reference, str):
        return True
    return importlib.util.find_spec(".".join(reference.split(".")[:2])) is not None


def register(kind: str, name: str, obj: object) -> None:
    """Add `obj` to a kind under `name`; `obj` may be a `module:attr` text, imported on first use.

    Registering the same object again does nothing. Raises `Unsupported` if another object has the name.
    """
    registry = _registry(kind)
    taken = registry.get(stored_name(kind, name), _entry_points(kind).get(name))
    if taken is None:
        registry[name] = obj
    elif not (isinstance(taken, str) and taken == obj) and get(kind, name) is not obj:
        raise Unsupported(
            f"the {label(kind)} name {name!r} is taken by {taken!r}; choose another for {obj!r}"
        )


def refresh() -> None:
    """Forget the entry points, so that the next look-up reads them again from the installed packages."""
    _found.clear()
    _installed.cache_clear()


def _registry(kind: str) -> dict[str, object]:
    if kind not in REGISTRIES:
        raise Unsupported(unknown("registry", kind, tuple(REGISTRIES)))
    return REGISTRIES[kind]


@cache
def _installed() -> Any:
    """Return the entry points of all groups; reads the metadata of all installed packages."""
    from importlib.metadata import entry_points  # imported here: commands that need none start sooner

    return entry_points()


def _entry_points(kind: str) -> dict[str, EntryPoint]:
    if kind not in _found:
        _found[kind] = _by_name(kind, _installed().select(group=f"mcr_plus.{kind}"))
    return _found[kind]


def _by_name(kind: str, points: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
    """Index entry points by name. Raises `Unsupported` if two different objects have the same name."""
    by_name: dict[str, EntryPoint] = {}
    for point in points:
        first = by_name.setdefault(point.name, point)
        if first.value != point.value:
            raise Unsupported(f"{_describe(point)} and {_describe(first)} have the same name; uninstall one")
        taken = REGISTRIES[kind].get(stored_name(kind, point.name))
        if taken is not None:
            raise Unsupported(f"{_describe(point)} has a name that {taken!r} has taken; uninstall it")
    return by_name


def _load(point: EntryPoint) -> object:
    try:
        loaded: object = point.load()
    except Exception as error:
        # No chained traceback: its frames are of importlib, not of the package at fault.
        raise Unsupported(f"{_describe(point)} cannot be loaded: {type(error).__name__}: {error}") from None
    return loaded


def _import(kind: str, name: str, reference: str) -> object:
    module, _, attribute = reference.partition(":")
    try:
        loaded: object = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        what = f"{label(kind)} {name!r} ({reference}) cannot be loaded"
        raise Unsupported(f"{what}: {type(error).__name__}: {error}") from error
    return loaded


def label(kind: str) -> str:
    """Return a kind's name in messages: `table format` for `table_formats`."""
    return kind.removesuffix("s").replace("_", " ")


def _describe(point: EntryPoint) -> str:
    package = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
    return f"entry point '{point.name} = {point.value}' in group {point.group}{package}"
