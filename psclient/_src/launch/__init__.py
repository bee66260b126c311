"""`psworker`: runs a script as one task, or a whole cluster on this machine.

psworker     the command line
cluster      starts, watches and replaces the processes of a local cluster
restarts     who is replaced, and at whose cost
outcome      which task is blamed for the end of a cluster, and what it said last
remote_cluster  the same on several hosts
agent        runs one task there
ssh_cluster  that through ssh
hosts_file   the file of these hosts
ray_cluster  that on Ray
ray_actor    one task of it
config_file  the YAML file of a cluster
script       runs the user's script, and says in one line what went wrong
"""
