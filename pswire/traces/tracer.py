"""Spans, and their export to OpenTelemetry's collector. Loaded where traces are on; all else here is free of it.

A process has a provider of its own, and leaves the global one to the user. Both share OpenTelemetry's context: a span
of the user's that is current is the parent of a step, and within a step the step is current.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module

from opentelemetry import context, trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from pswire.cluster import Task
from pswire.process import versions
from pswire.traces.traceparent import span_of, trace_of

EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
"""The modules with an `OTLPSpanExporter`, by protocol."""

KINDS = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT, "server": SpanKind.SERVER}

FLUSH_SECONDS = 5.0
"""Seconds that the end of a process waits for its last spans to be taken."""

ROLES = {"ps": "paramserver-server", "worker": "paramserver-worker", "chief": "paramserver-chief"}
"""The names of services, by job; of another job `paramserver-` and its name."""

Attributes = Mapping[str, str | int | float | bool]

_FIXED: ContextVar[int] = ContextVar("trace id", default=0)
"""The id of the trace that begins now; 0 for one by chance."""


class StepIds(RandomIdGenerator):
    """Makes ids by chance, but of traces whose id is known before."""

    def generate_trace_id(self) -> int:
        return _FIXED.get() or super().generate_trace_id()


class Span:
    """One span, which may be ended by any thread, once.

    Attributes:
        text: its traceparent; "" if it is not exported.
    """

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        found = span.get_span_context()
        sampled = span.is_recording() and found.trace_flags.sampled
        self.text = f"00-{found.trace_id:032x}-{found.span_id:016x}-01" if sampled else ""

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""
        self._span.set_attributes(attributes)

    def fail(self, error: BaseException) -> None:
        """Marks it as failed. Only the error's class is told: what it says may have a script's values in it."""
        self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))

    def end(self, at: int | None = None) -> None:
        """Ends it: now, or at a time in nanoseconds since 1970."""
        self._span.end(at)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes it the parent of what the calling thread begins within."""
        token = context.attach(trace.set_span_in_context(self._span))
        try:
            yield
        finally:
            context.detach(token)


class SpanTracer:
    """Makes the spans of one process. May be used by any thread.

    Args:
        resource: what is said of the process with every span.
        exporter: takes spans, in a thread of its own.
    """

    def __init__(self, resource: Mapping[str, str], exporter: SpanExporter) -> None:
        # What the environment says wins, and what OpenTelemetry knows of itself is told as well.
        known = Resource.create(dict(resource)).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=known, id_generator=StepIds(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("paramserver", versions()["paramserver"])

    @classmethod
    def exporting(cls, protocol: str, task: Task, job: str) -> SpanTracer:
        """Makes one whose spans go to the collector that `OTEL_EXPORTER_OTLP_ENDPOINT` names.

        Raises:
            ImportError: the exporter for that protocol is not installed.
        """
        said = {"service.name": ROLES.get(task.job, f"paramserver-{task.job}"), "service.instance.id": str(task)}
        said |= {"service.version": versions()["paramserver"]} | ({"service.namespace": job} if job else {})
        return cls(said, import_module(EXPORTERS[protocol]).OTLPSpanExporter())

    def begin(
        self,
        name: str,
        attributes: Attributes,
        parent: str = "",
        *,
        trace_id: int = 0,
        kind: str = "internal",
        links: Iterable[str] = (),
        at: int | None = None,
    ) -> Span:
        """Begins a span.

        Args:
            name: its name.
            attributes: what is known of it.
            parent: the traceparent of its parent; "" for the span that is current in the calling thread.
            trace_id: where there is no parent, the id of its trace; 0 for one by chance.
            kind: a key of `KINDS`.
            links: traceparents of spans that have caused it as well.
            at: when it has begun, in nanoseconds since 1970; None for now.
        """
        above = _within(parent) if parent else None
        fixed = _FIXED.set(trace_id)
        try:
            span = self._tracer.start_span(
                name, above, KINDS[kind], attributes, [Link(_context_of(link)) for link in links], at
            )
        finally:
            _FIXED.reset(fixed)
        return Span(span)

    def current(self, trace_id: str) -> str:
        """Returns the traceparent of the calling thread's current span if it is of a trace and exported, else ""."""
        found = Span(trace.get_current_span())
        return found.text if trace_of(found.text) == trace_id else ""

    def close(self) -> None:
        """Waits for the last spans to be taken, for `FLUSH_SECONDS` at most, and ends."""
        self._provider.force_flush(int(FLUSH_SECONDS * 1000))
        self._provider.shutdown()


def ago(seconds: float) -> int:
    """Returns the time so many seconds ago, in nanoseconds since 1970."""
    return time.time_ns() - int(seconds * 1e9)


def wall_clock(clock: Callable[[], float]) -> Callable[[float], int]:
    """Returns a function that makes times of a monotonic clock nanoseconds since 1970, as of now."""
    shift = time.time_ns() - int(clock() * 1e9)
    return lambda at: int(at * 1e9) + shift


def _context_of(text: str) -> SpanContext:
    return SpanContext(int(trace_of(text), 16), int(span_of(text), 16), True, TraceFlags(TraceFlags.SAMPLED))


def _within(text: str) -> context.Context:
    return trace.set_span_in_context(NonRecordingSpan(_context_of(text)), context.Context())
