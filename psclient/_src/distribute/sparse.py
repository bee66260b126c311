"""What an update on servers is to the rows that are not given."""

from __future__ import annotations

from collections.abc import Sequence

from psclient._src.tracing.diagnostics import refuse_lazy_update, refuse_whole_update, warn_of_whole
from psclient._src.variables.kinds import ServerVariable
from psclient._src.variables.sparse_updates import SparseUpdate
from pswire.model.plan import Ref, Sparse
from pswire.model.program import Program
from pswire.model.row_updates import keeps_rows, later_refusal, measures, refusal


def how_sparse(
    program: Program,
    refs: Sequence[Ref],
    given: Sequence[int],
    wish: SparseUpdate | None,
    used: Sequence[ServerVariable],
) -> Sparse:
    """Returns what an update is to rows that are not given; warns where it makes a whole array of rows.

    Args:
        program: the update.
        refs: its arguments.
        given: numbers of the arguments that are rows.
        wish: says what it shall be; None if nobody has.
        used: the variables among its arguments.

    Raises:
        ProgramError: it cannot be lazy; or it is of a dynamic table, and does not run on the rows of one gradient.
    """
    table = next((part.table for v in used if (part := v.handle.spec.part)), None)
    if not (given or table or (wish and wish.needs_rows)):
        return "dense"
    if len({refs[i] for i in given}) == 1 and measures(program, given):
        return "dense"
    sparse = wish.sparse if wish else None
    why = refusal(program, given)
    if len({refs[i] for i in given}) != 1 or len(set(refs)) < len(refs):
        why = why or "it takes the rows of one gradient, and each variable once"
    if table is not None and not given:
        refuse_whole_update(table, "it got none; reduce IndexedSlices for the table, and pass the result")
    if why and wish and (sparse == "lazy" or wish.as_lazy):
        refuse_lazy_update([v.name for v in used], why)
    if sparse == "lazy":
        return sparse
    if why is None and keeps_rows(program, given):
        return "dense"
    may_be_lazy = why is None
    if sparse == "exact" and not (why := why or later_refusal(program)):
        return "closed" if wish and wish.catch_up == "closed_form" else sparse
    if table is not None:
        refuse_whole_update(table, why)
    if sparse != "dense":
        ids = {refs[target].index for target, _ in program.assigns}
        names = [v.name for v in used if v.handle.id in ids]
        warn_of_whole(
            names, max(program.specs[i].nbytes for i in given), why, bool(wish and wish.of_optimizer), may_be_lazy
        )
    return "dense"
