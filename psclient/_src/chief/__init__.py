"""The chief: closes generations, approves plans, finishes checkpoints, gives up who holds up the others.

driver        the chief's loop, and its readings for the metrics
decisions     which generation comes next, which approvals and ends follow from what is known
job_log       reads server 0's log, appends to it, copies it to the other servers; what it says of the job
losses        goes on without servers that are lost, or have other values than others
returns       has servers readmitted, or moved
checkpoints   commits checkpoints
hung_members  finds members that hold a round up for too long
timers        when a job is given up, a round is overdue, and a chief that was told to end may
standby       takes the place of a chief that is gone, or ends the job
"""
