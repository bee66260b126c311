"""Dynamic embedding tables: data structures without a wire, used by one thread at a time, and read by another.

table         a table, or the part of one on this server: rounds, lookups, checkpoints
contents      all that a table has
saving        a table as it is, for a checkpoint, and one made of a state again
frozen        copy-on-write views: rows as they were, read while rounds write them
frozen_tensors  the rows of a table, so
frozen_counts   the keys that its filter has counted, likewise
deletions     the rows that were dropped lately
policies      who gets a row, and who loses it
eviction      the choice of rows to evict
rows          the rows, in slots
new_keys      the keys of a round that have no row, each once
located       where keys were found that were looked up
marks         what a round does to what is known of its rows
reserved      arrays that grow without moving, in memory or in a file of a tier
first_values  first values of rows, for compiled functions
index         from hashes of keys to slots, by NumPy
cells         the same, by compiled functions
index_functions  these functions
native        asks for compiled functions
"""
