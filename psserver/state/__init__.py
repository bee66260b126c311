"""The state machines of a server: plain data and rules, no threads, no I/O.

sessions      leases, members, and the token of the newest chief
changes       changes of the job's consistency, and processes that do not come to one
variables     the values of variables
first_values  the first ones, on their way here
counters      counts of all that happens, for the metrics
"""
