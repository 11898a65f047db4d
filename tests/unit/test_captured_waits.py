"""Waits that a capture notes: an operation of one step may be waited for in the next."""

from __future__ import annotations

import torch
from torch import nn

from mcr_plus.bucketing.capture import Capture
from mcr_plus.bucketing.step import IssueEvent, WaitEvent
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import JointWork
from mcr_plus.pipeline.stage import Issue as BoundIssue

SUM = Signature("all_reduce", torch.float32, (4,), 16, "world", 2, reduce_op="SUM", async_op=True)


def test_a_wait_for_an_operation_of_an_earlier_step_is_no_wait_of_this_one() -> None:
    model = nn.Linear(2, 2)
    capture = Capture(model, torch.optim.SGD(model.parameters()), 3, hold=True)
    issue = capture.bound(
        Group("world", (0, 1), 0), BoundIssue(lambda message: JointWork([], "none", nbytes=0))
    )
    capture._active, capture._began = True, capture.clock()
    works = [issue.start(Message(SUM, (torch.ones(4),), (torch.ones(4),))) for _ in range(2)]
    works[1].wait()
    capture._after_step()
    later = issue.start(Message(SUM, (torch.ones(4),), (torch.ones(4),)))
    works[0].wait()
    later.wait()
    later.wait()  # noted once
    capture._after_step()
    seen = [
        [
            (type(mark.event), mark.event.id)
            for mark in step.marks
            if isinstance(mark.event, IssueEvent | WaitEvent)
        ]
        for step in capture._of_this_rank()
    ]
    assert seen == [[(IssueEvent, 0), (IssueEvent, 1), (WaitEvent, 1)], [(IssueEvent, 0), (WaitEvent, 0)]]
