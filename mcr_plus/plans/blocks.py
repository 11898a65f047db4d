"""Profile of a model as a chain of blocks, and its file (JSON, version 1); no model is needed to read it."""

from __future__ import annotations

import json
from collections import defaultdict
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
_Parts = Annotated[int, Field(ge=1, lt=1 << 50)]


class Axis(StrictModel):
    """Axis along which a block may be cut.

    `dims`: dimensions of the block's input that are cut; none if only parameters are. `parts`: their lengths,
    or the number of heads, hidden units, experts or rows. `how`:

    - `split`: parts are independent, input and output are cut alike;
    - `columns`: each part reads the whole input, and gives some of the output's last dimension;
    - `sum`: each part reads the whole input, and the outputs add up;
    - `gather`: parts need data of the others: in attention, keys and values;
    - `halo`: parts need their neighbours' borders;
    - `exchange`: elements go to the parts that they choose, and back (all_to_all).

    Of what a cut of parameters divides: bytes of activations that are `saved`, of `params`, and of its
    `input`; and the share of its `work` in the time of the block, of which the rest is on all ranks.
    """

    dims: tuple[Annotated[int, Field(ge=0, lt=64)], ...]
    parts: tuple[_Parts, ...] = Field(min_length=1)
    how: How
    saved: Bytes = 0
    params: Bytes = 0
    input: Bytes = 0
    work: Annotated[float, Field(ge=0, le=1)] = 1.0


class ModelBlock(StrictModel):
    """One or several modules with one tensor as input, and what their parent computes up to the next block.

    `name`, `kind`: of the modules. `forward`, `backward`: seconds; `forward_fixed`, `backward_fixed`: of
    these, what parts of the batch take, too, however small. `recompute`: seconds of a forward pass
    without a graph: what recomputing the block adds to a step. `params`: bytes of its parameters by name.
    `gradients`, `optimizer` (state): bytes. `saved`: bytes kept for the backward pass, without parameters
    and batch; what several blocks keep counts in the first, and as `saved_before` in the others. `output`,
    `shape`, `dtype`: bytes, shape and dtype of the next block's input. `axes`: how the block may be cut.
    `shared`: parameters that other blocks use too, which count in the first. `reads_batch`: the block also
    reads data of the batch. `random`: it draws random numbers. `transient`: bytes that a pass needs beyond
    those. `through`: bytes of the outputs of modules with parameters. `detached`: its output needs no
    gradient. `past`: bytes that slices of a sequence leave to later ones, of all together. `accumulate`:
    seconds to add its gradients to those of other micro-batches.
    """

    name: str
    kind: str
    forward: Seconds
    backward: Seconds
    forward_fixed: Seconds
    backward_fixed: Seconds
    recompute: Seconds
    params: dict[str, Bytes]
    gradients: Bytes
    optimizer: Bytes
    saved: Bytes
    saved_before: Bytes
    transient: Bytes
    through: Bytes
    output: Bytes
    shape: tuple[_Length, ...]
    dtype: str
    axes: dict[str, Axis]
    shared: tuple[str, ...]
    reads_batch: bool
    random: bool
    detached: bool = False
    past: Bytes = 0
    accumulate: Seconds = 0.0

    @property
    def parameters(self) -> int:
        """Bytes of its parameters."""
        return sum(self.params.values())

    @property
    def names(self) -> frozenset[str]:
        """Names of all parameters that it uses."""
        return frozenset((*self.params, *self.shared))


class Profile(StrictModel):
    """Blocks of a model in the order of the forward pass; see `mcr.profile`.

    `model`: hash of the trained parameters' names, shapes and dtypes. `input`: shape of the first block's
    input. `state_of`: class of the optimizer. `unused`: parameters that no block uses. `turn`: seconds that
    both passes of a part take beyond its computation, if its rank runs several in turn. `sliced`: the model
    can run slices of its sequences in turn.
    """

    version: Literal[1]
    model: str
    device: str
    input: tuple[_Length, ...]
    state_of: str | None
    unused: tuple[str, ...]
    turn: Seconds = 0.0
    sliced: bool = False
    blocks: tuple[ModelBlock, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_blocks_once(self) -> Profile:
        if len({block.name for block in self.blocks}) < len(self.blocks):
            raise ValueError("several blocks have one name; expected different names")
        return self

    @property
    def users(self) -> dict[str, list[int]]:
        """The blocks that use each parameter, by their indices."""
        found: dict[str, list[int]] = defaultdict(list)
        for index, block in enumerate(self.blocks):
            for name in sorted(block.names):
                found[name].append(index)
        return found

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file written by `save`.

        Raises:
            ConfigError: the file cannot be read, or is no profile; the text has file, line and key.
        """
        return read_json(Path(path), VERSION, cls.model_validate_json, "profile")

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, one block per line. Raises `ConfigError` if that fails."""
        *head, (_, blocks) = self.model_dump(mode="json").items()
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head]
        lines.append(' "blocks": [\n  ' + ",\n  ".join(map(json.dumps, blocks)) + "\n ]")
        write_text(Path(path), "{\n" + ",\n".join(lines) + "\n}\n")

    def __str__(self) -> str:
        head = ["block", "kind", "forward", "backward", "recompute", "parameters", "state", "saved", "output"]
        rows = [[*head, "cuts, notes"]]
        for block in self.blocks:
            notes = [
                f"{name} {'x'.join(map(str, axis.parts))} {axis.how}" for name, axis in block.axes.items()
            ]
            notes += [name for name in ("shared", "reads_batch", "random") if getattr(block, name)]
            rows.append([block.name, block.kind, *_sums([block]), str(list(block.shape)), ", ".join(notes)])
        rows.append(["all", "", *_sums(self.blocks), "", ""])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _sums(blocks: Sequence[ModelBlock]) -> list[str]:
    times, sizes = ("forward", "backward", "recompute"), ("parameters", "optimizer", "saved")
    total = {name: sum(getattr(block, name) for block in blocks) for name in (*times, *sizes)}
    return [f"{1e3 * total[name]:.3g} ms" for name in times] + [about(total[name]) for name in sizes]
