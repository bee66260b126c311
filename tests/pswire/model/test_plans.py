"""Plans: their identity, rows and compression in them, and what is refused; changes of consistency as join points."""

from dataclasses import astuple, replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pswire.encoding import messages
from pswire.errors import InvalidRequest, ProgramError
from pswire.limits import PART_BYTES
from pswire.model import plan as plans
from pswire.model.changes import Change
from pswire.model.compression import Codec
from pswire.model.consistency import ASYNC, SYNC, Consistency
from pswire.model.hashing import canonical
from pswire.model.log import Member
from pswire.model.plan import Apply, Operand, Plan, Reduction, Ref, RestoreCommit, SnapshotOrder, Trim, Turn
from pswire.model.program import Input, Node, Program
from pswire.model.tables import ROWS
from pswire.model.tensor import TensorSpec
from pswire.pb import parameter_server_pb2 as pb
from tests.kit.cases import search
from tests.kit.rig import WORKERS, scaling

# ---- Rows ----

TABLE, NUMBER = TensorSpec("float32", (4, 2)), TensorSpec("float32", ())
STEP = replace(scaling(TABLE), outputs=())
V, X = Input("variable", TABLE), Input("value", TABLE)
DECAY = Program((V, X), (Node("multiply", (0, 1)),), ((0, 2),), ())
WHOLE_SUM = Node("sum", (1,), (("axis", None), ("keepdims", False)))
NORM = Program((V, X), (WHOLE_SUM, Node("multiply", (0, 2))), ((0, 3),), ())
VARIABLES = {n: plans.PlacedVariable(n, plans.VariableSpec(f"v{n}", TABLE), (0,)) for n in range(2)}
W, G = Ref("variable", 0), Ref("reduction", 0)

ATTRS = (None, True, 1, 1.0, 0.0, -0.0, float("nan"), float("inf"), 1e16, "", "NaN", "1", (), (1,), (1, 0))
"""Values of attributes, of which many are nearly others."""

NAMES, SERVERS = st.sampled_from(["", "w", "1", "[", '"', "\u00e4"]), st.sampled_from([(), (0,), (1,), (0, 1)])
FEW, SWITCH = st.integers(0, 2), st.booleans()


def some(values):
    return st.lists(values, max_size=2).map(tuple)


SPECS = st.builds(TensorSpec, st.sampled_from(["float32", "int8"]), some(FEW))
INPUTS = st.builds(Input, st.sampled_from(["variable", "value"]), SPECS)
NODES = st.builds(Node, NAMES, some(FEW), some(st.tuples(NAMES, st.sampled_from(ATTRS) | st.floats())))
PROGRAMS = st.builds(Program, some(INPUTS), some(NODES), some(st.tuples(FEW, FEW)), some(FEW))
REFS = st.builds(Ref, st.sampled_from(["variable", "operand"]), FEW)
CODEC = st.none() | st.builds(
    Codec, st.sampled_from(["int8", "int4", "topk"]), st.sampled_from([1.0, 0.5, 0.1, 0.1 + 1e-16])
)
OPS, FORMS = st.sampled_from(["sum", "mean"]), st.sampled_from(["dense", "rows"])
PARTS = {
    "reductions": some(st.builds(Reduction, OPS, SPECS, SERVERS, NAMES, FORMS, CODEC)),
    "operands": some(st.builds(Operand, SPECS, SERVERS, NAMES)),
    "programs": some(PROGRAMS),
    "applies": some(st.builds(Apply, FEW, SERVERS, some(REFS), st.sampled_from(["dense", "lazy"]), SWITCH)),
    "returned": some(REFS),
    "snapshot": st.none() | st.builds(SnapshotOrder, NAMES, SERVERS, FEW, NAMES, FEW),
    "restore": st.none() | st.builds(RestoreCommit, NAMES, SERVERS, st.builds(Turn, FEW, FEW, FEW), NAMES),
    "nonfinite": st.sampled_from(["apply", "skip"]),
    "trims": some(st.builds(Trim, FEW, SERVERS, FEW)),
    "copied": SWITCH,
}
PLANS = st.sampled_from([*PARTS]).flatmap(lambda name: st.builds(Plan, **{name: PARTS[name]}))
"""Plans of one kind of parts each, so that two of them are often nearly equal."""


