"""Jobs between hosts that have IPv6 addresses alone, or both families: namespaces, joined by a link."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from hosts import inside, ip
from jobs.launch import ipv6_program
from ranks import nursery
from two_hosts import ADDRESSES, IPV6_ADDRESSES, TwoHosts, why_not

LIMIT_S: Final = 90.0
REASON = why_not(mpi=False) or (None if Path("/proc/net/if_inet6").exists() else "this kernel has no IPv6")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"hosts: {REASON}")
SUM: Final = [0.0, 3.0, 6.0, 9.0, 12.0]  # (1 + 2) × the index


def run(hosts: TwoHosts, folder: Path, way: str, address: str | None = None) -> list[dict[str, Any]]:
    """Run the program on both hosts; `address`: MASTER_ADDR, if not the first host's address."""
    words = [nursery().python, ipv6_program.__file__, str(folder), way]
    if address is not None:
        words = ["env", f"MASTER_ADDR={address}", *words]
    started = list(hosts.start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("families", "way"),
    [((6,), "plain"), *(pytest.param(f, way, marks=pytest.mark.long)
                        for f, way in (((6,), "torch"), ((6, 4), "plain"), ((4, 6), "plain")))],
)  # fmt: skip
def test_all_connections_have_the_family_of_the_store(
    tmp_path: Path, families: tuple[int, ...], way: str
) -> None:
    """Also those of weights, to a rank and to a server outside the job."""
    both = ADDRESSES if families[0] == 4 else IPV6_ADDRESSES
    with TwoHosts(None, families) as hosts:
        seen = run(hosts, tmp_path, way, f"[{both[0]}]" if (families, way) == ((6,), "plain") else None)
    for rank, each in enumerate(seen):
        assert each["sum"] == SUM
        assert both[1 - rank] in each["peers"]
        assert set(each["peers"]) <= set(both)
        if way == "plain":
            assert (each["pulled"], each["joined"]) == (1.5, 1.5 if rank else None)


@pytest.mark.long
def test_hosts_with_one_family_in_common_use_it(tmp_path: Path) -> None:
    """The second host has IPv6 alone; both reach the store by a name of the first host's IPv6 address."""
    with TwoHosts(None, (6, 4)) as hosts:
        inside(hosts.names[1], "ip", "address", "flush", "dev", hosts.links[1], "scope", "global")
        words = ["address", "replace", f"{IPV6_ADDRESSES[1]}/64", "dev", hosts.links[1], "nodad"]
        inside(hosts.names[1], "ip", "-6", *words)
        seen = run(hosts, tmp_path, "plain")
    assert [each["sum"] for each in seen] == [SUM, SUM]


@pytest.mark.long
def test_hosts_without_a_family_in_common_are_named_with_their_addresses(tmp_path: Path) -> None:
    with TwoHosts(None, (6,)) as hosts:
        name = hosts.names[0]
        ip("-n", name, "link", "add", "only4", "type", "veth", "peer", "name", "only4b")
        for link in ("only4", "only4b"):
            ip("-n", name, "link", "set", link, "up")
        ip("-n", name, "address", "add", "10.78.0.1/24", "dev", "only4")
        seen = run(hosts, tmp_path, "other")
    for each in seen:
        kind, text = each["error"]
        assert kind == "LaunchError"
        assert f"rank 0 on {name} has IPv4 10.78.0.1" in text
        assert f"rank 1 on {hosts.names[1]} has IPv6 {IPV6_ADDRESSES[1]}" in text


@pytest.mark.long
def test_a_scope_is_refused(tmp_path: Path) -> None:
    with TwoHosts(None, (6,)) as hosts:
        seen = run(hosts, tmp_path, "plain", f"fe80::1%{hosts.links[0]}")
    for each in seen:
        assert each["error"][0] == "LaunchError"
        assert "link-local" in each["error"][1]
