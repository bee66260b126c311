"""The command `psctl`, one module for each group of its commands."""

from psclient.psctl.cli import command, main

__all__ = ["command", "main"]
