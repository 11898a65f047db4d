"""A 3-D convolutional network whose volumes are spread over the ranks, and the same one in one process.

CosmoFlow's shape (Mathuriya et al. 2018, arXiv 1808.04728), scaled down: convolutions of 3³, each followed by
a leaky ReLU and a pooling that halves the volume, with twice the channels of the one before; then a mean over
space and two dense layers. Spreading it over space is due to Oyama et al. (2020, arXiv 2007.12856). The box
is periodic, so convolutions wrap around, and ranks at the ends exchange halos with each other.
"""

from __future__ import annotations

import numpy as np
import torch
from libraries import JobError
from torch import nn

import mcr_plus as mcr
from mcr_plus import spatial

SLOPE = 0.01  # of leaky ReLUs


class Network(nn.Module):
    """`layout`: of the input's three spatial dimensions; None: the whole volume is here."""

    def __init__(self, channels: int, levels: int, layout: mcr.Layout | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        inputs = 1
        for _ in range(levels):
            if layout is None:
                convolution: nn.Module = nn.Conv3d(inputs, channels, 3, padding=1, padding_mode="circular")
                pool: nn.Module = nn.MaxPool3d(2)
            else:
                convolution = spatial.Conv3d(
                    inputs, channels, 3, padding=1, padding_mode="circular", layout=layout, tag="halo"
                )
                pool = spatial.MaxPool3d(2, layout=convolution.out_layout)
                layout = pool.out_layout
            self.blocks.append(nn.Sequential(convolution, nn.LeakyReLU(SLOPE), pool))
            inputs, channels = channels, 2 * channels
        self.out_layout = layout
        self.head = nn.Sequential(nn.Linear(inputs, inputs), nn.LeakyReLU(SLOPE), nn.Linear(inputs, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [N, 1, D, H, W], this rank's part of it; returns [N, 1], the same on all ranks."""
        for block in self.blocks:
            x = block(x)
        layout = self.out_layout
        mean = x.mean((2, 3, 4)) if layout is None else spatial.global_mean(x, layout, tag="mean")
        output: torch.Tensor = self.head(mean)
        return output


def spread(size: int, mesh: tuple[int, int, int], unit: int) -> mcr.Layout:
    """A volume of size³ over a mesh of ranks, in slabs of near equal size, each a multiple of `unit`."""
    if size % unit or max(mesh) * unit > size:
        raise JobError(f"a volume of {size}³ has no {max(mesh)} slabs of sizes that are multiples of {unit}")
    cuts = [[unit * (size // unit * part // parts) for part in range(parts + 1)] for parts in mesh]
    boxes = {
        rank: [[(cuts[dim][at], cuts[dim][at + 1]) for dim, at in enumerate(place)]]
        for rank, place in enumerate(np.ndindex(mesh))
    }
    return mcr.Layout.boxes((size, size, size), boxes)
