"""Rounds on parameter servers: the backend of `ParameterServerStrategy`.

backend     carries out the operations of the model on servers
section     collects reductions and updates until the next look, and sends them as one round
prepared    what goes to each server and comes back; found once for each plan
rounds      pushes and pulls: one round, and the reads between two rounds
membership  the epochs of the job as this process sees them
placement   chooses the servers of a variable
restore     restores a checkpoint into servers
counters    counts rounds and seconds, for the metrics
"""
