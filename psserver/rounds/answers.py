"""The answers of rounds to their members: values that are sent while they become ready, and those at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from weakref import WeakKeyDictionary

from psserver.effects import Effect, Fail, Reply, Run, Work
from psserver.execution.execution import Execution
from psserver.plans.round import Record
from psserver.rounds.pending_round import Waiter
from psserver.state.variables import Store
from psserver.values.dense import Dense
from psserver.values.value import Value
from pswire.api import Begun, Contribution, RoundReply
from pswire.errors import Fenced, PSError
from pswire.model.plan import Ref
from pswire.model.tensor import Array, TensorSpec, as_bytes, layout
from pswire.network.payload import Payload


class GrowingAnswer:
    """An answer's payload that grows as values become ready. Members that want the same variables share it.

    Args:
        want: numbers of the wanted variables, which come first, in order.
        given: returned values that come after them.
        specs: the tensors of all these, in order.
    """

    def __init__(self, want: Sequence[int], given: Sequence[Ref], specs: Sequence[TensorSpec]) -> None:
        offsets, size = layout(specs)
        self.payload = Payload((), size)
        self._order: list[tuple[int | Ref, int]] = list(zip((*want, *given), offsets, strict=True))
        self._order.reverse()
        self._wanted = {*want, *given}
        self._early: dict[int | Ref, Array] = {}

    def put(self, values: Mapping[int, Array] | Mapping[int | Ref, Array]) -> None:
        """Adds values that are ready, on the host."""
        self._early.update({name: value for name, value in values.items() if name in self._wanted})
        while self._order and self._order[-1][0] in self._early:
            name, offset = self._order.pop()
            array = self._early.pop(name)
            if array.nbytes:
                self.payload.add(offset, as_bytes(array))


class Answers:
    """The answers of the running round, and of those that are over. Guarded by the core's lock.

    Args:
        store: the variables.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._growing: dict[tuple[int, ...], GrowingAnswer] = {}  # of the running round, by the variables they hold
        self._begun: WeakKeyDictionary[Future[RoundReply], Begun] = WeakKeyDictionary()

    def listen(self, said: Contribution, future: Future[RoundReply], begun: Begun, runs: bool) -> list[Effect]:
        """Registers a callback for when the answer to a contribution begins to stream; `runs` if its round runs."""
        growing = None if said.lookups else self._growing.get(said.want)
        if growing is None or not runs:
            self._begun[future] = begun
            return []
        return [Run(begun, (growing.payload,))]

    def begin(self, execution: Execution, waiters: Iterable[Waiter]) -> list[Run]:
        """Hands members the payloads of their answers, which grow from now on."""
        return [begin for waiter in waiters for begin in self._begin(execution, *waiter)]

    def _begin(self, execution: Execution, said: Contribution, future: Future[RoundReply]) -> list[Run]:
        """Hands a member its payload; one that wants rows, or variables not known here, gets it at the end."""
        begun, prepared = self._begun.pop(future, None), execution.job.prepared
        known = execution.wanted.issuperset(said.want) and all(map(self._store.initialized, said.want))
        if begun is None or not known or said.lookups:
            return []
        if (growing := self._growing.get(said.want)) is not None:
            return [Run(begun, (growing.payload,))]
        given, variables = prepared.given, self._store.variables
        specs = [*(variables[id].spec.tensor for id in said.want), *(spec for _, spec in given)]
        growing = self._growing[said.want] = GrowingAnswer(said.want, [ref for ref, _ in given], specs)
        rest = sorted(set(said.want).difference(prepared.writes))
        unchanged = dict(zip(rest, self._store.views(rest), strict=True))
        return [Run(begun, (growing.payload,)), Run(self._put, (growing, unchanged))]

    def _put(self, growing: GrowingAnswer, values: Mapping[int, Value]) -> None:
        """Begins an answer with the values that the round does not change."""
        growing.put({id: self._store.device.get(value.whole()) for id, value in values.items()})

    def put(self, ready: Mapping[int | Ref, Array]) -> list[Effect]:
        """Adds values of the running round that are on the host."""
        return [Run(growing.put, (ready,)) for growing in self._growing.values()]

    def drop(self) -> None:
        """The running round is over, or begins anew: payloads grow no more."""
        self._growing = {}

    def replies(
        self,
        record: Record,
        waiters: Sequence[Waiter],
        broken: PSError | None,
        over: int,
        ready: Mapping[int | Ref, Array] | None = None,
        looked_up: Mapping[int, Sequence[Array]] | None = None,
    ) -> list[Effect]:
        """Returns the answers to members, with the wanted variables as they are now, before the next round.

        Args:
            record: the round's record.
            waiters: the contributions to answer, with their futures.
            broken: why variables are of no use any more; None if they are.
            over: rounds that are over, counted from 0; members that were left out are told.
            ready: values of the running round, which ends, that are on the host already; None for an earlier round.
            looked_up: of the running round, for each session the rows that it has asked for.
        """
        fresh: dict[int | Ref, Array] = dict(ready or {})
        grown = {} if ready is None else self._growing
        payloads = {want: growing.payload for want, growing in grown.items()}
        same: dict[tuple[object, ...], RoundReply] = {}  # by what differs between members who want no rows
        answers: list[Effect] = []
        for said, future in waiters:
            try:
                if error := record.error or broken:
                    raise error
                if not (record.is_for(said.session) or said.closure):
                    raise Fenced(f"round {said.round} was completed without this process; restart it")
                kind = said.want, said.round, said.session in record.late
                if kind in same and not said.lookups:
                    answers.append(Reply(future, same[kind]))
                    continue
                rows = (looked_up or {}).get(said.session) if said.lookups else ()
                if said.lookups or said.want not in payloads:
                    missing = [id for id in said.want if id not in fresh]
                    here = None if rows is None else self._store.at_hand(missing)
                    if rows is None or here is None:
                        views = dict(zip(missing, self._store.views(missing), strict=True))
                        wanted = [Dense(fresh[id]) if id in fresh else views[id] for id in said.want]
                        tables = self._store.views(read.variable for read in said.lookups)
                        answers.append(Work("arrays", self._fetch, (said, record, wanted, tables, over), future=future))
                        continue
                    fresh.update(here.items())
                    payload = Payload.gathered([*map(fresh.__getitem__, said.want), *record.given, *rows])
                    if not said.lookups:
                        payloads[said.want] = payload
                else:
                    payload = payloads[said.want]
                answer = _reply(said, record, payload, over)
                if not said.lookups:
                    same[kind] = answer
                answers.append(Reply(future, answer))
            except PSError as error:
                answers.append(Fail(future, error))
        return answers

    def _fetch(
        self,
        said: Contribution,
        record: Record,
        wanted: Sequence[Value],
        tables: Sequence[Value],
        over: int,
    ) -> RoundReply:
        """Copies what a member wants to the host, for its answer; in the thread for arrays.

        Args:
            said: the member's contribution.
            record: the round's record.
            wanted: the wanted variables.
            tables: the variables of which it wants rows.
            over: as `replies` has it.
        """
        device = self._store.device
        rows = [table.rows(read.numbers(), device.xp) for table, read in zip(tables, said.lookups, strict=True)]
        payload = Payload.pack([*(device.get(view.whole()) for view in wanted), *record.given, *map(device.get, rows)])
        return _reply(said, record, payload, over)


def _reply(said: Contribution, record: Record, payload: Payload, over: int) -> RoundReply:
    if record.generation is None:
        raise PSError("the round has no generation")
    return RoundReply(
        said.round,
        record.generation,
        record.more,
        record.excluded,
        payload,
        record.warnings,
        record.observers,
        record.rows,
        over if said.session in record.late else 0,
    )
