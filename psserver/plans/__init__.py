"""Facts about a plan that are computed before its first round.

prepared    the plan as this server runs it, with all parts below
outline     the steps of a round
batches     successive applications of one kernel
layout      offsets of a contribution's tensors
memory      bounds of the memory that a round takes
round       a round that can run: a prepared plan, and its members' contributions
divergence  the differences of two plans, in words
"""
