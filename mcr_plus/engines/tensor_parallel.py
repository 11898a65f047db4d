"""Offers of `mcr.sync` to inference servers whose ranks hold tensor parallel shards of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from mcr_plus.core.units import whole_number
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.layout.layout import Layout

COLUMNS: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Linear layers of which a rank has some outputs: rows of the weight, and elements of the bias."""
ROWS: Final = ("o_proj", "down_proj")
"""Linear layers of which a rank has some inputs: columns of the weight; their bias is whole."""
VOCABULARY: Final = ("embed_tokens", "lm_head")
"""Tables of which a rank has the rows of some tokens."""
_HEADS: Final = ("k_proj", "v_proj")
_PADDED_TO: Final = 64  # rows; vLLM divides the padded vocabulary


def tensor_parallel_offers(
    source: torch.nn.Module | Mapping[str, torch.Tensor],
    degree: int,
    *,
    key_value_heads: int | None = None,
) -> dict[str, dict[str, Layout]]:
    """Return `offers` of `mcr.sync` for servers with this tensor parallel degree, for example vLLM's.

    Weights of `COLUMNS`, `ROWS` and `VOCABULARY`, which are the names in checkpoints of Llama, Mistral, Qwen
    and Gemma, are divided as vLLM divides them (`docs/weight-sync.md`); other tensors are whole on each rank,
    also keys and values with heads that do not divide evenly, of which servers hold copies. A server takes an
    offer that covers what it loads, so a division that does not fit is refused by the server.

    Args:
        source: the trainers' model or tensors, with names as in the checkpoint.
        degree: number of ranks of a server.
        key_value_heads: number in a layer; None: that of `source.config`, if it has one.

    Raises:
        InvalidArgument: `degree` is not an integer from 2 on, or `source` has no tensors to divide.
    """
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 2:
        raise InvalidArgument(f"tensor_parallel_offers: degree={degree!r}; expected an integer from 2 on")
    if key_value_heads is None:
        key_value_heads = getattr(getattr(source, "config", None), "num_key_value_heads", None)
    elif whole_number(key_value_heads) is None:
        what = f"key_value_heads={key_value_heads!r}; expected their number"
        raise InvalidArgument(f"tensor_parallel_offers: {what}")
    named = source.named_parameters() if isinstance(source, torch.nn.Module) else source.items()
    shapes = {name: tuple(tensor.shape) for name, tensor in named if tensor.ndim}
    whole = _HEADS if (key_value_heads or degree) % degree else ()
    layouts = {}
    for name, shape in shapes.items():
        layer, kind = (["", *name.split(".")])[-2:]
        dim, share = 0, 0
        if layer in VOCABULARY:
            share = -(-shape[0] // _PADDED_TO) * _PADDED_TO // degree
        elif layer in COLUMNS and layer not in whole:
            share = shape[0] // degree
        elif layer in ROWS and kind == "weight" and len(shape) > 1:
            dim, share = 1, shape[1] // degree
        if 0 < shape[dim] <= share * degree:
            layouts[name] = _divided(shape, dim, share, degree)
    if not layouts:
        known = (*COLUMNS, *ROWS, *VOCABULARY)
        raise InvalidArgument(
            f"tensor_parallel_offers: no tensor is of {known}, and divides; got {short(list(shapes))}"
        )
    return {f"tensor parallel {degree}": layouts}


def _divided(shape: tuple[int, ...], dim: int, share: int, degree: int) -> Layout:
    """Return a layout in which each rank has the next `share` indices of a dimension, the last ones fewer."""
    whole = [(0, size) for size in shape]
    ends = [min(rank * share, shape[dim]) for rank in range(degree + 1)]
    parts = {
        rank: [[*whole[:dim], (ends[rank], ends[rank + 1]), *whole[dim + 1 :]]] for rank in range(degree)
    }
    return Layout.boxes(shape, parts)
