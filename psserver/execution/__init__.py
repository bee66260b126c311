"""Sums contributions and runs update programs on them. Nothing here holds a lock.

execution      a round as it runs: all at once, or step by step while contributions arrive
contributions  what the members sent, and sums of it
calls          the calls of kernels in a round, one for an application or for many small ones
nonfinite      finds NaN and infinity in contributions and variables
"""
