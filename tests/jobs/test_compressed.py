"""Compressed operations on real ranks, with real MPI and gloo."""

from __future__ import annotations

import pytest
from compressed import every_codec
from ranks import run_ranks


@pytest.mark.parametrize(("ranks", "backends"), [(2, ["mpi", "gloo"]), (3, ["mpi"]), (4, ["gloo"])])
def test_every_codec_on_every_operation(ranks: int, backends: list[str]) -> None:
    results = run_ranks(every_codec, ranks, args=[backends], timeout=240)
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
