"""A character transformer that learns the text of Python's standard library, with local steps (DiLoCo).

    python examples/local_steps.py                                      one process, and a server started for it
    psworker --standalone --ps 2 --workers 2 examples/local_steps.py    a whole cluster on this machine

Each worker trains on text of its own, and exchanges with the others once in many steps. Needs PyTorch.
"""

import argparse
import time

import torch
from local_steps_model import Transformer, read_text, windows_of
from report import say
from rich.filesize import decimal

import psclient as ps
import psclient.torch as pst

parser = argparse.ArgumentParser(description="Trains a character transformer with local steps.")
parser.add_argument("--steps", type=int, default=400, help="local steps of each worker [400]")
parser.add_argument("--sync-every", type=int, default=40, help="local steps between two exchanges [40]")
parser.add_argument("--fragments", type=int, default=2, help="parts of the model that are exchanged in turn [2]")
parser.add_argument("--sync-delay", type=int, default=5, help="local steps while an exchange is under way [5]")
parser.add_argument("--width", type=int, default=64, help="width of the model [64]")
parser.add_argument("--layers", type=int, default=2, help="layers of the model [2]")
parser.add_argument("--context", type=int, default=64, help="characters that the model sees [64]")
parser.add_argument("--batch", type=int, default=16, help="windows in a step of a worker [16]")
args = parser.parse_args()

torch.manual_seed(0)
strategy = ps.ParameterServerStrategy(["cpu:0"])
net = Transformer(args.width, args.layers, args.context)
inner = torch.optim.AdamW(net.parameters(), lr=3e-3)
when = {"sync_every": args.sync_every, "fragments": args.fragments, "sync_delay": args.sync_delay}
outer = pst.DiLoCo(net, inner, torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True, strategy=strategy, **when)

text = read_text(megabytes=2)
held, text = text[:100_000], text[100_000:].chunk(strategy.world_size)[strategy.rank]
source, losses, began = torch.Generator().manual_seed(strategy.rank), list[float](), time.monotonic()
say(strategy, f"{sum(p.numel() for p in net.parameters()):,} parameters, {strategy.world_size} workers")
for step in range(1, args.steps + 1):
    inner.zero_grad()
    loss = net.loss(windows_of(text, args.batch, args.context, source))
    loss.backward()
    inner.step()
    outer.step(tokens=args.batch * args.context)
    losses.append(loss.item())
    if step % args.sync_every == 0:
        mean, speed = sum(losses) / len(losses), step / (time.monotonic() - began)
        moved = decimal(sum(strategy.bytes_transferred) // step)
        done = f"{outer.exchanges:2} exchanges, {moved} for each step"
        say(strategy, f"step {step:4}  loss {mean:.3f}  {speed:4.0f} steps/s  {done}")
        losses.clear()
with torch.no_grad():
    loss = net.loss(windows_of(held, 64, args.context, torch.Generator().manual_seed(1)))
say(strategy, f"loss {loss:.3f} on text that no worker has seen, after {step} steps")
