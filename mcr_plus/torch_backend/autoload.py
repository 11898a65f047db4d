"""Registration of the backend `mcr` with torch.distributed, without importing its implementation.

`import torch` calls `register` through the entry point `torch.backends`, so that an unmodified program may
name the backend. TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables this; then `import mcr_plus` registers the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from mcr_plus.core.addresses import is_loopback
from mcr_plus.core.environment import masquerade_name, speaks_for_both, torch_environment
from mcr_plus.errors import ConfigError

_NAME: Final = "mcr"
_DEVICES: Final = ["cpu", "cuda"]

Rendezvous = tuple[Any, int, int]
"""Result of a rendezvous: the store shared by all ranks, this rank, and the number of ranks."""


def register() -> None:
    """Register the backend, once; does nothing if torch was built without distributed."""
    import torch.distributed as dist

    if not dist.is_available() or _NAME.upper() in dist.Backend._plugins:
        return
    # `torch.distributed.rendezvous` as an attribute is a function, not the module.
    rendezvous = import_module("torch.distributed.rendezvous")

    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=_DEVICES)
    # Torch's flight recorder cannot attach to a process group that is a Python class (torch 2.15).
    self_recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    self_recording.add(_NAME)
    rendezvous.register_rendezvous_handler(_NAME, _rendezvous)
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})  # torch refuses to register a scheme twice
    if speaks_for_both() and "env" in handlers:
        handlers["env"] = partial(_env_on_loopback, handlers["env"])
    if masquerade_name() is not None:
        from mcr_plus.torch_backend.process_group import masquerade

        masquerade()


def _rendezvous(
    url: str,  # noqa: ARG001 - torch's signature
    timeout: timedelta = timedelta(minutes=5),
    **_: object,
) -> Iterator[Rendezvous]:
    """Yield the rendezvous of `init_method="mcr://"`, under any launcher that `mcr.init` supports."""
    from mcr_plus.job.init import rendezvous

    yield rendezvous(timeout.total_seconds())


def _env_on_loopback(
    usual: Callable[..., Iterator[Rendezvous]],
    url: str,
    timeout: timedelta = timedelta(minutes=5),
    **others: Any,
) -> Iterator[Rendezvous]:
    """Yield the rendezvous of `env://`; MPI ranks of `mcr-plus run` get a store on loopback only.

    Torch's own store would listen on all interfaces.
    """
    from mcr_plus.rendezvous.store import open_torch_store

    place = torch_environment()
    if place is None or not is_loopback(place.master_addr or ""):
        yield from usual(url, timeout=timeout, **others)
        return
    query = {name: int(values[0]) for name, values in parse_qs(urlsplit(url).query).items()}
    rank, size = query.get("rank", place.rank), query.get("world_size", place.world_size)
    place = replace(place, rank=rank, world_size=size)
    yield open_torch_store(place, timeout), rank, size


def _create(options: Any, pg_options: object = None) -> Any:
    from mcr_plus.torch_backend.process_group import create

    try:
        return create(options, pg_options)
    except ConfigError as error:  # the text names file and line; frames of this package do not help
        raise error.with_traceback(None) from None
