"""The values of variables: one class for each kind, behind one protocol, so that whoever has one asks no kind.

value         the protocol
dense         an array, and its copy-on-write view for a checkpoint
lazy          an array of which rows may lack updates that are deferred
deferred      these updates, and what applies them
keyed         a tensor of a dynamic table, by keys
known_tables  which dynamic tables there are, on any server
step          the values in one step of a round: as they were before it, and as it assigns them
"""
