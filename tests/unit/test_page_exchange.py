"""Agents exchange status pages while somebody looks: only then, and only what their job has signed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import pytest
from unit.test_status_page import about, picture

from mcr_plus.hosts.page import Page, read
from mcr_plus.hosts.page_exchange import HOSTS, PageExchange
from mcr_plus.hosts.protocol import Heartbeat
from mcr_plus.observe.remote_status import RemoteStatus

KEY = b"k" * 32
JOB = f"exchange{os.getpid()}"


class Hosts(NamedTuple):
    """Two hosts, of which the second has rank 1, which this process is."""

    here: PageExchange
    there: PageExchange
    page: Page
    rank: Page

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.page.descriptor}"

    def carry(self, datagrams: object) -> None:
        """Deliver what `here` sends, and the answers."""
        assert isinstance(datagrams, list)
        for datagram in datagrams:
            assert datagram.host == 1
            for answer in self.there.receive(datagram.data, time.monotonic()) or ():
                assert answer.host == 0
                assert self.here.receive(answer.data, time.monotonic()) == ()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with (
        closing(Page({"job": JOB}, "1", name=HOSTS)) as page,
        closing(Page({"job": JOB}, "1", name=HOSTS)) as other,
        closing(Page(about(job=JOB, rank=1), "2.5")) as rank,
    ):
        yield Hosts(
            PageExchange(2, 0, KEY, JOB, {0: 1}, page),
            PageExchange(2, 1, KEY, JOB, {1: os.getpid()}, other),
            page,
            rank,
        )


def test_nothing_is_sent_unless_somebody_looks(hosts: Hosts) -> None:
    now = time.monotonic()
    assert list(hosts.here.step(now)) == []
    with closing(RemoteStatus()) as elsewhere:
        elsewhere.pages(hosts.path, about(), [])
        assert len(hosts.here.step(now)) == 1
        assert list(hosts.here.step(now)) == []  # not so soon again
        assert len(hosts.here.step(now + 1)) == 1
    assert list(hosts.here.step(now + 2)) == []


def test_pages_of_another_host_by_the_clock_of_this_one(hosts: Hosts) -> None:
    began = time.monotonic()
    ahead = 1000.0  # of the clock there
    wait = {"group": "world", "number": 3, "since": began + ahead - 5}
    group = {"name": "world", "changed": began + ahead - 7}
    drawn = picture(
        at=began + ahead, active=began + ahead - 6, waits=[wait], groups=[group, {**group, "changed": 0}]
    )
    hosts.rank.show(drawn)
    with closing(RemoteStatus()) as elsewhere:
        elsewhere.pages(hosts.path, about(), [])
        (question,) = hosts.here.step(began)
        for answer in hosts.there.receive(question.data, began + ahead) or ():
            hosts.here.receive(answer.data, began)
        hosts.here.step(began)
        shown = elsewhere.pages(hosts.path, about(), [1])[1]
    assert shown.version == "2.5"
    assert shown.about["rank"] == 1
    assert shown.picture["at"] == pytest.approx(began, abs=0.5)
    assert shown.picture["active"] == pytest.approx(began - 6, abs=0.5)
    assert shown.picture["waits"][0]["since"] == pytest.approx(began - 5, abs=0.5)
    assert shown.picture["groups"][0]["changed"] == pytest.approx(began - 7, abs=0.5)
    assert shown.picture["groups"][1]["changed"] == 0
    assert shown.picture["frames"] == [["step", "/somewhere/train.py", 71]]


def test_messages_of_other_signers_or_requests_are_ignored(hosts: Hosts) -> None:
    now = time.monotonic()
    hosts.rank.show(picture())
    with closing(RemoteStatus()) as elsewhere:
        elsewhere.pages(hosts.path, about(), [])
        (question,) = hosts.here.step(now)
        stranger = PageExchange(2, 0, b"x" * 32, JOB, {}, hosts.page)
        (forged,) = stranger.step(now)
        assert hosts.there.receive(forged.data, now) == ()
        (other,) = PageExchange(2, 0, KEY, JOB, {}, hosts.page).step(now)
        answers = hosts.there.receive(other.data, now)
        assert isinstance(answers, list)
        assert hosts.here.receive(answers[0].data, now) == ()  # to another question
        answers = hosts.there.receive(question.data, now)
        assert isinstance(answers, list)
        (right,) = answers
        for broken in (right.data[:-1], right.data[:20] + b"x" + right.data[21:], b"mcrp", b""):
            assert not hosts.here.receive(broken, now)
        hosts.here.step(now + 1)
        assert read(hosts.page.descriptor).picture == {}
        hosts.carry([question])
        hosts.here.step(now + 2)
        assert list(read(hosts.page.descriptor).picture["ranks"]) == ["1"]


def test_a_page_of_another_job_is_not_sent(hosts: Hosts) -> None:
    hosts.rank.show(picture())
    other = PageExchange(2, 1, KEY, "another job", {1: os.getpid()}, hosts.page)
    with closing(RemoteStatus()) as elsewhere:
        elsewhere.pages(hosts.path, about(), [])
        (question,) = hosts.here.step(time.monotonic())
    assert other.receive(question.data, time.monotonic()) == []


def test_heartbeats_are_left_to_those_who_understand_them(hosts: Hosts) -> None:
    beat = Heartbeat([[0], [1]], 1, KEY, 0.0).datagram(0.1)
    assert hosts.here.receive(beat, 0.2) is None
