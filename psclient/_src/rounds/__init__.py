"""Rounds on parameter servers: the backend of `ParameterServerStrategy`.

backend      carries out the operations of the model on servers
section      collects reductions and updates of one stretch of code, which become one round
prepared     what goes to each server and comes back; found once for each plan
rounds       sends one round: a push to each server
numbering    names the rounds that this process makes: with all, of a closure, alone
window       takes the answers of the rounds that are under way, in order; under_way is one of them
buffers      arrays that are sent from where they are, and arrays into which rounds write values
variables    creates variables: whole, in shards, with a copy beside each shard, by keys
creation     records the variables that the script creates, and sends them in batches
reader       sends what a read has to wait for, then reads
read_cache   reads variables between the rounds, and keeps what was read
awaited      names those whom a round waits for
first_values waits where another process gives a variable its first value
membership   the generations of the job as this process sees them
placement    chooses the servers of a variable
checkpoints  saves checkpoints, waits for them, restores them
restore      restores a checkpoint into servers
counters     counts rounds and seconds, for the metrics
"""
