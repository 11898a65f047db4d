"""Properties that later stages give an operation, for an earlier stage that depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NO_CODEC: Final = (("codec", "none"),)
"""`compress` of an operation that the compress stage sends as it is. The step of `hierarchical` between nodes
may still be compressed, which False rules out."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """The answer of the stages behind one; the defaults are those of stages that change no values.

    Attributes:
        compress: the `compress` option of a bucket whose operations are encoded as each of them would be by
            itself.
        alignment: a tensor in a bucket begins at a multiple of so many elements. It covers every codec that
            operations like this one may get, whatever their size.
        codec: name of the codec that is chosen for the operation, None if none is.
        refusal: the reason why that codec cannot encode it, None if it can.
        keeps: whether the result depends on earlier calls of the same operation, as with error feedback.
            Such an operation cannot share a bucket whose members differ from call to call.
        forwards: whether payloads hold changes to what each receiver keeps, so that they can be forwarded.
        compared: whether ranks compare the operation at every call, not only at the first.
    """

    compress: str | tuple[tuple[str, object], ...] | bool | None = None
    alignment: int = 1
    codec: str | None = None
    refusal: str | None = None
    keeps: bool = False
    forwards: bool = False
    compared: bool = False
