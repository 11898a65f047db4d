"""`fuse: {plan: auto}`: capture some backward passes, search for the best buckets, and try them in the job.

Passes of a job, counted from the one after the first:

    0           by size, in the order of the first pass; warm-up
    1 … 3       captured: buckets are sent at the end, so that communication does not slow the computation
    4 … 21      both plans alternate, three counted passes each; the first pass of a turn is not counted
    22 …        the faster plan

Pass 0 is the first pass in which no rank of the group has another trial running (`trials`); buckets
stay by size until then. Each rank times whole steps, from the end of a pass to the end of the next pass; the
time of a step is that of the slowest rank. The searched plan is used only if it is faster by a margin.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch

from mcr_plus.bucketing import MEASURED, REPORT
from mcr_plus.bucketing.costs import OVERHEAD, BucketCurve, groups, prices
from mcr_plus.bucketing.given_plan import named_choices
from mcr_plus.bucketing.probe import probe
from mcr_plus.bucketing.search import FoundPlan, search
from mcr_plus.bucketing.simulate import BucketTimes, simulate
from mcr_plus.bucketing.step import Probed
from mcr_plus.communicator.calls import Compress
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.gradient_policy import Choice, GradientPolicy, not_choosable, with_codec
from mcr_plus.core.kinds import MAX
from mcr_plus.core.work import Work
from mcr_plus.errors import ConfigError, Unsupported
from mcr_plus.fusion.bucket import Bucket, BucketEntry, by_size, packed
from mcr_plus.fusion.options import FuseOptions
from mcr_plus.job.init import current

_log = logging.getLogger("mcr_plus")
WARM: Final = 1
CAPTURED: Final = 3
TURN: Final = 3  # consecutive passes of a plan; the first binds its operations
ROUNDS: Final = 3
_INCOMPLETE: Final = 10  # number of unusable passes after which the trial ends
_WARM_UP: Final = 1 << 12  # elements
MARGIN: Final = 0.02  # smallest relative gain that justifies a change


Issue = Callable[[torch.Tensor, "str | None", Compress], Work]
"""Function that starts the all_reduce of a bucket by a library; None: the pipeline chooses."""


class ExecutablePlan(NamedTuple):
    """A plan in executable form: buckets, with the library and codec of each."""

    buckets: list[Bucket]
    choices: list[Choice]


class PassTimes(NamedTuple):
    """Times of a pass on one rank, in `perf_counter` seconds.

    `began`: end of the previous pass. `ready`: ready time of each gradient, by index. `computed`: end of the
    backward pass, before any wait. `ended`: the means are available.
    """

    began: float
    ready: Mapping[int, float]
    computed: float
    ended: float


@dataclass
class Captured:
    """Times of a captured step: seconds since the end of the previous pass, maximum over ranks."""

    order: list[int]
    ready: list[float]
    compute: float


@dataclass(eq=False)  # a trial equals only itself, and is a key of `trials`
class AutoPlan:
    """Chooses the buckets for the passes of a job; all ranks reach the same decisions.

    Args:
        comm: group of the reducer. entries: gradients by index, with equal `like`.
        alignment: bytes. limits: for buckets by size. curves: costs by library and codec.
        tail: bytes of the operation that ends a pass. names: names of the parameters, by index.
        polled: libraries that make progress only in calls of the program.
    """

    comm: Communicator
    entries: Sequence[BucketEntry]
    alignment: int
    limits: FuseOptions
    curves: Mapping[Choice, BucketCurve]
    tail: int
    names: Sequence[str]
    polled: Sequence[str]
    used: dict[int, str] = field(default_factory=dict)  # library that sent a bucket, by bytes of the bucket
    report: dict[str, Any] = field(default_factory=dict)
    is_final: bool = False
    _passes: int = 0
    _incomplete: int = 0
    _captured: list[PassTimes] = field(default_factory=list)
    _plans: list[ExecutablePlan] = field(default_factory=list)
    _steps: list[list[float]] = field(default_factory=lambda: [[], []])

    @property
    def is_of_cuts(self) -> bool:
        """True if cuts of a compiled model are tried as well."""
        return False

    @property
    def has_verdict(self) -> bool:
        """True if plans have been compared; a later job can then use the result."""
        return self.is_final and "chosen" in self.report and not self.is_of_cuts

    @property
    def holds(self) -> bool:
        """Whether the buckets of the next pass are sent at its end."""
        return WARM <= self._passes < WARM + CAPTURED

    def after(
        self, began: float, ready: Mapping[int, float], computed: float, ended: float, order: Sequence[int]
    ) -> ExecutablePlan | None:
        """Record a whole pass; returns the plan of the next pass if it changes, else None.

        For the times, see `PassTimes`. `order`: gradients in the order of readiness on the first rank
        in the first pass.
        """
        times = PassTimes(began, ready, computed, ended)
        number, self._passes = self._passes, self._passes + 1
        if number < WARM:
            return None
        if number < WARM + CAPTURED:
            self._captured.append(times)
            return self._begin(order) if number == WARM + CAPTURED - 1 else None
        trial = number - WARM - CAPTURED
        turn, place = divmod(trial, TURN)
        if place:
            self._steps[self._tried(turn)].append(times.ended - times.began)
        if place < TURN - 1:
            return None
        if turn < 2 * ROUNDS - 1:
            return self._plans[self._tried(turn + 1)]
        return self._end()

    def incomplete(self) -> ExecutablePlan | None:
        """Record a pass that lacks a gradient of some parameter on the first rank; returns like `after`."""
        self._incomplete += 1
        if self._incomplete < _INCOMPLETE:
            return None
        return self._give_up(f"in {_INCOMPLETE} passes, the first rank had parameters without a new gradient")

    def _give_up(self, reason: str) -> ExecutablePlan | None:
        """Return to buckets by size; all ranks do this in the same pass."""
        self.is_final = True
        if self.comm.rank == 0:
            _log.warning("gradients: buckets by size: %s", reason)
        return self._plans[0] if self._plans else None

    def _tried(self, turn: int) -> int:
        """Return the number of a turn's plan; the searched plan comes first: the other was just used."""
        return -(turn + 1) % len(self._plans)

    def _by_size(self, order: Sequence[int]) -> list[Bucket]:
        limits = self.limits
        return by_size(
            [self.entries[index] for index in order],
            limit=limits.bucket, first_limit=limits.first_bucket, alignment=self.alignment,
        )  # fmt: skip

    # -- planning ---------------------------------------------------------------------------------

    def _begin(self, order: Sequence[int]) -> ExecutablePlan | None:
        """Search for a plan with the captured times, and begin the trial of the plan."""
        captured = self._agreed(order)
        choices = list(self.curves)
        plan: list[tuple[tuple[int, ...], Choice]] = []
        problem: str | None = None
        if self.comm.rank == 0:
            try:
                found = self._searched(captured, choices)
                plan = [
                    (tuple(captured.order[begin:end]), choices[choice])
                    for begin, end, choice in found.buckets
                ]
                self._foretell(captured, found, plan)
            except Exception as error:  # must not propagate: the other ranks wait for the broadcast
                problem = f"the search for a plan failed: {type(error).__name__}: {error}"
        plan, self.report, problem = self.comm.broadcast_object(
            (plan, self.report, problem), self.comm.ranks[0]
        )
        if problem is not None:
            return self._give_up(problem)
        buckets = [packed([self.entries[index] for index in members], self.alignment) for members, _ in plan]
        before = self._by_size(captured.order)
        self._plans = [
            ExecutablePlan(before, [Choice()] * len(before)),
            ExecutablePlan(buckets, [Choice(*choice) for _, choice in plan]),
        ]
        return self._plans[self._tried(0)]

    def _agreed(self, order: Sequence[int]) -> Captured:
        """Return the captured times: medians over passes, maxima over ranks."""
        rows = [
            [
                *(each.ready.get(index, each.computed) - each.began for index in order),
                each.computed - each.began,
            ]
            for each in self._captured
        ]
        middle = torch.from_numpy(np.median(np.array(rows, np.float64), axis=0))
        self.comm.all_reduce(middle, MAX, compress=False, tag="plan")
        *ready, compute = middle.tolist()
        return Captured(list(order), np.maximum.accumulate(ready).tolist(), compute)

    def _searched(self, captured: Captured, choices: Sequence[Choice]) -> FoundPlan:
        """Return the best plan; if there are very many gradients, small neighbours share an entry."""
        sizes = [self.entries[index].nbytes for index in captured.order]
        ends = groups(sizes)
        whole = [
            packed([self.entries[index] for index in captured.order[begin:end]], self.alignment).nbytes
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        curves = [self.curves[choice] for choice in choices]
        ready = [captured.ready[end - 1] for end in ends]
        found = search(ready, captured.compute, prices(whole, self.alignment, curves, OVERHEAD))
        at = [0, *ends]
        buckets = [(at[begin], at[end], choice) for begin, end, choice in found.buckets]
        return replace(found, buckets=buckets, exact=found.exact and len(ends) == len(sizes))

    def _foretell(
        self, captured: Captured, found: FoundPlan, plan: Sequence[tuple[Sequence[int], Choice]]
    ) -> None:
        """Store the expected times of both plans in the report."""
        tail = self._tail_time()
        before = self._by_size(captured.order)
        cheapest = [(bucket.members, Choice()) for bucket in before]
        course, usual = self.course(captured, plan), self.course(captured, cheapest)
        last = self.names[plan[-1][0][-1]] if plan else ""
        self.report = {
            "plan": "auto",
            "buckets": [[self.names[index] for index in members] for members, _ in plan],
            **named_choices(choice for _, choice in plan),
            "foretold_ms": 1e3 * (course.step + tail),
            "foretold_baseline_ms": 1e3 * (usual.step + tail),
            "bound_ms": 1e3 * (found.bound + tail),
            "compute_ms": 1e3 * captured.compute,
            "exposed_ms": 1e3 * course.exposed,
            "exposed_by": last,
            "gap": found.gap,
            "exact": found.exact,
            "baseline_buckets": len(before),
        }

    def _tail_time(self) -> float:
        """Return the expected seconds of the operation that ends a pass, which no codec compresses."""
        plain = [curve for choice, curve in self.curves.items() if choice.codec is None]
        return float(min(curve.times(np.array([self.tail]))[0] for curve in plain))

    def _chosen(self, nbytes: int) -> Choice:
        """Return the library that the pipeline will probably choose: that of the bucket closest in size."""
        if Choice() in self.curves:
            return Choice()
        if self.used:
            name = self.used[min(self.used, key=lambda size: abs(size - nbytes))].partition(":")[0]
            if Choice(name) in self.curves:
                return Choice(name)
        size = np.array([nbytes])
        known = [choice for choice in self.curves if choice.codec is None]
        return min(known, key=lambda choice: float(self.curves[choice].times(size)[0]))

    def course(self, captured: Captured, plan: Sequence[tuple[Sequence[int], Choice]]) -> BucketTimes:
        """Return the predicted timeline; for libraries that the pipeline chooses, see `_chosen`."""
        place = {index: at for at, index in enumerate(captured.order)}
        last, seconds, shares, polled = [], [], [], []
        for members, choice in plan:
            bucket = packed([self.entries[index] for index in members], self.alignment)
            size = np.array([bucket.nbytes])
            choice = choice if choice in self.curves else self._chosen(bucket.nbytes)
            curve = self.curves[choice]
            last.append(max(place[index] for index in members))
            seconds.append(float(curve.times(size)[0]))
            shares.append(float(curve.losses(size)[0]))
            polled.append(choice.library in self.polled)
        return simulate(
            np.array(captured.ready), captured.compute, np.array(last, np.int64), np.array(seconds),
            np.array(shares), overhead=OVERHEAD, by_caller=polled,
        )  # fmt: skip

    # -- the verdict ------------------------------------------------------------------------------

    def _end(self) -> ExecutablePlan:
        """Compare the plans by the slowest rank's times, and keep the faster one."""
        steps = torch.tensor(self._steps, dtype=torch.float64, device="cpu")
        self.comm.all_reduce(steps, MAX, compress=False, tag="plan")
        before, after = (median(each) for each in steps.tolist())
        chosen = int(after < before * (1 - MARGIN))
        self.is_final = True
        self.report |= {
            "chosen": "searched" if chosen else "by size",
            "baseline_ms": 1e3 * before,
            "measured_ms": 1e3 * after,
            # Captured passes can be slower than others, as they send their buckets at the end.
            "bound_ms": min(self.report["bound_ms"], 1e3 * before, 1e3 * after),
        }
        if not chosen:
            self.report["buckets"] = [
                [self.names[at] for at in each.members] for each in self._plans[0].buckets
            ]
            self.report |= named_choices(self._plans[0].choices)
        current().attached[REPORT] = self.report
        if self.comm.rank == 0:
            _log.warning("%s", line(self.report, len(self._plans[1].buckets)))
        return self._plans[chosen]


def line(report: Mapping[str, Any], searched: int) -> str:
    """Return the result of a trial in one line."""
    old, new = (f"{report[key]:.0f}" for key in ("baseline_ms", "measured_ms"))
    expected = f"foretold {report['foretold_ms']:.0f}; bound {report['bound_ms']:.0f}"
    if report["chosen"] == "by size":
        return (
            f"gradients: {report['baseline_buckets']} buckets by size are kept: {searched} buckets took "
            f"{new} ms instead of {old} ({expected})"
        )
    rest = ""
    if report["exposed_ms"] >= 1:
        rest = f"; exposed {report['exposed_ms']:.0f} by '{report['exposed_by']}'"
    return (
        f"gradients: {searched} buckets instead of {report['baseline_buckets']}: step {old} -> {new} ms "
        f"({expected}{rest})"
    )


def _send(issue: Issue, compress: Compress, values: torch.Tensor, library: str | None) -> Work:
    return issue(values, library, compress)


def _measured(
    comm: Communicator,
    dtype: torch.dtype,
    device: torch.device,
    nbytes: int,
    policy: GradientPolicy,
    codecs: Sequence[str],
    issue: Issue,
) -> dict[Choice, BucketCurve]:
    """Return the costs of buckets for each library, with each of these codecs and with the codec of `policy`.

    A stage `hierarchical` skips operations that name a library. So the pipeline's own choice is measured,
    too.
    """
    libraries: list[str | None] = [*comm.pipeline.libraries] if policy.backend is None else [policy.backend]
    if policy.backend is None and comm.stage_options("hierarchical") is not None:
        libraries.append(None)
    curves: dict[Choice, BucketCurve] = {}
    if policy.compress is not None:  # a rule determines the codec of its gradients
        codecs = ()
    for name in (None, *codecs):
        own = policy if name is None else with_codec(policy, name)
        send = partial(_send, issue, own.options)
        if name is not None:  # compile or load its kernels before the probe's clock runs
            with suppress(Unsupported):
                send(torch.zeros(_WARM_UP, dtype=dtype, device=device), libraries[0]).wait()
        found = probe(comm, dtype, device, nbytes, libraries, send)
        curves |= {Choice(library, name): curve for library, curve in found.items()}
    return curves


def begun(
    comm: Communicator,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    entries: Sequence[BucketEntry],
    alignment: int,
    limits: FuseOptions,
    tail: int,
    issue: Issue,
) -> AutoPlan | None:
    """Measure the costs of buckets, and return a trial; None, with a warning, for unsupported gradients.

    Collective. `named`: at least one parameter; `entries`: one for each. Other arguments: see `AutoPlan`.

    Raises `ConfigError` for codecs that a plan cannot choose.
    """
    for codec in limits.codecs:
        if (problem := not_choosable(codec, comm.config)) is not None:
            raise ConfigError(f"fuse.codecs: {problem}")
    # Unsupported gradients are not an error: they keep their buckets by size.
    reason = None
    device = named[0][1].device
    if device.type != "cpu":
        reason = "`plan: auto` supports only gradients on the CPU, whose times are those of the host"
    elif len({entry.like for entry in entries}) > 1:
        reason = "`plan: auto` does not support gradients of several dtypes, devices or codecs"
    dtype, _, policy = cast("tuple[torch.dtype, torch.device, GradientPolicy]", entries[0].like)
    if reason is None and policy.keeps:
        reason = (
            "`plan: auto` does not support a codec with state, which needs the same buckets in every step"
        )
    curves: dict[Choice, BucketCurve] = {}
    if reason is None:
        total = sum(entry.nbytes for entry in entries)
        curves = _measured(comm, dtype, device, total, policy, limits.codecs, issue)
        reason = None if curves else "no library supports their all_reduce"
        # Keep the costs without codecs for `mcr.capture`, which stores them in the captured step.
        if comm.size == current().world.size and not policy.encoded:
            current().attached[MEASURED] = {
                choice.library: Probed(
                    "all_reduce",
                    tuple(map(float, curve.sizes)),
                    tuple(map(float, curve.seconds)),
                    tuple(map(float, curve.shares)),
                )
                for choice, curve in curves.items()
                if choice.library is not None and choice.codec is None
            }
    if reason is not None:
        if comm.rank == 0:
            _log.warning("gradients: buckets by size: %s", reason)
        return None
    names = [name for name, _ in named]
    return AutoPlan(comm, entries, alignment, limits, curves, tail, names, comm.polled_by_caller)
