"""Gaussian random fields in a periodic box, as simulations of the universe begin with one.

The power of a wave of wave number k is k^-n: the larger the index n, the smoother the field. Fields have mean
0 and variance 1, so that their amplitude says nothing of it.
"""

from __future__ import annotations

import numpy as np
import torch

LOWEST, HIGHEST = 1.0, 3.0  # spectral index
SPREAD = (HIGHEST - LOWEST) / 12**0.5  # its standard deviation: the error of always predicting the mean


class Fields:
    """Fields of `size`³ points by number, the same on all ranks: a wave is everywhere in the box."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        along = np.fft.fftfreq(size) * size
        half = np.fft.rfftfreq(size) * size
        self.waves = np.sqrt(along[:, None, None] ** 2 + along[None, :, None] ** 2 + half**2)
        self.waves[0, 0, 0] = 1  # the mean, which is subtracted

    def draw(self, stream: int, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fields, [number, 1, size, size, size], and of each (n - mean) / spread, [number, 1]; float32."""
        random = np.random.default_rng([self.seed, stream, step])
        index = random.uniform(LOWEST, HIGHEST, number)
        fields = np.empty((number, 1, *[self.size] * 3), np.float32)
        for field, slope in zip(fields, index, strict=True):
            noise = np.fft.rfftn(random.standard_normal([self.size] * 3))
            values = np.fft.irfftn(noise * self.waves ** (-slope / 2), s=[self.size] * 3, axes=(0, 1, 2))
            values -= values.mean()
            field[0] = values / values.std()
        targets = (index - (LOWEST + HIGHEST) / 2) / SPREAD
        return torch.from_numpy(fields), torch.from_numpy(targets.astype(np.float32))[:, None]
