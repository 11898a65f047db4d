"""Sink for metrics: a collector of OpenTelemetry, over HTTP."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from mcr_plus.errors import short
from mcr_plus.observe.metrics import Family, families
from mcr_plus.observe.sinks import Sink, SinkOption, require

_TIMEOUT: Final = 2.0  # seconds of one export
_LOGGER: Final = "opentelemetry.exporter.otlp.proto.http.metric_exporter"


class Otlp(Sink):
    """A collector of OpenTelemetry, over HTTP."""

    waits = True

    def __init__(self, url: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        endpoint = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1/metrics"
        self.name = f"observe.otlp: {endpoint}"
        self._exporter = OTLPMetricExporter(endpoint=endpoint, timeout=_TIMEOUT)
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
        with _silent(_LOGGER):  # it logs every failed export; the publisher logs once
            if data is not None and self._exporter.export(data) is not MetricExportResult.SUCCESS:
                raise ConnectionError("the collector has not accepted the metrics")

    def close(self) -> None:
        """See `Sink.close`."""
        self._exporter.shutdown()
        self._provider.shutdown()


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


def _url(value: object) -> object:
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return value
    except ValueError:  # not a port number
        pass
    raise ValueError(f"expected a URL such as http://localhost:4318, got {short(value)}")


def _open(url: str, rank: int, local: int) -> Otlp:  # noqa: ARG001 - as of all sinks
    require("opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http")
    require("opentelemetry.sdk.metrics", "opentelemetry-sdk")
    return Otlp(url)


OTLP: Final = SinkOption(_url, _open)
