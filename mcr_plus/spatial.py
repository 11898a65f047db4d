"""Convolution and pooling of tensors split over ranks along spatial dims; see `parallel.spatial`."""

from typing import NoReturn

from mcr_plus.core.foreign_module_names import no_attribute
from mcr_plus.parallel.spatial import (
    AvgPool2d,
    AvgPool3d,
    Conv2d,
    Conv3d,
    MaxPool2d,
    MaxPool3d,
    global_mean,
    local_part,
    sum_gradients,
)

__all__ = [
    "AvgPool2d", "AvgPool3d", "Conv2d", "Conv3d", "MaxPool2d", "MaxPool3d", "global_mean", "local_part",
    "sum_gradients",
]  # fmt: skip


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, __all__)
