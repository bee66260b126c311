"""The pushes of this process: each by itself, or in a sum with those of other workers of its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from psclient._src.processes.aggregation.host_group import HostGroup
from psclient._src.processes.aggregation.sums import OwnPush
from pswire.api import Contribution, ParameterServer, RoundReply
from pswire.errors import PSError, PushAgain, ServerGone
from pswire.model.log import Generation
from pswire.model.plan import Plan
from pswire.network.futures import follow
from pswire.network.payload import Payload


class Pushes:
    """Pushes to the servers. May be used by any thread.

    Args:
        servers: all servers, in order.

    Attributes:
        near: the workers of this host, with whom it sums what it contributes; None where it does not.
    """

    def __init__(self, servers: Sequence[ParameterServer]) -> None:
        self._servers = servers
        self.near: HostGroup | None = None

    def push(
        self, server: int, plan: Plan, said: Contribution, payload: Payload, generation: Generation | None, again: bool
    ) -> Future[RoundReply]:
        """Pushes to a server; returns the future of its answer.

        Args:
            server: index of the server.
            plan: the plan.
            said: what this process says; with a host it may be in a sum.
            payload: what it contributes; it may still grow.
            generation: the generation that it names.
            again: True if the server may ask for it once more: then it is pushed at once, since others may wait for it.
        """
        if self.near is None or generation is None or not said.host:
            return self.singly(server, said, payload) if again else self.once(server, said, payload)
        singly = partial(self.near.by_itself, partial(self.singly, server, said, payload))
        return self.near.push(OwnPush(server, said, payload, plan, generation.by_session, singly))

    def singly(self, server: int, said: Contribution, payload: Payload) -> Future[RoundReply]:
        """Pushes to a server, in no sum, and once more whenever it asks for that."""
        push, answer = partial(self.once, server, said, payload), Future[RoundReply]()
        push().add_done_callback(partial(_answered, push, answer))
        return answer

    def once(self, server: int, said: Contribution, payload: Payload) -> Future[RoundReply]:
        """Pushes to a server that may be gone, as is then known with the answers to the round."""
        try:
            return self._servers[server].push(said, payload)
        except ServerGone as error:
            answer: Future[RoundReply] = Future()
            answer.set_exception(error)
            return answer


def _answered(push: Callable[[], Future[RoundReply]], answer: Future[RoundReply], pushed: Future[RoundReply]) -> None:
    """Hands on what a push came to, or pushes once more. No closure, whose cycle would keep the values of the round."""
    if not isinstance(pushed.exception(), PushAgain):
        follow(answer, pushed)
        return
    try:
        push().add_done_callback(partial(_answered, push, answer))
    except PSError as failure:
        answer.set_exception(failure)
