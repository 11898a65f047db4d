"""Sinks that Prometheus reads: a file for node_exporter, or a port on loopback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from mcr_plus.core.environment import LOOPBACK
from mcr_plus.errors import short
from mcr_plus.hosts.acceptor import WITHIN
from mcr_plus.observe.sinks import Sink, SinkOption, require

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

    from mcr_plus.observe.metrics import Family

_PORTS: Final = range(1, 65536)


class _Collector:
    """The metrics published last, as prometheus_client requests them."""

    def __init__(self) -> None:
        self.metrics: Sequence[Family] = ()

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in self.metrics:
            if family.samples:
                names = [name for name, _ in next(iter(family.samples))]
                kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
                metric = kind(family.name, family.help, labels=names)
                for labels, value in family.samples.items():
                    metric.add_metric([text for _, text in labels], value)
                yield metric


class TextFile(Sink):
    """A file for the textfile collector of node_exporter, replaced atomically. It stays after the job."""

    def __init__(self, path: Path) -> None:
        """Open the file; raise `OSError` if it cannot be written."""
        self.name = f"observe.prometheus: {path}"
        self._path = path
        self._collector, self._registry = _registry()
        self.publish(())

    def publish(self, metrics: Sequence[Family]) -> None:
        """See `Sink.publish`."""
        from prometheus_client import write_to_textfile

        self._collector.metrics = metrics
        write_to_textfile(str(self._path), self._registry)


class Port(Sink):
    """A port on loopback from which Prometheus scrapes."""

    def __init__(self, port: int) -> None:
        """Open the port; raise `OSError` if it is in use."""
        from prometheus_client import start_http_server

        self.name = f"observe.prometheus: port {port}"
        self._collector, registry = _registry()
        self._server, self._thread = start_http_server(port, LOOPBACK, registry)
        server = cast("Any", self._server)
        # Without a timeout, a silent connection would keep its thread.
        server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": WITHIN})

    def publish(self, metrics: Sequence[Family]) -> None:
        """See `Sink.publish`."""
        self._collector.metrics = metrics

    def close(self) -> None:
        """See `Sink.close`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def abandon(self) -> None:
        """See `Sink.abandon`."""
        self._server.socket.close()


def _registry() -> tuple[_Collector, CollectorRegistry]:
    from prometheus_client import CollectorRegistry

    collector, registry = _Collector(), CollectorRegistry(auto_describe=False)
    asked: Any = collector  # it has the one method that is called
    registry.register(asked)
    return collector, registry


def _file_or_port(value: object) -> object:
    is_port = isinstance(value, int) and not isinstance(value, bool) and value in _PORTS
    if is_port or (isinstance(value, str) and value.endswith(".prom") and "\0" not in value):
        return value
    raise ValueError(
        f"expected a file that ends with .prom, as node_exporter reads no others, or a port from 1 to 65535, "
        f"got {short(value)}"
    )


def _open(target: str | int, rank: int, local: int) -> Sink:
    require("prometheus_client", "prometheus-client")
    port = target + local if isinstance(target, int) else 0
    path = None if isinstance(target, int) else Path(target).with_stem(f"{Path(target).stem}_rank{rank}")
    try:
        return TextFile(path) if path else Port(port)
    except OSError as error:
        action = f"write {str(path)!r}" if path else f"listen on port {port} of {LOOPBACK}"
        raise OSError(error.errno, f"cannot {action}: {error.strerror}") from None


PROMETHEUS: Final = SinkOption(_file_or_port, _open)
