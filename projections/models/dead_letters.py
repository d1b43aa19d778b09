"""Dead letters: every message that is dead, why, and how often it was put back before (svc-mailbox I-4)."""

from collections.abc import Iterator

import msgspec
import polars as pl

from postroom.application.ingest.dead_letters import ORIGINAL_SUBJECT
from postroom.projections.fingerprint import fingerprint
from postroom.projections.models.messages import Death
from postroom.projections.projection import Column, MessageProjection, Row

_TAKEN_OVER = ("id", "mailbox", "topic", "shard", "message_id", "redriven")
_USED = (*_TAKEN_OVER, "status", "created_at", "deaths", "custom_headers")
_deaths = msgspec.json.Decoder(list[Death]).decode
_headers = msgspec.json.Decoder(dict[str, str]).decode
_encode = msgspec.json.Encoder().encode


def derive(messages: pl.DataFrame) -> pl.DataFrame:
    """Return a row for every message that is dead."""
    dead = messages.filter(pl.col("status") == "dead").select(_USED)
    rows = [row for message in dead.iter_rows(named=True) for row in reference(message)]
    return pl.DataFrame(rows, schema=PROJECTION.schema)


def reference(message: Row) -> Iterator[Row]:
    """Yield the dead letter that a message is, if it is one."""
    if message["status"] != "dead":
        return
    *earlier, last = _deaths(message["deaths"])
    yield {
        **{name: message[name] for name in _TAKEN_OVER},
        "original_subject": _original_subject(message["custom_headers"]) or message["topic"],
        "reason": last.reason,
        "attempt": last.attempt,
        "last_error": last.last_error,
        "fingerprint": fingerprint(last.reason, last.last_error),
        "first_seen": message["created_at"],
        "last_seen": last.at,
        "redriven_at": max((death.redriven_at or 0 for death in earlier), default=0) or None,
        "lineage": _encode(earlier).decode() if earlier else None,
    }


def _original_subject(custom_headers: str | None) -> str | None:
    if not custom_headers:
        return None
    try:
        return _headers(custom_headers).get(ORIGINAL_SUBJECT)
    except msgspec.MsgspecError:  # written by somebody else: no reason to lose the dead letter
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
    reference=reference,
)
"""Messages that are dead: sent `first_seen`, dead since `last_seen`, put back `redriven_at` (log time in µs).

`lineage` is JSON: the deaths before this one, each with the time at which the message was put back.
"""
