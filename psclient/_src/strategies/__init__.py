"""The strategies that users construct: on parameter servers, and mirrored in one process.

extended_v1  `strategy.extended` with the methods that only `tf.compat.v1` has
consistency  how updates of different workers relate, and its changes
"""
