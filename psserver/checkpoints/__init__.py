"""A server's part of checkpoints: snapshots of its variables, and restores in two stages."""
