"""The programming model of `tf.distribute`, without knowledge of servers.

strategy     `Strategy`, the base class
extended     `StrategyExtended`
destinations where reduced values are: on devices, beside a variable, beside the shards of one
replicas     runs a function once per local replica, and joins replicas in merge calls
reduction    the sums and means of per-replica values
compressed   contributions, compressed as they are sent; residuals, what that leaves over, and checkpoints keep
gathering    the arrays of all replicas, one behind the other
backend      the interface between the model and what carries it out
local        the backend without servers
host_buffers arrays for replicas to compute in, where nothing is sent from them
prepared_step what repeated steps have in common
recorded     the programs and operands of a section, each recorded once
on_read      ON_READ variables of asynchronous workers, of which servers have what all make of them
strands      what of a section each worker makes alone, and the section cut in two by that
sparse       what an update is to the rows that are not given
"""
