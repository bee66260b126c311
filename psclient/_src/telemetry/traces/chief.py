"""The spans of a chief: `approve`, in the trace of the step whose section it lets run for the first time."""

from __future__ import annotations

from collections.abc import Mapping

from pswire.traces.traceparent import well_formed
from pswire.traces.tracer import Span, SpanTracer


class ChiefTraces:
    """The traces of a chief. Used by the thread that drives.

    Args:
        tracer: makes spans.
        task: the task that drives.
    """

    def __init__(self, tracer: SpanTracer, task: str) -> None:
        self._tracer = tracer
        self._task = task

    def approve(self, proposed: Mapping[str, str]) -> Approvals | None:
        """Begins to approve plans; returns None where nobody traces the steps that they are of.

        Args:
            proposed: the traceparents of proposals, by the plan's id in hexadecimal.
        """
        spans = list[Span]()
        for plan_id, text in proposed.items():
            if parent := well_formed(text):
                said = {"paramserver.task": self._task, "paramserver.plan": plan_id[:16]}
                spans.append(self._tracer.begin("approve", said, parent))
        return Approvals(spans) if spans else None


class Approvals:
    """Approvals under way, which end together: with the log on all servers."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans

    def end(self) -> None:
        """All servers know of them."""
        for span in self._spans:
            span.end()
