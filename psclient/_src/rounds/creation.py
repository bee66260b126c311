"""The creation of variables: recorded as the script comes to them, and sent in batches once somebody needs them.

A process finds a variable's number and servers by itself, as all others do. So nothing has to be asked before a read, a
round, a checkpoint or the end of a scope; then one call per server creates all that was recorded, and one push per
server, on its transport, brings the first values that are wanted there. An error names the line that created the
variable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from psclient._src.network.session import Session
from psclient._src.rounds.first_values import FirstValueWaiter, Recorded
from psclient._src.rounds.membership import Group
from psclient._src.rounds.read_cache import ReadCache
from psclient._src.tracing.diagnostics import users_line
from pswire.api import Contribution, RoundReply
from pswire.cluster import Task
from pswire.errors import InvalidRequest, PSError, RoundTimeout, ServerGone, VariableMismatch
from pswire.limits import PART_BYTES
from pswire.model.log import Created
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tensor import Array, portable
from pswire.network.payload import Payload

KEPT_BYTES = 4 * PART_BYTES
"""Bytes of first values that wait to be sent: they are copies, since the script may change its arrays."""

SLOWEST = 10e6
"""Bytes per second that the slowest network carries; the deadlines of first values allow for them."""

KEPT_SECONDS = 0.5
"""How long a creation may wait for others before the next one sends it: other processes may wait for its value."""


NO_VALUE: Array = np.empty(0)
"""The first value of what begins empty."""


class Creation:
    """Creates variables with the first values of the lowest live task that creates them there.

    One thread at a time creates; any may send what was recorded.

    Args:
        session: this process's session, open.
        group: this process's place among the members.
        reads: reads values, and is told of the variables that it may read.

    Attributes:
        variables: all that this process has created, by number, sent or not.
        any_alone: True if each worker updates one of them alone.
        by_name: True once processes run different code, as a coordinator and its workers do: what is created then is
            found by its name, whatever else others have created before it. Each is sent at once.
    """

    def __init__(self, session: Session, group: Group, reads: ReadCache) -> None:
        self.variables: dict[int, PlacedVariable] = {}
        self.any_alone = False
        self.by_name = False
        self._named: list[PlacedVariable] = []  # all of the job, by number, as far as this process has read
        self._entries = 0  # of the log, read for these
        self._session = session
        self._reads = reads
        self._first_values = FirstValueWaiter(session, group)
        self._lock = threading.RLock()  # held while a batch is sent: whoever needs it waits for its end
        self._recorded: list[Recorded] = []
        self._nbytes = 0
        self._since = 0.0  # when the first of these was recorded
        self._restored: set[int] = set()
        self._failure: PSError | None = None

    def create(
        self, spec: VariableSpec, servers: tuple[int, ...], value: Array, now: bool = False, chosen: bool = False
    ) -> PlacedVariable:
        """Creates a variable, or finds the one that others have created in its place.

        It is recorded, and sent with others later, unless its value is too large to be kept.

        Args:
            spec: name, dtype and shape.
            servers: the servers that shall hold it.
            value: this process's initial value, of that dtype and shape; of a dynamic table `NO_VALUE`.
            now: True to send it at once, so that its errors are raised here.
            chosen: True if it may as well lie on other servers.

        Raises:
            VariableMismatch: another process created another variable in its place, or in that of one recorded before.
            RoundTimeout: the process whose value it shall be does not create it.
            MemoryLimit: the variable does not fit.
        """
        with self._lock:
            self._check()
            self._session.check()
            spec.check()
            if self.by_name:
                return self._create_by_name(spec, servers, value, chosen)
            large = value.nbytes >= PART_BYTES
            variable = PlacedVariable(len(self.variables), spec, servers)
            recorded = Recorded(variable, value if large or now else np.array(value, order="C"), users_line())
            self.variables[variable.id] = variable
            self.any_alone |= spec.alone
            if not self._recorded:
                self._since = time.monotonic()
            self._recorded.append(recorded)
            self._nbytes += value.nbytes
            aged = time.monotonic() - self._since > KEPT_SECONDS
            if large or now or aged or self._nbytes > KEPT_BYTES:
                try:
                    self._send(last=recorded)
                finally:
                    self._forget(recorded)
            return variable

    def _create_by_name(
        self, spec: VariableSpec, servers: tuple[int, ...], value: Array, chosen: bool
    ) -> PlacedVariable:
        """Creates a variable behind all that the job has, or finds it among these."""
        self._send()
        while True:
            there = next((each for each in self._learned() if each.spec == spec), None)
            number = len(self._named) if there is None else there.id
            variable = there if there is not None and chosen else PlacedVariable(number, spec, servers)
            recorded = Recorded(variable, value, users_line())
            self.variables[variable.id] = variable
            self.any_alone |= spec.alone
            self._recorded, self._nbytes = [recorded], value.nbytes
            try:
                self._send(last=recorded)
                return variable
            except VariableMismatch:
                if len(self._learned()) <= variable.id:
                    raise  # it is not the number, which another process may have taken meanwhile
            finally:
                self._forget(recorded)

    def _learned(self) -> Sequence[PlacedVariable]:
        """Returns all variables of the job, by number."""
        watched = self._session.look(self._entries)
        self._entries = watched.start + len(watched.entries)
        self._named += [entry.variable for entry in watched.entries if isinstance(entry, Created)]
        return self._named

    def _forget(self, last: Recorded) -> None:
        """Forgets a variable whose creation was cut short, and that the script does not have: it may try again."""
        if last in self._recorded:
            self._recorded.remove(last)
            self._nbytes -= last.value.nbytes
            del self.variables[last.variable.id]

    @property
    def waits(self) -> bool:
        """True while something that was recorded is not sent."""
        return bool(self._recorded)

    def send(self) -> None:
        """Sends what was recorded, and waits until every variable has its value.

        Raises:
            PSError: as `create`.
        """
        if self._recorded or self._failure:
            with self._lock:
                self._check()
                self._send()

    def was_restored(self, id: int) -> bool:
        """Returns whether the first value of a variable that this process created was a restored checkpoint's."""
        self.send()
        return id in self._restored

    def restored_names(self) -> frozenset[str]:
        """Returns the names of the variables of which `was_restored` holds."""
        self.send()
        return frozenset(self.variables[id].spec.saved_name for id in self._restored)

    def _check(self) -> None:
        """Raises why a variable could not be created that the script goes on with: those behind it have no numbers."""
        if self._failure is not None:
            raise type(self._failure)(self._failure.message, self._failure.task)

    def _send(self, last: Recorded | None = None) -> None:
        """Sends what was recorded; `last` is the one that the script does not have yet."""
        batch = self._recorded
        if not batch:
            return
        refused: dict[Recorded, PSError] = {}
        while True:
            try:
                there = self._make(batch, refused)
                break
            except ServerGone:  # once more, with those that are left
                self._session.check()
                refused.clear()
        # Only now: what an interrupt or a silent server has stopped is sent again.
        self._recorded, self._nbytes = [], 0
        self._reads.created(each.variable for each in there if each not in refused)
        if refused:
            self._raise(refused, batch[len(there) :], last)

    def _make(self, batch: list[Recorded], refused: dict[Recorded, PSError]) -> list[Recorded]:
        """Creates variables on their servers; returns those that have a number, and notes why others are refused.

        Where variables have copies, every server knows all of them: it may have to keep the log one day.
        """
        gone = self._session.hosting.gone
        keeper, *others = self._session.hosting.live
        missing = {keeper: self._ask(keeper, batch, refused)}
        there = batch[: len(batch) - len(refused)]
        for server in others:
            held = [each for each in there if self._session.copied or server in each.variable.servers]
            if held:
                missing[server] = self._ask(server, held, refused)
        home = self._session.hosting.home
        firsts = {server: [each for each in found if home(each.servers) == server] for server, found in missing.items()}
        self._begin([each for found in firsts.values() for each in found], refused)
        try:
            self._copy(
                {server: [each for each in found if each not in firsts[server]] for server, found in missing.items()}
            )
        except InvalidRequest as error:
            if self._session.hosting.gone == gone:
                raise
            # A value was to be copied from a server that is lost, and the next one has none either.
            raise ServerGone(error.message, error.task) from None
        return there

    def _raise(self, refused: Mapping[Recorded, PSError], unnamed: Sequence[Recorded], last: Recorded | None) -> None:
        """Raises the error of the first variable that was refused; `unnamed` are those that server 0 has refused."""
        first = min(refused, key=lambda each: each.variable.id)
        error = first.named(refused[first])
        if last is not None and unnamed == [last]:
            del self.variables[last.variable.id]  # the script may create another one in its place
        elif unnamed:
            self._failure = error
        raise error

    def _ask(self, server: int, wanted: Sequence[Recorded], refused: dict[Recorded, PSError]) -> list[Recorded]:
        """Creates variables on a server; returns those that have no value there, and notes why others are refused."""
        missing: list[Recorded] = []
        while wanted:
            reply = self._session.servers[server].create_batch(self._session.number, [each.variable for each in wanted])
            found, rest = wanted[: reply.count], wanted[reply.count :]
            valued, restored = set(reply.initialized), set(reply.restored)
            for each in found:
                id = each.variable.id
                missing += [each] if server in each.variable.servers and id not in valued else []
                first = self._session.hosting.home(each.servers) == server
                self._restored |= {id} if first and id in restored else set()
            if reply.error is None:
                break
            refused[rest[0]] = reply.error
            if (
                server == self._session.hosting.keeper
            ):  # it gives the numbers: behind one that it refuses, nobody has one
                refused.update(dict.fromkeys(rest, reply.error))
                break
            wanted = rest[1:]
        return missing

    def _begin(self, missing: Sequence[Recorded], refused: dict[Recorded, PSError]) -> None:
        """Gives variables their first values, or waits until the processes have whose turn it is."""

        def ask(wanted: Sequence[Recorded]) -> list[Recorded]:
            return [each for server, some in self._by_home(wanted) for each in self._ask(server, some, refused)]

        mine = self._first_values.wait(missing, ask)
        self._give(dict(self._by_home(mine)))

    def _copy(self, missing: Mapping[int, Sequence[Recorded]]) -> None:
        """Gives further copies of variables the values that have won on their first servers: copies must be equal."""
        wanted = {each.variable.id: each for found in missing.values() for each in found}
        if not wanted:
            return
        values: dict[int, Array] = {}
        for _, some in self._by_home(wanted.values()):
            variables = [each.variable for each in some]
            values |= zip([v.id for v in variables], self._reads.pull(variables), strict=True)
        self._give(
            {
                server: [replace(each, value=values[each.variable.id]) for each in found]
                for server, found in missing.items()
            }
        )

    def _give(self, given: Mapping[int, Sequence[Recorded]]) -> None:
        """Sends values to servers, which take them for the variables that have none; waits until each has one."""
        number, limit = self._session.number, self._session.round_limit
        under_way: list[tuple[int, Sequence[Recorded], Future[RoundReply]]] = []
        for server, some in given.items():
            if some:
                said = Contribution(number, 0, 0, b"", first_values=tuple([each.variable.id for each in some]))
                payload = Payload.pack([portable(each.value) for each in some])
                under_way.append((server, some, self._session.servers[server].push(said, payload)))
        for server, some, future in under_way:
            self._await(server, some, future, limit + sum(each.value.nbytes for each in some) / SLOWEST)

    def _await(self, server: int, given: Sequence[Recorded], future: Future[RoundReply], limit: float) -> None:
        task, which = Task("ps", server), given[0].name + (f" and {len(given) - 1} more" if len(given) > 1 else "")
        self._session.wait(
            future,
            self._session.deadline(limit),
            lambda: given[0].named(
                RoundTimeout(f"sending the first value of variable {which} to {task} took longer than {limit:g} s")
            ),
            lambda: f"waits for {task} to take the first value of variable {which}",
            lambda: False,
        )

    def _by_home(self, items: Iterable[Recorded]) -> list[tuple[int, list[Recorded]]]:
        """Groups variables by the servers that are asked for them."""
        found: dict[int, list[Recorded]] = {}
        for item in items:
            found.setdefault(self._session.hosting.home(item.servers), []).append(item)
        return list(found.items())
