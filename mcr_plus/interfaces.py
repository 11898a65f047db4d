"""Former module of `mcr_plus.backends.base` and `mcr_plus.pipeline.stage`, kept for importing packages."""

import warnings
from importlib import import_module

_HOMES = ("mcr_plus.backends.base", "mcr_plus.pipeline.stage", "mcr_plus.rendezvous.world")


def __getattr__(name: str) -> object:
    for home in _HOMES:
        module = import_module(home)
        if not name.startswith("_") and hasattr(module, name):
            warnings.warn(
                f"mcr_plus.interfaces.{name} is now {home}.{name}", DeprecationWarning, stacklevel=2
            )
            return getattr(module, name)
    raise AttributeError(f"module 'mcr_plus.interfaces' has no attribute '{name}'")
