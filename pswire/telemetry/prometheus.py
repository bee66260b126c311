"""A page of metrics as Prometheus asks for them, that waits for nobody; loaded only where one is served."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from pswire.cluster import join_address
from pswire.errors import ConfigError
from pswire.telemetry.metrics import Histogram, Reading, Row
from pswire.telemetry.web_server import Answer, HttpReply, Request, WebServer

PATH = "/metrics"
"""The path of the page, as Prometheus asks for it by default."""

HEALTH = "/healthz"
"""The path that probes ask."""

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
        beside: what else the port answers, by path.
        well: returns True if the process serves; called in any thread.
        context: as in `WebServer`.

    Raises:
        ConfigError: the port cannot be had.

    Attributes:
        url: URL of the page.
    """

    def __init__(
        self,
        host: str,
        port: int,
        readings: Readings,
        beside: Mapping[str, Answer] | None = None,
        well: Callable[[], bool] = lambda: True,
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        registry = CollectorRegistry()
        registry.register(Metrics(readings))
        registry.register(REGISTRY)
        metrics = partial(_answer, make_wsgi_app(registry))
        answers: dict[str, Answer] = {PATH: metrics, HEALTH: partial(_answer_probe, well), **(beside or {})}
        try:
            self._server = WebServer(host.strip("[]"), port, answers, context)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics at {join_address(host, port)} ({error.strerror or error}); choose another "
                "--metrics-port or --metrics-host"
            ) from error
        self.url = f"{'https' if context else 'http'}://{join_address(host, self._server.server_port)}{PATH}"

    def close(self) -> None:
        """Stops serving."""
        self._server.close()


def _answer(app: Callable[..., Iterable[bytes]], request: Request) -> HttpReply:
    """Lets Prometheus's own application answer, which knows its formats and compression."""
    said: list[tuple[str, str]] = []
    headers = {"HTTP_" + name.upper().replace("-", "_"): value for name, value in request.headers.items()}
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": PATH, "QUERY_STRING": request.query, **headers}
    body = b"".join(app(environ, lambda status, headers: said.extend(headers)))
    return HttpReply(body, headers=dict(said))


def _answer_probe(well: Callable[[], bool], request: Request) -> HttpReply:
    serves = well()
    return HttpReply(b"serving\n" if serves else b"not serving\n", "text/plain", 200 if serves else 503)


def _buckets(value: Histogram) -> Sequence[Sequence[Any]]:
    """Returns the buckets, some with an exemplar, which only OpenMetrics' format shows."""
    known = value.exemplars.copy()  # another thread may add one
    exemplars = {number: Exemplar(dict(labels), size) for number, (labels, size) in known.items()}
    return [(*each, exemplars.get(number)) for number, each in enumerate(value.buckets())]


def _family(row: Row[Any], source: Any) -> Metric:
    family = KINDS[row.kind](row.name, row.about, labels=row.labels)
    for labels, value in row.read(source).items():
        if isinstance(value, Histogram):
            family.add_metric(labels, _buckets(value), value.total)
        else:
            family.add_metric(labels, value)
    return cast(Metric, family)
