"""A worker that takes the place of a chief which is gone: server 0 says which one, in its answers to beats."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from psclient._src.chief.driver import Chief
from pswire.cluster import Task
from pswire.errors import Forbidden, PSError, TaskTaken

log = logging.getLogger("psclient.chief")


class Deputy:
    """Drives the job beside a worker's script, once nobody else does.

    Args:
        task: the worker.
        make: makes a chief, with connections of its own.
        drives: given the chief that drives from now on; returns False if this process has no part in the job any more.
    """

    def __init__(self, task: Task, make: Callable[[], Chief], drives: Callable[[Chief], bool]) -> None:
        self._task = task
        self._make = make
        self._drives = drives
        self._busy = threading.Lock()
        self._refused = False

    def told(self) -> None:
        """Server 0 says that this worker is to drive the job; it says so again until somebody does. Does not wait."""
        if not self._refused and self._busy.acquire(blocking=False):
            threading.Thread(target=self._take_over, daemon=True, name="deputy").start()

    def _take_over(self) -> None:
        chief = None
        try:
            chief = self._make()
            chief.start(takes_over=True, waits=False)
            log.warning("nobody drives the job any more: %s does, from now on", self._task)
            if not self._drives(chief):
                chief.stop(abandon=True)
        except TaskTaken:
            log.info("%s need not drive the job: another process does", self._task)
        except Forbidden as error:
            self._refused = True
            log.warning("nobody drives the job any more, and %s may not: %s", self._task, error)
        except PSError as error:
            log.warning("nobody drives the job any more, and %s cannot: %s", self._task, error)
        finally:
            if chief is not None:
                chief.close()
            self._busy.release()
