"""Whether a process exports traces: `PS_TRACES`, and what OpenTelemetry's own variables say beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.limits import refuse_unknown
from pswire.options import LOGGING, Option
from pswire.variables import TRACES as VARIABLE

if TYPE_CHECKING:
    from pswire.traces.tracer import SpanTracer

CHOICES = ("off", "otlp")
PROTOCOLS = ("http/protobuf", "grpc")
"""Protocols of OTLP, of which the first is the default, as OpenTelemetry's specification asks."""

TRACES = Option(
    "With otlp, export traces to the collector at OTEL_EXPORTER_OTLP_ENDPOINT.",
    choices=CHOICES,
    variable=VARIABLE,
    otherwise=CHOICES[0],
    group=LOGGING,
)

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
"""The variables that name the protocol; the first that is set counts."""

DISABLED = "OTEL_SDK_DISABLED"
"""The variable by which OpenTelemetry is switched off in a process, whatever else is set."""


@dataclass(frozen=True)
class TraceOptions:
    """How a process exports its spans.

    Attributes:
        traces: "otlp", or "off".
        protocol: one of `PROTOCOLS`.
    """

    traces: str = CHOICES[0]
    protocol: str = PROTOCOLS[0]

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], traces: str | None = None) -> TraceOptions:
        """Reads the environment; `traces` wins over its `PS_TRACES`.

        Raises:
            ConfigError: a word is unknown.
        """
        said = traces or environ.get(VARIABLE) or CHOICES[0]
        refuse_unknown([said], CHOICES, VARIABLE)
        if said == CHOICES[0] or environ.get(DISABLED, "").strip().lower() == "true":
            return cls()
        protocol = next((found for name in PROTOCOL if (found := environ.get(name))), PROTOCOLS[0])
        refuse_unknown([protocol], PROTOCOLS, PROTOCOL[1])
        return cls(said, protocol)

    def open(self, task: Task, job: str = "") -> SpanTracer | None:
        """Returns what makes the spans of a process, and exports them; None where traces are off.

        Args:
            task: the task that the process is.
            job: the job's name; "" for none.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        if self.traces == CHOICES[0]:
            return None
        try:
            from pswire.traces.tracer import SpanTracer

            return SpanTracer.exporting(self.protocol, task, job)
        except ImportError as error:
            raise ConfigError(
                f"traces are on ({VARIABLE}={self.traces}), but OpenTelemetry is not installed here "
                f"({error.name or error}); run pip install -e '.[otel]' in the clone, or switch traces off"
            ) from error


NO_TRACES = TraceOptions()
