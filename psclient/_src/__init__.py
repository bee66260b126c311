"""The rooms behind the public names. Nothing here is public; docs/architecture.md has the plan of the house."""
