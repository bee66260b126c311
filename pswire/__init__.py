"""The contract between servers and clients: calls, messages, plans, errors, and the transports that carry them."""
