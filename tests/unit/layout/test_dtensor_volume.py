"""Bytes that DTensor's own plans receive, counted by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from mcr_plus.dtensor import dtensor_volume
from mcr_plus.errors import InvalidArgument
from mcr_plus.layout import Layout
from mcr_plus.layout.program import bound


@pytest.mark.parametrize(
    ("shape", "mesh", "source", "target", "total", "most"),
    [
        ((8, 8), (4,), "S0", "R", 4 * 48, 48),  # everything but the own 16
        ((8, 8), (4,), "P", "R", 4 * 96, 96),  # 2 * 3/4 of 64
        ((8, 8), (4,), "P(max)", "S1", 4 * 48, 48),  # 16 of each of three others
        ((8, 8), (4,), "S0", "S1", 4 * 12, 12),  # 16, and it has 4 of them
        ((8, 8), (4,), "R", "S1", 0, 0),
        ((8, 8), (4,), "S0", "S0", 0, 0),
        ((7, 5), (3,), "S0", "R", 2 * 35, 30),  # 3, 3 and 1 of the rows are there already
        ((7, 5), (3,), "S0", "S1", 8 + 8 + 6, 8),
        ((8, 8), (1,), "P", "R", 0, 0),
        ((8, 8), (2, 2), "R,S0", "S1,S1", 4 * 32, 32),  # gathered first
        ((8, 8), (2, 2), "P,S0", "R,R", 4 * (32 + 64), 96),  # the whole first, and then its sum
        ((8, 8), (2, 2), "P,P", "R,R", 4 * 128, 128),
        ((0, 8), (2, 2), "S0,S1", "R,R", 0, 0),
    ],
)
def test_volumes(
    shape: tuple[int, ...], mesh: tuple[int, ...], source: str, target: str, total: int, most: int
) -> None:
    assert dtensor_volume(shape, mesh, source.split(","), target.split(",")) == (total, most)


def test_placements_of_torch_and_its_refusals() -> None:
    assert dtensor_volume((8, 8), (2, 2), [Partial(), Shard(0)], [Replicate(), Replicate()]) == (384, 96)
    assert dtensor_volume((8, 8), (2,), ["S0"], ["P"]) is None  # which torch refuses
    with pytest.raises(InvalidArgument, match="unknown placement 'Q'"):
        dtensor_volume((8, 8), (2,), ["S0"], ["Q"])
    with pytest.raises(InvalidArgument, match="expected 1, one for each"):
        dtensor_volume((8, 8), (2,), ["S0", "R"], ["R"])


@pytest.mark.parametrize("mesh", [(3,), (2, 2), (2, 3), (4, 2)], ids=str)
def test_no_plan_is_below_the_bound(mesh: tuple[int, ...]) -> None:
    ranks = np.arange(int(np.prod(mesh))).reshape(mesh)
    for source, target in itertools.product(itertools.product(("R", "S0", "S1"), repeat=len(mesh)), repeat=2):
        volume = dtensor_volume((7, 5), mesh, source, target)
        least = bound(Layout.mesh((7, 5), ranks, source), Layout.mesh((7, 5), ranks, target))
        assert volume is not None
        assert volume.total >= least.total
        assert volume.most >= least.fullest
