"""Addresses of this host for connections from other hosts, and the family that all ranks use.

A host may have addresses of both families. The one by which this process has reached the job's store is
preferred until the ranks have compared theirs (`agree`); without a store it is IPv4.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from mcr_plus.core.addresses import family_of, is_loopback
from mcr_plus.core.environment import meeting_interface, socket_interface
from mcr_plus.errors import LaunchError

_SIOCGIFADDR: Final = 0x8915
_IPV6: Final = "/proc/net/if_inet6"  # address, index, prefix, scope and flags in hexadecimal; name
_GLOBAL: Final = 0  # scope, also of unique local addresses
_UNUSABLE: Final = 0x40 | 0x08  # IFA_F_TENTATIVE, IFA_F_DADFAILED
_PASSING: Final = 0x20 | 0x01  # IFA_F_DEPRECATED, IFA_F_TEMPORARY
_NAMES: Final = {socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}
_preferred: socket.AddressFamily = socket.AF_INET


def prefer(family: socket.AddressFamily) -> None:
    """Let this process use addresses of this family where it has a choice."""
    global _preferred
    _preferred = family


def host_address() -> str:
    """Return the address of the interface in `GLOO_SOCKET_IFNAME`, else of the first except loopback.

    Raises `LaunchError` with the names of the interfaces if there is none.
    """
    return _address(socket_interface(), "GLOO_SOCKET_IFNAME")


def meeting_address() -> str:
    """Return the host's address for the job's store and heartbeats; MCR_SOCKET_IFNAME takes precedence."""
    own = meeting_interface() != socket_interface()
    return _address(meeting_interface(), "MCR_SOCKET_IFNAME" if own else "GLOO_SOCKET_IFNAME")


def host_addresses() -> dict[str, str]:
    """Return this host's address of each family (`IPv4`, `IPv6`), the preferred family first."""
    found = _found(socket_interface())
    return {_NAMES[family]: found[family] for family in sorted(found, key=lambda each: each != _preferred)}


def agree(found: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    """Prefer the first family of rank 0 that all ranks have an address of; the same on all ranks.

    `found`: `host_addresses` of each rank. Ranks without any are left out: libraries report that if they need
    an address. Raises `LaunchError` if there is no such family, naming ranks and addresses.
    """
    having = {rank: each for rank, each in enumerate(found) if each}
    common = [name for each in having.values() for name in each if all(name in it for it in having.values())]
    if common:
        prefer(next(family for family, name in _NAMES.items() if name == common[0]))
    elif having:
        listed = "; ".join(
            f"rank {rank} on {hosts[rank]} has " + " and ".join(f"{name} {it}" for name, it in each.items())
            for rank, each in having.items()
            if hosts.index(hosts[rank]) == rank
        )
        raise LaunchError(
            f"ranks cannot reach each other, as they have no family of addresses in common: {listed}; name "
            "another interface in GLOO_SOCKET_IFNAME, or give the hosts addresses of one family"
        )


def _address(chosen: str | None, variable: str) -> str:
    found = _found(chosen)
    if found:
        return found.get(_preferred) or next(iter(found.values()))
    expected = f"interface {chosen!r} ({variable})" if chosen else "any interface but loopback"
    names = [name for _, name in socket.if_nameindex()]
    raise LaunchError(
        f"no IPv4 or IPv6 address on {expected} (link-local ones do not count: they need an interface's name "
        f"on each host); interfaces: {', '.join(names)}"
    )


def _found(chosen: str | None) -> dict[socket.AddressFamily, str]:
    """Return the first address of each family on the chosen interface, or on any except loopback."""
    found: dict[socket.AddressFamily, str] = {}
    for name in [chosen] if chosen else [name for _, name in socket.if_nameindex()]:
        for address in filter(None, [_ipv4(name), *_ipv6(name)]):
            if chosen or not is_loopback(address):
                found.setdefault(family_of(address), address)
    return found


def _ipv4(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def _ipv6(name: str) -> list[str]:
    """Return the addresses of an interface that other hosts may use, the most lasting first."""
    try:
        with open(_IPV6) as file:
            rows = [row.split() for row in file]
    except OSError:  # a kernel without IPv6
        return []
    usable = [
        (int(flags, 16) & _PASSING, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
        for address, _, _, scope, flags, interface in rows
        if interface == name
        and (int(scope, 16) == _GLOBAL or name == "lo")
        and not int(flags, 16) & _UNUSABLE
    ]
    return [address for _, address in sorted(usable, key=lambda each: each[0])]
