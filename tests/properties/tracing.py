"""The histories of all messages of a log, traced one by one."""

from collections import defaultdict

from postroom.application.ports.event_log import EventLog
from postroom.application.queries.mailbox_past import first_settings
from postroom.domain.mailbox.events import MailboxEvent, OwnershipTaken
from postroom.domain.message import MessageEvent, MessageSent
from postroom.domain.message_history import MessageHistory, trace
from postroom.domain.policy import TopicPolicy
from postroom.domain.settings import resolve_policy

Entry = tuple[int, int, MessageEvent | OwnershipTaken, TopicPolicy | None]
"""Position, epoch, event and topic policy, as `trace` takes them."""


def message_histories(log: EventLog) -> list[MessageHistory]:
    """Return the histories of the messages whose beginning the log holds, in the order they were sent."""
    takeovers: list[Entry] = []
    histories: defaultdict[bytes, list[Entry]] = defaultdict(list)
    topics: dict[bytes, str] = {}
    settings = first_settings(log)
    for record in log.read():
        event = record.event
        if isinstance(event, MailboxEvent):
            settings = settings.after(event)
        if isinstance(event, OwnershipTaken):
            takeovers.append((record.position, record.epoch, event, None))
        elif isinstance(event, MessageEvent):
            if isinstance(event, MessageSent):
                topics[record.stream] = event.topic
            policy = resolve_policy(settings.settings, topics.get(record.stream, ""))
            histories[record.stream].append((record.position, record.epoch, event, policy))
    traced = [trace(sorted([*history, *takeovers], key=lambda h: h[0])) for history in histories.values()]
    return [history for history in traced if history is not None]
