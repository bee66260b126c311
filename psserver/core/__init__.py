"""The server as a state machine, and the one lock around it.

core       `Core`: a `ParameterServer`; holds the lock, and carries out effects
machine    `Machine`: all state; each stimulus returns effects; job is what it forgets with each job
admission  who may do something here; service_verbs checks it for services
creation   names and declares variables
stimuli    the last stimuli, for people; all of them, for a replay
peers      what other servers vote, and which of them are reached
reads      reads that wait for a round
status     the status that `psctl` shows
traces     the spans of rounds
"""
