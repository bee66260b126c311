"""The strategies that users construct: on parameter servers, and mirrored in one process.

consistency  how updates of different workers relate, and its changes
"""
