"""The codec delta on tensors of a device; `test_races.py` runs more, in the settings named `delta`."""

from __future__ import annotations

import pytest
from unit.devices.device_programs import given
from unit.devices.device_ranks import Job, Rank
from unit.devices.device_settings import SETTINGS

from mcr_plus.compression.copies import Copies, Copy, HeldValues
from mcr_plus.errors import Unsupported


def test_messages_need_a_library_with_tags() -> None:
    def refused(rank: Rank) -> str:
        x = rank.tensor(given(rank.rank))
        with pytest.raises(Unsupported) as error:
            rank.comm.isend(x, 1 - rank.rank, compress="delta")
        with pytest.raises(Unsupported, match="which nccl does not support"):
            rank.comm.irecv(x, 1 - rank.rank, compress="delta", backend="nccl")
        return str(error.value)

    for text in Job(2, SETTINGS["nccl, delta"].config).run(refused):
        assert "messages of codec delta need tags, which nccl does not support; name another library" in text


def test_copies_on_a_device_are_bounded_by_its_memory() -> None:
    """Copies take at most half of it, whatever the host has."""

    def kept(rank: Rank) -> list[int]:
        copies, all_of_them = Copies(), [Copy() for _ in range(3)]
        for copy in all_of_them:
            copies.begin(copy)
            copy.sent[0] = HeldValues(rank.tensor([0.0] * 50), 1, 0)
            copies.end(copy, None)
        return [copy.nbytes for copy in all_of_them]

    job = Job(1)
    for home in job.homes:
        home.memory = lambda: 1000  # type: ignore[method-assign]
    assert job.run(kept) == [[0, 200, 200]]
    assert Job(1).run(kept) == [[200, 200, 200]]
