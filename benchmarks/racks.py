"""Racks of "hosts" on one machine: network namespaces on Linux bridges, and an uplink of each rack.

    python benchmarks/racks.py --racks 2 --hosts 2 --rate 100mbit --uplink 50mbit -- python program.py

    with Racks(2, 2, "100mbit", "50mbit") as racks:
        racks.torchrun([sys.executable, "program.py"])      # or racks.mpirun(…)

Every host has an address, a host name and an interface of its own, which sends and receives at `rate`. The
hosts of a rack are joined by a switch without a limit of its own; racks are joined by a further switch, to
which each has an uplink of the rate `uplink` in both directions. Ranks count along the racks: with one rank
per host, ranks 0 and 1 are in the first rack here, and 2 and 3 in the second. Two cores carry about
800 Mbit/s in all (hosts times rate). Needs root and iproute2, and Open MPI for `--launcher mpi`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Annotated, Final

import typer
from hosts import Hosts, inside, need_hosts, shape

NETWORK: Final = "10.77.0.0/16"
_SPINE: Final = "spine"
_MOST: Final = 250
_BURST_S: Final = 0.002  # of a rate, that may be sent at once
_LEAST_BURST: Final = 16_000  # bytes
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def bits_per_second(rate: str) -> float:
    """The rate that `tc` reads from a text such as 100mbit; raises `ValueError` for another unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if match is None:
        raise ValueError(f"rate {rate!r}: expected a number and bit, kbit, mbit or gbit, as in 100mbit")
    return float(match[1]) * _UNITS[match[2]]


class Racks(Hosts):
    """`racks` racks of `hosts` hosts each.

    `rate`: of each host's interface, or a list of those of all, `uplink`: of each rack's uplink, as `tc`
    writes them; None for no limit. Raises `ValueError` for numbers below 1 or above 250, and for rates in
    other units.
    """

    def __init__(
        self, racks: int, hosts: int, rate: str | Sequence[str] | None = None, uplink: str | None = None
    ) -> None:
        for what, number in (("racks", racks), ("hosts", hosts)):
            if not 1 <= number <= _MOST:
                raise ValueError(f"{what}: expected 1 to {_MOST}, got {number}")
        self.racks, self.hosts, self.uplink = racks, hosts, uplink
        self.rates = [rate] * (racks * hosts) if rate is None or isinstance(rate, str) else list(rate)
        self._bursts = {each: _burst(each) for each in (*self.rates, uplink) if each is not None}
        places = [(rack, host) for rack in range(racks) for host in range(hosts)]
        pid = os.getpid()
        super().__init__(
            [f"mcr-r{rack}h{host}-{pid}" for rack, host in places],
            [f"h{index}" for index in range(len(places))],
            [f"10.77.{rack}.{host + 1}" for rack, host in places],
            NETWORK,
        )
        self._switches = f"mcr-switches-{pid}"
        self.others = (self._switches,)

    def connect(self) -> None:
        """Make the switches, and the links of hosts and racks to them."""
        if self.racks > 1:
            self._switch(_SPINE)
        for rack in range(self.racks):
            self._switch(f"rack{rack}")
            if self.racks > 1:
                pair = (f"up{rack}", f"down{rack}")
                inside(self._switches, "ip", "link", "add", pair[0], "type", "veth", "peer", "name", pair[1])
                for link, switch in zip(pair, (f"rack{rack}", _SPINE), strict=True):
                    self._plug(link, switch, self.uplink)
        for index, (name, link, address) in enumerate(
            zip(self.names, self.links, self.addresses, strict=True)
        ):
            port = f"port{index}"
            inside(
                self._switches, "ip", "link", "add", port, "type", "veth", "peer", "name", link, "netns", name
            )
            self._plug(port, f"rack{index // self.hosts}", self.rates[index])
            inside(name, "ip", "address", "add", f"{address}/16", "dev", link)
            inside(name, "ip", "link", "set", link, "up")
            self._shape(name, link, self.rates[index])
            # CUBIC takes the queue of a slow link for congestion, and then sends less than it carries.
            inside(name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
            inside(name, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")

    def unplug(self, host: int) -> None:
        """Pull a host's cable at the switch: all that its interface sends is lost, without an error."""
        inside(self._switches, "ip", "link", "set", f"port{host}", "nomaster")

    def plug(self, host: int) -> None:
        """Undo `unplug`."""
        inside(self._switches, "ip", "link", "set", f"port{host}", "master", f"rack{host // self.hosts}")

    def _switch(self, name: str) -> None:
        inside(self._switches, "ip", "link", "add", name, "type", "bridge")
        inside(self._switches, "ip", "link", "set", name, "up")

    def _plug(self, link: str, switch: str, rate: str | None) -> None:
        """Connect an interface to a switch, which sends to it at `rate`."""
        inside(self._switches, "ip", "link", "set", link, "master", switch)
        inside(self._switches, "ip", "link", "set", link, "up")
        self._shape(self._switches, link, rate)

    def _shape(self, name: str, link: str, rate: str | None) -> None:
        if rate is not None:
            shape(name, link, rate, self._bursts[rate])


def _burst(rate: str) -> str:
    """What may be sent at once: little, so that messages of some KiB take the time of the link's rate."""
    return str(max(round(bits_per_second(rate) / 8 * _BURST_S), _LEAST_BURST))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=__doc__)
def main(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after --.")],
    racks: Annotated[int, typer.Option(min=1, max=_MOST)] = 2,
    hosts: Annotated[int, typer.Option(min=1, max=_MOST, help="Of each rack.")] = 2,
    per_host: Annotated[int, typer.Option(min=1, help="Ranks of a host.")] = 1,
    rate: Annotated[str | None, typer.Option(help="Of each host, as tc writes it: 100mbit.")] = None,
    uplink: Annotated[str | None, typer.Option(help="Of each rack.")] = None,
    launcher: Annotated[str, typer.Option(help="torchrun (its variables, any program) or mpi.")] = "torchrun",
) -> None:
    if launcher not in ("torchrun", "mpi"):
        raise SystemExit(f"--launcher {launcher!r}: expected torchrun or mpi")
    need_hosts(mpi=launcher == "mpi")
    try:
        made = Racks(racks, hosts, rate, uplink)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    with made:
        if launcher == "mpi":
            raise SystemExit(made.mpirun(command, per_host=per_host, check=False).returncode)
        made.torchrun(command, per_host=per_host)


if __name__ == "__main__":
    app()
