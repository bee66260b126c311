"""Workers of one host sum what they contribute in shared memory, before one of them sends it.

`HostGroup` is this process's place among them. Whoever binds the host's socket leads: it gathers, sums, sends, and
hands the answer on (`Leader`); the others hand it what they would push (`Follower`). Whenever anything goes wrong, each
pushes by itself, as it would without the group: a server takes either way, and counts each contribution once.
"""
