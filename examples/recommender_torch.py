"""Ratings by PyTorch: DeepFM, whose embeddings are dynamic tables on parameter servers.

    python examples/recommender_torch.py                                      one process, and a server started for it
    psworker --standalone --ps 2 --workers 2 examples/recommender_torch.py    a whole cluster on this machine

The rows of the next batch come with the round of this one. It sees no times; recommender.py does."""

import argparse

import torch
from ratings import make_ratings, scores, split
from report import Report, say
from torch import nn

import psclient as ps
import psclient.torch as pst

parser = argparse.ArgumentParser(description="Learns who likes what from ratings.")
parser.add_argument("--ratings", type=int, default=300_000, help="how many are made [300000]")
parser.add_argument("--epochs", type=int, default=4, help="epochs in all, those before a resume included [4]")
parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
args = parser.parse_args()
train, test = split(make_ratings(3000, 1000, args.ratings), seed=0)


class DeepFM(nn.Module):
    """Of each user and item a vector, and a number that says how high its ratings are; a network sees both vectors."""

    def __init__(self) -> None:
        super().__init__()
        first = ps.initializers.RandomUniform(-0.1, 0.1)
        tables = [ps.dynamic_embedding.get_variable(name, 9, initializer=first) for name in ("users", "items")]
        self.users, self.items = map(pst.Embedding, tables)
        self.deep = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        u, v = self.users(users), self.items(items)
        return u[:, 8] + v[:, 8] + (u[:, :8] * v[:, :8]).sum(1) + self.deep(torch.cat([u[:, :8], v[:, :8]], 1))[:, 0]


torch.manual_seed(0)
with ps.ParameterServerStrategy(["cpu:0"]) as strategy, strategy.scope():
    net, mean = DeepFM(), float(train.ratings.mean())
    optimizer = pst.Optimizer(net, ps.optimizers.Adam(0.01))
    checkpoint = ps.train.Checkpoint(optimizer=optimizer)
    if args.resume:
        checkpoint.restore("recommender_torch")
    data = ps.ArrayDataset({"user": train.users, "item": train.items, "rating": train.ratings}).shuffle(0).batch(2048)
    lookups = {net.users: lambda batch: batch["user"], net.items: lambda batch: batch["item"]}
    batches, report = pst.Loader(data, optimizer, lookups), Report(strategy, args.epochs, data.batches(0), 0)
    for epoch in batches.epochs(args.epochs):
        for step, batch in enumerate(batches, 1):
            optimizer.zero_grad()
            loss = (mean + net(batch["user"], batch["item"]) - batch["rating"]).square().mean()
            loss.backward()
            optimizer.step()
            report.step(epoch, step, loss.item())
    say(strategy, f"saved checkpoint {checkpoint.save('recommender_torch/ckpt')}")
    guesses = mean + net(torch.from_numpy(test.users), torch.from_numpy(test.items)).detach().numpy()
    say(strategy, f"test {scores(guesses, test)} after {int(optimizer.rule.iterations)} steps")
