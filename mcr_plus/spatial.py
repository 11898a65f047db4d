"""Convolutions and pooling of tensors that are spread over ranks in space; see `mcr_plus.api.spatial`."""

from mcr_plus.api.spatial import (
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
    "AvgPool2d",
    "AvgPool3d",
    "Conv2d",
    "Conv3d",
    "MaxPool2d",
    "MaxPool3d",
    "global_mean",
    "local_part",
    "sum_gradients",
]
