"""Dead letters with their reason and their earlier dead-letterings and redrives (svc-mailbox I-4)."""

import msgspec
import polars as pl

from postroom.application.ingest.redrive import ORIGINAL_SUBJECT
from postroom.domain.integrity import fingerprint
from postroom.projections.models.messages import DeadLettering
from postroom.projections.projection import Column, MessageProjection, Row

_COPIED = ("id", "mailbox", "topic", "shard", "message_id", "redriven")
_USED = (*_COPIED, "status", "created_at", "dead_letterings", "custom_headers")
_dead_letterings = msgspec.json.Decoder(list[DeadLettering]).decode
_headers = msgspec.json.Decoder(dict[str, str]).decode
_encode = msgspec.json.Encoder().encode


def derive(messages: pl.DataFrame) -> pl.DataFrame:
    """Return a row for every dead letter."""
    dead = messages.filter(pl.col("status") == "dead").select(_USED)
    return pl.DataFrame(list(map(dead_letter, dead.iter_rows(named=True))), schema=PROJECTION.schema)


def dead_letter(message: Row) -> Row:
    """Return the row of a dead letter."""
    *earlier, last = _dead_letterings(message["dead_letterings"])
    return {
        **{name: message[name] for name in _COPIED},
        "original_subject": _original_subject(message["custom_headers"]) or message["topic"],
        "reason": last.reason,
        "attempt": last.attempt,
        "last_error": last.last_error,
        "fingerprint": fingerprint(last.reason, last.last_error),
        "first_seen": message["created_at"],
        "last_seen": last.at,
        "redriven_at": max((each.redriven_at or 0 for each in earlier), default=0) or None,
        "lineage": _encode(earlier).decode() if earlier else None,
    }


def _original_subject(custom_headers: str | None) -> str | None:
    if not custom_headers:
        return None
    try:
        return _headers(custom_headers).get(ORIGINAL_SUBJECT)
    except msgspec.MsgspecError:  # written by another publisher; the row is kept without it
        return None


PROJECTION = MessageProjection(
    "dead_letters",
    (
        Column("id", "int", "key"),
        Column("mailbox", required=True),
        Column("topic", required=True),
        Column("shard", "int", required=True),
        Column("message_id", required=True),
        Column("original_subject", required=True),
        Column("reason", required=True),
        Column("attempt", "int", required=True),
        Column("last_error"),
        Column("fingerprint", required=True),
        Column("first_seen", "int", required=True),
        Column("last_seen", "int", required=True),
        Column("redriven", "int", required=True),
        Column("redriven_at", "int"),
        Column("lineage"),
    ),
    indexes=(("last_seen", "id"),),
    derive=derive,
)
"""Dead letters; times are log time in µs.

    first_seen: when the message was sent. last_seen: when it was dead-lettered. redriven: number of redrives.
    redriven_at: when it was last redriven. lineage: JSON of its earlier dead-letterings, each with the time
    of the redrive.
"""
