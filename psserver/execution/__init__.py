"""Sums contributions and runs update programs on them. Nothing here holds a lock.

execution      a running round: all at once, or step by step while contributions arrive
contributions  the members' contributions, and sums of them
decoding       compressed contributions, and sums of what they stand for
calls          the calls of kernels in a round, one for an application or for many small ones
array_queue    runs array work, one piece after another; brief pieces in the thread that asks
nonfinite      finds NaN and infinity in contributions and variables
"""
