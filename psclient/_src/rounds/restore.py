"""Restoring: all processes agree on a checkpoint that all servers can read, and take it over in one round."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath

from psclient._src.rounds.rounds import Exchange, Outgoing
from pswire.api import ParameterServer
from pswire.cluster import Task
from pswire.errors import CheckpointError, DamagedCheckpoint, PSError, RoundTimeout, ServerGone, VariableMismatch
from pswire.model.plan import Plan, RestoreCommit, Turn
from pswire.model.saved import RestoreOrder, RestoreReply

VERDICTS = (CheckpointError, VariableMismatch)
"""Errors of a restore that servers tell every process alike: nothing has changed, and the job goes on."""


class Restoring:
    """Restores checkpoints on all servers. Used by the thread that runs cross-replica code.

    Args:
        exchange: makes the rounds.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._session = exchange.session
        self._group = exchange.group
        self._last: Turn | None = None

    def look(self, path: str) -> RestoreReply:
        """Returns what a checkpoint has, or the newest of a directory of them; nothing changes.

        Raises:
            CheckpointError: there is none, or it is broken.
        """
        return self._session.with_keeper(partial(self._look, path))

    def _look(self, path: str, keeper: ParameterServer) -> RestoreReply:
        session = self._session
        asked = keeper.restore(session.number, path, Turn(), RestoreOrder("look"))
        return self._answer(session.hosting.keeper, path, asked)

    def restore(self, path: str, orders_for: Callable[[RestoreReply], list[RestoreOrder]]) -> RestoreReply:
        """Makes every server take over its part of a checkpoint: all of them or none, for all processes at once.

        Of a directory a damaged checkpoint is passed over, for the one before it, and set aside by the servers.

        Args:
            path: a checkpoint, or a directory of them.
            orders_for: called with the checkpoint's contents; returns for each server which of its values go where.

        Returns:
            The answer of the checkpoint that was taken, with those that were passed over.

        Raises:
            CheckpointError: no checkpoint there is whole, or a server cannot read its part. Nothing has changed.
            VariableMismatch: the checkpoint has a variable with another shape or dtype. Nothing has changed.
            PSError: the reason why the round that commits did not happen; the session is over.
        """
        damaged: dict[str, str] = {}
        self._exchange.settle()
        while True:
            turn = self._last = self._next_turn()
            # Server 0 says which one is the newest, so that all read the same.
            found = self._open(path, turn, damaged)
            damaged = dict(found.damaged)
            named = PurePosixPath(found.path) == PurePosixPath(path)
            checkers = 0 if named else len(self._session.servers)
            orders = [replace(order, damaged=damaged, checkers=checkers) for order in orders_for(found)]
            try:
                replies = self._ask(dict(enumerate(orders)), found.path, turn)
            except DamagedCheckpoint as error:
                if named:
                    raise
                damaged[PurePosixPath(found.path).name] = str(error)
            else:
                break
        if any(replace(reply, damaged=damaged) != found for reply in replies):
            raise CheckpointError(
                f"the servers read different checkpoints at {found.path!r}; make sure that all hosts have the "
                "same files"
            )
        commit = RestoreCommit(path, tuple(range(len(self._session.servers))), turn, _digest(orders[0]))
        plan = Plan(restore=commit)
        self._group.restore(found.positions)  # first: they are the positions after the round
        with self._group.holding_back():
            self._exchange.enter(plan)
            self._exchange.send(Outgoing(plan, (), (), ()))
        return found

    def _open(self, path: str, turn: Turn, damaged: dict[str, str]) -> RestoreReply:
        while True:
            order = RestoreOrder("open", damaged=damaged)
            if found := self._ask({self._session.hosting.keeper: order}, path, turn):
                return found[0]

    def _next_turn(self) -> Turn:
        generation, change = None if self._group.alone else self._group.generation, self._session.change
        # What has no round in common comes after all that had, up to where workers have become asynchronous.
        place = (self._group.round, generation.number) if generation else (change.round if change else 0, 0)
        last = self._last
        return Turn(*place, last.ordinal + 1 if last and (last.round, last.generation) == place else 0)

    def _ask(self, orders: Mapping[int, RestoreOrder], path: str, turn: Turn) -> list[RestoreReply]:
        """Returns the answers of servers, or raises the first one's error, so that every process gets the same.

        That a file cannot be read counts for more than damage: it may be whole. What a server that is gone would have
        read, those read that have copies of its variables.
        """
        session, futures = self._session, dict[int, Future[RestoreReply]]()
        for server, order in orders.items():
            if server not in session.hosting.gone:
                with suppress(ServerGone):
                    futures[server] = session.servers[server].restore(session.number, path, turn, order)
        replies: list[RestoreReply] = []
        verdict: PSError | None = None
        for server, future in futures.items():
            try:
                replies.append(self._answer(server, path, future))
            except ServerGone:
                session.check()
            except VERDICTS as error:
                if verdict is None or (isinstance(verdict, DamagedCheckpoint) > isinstance(error, DamagedCheckpoint)):
                    verdict = error
            except PSError as error:
                # The others may have been told something else.
                self._session.end(error)
                raise
        if verdict is not None:
            raise verdict
        return replies

    def _answer(self, server: int, path: str, future: Future[RestoreReply]) -> RestoreReply:
        session = self._session
        task, seconds = Task("ps", server), session.timeouts.round_timeout
        return session.wait(
            future,
            session.deadline(seconds),
            lambda: RoundTimeout(f"restoring {path!r} took longer than {seconds:g} s", str(task)),
            lambda: f"waits for {task} to read {path!r}",
            lambda: False,
        )


def _digest(order: RestoreOrder) -> str:
    names = None if order.names is None else sorted(order.names.items())
    damaged = sorted(order.damaged)
    return hashlib.sha256(repr((names, order.late, order.cast, damaged)).encode()).hexdigest()[:16]
