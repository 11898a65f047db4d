"""No race on a device: whole pipelines on simulated streams, judged by torch's own race detector."""

from __future__ import annotations

import pytest
from unit.devices.device_settings import SETTINGS, programs_of, randomly, run, runs
from unit.devices.race_mutants import ELSEWHERE, MODULES, Mutant, applied, modules_with_orderings, mutants

SEEDS = (0, 1)


@pytest.mark.short("nccl, plain", "nccl, fused]", "nccl, arrays]", "gloo, int_shared", "gloo, topk")
@pytest.mark.parametrize("name", SETTINGS)
def test_no_race_and_the_right_results(name: str) -> None:
    setting = SETTINGS[name]
    launches = records = waits = count = 0
    for number, program in enumerate(programs_of(setting)):
        size = 4 if setting.nodes else 2 + number % 2
        problems, found = runs(setting, program, size, SEEDS)
        assert not problems, f"{program.__name__} on {size} ranks: {problems[:3]}"
        detectors = [each.job.simulator.detector for each in found]
        launches += sum(each.launches for each in detectors)
        records += sum(each.records for each in detectors)
        waits += sum(each.waits for each in detectors)
        count += len(found)
    print(f"{name}: {count} runs, {launches} launches, {records} records, {waits} waits, no race")
    assert min(launches, records, waits) > 0


def caught_by(mutant: Mutant) -> str:
    """Return the program that finds the mutant, empty if none does."""
    with applied(mutant):
        for seed in (*SEEDS, 2):
            for setting in map(SETTINGS.__getitem__, MODULES[mutant.module]):
                for number, program in enumerate(programs_of(setting)):
                    size = 4 if setting.nodes else 2 + (number + seed) % 2
                    if run(setting, program, size, randomly(seed), slow=3 * (seed % 2)).problems:
                        return f"{setting.name}, {program.__name__}"
    return ""


@pytest.mark.parametrize("module", MODULES)
def test_an_ordering_that_is_left_out_is_found(module: str) -> None:
    """The first record, if there is one: waits that are left out may take many programs to show."""
    of_module = [each for each in mutants() if each.module == module]
    assert caught_by(min(of_module, key=lambda each: each.what != "a record"))


@pytest.mark.long
@pytest.mark.parametrize("module", MODULES)
def test_every_ordering_that_is_left_out_is_found(module: str) -> None:
    found = {str(each): caught_by(each) for each in mutants() if each.module == module}
    print("\n".join(f"{mutant}: {program}" for mutant, program in found.items()))
    assert [mutant for mutant, program in found.items() if not program] == []


def test_every_module_with_orderings_has_mutants() -> None:
    assert modules_with_orderings() == MODULES.keys() | ELSEWHERE.keys()
