"""Addresses of hosts as text: IPv4, IPv6 and names, and places, which have a port too."""

from __future__ import annotations

import ipaddress
import socket

from mcr_plus.errors import LaunchError


def plain_host(text: str, variable: str) -> str:
    """Return a name or address without brackets: `fd00::1` of `[fd00::1]`, which resolvers do not know.

    Raises `LaunchError`, naming `variable`, for brackets around anything else, and for link-local IPv6
    addresses: their scope (`%eth0`) names an interface of one host, and other hosts have other scopes.
    """
    host = text.strip()
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if bracketed or "%" in host or "[" in host:
            raise LaunchError(f"{variable}={text!r}: expected a name or an address such as fd00::1") from None
        return host
    if isinstance(address, ipaddress.IPv6Address) and (address.is_link_local or address.scope_id):
        raise LaunchError(
            f"{variable}={text!r}: a link-local address, or a scope, means something on one host only; give "
            "a name, or a global or unique local address of that host, such as fd00::1"
        )
    return host


def place_text(host: str, port: int | None) -> str:
    """Return host and port as text, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def place_of_text(text: str) -> tuple[str, int]:
    """Return host and port of what `place_text` has written."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an address in numbers."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this host's own and no other host can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
