"""The verbs of services, as stimuli."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psserver.core.admission import Admission
from psserver.effects import Effect, Outcome
from psserver.registry import Registry
from psserver.services.service import Service
from pswire.cluster import Task
from pswire.errors import InvalidRequest


class ServiceVerbs:
    """Finds the service of a verb, and checks who calls. Guarded by the core's lock.

    Args:
        task: this server.
        registry: the sessions that were opened here.
        admission: says which of them may call.
        services: returns the services as they are now: a new job has others, of the same kinds in the same order.

    Attributes:
        stimuli: the stimulus of each verb, which looks its service up when it is let in.
    """

    def __init__(
        self, task: Task, registry: Registry, admission: Admission, services: Callable[[], tuple[Service, ...]]
    ) -> None:
        self._task = task
        self._registry = registry
        self._admission = admission
        self._services = services
        found = enumerate(services())
        self.stimuli = {name: self._stimulus(place, name) for place, service in found for name in service.verbs}

    def _stimulus(self, place: int, name: str) -> Callable[..., Outcome[Any]]:

        def serve(now: float, *args: Any) -> Outcome[Any]:
            service = self._services()[place]
            verb: Callable[..., Any] = getattr(service, name)
            if not service.for_sessions:
                outcome: Outcome[Any] = verb(now, *args)
                return outcome
            asked, *future = args
            if self._task.index != 0:
                raise InvalidRequest(f"only server 0 {service.for_sessions}", str(self._task))
            self._admission.check(asked.session, now)
            return None, verb(self._registry.task(asked.session), asked, *future)

        serve.__name__ = name
        return serve

    def task_left(self, session: int) -> list[Effect]:
        """A session has ended cleanly."""
        found = self._registry.find(session)
        return [] if found is None else [e for service in self._services() for e in service.task_left(found.task)]
