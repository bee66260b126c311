"""A consistency for each variable: in one process a script computes what it would without; what is refused, and how."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.cases import once
from tests.kit.strategies import EMBEDDED, kinds, patient, refused

SERVERS = kinds("servers-1x1", "servers-3x2", soak=EMBEDDED)


@contextmanager
def on_servers(count, **keys):
    """A strategy on some servers, with one replica."""
    with (
        InProcessCluster(count) as cluster,
        ps.ParameterServerStrategy(cluster_resolver=patient(cluster).resolver(), **keys) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def two():
    """A strategy on two servers, with one replica."""
    with on_servers(2) as found:
        yield found


OPTIMIZERS = {
    "SGD": lambda: ps.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: ps.optimizers.Adam(0.1),
    "clipnorm": lambda: ps.optimizers.Adam(0.1, clipnorm=0.5, use_ema=True),
    "accumulates": lambda: ps.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "schedule": lambda: ps.optimizers.SGD(ps.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
}


@once(strategy=["servers-2x2", "servers-1x2", "mirrored-2"], name=OPTIMIZERS)
def test_one_process_trains_alike(strategy, name):
    """Each step of variables of both kinds, dense ones and rows, is that of a job of one kind, bit for bit."""
    found = []
    for consistency in (None, ps.Async()):
        with strategy.scope():
            dense = ps.Variable(np.ones((3, 2), "float32"), name="dense")
            apart = ps.Variable(np.ones((3, 2), "float32"), name="apart", consistency=consistency)
            rows = ps.Variable(np.ones((6, 2), "float32"), name="rows", consistency=consistency)
            optimizer = OPTIMIZERS[name]()

        def step(number, dense=dense, apart=apart, rows=rows, optimizer=optimizer):
            taken = rows.lookup([number % 6, 0])
            d = np.full((3, 2), number + 1, "float32")
            pairs = [(d + dense, dense), (d * apart, apart), (taken.gradient(taken.values * 0.5), rows)]
            optimizer.apply_gradients(pairs)

        for number in range(6):
            strategy.run(step, (number,))
        found.append([v.numpy() for v in (dense, apart, rows)])
    for one, other in zip(*found, strict=True):
        assert one.tobytes() == other.tobytes()


@SERVERS
def test_what_lies_beside_has_its_consistency(strategy):
    """Slots, averages, and what a user creates in colocate_vars_with; not what says otherwise."""
    with strategy.scope():
        v = ps.Variable(np.zeros(4, "float32"), consistency=ps.Async())
        plain = ps.Variable(np.zeros(4, "float32"))
        with strategy.extended.colocate_vars_with(v):
            beside = ps.Variable(np.zeros(4, "float32"))
            other = ps.Variable(np.zeros(4, "float32"), consistency=ps.Sync())
        with strategy.extended.colocate_vars_with(strategy.extended.non_slot_devices([v])):
            of_all = ps.Variable(0)
        optimizer = ps.optimizers.Adam(0.1, use_ema=True)
    optimizer.build([v, plain])
    assert [each._alone for each in (v, plain, beside, other, of_all)] == [True, False, True, False, False]
    assert v.consistency == beside.consistency == ps.Async()
    kept = {each.name.rpartition("/")[2]: each._alone for each in optimizer._state.of(v)}
    assert kept == dict.fromkeys(kept, True)
    assert not any(each._alone for each in optimizer._state.of(plain))
    counts = [shared["iterations"] for shared in optimizer._state.everywhere]
    assert [count._alone for count in counts] == [False, True]
    assert optimizer.iterations is counts[0]


def test_shards_and_tables_have_it(two):
    """Each shard of a partitioned variable, each part of a dynamic table, and the slots beside them."""
    cut = ps.experimental.partitioners.FixedShardsPartitioner(2)
    with on_servers(2, variable_partitioner=cut) as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros((6, 2), "float32"), consistency=ps.Async())
            table = ps.dynamic_embedding.get_variable("t", dim=2, initializer=0, consistency=ps.Async())
            again = ps.dynamic_embedding.get_variable("t", dim=2, initializer=0, consistency=ps.Async())
            optimizer = ps.optimizers.SGD(0.5, momentum=0.5)
        assert again is table
        with strategy.scope(), pytest.raises(ValueError, match=r"consistency 'Async\(\)', not None"):
            ps.dynamic_embedding.get_variable("t", dim=2, initializer=0)
        taken = np.float32([[1, 1], [2, 2]])

        def step():
            slices = ps.IndexedSlices(taken, [0, 5])
            optimizer.apply_gradients([(slices, v), (table.lookup([7, 8]).gradient(taken), table)])

        for _ in range(2):
            strategy.run(step)
        slots = [slot for each in (v, table) for slot in optimizer._state.of(each)]
        assert all(part._alone for each in (v, table, *slots) for part in each.variables)
        assert v.numpy()[[0, 5]].tolist() == table.lookup([7, 8]).numpy().tolist() == [[-1.25] * 2, [-2.5] * 2]
        assert strategy.round == 0  # nothing of it is a round of all


def in_merge(strategy, fn, *args):
    """Calls a function where the replicas meet."""
    return strategy.run(lambda: ps.get_replica_context().merge_call(fn, args))


def test_values_of_both_come_back_by_their_names(two):
    """A section of both kinds is two plans; what it returns is what it would be of one, in whichever order it is
    recorded, and again where the step is repeated."""
    kinds = (ps.Async(), None, ps.Async())
    with two.scope():
        variables = [ps.Variable(np.zeros(2), consistency=kind) for kind in kinds]

    def add(s, x):
        found = [s.extended.reduce_to("sum", x * k, v) for k, v in zip((1, 10, 100), variables, strict=True)]
        pairs = zip(variables, found, strict=True)
        return *found, *(s.extended.update(v, lambda v, x: v.assign_add(x).value() * 2.0, (x,)) for v, x in pairs)

    for number in (1, 2):
        values = [float(np.asarray(x)[0]) for x in in_merge(two, add, np.ones(2))]
        assert values == [1, 10, 100, 2 * number, 20 * number, 200 * number]


def of_both(strategy):
    """A variable of each kind, on one server."""
    with strategy.scope():
        apart = ps.Variable(np.zeros(2), name="apart", consistency=ps.Async())
        with strategy.extended.colocate_vars_with(apart):
            shared = ps.Variable(np.zeros(2), name="shared", consistency=ps.Sync())
    return apart, shared


CROSSINGS = {
    "assigned together": (
        lambda e, mine, ours: e.update(mine, lambda v, w: (v.assign_add(1.0), w.assign_add(1.0)), (ours,)),
        "assigns both 'apart.*use one update for each",
    ),
    "read by all": (
        lambda e, mine, ours: e.update(ours, lambda v, w: v.assign_add(w.value()), (mine,)),
        "the update of variable 'shared.*uses variable 'apart.*may differ between workers",
    ),
    "reduced alone": (
        lambda e, mine, ours: e.update(ours, ps.Variable.assign_add, (e.reduce_to("sum", np.ones(2), mine),)),
        "the update of variable 'shared.*uses a reduced value, which may differ between workers",
    ),
    "reduced together": (
        lambda e, mine, ours: e.update(mine, ps.Variable.assign_add, (e.reduce_to("sum", np.ones(2), ours),)),
        "each worker updates variable 'apart.*but the update uses a reduced value, which waits for all workers",
    ),
    "result of all": (
        lambda e, mine, ours: e.update(mine, ps.Variable.assign_add, (e.update(ours, lambda v: v.value() * 2.0),)),
        "each worker updates variable 'apart.*but the update uses the result of an update, which waits for all workers",
    ),
}


@pytest.mark.parametrize("name", CROSSINGS)
def test_what_may_not_cross(two, name):
    """Where the user's line is, with what to do; nothing of the section is made, and the strategy goes on. An
    asynchronous update may read what all have, as of the last round that is over."""
    (crossing, words), (apart, shared), before = CROSSINGS[name], of_both(two), two.round
    refused(ValueError, words, lambda: in_merge(two, lambda s, _: crossing(s.extended, apart, shared), 1))
    with two.scope():
        assert [v.numpy().tolist() for v in (apart, shared)] == [[0.0, 0.0]] * 2
        shared.assign([1.0, 1.0])
        apart.assign([2.0, 2.0])
        assert [v.numpy().tolist() for v in (apart, shared)] == [[2.0, 2.0], [1.0, 1.0]]
        two.extended.update(apart, lambda v, w: v.assign(w.value() * 5.0), (shared,))
        assert apart.numpy().tolist() == [5.0, 5.0]
    assert two.round > before


def test_optimizers_that_need_all_gradients(two):
    """A norm of all gradients is of all workers, or of one; of both kinds it is neither."""
    apart, shared = of_both(two)
    ones = np.ones(2)
    both = ps.optimizers.SGD(1.0, global_clipnorm=1.0)
    with pytest.raises(ValueError, match=r"global_clipnorm .*'apart.*\); use another optimizer for such variables"):
        two.run(lambda: both.apply_gradients([(ones, apart), (ones, shared)]))
    scaled = ps.optimizers.SGD(1.0, loss_scale_factor=ps.optimizers.DynamicLossScale())
    refused(ValueError, "DynamicLossScale", lambda: two.run(lambda: scaled.apply_gradients([(ones, apart)])))
    alone = ps.optimizers.SGD(1.0, global_clipnorm=1.0)
    two.run(lambda: alone.apply_gradients([(np.float64([3.0, 4.0]), apart)]))
    np.testing.assert_allclose(apart.numpy(), [-0.6, -0.8])


JOBS = {
    "bounded": ({"consistency": ps.BoundedStaleness(2)}, ps.Async(), "limits all variables to 2 rounds"),
    "deterministic": ({"deterministic": True}, ps.Async(), "deterministic=True needs rounds"),
    "nonfinite": ({"consistency": ps.Sync(nonfinite="skip")}, ps.Async(), r"use ps.Async\(nonfinite='skip'\)"),
    "staleness": ({}, ps.BoundedStaleness(2), r"consistency=ps\.BoundedStaleness\(2\), but the job has ps\.Sync\(\)"),
    "sync": ({"consistency": ps.Async()}, ps.Sync(), r"has consistency=ps\.Sync\(\), but the job has ps\.Async\(\)"),
}


@pytest.mark.parametrize("name", JOBS)
def test_jobs_that_have_none_of_it(name):
    """The first variable is refused, before anything is sent of it."""
    keys, given, words = JOBS[name]
    with on_servers(1, **keys) as strategy, strategy.scope():
        refused(ps.errors.ConfigError, words, lambda: ps.Variable(0.0, name="v", consistency=given))
        assert ps.Variable(0.0, name="v", consistency=strategy.consistency).name == "v"


def test_a_job_keeps_to_what_goes_with_its_variables():
    """A change of the job's consistency that its variables do not have is refused in each process, before it waits."""
    with on_servers(1) as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(2), name="v", consistency=ps.Async())
            w = ps.Variable(np.zeros(2), name="w")
        with pytest.raises(ps.errors.ConfigError, match=r"variable 'v'.*use ps\.Sync"):
            strategy.set_consistency(ps.BoundedStaleness(1))

        optimizer = ps.optimizers.SGD(1.0)

        def step():  # which is repeated without being recorded anew
            optimizer.apply_gradients([(-np.ones(2), v), (-np.ones(2), w)])

        rounds = []
        for consistency in (ps.Async(), ps.Sync(), ps.Async(), ps.Sync()):
            for _ in range(2):
                strategy.run(step)
            strategy.set_consistency(consistency)
            rounds.append(strategy.round)
        assert rounds == [2, 4, 6, 8]
        assert [each.numpy().tolist() for each in (v, w)] == [[8.0, 8.0]] * 2
        assert strategy._exchange._alone.round == 4  # in the two synchronous stretches


