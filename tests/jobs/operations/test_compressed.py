"""Compressed operations on real ranks, with real MPI and gloo."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from jobs.operations.compressed import every_codec
from ranks import run_ranks

import mcr_plus as mcr


@pytest.mark.short("2-backends0-True")
@pytest.mark.parametrize(
    ("ranks", "backends", "briefly"),
    [(2, ["mpi", "gloo"], True), (2, ["mpi", "gloo"], False), (3, ["mpi"], False), (4, ["gloo"], False)],
)
def test_every_codec_on_every_operation(ranks: int, backends: list[str], briefly: bool) -> None:
    results = run_ranks(every_codec, ranks, args=[backends, briefly], timeout=240)
    for result in results:
        assert result.value["wrong"] == []
        assert result.value["cases"] > 100
    refused = results[0].value["refused"]
    assert all(result.value["refused"] == refused for result in results)
    for name, kinds in refused.items():
        assert "maximum" in kinds, name
        if name.endswith("int32"):
            assert len(kinds) == 19, name
    assert refused["int8_block float32"] == ["maximum"]


def rules_of_codecs(rules: list[dict[str, Any]]) -> list[str]:
    """Run on ranks; return the warnings of a job with codec rules for operations of several dtypes."""
    torch.set_num_threads(1)
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcr_plus").addHandler(handler)
    stages: list[dict[str, Any]] = [{"compress": {"codec": "bf16"}}, {"select": {}}, {"dispatch": {}}]
    config = {"version": 1, "backends": ["gloo"], "pipeline": stages, "rules": rules}
    with mcr.init(config) as comm:
        for _ in range(2):
            for numel in (1000, 2000):
                mcr.all_reduce(torch.ones(numel, dtype=torch.int64), tag="counts")
            mcr.all_reduce(torch.ones(1000, dtype=torch.int32), tag="counts")
            mcr.all_reduce(torch.ones(1000), tag="counts")
            mcr.all_reduce(torch.ones(1000), tag="vectors")  # no matrix
            mcr.all_reduce(torch.ones(1000, dtype=torch.int64), tag="other")  # the stage's own codec
        model: torch.nn.Module = torch.nn.Linear(64, 64)
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(2, 64)).sum().backward()  # ranks also reduce which gradients there are, in integers
        optimizer.step()
        comm.all_gather_object("text")
    return [line for line in lines if "is not used" in line]  # kernels may be compiled, which is logged, too


def test_a_rules_codec_that_cannot_take_an_operation_is_logged_once() -> None:
    rules = [
        {"match": {"tag": "counts"}, "compress": {"codec": "int8_block"}},
        {"match": {"tag": "vectors"}, "compress": {"codec": "powersgd"}},
        {"match": {"kind": "all_reduce", "tag": "gradients"}, "compress": {"codec": "int8_block"}},
    ]
    first, other = run_ranks(rules_of_codecs, 2, args=[rules], via="torch")
    (line,) = first.value
    assert line.startswith(
        "configuration: rules[0]: codec int8_block is not used for all_reduce SUM int64[1000]"
    )
    assert "codec int8_block takes float32, float16, bfloat16, float64, not int64" in line
    assert other.value == []
