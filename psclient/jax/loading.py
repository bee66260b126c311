"""The data of a training loop of JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from psclient._src.data.loader import BaseLoader
from psclient._src.distribute.strategy import Strategy
from psclient._src.options import InputOptions
from psclient.jax.parameters import strategy_of


class Loader(BaseLoader):
    """The batches of a dataset, shared among all workers, as nests of NumPy's arrays. In any context.

        batches = psj.Loader(ps.ArrayDataset(arrays).batch(64), prefetch={users: lambda batch: batch["user"]})
        for epoch in batches.epochs(10):
            for batch in batches:
                rows = psj.lookup(users, batch["user"])     # from the second batch on it is here already

    Each batch is cut into slices, one for each worker. It is `strategy.experimental_distribute_dataset` with batches on
    the host: compiled functions take NumPy's arrays, and ids are needed there.

    Args:
        data: gives global batches, nests of arrays, anew each time it is iterated: a `ps.ArrayDataset`, grain's
            datasets, a PyTorch `DataLoader`, a list of batches.
        prefetch: for tables, of which rows are looked up in each step, a function that returns their ids, given this
            worker's batch. The rows of the next batch then come with the round of this one.
        strategy: the strategy; None for that of the tables, or of the scope.

    Raises:
        RuntimeError: there is no strategy.
        TypeError: the dataset is of no known kind; `prefetch` has what is no table, or no function.
        ValueError: the dataset is not batched; the strategy has several replicas here.
    """

    def __init__(
        self, data: object, prefetch: Mapping[Any, Callable[[Any], Any]] | None = None, strategy: Strategy | None = None
    ) -> None:
        options = InputOptions(experimental_prefetch_to_device=False, prefetch=dict(prefetch or {}))
        given = next((table.strategy for table in options.prefetch), None) if strategy is None else strategy
        super().__init__(strategy_of(given).experimental_distribute_dataset(data, options))
