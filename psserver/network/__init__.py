"""The rim of the server: gRPC and transports, TLS, and access control.

server           starts and ends everything that listens
grpc_service     the verbs over gRPC; grpc_answers writes replies that grow while they are sent
transport_server      accepts transports; transport_connection reads and answers on one of them; client_memory is what a
client shares tls_handshake    TLS for transports; unix_socket makes the socket of the shm transport
access           which certificate may call which verb for which task
health           gRPC's health service; process reports on the process, for `psctl`
"""
