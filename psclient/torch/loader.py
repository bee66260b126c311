"""`Loader`: a loader of torch whose batches workers share, and whose ids ride in the round before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from psclient._src.arrays import nest
from psclient._src.arrays.conversions import is_text, to_torch
from psclient._src.arrays.devices import to_numpy
from psclient._src.data.loader import BaseLoader
from psclient.torch.embeddings import LookupModule
from psclient.torch.optimizer import Optimizer
from pswire.errors import InvalidArgument, InvalidType


class Loader(BaseLoader):
    """Iterates over this worker's part of each global batch, as tensors.

    Every worker goes through the same global batches, and gets its own part of each, as in
    `strategy.experimental_distribute_dataset`. The optimizer weights this worker's gradients by its number of examples,
    so that their mean is that over the global batch. A worker without a part of a short batch gets its previous batch
    once more, with weight 0.

    The loader reads one batch ahead, or two where ids are looked up: the rows for the next batch are fetched together
    with the round of the current one.

    Args:
        loader: an iterable of global batches that starts again each time: a `DataLoader`, a `ps.ArrayDataset`, a list.
            Batches are nests of tensors or arrays whose first dimension counts examples, and of lists of strings. A
            `DataLoader` that shuffles needs a generator with a seed; a step of workers with different global batches
            raises `Diverged`.
        optimizer: the optimizer that makes steps with the batches; or several.
        prefetch: maps modules of this package with rows to functions that take a batch of the loop and return the
            module's input. None finds out by itself which tensors of the batches, or columns of one, are ids; {}
            prefetches nothing.

    Raises:
        TypeError: the loader can be iterated only once; an optimizer is not one of this package; or a key of `prefetch`
            is not a module with rows, or a value not a function.
        ValueError: the optimizers belong to different strategies.

    Examples:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> import psclient as ps
        >>> import psclient.torch as pst
        >>> strategy = ps.ParameterServerStrategy()
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer = pst.Optimizer(net, torch.optim.SGD, lr=0.1, strategy=strategy)
        >>> data = TensorDataset(torch.ones(8, 2), torch.zeros(8, 1))
        >>> generator = torch.Generator().manual_seed(0)
        >>> loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        >>> batches = pst.Loader(loader, optimizer)
        >>> for epoch in batches.epochs(2):
        ...     for x, y in batches:
        ...         optimizer.zero_grad()
        ...         loss = torch.nn.functional.mse_loss(net(x), y)
        ...         loss.backward()
        ...         optimizer.step()
        >>> strategy.close()
    """

    def __init__(
        self,
        loader: Any,
        optimizer: Optimizer | Sequence[Optimizer],
        prefetch: Mapping[Any, Callable[[Any], Any]] | None = None,
    ) -> None:
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        for each in self._optimizers:
            if not isinstance(each, Optimizer):
                raise InvalidType(
                    f"a {type(each).__name__} is not a distributed optimizer; pass a psclient.torch.Optimizer"
                )
        for module, ids in (prefetch or {}).items():
            if not isinstance(module, LookupModule):
                raise InvalidType(
                    f"prefetch has a key of type {type(module).__name__}; use modules whose rows are looked "
                    "up, such as psclient.torch.Embedding"
                )
            if not callable(ids):
                raise InvalidType(
                    f"prefetch has {ids!r} for a {type(module).__name__}; pass a function that returns the "
                    'ids of a batch: prefetch={module: lambda batch: batch["user"]}'
                )
        strategies = {id(each.strategy): each.strategy for each in self._optimizers}
        if len(strategies) != 1:
            raise InvalidArgument(
                "the optimizers of a loader belong to different strategies; use one loader for each strategy"
            )
        (strategy,) = strategies.values()
        self._loader = loader
        named = {module: partial(_named, ids) for module, ids in (prefetch or {}).items()}
        super().__init__(strategy, loader, None if prefetch is None else named)

    def __len__(self) -> int:
        """The number of batches of an epoch, if the loader knows it."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        last: Any = None
        for batch in self._batches:
            for each in self._optimizers:
                each._begin_batch()
            if last is None or len(nest.flatten(batch)[0]):
                last = nest.map_structure(self._given, batch)
            yield last

    def _given(self, array: Any) -> torch.Tensor | list[Any]:
        found = _tensor(array)
        return found.to(self._optimizers[0].device) if isinstance(found, torch.Tensor) else found


def _named(ids: Callable[[Any], Any], batch: Any) -> Any:
    """Returns what a module will be given with a batch."""
    return ids(nest.map_structure(lambda array: _tensor(array.copy()), batch))


def _tensor(array: Any) -> torch.Tensor | list[Any]:
    """Returns an array of a batch as torch's loader gives it: numbers as a tensor, texts as a list."""
    found = to_numpy(array)
    tensor: torch.Tensor | list[Any] = found.tolist() if is_text(found) else to_torch(found)
    return tensor
