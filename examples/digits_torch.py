"""Handwritten digits by PyTorch: a convolutional network with BatchNorm, trained on parameter servers.

    python examples/digits_torch.py                                      one process, and a server started for it
    psworker --standalone --ps 2 --workers 2 examples/digits_torch.py    a whole cluster on this machine

The loop is torch's; the optimizer's step is a round with the servers.
"""

import argparse

import torch
from digits import load_data
from report import Report, say
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psclient as ps
import psclient.torch as pst

parser = argparse.ArgumentParser(description="Trains a convolutional network on handwritten digits.")
parser.add_argument("--epochs", type=int, default=8, help="epochs in all, those before a resume included [8]")
parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
args = parser.parse_args()

torch.manual_seed(0)
strategy = ps.ParameterServerStrategy(["cpu:0"])
layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
for inputs, outputs in ((1, 16), (16, 32)):
    layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))
optimizer = pst.Optimizer(net, torch.optim.AdamW, lr=3e-3, weight_decay=0.01, buffers="mean", strategy=strategy)
checkpoint = ps.train.Checkpoint(optimizer=optimizer)
if args.resume:
    checkpoint.restore("digits_torch")

train, test = ([torch.from_numpy(part) for part in pair] for pair in load_data())
order = torch.Generator().manual_seed(0)
loader = DataLoader(TensorDataset(*train), batch_size=64, shuffle=True, generator=order)
batches, report = pst.Loader(loader, optimizer), Report(strategy, args.epochs, len(loader), 0)
for epoch in batches.epochs(args.epochs):
    for step, (images, targets) in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images), targets)
        loss.backward()
        optimizer.step()
        report.step(epoch, step, loss.item())
say(strategy, f"saved checkpoint {checkpoint.save('digits_torch/ckpt')}")
net.eval()
right = (net(test[0]).argmax(1) == test[1].argmax(1)).float().mean()
say(strategy, f"test accuracy {right:.4f} after {int(optimizer.rule.iterations)} steps")
