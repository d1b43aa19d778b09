"""Columns of the log archive with the values of each event's `MessageSent`.

In a commit, only `MessageSent` has the topic, shard and id of a message; later events name the position of
the message's previous event.
"""

from collections.abc import Callable

import polars as pl
import pyarrow as pa

from postroom.projections.models.messages import SENT, is_message
from postroom.projections.projection import COLUMNS, SENT_COLUMNS

STEP_COLUMNS = ("position", "stream", "event", "distance", "at", "topic", "shard", "message_id")
"""Columns from which `SENT_COLUMNS` are made."""

_POLARS = {pa.int64(): pl.Int64(), pa.string(): pl.String(), pa.binary(): pl.Binary()}
EVENTS = {name: _POLARS[COLUMNS[name]] for name in STEP_COLUMNS} | {
    name: _POLARS[type_] for name, (_, type_) in SENT_COLUMNS.items()
}
"""Both, with their polars types."""

EventsAt = Callable[[pl.Series], pl.DataFrame]
"""Returns the archived events at sorted positions of earlier segments, with the columns `EVENTS`."""


def sent_columns(events: pa.Table, events_at: EventsAt) -> pa.Table:
    """Return `SENT_COLUMNS` of the events of a segment.

    Those of messages are null for events of the mailbox, and where the `MessageSent` was never archived.

    Arguments:
        events: all events of consecutive positions, with `STEP_COLUMNS`.
        events_at: reads events before the first of `events`.
    """
    frame = pl.DataFrame(events.select(STEP_COLUMNS)).with_columns(own_columns())
    row = pl.int_range(pl.len(), dtype=pl.Int64)
    is_here = _has_previous() & (pl.col("distance") <= row)
    # The row of the previous event of each message becomes the row of its first event in this segment.
    origin = frame.select(pl.when(is_here).then(row - pl.col("distance")).otherwise(row)).to_series()
    while not (jumped := origin.gather(origin)).equals(origin):
        origin = jumped
    unresolved = frame.filter(_has_previous() & (pl.col("distance") > row))
    if unresolved.height:
        frame = frame.update(_from_earlier(unresolved, events_at), on="position")
    same = frame["stream"].gather(origin) == frame["stream"]
    resolved = frame.select(*SENT_COLUMNS)[origin].select(pl.when(same).then(pl.all()))
    return resolved.to_arrow().cast(pa.schema([(name, type_) for name, (_, type_) in SENT_COLUMNS.items()]))


def first_wrong_sent(events: pa.Table, events_at: EventsAt) -> int | None:
    """Return the first position whose `SENT_COLUMNS` differ from what `sent_columns` returns, or None.

    Where these come from an earlier segment, they may be missing there or here: the archive may have lacked
    that segment when this one was written, or may lack it now.

    Arguments:
        events, events_at: as for `sent_columns`; the events have `SENT_COLUMNS`, too.
    """
    stored = pl.DataFrame(events)
    expected = pl.DataFrame(sent_columns(events, events_at))
    local = pl.DataFrame(sent_columns(events, lambda _: pl.DataFrame(schema=EVENTS)))
    is_lax = stored.select(is_message() & local["sent_position"].is_null()).to_series()
    is_lax &= stored["sent_position"].is_null() | expected["sent_position"].is_null()
    differs = pl.any_horizontal(pl.col(name).ne_missing(expected[name]) for name in SENT_COLUMNS)
    wrong = stored.filter(differs & ~is_lax)
    return None if wrong.is_empty() else int(wrong["position"][0])


def own_columns() -> list[pl.Expr]:
    """Return `SENT_COLUMNS` of the events that need no other event, and null for others."""
    is_sent = pl.col("event") == SENT
    return [
        pl.when(is_sent | ~is_message() if name.startswith("event_") else is_sent).then(source).alias(name)
        for name, (source, _) in SENT_COLUMNS.items()
    ]


def _has_previous() -> pl.Expr:
    return is_message() & (pl.col("event") != SENT) & (pl.col("distance") > 0)


def _from_earlier(unresolved: pl.DataFrame, events_at: EventsAt) -> pl.DataFrame:
    """Return `SENT_COLUMNS` of events, by position, from the previous events of their messages."""
    key = ("stream", "before")
    steps = unresolved.select("position", "stream", before=pl.col("position") - pl.col("distance"))
    resolved = []
    while steps.height:
        earlier = events_at(steps["before"].unique().sort()).rename({"position": "before"})
        steps = steps.join(earlier, on=key, how="inner")
        resolved.append(steps.filter(pl.col("sent_position").is_not_null()).select("position", *SENT_COLUMNS))
        # Files of format 2 have these columns of a `MessageSent` only.
        steps = steps.filter(pl.col("sent_position").is_null() & _has_previous()).select(
            "position", "stream", before=pl.col("before") - pl.col("distance")
        )
    return pl.concat(resolved)
