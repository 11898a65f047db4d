"""Properties that later stages give an operation, for an earlier stage that depends on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Treatment:
    """The answer of the stages behind one; the defaults are those of stages that change no values.

    Attributes:
        compress: the `compress` option of a bucket whose operations are encoded as each of them would be by
            itself.
        alignment: a tensor in a bucket begins at a multiple of so many elements. It covers every codec that
            operations like this one may get, whatever their size.
        keeps: whether the result depends on earlier calls of the same operation, as with error feedback.
            Such an operation cannot share a bucket whose members differ from call to call.
    """

    compress: str | tuple[tuple[str, object], ...] | bool | None = None
    alignment: int = 1
    keeps: bool = False
