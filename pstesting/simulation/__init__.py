"""Simulations of whole jobs: the real servers, chief and clients, whose time and network are a model's.

    scheduler    simulated time; processes that stand still while others go on
    costs        the cost model: processor time of messages, rounds and bytes, as it was measured
    machines     hosts: cores that processes share, links that messages share
    workloads    what a round is of
    clusters     where a job runs, and how
    servers      a real core on a simulated host, and connections to it
    host_sums    workers of one host that sum what they contribute
    clients      real sessions, exchanges and chiefs in simulated processes
    jobs         a whole job, and what was seen of it

What decides anything in a job is the code that decides it in production: sessions, generations, rounds, votes, the log,
the chief, and what goes on when a server is lost. What takes time is the model's: nothing is sent, and arrays are tiny.
"""
