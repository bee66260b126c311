"""Identity: tokens, certificates of tasks, and where they come from."""
