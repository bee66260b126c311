"""Workers of one host sum what they contribute in shared memory, before one of them sends it.

`HostGroup` is this process's place among them. It has a role for each part of the servers (`HostRole`). Whoever binds
the part's socket leads: it gathers, sums, sends, and hands the answer on (`Leader`); the others hand it what they would
push (`Follower`). Whenever anything goes wrong, each pushes by itself, as it would without the group: a server takes
either way, and counts each contribution once.
"""
