"""Makes the backend `mcr` known to torch.distributed, without loading what it needs.

`import torch` runs `register` through the entry point `torch.backends`, so that an unmodified program may
name the backend; TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns that off, and then `import mcr_plus` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from mcr_plus.environment import LOOPBACK, masquerade_name, speaks_for_both, torch_environment

_NAME: Final = "mcr"
_DEVICES: Final = ["cpu", "cuda"]

Meeting = tuple[Any, int, int]
"""A store that reaches all ranks, this rank, and how many there are."""


def register() -> None:
    """Register the backend, once; in a torch without distributed there is nothing to do."""
    import torch.distributed as dist

    if not dist.is_available() or _NAME.upper() in dist.Backend._plugins:
        return
    rendezvous = import_module("torch.distributed.rendezvous")  # where torch.distributed has a function

    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=_DEVICES)
    rendezvous.register_rendezvous_handler(_NAME, _meet)
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})  # torch lets nobody register a second one
    if speaks_for_both() and "env" in handlers:
        handlers["env"] = partial(_meet_on_loopback, handlers["env"])
    if masquerade_name() is not None:
        from mcr_plus.torch_backend import masquerade

        masquerade()


def _meet(
    url: str,  # noqa: ARG001 - torch's signature
    timeout: timedelta = timedelta(minutes=5),
    **_: object,
) -> Iterator[Meeting]:
    """`init_method="mcr://"`: the ranks of any launcher that `mcr.init` knows, MPI's and Slurm's too."""
    from mcr_plus.runtime import meeting_place

    yield meeting_place(timeout.total_seconds())


def _meet_on_loopback(
    usual: Callable[..., Iterator[Meeting]],
    url: str,
    timeout: timedelta = timedelta(minutes=5),
    **others: Any,
) -> Iterator[Meeting]:
    """`env://` where `mcr-plus run` has given MPI's ranks an address, around a store on loopback only.

    Torch's own listens on all interfaces.
    """
    from mcr_plus.launch.rendezvous import open_torch_store

    place = torch_environment()
    if place is None or place.master_addr not in ("localhost", LOOPBACK):
        yield from usual(url, timeout=timeout, **others)
        return
    asked = {name: int(values[0]) for name, values in parse_qs(urlsplit(url).query).items()}
    rank, size = asked.get("rank", place.rank), asked.get("world_size", place.world_size)
    place = replace(place, rank=rank, world_size=size)
    yield open_torch_store(place, timeout), rank, size


def _create(options: Any, pg_options: object = None) -> Any:
    from mcr_plus.torch_backend import create

    return create(options, pg_options)
