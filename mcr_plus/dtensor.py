"""Redistribution of DTensors by plans of mcr_plus; see `mcr_plus.layout.planned`."""

from typing import NoReturn

from mcr_plus.core.foreign_module_names import no_attribute
from mcr_plus.layout.planned import Volume, dtensor_volume, planned

__all__ = ["Volume", "dtensor_volume", "planned"]


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, __all__)
