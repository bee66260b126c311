"""Follows the checkpoints of a running job, for the task that evaluates them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from psclient._src.config import timeouts_from
from pswire.checkpoint.reader import FoundCheckpoint
from pswire.checkpoint.storage import Storage, storage_at
from pswire.telemetry.reminder import Reminder

log = logging.getLogger("psclient")

POLL_SECONDS = 1.0
"""Between two looks: nobody tells of a new checkpoint, least of all an object store."""


def checkpoints_iterator(
    checkpoint_dir: str,
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields the newest checkpoint in a directory, then waits for the next one; those in between are skipped.

    In any context. It reads the directory itself, without servers. The log reports every `PS_REPORT_INTERVAL` that it
    waits.

    Source: `tf.train.checkpoints_iterator`.

    Args:
        checkpoint_dir: a local path or an fsspec URL; it need not exist yet.
        min_interval_secs: smallest number of seconds between two checkpoints.
        timeout: seconds to wait for a new one; None without limit.
        timeout_fn: called after each timeout; True ends the iteration. Without it the first timeout ends it.

    Yields:
        A path for `Checkpoint.restore`. The job may delete an older checkpoint while it is being read.

    Raises:
        ConfigError: the kind of URL is not known, or needs a package that is not installed.
        CheckpointError: the directory cannot be read.
    """
    last: str | None = None
    directory = storage_at(checkpoint_dir)
    reminder = Reminder(
        timeouts_from().report_interval,
        lambda: log.warning("waits for a job to save a checkpoint in %s, after %s", checkpoint_dir, last or "none"),
    )
    while True:
        reminder.begin()
        found = _next(directory, last, timeout, reminder)
        if found:
            began, last = time.monotonic(), found
            yield f"{checkpoint_dir.rstrip('/')}/{found}"
            time.sleep(max(0.0, began + min_interval_secs - time.monotonic()))
        elif timeout_fn is None or timeout_fn():
            log.info("no new checkpoint in %s for %g s", checkpoint_dir, timeout)
            return


def _next(directory: Storage, last: str | None, timeout: float | None, reminder: Reminder) -> str | None:
    """The name of the newest checkpoint once it is another one than the last; None after the timeout."""
    end = None if timeout is None else time.monotonic() + timeout
    while (found := FoundCheckpoint.within(directory).latest) in (None, last):
        left = POLL_SECONDS if end is None else min(POLL_SECONDS, end - time.monotonic())
        if left <= 0:
            return None
        time.sleep(left)
        reminder.look()
    return found
