"""`psctl health`: whether servers serve, for probes of containers."""

from __future__ import annotations

import click

from psclient.psctl.health_client import why_not
from psclient.psctl.output import say, show
from psclient.psctl.settings import Settings, options, settings


@click.command()
@click.argument("asked", nargs=-1, metavar="[HOST:PORT]...")
@options
@settings
def health(settings: Settings, asked: tuple[str, ...]) -> int:
    """Asks servers whether they serve.

    All of the cluster where no HOST:PORT is given. Exits with 1 unless all do.
    """
    addresses = asked or tuple(settings.cluster().servers.values())
    security = settings.security()
    found = {address: why_not(address, security, settings.seconds) for address in addresses}
    if settings.json:
        servers = [{"address": address, "serving": not why, "why": why} for address, why in found.items()]
        say({"serving": not any(found.values()), "servers": servers})
    else:
        show(
            *(f"{address} serves" if not why else f"{address} does not serve: {why}" for address, why in found.items())
        )
    return int(any(found.values()))
