"""Lineage of a dead letter: its original subject and every dead-lettering and redrive."""

from typing import Any

import msgspec

from postroom.application.ingest.dead_letters import ORIGINAL_SUBJECT
from postroom.application.query_results import MessageDetail


class DeadLettering(msgspec.Struct):
    """A dead-lettering: time, reason, attempt, error, and time of the redrive; None while it is dead."""

    at: str
    reason: str
    attempt: int
    last_error: str | None
    redriven_at: str | None = None


class Lineage(msgspec.Struct, frozen=True):
    """The origin of a message and its dead-letterings, oldest first.

    Arguments:
        original_subject: subject it was ingested from; its topic when it was sent directly.
    """

    original_subject: str
    dead_letterings: list[DeadLettering]


def lineage_of(detail: MessageDetail) -> Lineage:
    """Return the lineage of a message, from its history."""
    dead_letterings: list[DeadLettering] = []
    for entry in detail.history:
        facts: dict[str, Any] = entry.facts
        if entry.event == "MessageDeadLettered":
            dead_letterings.append(
                DeadLettering(entry.at, facts["reason"], facts["attempt"], facts.get("last_error"))
            )
        elif entry.event == "MessageRedriven" and dead_letterings:
            dead_letterings[-1].redriven_at = entry.at
    return Lineage(detail.item.custom_headers.get(ORIGINAL_SUBJECT, detail.topic), dead_letterings)
