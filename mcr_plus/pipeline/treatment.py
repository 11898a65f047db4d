"""`Treatment`: effect of later stages on an operation, which earlier stages may need to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NO_CODEC: Final = (("codec", "none"),)
"""`compress` for no codec; unlike with False, `hierarchical` may still compress its step between nodes."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """Effect of later stages on an operation; by default, values are not changed.

    Attributes:
        compress: the `compress` option of a bucket that encodes its members as if each were sent alone.
        alignment: alignment of tensors in a bucket, in elements. It suits every codec that similar operations
            of any size may get.
        codec: name of the codec chosen for the operation, if any.
        refusal: the reason why the codec cannot encode the operation; None if it can.
        keeps: True if the result depends on earlier calls of the same operation, as with error feedback. Such
            an operation cannot share a bucket whose members differ from call to call.
        forwards: True if a payload is a change to a value that each receiver keeps, so it can be forwarded.
        compared: True if ranks compare the operation at every call, not only at the first.
    """

    compress: str | tuple[tuple[str, object], ...] | bool | None = None
    alignment: int = 1
    codec: str | None = None
    refusal: str | None = None
    keeps: bool = False
    forwards: bool = False
    compared: bool = False
