"""Parts of a server as its clients see it: queues, and places. `pswire.api` has all others, and what all promise."""
