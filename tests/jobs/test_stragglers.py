"""Backup workers as real processes: rounds wait for no straggler, and each example counts once all the same."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.faults import Stall
from pstesting.processes import CALM, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import DIRECTORY, ME, add_all, gate, say
from tests.kit.internals import ServerOptions

BATCHES = 9

ROWS = 9 * BATCHES
"""Three rows of each batch are for each of three workers."""

LARGE = 560_000
"""Elements of float64 that travel in more than one part."""


def visit(rows, way, passes, backup=1, elements=1, stops=-1):
    """Counts how often each row was visited, and adds as many ones to a variable of another server, if there is one.

    Worker 2 stands still with its second batch, or in the middle of that batch's push, until a gate is opened. After a
    number of steps all save, and end.
    """

    def stall():
        say("stalled", os.getpid())
        while True:
            time.sleep(1.0)

    first = (DIRECTORY / f"worker {ME} was here").exists()
    (DIRECTORY / f"worker {ME} was here").touch()
    stands = ME == 2 and not first
    if stands and way == "half a push":
        faults.use(Stall(lambda: strategy._session.waits[0] == 1, stall))
    strategy = ps.ParameterServerStrategy(consistency=ps.Sync(backup_workers=backup))
    with strategy.scope():
        visits = ps.Variable(np.zeros(rows), name="visits")
        other = ps.Variable(np.zeros(elements), name="other")
    checkpoint = ps.train.Checkpoint(visits=visits, other=other)
    if way == "resume":
        checkpoint.restore("run")
    if way == "own data":
        own = ps.ArrayDataset(np.arange(ME, rows, 3)).batch(3)
        data = strategy.experimental_distribute_datasets_from_function(lambda _: own)
    else:
        data = strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(rows)).shuffle(3).batch(9))
    had, out = 0, set()
    for number in data.epochs(passes):
        for step, mine in enumerate(data):
            had += bool(len(mine))
            if ME < 2 and had == 5 and way in ("killed", "half a push"):
                gate("on")  # until the third one's next process waits to be taken in
            if stands and had == 2 and way != "half a push":
                stands = False
                say("at", strategy.round)
                gate("go2")
            seen = np.bincount(mine, minlength=rows).astype(float)
            strategy.run(lambda seen=seen: add_all([(visits, seen), (other, np.full(elements, seen.sum()))]))
            say("did", strategy.round - 1)
            out.update(strategy.last_round.left_out if strategy.last_round else ())
            if step == stops:
                checkpoint.save("run/ckpt")
                say("saved", visits.numpy().sum())
                return
        say("visits", visits.numpy().tolist())
        say("pass", [number, strategy.round])
    gate("end")
    say("total", float(strategy.reduce("sum", np.float64(1.0), None)))
    say("sums", [visits.numpy().tolist(), float(other.numpy()[0])])
    say("out", sorted(out))


def check(job, passes, *tasks):
    """All have the same, and each row was visited once in each pass."""
    job.open("end")
    for task in tasks:
        assert job.hear(task, "total") == len(tasks), "what is looked at is of all"
        visits, other = job.hear(task, "sums")
        assert set(visits) == {float(passes)}
        assert other == passes * ROWS
    job.finish()


@pytest.mark.parametrize("elements", [1, LARGE])
def test_the_others_go_on_without_a_straggler(tmp_path, elements):
    """While it stands still with its second batch they do its share too; then it catches up, and takes part again.

    If its late contributions are larger than a part, and sent from where they are, the rest of each is sent, and counts
    nowhere.
    """
    keys = {"ps": 2, "workers": 3, "gates": ["go2", "end"], "timeouts": CALM}
    with ProcessCluster(visit, tmp_path, (ROWS, "shared", 2, 1, elements), **keys) as job:
        job.hear(W2, "at", 1)
        if elements == LARGE:
            job.hear(W0, "did", BATCHES - 1)
        else:
            for task in (W0, W1):
                assert job.hear(task, "visits") == [1.0] * ROWS
                # All batches, then 8 slices of the straggler, three at a time, of which it has one again; at last two.
                assert job.hear(task, "pass") == [0, BATCHES + 3 + 1]
        job.open("go2")
        check(job, 2, W0, W1, W2)
        for task in (W0, W1, W2):
            assert str(W2) in job.hear(task, "out"), "no record names it"
            assert "is broken" not in job.errors(task), "a lane has not survived it"


def test_who_has_data_of_its_own_makes_them_up(tmp_path):
    """Nobody else can take them: the others go on as long as it has some, and wait for it at the end."""
    keys = {"ps": 2, "workers": 3, "gates": ["go2", "end"], "timeouts": CALM}
    with ProcessCluster(visit, tmp_path, (ROWS, "own data", 2), **keys) as job:
        job.hear(W2, "at", 1)
        for task in (W0, W1):
            job.hear(task, "did", BATCHES - 1)  # they have done theirs
        job.open("go2")
        check(job, 2, W0, W1, W2)
        assert str(W2) in job.hear(W0, "out")


@pytest.mark.ci
@pytest.mark.parametrize("way", ["half a push", pytest.param("killed", marks=pytest.mark.soak)])
def test_a_straggler_that_is_killed_takes_no_examples_along(tmp_path, way):
    """Its batch, which half of a push may have brought, is handed out again; its next process takes part again."""
    elements = 1 if way == "killed" else LARGE
    keys = {"ps": 2, "workers": 3, "chief": "driver", "gates": ["go2", "on", "end"], "timeouts": QUICK}
    with ProcessCluster(visit, tmp_path, (ROWS, way, 2, 1, elements), **keys) as job:
        job.hear(W2, *(("at", 1) if way == "killed" else ("stalled",)))
        job.hear(W0, "did", 3)
        job.kill(W2)
        job.start(W2)
        job.hear_error(W2, "waits to be taken in")
        job.open("on")
        check(job, 2, W0, W1, W2)
        assert str(W2) in job.hear(W0, "out")


@pytest.mark.ci
def test_a_checkpoint_has_what_is_to_be_handed_out_again(tmp_path):
    """All save amid a pass, in which one was left out; a job of two workers without backup workers visits the rest."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    options = ServerOptions(checkpoint_root=str(tmp_path / "checkpoints"))
    keys = {"ps": 2, "gates": ["go2", "end"], "timeouts": CALM, "server": options}
    with ProcessCluster(visit, tmp_path / "first", (ROWS, "shared", 1, 1, 1, 5), workers=3, **keys) as job:
        job.hear(W2, "at", 1)
        job.hear(W0, "did", 5)
        job.open("go2")
        seen = [job.hear(task, "saved") for task in (W0, W1, W2)]
        assert len(set(seen)) == 1
        job.finish()
    with ProcessCluster(visit, tmp_path / "second", (ROWS, "resume", 1, 0), workers=2, **keys) as job:
        check(job, 1, W0, W1)


def test_rounds_need_more_workers_than_they_may_leave_out():
    """Else they would wait for nobody: it is refused before anything is connected, as what needs all workers is."""
    with pytest.raises(ps.errors.ConfigError, match="needs more than 1 workers, and the cluster has 1; give a smaller"):
        ps.ParameterServerStrategy(consistency=ps.Sync(backup_workers=1))
    spec = ps.ClusterSpec({"ps": ["127.0.0.1:1"], "worker": ["a:1", "b:1"]})
    resolver = ps.SimpleClusterResolver(spec, task_type="worker", task_id=0)
    with pytest.raises(ps.errors.ConfigError, match="needs more than 2 workers, and the cluster has 2"):
        ps.ParameterServerStrategy(consistency=ps.Sync(backup_workers=2), cluster_resolver=resolver)
    with pytest.raises(ps.errors.ConfigError, match="with backup_workers the time decides whom a round has"):
        ps.ParameterServerStrategy(consistency=ps.Sync(backup_workers=1), deterministic=True)
