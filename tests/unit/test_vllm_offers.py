"""Offers to tensor parallel servers, and the parts of tensors that loaders read, without vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcr_plus import InvalidArgument
from mcr_plus.engines import vllm_plugin
from mcr_plus.engines.loader_reads import _box
from mcr_plus.engines.tensor_parallel import tensor_parallel_offers
from mcr_plus.errors import ConfigError, Unsupported

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


def test_scalars_are_whole_and_numbers_of_heads_are_numbers() -> None:
    tensors = {
        "a.q_proj.weight": torch.empty(4, 4),
        "a.q_proj": torch.empty(()),
        "o_proj.weight": torch.empty(4),
    }
    ((_, layouts),) = tensor_parallel_offers(tensors, 2).items()
    assert [*layouts] == ["a.q_proj.weight"]
    heads: Any = "8"
    with pytest.raises(InvalidArgument, match="key_value_heads='8'"):
        tensor_parallel_offers(tensors, 2, key_value_heads=heads)


def test_another_vllm_starts_without_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.9.2"))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", None)
    with caplog.at_level(logging.WARNING, "mcr_plus"):
        vllm_plugin.register()
    assert "vLLM 0.9.2 gets no weight transfer engine 'mcr', which needs 0.32" in caplog.text


class Client:
    """AsyncLLM as far as `follow` calls it; the first update fails, as if a worker had lost its trainers."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.loaded, self.failures = 0, 1

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> Any:
        assert method == "mcr_plus"
        if args == ("versions",):
            return [(3, self.loaded)] * 2
        self.calls.append("update")
        if self.failures:
            self.failures -= 1
            raise RuntimeError("rank 0 was lost")
        self.loaded = 3
        return [3, 3]

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any, **__: Any) -> None:
            self.calls.append(name)

        return call


def test_a_server_follows_on_after_a_failed_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = SimpleNamespace(WeightTransferInitRequest=lambda info: info)
    monkeypatch.setattr(vllm_plugin, "import_module", lambda _: base)
    invitation, client = tmp_path / "policy.sync", Client()
    invitation.touch()

    async def run() -> None:
        task = asyncio.create_task(vllm_plugin.follow(client, str(invitation), 0.01))
        while client.loaded < 3 or client.calls[-1] != "resume_generation":
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 30))
    tries = ["init_weight_transfer_engine", "pause_generation", "update"]
    after = ["start_weight_update", "finish_weight_update", "reset_prefix_cache", "resume_generation"]
    assert client.calls == [*tries, "resume_generation", *tries, *after]


@pytest.mark.parametrize(
    "given",
    [
        *([], {}, {"invitation": 3}, {"invitation": "a", "each": 1}),
        *({"invitation": "a", "every": 0}, {"invitation": "a", "every": "1"}),
    ],
)
def test_settings_of_a_server_are_checked(given: Any) -> None:
    arguments = SimpleNamespace(additional_config={"mcr_plus": given})
    with pytest.raises(ConfigError, match="additional_config: mcr_plus: expected invitation: FILE"):
        asyncio.run(vllm_plugin.Following().init_state(object(), SimpleNamespace(), arguments))
