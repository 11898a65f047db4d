"""Links that are measured: the hosts of a job, in names alone, and their rates."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import own_rank, run_ranks

import mcr_plus as mcr
from mcr_plus.core import environment
from mcr_plus.errors import InvalidArgument
from mcr_plus.plans.links import measure_links


def measured(hosts: list[str]) -> dict[str, Any] | str:
    """Return the topology of ranks on these hosts as a document, or the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: hosts[own_rank()])
        assert environment.host_name() in hosts
        with mcr.init({"version": 1, "backends": ["gloo"]}):
            try:
                return measure_links().model_dump()
            except InvalidArgument as error:
                return str(error)


def test_hosts_have_the_rates_of_their_links() -> None:
    results = run_ranks(measured, 4, args=[["a", "a", "b", "b"]])
    found = results[0].value
    assert (found["nodes"], found["ranks_per_node"]) == (2, 2)
    inside, nic = found["links"]["inside"], found["links"]["nic"]
    assert inside["rate"] > 1e6
    assert nic["rates"] == [nic["rate"]] * 2
    assert nic["rate"] > 1e6
    assert 0 < nic["latency"] < 1
    assert all(result.value == found for result in results)


@pytest.mark.long
def test_ranks_of_a_host_follow_each_other() -> None:
    for result in run_ranks(measured, 3, args=[["a", "b", "a"]]):
        assert "expected as many consecutive ranks on each" in result.value
