"""A collector of OpenTelemetry's protocol, OTLP, over HTTP and over gRPC: keeps the spans that processes export."""

from __future__ import annotations

import gzip
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

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
                found.append(
                    Told(
                        who["service.name"],
                        who.get("service.instance.id", ""),
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        links,
                        said,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.status.message,
                        span.kind,
                    )
                )
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._web.shutdown()
        self._web.server_close()
        self._rpc.stop(None)
