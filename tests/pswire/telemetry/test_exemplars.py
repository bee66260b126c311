"""Histograms lead to traces where a scrape asks for OpenMetrics, and the plain format stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pswire.telemetry.metrics import ALL, Histogram, Row
from pswire.telemetry.prometheus import Page

LABELS = {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def pages() -> Iterator[tuple[Page, Page]]:
    """Pages of the same values, with and without exemplars."""
    traced, plain = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for value, labels in ((0.5, None), (0.75, LABELS), (1.5, None), (7.0, LABELS)):
        traced.observe(value, labels)
        plain.observe(value)
    rows = [Row("paramserver_test_seconds", "histogram", "A test's.", lambda found: {ALL: found})]
    found = [Page("127.0.0.1", 0, lambda of=each: [(rows, of)]) for each in (traced, plain)]
    yield found[0], found[1]
    for page in found:
        page.close()


def asked(page: Page, accept: str) -> tuple[str, list[str]]:
    with urlopen(Request(page.url, headers={"Accept": accept}), timeout=10) as answer:
        text = answer.read().decode()
        return text, [line for line in text.splitlines() if "paramserver_test" in line]


def test_openmetrics_has_exemplars(pages):
    """A bucket has the last value in it that was traced, with its trace."""
    text, _ = asked(pages[0], OPENMETRICS)
    (family,) = [each for each in text_string_to_metric_families(text) if each.name == "paramserver_test_seconds"]
    found = {sample.labels["le"]: sample.exemplar for sample in family.samples if "le" in sample.labels}
    assert found["1.0"].labels == LABELS
    assert {bound: each and each.value for bound, each in found.items()} == {"1.0": 0.75, "2.0": None, "+Inf": 7.0}


def test_the_plain_format_stays_as_it_is(pages):
    """No exemplar, and not a character else."""
    traced, plain = (asked(page, "text/plain; version=0.0.4")[1] for page in pages)
    assert traced == plain
    assert not any("trace_id" in line for line in traced)
    _, without = asked(pages[1], OPENMETRICS)
    assert not any("#" in line and "trace_id" in line for line in without)
