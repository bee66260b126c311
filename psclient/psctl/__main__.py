"""`python -m psclient.psctl`."""

from psclient.psctl.cli import main

main()
