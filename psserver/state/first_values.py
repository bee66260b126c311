"""First values of variables on their way to this server: each becomes a variable's array as its parts come.

A plain state machine: its methods return effects. What comes is copied once, in the thread for array work, and let go
of at once, so that a value may be larger than what a client may have in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from psserver.effects import Await, Effect, Fail, Reply, Run, Work
from psserver.state.variables import Store
from pswire.api import RoundReply
from pswire.errors import InvalidRequest, PSError
from pswire.limits import PART_BYTES
from pswire.model.log import Generation
from pswire.model.plan import PlacedVariable
from pswire.model.tensor import DTYPES, Array, layout
from pswire.network.payload import EMPTY, Payload

TAKEN = RoundReply(0, Generation(0, ()), False, (), EMPTY)
"""The answer to first values: each variable has one now, these or those of another process."""


class Arrival:
    """First values that one session sends, in one payload.

    Args:
        variables: those whose values it has, in order.
        wanted: numbers of those that have none yet; the others' bytes are skipped.
        payload: the values; it may still grow.
        future: answered when all are there.
        put: copies a host array to the server's device.

    Attributes:
        ids: numbers of the variables.
        copied: up to where the payload is in the arrays.
        busy: True while the thread for array work copies.
        waits: True while more of the payload is awaited.
        futures: of the call, and of its resends.
    """

    def __init__(
        self,
        variables: Sequence[PlacedVariable],
        wanted: Collection[int],
        payload: Payload,
        future: Future[RoundReply],
        put: Callable[[Array], Array],
    ) -> None:
        self.ids = tuple([variable.id for variable in variables])
        self.payload = payload
        self.futures = [future]
        self.copied = 0
        self.busy = self.waits = False
        self._variables = [variable for variable in variables if variable.id in wanted]
        offsets, _ = layout([variable.spec.tensor for variable in variables])
        self._places = {id: offset for id, offset in zip(self.ids, offsets, strict=True) if id in wanted}
        self._arrays: dict[int, Array] = {}
        self._next = 0  # the first of the variables whose value is not whole
        self._put = put

    def copy(self, end: int) -> None:
        """Copies what has come up to an offset into the variables' arrays. In the thread for array work."""
        chunks = self.payload.chunks[:]
        while self._next < len(self._variables):
            variable = self._variables[self._next]
            start, tensor = self._places[variable.id], variable.spec.tensor
            if start >= end and tensor.nbytes:
                break
            array = self._arrays.get(variable.id)
            if array is None:
                array = self._arrays[variable.id] = np.empty(tensor.shape, DTYPES[tensor.dtype])
            target = array.reshape(-1).view(np.uint8)
            stop = min(start + tensor.nbytes, end)
            at = max(start, self.copied)
            for offset, buffer in chunks:
                low, high = max(at, offset), min(stop, offset + len(buffer))
                if low < high:
                    target[low - start : high - start] = np.frombuffer(buffer, np.uint8, high - low, low - offset)
            if stop < start + tensor.nbytes:
                break
            self._next += 1
        if end == self.payload.size:
            self._arrays = {id: self._put(array) for id, array in self._arrays.items()}

    def take(self) -> dict[int, Array]:
        """Returns the whole values by the variables' numbers, and holds them no more."""
        arrays, self._arrays = self._arrays, {}
        return arrays


class FirstValueUploads:
    """The first values that are on their way to one server. Guarded by the core's lock.

    Args:
        store: the variables.

    Attributes:
        arrivals: what comes, by session: each waits for the answer before it sends more.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.arrivals: dict[int, Arrival] = {}

    def push(self, session: int, ids: tuple[int, ...], payload: Payload, future: Future[RoundReply]) -> list[Effect]:
        """Takes the first values of some variables that live here, or a resend of them.

        A session that sends other values has given up those before.

        Raises:
            InvalidRequest: a variable is not known, or lives elsewhere; the payload is of another size.
        """
        known = self.arrivals.get(session)
        if known is not None and known.ids == ids:
            known.futures.append(future)
            return [Run(known.payload.follow, (payload,))]
        variables = self._known(ids)
        if layout([variable.spec.tensor for variable in variables])[1] != payload.size:
            raise InvalidRequest(
                f"a payload of {payload.size} bytes does not hold the initial values of {len(ids)} variables",
                str(self._store.task),
            )
        newer = InvalidRequest("newer initial values have arrived")
        effects = [] if known is None else self.session_ended(session, newer)
        wanted = {id for id in ids if not self._store.initialized(id)}
        if not wanted:
            return [*effects, Run(payload.discard), Reply(future, TAKEN)]
        if not payload.whole:
            payload.reader = PART_BYTES
        self.arrivals[session] = Arrival(variables, wanted, payload, future, self._store.device.put)
        return effects

    def _known(self, ids: Sequence[int]) -> list[PlacedVariable]:
        found = [self._store.variables.get(id) for id in ids]
        variables = [one for one in found if one is not None and self._store.server in one.servers]
        if len(variables) < len(ids) or len(set(ids)) < len(ids):
            raise InvalidRequest("initial values must name variables of this server, each once", str(self._store.task))
        return variables

    def next(self) -> list[Effect]:
        """Begins to copy what has come."""
        effects: list[Effect] = []
        for session, arrival in self.arrivals.items():
            if arrival.busy:
                continue
            end = arrival.payload.end
            if end > arrival.copied or arrival.payload.whole:
                arrival.busy, arrival.waits = True, False
                then = partial(self._copied, session, arrival, end)
                effects.append(Work("arrays", arrival.copy, (end,), then=then))
            elif not arrival.waits:
                arrival.waits = True
                effects.append(Await(arrival.payload, end + 1))
        return effects

    def _copied(
        self, session: int, arrival: Arrival, end: int, _: object, error: PSError | None, now: float
    ) -> list[Effect]:
        arrival.busy, arrival.copied = False, end
        if self.arrivals.get(session) is not arrival:
            return []  # it was given up
        if error is not None:
            return self.session_ended(session, error)
        effects: list[Effect] = [Run(arrival.payload.release, (end,))]
        if end == arrival.payload.size:
            del self.arrivals[session]
            for id, array in arrival.take().items():
                self._store.initialize(id, array)  # unless it has a value by now
            effects += [Reply(future, TAKEN) for future in arrival.futures]
        return effects

    def session_ended(self, session: int, error: PSError) -> list[Effect]:
        """Gives up what a session sends, if anything, and tells it why."""
        arrival = self.arrivals.pop(session, None)
        return (
            []
            if arrival is None
            else [Run(arrival.payload.discard), *(Fail(future, error) for future in arrival.futures)]
        )
