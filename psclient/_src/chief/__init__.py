"""The chief: closes generations, approves plans, finishes checkpoints, gives up who holds up the others.

driver        the chief's loop
generations        which generation comes next: who has come, who is dead, where new members begin
decisions     which approvals and ends follow from what is known
job_state     what the log of a job says
losses        goes on without servers that are lost
returns       has servers readmitted, or moved
differences   gives servers up that have other values than others
farewells     tells a process that was a server what has become of it
job_log       reads server 0's log, appends to it, copies it to the other servers
checkpoints   commits checkpoints
hung_members  finds members that hold a round up for too long
stalls        for how long the oldest round has waited, and for whom
abandonment   when a job without live workers is given up
discard       ends a job that nobody drives any more
leaving       checkpoints that members ask for before they leave; a chief that is told to end with them
deputy        takes the place of a chief that is gone, in a worker
standby       waits until nobody drives the job
counters      counts of a chief, for the metrics
"""
