"""Counts, ranks and sizes: integers of NumPy and of torch are as good as an int, and a bool is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
import torch

import mcr_plus as mcr
from mcr_plus import horovod as hvd
from mcr_plus.core.units import parse_count, parse_size, whole_number
from mcr_plus.horovod.optimizer import _positive
from mcr_plus.layout import Layout

do: Final[Any] = mcr  # the tests break the annotations on purpose
untyped: Final[Any] = Layout
CONFIG: Final = {"version": 1, "backends": ["gloo"]}


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    """Join a job of one rank, rank 0."""
    with mcr.init(backends=["gloo"]):
        yield


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def local(**counts: Any) -> object:
    model = torch.nn.Linear(2, 2)
    return mcr.local(model, optimizer(model), **{"every": 1, **counts})


def pushed(number: Any) -> int | None:
    with mcr.sync(torch.nn.Linear(2, 2), src=0, tag=f"numbers {number!r}") as weights:
        return weights.push(number)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "a tensor"])
def test_an_integer_of_another_library_is_one(kind: Callable[[int], Any]) -> None:
    found = whole_number(kind(3))
    assert (type(found), found) == (int, 3)
    assert type(parse_size(kind(7))) is type(parse_count(kind(7))) is int


@pytest.mark.parametrize("value", [True, np.True_, 1.0, np.float32(1), "1", None, [1], np.array([1])])
def test_other_values_are_no_whole_numbers(value: object) -> None:
    assert whole_number(value) is None


# Functions of a single number; 0 or 1 fits each.
TAKING_0: Final[dict[str, Callable[[Any], Any]]] = {
    "broadcast": lambda n: do.broadcast(torch.ones(2), n),
    "reduce": lambda n: do.reduce(torch.ones(2), n),
    "gather": lambda n: do.gather(torch.ones(2), [torch.ones(2)], n),
    "scatter": lambda n: do.scatter(torch.ones(2), [torch.ones(2)], n),
    "broadcast_object": lambda n: do.broadcast_object("x", n),
    "new_group": lambda n: do.new_group([n]).close(),
    "sync": lambda n: do.sync(torch.nn.Linear(2, 2), src=n, tag=f"{n!r}").close(),
    "sync, several": lambda n: do.sync(torch.nn.Linear(2, 2), src=[n], tag=f"{n!r} of many").close(),
    "delay": lambda n: local(every=2, delay=n),
    "dim": lambda n: untyped.sharded((4, 4), [0], n),
    "halo": lambda n: Layout.sharded((4, 4), [0], 0).with_halo(n, n),
    "hvd.ProcessSet": lambda n: hvd.ProcessSet([n]),
}
TAKING_1: Final[dict[str, Callable[[Any], Any]]] = {
    "split sizes": lambda n: do.all_to_all_single(torch.ones(1), torch.ones(1), [n], [n]),
    "ranks": lambda n: do.explain("all_reduce", 8, ranks=n, config=CONFIG),
    "nodes": lambda n: do.explain("all_reduce", 8, nodes=n, config=CONFIG),
    "every": lambda n: local(every=n),
    "fragments": lambda n: local(fragments=n),
    "push": pushed,
    "hvd passes": _positive,
    "shape": lambda n: untyped.replicated((n, 3), [0]),
    "sizes": lambda n: untyped.sharded((1, 4), [0], 0, [n]),
    "experts": lambda n: do.expert.dispatch(torch.ones(1, 2), torch.zeros(1, 1, dtype=torch.long), experts=n),
}


@pytest.mark.parametrize("name", TAKING_0)
def test_ranks_and_places_are_integers_of_any_library(name: str) -> None:
    with pytest.raises(mcr.InvalidArgument):  # first: False equals 0, and a call with 0 may be repeated
        TAKING_0[name](False)
    TAKING_0[name](np.int32(0))


@pytest.mark.parametrize("name", TAKING_1)
def test_counts_and_sizes_are_integers_of_any_library(name: str) -> None:
    with pytest.raises(mcr.InvalidArgument):
        TAKING_1[name](True)
    TAKING_1[name](np.int32(1))
    TAKING_1[name](torch.ones(1, 5).shape[0])  # of a torch.Size


def test_a_tag_is_an_integer_of_any_library() -> None:
    tensor = torch.arange(3.0)
    received = torch.empty(3)
    work = do.irecv(received, np.int16(0), tag=np.uint32(7))
    do.isend(tensor, np.int16(0), tag=np.uint32(7)).wait()
    work.wait()
    assert torch.equal(received, tensor)
    with pytest.raises(mcr.InvalidArgument, match="tag: expected an integer"):
        do.isend(tensor, 0, tag=True)


def test_the_name_of_a_group_is_the_same_whatever_the_color_is_of() -> None:
    names = []
    for color in (np.int64(3), 3):
        group = do.world().split(color, np.int64(0))
        names.append(group.name.rpartition(".")[2])
        group.close()
    assert names == ["3", "3"]


@pytest.mark.parametrize("dtype", [torch.float16, np.dtype("float16"), "float16"], ids=str)
def test_explain_takes_numbers_and_dtypes_of_any_library(dtype: Any) -> None:
    shape = np.array([4, 1024])
    found = do.explain(
        "all_reduce",
        shape.prod() * 2,
        dtype=dtype,
        ranks=np.int64(4),
        nodes=np.int8(2),
        shape=shape,
        config=CONFIG,
    )
    assert [found[name] for name in ("bytes", "dtype", "ranks", "nodes")] == [8192, "float16", 4, 2]
    assert found == do.explain(
        "all_reduce", 8192, dtype="float16", ranks=4, nodes=2, shape=(4, 1024), config=CONFIG
    )
    with pytest.raises(mcr.InvalidArgument, match="dtype: unknown 'complex256'"):
        do.explain("all_reduce", 8192, dtype="complex256", config=CONFIG)
