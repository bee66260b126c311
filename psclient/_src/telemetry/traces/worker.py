"""The spans of a worker: `step`, below it a `flush` for each section, `push` for each server, `wait` and `read`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from pswire.traces.trace_ids import StepName, trace_id
from pswire.traces.traceparent import labels_of, trace_of
from pswire.traces.tracer import Attributes, Span, SpanTracer, ago

OUTSIDE = -1
"""In place of a number of steps, of a section that is in none."""


class StepTraces:
    """The traces of a worker's steps. Used by the thread that runs cross-replica code, but for `read`.

    Args:
        tracer: makes spans.
        task: the task that this process is.
        job: the session of the chief that began the job.
        incarnations: the lives of the servers when it began.
    """

    def __init__(self, tracer: SpanTracer, task: str, job: int, incarnations: tuple[int, ...]) -> None:
        self._tracer = tracer
        self._task = task
        self._job = job, incarnations
        self._step: Span | None = None  # that is under way
        self._at = -1, 0  # the round where the last step began, and how many began there before it

    @contextmanager
    def step(self, round: int, alone: bool) -> Iterator[None]:
        """Traces what is done within: a `run`.

        Args:
            round: the next round of this process.
            alone: True if it makes rounds of its own.
        """
        before, since = self._at
        self._at = round, since + 1 if round == before else 0
        said: Attributes = {"paramserver.task": self._task, "paramserver.round": round}
        span = self._tracer.begin("step", said, trace_id=self._trace_id(round, self._at[1], alone))
        above, self._step = self._step, span
        try:
            with span.current():
                yield
        except Exception as error:
            span.fail(error)
            raise
        finally:
            self._step = above
            span.end()

    def _trace_id(self, round: int, since: int, alone: bool) -> int:
        return trace_id(StepName(*self._job, self._task if alone else "", round, since))

    def flush(self, plan_id: bytes, round: int, alone: bool) -> Flush | None:
        """Begins the trace of a section's round; returns None for one that is not exported.

        Args:
            plan_id: the section's plan.
            round: the round's number.
            alone: True if this process makes it alone.
        """
        step, parent = self._step, ""
        if step is not None:
            if not step.text:
                return None
            parent = self._tracer.current(trace_of(step.text)) or step.text
        said: Attributes = {
            "paramserver.task": self._task,
            "paramserver.round": round,
            "paramserver.plan": plan_id.hex()[:16],
        }
        span = self._tracer.begin("flush", said, parent, trace_id=self._trace_id(round, OUTSIDE, alone))
        if span.text:
            return Flush(self._tracer, span, round)
        span.end()
        return None

    def read(self, seconds: float) -> dict[str, str] | None:
        """Traces a read that has taken so long, and has ended now; returns the labels of an exemplar that leads there.

        May be called by any thread: replicas read at the same time.
        """
        step = self._step
        if step is None or not step.text:
            return None
        span = self._tracer.begin("read", {"paramserver.task": self._task}, step.text, at=ago(seconds))
        span.end()
        return labels_of(span.text)


class Flush:
    """The trace of one round that this process makes.

    Attributes:
        text: the traceparent of its span.
    """

    def __init__(self, tracer: SpanTracer, span: Span, round: int) -> None:
        self.text = span.text
        self._tracer = tracer
        self._span = span
        self._round = round
        self._pushes: dict[int, Span] = {}
        self._open = True

    @property
    def labels(self) -> dict[str, str]:
        """The labels of an exemplar that leads here."""
        return labels_of(self.text)

    def push(self, server: int, size: int) -> str:
        """Begins a push of so many bytes to a server; returns its traceparent, which travels with it."""
        said: Attributes = {
            "paramserver.round": self._round,
            "paramserver.server": f"/job:ps/task:{server}",
            "paramserver.bytes": size,
        }
        self._pushes[server] = span = self._tracer.begin("push", said, self.text, kind="client")
        return span.text

    def sent(self, futures: Mapping[int, Future[Any]]) -> None:
        """All was sent; each push ends with its answer, in the thread that brings it."""
        pushes, self._pushes = self._pushes, {}
        for server, future in futures.items():
            future.add_done_callback(partial(_end, pushes.pop(server)))
        self._span.end()
        self._open = False

    def fail(self, error: BaseException) -> None:
        """An error has come before all was sent, or after."""
        for span in (*self._pushes.values(), self._span) if self._open else ():
            span.fail(error)
            span.end()
        self._open = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Traces a wait for the round's answers; it may come long after the step, and belongs to it still."""
        span = self._tracer.begin("wait", {"paramserver.round": self._round}, self.text)
        try:
            yield
        except Exception as error:
            span.fail(error)
            raise
        finally:
            span.end()


def _end(span: Span, answer: Future[Any]) -> None:
    error = answer.exception()
    if error is not None:
        span.fail(error)
    span.end()
