"""Routes: the subject, topic or routing key of an event."""

import string
from functools import lru_cache

import msgspec

from postroom.domain.errors import InvalidRequest
from postroom.domain.outbox import OutboxEvent
from postroom.domain.subject import EventSubject, check_token

SUBJECT = "{context}.event.{event_type}.v{event_version}"
"""The form of SDS-047: one subject for each type of event."""
TOPIC = "{context}.{aggregate_type}"
"""One topic per type of aggregate, so that the events of an aggregate keep their order."""
EVENT_ID = "Event-Id"
"""Header with the id of the event, for targets without a standard header for it."""
FIELDS = ("context", "aggregate_type", "event_type", "event_version")


class Route(msgspec.Struct, frozen=True):
    """The route of the events of a context.

    Arguments:
        context: the bounded context, one token of a subject.
        template: subject, topic or routing key, with `FIELDS` in braces.

    Raises: InvalidRequest for a context that is not a token, or an invalid template.
    """

    context: str
    template: str = SUBJECT

    def __post_init__(self) -> None:
        check_token(self.context, "The context")
        if not self.template or not all(map(_is_field, _fields(self.template))):
            raise InvalidRequest(
                f"The topic {self.template!r} is not a valid template; write text with any of "
                f"{', '.join(f'{{{field}}}' for field in FIELDS)}."
            )

    def name_of(self, event: OutboxEvent) -> str:
        """Return the name for an event; raise InvalidRequest if its type is not a token."""
        return _fill(self.template, self.context, event.aggregate_type, event.event_type, event.event_version)


def _fields(template: str) -> list[str | None]:
    """Return the placeholders of a template, with None for a malformed one."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:
        return [None]
    return [
        None if spec or conversion else field for _, field, spec, conversion in parts if field is not None
    ]


def _is_field(field: str | None) -> bool:
    return field in FIELDS


@lru_cache(maxsize=4_096)
def _fill(template: str, context: str, aggregate_type: str, event_type: str, event_version: int) -> str:
    subject = EventSubject(context, event_type, event_version)
    if template == SUBJECT:
        return subject.value
    return template.format(
        context=context, aggregate_type=aggregate_type, event_type=event_type, event_version=event_version
    )
