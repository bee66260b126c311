"""TensorFlow's parameter server over gRPC, rows of a table; prints the seconds of the steps as JSON.

Its arguments: the work as JSON, the optimizer, and whether a step takes gradients alone (`push`) or gives the rows of
the next batches as well (`both`). One session runs one graph over both workers and the server, the leanest synchronous
step that TensorFlow has. The gradients of some rows are `IndexedSlices`, which its own optimizers apply. Batches lie on
the workers; their ids are as many as the shortest one has, since a graph has one shape.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rounds import free_ports, run_together
from row_steps import INITIAL, Work, drawn
from tensorflow_ps import SERVER, on_worker, serve, start

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow.compat.v1 as tf


def drive(ports: Sequence[int], work: Work, optimizer: str, calls: str) -> None:
    """Worker 0's process, whose session runs everything."""
    server = start(ports, "worker", 0)
    batches = [drawn(work, worker) for worker in range(work["workers"])]
    size = min(len(ids) for own in batches for ids in own)
    given = [np.stack([ids[:size] for ids in own]) for own in batches]
    step = tf.placeholder(tf.int64, [])
    with tf.device(SERVER):
        table = tf.get_variable("table", [work["rows"], work["width"]], tf.float32, tf.zeros_initializer())
        descent: Any = tf.train.GradientDescentOptimizer(work["rate"])
        adagrad: Any = tf.train.AdagradOptimizer(work["rate"], initial_accumulator_value=INITIAL)
    ids, rows, ahead = [], [], []
    for worker, own in enumerate(given):
        with tf.device(on_worker(worker)):
            held = tf.get_variable(f"ids{worker}", initializer=own)
            ones = tf.get_variable(f"rows{worker}", [size, work["width"]], tf.float32, tf.ones_initializer())
            ids.append(held[step % work["batches"]])
            ahead.append(held[(step + 1) % work["batches"]])
            rows.append(tf.identity(ones))
    with tf.device(SERVER):
        summed = tf.IndexedSlices(tf.concat(rows, 0), tf.concat(ids, 0))
        updated = (descent if optimizer == "sgd" else adagrad).apply_gradients([(summed, table)])
        with tf.control_dependencies([updated]):
            found = [tf.gather(table, each) for each in ahead] if calls == "both" else []
            total = tf.reduce_sum(tf.cast(table, tf.float64))
    done = [updated]
    for worker, each in enumerate(found):
        with tf.device(on_worker(worker)):
            done.append(tf.identity(each).op)
    with tf.Session(server.target) as session:
        session.run(tf.global_variables_initializer())
        make_step, seconds = session.make_callable(tf.group(*done), feed_list=[step]), []
        for number in range(work["warm"] + work["steps"]):
            begun = time.perf_counter()
            make_step(number)
            seconds.append(time.perf_counter() - begun)
        if optimizer == "sgd":
            right = -work["rate"] * (work["warm"] + work["steps"] + 1) * work["workers"] * size * work["width"]
            sums = session.run(total, {step: 0})  # with one more step
            if abs(sums - right) > 1e-3 * abs(right):
                raise ValueError(f"the table sums to {sums}, and should to {right}")
    print(json.dumps(seconds[work["warm"] :]), flush=True)


def main() -> None:
    """Starts the server and the workers."""
    work, (optimizer, calls) = json.loads(sys.argv[1]), sys.argv[2:]
    ports = free_ports(1 + work["workers"])
    others = [(serve, (ports, "worker", worker)) for worker in range(1, work["workers"])]
    run_together([(drive, (ports, work, optimizer, calls))], [(serve, (ports, "ps", 0)), *others])


if __name__ == "__main__":
    main()
