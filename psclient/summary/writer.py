"""Writers of event files, and which of them is the default."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from psclient._src import context


class SummaryWriter:
    """Writes summaries into one event file. Any thread may use it.

    Args:
        events: tensorboardX's writer of events; None writes nothing.
        max_queue: summaries after which the file is flushed.
        flush_seconds: seconds after which the next summary flushes it.
    """

    def __init__(self, events: Any = None, max_queue: int = 1, flush_seconds: float = 0.0) -> None:
        self._events = events
        self._max_queue = max_queue
        self._flush_seconds = flush_seconds
        self._pending = 0
        self._flushed = time.monotonic()
        self._lock = threading.Lock()  # guards all of these

    @contextmanager
    def as_default(self, step: int | None = None) -> Iterator[SummaryWriter]:
        """Makes this the default writer within a `with` statement, and flushes it at its end. In any context.

        Args:
            step: the step for calls of `scalar`, `histogram`, `image` and `text` without one.
        """
        token = _current.set((self, step))
        try:
            yield self
        finally:
            _current.reset(token)
            self.flush()

    def write(self, make: Callable[[], Any], step: int) -> bool:
        """Adds one summary, for `scalar` and the other functions.

        Args:
            make: returns the summary, a protocol buffer. It is called only if there is a file, and without the lock,
                because encoding an image takes time.
            step: the summary's step.

        Returns:
            True if it was written.
        """
        if self._events is None:
            return False
        event = _event(make(), step)
        with self._lock:
            if self._events is None:
                return False
            self._events.write_event(event)
            self._pending += 1
            if self._pending >= self._max_queue or time.monotonic() >= self._flushed + self._flush_seconds:
                self._flush()
            return True

    def flush(self) -> None:
        """Writes buffered summaries to the file."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self._events is not None and self._pending:
            self._events.flush()
            self._pending, self._flushed = 0, time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file; later summaries are not written. A second call does nothing."""
        with self._lock:
            events, self._events = self._events, None
        if events is not None:
            events.close()


def _event(summary: Any, step: int) -> Any:
    from tensorboardX.proto.event_pb2 import Event

    return Event(wall_time=time.time(), step=step, summary=summary)


_numbers = itertools.count()

_current: ContextVar[tuple[SummaryWriter, int | None] | None] = ContextVar("summary_writer", default=None)


def create_file_writer(
    logdir: str, max_queue: int = 10, flush_millis: int = 120_000, filename_suffix: str = ""
) -> SummaryWriter:
    """Opens an event file in a directory, for TensorBoard. In any context.

    Source: `tf.summary.create_file_writer`.

    Args:
        logdir: the directory, created if it does not exist.
        max_queue: number of summaries that are buffered.
        flush_millis: milliseconds after which the next summary flushes the buffer.
        filename_suffix: last part of the file's name.

    Returns:
        The writer.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """
    try:
        # Its `SummaryWriter` has a queue between, which its `flush` does not wait for.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.record_writer import directory_check
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "summaries need tensorboardX, which is not installed; run pip install -e '.[summary]' in the clone, "
            "or use ps.summary.create_noop_writer()"
        ) from error
    directory_check(logdir)
    suffix = f".{os.getpid()}.{next(_numbers)}{filename_suffix}"  # else two of one second would share a file
    return SummaryWriter(EventsWriter(os.path.join(logdir, "events"), suffix), max_queue, flush_millis / 1000)


def create_noop_writer() -> SummaryWriter:
    """Returns a writer that writes nothing, for processes whose `strategy.is_main_process` is False. In any context.

    Source: `tf.summary.create_noop_writer`.
    """
    return SummaryWriter()


def write(kind: str, name: str, step: int | None, make: Callable[[], Any]) -> bool:
    """Writes a summary to the writer whose `as_default` this is in; of the replicas of a `run` the first one's.

    Args:
        kind: name of the function that is called, for messages.
        name: the summary's name.
        step: the summary's step; None for that of `as_default`.
        make: returns the summary; called if it is to be written.

    Returns:
        True if it was written.

    Raises:
        ValueError: there is no step.
    """
    current = _current.get()
    replica = context.get_replica_context()
    if current is None or (replica is not None and replica.replica_id_in_sync_group != 0):
        return False
    writer, default = current
    at = default if step is None else step
    if at is None:
        raise ValueError(f"{kind}({name!r}) needs a step; use {kind}(name, data, step), or as_default(step)")
    return writer.write(make, int(at))


def flush(writer: SummaryWriter | None = None) -> None:
    """Writes buffered summaries of a writer, by default of the default writer, to its file.

    Source: `tf.summary.flush`.
    """
    current = _current.get()
    found = writer or (current[0] if current else None)
    if found:
        found.flush()
