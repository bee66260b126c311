"""`psworker`: runs a script as one task, or a whole cluster on this machine.

psworker     the command line
cluster      starts, watches and replaces the processes of a local cluster
config_file  the YAML file of a cluster
script       runs the user's script, and says in one line what went wrong
"""
