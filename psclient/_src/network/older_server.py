"""Servers of the protocol that know no batches of variables: they create one variable in a call, value and all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pswire.api import Contribution, CreateBatchReply, CreateReply, RoundReply
from pswire.errors import CheckpointError, Diverged, InvalidRequest, MemoryLimit, PSError, VariableMismatch
from pswire.model.log import Generation
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.network.payload import EMPTY, Payload

Create = Callable[[int, int, int, VariableSpec, tuple[int, ...], Payload | None], CreateReply]
"""`ParameterServer.create`."""

VERDICTS = (CheckpointError, Diverged, InvalidRequest, MemoryLimit, VariableMismatch)
"""Errors about a variable; others are about the session, or the connection."""


def create_each(create: Create, server: int, session: int, variables: Sequence[PlacedVariable]) -> CreateBatchReply:
    """Answers `create_batch` by one call for each variable, of which server 0 first gives the number."""
    found: list[CreateReply] = []
    error: PSError | None = None
    for variable in variables:
        id = variable.id if server else -1
        try:
            found.append(create(session, variable.id, id, variable.spec, variable.servers, None))
        except VERDICTS as refusal:
            error = refusal
            break
    initialized = tuple([reply.id for reply in found if reply.initialized])
    restored = tuple([reply.id for reply in found if reply.restored])
    return CreateBatchReply(len(found), initialized, restored, error)


def give_each(
    create: Create, known: Mapping[int, PlacedVariable], contribution: Contribution, payload: Payload
) -> RoundReply:
    """Answers a `push` of first values by one call for each variable; `known` has those that `create_each` created."""
    variables = [known[id] for id in contribution.first_values]
    values = payload.tensors([variable.spec.tensor for variable in variables])
    for variable, value in zip(variables, values, strict=True):
        id, packed = variable.id, Payload.pack([value])
        create(contribution.session, id, id, variable.spec, variable.servers, packed)
    return RoundReply(0, Generation(0, ()), False, (), EMPTY)
