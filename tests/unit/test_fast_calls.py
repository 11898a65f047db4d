"""The compiled path of repeated calls: which calls it knows, and that all others go to Python."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mcr_plus.communicator.fast_calls import fast_calls

pytestmark = pytest.mark.skipif(
    fast_calls() is None, reason="the extension is not built, or torch has no exchange API"
)


NEGATIVE: Any = getattr(torch, "_neg_view")  # noqa: B009


class Other(torch.Tensor):
    """A subclass, which may do anything."""


def known(*tensors: torch.Tensor, rest: tuple[Any, ...] = ("SUM", False, None)) -> Any:
    """Return a `FastCalls` that knows one call; its function returns its tensors' addresses."""
    fast = fast_calls()
    assert fast.learn(lambda *given: [each.data_ptr() for each in given], None, "sum", tensors, rest)
    return fast


def test_a_known_call_runs_its_function_on_the_tensors_of_this_call() -> None:
    fast = known(torch.ones(3, 2), torch.ones(3, dtype=torch.int16))
    for _ in range(3):
        tensors = torch.zeros(3, 2), torch.zeros(6, dtype=torch.int16)[1:4]
        assert fast("sum", *tensors, "SUM", False, None) == [each.data_ptr() for each in tensors]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3),
        torch.ones(6),
        torch.ones(3, 2, 1),
        torch.ones(2, 3).T,
        torch.ones(6, 2)[::2],
        torch.ones(3, 2, dtype=torch.float64),
        torch.ones(3, 2, dtype=torch.int32),
        torch.ones(3, 2, dtype=torch.bfloat16),
        torch.ones(3, 2, requires_grad=True),
        NEGATIVE(torch.ones(3, 2)),
        torch.ones(3, 2).as_subclass(Other),
        torch.nn.Parameter(torch.ones(3, 2)),
        torch.ones(3, 2, device="meta"),
        torch.ones(3, 2).to_sparse(),
        torch.ones(3, 2, dtype=torch.complex64),
        [1.0] * 6,
        None,
    ],
    ids=str,
)
def test_a_tensor_of_another_kind_is_left_to_python(tensor: Any) -> None:
    assert known(torch.ones(3, 2))("sum", tensor, "SUM", False, None) is NotImplemented


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, requires_grad=True),
        NEGATIVE(torch.ones(2)),
        torch.ones(4)[::2],
        torch.ones(0),
        torch.ones(1, 1, 1, 1, 1, 1, 2),
        torch.ones(2).as_subclass(Other),
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
    ],
    ids=str,
)
def test_such_a_tensor_is_not_kept(tensor: torch.Tensor) -> None:
    fast = fast_calls()
    assert not fast.learn(print, None, "sum", (tensor,), ())
    assert fast("sum", tensor) is NotImplemented


def test_a_tensor_that_changes_is_another_one() -> None:
    fast, tensor = known(torch.ones(4), rest=()), torch.zeros(4)
    assert fast("sum", tensor) == [tensor.data_ptr()]
    tensor.requires_grad_(True)
    assert fast("sum", tensor) is NotImplemented
    tensor.requires_grad_(False)
    tensor.data = torch.zeros(2, 2)
    assert fast("sum", tensor) is NotImplemented
    tensor.data = torch.zeros(4)
    assert fast("sum", tensor) == [tensor.data_ptr()]
    tensor.resize_(3)
    assert fast("sum", tensor) is NotImplemented


@pytest.mark.parametrize(
    ("rest", "given", "is_known"),
    [
        (("".join(["S", "UM"]), 300), ("SUM", 3 * 100), True),
        ((1,), (True,), False),
        ((False,), (0,), False),
        ((0,), (0.0,), False),
        ((None,), (False,), False),
        (("SUM",), ("MAX",), False),
        (("SUM",), (), False),
        ((), ("SUM",), False),
        (({},), ({},), False),
    ],
)
def test_arguments_are_equal_if_they_have_one_type_and_value(
    rest: tuple[Any, ...], given: tuple[Any, ...], is_known: bool
) -> None:
    result = known(torch.ones(2), rest=rest)("sum", torch.ones(2), *given)
    assert (result is not NotImplemented) == is_known


