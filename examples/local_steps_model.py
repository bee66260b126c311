"""A character transformer, and the text that it learns: the modules of Python's standard library."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

CHARACTERS = 128


class Transformer(nn.Module):
    """Predicts each character from those before it.

    Args:
        width: of the model.
        layers: how many.
        context: the most characters that it sees.
    """

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Returns the scores of the next character at each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.characters(text) + self.places(torch.arange(text.shape[1]))
        scores: torch.Tensor = self.head(self.blocks(x, mask, is_causal=True))
        return scores

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of all characters of windows but the first."""
        return nn.functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def read_text(megabytes: float) -> torch.Tensor:
    """Returns the text of the standard library, up to a size: a number for each character."""
    found, most = bytearray(), int(megabytes * 1e6)
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= most:
            break
    return torch.frombuffer(found[:most], dtype=torch.uint8).long().clamp(max=CHARACTERS - 1)


def windows_of(text: torch.Tensor, count: int, context: int, source: torch.Generator) -> torch.Tensor:
    """Returns windows of a text, each of one character more than the context."""
    starts = torch.randint(len(text) - context, (count,), generator=source)
    return text[starts[:, None] + torch.arange(context + 1)]
