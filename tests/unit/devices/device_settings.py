"""Settings of simulated jobs, and runs of the programs in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from unit.devices.array_programs import ARRAY_PROGRAMS
from unit.devices.delta_programs import DELTA_PROGRAMS
from unit.devices.device_programs import (
    PROGRAMS,
    Options,
    Program,
    Values,
    bare,
    buckets,
    dropped,
    failing,
    hook,
    in_flight,
    in_flight_on_streams,
    in_turn,
    matrices,
    one,
    other_streams,
    persistent,
    polled,
    reused,
    two,
)
from unit.devices.device_ranks import Job
from unit.devices.device_turns import Decisions, Stuck

from mcr_plus.errors import McrError


@dataclass(frozen=True)
class Setting:
    """Libraries, stages and options of calls. `error`: of a value, relative to the largest; None: any."""

    name: str
    library: str
    stages: Sequence[str] = ()
    options: Options = field(default_factory=dict)
    error: float | None = 0.0
    nodes: Sequence[Sequence[int]] = ()

    @property
    def config(self) -> dict[str, Any]:
        other = "gloo" if self.library == "nccl" else "nccl"
        options: dict[str, Any] = {"hierarchical": {"nodes": [list(node) for node in self.nodes], "min": 0}}
        stages = [{stage: options.get(stage, {})} for stage in (*self.stages, "select", "dispatch")]
        return {"backends": [self.library, other], "pipeline": stages}


def _feedback(codec: str) -> Options:
    return {"compress": {"codec": codec, "error_feedback": True}, "tag": "t"}


def _settings() -> list[Setting]:
    found = []
    for library in ("nccl", "gloo"):
        for name, stages, options, error in (
            ("plain", (), {}, 0.0),
            ("fused", ("fuse",), {}, 0.0),
            ("bf16", ("compress",), {"compress": "bf16"}, 0.0),
            ("int8_block", ("compress",), {"compress": "int8_block"}, 0.02),
            ("fused, int8_block", ("fuse", "compress"), {"compress": "int8_block"}, 0.02),
            ("sign1, error feedback", ("compress",), _feedback("sign1"), None),
            ("topk, error feedback", ("compress",), _feedback("topk"), None),
            ("powersgd, error feedback", ("compress",), _feedback("powersgd"), None),
            ("int_shared", ("compress",), {"compress": "int_shared"}, None),
        ):
            found.append(Setting(f"{library}, {name}", library, stages, options, error))
        found.append(Setting(f"{library}, arrays", library))
        found.append(Setting(f"{library}, delta", library, ("compress",), {"compress": "delta"}))
        how: Options = {"compress": "int8_block"}
        found.append(Setting(f"{library}, arrays, int8_block", library, ("fuse", "compress"), how, 0.02))
        for codec in (None, "int8_block", "delta"):
            stages = ("hierarchical", "compress") if codec else ("fuse", "hierarchical")
            options = {"compress": codec} if codec else {}
            error = 0.05 if codec == "int8_block" else 0.0
            name = f"{library}, hierarchical, {codec or 'fused'}"
            found.append(Setting(name, library, stages, options, error, ((0, 1), (2, 3))))
    return found


_GIVE: Final = {**PROGRAMS, **ARRAY_PROGRAMS, **DELTA_PROGRAMS}
SETTINGS: Final = {setting.name: setting for setting in _settings()}


def programs_of(setting: Setting) -> list[Program]:
    """The programs that a setting is for: codecs do not take every operation, nor state every shape."""
    codec = setting.name.partition(", ")[2]
    if codec.startswith("arrays"):
        return list(ARRAY_PROGRAMS)
    if codec.endswith("delta"):
        return list(DELTA_PROGRAMS)
    if codec.startswith("powersgd"):
        return [matrices]
    stateful = {in_turn, in_flight, other_streams, in_flight_on_streams, polled, dropped, hook, persistent}
    if codec.endswith("error feedback") or codec == "int_shared":
        return [each for each in PROGRAMS if each in stateful]
    if setting.nodes:
        return [in_turn, in_flight_on_streams, polled, other_streams, buckets, reused]
    rare = {matrices, bare, failing, one, two}
    special: dict[str, list[Program]] = {
        "nccl, plain": [bare],
        "gloo, plain": [failing],
        "gloo, int8_block": [failing],
    }
    return [each for each in PROGRAMS if each not in rare] + special.get(setting.name, [])


@dataclass
class Found:
    """The outcome of one run: its problems and its record."""

    problems: list[str]
    results: list[Values]
    job: Job
    decisions: Decisions


def problems_of(
    setting: Setting, wanted_of: Callable[[int, int], Values], results: Sequence[Values]
) -> list[str]:
    """Return the values of ranks that differ from the expected values."""
    found, error = list[str](), setting.error
    for rank, values in enumerate(results):
        wanted = wanted_of(rank, len(results))
        if error is None:
            continue
        near = [abs(a - b) <= error * max(map(abs, wanted)) for a, b in zip(values, wanted, strict=False)]
        if len(values) != len(wanted) or not all(near):
            found.append(f"rank {rank} has read {values}, not {wanted}")
    return found


def run(
    setting: Setting, program: Program, size: int, decide: Decisions | None = None, *, slow: int = 0
) -> Found:
    """Run a program and compare what it has read; `slow`: number of polls before NCCL takes calls."""
    job = Job(size, setting.config, slow=slow)
    decisions = decide or Decisions()
    problems, results = list[str](), list[Values]()
    try:
        results = job.run(lambda rank: program(rank, **setting.options), decisions)
    except (Stuck, McrError, RuntimeError, AssertionError, TypeError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    problems += problems_of(setting, _GIVE[program], results)
    waits = [f"{each} may wait for peers" for each in job.simulator.blocked]
    return Found([*problems, *job.simulator.detector.races, *waits], results, job, decisions)


def randomly(seed: int) -> Decisions:
    """Return random decisions; seed 0 lets every rank run as far as it can, with late devices."""
    return Decisions(pick=Random(seed).randrange) if seed else Decisions()


def runs(
    setting: Setting, program: Program, size: int, seeds: Sequence[int] = (0, 1)
) -> tuple[list[str], list[Found]]:
    """Run one program several times; return the problems, such as different results, and the runs."""
    found = [run(setting, program, size, randomly(seed), slow=3 * (seed % 2)) for seed in seeds]
    problems = [problem for each in found for problem in each.problems]
    if not problems and any(each.results != found[0].results for each in found):
        problems.append(f"results differ from run to run: {[each.results for each in found]}")
    return problems, found
