"""Text as bytes: windows to train on, the same for every library, and a tail that is held out."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from libraries import JobError
from numpy.typing import NDArray
from torch import Tensor

VOCABULARY = 256
TAIL = 10  # the last tenth of the text is held out
BUNDLED = "pydoc_data.topics"  # Python's own language reference, as `help()` shows it


class Corpus:
    """A text of which windows of `sequence + 1` bytes are taken: what is read, and what comes next."""

    def __init__(self, text: NDArray[np.uint8], source: str, sequence: int, seed: int) -> None:
        shortest = TAIL * (sequence + 1)
        if len(text) < shortest:
            raise JobError(
                f"{source}: expected at least {shortest} bytes, for windows of {sequence} in the tenth "
                f"that is held out; got {len(text)}"
            )
        end = len(text) - len(text) // TAIL
        self.trained, self.held = text[:end], text[end:]
        self.window = sequence + 1
        self.seed = seed

    def windows(self, step: int, stream: int, batch: int) -> Tensor:
        """A step's batch [batch, sequence + 1] of a `stream`: each rank has one, or all have the same."""
        random = np.random.default_rng([self.seed, step, stream])
        starts = random.integers(0, len(self.trained) - self.window + 1, size=batch)
        return self._cut(self.trained, starts)

    def held_out(self, stream: int, streams: int, batch: int, batches: int) -> list[Tensor]:
        """This stream's share of windows that are spread evenly over the tail; equally many for each."""
        last = len(self.held) - self.window
        starts = np.linspace(0, last, streams * batch * batches).astype(np.int64)[stream::streams]
        return [self._cut(self.held, each) for each in np.split(starts, batches)]

    def _cut(self, text: NDArray[np.uint8], starts: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(text[starts[:, None] + np.arange(self.window)].astype(np.int64))


def read_corpus(path: Path | None, sequence: int, seed: int) -> Corpus:
    """The bytes of a file, or without one the prose that comes with Python; `JobError` if it will not do."""
    if path is None:
        return Corpus(_bundled(), BUNDLED, sequence, seed)
    try:
        # Mapped, not read: the text may be larger than the memory. Nothing at all cannot be mapped.
        empty = path.stat().st_size == 0
        text = np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise JobError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return Corpus(text, str(path), sequence, seed)


def _bundled() -> NDArray[np.uint8]:
    try:
        topics: dict[str, str] = import_module(BUNDLED).topics
    except ImportError as error:
        raise JobError(f"{BUNDLED}: {error}; pass a text with --data") from error
    return np.frombuffer("\n\n".join(topics.values()).encode(), np.uint8)
