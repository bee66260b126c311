"""`psctl dashboard`: links to the status pages of a job, each with a code that is good for an hour."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import click

from psclient.psctl.settings import WATCH, CommandSettings, command, connected
from pswire.cluster import check_address, is_loopback, join_address
from pswire.errors import ConfigError
from pswire.security.link_codes import GOOD_SECONDS, make_code
from pswire.telemetry.views.job_view import JobView, ServerView, view_of
from pswire.telemetry.views.looked import Looked
from pswire.telemetry.views.numbers import short

_URL = re.compile(r"https?://[\w.\-\[\]:]+:[0-9]{1,5}/")
"""What a task may say of its page: it goes to a terminal, and into a browser."""

_SERVER = re.compile(r"(?:ps[:\-])?([0-9]+)")

NO_PORT = (
    "give it one with --metrics-port (PS_METRICS_PORT), such as psworker --standalone --metrics-port 9100 ... for a "
    "local cluster"
)


@dataclass(frozen=True)
class PageLink:
    """A link to the page of a task.

    Attributes:
        task: the task.
        url: the link, with a code if the job has a token.
        local: True if the page is served on the machine of the task alone.
    """

    task: str
    url: str
    local: bool


@command(
    WATCH,
    ("Print links to all pages of a job on this machine", "psctl dashboard --local"),
    ("Print a link to the page of server 0", "psctl dashboard --server ps:0"),
    (
        "The chief's page, by a port that Docker, kubectl or ssh forwards",
        "psctl dashboard --chief --forwarded 127.0.0.1:9091",
    ),
)
@click.option("--server", metavar="SERVER", help="Only the page of this server, such as ps:0.")
@click.option("--chief", "of_chief", is_flag=True, help="Only the chief's page, which shows all servers.")
@click.option(
    "--forwarded",
    metavar="HOST:PORT",
    help="Address by which your browser reaches the page, where a port is forwarded. Needs --chief or --server.",
)
def dashboard(settings: CommandSettings, server: str | None, of_chief: bool, forwarded: str | None) -> int:
    """Print links to the status pages of a job.

    Open a link in a browser: the page shows tasks, rounds, bytes, variables, checkpoints and refused callers, and
    updates itself. A link is read-only and valid for one hour. Do not share it: it needs no further password.
    """
    number = None if server is None else _number(server)
    if forwarded is not None:
        check_address(forwarded, "--forwarded")
        if of_chief == (number is not None):
            raise ConfigError("--forwarded is the address of one page: give --chief or --server as well, and not both")
    with connected(settings) as servers:
        looked = servers.look()
    view = view_of(looked)
    if view.state == "unknown":
        raise next(one.error for one in looked if one.error)
    token = settings.security().token
    code = make_code(token, _clock(looked)) if token else ""
    wants_all = number is None and not of_chief
    found = list(_of_chief(view, code)) if wants_all or of_chief else []
    if wants_all or number is not None:
        found += _of_servers(view.servers, number, code)
    if not found:
        raise ConfigError(_nothing(view, number, of_chief))
    if forwarded is not None:
        found = [_at(link, forwarded) for link in found]
    said = {"pages": found, "seconds": GOOD_SECONDS if code else None}
    return settings.tell(said, *_lines(found, bool(code)))


def _number(text: str) -> int:
    """Reads `ps:0`, `ps-0` or `0`."""
    found = _SERVER.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is not a server; write ps:0, or 0")
    return int(found[1])


def _clock(looked: Sequence[Looked]) -> float:
    """The time of the servers, which check the code: at most of the one that is behind the others."""
    now = time.time()
    return min((now + one.skew for one in looked if one.status), default=now)


def _of_chief(view: JobView, code: str) -> Iterator[PageLink]:
    yield from (
        _link(task.task, task.page, code) for task in view.tasks if task.state == "open" and _is_page(task.page)
    )


def _of_servers(servers: Iterable[ServerView], number: int | None, code: str) -> Iterator[PageLink]:
    for each in servers:
        if _is_page(each.page) and number in (None, int(each.task.rpartition(":")[2])):
            # A server that listens on all addresses of its machine does not know by which one it is reached.
            host, port = urlsplit(each.page).hostname or "", urlsplit(each.page).port or 0
            everywhere = host in ("0.0.0.0", "::")
            reached = each.address.rpartition(":")[0] if everywhere else f"[{host}]" if ":" in host else host
            yield _link(each.task, f"{urlsplit(each.page).scheme}://{join_address(reached, port)}/", code)


def _is_page(url: str) -> bool:
    return _URL.fullmatch(url) is not None


def _link(task: str, url: str, code: str) -> PageLink:
    local = is_loopback(urlsplit(url).hostname or "")
    return PageLink(task, f"{url}?code={code}" if code else url, local)


def _at(link: PageLink, address: str) -> PageLink:
    """The same page, at the address of a forwarded port, which is for the browser's machine to know."""
    return PageLink(link.task, urlsplit(link.url)._replace(netloc=address).geturl(), local=False)


def _lines(links: Sequence[PageLink], has_code: bool) -> Iterator[str]:
    width = max(len(short(link.task)) for link in links)
    for link in links:
        yield f"{short(link.task):<{width}}  {link.url}"
    if has_code:
        yield "valid for one hour; anyone with a link can open the page, so keep it secret"
    else:
        yield "the job has no token, so each page is shown only on the machine of its task, to all of its users"
    if any(link.url.startswith("https:") for link in links):
        yield (
            "https: a browser warns, because it does not know the job's CA and the names of tasks; see docs/security.md"
        )
    if any(link.local for link in links):
        yield "127.0.0.1 is the machine of that task; from elsewhere forward the port: ssh -L PORT:127.0.0.1:PORT HOST"


def _nothing(view: JobView, number: int | None, of_chief: bool) -> str:
    """Why there is no link, and what to do."""
    if of_chief:
        return f"the chief has no status page; {NO_PORT}"
    if number is None:
        return f"no task of this job has a metrics port, so there is no status page; {NO_PORT}"
    task = f"ps-{number}"
    found = next((each for each in view.servers if short(each.task) == task), None)
    if found is None:
        return f"there is no {task} among the {len(view.servers)} servers that were asked"
    if not found.incarnation:
        said = next((each.message for each in view.problems if each.task == found.task), found.state)
        return f"{task} does not answer: {said}"
    return f"{task} has no metrics port, so it has no status page; {NO_PORT}"
