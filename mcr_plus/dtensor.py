"""DTensor's redistributions by plans of mcr_plus; see `mcr_plus.layout.planned`."""

from mcr_plus.layout.planned import Volume, dtensor_volume, planned

__all__ = ["Volume", "dtensor_volume", "planned"]
