"""`python -m psclient.psctl`."""

from psclient.psctl import main

main()
