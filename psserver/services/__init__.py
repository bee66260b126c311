"""What a server does beside its variables and rounds: each service takes calls of its own.

log        server 0's log: generations, plans, checkpoints; watches are calls that wait for its news
closures   what a coordinator schedules, and who runs it
chunks     batches of datasets that are assigned to whoever asks
joining    which index each worker has that joins the job
standbys   processes that wait for the place of a server
"""
