"""Connections to the servers: sessions, calls, transports.

lease           opens sessions, heartbeats, waits and leaves; patience says which time counts against deadlines
session         how a process waits, and what it asks the server that keeps the log; job_news is what it reads there
hosting         which servers are gone, which keeps the log, which is asked for a variable
worker_clock    what a worker with bounded staleness says of its rounds in its heartbeats; pacing has it said
remote_server   the verbs of `ParameterServer` over gRPC and transports; retries repeats an unanswered call
chunk_calls     asks for the batches of this process
grpc_calls      single attempts of calls over gRPC, which can be ended at once, each alone or many on one stream
tls_diagnosis   says why a TLS handshake fails
transport            one fast connection for payloads; transport_selector tries them in order
transport_reader     lets a caller that waits receive on the transports itself
staging         copies of arrays that are on their way, from GPUs too
forks           children of this process that may look at its memory
daemon_threads  a pool of threads that no exit waits for
"""