def test_what_is_no_consistency(two, monkeypatch):
    """Is refused where it is written; copies of replicas, which are nobody else's, and of servers have none. Outside of
    every scope, and in a strategy of one process, it says nothing new."""
    with two.scope():
        for given in ("async", ps.Async, 3):
            for create in (ps.Variable, lambda _, **keys: ps.dynamic_embedding.get_variable("none", dim=1, **keys)):
                with pytest.raises(TypeError, match=r"is not a consistency; use ps\.Async"):
                    create(0.0, consistency=given)
        with pytest.raises(ValueError, match="ON_READ"):
            ps.Variable(0.0, synchronization=ps.VariableSynchronization.ON_READ, consistency=ps.Async())
        with monkeypatch.context() as patched:
            patched.setattr(two._session, "copied", True)
            with pytest.raises(ps.errors.ConfigError, match="PS_REPLICATION_FACTOR=2 needs rounds"):
                ps.Variable(0.0, consistency=ps.Async())
    assert not ps.Variable(1.0, consistency=ps.Async())._alone
    with ps.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        assert not ps.Variable(1.0, consistency=ps.Async())._alone


def test_an_error_of_all_leaves_nothing():
    """The part of all comes first: where it is refused, nobody makes the rest, which others could not take back."""
    with on_servers(1, consistency=ps.Sync(nonfinite="raise")) as strategy:
        with strategy.scope():
            w = ps.Variable(np.zeros(2), name="w")
            t = ps.Variable(np.zeros(2), name="t", consistency=ps.Async(nonfinite="raise"))
            optimizer = ps.optimizers.SGD(1.0)

        def step(*gradients):
            optimizer.apply_gradients([(np.full(2, gradients[0]), t), (np.full(2, gradients[1]), w)])

        strategy.run(step, (1.0, 1.0))
        refused(ps.errors.NonfiniteError, "'w'", lambda: strategy.run(step, (1.0, np.nan)))
        assert [v.numpy().tolist() for v in (w, t)] == [[-1.0, -1.0]] * 2
        refused(ps.errors.NonfiniteError, "'t'", lambda: strategy.run(step, (np.inf, 1.0)))
        assert [v.numpy().tolist() for v in (w, t)] == [[-2.0, -2.0], [-1.0, -1.0]]
        assert strategy.round == 3


