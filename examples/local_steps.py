"""A character transformer that learns the text of Python's standard library, with local steps (DiLoCo).

    python examples/local_steps.py                                      one process, and a server started for it
    psworker --standalone --ps 2 --workers 2 examples/local_steps.py    a whole cluster on this machine

Each worker trains its own copy on its own text, and exchanges with the others after every 20th step.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from report import say
from rich.filesize import decimal
from torch import nn

import psclient as ps
import psclient.torch as pst

parser = argparse.ArgumentParser(description="Trains a character transformer with local steps.")
parser.add_argument("--steps", type=int, default=200, help="local steps of each worker [200]")
parser.add_argument("--sync-every", type=int, default=20, help="local steps between two exchanges [20]")
parser.add_argument("--fragments", type=int, default=2, help="fragments of the model, exchanged in turn [2]")
parser.add_argument("--sync-delay", type=int, default=5, help="local steps while an exchange is under way [5]")
parser.add_argument("--width", type=int, default=64, help="width of the model [64]")
parser.add_argument("--layers", type=int, default=2, help="layers of the model [2]")
parser.add_argument("--megabytes", type=float, default=2.0, help="most text that is read [2]")
args = parser.parse_args()

CONTEXT, BATCH = 64, 16


class Transformer(nn.Module):
    """Predicts each character from those before it."""

    def __init__(self, characters: int, width: int, layers: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Returns the scores of the next character at each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.characters(text) + self.places(torch.arange(text.shape[1]))
        scores: torch.Tensor = self.head(self.blocks(x, mask, is_causal=True))
        return scores


def read_text(most: int) -> torch.Tensor:
    """Returns the text of the standard library's modules, a number for each byte."""
    found = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= most:
            break
    return torch.frombuffer(bytearray(found[:most]), dtype=torch.uint8).long().clamp(max=127)


def batch_of(text: torch.Tensor, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns windows of the text, and the same one character later."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=source)
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


torch.manual_seed(0)
strategy = ps.ParameterServerStrategy(["cpu:0"])
net = Transformer(128, args.width, args.layers)
inner = torch.optim.AdamW(net.parameters(), lr=3e-3)
outer = pst.DiLoCo(
    net,
    inner,
    torch.optim.SGD,
    lr=0.7,
    momentum=0.9,
    nesterov=True,
    sync_every=args.sync_every,
    fragments=args.fragments,
    sync_delay=args.sync_delay,
    strategy=strategy,
)
text = read_text(int(args.megabytes * 1e6))
held, text = text[: len(text) // 20], text[len(text) // 20 :]
text = text.chunk(strategy.world_size)[strategy.rank]  # each worker has text of its own
source = torch.Generator().manual_seed(strategy.rank)
count = sum(p.numel() for p in net.parameters())
say(strategy, f"{count:,} parameters, {len(text):,} characters for each of {strategy.world_size} workers")
began, losses = time.monotonic(), list[float]()
for step in range(1, args.steps + 1):
    inputs, targets = batch_of(text, source)
    inner.zero_grad()
    loss = nn.functional.cross_entropy(net(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    inner.step()
    losses.append(loss.item())
    outer.step(tokens=targets.numel())
    if step % args.sync_every == 0:
        mean, speed = sum(losses) / len(losses), step / (time.monotonic() - began)
        moved = decimal(sum(strategy.bytes_transferred) // step)
        say(strategy, f"step {step:4}  loss {mean:.3f}  {speed:4.0f} steps/s  {moved}/step  {outer.exchanges} exchanges")
        losses.clear()
with torch.no_grad():
    inputs, targets = batch_of(held, torch.Generator().manual_seed(1))
    loss = nn.functional.cross_entropy(net(inputs).flatten(0, 1), targets.flatten())
say(strategy, f"loss on text that no worker has seen: {loss:.3f}")
