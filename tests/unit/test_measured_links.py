"""Rates of links from the seconds of messages, which are late now and then."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import Tensor

from mcr_plus.plans import links


class Alone:
    """The first of two ranks, whose messages take no time of themselves."""

    rank = 0

    def barrier(self) -> None: ...

    def send(self, tensor: Tensor, peer: int, *, compress: bool) -> None: ...

    def broadcast_object(self, value: Any, root: int) -> Any:
        return value


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("rate", "latency"), [(100e6, 0.03), (10e9, 25e-6), (1e6, 0.001)])
def test_late_messages_do_not_make_a_link_fast(
    seed: int, rate: float, latency: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bit/s. A tenth of the latency comes and goes, and one turn of seven is 60 ms late."""
    draw = random.Random(seed)

    def turn(comm: Any, peer: int, nbytes: int, *, first: bool) -> float:
        late = 0.06 * (draw.random() < 1 / 7)
        return 2 * latency * (1 + draw.random() / 10) + 8 * nbytes / rate + late

    monkeypatch.setattr(links, "_turn", turn)
    comm: Any = Alone()
    found, delay = links._measured(comm, (0, 1))
    assert 8 * found == pytest.approx(rate, rel=0.5)
    assert delay == pytest.approx(latency, rel=0.15)
