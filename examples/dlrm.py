"""Clicks by PyTorch: DLRM over 26 dynamic tables on parameter servers, and made data in the shape of Criteo's.

    python examples/dlrm.py --alone                              one process, its server, and then torch alone beside it
    psworker --standalone --ps 1 --workers 2 examples/dlrm.py    a whole cluster on this machine

The rows of the next batch come with the round of this one."""

import argparse
import time
from typing import Any

from clicks import CRITEO, NUMBERS, make_clicks
from dlrm_model import DLRM, OPTIONS, RULE, Tables, auc_of, make_step, train_alone
from report import Report, say

import psclient as ps
import psclient.torch as pst

parser = argparse.ArgumentParser(description="Learns who clicks.")
parser.add_argument("--examples", type=int, default=400_000, help="how many are made, a tenth of them to test [400000]")
parser.add_argument("--epochs", type=int, default=1, help="epochs in all, those before a resume included [1]")
parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
parser.add_argument("--alone", action="store_true", help="then train by torch alone in one process, and tell its AUC")
args = parser.parse_args()
sizes, dim, tests = [min(size, 100_000) for size in CRITEO], 16, args.examples // 10
names, shape = [f"feature{number}" for number in range(len(sizes))], (len(sizes), NUMBERS, dim)
made = make_clicks(args.examples, sizes, NUMBERS)._asdict()
train, test = ({name: array[part] for name, array in made.items()} for part in (slice(tests, None), slice(tests)))


def features(ids: Any) -> pst.KeyedJaggedTensor:
    return pst.KeyedJaggedTensor(names, ids.t().flatten(), ids.new_ones(ids.numel()))


class Bags(pst.EmbeddingBagCollection):
    """The tables on servers: the rows of ids, (N, tables, dim)."""

    def forward(self, ids: Any) -> Any:
        return super().forward(features(ids)).values().unflatten(1, (len(sizes), dim))


with ps.ParameterServerStrategy(["cpu:0"]) as strategy, strategy.scope():
    net = DLRM(Bags([pst.EmbeddingBagConfig(name, dim, [name]) for name in names]), *shape)
    optimizer = pst.Optimizer(net, RULE, **OPTIONS)
    checkpoint = ps.train.Checkpoint(optimizer=optimizer)
    if args.resume:
        checkpoint.restore("dlrm")
    data = ps.ArrayDataset(train).batch(2048)
    batches = pst.Loader(data, optimizer, {net.rows: lambda given: features(given["ids"])})
    report, began = Report(strategy, args.epochs, data.batches(0), 0), time.monotonic()
    for epoch in batches.epochs(args.epochs):
        for step, given in enumerate(batches, 1):
            report.step(epoch, step, make_step(net, optimizer, given))
    speed = len(train["ids"]) * args.epochs / (time.monotonic() - began)
    say(strategy, f"saved checkpoint {checkpoint.save('dlrm/ckpt')}")
    steps = int(optimizer.rule.iterations)
    say(strategy, f"test AUC {auc_of(net, test):.3f} after {steps} steps, {speed:,.0f} examples/s")
    if args.alone and strategy.is_main_process:
        alone = train_alone(DLRM(Tables(sizes, dim), *shape), args.epochs, data)
        print(f"torch alone: test AUC {auc_of(alone, test):.3f}")
