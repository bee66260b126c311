"""The state machines of a server: plain data and rules, no threads, no I/O.

sessions   leases, members, and the token of the newest chief
rounds     the contributions of each round, and its completion; strands are its parts
variables  the values of variables
counters   counts of all that happens, for the metrics
"""
