"""`elastic:` in configurations: what is read, and what is refused."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from mcr_plus.config import reader
from mcr_plus.elasticity.loop import checked_bounds
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.job.notice import LeaveNotice


@pytest.mark.parametrize(
    ("given", "sigterm", "file"),
    [
        ("sigterm", True, None),
        ({"sigterm": True}, True, None),
        ({"file": "/run/leave.{rank}.{host}"}, False, "/run/leave.{rank}.{host}"),
        ({"sigterm": True, "file": "/run/leave"}, True, "/run/leave"),
    ],
)
def test_notices_are_read_and_written(given: Any, sigterm: bool, file: str | None) -> None:
    config = reader.load({"version": 1, "elastic": {"notice": given}})
    notice = config.elastic.notice
    assert notice is not None
    assert (notice.sigterm, notice.file) == (sigterm, file)
    assert reader.load(reader.dump(config)) == config
    assert reader.fingerprint(config) != reader.fingerprint(reader.load({"version": 1}))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"notice": "sigint"},
            "elastic.notice: expected a mapping of options, got 'sigint'; known: file, si",
        ),
        ({"notice": {}}, "elastic.notice: tells no rank anything; expected `sigterm: true`, `file: PATH`"),
        ({"notice": {"file": "leave"}}, "notice.file: expected the absolute path of a file, got 'leave'"),
        ({"notice": {"file": "/run/{pid}"}}, "unknown placeholder in '/run/{pid}'; known: {rank}, {host}"),
        ({"notice": {"sigterm": "yes"}}, "elastic.notice.sigterm: expected true or false, got 'yes'"),
        ({"buddies": {"steps": 0}}, "elastic.buddies.steps: expected a number of at least 1, got 0"),
        ({"buddies": {}}, "elastic.buddies.steps: missing; expected a value"),
        ({"notices": "sigterm"}, "unknown key 'notices'; known: buddies, notice"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        reader.load({"version": 1, "elastic": given})
    assert text in str(error.value)


def test_a_loop_of_another_thread_ends_without_an_error() -> None:
    closed, listens = threading.Event(), LeaveNotice()
    listens.listen(reader.load({"version": 1, "elastic": {"notice": "sigterm"}}))
    before = signal.getsignal(signal.SIGTERM)

    def close() -> None:
        listens.close()
        closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert closed.is_set()
    assert not listens.is_open
    assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("least", [0, 4, "2", 1.5, True])
def test_numbers_of_ranks_are_checked(least: Any) -> None:
    with pytest.raises(InvalidArgument, match="min_ranks: expected a number of ranks from 1 to 3"):
        checked_bounds(None, least, 3)
    assert checked_bounds(5, 3, 3) == 3
