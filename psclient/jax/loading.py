"""The data of a training loop of JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from psclient._src.data.loader import BaseLoader
from psclient._src.distribute.strategy import Strategy
from psclient._src.options import InputOptions
from psclient.jax.parameters import strategy_of


class Loader(BaseLoader):
    """Iterates over this worker's part of each global batch, as nests of NumPy arrays. In any context.

    Each batch is cut into slices, one for each worker. This is `strategy.experimental_distribute_dataset` with batches
    on the host, because compiled functions take NumPy arrays, and lookups need ids on the host.

    Args:
        data: an iterable of global batches, nests of arrays, that starts again each time it is iterated: a
            `ps.ArrayDataset`, grain's datasets, a PyTorch `DataLoader`, a list of batches.
        prefetch: maps each table whose rows a step looks up to a function that takes this worker's batch and returns
            the ids. The rows for the next batch are then fetched together with the round of the current one. None finds
            out by itself which arrays of the batches, or columns of one, are ids; {} prefetches nothing.
        strategy: the strategy; None for that of the tables, or of the scope.

    Raises:
        RuntimeError: there is no strategy.
        TypeError: the kind of the dataset is not known; or a key of `prefetch` is not a table, or a value not a
            function.
        ValueError: the dataset is not batched, or the strategy has several replicas here.

    Examples:
        >>> import jax
        >>> import numpy as np
        >>> import psclient as ps
        >>> import psclient.jax as psj
        >>> strategy = ps.ParameterServerStrategy()
        >>> dataset = ps.ArrayDataset({"x": np.arange(6, dtype=np.float32)}).batch(4)
        >>> batches = psj.Loader(dataset, strategy=strategy)
        >>> for epoch in batches.epochs(1):
        ...     for batch in batches:
        ...         print(float(jax.jit(sum)(batch["x"])))
        6.0
        9.0
        >>> strategy.close()
    """

    def __init__(
        self, data: object, prefetch: Mapping[Any, Callable[[Any], Any]] | None = None, strategy: Strategy | None = None
    ) -> None:
        InputOptions(prefetch=prefetch)  # checks it
        given = next((table.strategy for table in prefetch or ()), None) if strategy is None else strategy
        super().__init__(strategy_of(given), data, prefetch)
