"""Payloads on their way: what both ends of each transport share.

payload        bytes of tensors, which may still be on their way
parts          cuts payloads into parts, and puts them together again
grpc_frames    parts as gRPC messages
sockets        messages and payloads on plain sockets; tls_socket on encrypted ones
shared_memory  memory that two processes of one host share
scratch        buffers to receive into, lent while something comes
futures        hands on answers of calls that wait
traffic        counts bytes for the metrics
health_probe   asks a server whether it serves, without gRPC
"""
