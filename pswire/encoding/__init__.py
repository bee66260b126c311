"""Protocol buffers: values of the model as messages, the table of verbs, and the protocol's number.

messages  which value travels as which message; the headers of rounds, by hand
mapper    makes the functions of that table, from the fields of both
verbs     the table of verbs; errors and metadata
protocol  the number of the protocol, and which ones are served
"""
