"""Access: the rights of the caller's capability, and the sessions of signed-in browsers."""

from collections.abc import Iterator
from typing import NamedTuple

from starlette.responses import Response

from postroom.adapters.console.page import Page, route
from postroom.adapters.console.sessions import BrowserSession
from postroom.domain.capability.rights import Quota, Right

WINDOWS = {1_000: "second", 60_000: "minute", 3_600_000: "hour", 86_400_000: "day"}
MEANINGS = {
    Right.SEND: "send messages",
    Right.RECV: "receive messages, with their bodies",
    Right.ACK: "settle deliveries",
    Right.NACK: "fail deliveries",
    Right.EXTEND: "extend the visibility timeout of deliveries",
    Right.READ_HEADERS: "see topics, counts, dead letters, headers and histories of messages",
    Right.READ_PAYLOAD: "see the bodies of messages, and search them",
    Right.REDRIVE: "redrive dead letters",
    Right.ADMIN: "pause topics, set policies, cancel, reschedule and purge, read the audit log, end sessions",
}


class SessionRow(NamedTuple):
    """A row of the table of sessions; ages in µs."""

    id: str
    principal: str
    capability: str
    started: int
    last_used: int
    streams: int
    is_own: bool


async def show_access(page: Page) -> Response:
    """Show the caller's rights and, to administrators, who is signed in."""
    access = page.grant.access
    return await page.render(
        "access.html",
        access=access,
        operations=[(each, MEANINGS[each], each in page.grant.operations) for each in Right],
        quotas=[] if access is None else [describe_quota(each) for each in access.quotas],
        covers_mailbox=access is None or access.covers_mailbox(page.mailbox.name),
        sessions=list(_rows(page)) if _is_administrator(page) else None,
    )


async def end_session(page: Page) -> Response:
    """End the session of a browser."""
    id_ = page.field("session")

    async def end() -> BrowserSession:
        page.require_all(Right.ADMIN)
        return page.console.sessions.end_by_id(id_)

    ended = await page.session.audit(Right.ADMIN, end, lambda _: 0, criteria=["session"])
    return page.redirect("/access", f"The session of {_name(ended)} has ended.")


def describe_quota(quota: Quota) -> str:
    """Return a quota as text."""
    limits = [
        text
        for text in (
            None if quota.operations is None else f"{quota.operations:,} operations",
            None if quota.bytes is None else f"{quota.bytes:,} bytes of payloads",
        )
        if text
    ]
    return f"{' and '.join(limits)} a {WINDOWS[quota.window_ms]}"


def _rows(page: Page) -> Iterator[SessionRow]:
    sessions = page.console.sessions
    for each in sessions.sessions():
        yield SessionRow(
            each.id,
            _name(each),
            each.capability,
            sessions.age(each.started),
            sessions.age(each.last_used),
            each.streams,
            each is page.browser,
        )


def _name(browser: BrowserSession) -> str:
    return browser.principal or "the user of this machine"


def _is_administrator(page: Page) -> bool:
    return Right.ADMIN in page.grant.operations and page.grant.covers_all_topics


ROUTES = [
    route("/access", show_access),
    route("/access/end", end_session, method="POST"),
]
