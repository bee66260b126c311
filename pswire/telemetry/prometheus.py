"""A page of metrics as Prometheus asks for them, that waits for nobody; loaded only where one is served.

Beside it is a page for probes that speak plain HTTP alone, as Kubernetes' do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pswire.cluster import join_address
from pswire.errors import ConfigError
from pswire.telemetry.metrics import Histogram, Reading, Row

log = logging.getLogger("pswire")

HEALTH = "/healthz"
"""The path of the page for probes."""

SILENT_SECONDS = 10.0
"""Seconds that a connection may be silent: it has a thread and a file of ours."""

KINDS: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}

Readings = Callable[[], Iterable[Reading]]
"""Gives what there is to read."""


class Metrics(Collector):
    """Reads metrics, in the thread that asks.

    Args:
        readings: returns the rows and the sources of the metrics.
    """

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        for rows, source in self._readings():
            for row in rows:
                yield _family(row, source)


class Page:
    """Metrics over HTTP, with those of the process and of whatever else it counts with `prometheus_client`.

    At `HEALTH` it answers 200 while the process serves, else 503.

    Args:
        host: address to listen on.
        port: port to listen on; 0 picks one.
        readings: returns the rows and the sources of our metrics.
        well: returns True if the process serves; called in any thread.

    Raises:
        ConfigError: the port cannot be had.

    Attributes:
        url: URL of the page.
    """

    def __init__(self, host: str, port: int, readings: Readings, well: Callable[[], bool] = lambda: True) -> None:
        registry = CollectorRegistry()
        registry.register(Metrics(readings))
        registry.register(REGISTRY)
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics at {join_address(host, port)} ({error.strerror or error}); choose another "
                "--metrics-port or --metrics-host"
            ) from error
        _harden(self._server)
        self._server.set_app(_beside_health(self._server.get_app(), well))
        self.url = f"http://{join_address(host, self._server.server_port)}/metrics"

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _family(row: Row[Any], source: Any) -> Metric:
    family = KINDS[row.kind](row.name, row.about, labels=row.labels)
    for labels, value in row.read(source).items():
        if isinstance(value, Histogram):
            family.add_metric(labels, value.buckets(), value.total)
        else:
            family.add_metric(labels, value)
    return cast(Metric, family)


def _beside_health(metrics: Any, well: Callable[[], bool]) -> Any:
    """A WSGI application that answers probes itself, and leaves all else to another one."""

    def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] != HEALTH:
            return cast(Iterable[bytes], metrics(environ, start_response))
        serves = well()
        start_response("200 OK" if serves else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"serving\n" if serves else b"not serving\n"]

    return answer


def _harden(server: Any) -> None:
    """Lets go of who says nothing, and prints nothing about who goes away."""
    server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": SILENT_SECONDS})
    server.handle_error = _note


def _note(request: object, address: object) -> None:
    log.debug("who asked for metrics has gone away", exc_info=True)
