"""Metrics of a rank's operations, summed as operations complete, under the names of NCCL Inspector.

Inspector (`plugins/profiler/inspector` of NCCL) publishes a bus bandwidth and a time for each kind, size
range, communicator and algorithm; dashboards for Inspector show the operations of mcr_plus too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from mcr_plus.core.kinds import PLAIN, bus_factor, collective
from mcr_plus.engine.hook import OperationHook

if TYPE_CHECKING:
    from mcr_plus.core.kinds import Kind
    from mcr_plus.engine.operation import BoundOperation
    from mcr_plus.engine.work import IssuedWork
    from mcr_plus.rendezvous.world import World

_NCCL_NAMES: Final[Mapping[Kind, str]] = {
    **{kind: kind.title().replace("_", "") for kind in PLAIN},
    "all_to_all": "AlltoAll",
}
Labels = tuple[tuple[str, str], ...]
_UNITS: Final = ("B", "KB", "MB", "GB", "TB")
_STEP: Final = 1024


@dataclass(frozen=True)
class Family:
    """One metric: a value for each combination of labels.

    `name`: the name without the `_total` that Prometheus adds to counters.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    unit: str
    samples: dict[Labels, float] = field(default_factory=dict)


def families() -> dict[str, Family]:
    """Return every metric by its name, without values."""
    gauges = {
        "nccl_bus_bandwidth_gbs": ("bus bandwidth of collectives, geometric mean", "GB/s"),
        "nccl_collective_algobw_gbs": ("algorithm bandwidth of collectives, geometric mean", "GB/s"),
        "nccl_collective_exec_time_microseconds": (
            "time of collectives from issue to completion, mean",
            "us",
        ),
        "nccl_p2p_bus_bandwidth_gbs": ("bandwidth of sends and receives, geometric mean", "GB/s"),
        "nccl_p2p_exec_time_microseconds": ("time of sends and receives, mean", "us"),
        "mcr_codec": ("bytes that a codec hands to the library for each byte of payload", "1"),
    }
    counters = {
        "mcr_operations": ("operations that have completed", "1"),
        "mcr_payload_bytes": ("bytes of their payload, before codecs", "By"),
        "mcr_wire_bytes": ("bytes that libraries were handed for it", "By"),
        "mcr_waited_seconds": ("time that the program has waited for them", "s"),
    }
    return {
        **{name: Family(name, "gauge", *rest) for name, rest in gauges.items()},
        **{name: Family(name, "counter", *rest) for name, rest in counters.items()},
    }


