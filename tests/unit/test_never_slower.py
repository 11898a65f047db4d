"""Trials that leave out a codec if it is slower, on a clock of the test."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from typing import cast

import pytest
import torch

from mcr_plus.compression.never_slower import ROUNDS, RecurringTrial, never_slower
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import JointWork, Work
from mcr_plus.pipeline.stage import Issue, Next
from mcr_plus.trials import router

PLAIN = Signature("all_reduce", torch.float32, (4,), 16, "world", 2, reduce_op="SUM", tag="x", async_op=True)
ROUND, LAG = 16, 8  # calls, as the documentation says


class Job:
    """Calls of one operation, raw or compressed, that take the seconds a test sets; one rank's exchanges."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str], float]) -> None:
        self.now, self.seconds, self.calls = 50.0, seconds, ""
        self.exchanges: list[tuple[Signature, list[float]]] = []
        monkeypatch.setattr(router, "perf_counter", lambda: self.now)
        ways = (Issue(self._way("r")), Issue(self._way("c")))
        self.issue = never_slower(*ways, "toy", PLAIN, cast(Next, self), one_clock=True)

    def _way(self, name: str) -> Callable[[Message], Work]:
        def end() -> None:
            self.now += self.seconds(name)

        def start(message: Message) -> Work:
            self.calls += name
            return JointWork([], "all_reduce", nbytes=16).then(end)

        return start

    def __call__(self, signature: Signature) -> Issue:
        """Bind the exchange."""

        def start(message: Message) -> Work:
            self.exchanges.append((signature, message.inputs[0].tolist()))
            return JointWork([], "all_reduce", nbytes=0)

        return Issue(start)

    def make(self, calls: int, *, waits: bool = True, after: Work | None = None) -> str:
        """Make calls; return the way that each took."""
        self.calls = ""
        for call in range(calls):
            message = Message(PLAIN) if after is None else Message(PLAIN, after=after)
            if call % 2:
                self.issue.run(message)
            elif waits:
                self.issue(message).wait()
            else:
                self.issue(message)
        return self.calls


def fixed(raw: float, compressed: float) -> Callable[[str], float]:
    return lambda name: compressed if name == "c" else raw


def test_a_clear_gain_is_used_after_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, fixed(1.0, 0.5))
    assert job.make(ROUND + LAG) == "rc" * 8 + "r" * LAG
    assert job.make(500) == "c" * 500
    signature, numbers = job.exchanges[0]
    assert (signature.kind, signature.dtype, signature.reduce_op) == ("all_reduce", torch.float64, "MAX")
    assert signature.shape == (len(numbers),)
    assert (signature.group, signature.ranks, signature.device) == ("world", 2, "cpu")
    assert (signature.async_op, signature.tag) == (True, "compress.never_slower")
    spans = [end - begin for begin, end in zip(numbers[:12], numbers[12:], strict=True)]
    assert spans == [1.0, 0.5] * 6


@pytest.mark.parametrize("compressed", [2.0, 1.0, 0.96])  # 0.96: less than 5 % is not worth it
def test_without_a_gain_the_codec_is_left_out(monkeypatch: pytest.MonkeyPatch, compressed: float) -> None:
    job = Job(monkeypatch, fixed(1.0, compressed))
    assert job.make(ROUND + LAG + 100)[ROUND:] == "r" * (LAG + 100)
    assert len(job.exchanges) == 1


def test_comparisons_recur_ever_more_rarely_and_find_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(monkeypatch, fixed(1.0, 1.0))
    with caplog.at_level(logging.INFO, "mcr_plus"):
        trace = job.make(ROUND + LAG + 100 + ROUND + LAG + 200 + ROUND + LAG)
    stretches = [len(list(run)) for way, run in groupby(trace) if way == "r"]
    assert [length for length in stretches if length > 1] == [LAG + 100 + 1, LAG + 200 + 1, LAG]
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["off"]
    job.seconds = fixed(1.0, 0.5)
    with caplog.at_level(logging.INFO, "mcr_plus"):
        trace = job.make(400 + ROUND + LAG + 100)
    assert trace == "r" * 400 + "rc" * 8 + "r" * LAG + "c" * 100
    assert caplog.records[-1].getMessage().endswith("codec toy takes 500 ms, 1e+03 ms without it: on")
    # Half of the calls of a round lose 0.5 s each: 4 s are 0.2 % of 4000 calls of 0.5 s.
    assert set(job.make(4000 - 100)) == {"c"}
    assert job.make(ROUND) == "rc" * 8


def test_costly_comparisons_recur_later(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, fixed(1.0, 3.0))
    trace = job.make(ROUND + LAG + 8000 + 2)  # 8 calls lose 2 s each: 0.2 % of 8000 s
    assert trace[ROUND:].index("c") == LAG + 8000 + 1


def test_more_rounds_decide_an_open_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    right = 0
    for seed in range(50):
        chance = random.Random(seed)
        job = Job(
            monkeypatch,
            lambda name, chance=chance: (  # type: ignore[misc]
                (0.6 if name == "c" else 1.0) * chance.lognormvariate(0, 0.3)
            ),
        )
        trace = job.make(ROUNDS * (ROUND + LAG))
        right += job.make(1) == "c"
        assert trace.count("c") >= 8
    assert right >= 48


def test_equal_entries_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 0
    for seed in range(100):
        chance = random.Random(seed)
        job = Job(monkeypatch, lambda name, chance=chance: chance.lognormvariate(0, 0.3))  # type: ignore[misc]
        job.make(ROUNDS * (ROUND + LAG))
        used += job.make(1) == "c"
    assert used <= 5


def test_nothing_timed_means_uncompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = RecurringTrial(("raw", "toy"))
    for _ in range(ROUNDS):
        trial.agree([-float("inf")] * 24)
    assert (trial.chosen, trial.rounds, trial.began) == (0, 0, ROUNDS * (ROUND + LAG) + 100)


def test_calls_with_dependencies_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, fixed(1.0, 0.5))
    earlier = JointWork([], "all_reduce", nbytes=16)
    assert job.make(ROUND + LAG + 50, after=earlier)[ROUND + LAG :] == "c" * 50


def test_a_trial_is_plain_data() -> None:
    trial = RecurringTrial(("raw", "toy"))
    trial.agree([1.0] * 12 + [2.0] * 12)
    again = RecurringTrial(**json.loads(json.dumps(asdict(trial))))
    for each in (trial, again):
        each.agree([1.0] * 12 + [3.0] * 12)
    assert asdict(again) == {**asdict(trial), "candidates": ["raw", "toy"], "medians": again.medians}
    assert tuple(again.medians) == trial.medians
