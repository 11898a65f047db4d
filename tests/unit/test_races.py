"""No race on a device: whole pipelines on simulated streams, judged by torch's own race detector."""

from __future__ import annotations

import pytest
from device_programs import SETTINGS, programs_of, runs

SEEDS = (0, 1)


@pytest.mark.parametrize("name", SETTINGS)
def test_no_race_and_the_right_results(name: str) -> None:
    setting = SETTINGS[name]
    launches = records = waits = 0
    for number, program in enumerate(programs_of(setting)):
        size = 4 if setting.nodes else 2 + number % 2
        problems, found = runs(setting, program, size, SEEDS)
        assert not problems, f"{program.__name__} on {size} ranks: {problems[:3]}"
        detectors = [each.job.simulator.detector for each in found]
        launches += sum(each.launches for each in detectors)
        records += sum(each.records for each in detectors)
        waits += sum(each.waits for each in detectors)
    print(f"{name}: {launches} launches, {records} records, {waits} waits, no race")
    assert min(launches, records, waits) > 0