def size_range(nbytes: int) -> str:
    """Return Inspector's size range for `nbytes`, such as `4-5GB`; its units are powers of 1024."""
    if nbytes <= 0:
        return "0B"
    unit = min((nbytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    lower = nbytes // _STEP**unit
    return f"{lower}-{lower + 1}{_UNITS[unit]}"


class _Key(NamedTuple):
    """Key for sums of operations before they get labels: equal keys have equal labels."""

    operation: BoundOperation
    ran_on: str
    codec: str | None
    payload: int
    wire: int


class _Sums:
    """Sums of one key's operations in a window: count, seconds, logarithms of the seconds, waits."""

    __slots__ = ("count", "log_seconds", "seconds", "waited")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.log_seconds = 0.0
        self.waited = 0.0


@dataclass
class _Mean:
    """The gauges of one combination of labels in a window; logarithms are of GB/s."""

    count: int = 0
    seconds: float = 0.0
    log_algbw: float = 0.0
    timed: int = 0
    factor: float = 1.0


class Metrics(OperationHook):
    """The sums of one rank's operations.

    The engine calls `ended` for each completed operation, in any thread; it adds a few numbers. `take` adds
    labels to the sums since its last call; one other thread may call it.
    """

    def __init__(self, world: World, *, version: str, job: str) -> None:
        """Set up for the labels `version` (`version`) and `slurm_job_id` (`job`)."""
        hosts, rank = world.hosts, world.rank
        self._hosts = hosts
        self._local = hosts[:rank].count(hosts[rank])
        self._common = (("version", version), ("slurm_job_id", job), ("node", hosts[rank]))
        self._lock = threading.Lock()
        self._window: dict[_Key, _Sums] = {}
        self._families = families()

    def ended(self, work: IssuedWork) -> None:
        """Add a completed operation; failed ones and those begun before the start do not count."""
        issued, done = work.t_issue, work.t_done
        if not issued or done is None or work.error is not None:
            return
        message, operation = work.message, work.operation
        wire = operation.signature.nbytes
        if wire is None:
            wire = message.own_bytes()
        payload = message.uncompressed_bytes
        key = _Key(operation, work.ran_on, message.codec, wire if payload is None else payload, wire)
        seconds = max(done - issued, 1e-9)
        with self._lock:
            sums = self._window.get(key)
            if sums is None:
                sums = self._window[key] = _Sums()
            sums.count += 1
            sums.seconds += seconds
            sums.log_seconds += math.log(seconds)
            if work.t_wait < done:
                sums.waited += done - work.t_wait

    def take(self) -> tuple[Family, ...]:
        """Return all metrics: counters of all operations, gauges of the operations since the last call.

        A gauge without operations since then keeps its value.
        """
        with self._lock:
            window, self._window = self._window, {}
        means: dict[tuple[bool, Labels], _Mean] = {}
        for key, sums in window.items():
            signature = key.operation.signature
            labels = self._labels(key)
            name, choice = _NCCL_NAMES[collective(signature.kind).kind], ("algo_proto", _choice(key))
            self._count(key, sums, (*labels, ("collective", name), choice, ("codec", key.codec or "none")))
            labels = (
                (*labels, ("p2p_operation", name))
                if signature.is_p2p
                else (*labels, ("collective", name), choice)
            )
            mean = means.setdefault((signature.is_p2p, labels), _Mean())
            mean.count += sums.count
            mean.seconds += sums.seconds
            if key.payload:
                mean.timed += sums.count
                mean.log_algbw += sums.count * math.log(key.payload / 1e9) - sums.log_seconds
                mean.factor = bus_factor(signature.kind, signature.ranks)
        for (is_p2p, labels), mean in means.items():
            self._show(is_p2p, labels, mean)
        return tuple(replace(each, samples=dict(each.samples)) for each in self._families.values())

    def _count(self, key: _Key, sums: _Sums, labels: Labels) -> None:
        added = {
            "mcr_operations": sums.count,
            "mcr_payload_bytes": sums.count * key.payload,
            "mcr_wire_bytes": sums.count * key.wire,
            "mcr_waited_seconds": sums.waited,
        }
        for name, value in added.items():
            samples = self._families[name].samples
            samples[labels] = samples.get(labels, 0.0) + value
        payload = self._families["mcr_payload_bytes"].samples[labels]
        if key.codec is not None and payload:
            wire = self._families["mcr_wire_bytes"].samples[labels]
            self._families["mcr_codec"].samples[labels] = wire / payload

    def _show(self, is_p2p: bool, labels: Labels, mean: _Mean) -> None:
        shown = {"exec_time_microseconds": mean.seconds / mean.count * 1e6}
        if mean.timed:
            algbw = math.exp(mean.log_algbw / mean.timed)
            shown |= {"bus_bandwidth_gbs": algbw * mean.factor}
            if not is_p2p:
                self._families["nccl_collective_algobw_gbs"].samples[labels] = algbw
        for name, value in shown.items():
            of_collective = "nccl_" if name == "bus_bandwidth_gbs" else "nccl_collective_"
            self._families[("nccl_p2p_" if is_p2p else of_collective) + name].samples[labels] = value

    def _labels(self, key: _Key) -> Labels:
        """Return the labels that all metrics have. Sizes are of a rank's part, as `count` in NCCL's calls."""
        signature, ranks = key.operation.signature, key.operation.state.group.ranks
        is_shared = collective(signature.kind).is_shared and signature.nbytes is not None
        device = "CPU" if signature.device == "cpu" else "GPU"
        return (
            *self._common,
            ("gpu", f"{device}{self._local}"),
            ("comm_name", signature.group),
            ("n_nodes", str(len({self._hosts[rank] for rank in ranks}))),
            ("nranks", str(signature.ranks)),
            ("message_size", size_range(key.payload // signature.ranks if is_shared else key.payload)),
        )


def _choice(key: _Key) -> str:
    """Return the library, with its algorithm if one is chosen: `msccl:ring`."""
    signature = key.operation.signature
    return signature.choice if key.ran_on in ("", signature.backend) else key.ran_on
