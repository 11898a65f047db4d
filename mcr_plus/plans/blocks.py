"""Profile of a model as a chain of blocks, and its file (JSON, version 1); the model is not needed to read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from mcr_plus.bucketing.step_file import Bytes, Seconds, StrictModel, read_json
from mcr_plus.config.document import write_text
from mcr_plus.core.units import about

VERSION: Final = 1
How = Literal["split", "columns", "sum", "gather", "halo", "exchange"]
_Length = Annotated[int, Field(ge=0, lt=1 << 50)]
_Dim = Annotated[int, Field(ge=0, lt=64)]
_Parts = Annotated[int, Field(ge=1, lt=1 << 50)]


class Axis(StrictModel, frozen=True):
    """Axis along which a block may be cut into equal parts.

    `dims`: dimensions of the block's input that are cut; empty if only parameters are. `parts`: length of
    each, or number of heads, hidden units, experts or rows. `how`: what the parts need or give:

    - `split`: parts are independent; input and output are cut alike.
    - `columns`: every part has the whole input, and gives a part of the output's last dimension.
    - `sum`: every part has the whole input, and the outputs add up.
    - `gather`: every part needs something of the others: in attention, keys and values of the sequence.
    - `halo`: every part needs the borders of its neighbours.
    - `exchange`: elements go to the parts that they choose, and back (all_to_all).
    """

    dims: tuple[_Dim, ...]
    parts: tuple[_Parts, ...] = Field(min_length=1)
    how: How

    @model_validator(mode="after")
    def _has_a_part_per_dim(self) -> Axis:
        if self.dims and len(self.dims) != len(self.parts):
            raise ValueError(f"{len(self.parts)} parts; expected one for each of {len(self.dims)} dims")
        return self


class Block(StrictModel, frozen=True):
    """A block of the chain: one module and what its parent computes up to the next block.

    `name`, `kind`: module and its class; several with ` + ` if they have more inputs between them than one
    tensor. `forward`, `backward`: seconds. `recompute`: seconds that are added if the block is recomputed: its
    pass without a graph, after which the usual forward pass runs within the backward pass. `parameters`,
    `gradients`, `optimizer`: bytes, with the optimizer's state. `saved`: bytes of activations kept for the
    backward pass, without parameters; a tensor that several blocks keep counts in the first. `saved_before`:
    bytes that it keeps too, but which count in earlier blocks. `output`, `shape`, `dtype`: bytes, shape and
    dtype of the tensor for the next block. `axes`: how it may be cut. `shared`: parameters that other
    blocks use, too; their bytes count in the first. `reads_batch`: it also reads data of the batch. `random`:
    it draws random numbers, as dropout does.
    """

    name: str
    kind: str
    forward: Seconds
    backward: Seconds
    recompute: Seconds
    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    saved: Bytes
    saved_before: Bytes
    output: Bytes
    shape: tuple[_Length, ...]
    dtype: str
    axes: dict[str, Axis]
    shared: tuple[str, ...] = ()
    reads_batch: bool = False
    random: bool = False


class Profile(StrictModel, frozen=True):
    """Blocks of a model in the order of the forward pass; see `mcr.profile`.

    `model`: hash of names, shapes and dtypes of the parameters. `device`: where they are. `input`: shape of
    the first block's input. `state_of`: class of the optimizer; None if its state is not known. `notes`: what
    was left out.
    """

    version: Literal[1] = VERSION
    model: str
    device: str
    input: tuple[_Length, ...]
    state_of: str | None
    notes: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_blocks_once(self) -> Profile:
        names = [block.name for block in self.blocks]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two blocks are called {twice!r}; expected a name of its own for each")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file written by `save`.

        Raises:
            ConfigError: the file cannot be read, or is no profile of version 1; the text has file, line and key.
        """
        return read_json(Path(path), VERSION, cls.model_validate_json, "profile")

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, one block per line. Raises `ConfigError` if the file cannot be written."""
        head = self.model_dump(mode="json", exclude={"blocks"})
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        blocks = ",\n  ".join(json.dumps(block.model_dump(mode="json")) for block in self.blocks)
        write_text(Path(path), "{\n" + ",\n".join([*lines, f' "blocks": [\n  {blocks}\n ]']) + "\n}\n")

    def __str__(self) -> str:
        rows = [
            [
                "block",
                "kind",
                "forward",
                "backward",
                "recompute",
                "parameters",
                "state",
                "saved",
                "output",
                "cuts",
            ]
        ]
        for block in self.blocks:
            marks = {
                "random": block.random,
                "reads the batch": block.reads_batch,
                "shared": bool(block.shared),
            }
            cuts = [
                f"{name} {'x'.join(map(str, axis.parts))} {axis.how}" for name, axis in block.axes.items()
            ]
            notes = [*cuts, *(mark for mark, holds in marks.items() if holds)]
            rows.append([block.name, block.kind, *_cells([block]), str(list(block.shape)), ", ".join(notes)])
        rows.append(["all", "", *_cells(self.blocks), "", ""])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _cells(blocks: Sequence[Block]) -> list[str]:
    """Return the times and bytes of blocks together, as the table shows them."""
    times = [sum(getattr(each, name) for each in blocks) for name in ("forward", "backward", "recompute")]
    sizes = [sum(getattr(each, name) for each in blocks) for name in ("parameters", "optimizer", "saved")]
    return [f"{1e3 * each:.3g} ms" for each in times] + [about(each) for each in sizes]
