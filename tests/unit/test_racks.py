"""Racks of hosts, and bench_scaling's conclusions from figures, without hosts."""

from __future__ import annotations

import bench_scaling
import pytest
from bench_scaling import KINDS, SETTINGS, TWO, WAYS, compared
from racks import Racks, bits_per_second


def test_rates_are_those_of_tc() -> None:
    assert [bits_per_second(rate) for rate in ("100mbit", "1gbit", "2.5kbit", "8bit")] == [1e8, 1e9, 2500, 8]
    for wrong in ("100", "100mbps", "fast"):
        with pytest.raises(ValueError, match="expected a number and bit"):
            bits_per_second(wrong)


def test_hosts_are_numbered_along_racks() -> None:
    racks = Racks(2, 2, "100mbit", "50mbit")
    assert racks.addresses == ("10.77.0.1", "10.77.0.2", "10.77.1.1", "10.77.1.2")
    with pytest.raises(ValueError, match="racks: expected 1 to 250, got 0"):
        Racks(0, 2)
    with pytest.raises(ValueError, match="rate 'fast'"):
        Racks(1, 2, "fast")


def test_costs_by_the_formula_are_foretold_without_error() -> None:
    """Costs of a ring, and of pairs that share the uplink of their rack, are predicted exactly."""
    rate = 12.5e6

    def us(kind: str, racks: int, hosts: int, size: int) -> float:
        ranks = racks * hosts
        rounds = 2 * (ranks - 1) if kind == "all_reduce" else ranks - 1
        volume = rounds / ranks * size
        if kind == "all_to_all" and racks > 1:
            volume = max(volume, hosts * hosts * size / ranks)
        return 1e6 * (rounds * 1e-3 + volume / rate)

    figures = {
        setting.name: {
            way: {
                kind: {str(size): us(kind, setting.racks, setting.hosts, size) for size in sizes}
                for kind in KINDS
            }
            for way in WAYS
        }
        for setting, sizes in (
            (TWO, bench_scaling.FITTED),
            *((each, bench_scaling.FORETOLD) for each in SETTINGS),
        )
    }
    rows = compared(figures, "100mbit")
    assert len(rows) == len(WAYS) * len(SETTINGS) * len(KINDS) * len(bench_scaling.FORETOLD)
    assert all(abs(row.error) < 1e-6 for row in rows)