def told(plan):
    """All that a plan says, in Python's words."""
    order = plan.snapshot and replace(plan.snapshot, state="")
    return repr(astuple(replace(plan, snapshot=order)))


def test_an_id_is_the_hash_of_canonical_bytes():
    """They are the same with each Python: fields in their order, floats by their shortest digits, ASCII alone."""
    attrs = tuple((f"a{n}", value) for n, value in enumerate(ATTRS))
    program = Program((Input("variable", TABLE),), (Node("add", (0, 0), attrs),), ((0, 1),), ())
    plan = Plan(
        (Reduction("mean", NUMBER, (1,), "\u00e4", "rows", Codec("topk", 0.1)),),
        programs=(program,),
        applies=(Apply(0, (0,), (W,), "lazy", True),),
        snapshot=SnapshotOrder("run/ckpt-7", (0, 1), 7, '{"state": {}}', 2),
        restore=RestoreCommit("run", (0,), Turn(3, 1, 0), "ab"),
        trims=(Trim(1, (0,), 9),),
    )
    written = (
        rb'[[["mean",["float32",[]],[1],"\u00e4","rows",["topk",0.1]]],[],[[[["variable",["float32",[4,2]]]],'
        rb'[["add",[0,0],[["a0",null],["a1",true],["a2",1],["a3",1.0],["a4",0.0],["a5",-0.0],["a6",NaN],'
        rb'["a7",Infinity],["a8",1e+16],["a9",""],["a10","NaN"],["a11","1"],["a12",[]],["a13",[1]],["a14",[1,0]]]]],'
        rb'[[0,1]],[]]],[[0,[0],[["variable",0]],"lazy",true]],[],["run/ckpt-7",[0,1],7,2],'
        rb'["run",[0],[3,1,0],"ab"],"apply",[[1,[0],9]],false]'
    )
    assert canonical(plan) == written
    assert plan.id == sha256(written).digest()


@search(3)
@given(st.data())
def test_equal_plans_and_only_they_have_equal_ids(data):
    """Type for type, to the sign of a zero; whatever NaN it is; and after a journey in a message."""
    one, other = data.draw(PLANS), data.draw(PLANS)
    assert (one.id == other.id) == (told(one) == told(other))
    assert messages.PLAN.from_pb(pb.Plan.FromString(messages.PLAN.to_pb(one).SerializeToString())).id == one.id


TWO = Program((V, X, X), (Node("multiply", (1, 2)), Node("add", (0, 3))), ((0, 4),), ())
OTHER, RATE = Ref("reduction", 1), Ref("operand", 0)
MIXED, OF_TWO = "cannot mix rows with whole arrays", "it takes those of one gradient"
UPDATES = {
    "of rows": (STEP, (W, G, RATE), ("rows",), True, None),
    "of a whole gradient": (STEP, (W, G, RATE), ("dense",), False, MIXED),
    "that changes other rows": (DECAY, (W, G), ("rows",), False, None),
    "by all rows together": (NORM, (W, G), ("rows",), False, "sum works neither elementwise"),
    "of two gradients": (TWO, (W, G, OTHER), ("rows", "rows"), False, OF_TWO),
    "of rows and a whole": (TWO, (W, G, OTHER), ("rows", "dense"), False, MIXED),
    "of one gradient twice": (TWO, (W, G, G), ("rows",), False, OF_TWO),
}
"""Updates: program, arguments, forms of gradients; whether it runs on rows, and why it cannot be lazy, if it cannot."""


@pytest.mark.parametrize("case", UPDATES)
def test_which_updates_run_on_rows(case):
    """Those of one gradient's rows that keep all others, or are lazy; a lazy one that cannot be is told why."""
    program, args, forms, by_rows, why = UPDATES[case]
    reductions = tuple(Reduction("sum", TABLE, (0,), "", form) for form in forms)
    plan = Plan(reductions, (Operand(NUMBER, (0,)),), (program,), (Apply(0, (0,), args),))
    assert plan.verify(VARIABLES, 1).by_rows == ((0,) if by_rows else (None,))
    lazy = replace(plan, applies=(replace(plan.applies[0], sparse="lazy"),))
    if why is None:
        assert lazy.verify(VARIABLES, 1).by_rows == (0,)
    else:
        with pytest.raises(ProgramError, match=f"a sparse update cannot run on rows: .*{why}"):
            lazy.verify(VARIABLES, 1)


