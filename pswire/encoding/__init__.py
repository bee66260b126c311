"""Protocol buffers: values of the model as messages, and the table of verbs.

messages  which value travels as which message; the headers of rounds, by hand
mapper    makes the functions of that table, from the fields of both
verbs     the table of verbs; errors and metadata
"""
