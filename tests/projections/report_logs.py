"""Logs with messages that go every way, and the figures of reports on them in plain Python."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from math import ceil
from random import Random
from typing import Any

from msgspec.structs import replace

from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.domain.integrity import fingerprint
from postroom.domain.message import (
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageSent,
)
from postroom.domain.record import Event
from tests.conformance.records import append, created, sent, stream

HOUR = 3_600_000_000
BEGAN = 1_790_000_000_000_000
HOSTILE = ("orders", "<script>alert(1)</script>", "$\\bad$", "_x", "ü.x", "it's", "a\x00b", "a\x1bb\u202e")
ERRORS = ("timeout after 31 ms", "timeout after 7 ms", "<b>no</b>", None)
BOXES = ("acme@one", "acme@two")
Row = dict[str, Any]


def past(mailbox: str, messages: int, chance: Random | None = None) -> list[Event]:
    """Return the events of messages, each with a random course, in the order of log time.

    Arguments:
        chance: by default one whose courses are the same for each mailbox in every run.
    """
    chance = chance or Random(f"{mailbox}1")
    events = [event for number in range(1, messages + 1) for event in _course(number, chance)]
    return [
        created(mailbox, at=BEGAN),
        *sorted(events, key=lambda event: (event.at, event.stream, event.version)),
    ]


def _course(number: int, chance: Random) -> Iterator[Event]:
    at = BEGAN + chance.randrange(5 * HOUR)
    headers = Headers(1, principal=chance.choice((None, "me", "<i>o'hara</i>")))
    first = replace(
        sent(number, at=at, headers=headers),
        topic=chance.choice(HOSTILE),
        size=chance.randrange(9_999),
        expires_at=at + 100 * HOUR,
    )
    if chance.random() < 0.05:  # archived: never delivered
        yield replace(first, due=None)
        return
    yield first
    id_, version = stream(number), 1
    for attempt in range(1, chance.randrange(6)):
        at += chance.randrange(HOUR // 2)
        version += 1
        yield MessageReceived(id_, version, at, attempt, at + HOUR, "worker")
        at += chance.randrange(HOUR // 4)
        version += 1
        end, error = chance.random(), chance.choice(ERRORS)
        if end < 0.4:
            yield MessageAcked(id_, version, at, attempt)
            return
        if end < 0.6:
            yield MessageDeadLettered(id_, version, at, attempt, "rejected", error, at + HOUR)
            if end < 0.5:
                return
            version += 1
            yield MessageRedriven(id_, version, at, at, at + HOUR)
        elif end < 0.7:
            yield MessageExpired(id_, version, at, "purged")
            return
        else:
            yield MessageRequeued(id_, version, at, attempt, at, "nacked", error)


def write(store: str, logs: Mapping[str, Sequence[Event]]) -> None:
    """Append events to logs of a SQLite store."""
    for mailbox, events in logs.items():
        with closing(SqliteEventLog(store, mailbox, durability="relaxed")) as log:
            append(log, events)


def figures(name: str, logs: Mapping[str, Sequence[Event]], bound: int = 0) -> list[Row]:
    """Return the rows of a report."""
    groups: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    now = max((event.at for events in logs.values() for event in events), default=0)
    for mailbox, events in logs.items():
        messages: dict[bytes, list[Any]] = defaultdict(list)
        for event in events:
            messages[event.stream].append(event)
        for life in messages.values():
            if isinstance(life[0], MessageSent):
                _add(groups, name, mailbox, life)
    rows = [_ROW[name](key, group, now, bound) for key, group in groups.items()]
    return sorted(rows, key=lambda row: [(row[column] is not None, row[column]) for column in _KEYS[name]])


def _add(groups: dict[tuple[Any, ...], list[Any]], name: str, mailbox: str, life: list[Any]) -> None:
    first = life[0]
    if name == "retries":
        for event in life:
            if isinstance(event, MessageRequeued | MessageDeadLettered):
                outcome = "requeued" if isinstance(event, MessageRequeued) else "dead"
                kind = fingerprint(event.reason, event.last_error)
                groups[event.at - event.at % HOUR, first.topic, outcome, event.reason, kind].append(
                    (mailbox, event)
                )
    elif name == "traffic":
        groups[first.at - first.at % HOUR, first.topic, first.headers.principal].append(first.size)
    elif first.due is not None:
        groups[first.at - first.at % HOUR, first.topic].append(life)


def _percentiles(name: str, values: Iterable[int]) -> Row:
    ordered = sorted(values)
    return {
        f"{name}_p{percent}_ms": ordered[ceil(percent * len(ordered) / 100) - 1] / 1e3 if ordered else None
        for percent in (50, 95, 99)
    }


def _times(life: list[Any], kind: type[Event]) -> list[int]:
    return [event.at for event in life if isinstance(event, kind)]


def _latency(key: tuple[Any, ...], lives: list[Any], now: int, bound: int) -> Row:
    received = [(life[0].at, _times(life, MessageReceived), _times(life, MessageAcked)) for life in lives]
    return {
        **dict(zip(_KEYS["latency"], key, strict=True)),
        "messages": len(lives),
        "received": sum(bool(each) for _, each, _ in received),
        "acked": sum(bool(each) for _, _, each in received),
        **_percentiles("queue", (each[0] - at for at, each, _ in received if each)),
        **_percentiles("work", (acked[0] - each[-1] for _, each, acked in received if acked)),
        **_percentiles("total", (acked[0] - at for at, _, acked in received if acked)),
    }


def _sla(key: tuple[Any, ...], lives: list[Any], now: int, bound: int) -> Row:
    outcomes = []
    for life in lives:
        at, acked, removed = life[0].at, _times(life, MessageAcked), _times(life, MessageExpired)
        if acked:
            outcomes.append("within" if acked[0] - at <= bound else "late")
        else:
            outcomes.append("open" if not removed and now - at <= bound else "missed")
    counts = {each: outcomes.count(each) for each in ("within", "late", "missed", "open")}
    ended = len(lives) - counts["open"]
    share = counts["within"] / ended if ended else None
    return {**dict(zip(_KEYS["sla"], key, strict=True)), "messages": len(lives), **counts, "share": share}


def _traffic(key: tuple[Any, ...], sizes: list[Any], now: int, bound: int) -> Row:
    ordered = sorted(sizes)
    return {
        **dict(zip(_KEYS["traffic"], key, strict=True)),
        "messages": len(ordered),
        "per_second": len(ordered) / 3600,
        "bytes": sum(ordered),
        "size_p50": ordered[ceil(0.5 * len(ordered)) - 1],
        "size_p95": ordered[ceil(95 * len(ordered) / 100) - 1],
        "size_max": ordered[-1],
    }


def _retries(key: tuple[Any, ...], failures: list[Any], now: int, bound: int) -> Row:
    attempts = [event.attempt for _, event in failures]
    errors = [event.last_error for _, event in failures if event.last_error is not None]
    return {
        **dict(zip(_KEYS["retries"], key, strict=True)),
        "failures": len(failures),
        "messages": len({(mailbox, event.stream) for mailbox, event in failures}),
        "attempt_mean": sum(attempts) / len(attempts),
        "attempt_max": max(attempts),
        "error": min(errors, default=None),
    }


_KEYS = {
    "latency": ("start", "topic"),
    "sla": ("start", "topic"),
    "traffic": ("start", "topic", "principal"),
    "retries": ("start", "topic", "outcome", "reason", "fingerprint"),
}
_ROW = {"latency": _latency, "sla": _sla, "traffic": _traffic, "retries": _retries}
