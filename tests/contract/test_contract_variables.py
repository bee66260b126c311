"""Create and Pull: variables are named once, placed once, and read as they were given."""

import ml_dtypes
import numpy as np
import pytest

from tests.kit import internals as inside
from tests.kit.rig import SOON, WORKERS, create, eventually, reduce_only

A, B = WORKERS[:2]
NUMBER = inside.TensorSpec("int64", ())

TENSORS = {
    "a number": np.array(-7, "int64"),
    "nothing": np.zeros((0, 3), "float32"),
    "one byte": np.array([True]),
    "many parts": np.arange(3 * inside.PART_BYTES // 4 + 5, dtype="int32"),
    "more than a message": np.arange((9 << 19) + 1, dtype="int8").reshape(1, -1),
    "bfloat16": np.array([[1.5, -2.25], [3e38, 0]], ml_dtypes.bfloat16),
    "columns first": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "a view": np.arange(20, dtype="uint16")[::-2],
    "big-endian": np.array([1, 2, 3], ">f8"),
    **{f"a {name}": np.array([[0, 1], [1, 0]], dtype) for name, dtype in inside.DTYPES.items()},
}


def test_a_value_is_read_as_it_was_given(job, worker):
    """Every dtype and shape, however large, and however it lay in memory; the servers keep their own copy."""
    for name, value in TENSORS.items():
        variable = job.variable(worker, value, (1,))
        back = job.value(worker, variable)
        assert back.shape == value.shape, name
        assert back.dtype == value.dtype.newbyteorder("="), name
        assert back.tobytes() == np.ascontiguousarray(value).astype(back.dtype).tobytes(), name
    value = np.array([1, 2])
    variable = job.variable(worker, value)
    value += 5
    assert job.value(worker, variable).tolist() == [1, 2]


def test_a_variable_stays_where_it_was_placed(job, worker):
    """Who creates it elsewhere is told both places."""
    variable = job.variable(worker, np.zeros(2), (1,))
    other = job.open(B).session
    for elsewhere in [(0,), (0, 1)]:
        with pytest.raises(inside.VariableMismatch, match="ps_strategy") as told:
            create(job.verbs[0], other, 0, variable.spec, elsewhere)
        assert all(word in str(told.value) for word in (str(A), str(B), str(elsewhere), "(1,)"))


def test_creating_again_changes_nothing(job, worker):
    """The same process or another: the same number and place, and the first value stays."""
    variable = job.variable(worker, np.array([1.0, 2.0]), (1,))
    for session in (worker.session, job.open(B).session):
        assert not create(job.verbs[0], session, 0, variable.spec, (1,)).initialized
        again = create(job.verbs[1], session, 0, variable.spec, (1,), inside.Payload.pack([np.array([8.0, 9.0])]))
        assert again.initialized
    assert job.value(worker, variable).tolist() == [1.0, 2.0]
    assert [server.status().variables for server in job.verbs] == [1, 1]


def test_the_log_says_which_variable_a_number_is(job, worker):
    """Who declared another one on a server before the log came there was not its creator: what it gave is forgotten."""
    stranger, spec = job.open(B).session, inside.VariableSpec("w", NUMBER)
    other = inside.VariableSpec("other", inside.TensorSpec("float32", (1000,)))
    create(job.verbs[1], stranger, 0, other, (1,), inside.Payload.pack([np.ones(1000, "float32")]))
    create(job.verbs[0], worker.session, 0, spec, (1,))
    job.approve(reduce_only(NUMBER), worker)
    assert not create(job.verbs[1], worker.session, 0, spec, (1,)).initialized
    create(job.verbs[1], worker.session, 0, spec, (1,), inside.Payload.pack([np.array(3)]))
    assert int(job.value(worker, inside.PlacedVariable(0, spec, (1,)))) == 3
    assert (job.verbs[1].status().variables, job.verbs[1].status().variable_bytes) == (1, spec.tensor.nbytes)
    with pytest.raises(inside.VariableMismatch):
        create(job.verbs[1], stranger, 0, other, (1,))


def test_one_may_ask_first(job, worker):
    """A large value travels only where it is wanted. Until then the variable has none that could be read."""
    spec = inside.VariableSpec("w", NUMBER)
    create(job.verbs[0], worker.session, 0, spec, (1,))
    assert not create(job.verbs[1], worker.session, 0, spec, (1,)).initialized
    with pytest.raises(inside.InvalidRequest, match="'w' has no value"):
        job.verbs[1].pull(worker.session, [0], -1).result(SOON)
    assert create(job.verbs[1], worker.session, 0, spec, (1,), inside.Payload.pack([np.array(3)])).initialized
    assert create(job.verbs[1], worker.session, 0, spec, (1,)).initialized
    here = inside.VariableSpec("here", NUMBER)
    assert not create(job.verbs[0], worker.session, 1, here, (0,)).initialized
    with pytest.raises(inside.InvalidRequest, match="'here' has no value"):
        job.verbs[0].pull(worker.session, [1], -1).result(SOON)


def test_two_that_disagree_are_told(job, worker):
    """A mismatch of shape, dtype, name, consistency or order names both sides and both processes. A process that
    creates its third variable where the job has one runs another program."""
    job.variable(worker, np.zeros(2))
    other = job.open(B).session
    for ordinal, spec in (
        (0, inside.VariableSpec("v0", inside.TensorSpec("float64", (3,)))),
        (0, inside.VariableSpec("v0", inside.TensorSpec("float32", (2,)))),
        (0, inside.VariableSpec("other", inside.TensorSpec("float64", (2,)))),
        (0, inside.VariableSpec("v0", inside.TensorSpec("float64", (2,)), alone=True)),
        (1, inside.VariableSpec("v0", inside.TensorSpec("float64", (2,)))),
    ):
        with pytest.raises(inside.VariableMismatch) as told:
            create(job.verbs[0], other, ordinal, spec, (0,))
        message = str(told.value)
        assert all(word in message for word in (str(A), str(B), str(spec), "'v0' float64[2]"))
    with pytest.raises(inside.Diverged, match="number 2, but the job has only 1"):
        create(job.verbs[0], worker.session, 2, inside.VariableSpec("w", NUMBER), (0,))


def test_what_cannot_be_is_refused(job, worker):
    """Names that nobody can read, dtypes that do not travel, sizes that nothing can hold, and servers that are not
    there. A value of another size is refused as well, and not kept: the right one is taken afterwards."""
    for spec in (
        inside.VariableSpec("", NUMBER),
        inside.VariableSpec("x" * 600, NUMBER),
        inside.VariableSpec("a\nb", NUMBER),
        inside.VariableSpec("w", inside.TensorSpec("object", ())),
        inside.VariableSpec("w", inside.TensorSpec("float32", (1 << 50,))),
    ):
        with pytest.raises(inside.InvalidRequest):
            create(job.verbs[0], worker.session, 0, spec, (0,))
    for servers in ((), (2,), (0, 7)):
        with pytest.raises(inside.InvalidRequest, match="of a job with 2 servers"):
            create(job.verbs[0], worker.session, 0, inside.VariableSpec("w", NUMBER), servers)
    assert job.verbs[0].status().variables == 0
    spec = inside.VariableSpec("w", inside.TensorSpec("float64", (2,)))
    for value in (np.zeros(3), np.zeros(1), np.zeros((2, 2))):
        with pytest.raises(inside.InvalidRequest):
            create(job.verbs[0], worker.session, 0, spec, (0,), inside.Payload.pack([value]))
    variable = job.variable(worker, np.array([1.0, 2.0]), (0,), "w")
    assert job.value(worker, variable).tolist() == [1.0, 2.0]


def test_a_server_that_does_not_hold_it_takes_no_value(job, worker):
    """It knows the variable, and says that it is not the place for it. A holder refuses a number for another one."""
    variable = job.variable(worker, np.array(1), (1,))
    for servers in ((1,), (0,)):
        with pytest.raises(inside.PSError) as told:
            create(job.verbs[0], worker.session, 0, variable.spec, servers, inside.Payload.pack([np.array(2)]))
        assert isinstance(told.value, inside.InvalidRequest | inside.VariableMismatch)
    with pytest.raises(inside.InvalidRequest, match="'v0' has no value") as told:
        job.verbs[0].pull(worker.session, [0], -1).result(SOON)
    assert told.value.task == "/job:ps/task:0"
    with pytest.raises(inside.VariableMismatch, match="variable 0 is 'v0'"):
        create(job.verbs[1], worker.session, 0, inside.VariableSpec("other", NUMBER), (1,))


def test_before_a_job_nothing_is_created(serve):
    """Without a chief nobody knows how many servers there are."""
    (server,) = serve(1).verbs
    session = server.open(A, 1, 0, False).session
    with pytest.raises(inside.InvalidRequest, match="the chief has not started a job"):
        create(server, session, 0, inside.VariableSpec("w", NUMBER), ())


def test_a_read_waits_for_its_round(job, worker):
    """One that has been in a round sees its effect on every server. A value that was read does not change: updates make
    new arrays. An unknown variable is refused at once, and not when a round that may never come has come."""
    variable, plan = job.adder(worker, [10, 20])
    before = job.value(worker, variable)
    reading = job.verbs[0].pull(worker.session, [variable.id], 0)
    eventually(lambda: job.servers.cores[0].machine.job.reads.calls)
    with pytest.raises(inside.InvalidRequest, match="variable 5 has no value"):
        job.verbs[0].pull(worker.session, [5], 3).result(SOON)
    assert not reading.done()
    worker.make(plan, [[5, 5]])
    reply = reading.result(SOON)
    assert (reply.round, reply.payload.tensors([variable.spec.tensor])[0].tolist()) == (0, [15, 25])
    assert before.tolist() == [10, 20]
