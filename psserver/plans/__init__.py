"""What is known of a plan before its first round.

prepared    the plan as this server runs it
memory      bounds of the memory that it takes
divergence  how two plans differ, in words
"""
