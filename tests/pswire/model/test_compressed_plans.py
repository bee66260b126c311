"""Plans with compressed reductions: their ids, their sizes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pswire.errors import InvalidRequest
from pswire.limits import PART_BYTES
from pswire.model.compression import Codec
from pswire.model.plan import Plan, Reduction, Ref
from pswire.model.tables import ROWS
from pswire.model.tensor import TensorSpec

TENSOR = TensorSpec("float32", (300, 2))
SUM = Reduction("sum", TENSOR, (0,), "'w'")
CODECS = (Codec("float16"), Codec("bfloat16"), Codec("int8"), Codec("topk", 0.1), Codec("topk", 0.2))


def plan_of(*reductions):
    return Plan(reductions, returned=(Ref("reduction", 0),))


def test_a_plan_that_compresses_nothing_has_the_id_that_it_had():
    """Of versions that know no compression; else a job could not be gone on with beside them."""
    known = "a46101c89195c045"
    assert plan_of(SUM, replace(SUM, form="rows")).id.hex()[:16] == known


def test_each_codec_makes_another_plan():
    """Also each ratio, and which of the reductions it is."""
    plans = [plan_of(SUM, SUM), *(plan_of(replace(SUM, codec=codec), SUM) for codec in CODECS)]
    plans += [plan_of(SUM, replace(SUM, codec=CODECS[0])), plan_of(replace(SUM, codec=Codec("topk", 0.1 + 1e-12)), SUM)]
    assert len({plan.id for plan in plans}) == len(plans) == len({plan.describe({}) for plan in plans})


@pytest.mark.parametrize(
    ("codec", "whole", "row"),
    [
        (Codec("float16"), 1200, 4),
        (Codec("bfloat16"), 1200, 4),
        (Codec("int8"), 600 + 3 * 4, 2 + 4),
        (Codec("topk", 0.1), 60 * 8, 8),
        (Codec("topk", 0.0001), 8, 8),
        (Codec("topk", 1.0), 600 * 8, 8),
    ],
    ids=str,
)
def test_a_contribution_takes_so_many_bytes(codec, whole, row):
    """Of an array, and of one row."""
    assert codec.nbytes(TENSOR) == replace(SUM, codec=codec).nbytes == whole
    assert codec.row_bytes(TENSOR) == row


@pytest.mark.parametrize(
    "reduction",
    [
        replace(SUM, codec=Codec("int8"), op="first"),
        replace(SUM, codec=Codec("int8"), tensor=TensorSpec("int64", (4,))),
        replace(SUM, codec=Codec("int8"), tensor=TensorSpec("complex64", (4,))),
        replace(SUM, codec=Codec("int8"), form="keys", tensor=TensorSpec("float32", (ROWS, 2))),
        *(replace(SUM, codec=Codec("topk", ratio)) for ratio in (0.0, -1.0, 1.5, float("nan"), float("inf"))),
        replace(SUM, codec=Codec("int8", 0.5)),
    ],
    ids=str,
)
def test_what_has_no_codec_is_refused(reduction):
    """A server verifies each plan."""
    with pytest.raises(InvalidRequest, match="no codec"):
        plan_of(reduction).verify({}, 1)


def test_compressed_plans_stream_by_what_is_sent():
    """From a part on that is sent; not elements by their places, which can be refused before anything is written."""
    large = TensorSpec("float32", (PART_BYTES,))  # four parts
    streams = {codec: plan_of(replace(SUM, tensor=large, codec=codec)).streams for codec in CODECS}
    assert streams == {codec: frozenset({0} if codec.kind != "topk" else ()) for codec in CODECS}
    less = TensorSpec("float32", (PART_BYTES // 2,))
    assert plan_of(replace(SUM, tensor=less)).streams == {0}
    assert plan_of(replace(SUM, tensor=less, codec=Codec("int8"))).streams == frozenset()
