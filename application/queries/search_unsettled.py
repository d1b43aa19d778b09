"""`SearchUnsettled`: search the unsettled messages of a mailbox that has no read models."""

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.get_message import message_item
from postroom.domain.message import Message, MessageSent, Status
from postroom.domain.search import Cursor, EventFilter, FoundMessage, Order, SearchPage


class SearchUnsettled:
    """A search in memory by RFC-037's filter; it reads every message whose state does not rule it out."""

    def __init__(self, log: EventLogReader) -> None:
        """Take the mailbox's log."""
        self._log = log

    def __call__(self, filter_: EventFilter, messages: Sequence[Message]) -> SearchPage:
        """Return a page of the messages that match.

        Arguments:
            messages: the unsettled messages; those that settle meanwhile are left out.
        """
        states = {each.position: each for each in messages}
        records = self._log.at_positions(list(states))
        newest_first = filter_.order == Order.NEWEST_FIRST
        places = sorted(
            (
                (sent.headers.timestamp, position)
                for position, record in records.items()
                if isinstance(sent := record.event, MessageSent) and record.envelope_hash
            ),
            reverse=newest_first,
        )
        if filter_.after is not None:
            last = (filter_.after.timestamp, filter_.after.id)
            places = [each for each in places if (each < last if newest_first else each > last)]

        def matches() -> Iterator[FoundMessage]:
            for _, position in places:
                sent, state = records[position].event, states[position]
                if isinstance(sent, MessageSent):
                    message = describe_message(self._log.mailbox, sent, state)
                    if filter_.matches(message):
                        yield message

        page = list(islice(matches(), filter_.offset, filter_.offset + filter_.limit + 1))
        items = tuple(page[: filter_.limit])
        is_last = len(page) == len(items)
        return SearchPage(
            items, None if is_last else Cursor(items[-1].timestamp, items[-1].position).encode()
        )


def describe_message(mailbox: str, sent: MessageSent, state: Message) -> FoundMessage:
    """Return a message as searches find it."""
    return FoundMessage(
        **msgspec.structs.asdict(message_item(sent)),
        mailbox=mailbox,
        position=state.position,
        status=Status(state.status),
        attempts=state.attempt,
        shard=state.shard,
    )
