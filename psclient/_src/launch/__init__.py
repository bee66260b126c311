"""`psworker`: runs a script as one task, or a whole cluster on this machine.

psworker     the command line
cluster      starts, watches and replaces the processes of a local cluster
restarts     who is replaced, and at whose cost
outcome      which task is blamed for the end of a cluster, and what it said last
ssh_cluster  the same on several hosts
hosts_file   the file of these
agent        runs one task there
config_file  the YAML file of a cluster
script       runs the user's script, and says in one line what went wrong
"""
