"""`Treatment`: the effect of later stages on an operation, for earlier stages that depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NO_CODEC: Final = (("codec", "none"),)
"""`compress` for no codec; unlike with False, `hierarchical` may still compress its step between nodes."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """Effect of later stages on an operation; the defaults mean that values stay as they are.

    Attributes:
        compress: the `compress` option of a bucket that encodes its members as if each were sent alone.
        alignment: in elements; tensors in a bucket begin at multiples of it. It fits every codec that similar
            operations of any size may get.
        codec: name of the codec chosen for the operation, if any.
        refusal: the reason why that codec cannot encode the operation, None if it can.
        keeps: True if the result depends on earlier calls of the same operation, as with error feedback. Such
            an operation cannot share a bucket whose members differ from call to call.
        forwards: True if payloads are changes to a value that each receiver keeps, so they can be forwarded.
        compared: True if ranks compare the operation at every call, not only at the first.
    """

    compress: str | tuple[tuple[str, object], ...] | bool | None = None
    alignment: int = 1
    codec: str | None = None
    refusal: str | None = None
    keeps: bool = False
    forwards: bool = False
    compared: bool = False
