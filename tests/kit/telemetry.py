"""Readers of what processes report: metrics, event files, spans over OTLP, and pages that Chromium shows."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import shutil
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.types_pb2 import DT_DOUBLE, DT_STRING

from pstesting.processes import ProcessCluster, until
from pswire.cluster import Task
from pswire.telemetry import logging_setup
from tests.kit.internals import MetricsPort, ProcessStatus, Rim, Security, ServerConfig, make_code, traffic
from tests.kit.rig import SOON, Job

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "metrics.md"
ALARMS = ROOT / "configs" / "prometheus" / "alarms.yaml"
COUNTED = (
    *("sessions", "variables", "members", "missing", "differing", "recovering"),
    *("round", "rounds", "checkpoints", "info", "rows"),
)
"""What the last word of a name is that has no unit: things that are counted, and numbers of things."""

_ROW = re.compile(r"^\| `(?P<name>paramserver_\w+)` \| (?P<kind>\w+) \|(?P<labels>[^|]*)\|", re.MULTILINE)


class Page:
    """What somebody serves.

    Args:
        text: the page.
    """

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {family.name: family for family in text_string_to_metric_families(text)}
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    @classmethod
    def at(cls, url: str) -> Page:
        """The page of a URL."""
        with urlopen(url, timeout=10) as answer:
            return cls(answer.read().decode())

    def __call__(self, name: str, **labels: str) -> float:
        """One value."""
        return self._values["paramserver_" + name, frozenset(labels.items())]

    def has(self, name: str, **labels: str) -> bool:
        """Whether there is such a value."""
        return ("paramserver_" + name, frozenset(labels.items())) in self._values

    @property
    def ours(self) -> list[Metric]:
        """Those of this package."""
        return [family for name, family in self.families.items() if name.startswith("paramserver_")]


def metrics_url(job: ProcessCluster, task: Task) -> str:
    """Where a task of a running job serves its metrics, at the port that it has picked; its log is JSON."""
    if task.job == "ps":
        said = " serves metrics at "
        job.until(lambda: any(said in line for line in job.cluster.output(task)))
        (line,) = [line for line in job.cluster.output(task) if said in line]
        line = (logging_setup.read(line) or {"message": line})["message"]
    else:
        found = logging_setup.read(job.hear_error(task, "metrics are at "))
        assert found is not None
        line = found["message"].partition(",")[0]
    return line.rpartition(" ")[2]


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each metric in the tables of the document its kind and its labels."""
    rows = _ROW.finditer(DOCUMENT.read_text(encoding="utf-8"))
    return {row["name"]: (row["kind"], tuple(re.findall(r"`(\w+)`", row["labels"]))) for row in rows}


