"""Sums contributions and runs update programs on them. Nothing here holds a lock.

executor   a whole round at once; stream part by part, while contributions arrive
senders    the contributions of a round; reducer sums them
calls      the calls of kernels in a round; batches makes one call for many small variables
nonfinite  finds NaN and infinity in contributions
"""
