"""Offers to tensor parallel servers, and the parts of tensors that loaders read, without vLLM."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcr_plus import InvalidArgument
from mcr_plus.engines.loader_reads import _box
from mcr_plus.engines.tensor_parallel import tensor_parallel_offers
from mcr_plus.errors import Unsupported

WHOLE = torch.arange(6 * 5 * 4).view(6, 5, 4)


def test_rows_columns_and_vocabulary_are_divided() -> None:
    shapes = {
        "model.embed_tokens.weight": (300, 12), "model.layers.0.self_attn.q_proj.weight": (12, 12),
        "model.layers.0.self_attn.q_proj.bias": (12,), "model.layers.0.self_attn.k_proj.weight": (8, 12),
        "model.layers.0.self_attn.o_proj.weight": (12, 12), "model.layers.0.self_attn.o_proj.bias": (12,),
        "model.layers.0.mlp.down_proj.weight": (12, 22), "model.norm.weight": (12,),
        "model.layers.0.mlp.gate_proj.weight": (22, 12),
    }  # fmt: skip
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    (layouts,) = tensor_parallel_offers(tensors, 4, key_value_heads=2).values()
    parts = {name: [layout.local_shape(rank) for rank in range(4)] for name, layout in layouts.items()}
    assert parts == {  # 300 rows are padded to 320; two heads and 22 rows do not divide by 4
        "model.embed_tokens.weight": [(80, 12)] * 3 + [(60, 12)],
        "model.layers.0.self_attn.q_proj.weight": [(3, 12)] * 4,
        "model.layers.0.self_attn.q_proj.bias": [(3,)] * 4,
        "model.layers.0.self_attn.o_proj.weight": [(12, 3)] * 4,
    }
    both = tensor_parallel_offers(tensors, 2, key_value_heads=2)["tensor parallel 2"]
    assert both["model.layers.0.self_attn.k_proj.weight"].local_shape(1) == (4, 12)
    assert both["model.layers.0.mlp.down_proj.weight"].local_shape(1) == (12, 11)


@pytest.mark.parametrize(
    ("degree", "names", "text"),
    [
        (1, ["a.q_proj.weight"], "degree=1; expected an integer from 2 on"),
        (2.0, ["a.q_proj.weight"], "degree=2.0"),
        (2, ["weight"], "no tensor is of"),
        (3, ["a.q_proj.weight"], "and divides"),
    ],
)
def test_mistakes(degree: int, names: list[str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        tensor_parallel_offers({name: torch.empty(4, 4) for name in names}, degree)


@given(st.data())
def test_parts_that_are_read_are_boxes_that_hold_them(data: st.DataObject) -> None:
    view, is_box = WHOLE, True
    for dim, size in enumerate(WHOLE.shape):
        low = data.draw(st.integers(0, size - 1))
        view = view.narrow(dim, low, data.draw(st.integers(1, size - low)))
    expected = [sorted(set(axis.tolist())) for axis in np.unravel_index(view.numpy().ravel(), WHOLE.shape)]
    shape = data.draw(st.sampled_from(["kept", "turned", "stepped", "computed"]))
    if shape == "turned":
        view = view.permute(data.draw(st.permutations(range(3))))
    elif shape == "stepped":
        view, is_box = view[::2], view.shape[0] < 2
    elif shape == "computed":
        view, is_box = view + 1, False
    box = [range(*ends) for ends in zip(*_box(view, WHOLE), strict=True)]
    if shape != "stepped" or is_box:
        assert [[*axis] for axis in box] == (expected if is_box else [[*range(size)] for size in WHOLE.shape])
    if shape != "computed":
        read = np.argwhere(np.isin(WHOLE.numpy(), view.numpy())).tolist()
        assert {tuple(each) for each in read} <= {*itertools.product(*box)}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm() -> None:
    with pytest.raises(ImportError, match="needs vLLM: pip install vllm"):
        importlib.import_module("mcr_plus.engines.vllm")


def test_another_version_of_vllm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.1"))
    monkeypatch.delitem(sys.modules, "mcr_plus.engines.vllm", raising=False)
    with pytest.raises(Unsupported, match=r"vLLM 0\.33\.1: mcr_plus.engines.vllm needs 0\.32"):
        importlib.import_module("mcr_plus.engines.vllm")
