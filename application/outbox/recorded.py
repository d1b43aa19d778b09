"""Messages that transactions recorded for mailboxes and that no owner has sent.

An owner sends a message within a second and deletes its row, so one that stays has no reader: its database is
not among those of an owner, nobody owns its mailbox, or the owner is down. Who reads a database is not stored
anywhere, and the owner may be that of another store; the age is what shows it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from postroom.application.metrics import OTHERS, Metric
from postroom.application.outbox.new_message import recorded_at
from postroom.application.pluralize import pluralize
from postroom.application.ports.message_outbox import MAX_COUNTED, MAX_MAILBOXES, MessageCount
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import in_query_thread

US = 1_000_000
LATE_SECONDS = 60
"""Age from which a message counts as unread."""
COUNT_SECONDS = 10.0
"""Interval at which the messages are counted for the metrics, at most."""
WAIT_SECONDS = 1.0
"""Time that a scrape waits for a count; that of a database that does not answer is for the next one."""


class RecordedMessages(msgspec.Struct, frozen=True):
    """Messages in one database that were recorded for one mailbox.

    Arguments:
        database: path or URL without a password.
        mailbox: name for which they were recorded; empty if the database can't be read, `*` for those after
            the first `MAX_MAILBOXES`.
        waiting: messages that were neither sent nor refused.
        refused: messages that the mailbox refused; each row has its error.
        oldest_at: when the first waiting one was recorded, µs since 1970 UTC.
        exact: whether all rows were counted; otherwise there are more than these.
        problem: why they are not sent, or why the database can't be read; empty if nothing is wrong.
        advice: what to do.
    """

    database: str
    mailbox: str = ""
    waiting: int = 0
    refused: int = 0
    oldest_at: int | None = None
    exact: bool = True
    problem: str = ""
    advice: str = ""

    @property
    def count_text(self) -> str:
        """Return the number of waiting messages in words."""
        return f"{'' if self.exact else 'at least '}{pluralize(self.waiting, 'message')}"


def rank_mailboxes(
    groups: Iterable[tuple[str, int, int, int | None]], find_row: Callable[[int], tuple[str, str] | None]
) -> list[MessageCount]:
    """Return the mailboxes with most messages first; those after the first `MAX_MAILBOXES` become one, `*`.

    Arguments:
        groups: mailbox, waiting and refused messages, and the position of the first waiting one.
        find_row: returns the id and the message at a position, unless it was sent meanwhile.
    """
    ranked = sorted(groups, key=lambda each: (-each[1], -each[2], each[0]))
    rest = ranked[MAX_MAILBOXES:]
    if rest:
        first = min((each[3] for each in rest if each[3] is not None), default=None)
        ranked[MAX_MAILBOXES:] = [
            (OTHERS, sum(each[1] for each in rest), sum(each[2] for each in rest), first)
        ]
    counts = []
    for mailbox, waiting, refused, position in ranked:
        row = None if position is None else find_row(position)
        counts.append(MessageCount(mailbox, waiting, refused, None if row is None else recorded_at(*row)))
    return counts


def explain_counts(
    database: str,
    counts: Sequence[MessageCount],
    *,
    is_relayed: bool,
    store: str,
    mailboxes: Collection[str],
    now: int,
) -> list[RecordedMessages]:
    """Return the counts of a database, each with the reason why its messages are not sent, if they are late.

    Arguments:
        is_relayed: whether the database is the store, or among those that the settings of its owners name.
        store: name of the store.
        mailboxes: those of the store.
        now: µs since 1970 UTC.
    """
    exact = sum(each.waiting + each.refused for each in counts) < MAX_COUNTED
    explained = []
    for each in counts:
        problem = advice = ""
        # A row without a time was not made by `record`, and an owner would have refused it at once.
        if each.waiting and (each.oldest_at is None or now - each.oldest_at > LATE_SECONDS * US):
            problem, advice = _explain_late(each.mailbox, database, is_relayed, store, mailboxes)
        elif each.refused:
            problem = f"its owner refused {pluralize(each.refused, 'message')}"
            advice = "Read the column error; UPDATE outbox_messages SET error = NULL retries them."
        explained.append(RecordedMessages(database, *each, exact, problem, advice))
    return explained


def _explain_late(
    mailbox: str, database: str, is_relayed: bool, store: str, mailboxes: Collection[str]
) -> tuple[str, str]:
    if mailbox not in mailboxes:
        return (
            f"the store {store} has no such mailbox",
            "Correct the name in MailboxOutbox, or own the mailbox: postroom serve --mailbox NAME.",
        )
    if not is_relayed:
        return (
            "no owner reads this database",
            f'Add "{database}" to [relay] databases, with its password if it has one, and restart the owner.',
        )
    return (
        "its owner does not send them",
        "Start an owner with these settings; if one runs, see its log and whether the topic is full.",
    )


class OutboxCounter:
    """Counter of recorded messages for a process that is asked often.

    Arguments:
        count: counts the messages; it blocks.
        wall: the wall clock, µs since 1970 UTC.
    """

    def __init__(self, count: Callable[[], Sequence[RecordedMessages]], wall: Callable[[], int]) -> None:
        self._count = count
        self._wall = wall
        self._counted: Sequence[RecordedMessages] = ()
        self._counted_at = float("-inf")
        self._counting: asyncio.Task[None] | None = None

    async def measure(self) -> list[Metric]:
        """Return the metrics of what `count_messages` returns."""
        return outbox_metrics(await self.count_messages(), self._wall())

    async def count_messages(self) -> Sequence[RecordedMessages]:
        """Return the messages as counted within `COUNT_SECONDS`, or before if a database does not answer."""
        loop = asyncio.get_running_loop()
        if self._counting is None and loop.time() - self._counted_at >= COUNT_SECONDS:
            self._counting = loop.create_task(self._refresh(), name="count of recorded messages")
        if self._counting is not None:
            await asyncio.wait([self._counting], timeout=WAIT_SECONDS)
        return self._counted

    async def _refresh(self) -> None:
        try:
            self._counted = await in_query_thread(self._count)
        except Exception as error:  # a defect; the metrics of all else are answered
            logger().error("outbox.count_failed", error=summarize(error))
        finally:
            self._counted_at = asyncio.get_running_loop().time()
            self._counting = None


def outbox_metrics(counted: Iterable[RecordedMessages], now: int) -> list[Metric]:
    """Return the metrics of recorded messages; `now` is µs since 1970 UTC."""
    up: Counter[str] = Counter()
    numbers: list[tuple[dict[str, str], float]] = []
    ages: list[tuple[dict[str, str], float]] = []
    for each in counted:
        up[each.database] = 1 if each.mailbox or not each.problem else 0
        if not each.mailbox:
            continue
        labels = {"database": each.database, "mailbox": each.mailbox}
        numbers += (
            ({**labels, "state": "waiting"}, each.waiting),
            ({**labels, "state": "refused"}, each.refused),
        )
        if each.oldest_at is not None:
            ages.append((labels, max(0.0, (now - each.oldest_at) / US)))
    return [
        Metric(
            "postroom_outbox_database_up",
            "gauge",
            "1 if the recorded messages of a database can be counted.",
            [({"database": database}, number) for database, number in sorted(up.items())],
        ),
        Metric(
            "postroom_outbox_messages",
            "gauge",
            "Messages that MailboxOutbox recorded and that were not sent, of the first 10,000.",
            numbers,
        ),
        Metric(
            "postroom_outbox_messages_oldest_seconds",
            "gauge",
            "Age of the oldest message that MailboxOutbox recorded and that was neither sent nor refused.",
            ages,
        ),
    ]
