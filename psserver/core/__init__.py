"""The server's one lock, and what it guards.

core     `Core`: the verbs of `ParameterServer`
log      server 0's log: epochs, plans, checkpoints
runner   carries out rounds that are complete
waiting  calls that are answered later
status   what `psctl` shows
"""