def test_names_are_apart() -> None:
    fast = known(torch.ones(2), rest=())
    assert fast.learn(lambda _: "product", None, "product", (torch.ones(2),), ())
    assert fast("product", torch.ones(2)) == "product"
    assert isinstance(fast("sum", torch.ones(2)), list)
    assert fast("mean", torch.ones(2)) is NotImplemented


def test_many_calls_are_known_and_no_more() -> None:
    fast = fast_calls()

    def of(size: int) -> Callable[[object], int]:
        return lambda _: size

    kept = [fast.learn(of(size), None, "sum", (torch.ones(size),), ()) for size in range(1, 1101)]
    assert kept == [True] * 1024 + [False] * 76
    found = [fast("sum", torch.ones(size)) for size in range(1, 1101)]
    assert found == [*range(1, 1025), *[NotImplemented] * 76]
    fast.clear()
    assert fast("sum", torch.ones(1)) is NotImplemented
    assert fast.learn(of(7), None, "sum", (torch.ones(1),), ())
    assert fast("sum", torch.ones(1)) == 7


def test_reading_a_tensor_may_run_code_that_clears_the_calls() -> None:
    fast = known(torch.ones(2), rest=())

    class Clearing(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            fast.clear()
            gc.collect()
            assert fast.learn(print, None, "product", (), ())
            return function(*args, **(kwargs or {}))

    with Clearing():
        assert fast("sum", torch.ones(2)) is NotImplemented
    assert fast.learn(lambda _: 1, None, "sum", (torch.ones(2),), ())
    assert fast("sum", torch.ones(2)) == 1


def test_a_function_may_raise_and_may_clear_the_calls() -> None:
    fast = fast_calls()

    def run(tensor: torch.Tensor) -> None:
        fast.clear()
        gc.collect()
        raise ValueError(tuple(tensor.shape))

    assert fast.learn(run, None, "sum", (torch.ones(2),), ())
    with pytest.raises(ValueError, match=r"\(2,\)"):
        fast("sum", torch.ones(2))
    assert fast("sum", torch.ones(2)) is NotImplemented


def test_it_is_garbage_collected() -> None:
    class Owner:
        pass

    owner = Owner()
    owner.fast = fast = fast_calls()  # type: ignore[attr-defined]
    assert fast.learn(print, None, "sum", (torch.ones(2),), (owner,))
    seen = weakref.ref(owner)
    del owner, fast
    gc.collect()
    assert seen() is None


def parts(count: int = 3, size: int = 4) -> list[torch.Tensor]:
    return list(torch.zeros(count * size).chunk(count))


def test_a_list_of_neighbours_counts_as_one_tensor() -> None:
    fast, x = fast_calls(), torch.ones(4)
    assert fast.learn(lambda *given: given, None, "gather", (parts(), x), (0,))
    for given in (parts(), tuple(parts())):
        assert fast("gather", given, x, 0)[0] is given
    apart = [torch.zeros(4) for _ in range(6)]
    for other in (apart[::2], parts()[::-1], parts(2), parts(3, 5), parts()[:2], [], [*parts()[:2], 1.0], x):
        assert fast("gather", other, x, 0) is NotImplemented, other
    assert fast("gather", [each.requires_grad_() for each in parts()], x, 0) is NotImplemented


def test_only_tensors_and_lists_of_neighbours_are_learned() -> None:
    fast, x = fast_calls(), torch.ones(4)
    for value in (x.numpy(), torch.nn.Parameter(x), [torch.zeros(4), x], [x, x], [], "text", None):
        assert not fast.learn(print, None, "scatter", (x, value), (0,)), value
    assert fast("scatter", x, x, 0) is NotImplemented
