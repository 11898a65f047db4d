"""What the code of a model before a stage computes: shapes alone, the same in every pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mcr_plus.plans.part import _OnMeta


def before_a_stage(positions: nn.Parameter) -> Tensor:
    rows = positions * 2.0
    rows.unsqueeze_(0).transpose_(1, 2)
    rows.mul_(0.5)
    return torch.cat([rows, rows])


def test_code_that_changes_tensors_in_place_has_the_same_shapes_in_every_pass() -> None:
    positions = nn.Parameter(torch.zeros(5, 4, device="meta"), requires_grad=False)
    known: dict[object, object] = {}
    for _ in range(3):
        with _OnMeta(known):
            rows = before_a_stage(positions)
        assert rows.shape == (2, 4, 5)
    assert len(known) == 2  # the product and the concatenation