def test_what_is_open_comes_before_a_save(two):
    """A checkpoint is of a section of all; what this worker has recorded alone is sent before it."""
    strategy = two
    with strategy.scope():
        t = ps.Variable(np.zeros(2), name="open", consistency=ps.Async())
        w = ps.Variable(np.zeros(2), name="open too")
        mine = strategy.extended.reduce_to("sum", np.ones(2), t)
        strategy.extended.update(t, lambda v, x: v.assign_add(x), (mine,))
        ours = strategy.extended.reduce_to("sum", np.ones(2), w)
        left = strategy.extended.reduce_to("sum", np.full(2, 3.0), t)
        checkpoint = ps.train.Checkpoint(t=t, w=w)
        path = checkpoint.save("consistency/open/ckpt")
        assert [np.asarray(x).tolist() for x in (ours, left)] == [[1.0, 1.0], [3.0, 3.0]]
        t.assign([7.0, 7.0])
        checkpoint.restore(path).assert_consumed()
        assert t.numpy().tolist() == [1.0, 1.0]


def test_a_large_round_has_the_transport_for_itself(two, monkeypatch):
    """What this worker has on its way of its own is taken in before: it would lie in memory that streams need."""
    strategy, exchange = two, two._exchange
    with strategy.scope():
        large = ps.Variable(np.zeros(1 << 20))
        t = ps.Variable(np.zeros(2), consistency=ps.Async())
    push, busy = exchange._push_all, []

    def pushed(outgoing, *rest):
        busy.append(exchange.own.busy) if outgoing.plan.streams else None
        return push(outgoing, *rest)

    monkeypatch.setattr(exchange, "_push_all", pushed)

    def merge(s, x, y):
        for v, z in ((large, x), (t, y)):
            s.extended.update(v, lambda v, z: v.assign_add(z), (s.extended.reduce_to("sum", z, v),))

    for _ in range(3):
        strategy.run(lambda: ps.get_replica_context().merge_call(merge, (np.ones(1 << 20), np.ones(2))))
        assert exchange.own.busy or len(busy) == 1
    assert busy == [False] * 3
