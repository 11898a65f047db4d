"""Addresses as text, and the family that ranks agree on."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcr_plus.core.addresses import family_of, is_loopback, place_of_text, place_text, plain_host
from mcr_plus.core.environment import launch_environment
from mcr_plus.errors import LaunchError
from mcr_plus.rendezvous import network


@given(st.ip_addresses(), st.integers(0, 65535))
def test_places_are_read_as_they_were_written(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    text = place_text(str(address), port)
    assert place_of_text(text) == (str(address), port)
    assert text.startswith("[") is (address.version == 6)
    assert family_of(str(address)) == (socket.AF_INET if address.version == 4 else socket.AF_INET6)
    assert is_loopback(str(address)) is address.is_loopback


@pytest.mark.parametrize(
    ("text", "host"),
    [("[fd00::1]", "fd00::1"), ("fd00::1", "fd00::1"), ("10.0.0.1", "10.0.0.1"), ("job-0.job", "job-0.job")],
)
def test_brackets_are_taken_off(text: str, host: str) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": text, "MASTER_PORT": "29500"}
    assert launch_environment(variables).master_addr == host


@pytest.mark.parametrize(
    "text", ["fe80::1%eth0", "fe80::1", "[fe80::1%2]", "fd00::1%eth0", "[fd00::1", "[a]"]
)
def test_other_texts_are_refused_with_the_variable(text: str) -> None:
    with pytest.raises(LaunchError) as refused:
        plain_host(text, "MASTER_ADDR")
    assert repr(text) in str(refused.value)
    assert "MASTER_ADDR" in str(refused.value)


@pytest.mark.parametrize(
    ("found", "family"),
    [
        ([{"IPv4": "10.0.0.1"}, {"IPv4": "10.0.0.2"}], socket.AF_INET),
        ([{"IPv4": "10.0.0.1", "IPv6": "fd00::1"}, {"IPv6": "fd00::2"}], socket.AF_INET6),
        ([{"IPv6": "fd00::1", "IPv4": "10.0.0.1"}, {"IPv4": "10.0.0.2", "IPv6": "fd00::2"}], socket.AF_INET6),
        ([{}, {"IPv6": "fd00::2"}], socket.AF_INET6),
    ],
)
def test_ranks_take_the_first_family_in_common(
    found: list[dict[str, str]], family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_preferred", None)
    network.agree(found, ["a", "b"])
    assert network._preferred == family


def test_families_of_unlike_hosts_are_named() -> None:
    found = [{"IPv4": "10.0.0.1"}, {"IPv4": "10.0.0.1"}, {"IPv6": "fd00::2"}]
    with pytest.raises(LaunchError, match=r"rank 0 on a has IPv4 10\.0\.0\.1; rank 2 on b has IPv6 fd00::2"):
        network.agree(found, ["a", "a", "b"])
