"""`postroom log` and `anchor`: events of logs, and where the logs end."""

import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from postroom.adapters.cli.output import Id, Time
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import NOTHING, Archive, WrongUsage
from postroom.application.text import pluralize
from postroom.domain.arguments import MAX_INT, check_int
from postroom.domain.names import describe_choices

if TYPE_CHECKING:
    from postroom.application.queries.read_events import EventFilter, LoggedEvent


ROWS = 100
"""Number of events that a table shows if no limit is given."""
POLL_SECONDS = 0.2

Topic = Annotated[
    str | None, Option(metavar="GLOB", help="Only events of topics that match, and of their messages.")
]
EventNames = Annotated[
    list[str] | None,
    Option("--event", metavar="NAME", help="Only events of this type, such as MessageSent; may be repeated."),
]
MessageId = Annotated[str | None, Option("--message", metavar="ID", help="Only events of this message.")]


def show(
    session: Session,
    first: Annotated[int, Option("--from", metavar="POSITION", help="First position.")] = 1,
    through: Annotated[int | None, Option(metavar="POSITION", help="Last position.")] = None,
    topic: Topic = None,
    event: EventNames = None,
    message: MessageId = None,
    limit: Annotated[
        int | None, Option(help="Maximum number of events; 100 by default, all with --json.")
    ] = None,
    archive: Archive = None,
) -> int | None:
    """Show the events of a log in the order of their positions: one JSON object a line with --json."""
    from postroom.application.queries.read_events import ReadEvents

    criteria = _criteria(topic, event, message)
    check_int("--from", first, 1)
    check_int("--through", MAX_INT if through is None else through, 1)
    check_int("--limit", 1 if limit is None else limit, 1)
    rows = ROWS if limit is None and not session.out.as_json else limit
    with session.read(session.mailbox, archive) as reader:
        events = ReadEvents(reader.log)(criteria, first - 1, through)
        count = _show(session, islice(events, rows))
        following = next(events, None)
    if following is not None:
        session.out.note(f"There are more; continue with --from {following.record.position}.")
    return None if count else NOTHING


def tail(
    session: Session,
    topic: Topic = None,
    event: EventNames = None,
    message: MessageId = None,
    limit: Annotated[int, Option(help="Number of events.")] = 10,
    follow: Annotated[
        bool, Option("--follow", help="Show new events as they are written, until it is interrupted.")
    ] = False,
    archive: Archive = None,
) -> int | None:
    """Show the last events of a log, and with --follow new ones as they are written."""
    from postroom.application.queries.read_events import ReadEvents

    criteria = _criteria(topic, event, message)
    check_int("--limit", limit)
    with session.read(session.mailbox, archive) as reader:
        query, head = ReadEvents(reader.log), reader.log.head()
        end = 0 if head is None else head.position
        if not follow:
            return None if _show(session, query.last(limit, criteria)) else NOTHING
        for each in query.last(limit, criteria):
            end = max(end, each.record.position)
            _follow(session, each)
        for each in query.follow(end, lambda: time.sleep(POLL_SECONDS), criteria):
            _follow(session, each)
    return None


def _criteria(topic: str | None, events: list[str] | None, message: str | None) -> "EventFilter":
    from postroom.application.mailbox.event_columns import RUNS
    from postroom.application.queries.read_events import EventFilter
    from postroom.domain.record import StoredEvent

    names = [each.__name__ for each in RUNS if each is not StoredEvent]
    for name in events or ():
        if name not in names:
            raise WrongUsage(f"There is no event {name}; {describe_choices(name, names)}")
    return EventFilter(topic, frozenset(events or ()), message)


def _show(session: Session, events: "Iterable[LoggedEvent]") -> int:
    """Show events, and return their number."""
    if session.out.as_json:
        shown = 0
        for each in events:
            session.out.json(each.fields())
            shown += 1
        return shown
    rows = [
        (
            each.record.position,
            Time(each.record.at),
            Id(each.record.type),
            each.topic,
            Id(each.message_id or ""),
            _details(each),
            each.record.version,
            each.record.epoch,
        )
        for each in events
    ]
    columns = ("position", "age", "event", "topic", "message", "details", "version", "epoch")
    session.out.table(columns, rows, only_wide=("version", "epoch"))
    return len(rows)


def _follow(session: Session, each: "LoggedEvent") -> None:
    if session.out.as_json:
        session.out.json(each.fields())
    else:
        facts = each.fields()
        texts = (facts["at"], each.record.type, each.topic, _details(each))
        label = "".join(f"{text}  " for text in (f"{each.record.position:,}", *texts) if text)
        session.out.prose(Id(each.message_id or ""), label)
    session.out.flush()


def _details(each: "LoggedEvent") -> str:
    facts = each.fields()
    names = (
        *("attempt", "reason", "last_error", "consumer", "owner", "through", "status", "after", "skipped"),
        *("schedule", "tick"),
    )
    texts = [f"{name.replace('_', ' ')} {facts[name]}" for name in names if name in facts]
    if "filter" in facts:
        texts.append(f"topics {' '.join(facts['filter']['topics'])}")
    from postroom.adapters.cli.mailbox import describe_change

    return ", ".join([*texts, *map(describe_change, each.changes)])


def anchor(
    session: Session,
    file: Annotated[str, Argument(metavar="FILE", help="Anchor file; created if it is missing.")],
    git: Annotated[bool, Option("--git", help="Commit FILE to the git repository that contains it.")] = False,
    timestamp: Annotated[
        str | None,
        Option(metavar="URL", help="Request a time stamp for each anchor from this RFC 3161 authority."),
    ] = None,
) -> None:
    """Append the end of each log to a file, so that `verify --anchor` detects truncated or rewritten logs.

    Without --mailbox, the audit log and the log of capabilities are anchored as well. If a log was truncated
    or rewritten since its last anchor, the command fails. Store FILE where users with access to the store
    can't write.
    """
    from postroom.adapters.cli.output import Time
    from postroom.adapters.compose.backup import anchor_store

    store = session.existing_store()
    if session.settings.mailbox is not None:
        session.mailboxes()  # checks its name
    result = anchor_store(
        store, Path(file), mailbox=session.settings.mailbox, git=git, timestamp_url=timestamp
    )
    if session.out.as_json:
        session.out.json({"file": file, "anchors": result.added, "unchanged": result.unchanged})
        return
    if result.added:
        session.out.table(
            ("log", "position", "recorded", "chain"),
            [(each.log, each.position, Time(each.at), each.chain[:16]) for each in result.added],
        )
        session.out.line()
    unchanged = f", {pluralize(result.unchanged, 'log')} unchanged" if result.unchanged else ""
    session.out.line(f"{file}: {pluralize(len(result.added), 'anchor')} added{unchanged}")
