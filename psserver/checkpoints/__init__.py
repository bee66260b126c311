"""The server's side of checkpoints: snapshots of its variables, and restores in two stages."""
