"""Processes that this one starts, and its own end.

process          starts a server, with its allocator and its lifeline
embedded_server  a server that lives as long as a strategy
blas             threads of NumPy's BLAS in this process
output           relays the lines of many processes to one terminal
sigterm          notes that this process is to end, and ends it where it may
local_clusters   files that tell psctl of the clusters that run here
shutdown         work at the end of a script, and its exit code
"""
