"""The models whose rounds are measured, here and with other systems."""

from __future__ import annotations

from dataclasses import dataclass

QUICK = 10
"""In a quick run, this many times fewer rounds are measured, and at least `FEWEST`."""

FEWEST = 3


@dataclass(frozen=True)
class Model:
    """What a round moves.

    Attributes:
        nbytes: of all variables together; they are float32.
        variables: how many.
        rounds: how many are measured at a time.
        warm: how many come before, not measured.
        largest: the first variable's part of the bytes; 0 makes all equal.
    """

    nbytes: int
    variables: int
    rounds: int
    warm: int
    largest: float = 0.0

    def shapes(self) -> list[tuple[int]]:
        """One for each variable; the first takes the rest."""
        total, others = self.nbytes // 4, self.variables - 1
        size = int(total * (1 - self.largest)) // others if self.largest else total // self.variables
        return [(total - others * size,), *[(size,)] * others]

    def count(self, quick: bool) -> int:
        """How many rounds are measured at a time."""
        return max(self.rounds // QUICK, FEWEST) if quick else self.rounds


MODELS = {
    "4KB": Model(4_000, 10, 200, 300),  # small variables have a kernel only after a while
    "1MB": Model(1_000_000, 10, 100, 30),
    "4MB": Model(4_000_000, 20, 60, 15),
    "100MB": Model(100_000_000, 50, 12, 4),
    "skewed": Model(100_000_000, 50, 12, 4, 0.9),
    "3GiB": Model(3 << 30, 1, 3, 1),
}

SIZES = ("4KB", "4MB", "100MB")
"""Those that are measured unless others are asked for."""
