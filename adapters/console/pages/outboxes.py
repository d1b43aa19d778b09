"""Outboxes, inboxes and ingestions: backlogs, failures, and the retry of failures."""

from contextlib import suppress
from typing import Any, Final

from starlette.responses import Response

from postroom.adapters.console.page import NavEntry, Page, route
from postroom.application.ports.failed_work import FailedWork, Failures, Retried
from postroom.domain.arguments import MAX_TEXT_CHARS
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, InvalidRequest, NotFound, PostroomError, Unauthenticated

NAV: Final = NavEntry("Outbox and inbox", "/outboxes", 65, group="Operations", key="x", all_topics=True)
ROWS: Final = 100
TITLES: Final = {
    "outbox": "Outbox",
    "inbox": "Inbox",
    "ingest": "Ingestion",
    "recorded": "Messages recorded in",
}
EXPLAINED: Final = {
    "outbox": "Events that could not be published, also rows that a capture could not read. A parked event "
    "is not retried by itself, and holds back the later events of its aggregate. A retry makes it due at "
    "once, with its attempts reset.",
    "inbox": "Messages that their handler refused or failed too often. A retry delivers them to the handler "
    "again, one after another; one that fails stays, as do the later ones of its aggregate.",
    "ingest": "Messages that could not be stored. A retry publishes them at their original subject again, "
    "where every consumer receives them.",
    "recorded": "Messages that transactions recorded for this mailbox, and that it refused. A retry has its "
    "owner send them again.",
}
HEADINGS: Final = ("What", "Of", "Attempts", "At (UTC)", "Next retry (UTC)", "Error")


async def list_outboxes(page: Page) -> Response:
    """Show the backlogs of contexts, and the messages that transactions recorded."""
    page.require_all(Right.READ_HEADERS)
    contexts, counter = [], page.service.outboxes
    if page.data.read_models is not None:
        with suppress(PostroomError):  # before the first rebuild
            contexts = list(await page.blocking(page.data.read_models.contexts))
    recorded = [] if counter is None else await counter.count_messages()
    return await page.render(
        "outboxes/list",
        contexts=contexts,
        recorded=[each for each in recorded if each.mailbox or each.problem],
        work=page.data.failed_work,
        titles=TITLES,
        known={(each.kind, each.name) for each in page.data.failed_work},
    )


async def show_failures(page: Page) -> Response:
    """Show what an outbox, an inbox or an ingestion could not do, with the errors."""
    kind, name = page.query.get("kind", ""), page.query.get("name", "")

    async def read() -> Failures:
        page.require_all(Right.READ_HEADERS)
        return await _find(page, kind, name).read(ROWS)

    facts: dict[str, Any] = {"failures": None, "error": None}
    try:
        facts["failures"] = await page.session.audit(
            Right.READ_HEADERS,
            read,
            lambda failures: len(failures.items),
            target=_target(kind, name),
            criteria=("list_failures",),
        )
    except (Forbidden, Unauthenticated):
        raise
    except PostroomError as error:  # an error of its database or broker
        facts["error"] = error
    work = _find(page, kind, name)
    return await page.render(
        "outboxes/failures",
        work=work,
        title=TITLES[work.kind],
        explained=EXPLAINED[work.kind],
        headings=HEADINGS,
        may_retry=page.may(Right.REDRIVE) and page.grant.covers_all_topics,
        **facts,
    )


async def retry(page: Page) -> Response:
    """Retry failures: those that are chosen, or all that are parked."""
    kind, name, is_all = page.field("kind"), page.field("name"), bool(page.field("all"))
    ids = [each for each in page.form.getlist("id") if isinstance(each, str)]

    async def call() -> Retried:
        page.require_all(Right.REDRIVE)
        work = _find(page, kind, name)
        if not ids and not is_all:
            raise InvalidRequest("Nothing is chosen; go back, and choose what to retry, or retry all.")
        return await work.retry(None if is_all else ids)

    retried = await page.session.audit(
        Right.REDRIVE,
        call,
        lambda each: each.count,
        target=_target(kind, name),
        criteria=("retry_failures",),
    )
    return page.redirect("/outboxes/failures", retried.text, kind=kind, name=name)


def _target(kind: str, name: str) -> str:
    """Return the target as the audit log names it."""
    return f"{kind} {name}".strip()[:MAX_TEXT_CHARS]


def _find(page: Page, kind: str, name: str) -> FailedWork:
    for each in page.data.failed_work:
        if (each.kind, each.name) == (kind, name):
            return each
    raise NotFound("The settings of this process name no such outbox, inbox or ingestion.")


ROUTES: Final = [
    route("/outboxes", list_outboxes, query=()),
    route("/outboxes/failures", show_failures, query=("kind", "name")),
    route("/outboxes/retry", retry, method="POST"),
]
