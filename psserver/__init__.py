"""The command `psserver`, a parameter server."""

import pswire.process as _process

_process.begin_command()