def test_a_server_with_rows_waits_for_all_of_them():
    """How many bytes come is not known from the plan; the other servers stream as before."""
    large = TensorSpec("float32", (PART_BYTES // 4 + 1, 1))
    plan = Plan((Reduction("sum", large, (0,)), Reduction("sum", large, (1,))), returned=(G, OTHER))
    assert plan.streams == {0, 1}
    assert replace(plan, reductions=(replace(plan.reductions[0], form="rows"), plan.reductions[1])).streams == {1}


def test_reduced_rows_come_behind_what_is_whole():
    """Whatever the order in which they are returned."""
    plan = Plan((Reduction("sum", TABLE, (0,), "", "rows"), Reduction("sum", TABLE, (0,))), returned=(G, OTHER))
    assert [ref for ref, _ in plan.given(0)] == [OTHER]
    assert [ref for ref, _ in plan.given_rows(0)] == [G]
    assert (plan.given(1), plan.given_rows(1)) == ([], [])


# ---- Compression ----

TENSOR = TensorSpec("float32", (300, 2))
SUM = Reduction("sum", TENSOR, (0,), "'w'")
CODECS = (Codec("float16"), Codec("bfloat16"), Codec("int8"), Codec("int4"), Codec("topk", 0.1), Codec("topk", 0.2))


def plan_of(*reductions):
    return Plan(reductions, returned=(Ref("reduction", 0),))


@pytest.mark.parametrize(("codec", "whole", "row"), [
    (Codec("float16"), 1200, 4), (Codec("bfloat16"), 1200, 4), (Codec("int8"), 600 + 3 * 4, 2 + 4),
    (Codec("int4"), 300 + 3 * 4, 1 + 4),
    (Codec("topk", 0.1), 60 * 8, 8), (Codec("topk", 0.0001), 8, 8), (Codec("topk", 1.0), 600 * 8, 8),
], ids=str)  # fmt: skip
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
        replace(SUM, codec=Codec("int4", 0.5)),
        *(Reduction(op, NUMBER, (0,), "", "rows") for op in ("sum", "mean", "first")),
    ],
    ids=str,
)
def test_what_has_no_codec_or_no_rows_is_refused(reduction):
    """A server verifies each plan."""
    with pytest.raises(InvalidRequest, match=r"does not support codec|is not a codec|a scalar has no rows"):
        plan_of(reduction).verify({}, 1)


def test_compressed_plans_stream_by_what_is_sent():
    """From a part on that is sent; not elements by their places, which can be refused before anything is written."""
    large = TensorSpec("float32", (3 * PART_BYTES,))  # twelve parts
    streams = {codec: plan_of(replace(SUM, tensor=large, codec=codec)).streams for codec in CODECS}
    assert streams == {codec: frozenset({0} if codec.kind != "topk" else ()) for codec in CODECS}
    less = TensorSpec("float32", (PART_BYTES // 2,))
    assert plan_of(replace(SUM, tensor=less)).streams == {0}
    assert plan_of(replace(SUM, tensor=less, codec=Codec("int8"))).streams == frozenset()


# ---- Changes of consistency ----

CHANGES = {
    "ps.Sync()": Change(0, 0, SYNC),
    "ps.Sync(nonfinite='skip', backup_workers=2)": Change(2, 7, Consistency("sync", 2), "skip"),
    "ps.Async()": Change(3, 8, ASYNC),
    "ps.BoundedStaleness(4, nonfinite='raise')": Change(4, 9, Consistency("bounded", 0, 4), "raise"),
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_change_survives_its_join_point(said):
    """And says what a script says for it; other join points are no changes, nor is what nobody says. Two ask for the
    same wherever they are: the round is each one's own. A member keeps its task, session and replicas."""
    change = CHANGES[said]
    assert Change.parse(str(change)) == change
    assert change.said == said
    for text in ("", "save", "dataset:1", "change:1:2:never:0:0:apply", "change:1:2:async:0:0", "x"):
        assert Change.parse(text) is None
    assert change.same(replace(change, round=99))
    assert not change.same(replace(change, number=11))
    assert not change.same(replace(change, nonfinite="other"))
    member = Member(WORKERS[0], 3, 2, Consistency("sync", 1))
    assert change.moved(member) == Member(WORKERS[0], 3, 2, change.consistency)
