"""Looks at a job, once for all who watch its page: once a second while somebody does, and else at the log alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pswire.cluster import Task
from pswire.telemetry.page.markup import Html, paragraph
from pswire.telemetry.page.sections import Sight, render
from pswire.telemetry.views.columns import cells_of
from pswire.telemetry.views.history import JobHistory, ReadLog
from pswire.telemetry.views.job_view import view_of
from pswire.telemetry.views.looked import Looked, keeper_of
from pswire.telemetry.views.rates import RateMeter
from pswire.telemetry.views.variable_list import VariableView, beside, slots

log = logging.getLogger("pswire")

PERIOD = 1.0
"""Seconds between two looks."""

WATCHED_SECONDS = 10.0
"""Seconds after a question for which somebody is taken to watch."""

END_SECONDS = 1.0
"""Seconds for which the end waits for a look that is under way; nobody needs it any more."""

ANSWER_SECONDS = 10.0
"""Seconds that a question waits for a look."""

OF_OTHERS = frozenset(("incomplete", "no_keeper"))
"""Problems that one server alone always sees where a job has several."""


@dataclass(frozen=True)
class PageSource:
    """Where a page has it from.

    Attributes:
        task: the task whose page it is.
        scope: a sentence that says what this page shows.
        look: asks the servers that it shows; returns their answers, and the tasks that are expected.
        read_log: reads the job's log, without asking anybody.
        alone: True for the page of one server, which asks no other.
    """

    task: Task
    scope: str
    look: Callable[[], tuple[Sequence[Looked], Sequence[Task]]]
    read_log: ReadLog
    alone: bool = False


@dataclass(frozen=True)
class Sample:
    """The page at one time.

    Attributes:
        number: counts looks, from 1.
        parts: its parts, as `sections.render` gives them.
    """

    number: int
    parts: Mapping[str, Html]


class Sampler:
    """Makes samples in a thread of its own. Its methods may be called from any thread.

    Args:
        source: where they come from.
    """

    def __init__(self, source: PageSource) -> None:
        self._source = source
        self._meter = RateMeter()
        self._history = JobHistory(source.read_log)
        self._listed = self._history.variables
        self._rows: tuple[int, Sequence[Mapping[str, str]]] = (0, ())
        self._changed = threading.Condition()  # guards the rest
        self._sample = Sample(0, {})
        self._made = self._asked = -WATCHED_SECONDS - time.monotonic()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="status page")
        self._thread.start()

    def latest(self) -> Sample:
        """Returns a sample that is a few seconds old at most; the last one there is where a look takes too long."""
        with self._changed:
            known = self._sample.number if time.monotonic() - self._made > 2 * PERIOD else self._sample.number - 1
        return self.after(known) or self._sample

    def after(self, number: int) -> Sample | None:
        """Waits for a sample after the one with a number; returns None where none comes in time, or after the end."""
        with self._changed:
            self._asked = time.monotonic()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._sample.number > number, ANSWER_SECONDS)
            return self._sample if self._sample.number > number and not self._closed else None

    @property
    def closed(self) -> bool:
        """True after the end."""
        return self._closed

    def close(self) -> None:
        """Ends; all who wait go on at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(END_SECONDS)  # a server that is gone may be asked just then

    def _run(self) -> None:
        while True:
            with self._changed:
                began = time.monotonic()
                watched = began - self._asked < WATCHED_SECONDS
            try:
                self._history.follow(began)
                parts = render(self._look()) if watched else None
            except Exception as error:  # a fault of the page must not end it, nor stay unseen
                log.log(
                    logging.DEBUG if self._closed else logging.WARNING,
                    "the status page could not read the state of the job: %r",
                    error,
                    exc_info=True,
                )
                parts = {
                    "problems": paragraph(f"! this page could not read the state of the job: {error!r}; see the log")
                }
            with self._changed:
                if parts is not None:
                    self._sample = Sample(self._sample.number + 1, parts)
                    self._made = time.monotonic()
                    self._changed.notify_all()
                self._changed.wait_for(partial(self._due, began), PERIOD)
                if self._closed:
                    return

    def _due(self, began: float) -> bool:
        """Returns whether to look at once: at the end, and for the first question after a while."""
        return self._closed or (self._asked > began > self._made + 2 * PERIOD)

    def _look(self) -> Sight:
        if time.monotonic() - self._made > 3 * PERIOD:
            # Rates are of now, and not of all the time in which nobody watched.
            self._meter.measure(view_of(self._source.look()[0]), time.monotonic())
            time.sleep(PERIOD / 2)
        looked, expected = self._source.look()
        now = time.monotonic()
        view = view_of(looked, expected)
        if self._source.alone:
            stays = tuple(problem for problem in view.problems if problem.kind not in OF_OTHERS)
            view = replace(view, problems=stays)
        statuses = [one.status for one in looked if one.status]
        keeper = keeper_of(statuses)
        kept = next((status for status in statuses if status.server == keeper), None)
        return Sight(
            task=str(self._source.task),
            scope=self._source.scope,
            job=kept.job if kept else "",
            view=view,
            rates=self._meter.measure(view, now),
            looked=looked,
            sessions=kept.sessions if kept else (),
            events=tuple(self._history.events),
            variables=self._variables(),
            now=now,
        )

    def _variables(self) -> Sequence[Mapping[str, str]]:
        """Returns the rows of all variables, which are made anew where there are more, or those of another job."""
        known = self._history.variables
        count, rows = self._rows
        if count != len(known) or known is not self._listed:
            primaries = slots(known)
            rows = [cells_of(VariableView.of(variable, primaries)) for variable in beside(known, primaries)]
            self._rows, self._listed = (len(known), rows), known
        return rows
