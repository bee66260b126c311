"""`python -m psserver`."""

from psserver.cli import main

main()
