"""Oracles of operations: expected results, computed from the inputs of all ranks with numpy alone.

Every rank can compute the inputs of every other, so an oracle needs no communication. Floats are float64,
complex numbers complex128; integers keep their own type and wrap around, as they do in C. `zeros`, `full` and
`tensor` are torch's, on the device of the tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

DEVICE: Final = os.environ.get("MCR_TEST_DEVICE", "cpu")
zeros: Final = partial(torch.zeros, device=DEVICE)
full: Final = partial(torch.full, device=DEVICE)
tensor: Final = partial(torch.tensor, device=DEVICE)

_INTEGERS: Final[dict[torch.dtype, type[np.generic]]] = {
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
}
_FACTORS: Final = np.array([-2, -1, -0.5, 0.5, 1, 2])  # products of these are exact in every float type
_COMPLEX_FACTORS: Final = np.array([1, -1, 1j, -1j, 1 + 1j, 0.5])
_UFUNCS: Final[dict[str, Any]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_LOGIC: Final[dict[str, Any]] = {
    "SUM": np.logical_or,
    "MAX": np.logical_or,
    "BOR": np.logical_or,
    "PRODUCT": np.logical_and,
    "MIN": np.logical_and,
    "BAND": np.logical_and,
    "BXOR": np.logical_xor,
}


def _mixed(rank: int, count: int, salt: int) -> npt.NDArray[np.uint64]:
    """Return bits that differ by rank, position and salt (the finaliser of splitmix64)."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(rank * 1_000_003 + salt * 7_368_787 + 1)
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


@lru_cache(maxsize=8192)
def inputs(dtype: torch.dtype, rank: int, shape: Shape, salt: int = 0, *, product: bool = False) -> Array:
    """Return one rank's values, exact in `dtype`, so that sums (with `product`, products) are exact too.

    Integers cover their whole range and overflow.
    """
    bits = _mixed(rank, prod(shape), salt)
    if dtype in _INTEGERS:
        values: Array = bits.astype(_INTEGERS[dtype])
    elif dtype is torch.bool:
        values = (bits >> np.uint64(5) & np.uint64(1)).astype(bool)
    elif product:
        factors = _COMPLEX_FACTORS if dtype.is_complex else _FACTORS
        values = factors[(bits % np.uint64(6)).astype(np.int64)]
    else:
        values = _quarters(bits)
        if dtype.is_complex:
            values = values + 1j * _quarters(bits >> np.uint64(20))
    values = values.reshape(shape)
    values.setflags(write=False)
    return values


def _quarters(bits: npt.NDArray[np.uint64]) -> Array:
    """Return multiples of 1/4 below 8: a few of them add up exactly even in bfloat16."""
    quarters: Array = ((bits % np.uint64(61)).astype(np.float64) - 30) / 4
    return quarters


def rough(dtype: torch.dtype, rank: int, count: int, salt: int = 0) -> torch.Tensor:
    """Return one rank's values with all digits of a float type in use, over several orders of magnitude."""
    random = np.random.default_rng([rank, salt])
    values = random.standard_normal(count) * np.exp2(random.integers(-6, 7, count))
    if dtype.is_complex:
        values = values + 1j * random.standard_normal(count)
    return torch.from_numpy(np.asarray(values)).to(DEVICE, dtype)


def wide(tensor: torch.Tensor) -> Array:
    """Return a tensor's values in the type in which the oracles compute."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    if tensor.dtype.is_complex:
        tensor = tensor.to(torch.complex128)
    elif tensor.dtype.is_floating_point:
        tensor = tensor.double()
    array: Array = tensor.numpy()
    return array


def reduced(parts: Sequence[Array], op: str) -> Array:
    """Return the reduction of all ranks' values."""
    stack = np.stack(parts)
    if stack.dtype == bool:
        result: Array = _LOGIC[op].reduce(stack, axis=0)
        return result
    result = np.asarray(_UFUNCS[op].reduce(stack, axis=0, dtype=stack.dtype))
    if op != "AVG":
        return result
    if result.dtype.kind in "iu":  # rounded towards zero
        means = [abs(total) // len(parts) * (1 if total >= 0 else -1) for total in result.ravel().tolist()]
        return np.array(means, result.dtype).reshape(result.shape)
    quotient: Array = result / len(parts)
    return quotient


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to `dtype` once; 0 for integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def sum_bound(parts: Sequence[Array], dtype: torch.dtype, roundings: int) -> Array:
    """Return the largest error of a sum in any order, after `roundings` roundings to `dtype` per term.

    Higham, Accuracy and Stability of Numerical Algorithms, section 4.2; the last term is for subnormals.
    """
    u = unit_roundoff(dtype)
    magnitude: Array = np.sum([np.abs(part) for part in parts], axis=0)
    # A complex number is rounded by component.
    return magnitude * (roundings * u / (1 - roundings * u)) * 2**0.5 + torch.finfo(dtype).tiny


def difference(got: torch.Tensor, expected: Array, allowed: float | Array = 0.0) -> str | None:
    """Describe the difference of a result from the expected one; None without any (NaN equals NaN)."""
    if tuple(got.shape) != expected.shape:
        return f"shape {tuple(got.shape)}, expected {expected.shape}"
    values = wide(got)
    if expected.dtype.kind in "iub":
        wrong = values != expected
    else:
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(values - expected) <= allowed)
        wrong &= ~((values == expected) | (np.isnan(values) & np.isnan(expected)))
    if not np.any(wrong):
        return None
    where = tuple(int(i[0]) for i in np.nonzero(wrong)) if wrong.ndim else ()
    return (
        f"{int(np.sum(wrong))} of {wrong.size} wrong; at {where}: {values[where]}, expected {expected[where]}"
    )


class Failures:
    """Failures in a run of many cases, in words, and the number of cases."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.cases = 0

    def check(self, name: str, problem: str | None) -> None:
        """Count a case; keep its problem."""
        self.cases += 1
        if problem:
            self.found.append(f"{name}: {problem}")

    def expect(self, name: str, holds: bool, got: object = "") -> None:
        """Count a case that must hold."""
        self.check(name, None if holds else f"does not hold; got {got!r}")

    def raises(
        self, name: str, function: Callable[[], object], kind: type[BaseException], *fragments: str
    ) -> str:
        """Count a call that must raise exactly `kind`, with all `fragments` in the message returned."""
        try:
            value = function()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            missing = [fragment for fragment in fragments if fragment not in str(error)]
            wrong = type(error) is not kind or missing
            self.check(
                name, f"expected {kind.__name__} with {list(fragments)}, got {text}" if wrong else None
            )
            return text
        self.check(name, f"expected {kind.__name__}, returned {value!r}")
        return ""

    def report(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return {"cases": self.cases, "failures": self.found[:25], "failed": len(self.found)}
