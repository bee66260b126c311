"""The state machines of a server: plain data and rules, no threads, no I/O.

sessions   leases, members, epochs; guests are sessions that only this server knows
rounds     which contributions a round has, and when it is complete
variables  the values of variables
counters   counts of all that happens, for the metrics
"""