def queried() -> set[str]:
    """The metrics that the document's queries, and the alarms, ask for."""
    blocks = re.findall(r"```promql\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    blocks.append(ALARMS.read_text(encoding="utf-8"))
    names = {name for block in blocks for name in re.findall(r"paramserver_\w+", block)}
    histograms = {name for name, (kind, _) in documented().items() if kind == "histogram"}
    return {next((whole for whole in histograms if name.startswith(whole + "_")), name) for name in names}


def mistakes(families: Iterable[Metric]) -> list[str]:
    """What Prometheus's conventions have against metrics."""
    found = []
    for family in families:
        unit = family.name.rpartition("_")[2]
        if not family.documentation.endswith("."):
            found.append(f"{family.name} has no sentence")
        if family.type == "counter":
            found += [f"{s.name} is no total" for s in family.samples if not s.name.endswith(("_total", "_created"))]
        elif unit not in ("seconds", "bytes", "ratio", *COUNTED):
            found.append(f"{family.name} has no unit")
        if family.type not in ("counter", "gauge", "histogram"):
            found.append(f"{family.name} is of type {family.type}")
    return found


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)\s*(?:\{(?P<matchers>[^}]*)\})?\s*(?P<call>\()?")
_MATCHER = re.compile(r"\s*(\w+)\s*(?:=~|!~|!=|=)\s*\"\"\s*")
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_WINDOW = re.compile(r"\[[^\]]*\]")

WORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset"}


@dataclass(frozen=True)
class Names:
    """What a query names.

    Attributes:
        metrics: for each metric the labels of its matchers, together.
        labels: the labels by which it groups and joins.
    """

    metrics: dict[str, frozenset[str]]
    labels: frozenset[str]


def names(query: str) -> Names:
    """The names in a query.

    Raises:
        ValueError: its matchers cannot be read.
    """
    bare = _WINDOW.sub("", _STRING.sub('""', query))
    labels = {label for found in _GROUPED.findall(bare) for label in re.findall(r"\w+", found)}
    metrics: dict[str, frozenset[str]] = {}
    for name, matchers in _selectors(_GROUPED.sub(" ", bare)):
        metrics[name] = metrics.get(name, frozenset()) | matchers
    return Names(metrics, frozenset(labels))


def _selectors(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    for found in _SELECTOR.finditer(text):
        if found["name"] in WORDS or found["call"]:
            continue
        parts = [part for part in (found["matchers"] or "").split(",") if part.strip()]
        read = [_MATCHER.fullmatch(part) for part in parts]
        if None in read:
            raise ValueError(f"cannot read the matchers of {found[0]!r}")
        yield found["name"], frozenset(one[1] for one in read if one)


def scalars(directory: Path) -> list[tuple[str, int, float]]:
    """The numbers in a directory's event files: names, steps and values, in the order in which they were written."""
    return [(v.tag, each.step, v.simple_value) for each in _events(directory) for v in each.summary.value]


def _events(directory: Path) -> Iterator[Event]:
    """Records of their length, its sum, the bytes, and their sum."""
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def tensors(directory: Path) -> list[tuple[str, int, str, str, np.ndarray]]:
    """What is in a directory's event files: names, steps, plugins, descriptions and values, as they were written.

    Values are float64, or objects that are bytes; those of `scalar` have no plugin.
    """
    found = []
    for each in _events(directory):
        for v in each.summary.value:
            shape = [dim.size for dim in v.tensor.tensor_shape.dim]
            if not v.HasField("tensor"):
                value = np.float64(v.simple_value)
            elif v.tensor.dtype == DT_DOUBLE:
                value = np.frombuffer(v.tensor.tensor_content, "<f8")
            else:
                assert v.tensor.dtype == DT_STRING
                value = np.array([*v.tensor.string_val, None], object)[:-1]
            plugin, description = v.metadata.plugin_data.plugin_name, v.metadata.summary_description
            found.append((v.tag, each.step, plugin, description, value.reshape(shape)))
    return found


def decoded_png(data: bytes) -> np.ndarray:
    """The pixels of a PNG file whose rows have no filter: uint8, of shape (height, width, channels)."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    rest, chunks = data[8:], []
    while rest:
        (size,) = struct.unpack(">I", rest[:4])
        kind, body, (crc,) = rest[4:8], rest[8 : 8 + size], struct.unpack(">I", rest[8 + size : 12 + size])
        assert crc == zlib.crc32(kind + body)
        chunks.append((kind, body))
        rest = rest[12 + size :]
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, bits, color, *methods = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (bits, methods, chunks[2][1]) == (8, [0, 0, 0], b"")
    channels = {0: 1, 4: 2, 2: 3, 6: 4}[color]
    rows = np.frombuffer(zlib.decompress(chunks[1][1]), np.uint8).reshape(height, 1 + width * channels)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@dataclass(frozen=True)
class Told:
    """One span, as a process told of it.

    Attributes:
        service, process: what the process calls itself: its kind, and its task.
        name: of the span.
        trace, id, parent: in hexadecimal; no parent is "".
        links: for each link trace and span.
        said: its attributes.
        began, ended: in nanoseconds since 1970.
        failed: the description of its error; "" for none.
        kind: of the span, as a number.
    """

    service: str
    process: str
    name: str
    trace: str
    id: str
    parent: str
    links: tuple[tuple[str, str], ...]
    said: dict[str, Any]
    began: int
    ended: int
    failed: str
    kind: int


class Collector:
    """A real receiver on two free ports; a context.

    Attributes:
        http: the endpoint for `http/protobuf`.
        grpc: the endpoint for `grpc`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the spans
        self._spans: list[Told] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                assert self.path == "/v1/traces"
                collector._take(ExportTraceServiceRequest.FromString(data))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                pass

        self._web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._web.serve_forever, daemon=True)
        self.http = f"http://127.0.0.1:{self._web.server_port}"
        self._rpc = grpc.server(ThreadPoolExecutor(2))
        method = grpc.unary_unary_rpc_method_handler(
            self._export, ExportTraceServiceRequest.FromString, ExportTraceServiceResponse.SerializeToString
        )
        service, name = EXPORT[1:].split("/")
        self._rpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
        self.grpc = f"http://127.0.0.1:{self._rpc.add_insecure_port('127.0.0.1:0')}"

    def _export(self, request: Any, context: object) -> Any:
        self._take(request)
        return ExportTraceServiceResponse()

    def _take(self, request: Any) -> None:
        found = []
        for resource in request.resource_spans:
            who = {each.key: each.value.string_value for each in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                links = tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links)
                said = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
                process = who["service.name"], who.get("service.instance.id", "")
                ids = (each.hex() for each in (span.trace_id, span.span_id, span.parent_span_id))
                times = span.start_time_unix_nano, span.end_time_unix_nano
                found.append(Told(*process, span.name, *ids, links, said, *times, span.status.message, span.kind))
        with self._lock:
            self._spans += found

    @property
    def spans(self) -> list[Told]:
        """All spans so far."""
        with self._lock:
            return list(self._spans)

    def traces(self) -> dict[str, list[Told]]:
        """All spans so far by their trace."""
        found: dict[str, list[Told]] = {}
        for span in self.spans:
            found.setdefault(span.trace, []).append(span)
        return found

    def __enter__(self) -> Collector:
        self._thread.start()
        self._rpc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._web.shutdown()
        self._web.server_close()
        self._rpc.stop(None)


TOKEN, OTHER_TOKEN = "a" * 32, "b" * 32


@dataclass
class Got:
    """An answer over HTTP."""

    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Served:
    """A page that is served.

    Attributes:
        port: its port on 127.0.0.1.
        code: a code that is good.
    """

    port: int
    code: str = field(default_factory=lambda: make_code(TOKEN, time.time()))

    def get(self, path: str = "/", method: str = "GET", **headers: str) -> Got:
        """Asks for a path; `Host` and the like may be given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SOON)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): each for name, each in headers.items()})
            answer = connection.getresponse()
            return Got(answer.status, dict(answer.getheaders()), answer.read().decode())
        finally:
            connection.close()

    def look(self) -> Got:
        """Asks for the page with a good code."""
        return self.get(f"/?code={self.code}")


@contextmanager
def page_of(job: Job, token: str = TOKEN) -> Iterator[Served]:
    """Serves the metrics and the page of a job's first server."""
    core = job.servers.cores[0]
    process = ProcessStatus(time.time(), 1 << 20, {}, 1, "", {}, {"shm received": 1 << 21}, 99.0)
    rim = Rim("127.0.0.1:2222", lambda: process, core.events, dict)
    port = MetricsPort(core, traffic(), ServerConfig(core.task, security=Security(token=token)), 0, rim)
    try:
        yield Served(int(port.url.rpartition(":")[2].partition("/")[0]))
    finally:
        port.close()


BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of the browser; None where there is none."""

SECONDS = 60.0
"""Time limit of an answer of the browser: it shares two cores with others."""


class Browser:
    """A browser with one tab; a context manager that leaves nothing behind.

    Args:
        directory: directory for its profile.

    Attributes:
        said: what pages wrote to the console, and which policy they broke.
    """

    def __init__(self, directory: Path) -> None:
        assert BINARY is not None
        self.said: list[str] = []
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        command = [BINARY, *flags, f"--user-data-dir={directory}", "about:blank"]
        # The browser reads file 3, and writes to file 4.
        script = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            ["bash", "-c", script, "-", *command], pass_fds=(to_read, to_write), stdout=quiet, stderr=quiet
        )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._number = 0
        self._session = ""

    def __enter__(self) -> Browser:
        (tab,) = [each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def open(self, url: str) -> None:
        """Loads a page."""
        self._call("Page.navigate", url=url)
        self.until(lambda: self.run("document.readyState") == "complete")

    def run(self, script: str) -> Any:
        """Evaluates an expression of JavaScript, as its tools do: also where the page may run none."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, holds: Callable[[], object]) -> None:
        """Waits until a condition holds."""
        until(lambda: bool(holds()), SECONDS, lambda: "what the page was to show has not come")

    def text(self, place: str = "body") -> str:
        """Returns the text that somebody sees in the element of a selector."""
        return str(self.run(f"document.querySelector({json.dumps(place)})?.innerText ?? ''"))  # none while it loads

    def look(self, width: int = 1200, dark: bool = False, script: bool = True) -> None:
        """Sets the width of the window, the colours that its user likes, and whether pages may run scripts."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Emulation.setScriptExecutionDisabled", value=not script)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        told = {"id": self._number, "method": method, "params": params}
        if self._session:
            told["sessionId"] = self._session
        os.write(self._to, json.dumps(told).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            if message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.said.append(json.dumps(message["params"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))
