"""Makes the backend `mcr` known to torch.distributed, without loading what it needs.

`import torch` runs `register` through the entry point `torch.backends`, so that an unmodified program may
name the backend; TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns that off, and then `import mcr_plus` does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from mcr_plus.environment import masquerade_name

_NAME: Final = "mcr"
_DEVICES: Final = ["cpu", "cuda"]


def register() -> None:
    """Register the backend, once; in a torch without distributed there is nothing to do."""
    import torch.distributed as dist

    if not dist.is_available() or _NAME.upper() in dist.Backend._plugins:
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=_DEVICES)
    register_rendezvous_handler(_NAME, _meet)
    if masquerade_name() is not None:
        from mcr_plus.torch_backend import masquerade

        masquerade()


def _meet(
    url: str,  # noqa: ARG001 - torch's signature
    timeout: timedelta = timedelta(minutes=5),
    **_: object,
) -> Iterator[tuple[Any, int, int]]:
    """`init_method="mcr://"`: the ranks of any launcher that `mcr.init` knows, MPI's and Slurm's too."""
    from mcr_plus.runtime import meeting_place

    yield meeting_place(timeout.total_seconds())


def _create(options: Any, pg_options: object = None) -> Any:
    from mcr_plus.torch_backend import create

    return create(options, pg_options)
