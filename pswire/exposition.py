"""Metrics as Prometheus asks for them, for both sides: rows as families, and a page that waits for nobody."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pswire.cluster import join_address
from pswire.errors import ConfigError
from pswire.histogram import Histogram
from pswire.metrics import Row, Source

log = logging.getLogger(__name__)

SILENT_SECONDS = 10.0
"""How long who has connected may say nothing: it has a thread and a file of ours."""

KINDS: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def families(rows: Sequence[Row[Source]], source: Source) -> Iterator[Metric]:
    """What there is now, for a collector of `prometheus_client`.

    Args:
        rows: the metrics.
        source: what they are read of.
    """
    for row in rows:
        family = KINDS[row.kind](row.name, row.about, labels=row.labels)
        for labels, value in row.read(source).items():
            if isinstance(value, Histogram):
                family.add_metric(labels, value.buckets(), value.total)
            else:
                family.add_metric(labels, value)
        yield family


def harden(server: Any) -> None:
    """Has an HTTP server of `prometheus_client` let go of who says nothing, and print nothing about who goes away."""
    server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": SILENT_SECONDS})
    server.handle_error = _note


def refused(host: str, port: int, error: OSError) -> ConfigError:
    """Why metrics cannot be served at an address, for who has said where."""
    return ConfigError(
        f"cannot serve metrics at {join_address(host, port)} ({error.strerror or error}); choose another "
        "--metrics-port or --metrics-host"
    )


def end(serving: Any) -> None:
    """Ends what `prometheus_client.start_http_server` has begun: the server and its thread."""
    server, thread = serving
    server.shutdown()
    thread.join()
    server.server_close()


def _note(request: object, address: object) -> None:
    log.debug("who asked for metrics has gone away", exc_info=True)
