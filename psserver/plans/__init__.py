"""What is known of a plan before its first round.

prepared    the plan as this server runs it, and where all of the below is kept
outline     what a round does, step by step
batches     applications that one kernel makes one after another
layout      where the tensors of a contribution lie
memory      bounds of the memory that a round takes
round       a round that can run: a prepared plan, and what its members sent
divergence  how two plans differ, in words
"""
