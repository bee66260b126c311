"""Ids and rows of features with several of them in an example, and bags of features: TorchRec's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from pswire.errors import InvalidArgument


class JaggedTensor:
    """The rows, or ids, of one feature, one example after another, as TorchRec's class of this name.

    Args:
        values: all rows, (N, ...).
        lengths: how many of them each example has, (B,).
        weights: one for each row; None for none.
    """

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        self._values, self._lengths, self._weights = values, lengths, weights

    def values(self) -> torch.Tensor:
        """All rows."""
        return self._values

    def lengths(self) -> torch.Tensor:
        """Number of rows of each example."""
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """Where the rows of each example begin, and where those of the last one end."""
        return functional.pad(self._lengths.cumsum(0), (1, 0))

    def weights_or_none(self) -> torch.Tensor | None:
        """One for each row, if there are any."""
        return self._weights

    def weights(self) -> torch.Tensor:
        """One for each row; raises `ValueError` if there are none."""
        if self._weights is None:
            raise InvalidArgument("this JaggedTensor has no weights; call weights_or_none()")
        return self._weights

    def to_dense(self) -> list[torch.Tensor]:
        """The rows of each example."""
        return list(self._values.split(self._lengths.tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> torch.Tensor:
        """The rows of all examples in one tensor, (B, length, ...), shortened or padded.

        Args:
            desired_length: rows of an example; None for those of the longest one.
            padding_value: value of the rows that are not there.
        """
        own = self.to_dense()
        size = max(map(len, own), default=0) if desired_length is None else desired_length
        found = self._values.new_full((len(own), size, *self._values.shape[1:]), padding_value)
        for place, rows in zip(found, own, strict=True):
            place[: len(rows)] = rows[:size]
        return found


class KeyedJaggedTensor:
    """Ids of several features, with a bag for each example: as TorchRec's class of this name.

    Args:
        keys: names of the features.
        values: all ids, those of the first feature first, example after example.
        lengths: number of ids of each feature and example, (features x examples).
        weights: the weight of each id; None for 1 each.
    """

    def __init__(
        self, keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
    ) -> None:
        self._keys, self._values, self._lengths, self._weights = list(keys), values, lengths, weights

    @classmethod
    def from_lengths_sync(
        cls, keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Makes one from lengths, as the constructor."""
        return cls(keys, values, lengths, weights)

    @classmethod
    def from_offsets_sync(
        cls, keys: Sequence[str], values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Makes one from the index at which each bag begins, and the end."""
        return cls(keys, values, offsets.diff(), weights)

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def values(self) -> torch.Tensor:
        """All ids."""
        return self._values

    def lengths(self) -> torch.Tensor:
        """Number of ids of each bag."""
        return self._lengths

    def weights_or_none(self) -> torch.Tensor | None:
        """The weight of each id, if they have any."""
        return self._weights


class KeyedTensor:
    """The bags of several features, side by side, as TorchRec's class of this name.

    Args:
        keys: names of the features.
        length_per_key: the size of each feature's bags.
        values: all bags, (B, sum of these sizes); or those of each feature, which may have dtypes of their own.
    """

    def __init__(
        self, keys: Sequence[str], length_per_key: Sequence[int], values: torch.Tensor | Sequence[torch.Tensor]
    ) -> None:
        self._sizes, self._values = dict(zip(keys, length_per_key, strict=True)), values
        self._parts: dict[str, torch.Tensor] | None = None
        if not isinstance(values, torch.Tensor):
            self._parts = dict(zip(keys, values, strict=True))

    def keys(self) -> list[str]:
        """Names of the features."""
        return list(self._sizes)

    def values(self) -> torch.Tensor:
        """All bags, (B, sum of dims)."""
        return self._values if isinstance(self._values, torch.Tensor) else torch.cat(list(self._values), dim=1)

    def length_per_key(self) -> list[int]:
        """The size of each feature's bags."""
        return list(self._sizes.values())

    def to_dict(self) -> dict[str, torch.Tensor]:
        """The bags by feature."""
        if self._parts is None:  # once: each split has a backward of its own
            self._parts = dict(zip(self._sizes, self.values().split(self.length_per_key(), dim=1), strict=True))
        return dict(self._parts)

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.to_dict()[key]
