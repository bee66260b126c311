"""The state machines of a server: plain data and rules, no threads, no I/O.

sessions      leases, members, and the token of the newest chief
rounds        contributions of rounds; pending_round knows when a round is complete, strands the answers that are kept
votes         agreement of the servers of a plan on whose contributions count
variables     the values of variables
first_values  the first ones, on their way here
counters      counts of all that happens, for the metrics
"""
