"""The buffers that stages reuse: their sizes, retention and counts."""

from __future__ import annotations

import pytest
import torch

from mcr_plus.core import buffers
from mcr_plus.core.buffers import Pool

CPU = torch.device("cpu")


def test_a_pool_counts_what_it_keeps_and_not_what_it_has_lent() -> None:
    pool = Pool()
    lease = pool.lease(CPU)
    places = set()
    for _ in range(4):
        tensors = [lease.tensor(1000, torch.float32), lease.tensor(9, torch.int64)]
        assert [(len(each), each.dtype) for each in tensors] == [(1000, torch.float32), (9, torch.int64)]
        assert all(each.data_ptr() % 64 == 0 for each in tensors)
        assert pool.nbytes == 0
        places.add(tensors[0].data_ptr())
        lease.release()
        assert 4000 + 72 <= pool.nbytes <= 4500 + 512
    assert len(places) == 1  # the same memory again


def test_a_pool_keeps_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_KEPT", 10_000)
    pool = Pool()
    for _ in range(2):
        spaces = [pool.take(4096) for _ in range(3)]
        for space in spaces:
            pool.put(space)
        assert pool.nbytes == 8192


@pytest.mark.parametrize("nbytes", [1, 512, 513, 1000, 1024, 1025, 4097, 123_457, (1 << 26) + 1])
def test_at_most_an_eighth_of_a_buffer_is_wasted(nbytes: int) -> None:
    assert nbytes <= Pool().take(nbytes).numel() <= max(512, 9 / 8 * nbytes)
