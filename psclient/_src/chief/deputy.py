"""A worker that takes the place of a chief which is gone: server 0 says which one, in its answers to heartbeats."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from psclient._src.chief.driver import Chief
from psclient._src.chief.standby import outlook
from pswire.api import ParameterServer
from pswire.cluster import Task
from pswire.errors import Forbidden, PSError, TaskTaken
from pswire.limits import Timeouts

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
            threading.Thread(target=self._become_chief, daemon=True, name="deputy").start()

    def _become_chief(self) -> None:
        try:
            chief = self.take_over()
            if chief is not None and not self._drives(chief):
                chief.stop(abandon=True)
        finally:
            self._busy.release()

    def take_over(self) -> Chief | None:
        """Takes the chief's place; returns the chief that drives in a thread from now on, None if it may not."""
        chief = None
        try:
            chief = self._make()
            chief.start(takes_over=True, waits=False)
        except TaskTaken:
            log.info("%s does not take over as chief: another process did", self._task)
        except Forbidden as error:
            self._refused = True
            log.warning("the job has no chief, and %s is not allowed to take over: %s", self._task, error)
        except PSError as error:
            log.warning("the job has no chief, and %s could not take over: %s", self._task, error)
        else:
            log.warning("the chief is down: %s takes over as chief", self._task)
            return chief
        if chief is not None:
            chief.close()
        return None

    def look(self, server: ParameterServer, timeouts: Timeouts) -> Chief | None:
        """Takes the chief's place at the end of a script, if it is gone: else nobody might say that the job is over."""
        try:
            if outlook(server.status(), timeouts) == "gone":
                return self.take_over()
        except PSError as error:
            log.debug("%s cannot find out whether the job has a chief: %s", self._task, error)
        return None
