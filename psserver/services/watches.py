"""Calls that wait for news of the log and the sessions, for the end of their own session, or for the loss of servers.

They outlive jobs, as sessions do.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from psserver.calls import Call, Calls
from psserver.effects import Effect, Reply
from psserver.services.log import Log
from psserver.state.sessions import Membership
from pswire.api import UNTIL_ENDED, UNTIL_GONE, Watched, WatchRequest
from pswire.errors import PSError
from pswire.model.log import Gone


class Watches:
    """The calls that watch. Guarded by the core's lock.

    A call is looked at when it comes, and when the sessions or the log have changed.

    Args:
        members: the sessions.

    Attributes:
        news: the calls that wait for news.
        ends: those that wait until their sessions end.
        losses: those that wait until more servers are lost.
    """

    def __init__(self, members: Membership) -> None:
        self.news: Calls[WatchRequest] = Calls()
        self.ends: Calls[WatchRequest] = Calls()
        self.losses: Calls[WatchRequest] = Calls()
        self._all = self.news, self.ends, self.losses
        self._members = members

    def add(self, asked: WatchRequest, future: Future[Watched], log: Log, now: float) -> list[Effect]:
        """Adds a call; answers one without a session at once: nothing would tell that its caller is gone."""
        calls = {UNTIL_ENDED: self.ends, UNTIL_GONE: self.losses}.get(asked.version, self.news)
        found = self._answer(Call(asked.session, asked, future), log, now)
        return calls.add(asked.session, asked, future) if found is None else [*found]

    def answers(self, log: Log, now: float) -> list[Effect]:
        """Answers the calls for which there is news; called where there may be some."""
        effects = self.news.serve(lambda call: self._answer(call, log, now))
        return effects + self.losses.serve(lambda call: self._answer(call, log, now))

    def session_ended(self, session: int, error: PSError) -> list[Effect]:
        """Fails the calls of a session."""
        return [effect for calls in self._all for effect in calls.session_ended(session, error)]

    def fail_all(self, error: PSError) -> list[Effect]:
        """Fails all calls."""
        return [effect for calls in self._all for effect in calls.fail_all(error)]

    def _answer(self, call: Call[WatchRequest], log: Log, now: float) -> Sequence[Effect] | None:
        after, version, known = call.asked.after, call.asked.version, len(log.entries)
        if version == UNTIL_GONE:
            if call.session and len(log.losses) <= after:
                return None
            losses = tuple(entry for entry in log.entries if isinstance(entry, Gone))
            return [Reply(call.future, Watched(UNTIL_GONE, 0, losses, (), ()))]
        changed = version != UNTIL_ENDED and (known != after or 0 <= version != self._members.version)
        if call.session and not changed:
            return None
        start = after if after <= known else 0  # a log shorter than the caller's is another job's
        news = Watched(self._members.version, start, tuple(log.entries[start:]), (), ())
        if version >= 0:  # else each of a thousand members was told of all others with each generation
            plans, states = tuple(log.proposed.values()), self._members.states(now)
            news = replace(news, plans=plans, sessions=states, traces=dict(log.traces))
        return [Reply(call.future, news)]
