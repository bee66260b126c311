"""Payloads on their way: what both ends of each lane share.

payload        bytes of tensors that arrive in parts; cuts what is sent into parts
grpc_frames    parts as gRPC messages
sockets        messages and payloads on plain sockets; tls_socket on encrypted ones
shared_memory  memory that two processes of one host share
traffic        counts bytes for the metrics
"""
