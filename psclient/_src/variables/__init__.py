"""Variables as users hold them.

lookup    rows of variables, looked up by their ids
scatter   rows of variables, changed by their places
variable  the class `Variable`, reads and assignments
kinds     variables on servers, mirrored ones, and those of one copy per replica
sharded   partitioned variables, which are variables on servers together; partitioners say how they are cut
server_reader  what reads their values from servers
tables    dynamic tables, whose rows have keys, and `table_views`, many of them in one
compression  how contributions travel, as a user says it; `encoding` makes the bytes, `feedback` keeps what is left over
consistency  whether each worker updates a variable alone: what was given for it, or for that beside which it is created
keys      keys of tables, and `keyed_slices`, gradients by them
"""
