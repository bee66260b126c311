"""After which local steps fragments are exchanged, and how parameters are cut into fragments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psclient.optimizers.ranges import FROM_0_TO_1, check_count, check_number
from pswire.errors import InvalidArgument


@dataclass(frozen=True)
class Schedule:
    """The local steps after which fragments are exchanged, as in Streaming DiLoCo.

    Fragment p of P is sent after each step t with (t - p * H / P) % H == 0, and merged tau steps later.

    Attributes:
        sync_every: H, the local steps between two exchanges of a fragment.
        fragments: P.
        sync_delay: tau, the local steps between sending a fragment and merging the result.
        alpha: the part of a worker's own parameters in those after an exchange.
        dynamic: True if slower workers make fewer local steps than H between two exchanges.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of its range, or does not go with the others.
    """

    sync_every: int
    fragments: int = 1
    sync_delay: int = 0
    alpha: float = 0.0
    dynamic: bool = False

    def __post_init__(self) -> None:
        check_count("sync_every", self.sync_every, 1)
        check_count("fragments", self.fragments, 1)
        check_count("sync_delay", self.sync_delay, 0)
        check_number("alpha", self.alpha, FROM_0_TO_1)
        if self.sync_every % self.fragments:
            raise InvalidArgument(
                f"sync_every={self.sync_every} is not divisible by the number of fragments, {self.fragments}; one "
                f"fragment is exchanged after every sync_every / {self.fragments} steps"
            )
        if self.sync_delay >= self.between:
            raise InvalidArgument(
                f"sync_delay={self.sync_delay} is too long: the next fragment is sent {self.between} steps later, and "
                f"one exchange is under way at a time; use at most {self.between - 1}"
            )
        if self.dynamic and self.fragments > 1:
            raise InvalidArgument(
                f"dynamic=True with {self.fragments} fragments: fragments are exchanged after fixed steps; use one "
                "fragment, or dynamic=False"
            )

    @property
    def between(self) -> int:
        """The local steps between two exchanges."""
        return self.sync_every // self.fragments

    def sent_at(self, step: int) -> int | None:
        """Returns the fragment that is sent after a local step, counted from 1; None for none."""
        return None if step % self.between else step // self.between % self.fragments


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Cuts a sequence into parts of about equal size, none of them empty.

    Args:
        sizes: of each element.
        parts: how many parts there shall be.

    Returns:
        For each part the places of its elements, which follow one another.

    Raises:
        ValueError: there are fewer elements than parts.
    """
    if len(sizes) < parts:
        raise InvalidArgument(f"{len(sizes)} parameters cannot be cut into {parts} fragments; use fewer fragments")
    found: list[list[int]] = [[] for _ in range(parts)]
    whole, before = sum(sizes) or 1, 0
    part = 0
    for place, size in enumerate(sizes):
        middle = (2 * before + size) * parts // (2 * whole)
        left, needed = len(sizes) - place, parts - part - 1
        if found[part] and (middle > part or left <= needed):
            part += 1
        found[part].append(place)
        before += size
    return found
