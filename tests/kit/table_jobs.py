"""A job with a dynamic table, whose servers are in this process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import psclient as ps
from pstesting.in_process import InProcessCluster
from pswire.model.hashing import BUCKETS
from pswire.model.table_state import TableState, joined

de = ps.dynamic_embedding


class Job:
    """A table on some servers, a plain variable, and what trains both."""

    def __init__(self, root, servers, make=ps.optimizers.Adagrad, **options):
        self.cluster = InProcessCluster(servers, checkpoint_root=root)
        self.make = make
        self.options = {"dim": 2, "admission": de.CounterFilter(2), "eviction": de.GlobalStepEvict(20)} | options

    def __enter__(self):
        resolver = self.cluster.__enter__().resolver()
        self.strategy = ps.ParameterServerStrategy(cluster_resolver=resolver)
        return self

    def __exit__(self, *rest):
        self.strategy.close()
        self.cluster.__exit__(*rest)

    def build(self, slots=True):
        with self.strategy.scope():
            self.table = de.get_variable("users", **self.options)
            self.bias = ps.Variable(np.ones(2, "float32"), name="bias")
            self.optimizer = self.make(0.1)
            if slots:
                self.optimizer.build([self.table, self.bias])
        self.checkpoint = ps.train.Checkpoint(users=self.table, bias=self.bias, optimizer=self.optimizer)
        return self

    def train(self, steps=1, seed=0, many=60, count=40):
        rng = np.random.default_rng(seed)

        def step(keys):
            rows = self.table.lookup(keys)
            gradients = np.sin(np.asarray(rows.values) + rows.ids[:, None].astype("float32"))
            self.optimizer.apply_gradients([(rows.gradient(gradients), self.table), (np.ones(2, "float32"), self.bias)])

        for _ in range(steps):
            self.strategy.run(step, args=(rng.integers(-many, many, count),))

    def save(self, name):
        path = self.checkpoint.save(f"{name}/ckpt")
        self.checkpoint.sync()
        return path

    def state(self) -> TableState:
        """The state of all parts, with the tensors beside the rows in the order of their names."""
        self.table.size()  # all rounds are over then, on all servers
        stored = [core.machine.store.tables()[0] for core in self.cluster.cores]
        states = []
        for each in stored:
            held = each.hold(-1).whole()
            order = np.argsort([slot.name for slot in each.table.tensors])
            weights, *beside = held.tensors
            states.append(replace(held, tensors=(weights, *(beside[number] for number in order))))
        return joined(states, range(BUCKETS))

    def numbers(self):
        return {v.name: v.numpy().tobytes() for v in (self.bias, *self.optimizer.variables) if not v.shape}
