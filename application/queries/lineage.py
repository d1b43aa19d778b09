"""Where a dead letter came from: its original subject, and every death and redrive before the last death."""

from typing import Any

import msgspec

from postroom.application.ingest.dead_letters import ORIGINAL_SUBJECT
from postroom.application.queries.get_message import MessageDetail


class Death(msgspec.Struct):
    """Tell when a message died and of what, and when it was put back; None while it is dead."""

    at: str
    reason: str
    attempt: int
    last_error: str | None
    redriven_at: str | None = None


class Lineage(msgspec.Struct, frozen=True):
    """Tell where a message came from and how often it died, the first time first.

    Arguments:
        original_subject: where it was published before it was ingested; its topic where it was sent itself.
    """

    original_subject: str
    deaths: list[Death]


def lineage_of(detail: MessageDetail) -> Lineage:
    """Return the lineage of a message, from its history."""
    deaths: list[Death] = []
    for entry in detail.history:
        facts: dict[str, Any] = entry.facts
        if entry.event == "MessageDeadLettered":
            deaths.append(Death(entry.at, facts["reason"], facts["attempt"], facts.get("last_error")))
        elif entry.event == "MessageRedriven" and deaths:
            deaths[-1].redriven_at = entry.at
    return Lineage(detail.item.custom_headers.get(ORIGINAL_SUBJECT, detail.topic), deaths)
