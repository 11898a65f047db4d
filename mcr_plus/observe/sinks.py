"""Sinks for metrics: a file, a port, an OpenTelemetry collector."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast
from urllib.parse import urlsplit

from mcr_plus.core.environment import LOOPBACK
from mcr_plus.errors import ConfigError, Unsupported
from mcr_plus.hosts.acceptor import WITHIN
from mcr_plus.observe.metrics import Family, families

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

_EXTRA: Final = "pip install 'mcr_plus[metrics]' brings it"
_OTLP_TIMEOUT: Final = 2.0  # seconds of one export
_OTLP_LOGGER: Final = "opentelemetry.exporter.otlp.proto.http.metric_exporter"


class Sink(Protocol):
    """A place where metrics are published.

    Attributes:
        name: the name in messages.
        waits: whether publishing may wait for another process.
    """

    name: str
    waits: bool

    def publish(self, metrics: Sequence[Family]) -> None:
        """Publish; raise any error if that fails."""

    def close(self) -> None:
        """Release open resources."""

    def abandon(self) -> None:
        """Release the parent's resources in a forked child, without disturbing the parent."""


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


class TextFile:
    """A file for the textfile collector of node_exporter, replaced atomically. It stays after the job."""

    waits = False

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

    def close(self) -> None:
        """See `Sink.close`."""

    def abandon(self) -> None:
        """See `Sink.abandon`."""


class Port:
    """A port on loopback from which Prometheus scrapes."""

    waits = False

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


class Otlp:
    """A collector of OpenTelemetry, over HTTP."""

    waits = True

    def __init__(self, url: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        endpoint = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1/metrics"
        self.name = f"observe.otlp: {endpoint}"
        self._exporter = OTLPMetricExporter(endpoint=endpoint, timeout=_OTLP_TIMEOUT)
        self._reader = InMemoryMetricReader()
        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME take precedence.
        resource = Resource({"service.name": "mcr_plus"}).merge(OTELResourceDetector().detect())
        self._provider = MeterProvider([self._reader], resource=resource, shutdown_on_exit=False)
        self._metrics: dict[str, Family] = families()
        meter = self._provider.get_meter("mcr_plus")
        for family in self._metrics.values():
            create: Callable[..., Any] = meter.create_observable_gauge
            if family.kind == "counter":
                create = meter.create_observable_counter
            create(family.name, [self._observe(family.name)], family.unit, family.help)

    def _observe(self, name: str) -> Callable[[Any], Iterable[Any]]:
        from opentelemetry.metrics import Observation

        def observations(options: Any) -> Iterable[Any]:  # noqa: ARG001 - the interface of callbacks
            for labels, value in self._metrics[name].samples.items():
                yield Observation(value, dict(labels))

        return observations

    def publish(self, metrics: Sequence[Family]) -> None:
        """See `Sink.publish`."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        self._metrics.update({family.name: family for family in metrics})
        data = self._reader.get_metrics_data()
        with _silent(_OTLP_LOGGER):  # it logs every failed export; the publisher logs once
            if data is not None and self._exporter.export(data) is not MetricExportResult.SUCCESS:
                raise ConnectionError("the collector has not accepted the metrics")

    def close(self) -> None:
        """See `Sink.close`."""
        self._exporter.shutdown()
        self._provider.shutdown()

    def abandon(self) -> None:
        """See `Sink.abandon`."""


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Drop log records of this thread under a name."""
    logger, thread = logging.getLogger(name), threading.get_ident()

    def is_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_others)
    try:
        yield
    finally:
        logger.removeFilter(is_others)


def _registry() -> tuple[_Collector, CollectorRegistry]:
    from prometheus_client import CollectorRegistry

    collector, registry = _Collector(), CollectorRegistry(auto_describe=False)
    asked: Any = collector  # it has the one method that is called
    registry.register(asked)
    return collector, registry


def require(module: str, package: str) -> None:
    """Raise `Unsupported` if a package of the extra `metrics` is not installed."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        found = False
    if not found:
        raise Unsupported(f"needs {package}, which is not installed; {_EXTRA}")


def open_sinks(prometheus: str | int | None, otlp: str | None, *, rank: int, local: int) -> list[Sink]:
    """Open the configured sinks of a rank; `local` is its rank on its host.

    Raises `ConfigError` if one cannot be opened; then none stays open.
    """
    sinks: list[Sink] = []
    option = "prometheus"
    try:
        if prometheus is not None:
            require("prometheus_client", "prometheus-client")
            sinks.append(_prometheus(prometheus, rank, local))
        option = "otlp"
        if otlp is not None:
            require("opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http")
            require("opentelemetry.sdk.metrics", "opentelemetry-sdk")
            sinks.append(Otlp(otlp))
    except (OSError, OverflowError, Unsupported) as error:
        for sink in sinks:
            sink.close()
        text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"observe.{option}: {text}") from None
    return sinks


def _prometheus(target: str | int, rank: int, local: int) -> Sink:
    if isinstance(target, str):
        path = Path(target)
        path = path.with_name(f"{path.stem}_rank{rank}{path.suffix}")
        try:
            return TextFile(path)
        except OSError as error:
            raise OSError(error.errno, f"cannot write {str(path)!r}: {error.strerror}") from None
    port = target + local
    try:
        return Port(port)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on port {port} of {LOOPBACK}: {error.strerror}") from None
