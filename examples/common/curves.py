"""A picture of losses over steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def plot_losses(curves: Mapping[str, NDArray[np.float64]], path: Path) -> None:
    """Draw the losses of one run, or of several, which should lie on each other; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for width, (title, losses) in zip(range(2 * len(curves), 0, -2), curves.items(), strict=True):
        axis.plot(np.arange(1, len(losses) + 1), losses, label=title, lw=width / 2 + 0.5)
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats per byte")
    axis.grid(alpha=0.25, lw=0.5)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
