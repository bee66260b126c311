"""Dynamic embedding tables: variables whose rows have 64-bit keys, and are created when they are first trained.

    de = ps.dynamic_embedding
    users = de.get_variable("users", dim=64, admission=de.CounterFilter(3), eviction=de.TTL("7d"), memory_limit="4GiB")

    rows = users.lookup(batch["user"])                       # in the function given to strategy.run
    optimizer.apply_gradients([(rows.gradient(d), users)])

A `Reader` looks up rows in checkpoints, without servers:

    users = de.Reader("runs/run1")["users"]
    rows = users.lookup([3, 17])

Names are those of TensorFlow Recommenders Addons and of DeepRec.

tables      `get_variable`, `group`
hashing     `hash_keys`: keys from texts and bytes
options     parts, storage, times to live
reader      `Reader`: rows of checkpoints, without servers
views       the rows of one table, with all its deltas
mapped      the rows of a table in one checkpoint
"""

from psclient._src.variables.table_views import TableGroup, TableView
from psclient._src.variables.tables import TableVariable as Variable
from psclient.dynamic_embedding.hashing import hash_keys
from psclient.dynamic_embedding.options import TTL, HashPartitioner, StorageOption
from psclient.dynamic_embedding.reader import Reader, TableReader
from psclient.dynamic_embedding.tables import get_variable, group
from pswire.model.tables import (
    LFU,
    LRU,
    CBFFilter,
    CounterFilter,
    GlobalStepEvict,
    L2WeightEvict,
    ProbabilityFilter,
)

__all__ = [
    "LFU",
    "LRU",
    "TTL",
    "CBFFilter",
    "CounterFilter",
    "GlobalStepEvict",
    "HashPartitioner",
    "L2WeightEvict",
    "ProbabilityFilter",
    "Reader",
    "StorageOption",
    "TableGroup",
    "TableReader",
    "TableView",
    "Variable",
    "get_variable",
    "group",
    "hash_keys",
]
