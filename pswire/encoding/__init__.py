"""Protocol buffers: values of the model as messages, the table of verbs, and the protocol's number.

messages     which value travels as which message; the headers of rounds, by hand
plain_votes  the votes of nearly every round, as packed numbers
mapper       makes the functions of that table, from the fields of both
calls        the codecs of requests and their answers, of both tables
verbs        the table of verbs: who may call, and how long; errors and metadata
protocol     the number of the protocol, and which ones are served
"""
