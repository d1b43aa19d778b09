"""CloudEvents as messages of a mailbox."""

import msgspec
from blake3 import blake3

from postroom.application.cloudevents.event import JSON, CloudEvent
from postroom.application.messages import NewMessage
from postroom.application.tracing import read_context
from postroom.domain.names import MAX_ID_CHARS, check_topic

_FIELDS = ("datacontenttype", "time", "dataschema")
"""Attributes that a message has fields for."""


def new_message(event: CloudEvent) -> NewMessage:
    """Return the message of an event; its other attributes are custom headers named `ce_...`.

    Raises: InvalidRequest for a type that is no topic, or an invalid time.
    """
    attributes = event.attributes
    trace = read_context(attributes.get("traceparent"))
    return NewMessage(
        topic=check_topic(attributes["type"]),
        payload=event.data or b"",
        message_id=event_id(attributes["source"], attributes["id"]),
        sticky_key=_sticky_key(attributes.get("partitionkey")),
        published_at_us=event.time_us,
        content_type=attributes.get("datacontenttype") or (None if event.data is None else JSON),
        schema_url=attributes.get("dataschema"),
        correlation_id=attributes.get("correlationid"),
        causality_parent=attributes.get("causationid"),
        trace_id=trace.trace_id if trace else None,
        span_id=trace.span_id if trace else None,
        attrs={f"ce_{name}": text for name, text in attributes.items() if name not in _FIELDS},
    )


def event_id(source: str, id_: str) -> str:
    """Return `source|id`, which is unique for CloudEvents, or a hash of both if that is not a valid id.

    A source is a URI and contains no `|`, so different pairs have different texts.
    """
    joined = f"{source}|{id_}"
    if "|" not in source and len(joined) <= MAX_ID_CHARS:
        return joined
    return "b3:" + blake3(msgspec.json.encode([source, id_])).hexdigest()


def _sticky_key(key: str | None) -> str | None:
    """Return the sticky key of a partition key, as Kafka's keys become sticky keys."""
    return key if not key or len(key) <= MAX_ID_CHARS else f"b3:{blake3(key.encode()).hexdigest()}"
