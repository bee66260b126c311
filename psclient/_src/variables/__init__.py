"""Variables as users hold them.

variable  the class `Variable`, reads and assignments
kinds     variables on servers, mirrored ones, and those of one copy per replica
"""
