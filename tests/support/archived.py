"""What an archive has of CloudEvents that the official SDK wrote."""

from datetime import UTC, datetime
from typing import Any

from cloudevents.core.v1.event import CloudEvent

from postroom.adapters.compose.queries import read_mailbox
from postroom.application.cloudevents import Binding, CloudEventMessage
from postroom.domain.envelope.build import OpenedEnvelope
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.message import MessageSent
from tests.support.cloud_events import write_by_sdk


def sdk_event(id_: str, data: Any, **attributes: Any) -> CloudEvent:
    """Return an event of the SDK."""
    required = {
        "id": id_,
        "source": "/shop",
        "type": "order.placed",
        "time": datetime(2026, 1, 15, 8, tzinfo=UTC),
    }
    return CloudEvent(required | {"subject": "Größe 100%"} | attributes, data)


def cloud_events(binding: Binding) -> list[CloudEventMessage]:
    """Return two events, one of them twice, a batch, and an event without a source."""
    order = sdk_event("1", {"total": 12}, datacontenttype="application/json", partitionkey="o-1")
    image = sdk_event("2", b"\x00\xff", datacontenttype="image/png")
    structured = write_by_sdk(image, binding, "structured")
    binary = write_by_sdk(order, binding, "binary")
    batch = dict.fromkeys(structured.headers, "application/cloudevents-batch+json")
    invalid = {name: value for name, value in binary.headers.items() if not name.endswith("source")}
    return [
        binary,
        structured,
        write_by_sdk(order, binding, "structured"),
        CloudEventMessage(b"[]", batch),
        CloudEventMessage(binary.payload, invalid),
    ]


ARCHIVED = [
    ("order.placed", "/shop|1", "application/json", b'{"total": 12}', "o-1"),
    ("order.placed", "/shop|2", "image/png", b"\x00\xff", None),
]
"""What the archive has of `cloud_events`."""


def archived(
    store: str, mailbox: str, source: str = "/shop"
) -> list[tuple[str, str | None, str | None, bytes, str | None]]:
    """Return topic, id, content type, payload and partition key of the events of a source, in their order.

    The attributes of all are custom headers, and the time is that of the event.
    """
    with read_mailbox(store, mailbox) as reader:
        events = [each.event for each in reader.log.read() if isinstance(each.event, MessageSent)]
    messages = []
    for event in events:
        headers = event.headers
        custom = headers.custom_headers or {}
        if custom.get("ce_source") != source:
            continue
        assert (custom["ce_subject"], custom["ce_specversion"]) == ("Größe 100%", "1.0")
        assert (headers.timestamp, headers.correlation_id) == (1_768_464_000_000, None)
        payload = OpenedEnvelope(parse_envelope(event.envelope)).payload
        key = custom.get("ce_partitionkey")
        messages.append((event.topic, headers.message_id, headers.content_type, payload, key))
    return messages
