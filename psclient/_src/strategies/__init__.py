"""The strategies that users construct: on parameter servers, and mirrored in one process."""
