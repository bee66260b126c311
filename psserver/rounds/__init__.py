"""Rounds: they gather contributions, servers agree on these, they run, and their members get the answers.

rounds              all rounds of a server: takes contributions, and says which round can run
pending_round       a round that gathers its contributions: who is missing, and whether it can run
open_rounds         rounds that wait, for people and for the chief
sequences           rounds that are made one after the other, with the answers that are kept
late_contributions  contributions that came late, and are merged into the next round
closure_rounds      makes each round of a closure once, whichever worker makes it
sums                contributions of several workers of a host that came as one
clocks              how far workers with bounded staleness are
votes               agreement of the servers of a plan on the contributions of a round
changes             what a new generation changes
plan_errors         members whose plans differ, in words
runner              runs the round that can run; answers its members
answers             the payloads of answers; late_answers wait for slower workers
steps               the steps of the round that runs
backlog             rounds that a server has agreed on, and makes once it has its variables
participants        what features have to say to a round: nonfinite and digests here, restores and snapshots elsewhere
digests             compares what rounds have made with other servers
"""
