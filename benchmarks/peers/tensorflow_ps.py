"""TensorFlow's parameter server over gRPC, in graphs as TensorFlow 1 has them; the second argument says how.

`replicas`: between-graph, with `SyncReplicasOptimizer`, as training scripts have it: accumulators and a queue of tokens
on the server. `graph`: in-graph: one session runs one graph over both workers and the server, the leanest
synchronous round that TensorFlow has. The strategy of TensorFlow 2 is asynchronous, so it is not here. Variables are
reference variables: resource variables took nearly twice as long here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from typing import Any

from rounds import RATE, WORKERS, Work, free_ports, from_arguments, run_together, tell

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow.compat.v1 as tf

SERVER = "/job:ps/task:0/cpu:0"
GATE_SECONDS = 300.0
"""How long one worker may be behind the other at the end of a model."""


def on_worker(worker: int) -> str:
    """The device of a worker."""
    return f"/job:worker/task:{worker}/cpu:0"


def cluster(ports: Sequence[int]) -> Any:
    """The server and the workers at ports of this machine."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return tf.train.ClusterSpec({"ps": addresses[:1], "worker": addresses[1:]})


def start(ports: Sequence[int], job: str, task: int) -> Any:
    """One task's server, in this process."""
    tf.disable_eager_execution()
    return tf.train.Server(cluster(ports), job_name=job, task_index=task, protocol="grpc")


def serve(ports: Sequence[int], job: str, task: int) -> None:
    """A process that only answers."""
    start(ports, job, task).join()


def variables(work: Work) -> list[Any]:
    """The variables, on the server."""
    with tf.device(SERVER):
        return [variable(f"v{index}", length, 0.0) for index, length in enumerate(work.lengths)]


def gradients(work: Work, worker: int) -> list[Any]:
    """A worker's gradients: variables of its own, so that they lie there before the round."""
    with tf.device(on_worker(worker)):
        values = [float(value[0]) for value in work.gradients(worker)]
        return [
            variable(f"g{worker}_{index}", length, value, collections=[tf.GraphKeys.LOCAL_VARIABLES]).value()
            for index, (length, value) in enumerate(zip(work.lengths, values, strict=True))
        ]


def variable(name: str, length: int, value: float, **more: Any) -> Any:
    """A reference variable."""
    first = tf.constant_initializer(value)
    return tf.get_variable(name, [length], tf.float32, first, use_resource=False, **more)


def pull(values: Sequence[Any], worker: int) -> list[Any]:
    """Values of the server, copied to a worker."""
    with tf.device(on_worker(worker)):
        return [tf.identity(value) for value in values]


def measure(work: Work, session: Any, done: Any, pulled: Sequence[Any]) -> list[float]:
    """Makes rounds by running one op; reads the values once, at the end."""
    return work.measure(session.make_callable(done), values=lambda: session.run(list(pulled)))


# ---- In-graph ----


def drive(ports: Sequence[int], works: Sequence[Work]) -> None:
    """Worker 0's process, whose session runs everything."""
    server = start(ports, "worker", 0)
    for work in works:
        with tf.Graph().as_default() as graph, graph.container(work.size):
            held = variables(work)
            values = updated(work, held)
            done = tf.group(*(value for worker in range(WORKERS) for value in pull(values, worker)))
            with tf.Session(server.target) as session:
                session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                tell(work, measure(work, session, done, held))


def updated(work: Work, held: Sequence[Any]) -> list[Any]:
    """The variables after a round's update."""
    pushed = zip(*(gradients(work, worker) for worker in range(WORKERS)), strict=True)
    with tf.device(SERVER):
        return [
            tf.raw_ops.ApplyGradientDescent(var=to, alpha=RATE, delta=tf.add_n(each))
            for to, each in zip(held, pushed, strict=True)
        ]


# ---- Between-graph ----


def train(ports: Sequence[int], works: Sequence[Work], worker: int, gate: Any) -> None:
    """A worker's process; worker 0 is chief. At the gate the workers wait for each other."""
    server = start(ports, "worker", worker)
    options = tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{worker}"])
    for work in works:
        with tf.Graph().as_default() as graph, graph.container(work.size):
            held = variables(work)
            optimizer, done = step(work, held, worker)
            shared, own = tf.global_variables_initializer(), tf.local_variables_initializer()
            with tf.Session(server.target, config=options) as session:
                session.run([own, *[shared] * (worker == 0)])
                if worker == 0:
                    session.run(optimizer.chief_init_op)
                    aggregate(optimizer, session)
                gate.wait(GATE_SECONDS)
                seconds = measure(work, session, done, held)
                gate.wait(GATE_SECONDS)  # the first session to end would cancel the other's last round
        if worker == 0:
            tell(work, seconds)


def step(work: Work, held: Sequence[Any], worker: int) -> tuple[Any, Any]:
    """The optimizer, and the op of one round: push, wait for the token, pull."""
    with tf.device(SERVER):
        count = tf.train.get_or_create_global_step()
    descent = tf.train.GradientDescentOptimizer(RATE * WORKERS)  # of the mean
    optimizer = tf.train.SyncReplicasOptimizer(descent, WORKERS, WORKERS)
    with tf.device(on_worker(worker)):
        token = optimizer.apply_gradients(list(zip(gradients(work, worker), held, strict=True)), count)
    with tf.control_dependencies([token]), tf.device(SERVER):
        values = [variable.read_value() for variable in held]
    return optimizer, tf.group(*pull(values, worker))


def aggregate(optimizer: Any, session: Any) -> None:
    """Sums and applies gradients in a thread of the chief, until the session ends."""
    runner = optimizer.get_chief_queue_runner()
    runner.create_threads(session, coord=tf.train.Coordinator(), daemon=True, start=True)


def main() -> None:
    """Starts the server and the workers."""
    works, ports = from_arguments(), free_ports(1 + WORKERS)
    server = (serve, (ports, "ps", 0))
    if sys.argv[2] == "graph":
        others = [(serve, (ports, "worker", worker)) for worker in range(1, WORKERS)]
        run_together([(drive, (ports, works))], [server, *others])
    else:
        gate = get_context("spawn").Barrier(WORKERS)
        run_together([(train, (ports, works, worker, gate)) for worker in range(WORKERS)], [server])


if __name__ == "__main__":
    main()
