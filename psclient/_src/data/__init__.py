"""Datasets: per-replica batches from arrays, PyTorch data loaders, Grain and iterables.

distributed    distributed datasets
group          the workers that iterate together
learned        rows that are fetched one batch ahead
iterators      passes over them, batch by batch
dynamic        datasets whose batches server 0 assigns
assigned       the batches that it has assigned to this process
array_dataset  `ArrayDataset`, batches of arrays in memory
stages         what its methods make: examples and batches that can be begun anywhere
adapters       one interface for all sources of batches
progress       the position in a dataset that checkpoints store
"""
