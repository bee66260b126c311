"""A job over several hosts, whose links are slow, ends with what it ends with on loopback."""

from __future__ import annotations

from functools import partial

from pstesting.hosts import Host, HostCluster
from pstesting.processes import PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import ME, say
from tests.kit.shell import linked

LENGTH = 200_000
STEPS = 3
WHERE = {PS0: "ps0", PS1: "ps1", W0: "worker0", W1: "worker1"}


def train(length, steps):
    """Trains one large variable in shards, and two small ones, by gradients that differ by worker and step."""
    import hashlib

    import numpy as np

    import psclient as ps

    cut = ps.experimental.partitioners.FixedShardsPartitioner(4)
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"], variable_partitioner=cut)
    rng = np.random.default_rng(ME)
    with strategy.scope():
        large = ps.Variable(np.zeros((length // 100, 100), "float32"), name="large")
        small = [ps.Variable(np.ones(8, "float32"), name=name) for name in ("a", "b")]
        optimizer = ps.optimizers.Adam(0.1)
    for _ in range(steps):
        pairs = [(rng.normal(size=v.shape).astype("float32"), v) for v in (large, *small)]
        strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        large.numpy()  # so that its new value comes with each round
    say("places", sorted({int(shard.device.split("ps/task:")[1].split("/")[0]) for shard in large.variables}))
    say("result", hashlib.sha256(b"".join(v.numpy().tobytes() for v in (large, *small))).hexdigest())


def results(job):
    """What both workers have at the end, which is the same."""
    assert [job.hear(task, "places") for task in (W0, W1)] == [[0, 1]] * 2
    found = {job.hear(task, "result") for task in (W0, W1)}
    job.finish()
    assert len(found) == 1
    return found


def test_a_job_over_hosts_ends_as_one_on_loopback(tmp_path, stack):
    """Bit for bit; and what it moves goes over the links of its servers, both of which have their share."""
    hosts = linked(stack, Host("ps0", 200e6), Host("ps1", 200e6), Host("worker0"), Host("worker1"))
    (tmp_path / "hosts").mkdir()
    (tmp_path / "loopback").mkdir()
    with ProcessCluster(
        train, tmp_path / "hosts", (LENGTH, STEPS), launcher=partial(HostCluster, hosts, WHERE)
    ) as cluster:
        over_hosts = results(cluster)
    with ProcessCluster(train, tmp_path / "loopback", (LENGTH, STEPS), ps=2, workers=2, lane="tcp") as cluster:
        assert results(cluster) == over_hosts
    moved = hosts.moved()
    for server in ("ps0", "ps1"):  # half of the model, of two workers, each step
        assert moved[server].received > 4 * LENGTH * STEPS
        assert moved[server].sent > 4 * LENGTH * STEPS
