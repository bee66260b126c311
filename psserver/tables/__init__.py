"""Dynamic embedding tables: data structures without locks and without a wire, used by one thread at a time.

table         a table, or the part of one on this server: rounds, lookups, checkpoints
contents      all that a table has
saving        a table as plain arrays, and back
state         these arrays, and what has changed since a round
policies      who gets a row, and who loses it
eviction      the choice of rows to evict
rows          the rows, in slots
reserved      arrays that grow without moving
first_values  first values of rows, by a hash
index         from hashes of keys to slots, by NumPy
cells         the same, by compiled functions
index_functions  these functions
hashing       hashes of keys
native        asks for compiled functions
"""
