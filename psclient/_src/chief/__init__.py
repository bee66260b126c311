"""The chief: closes epochs, approves plans, finishes checkpoints, gives up who holds up the others.

driver       the chief's loop
abandonment  when a job without live workers is given up
stalls       for how long the oldest round has waited, and for whom
"""
