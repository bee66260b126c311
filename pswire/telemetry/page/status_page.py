"""Who may look at a status page, and what is answered: the page, and its changes as they come up.

With a token the page needs a code that was made of it, in the link, or in the cookie that the link has set. Without
one nobody could be told from anybody else: then it is for this machine alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie

from pswire.cluster import is_loopback
from pswire.security.link_codes import Refusal, check_code, seconds_left, tag_of
from pswire.telemetry.page.document import KIND, POLICY, document, refusal
from pswire.telemetry.page.markup import Html
from pswire.telemetry.page.sampler import PageSource, Sampler
from pswire.telemetry.web_server import Answer, HttpReply, Request

PATH, EVENTS_PATH = "/", "/events"

CODE = "code"
"""The parameter of a link that has the code."""

NEW_LINK = "get a new link with psctl dashboard"

REFUSALS: Mapping[Refusal, str] = {
    "missing": "This page needs a link with a code. Run psctl dashboard on a machine with the job's token, and open "
    "its link.",
    "malformed": f"The code in this link is incomplete; copy the link again, or {NEW_LINK}.",
    "other job": f"The code in this link belongs to another job, or to an older token of this job; {NEW_LINK} for "
    "this job.",
    "wrong": f"The code in this link was changed; {NEW_LINK}.",
    "over": f"The code has expired after one hour; {NEW_LINK}.",
}

LOCAL_ONLY = (
    "This job has no token, so its page is shown only on this machine, at localhost or 127.0.0.1. From other "
    "machines forward the port with ssh -L, or give the job a token (PS_TOKEN)."
)

SILENCE = b": nothing new\n\n"
"""Keeps a stream open, and shows whether anybody still reads it."""


class StatusPage:
    """Answers requests for a page. Its methods may be called from any thread.

    Args:
        source: what the page shows.
        token: the job's token; "" for none.
    """

    def __init__(self, source: PageSource, token: str) -> None:
        self._task = str(source.task)
        self._token = token
        self._cookie = f"paramserver-{tag_of(token)}"  # a browser may look at several jobs of one host
        self._sampler = Sampler(source)

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Returns what answers each path."""
        return {PATH: self.page, EVENTS_PATH: self.events}

    def page(self, request: Request) -> HttpReply:
        """Answers with the page as it is now."""
        code, why = self._admit(request)
        if why:
            return _refused(why)
        headers = {"Content-Security-Policy": POLICY}
        if code:
            seconds, secure = int(seconds_left(code, time.time())), "; Secure" if request.encrypted else ""
            kept = f"{self._cookie}={code}; Max-Age={seconds}; Path=/; HttpOnly; SameSite=Strict{secure}"
            headers["Set-Cookie"] = kept
        return HttpReply(document(self._task, self._sampler.latest().parts), KIND, headers=headers)

    def events(self, request: Request) -> HttpReply:
        """Answers with server-sent events: the parts of the page that have changed, about once a second."""
        code, why = self._admit(request)
        if why:
            return _refused(why)
        return HttpReply(b"retry: 3000\n\n", "text/event-stream", stream=self._changes(code))

    def close(self) -> None:
        """Ends, with all events that are sent."""
        self._sampler.close()

    def _admit(self, request: Request) -> tuple[str, str]:
        """Returns the code that is taken, "" for none; and why the request is refused, "" if it is not."""
        if not self._token:
            return "", "" if _is_local(request) else LOCAL_ONLY
        given = request.parameter(CODE)
        kept = _cookies(request.headers.get("cookie", "")).get(self._cookie, "")
        now = time.time()
        refusals = {code: check_code(self._token, code, now) for code in (given, kept)}
        for code, refused in refusals.items():
            if refused is None:
                return code, ""
        return "", REFUSALS[refusals[given or kept] or "missing"]

    def _changes(self, code: str) -> Iterator[bytes]:
        known: dict[str, Html] = {}
        number = 0
        while True:
            if code and seconds_left(code, time.time()) <= 0:
                yield _event("over", REFUSALS["over"])
                return
            sample = self._sampler.after(number)
            if self._sampler.closed:
                yield _event("over", "Not live: the process has ended.")
                return
            if sample is None:
                yield SILENCE
                continue
            number = sample.number
            changed = {name: part for name, part in sample.parts.items() if known.get(name) != part}
            known |= changed
            yield _event("parts", json.dumps(changed)) if changed else SILENCE


def _event(name: str, data: str) -> bytes:
    """One event; its data has no line breaks."""
    return f"event: {name}\ndata: {data}\n\n".encode()


def _refused(why: str) -> HttpReply:
    return HttpReply(refusal(why), KIND, HTTPStatus.FORBIDDEN, {"Content-Security-Policy": POLICY})


def _cookies(header: str) -> Mapping[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}


def _is_local(request: Request) -> bool:
    """Returns whether a request is from this machine, and for it.

    The name that the browser asked for counts as well: a page from elsewhere might have let its own name lead here.
    """
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return is_loopback(request.client.removeprefix("::ffff:")) and is_loopback(name)
