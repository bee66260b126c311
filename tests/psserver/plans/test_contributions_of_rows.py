"""Contributions with rows: where these lie in the payload, and which are refused before anything is made of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.plans.prepared import PreparedPlan
from pswire.api import Contribution
from pswire.errors import InvalidRequest
from pswire.model.plan import Operand, Plan, Reduction, Ref
from pswire.model.rows import MAX_ROWS, row_specs
from pswire.model.tensor import DTYPES, TensorSpec
from pswire.transport.payload import Payload
from tests.kit.cases import search

NUMBER = TensorSpec("float32", ())
WHOLE = st.builds(
    lambda dtype, rest: TensorSpec(dtype, (50, *rest)),
    st.sampled_from(["float32", "uint8", "bfloat16", "complex128"]),
    st.sampled_from([(), (3,), (2, 5), (0,)]),
)
REDUCTIONS = st.lists(
    st.builds(
        lambda spec, servers, form: Reduction("sum", spec, servers, "", form),
        WHOLE,
        st.sampled_from([(0,), (1,), (0, 1)]),
        st.sampled_from(["dense", "rows"]),
    ),
    max_size=5,
)


def said_of(plan, weights, rows, **more):
    return Contribution(1, 1, 4, plan.id, weights, rows=rows, **more)


@search(0.8)
@given(reductions=REDUCTIONS, data=st.data())
def test_rows_lie_where_a_payload_has_them(reductions, data):
    """Behind operands and dense contributions: of each that counts here ids, then rows, as they are packed."""
    plan = Plan(tuple(reductions), (Operand(NUMBER, (0,)), Operand(NUMBER, (1,))))
    weights = tuple(data.draw(st.sampled_from([0.0, 1.0])) for _ in reductions)
    rows = tuple(data.draw(st.integers(0, 9)) * bool(weights[number]) for number in plan.rows)
    dense: dict[Ref, list[np.ndarray]] = {Ref("operand", 0): [np.array(0.5, "float32")]}
    behind: dict[Ref, list[np.ndarray]] = {}
    for number, one in enumerate(reductions):
        if not weights[number] or 0 not in one.servers:
            continue
        specs = [one.tensor] if one.form == "dense" else row_specs(one.tensor, rows[plan.rows.index(number)])
        arrays = [
            np.random.default_rng(number + 7 * n).integers(0, 99, spec.shape).astype(DTYPES[spec.dtype])
            for n, spec in enumerate(specs)
        ]
        (dense if one.form == "dense" else behind)[Ref("reduction", number)] = arrays
    payload = Payload.pack([array for arrays in (dense | behind).values() for array in arrays])
    said = said_of(plan, weights, rows)
    prepared = PreparedPlan(plan, 0)
    prepared.check(said, payload.size)
    layout = prepared.layout(said)
    assert (layout.size, set(layout.of), set(layout.rows)) == (
        payload.size,
        set(dense),
        {ref.index for ref in behind},
    )
    for ref, (array,) in dense.items():
        pieces = payload.pieces(layout.of[ref][0], TensorSpec(array.dtype.name, array.shape))
        assert b"".join(piece.tobytes() for piece in pieces) == array.tobytes()
    for ref, (ids, values) in behind.items():
        *places, count = layout.rows[ref.index]
        for at, array in zip(places, (ids, values), strict=True):
            spec = TensorSpec(array.dtype.name, array.shape)
            assert b"".join(piece.tobytes() for piece in payload.pieces(at, spec)) == array.tobytes()
        assert count == len(ids)
    for wrong in (payload.size + 1, payload.size - 1):
        with pytest.raises(InvalidRequest, match="does not fit a section"):
            prepared.check(said, wrong)


TABLE = TensorSpec("float32", (9, 2))
PLAN = Plan(
    (
        Reduction("sum", TABLE, (0,), "", "rows"),
        Reduction("sum", TABLE, (0,)),
        Reduction("sum", TABLE, (0,), "", "rows"),
    )
)
SAID = said_of(PLAN, (1.0, 1.0, 1.0), (3, 0))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (replace(SAID, rows=()), r"says \(\) rows to a section with 2 reductions of rows"),
        (replace(SAID, rows=(3,)), r"says \(3,\) rows to a section with 2"),
        (replace(SAID, rows=(3, 0, 0)), "says"),
        (replace(SAID, rows=(1 << 40, 0)), f"each may have {MAX_ROWS}"),
        (replace(SAID, rows=(3, MAX_ROWS + 1)), f"each may have {MAX_ROWS}"),
        (replace(SAID, rows=(4, 0)), "does not fit a section"),
        (replace(SAID, rows=(0, 3), weights=(1.0, 1.0, 0.0)), "does not fit a section"),
        (replace(SAID, weights=(1.0, 1.0)), "2 weights does not fit a section of 3 reductions"),
        (replace(SAID, weights=()), "0 weights does not fit"),
        (replace(SAID, weights=(1.0,) * 4), "4 weights does not fit"),
    ],
)
def test_a_contribution_that_does_not_fit_is_refused(said, why):
    """By its header and its size alone: how many rows somebody says costs nothing."""
    prepared = PreparedPlan(PLAN, 0)
    size = Payload.pack([np.zeros(TABLE.shape, "float32"), np.zeros(3, "int64"), np.zeros((3, 2), "float32")]).size
    prepared.check(SAID, size)
    with pytest.raises(InvalidRequest, match=why):
        prepared.check(said, size)


def test_who_only_looks_sends_no_rows():
    """Neither does a layout with rows stay for those who send others."""
    prepared = PreparedPlan(PLAN, 0)
    prepared.check(said_of(PLAN, (0.0,) * 3, (), observes=True), 0)
    sizes = {count: prepared.layout(replace(SAID, rows=(count, 0))).size for count in (0, 1, 5, 0)}
    assert sizes[0] < sizes[1] < sizes[5]
