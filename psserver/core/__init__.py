"""The server as a state machine, and the one lock around it.

core       `Core`: a `ParameterServer`; holds the lock, and carries out effects
machine    `Machine`: all state; each stimulus returns effects
admission  who may do something here
creation   names and declares variables
stimuli    the last stimuli, for people; all of them, for a replay
closures   the stimuli of closures, a part of the machine's; chunks that of batches that are handed out
joins      which index each worker has that joins the job, and their stimulus, a part of the machine's
peers      the stimuli of other servers, a part of the machine's
log        server 0's log: generations, plans, checkpoints
waiting    calls that are answered later
status     the status that `psctl` shows, and what else may be seen without a stimulus
traces     the spans of rounds
"""
