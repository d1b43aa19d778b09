"""The official SDK of CloudEvents: how it reads and writes the messages of brokers."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings import amqp, http, kafka, rabbitmq
from cloudevents.core.formats.json import JSONFormat

from postroom.application.cloudevents import AMQP, NATS, Binding, CloudEventMessage, Mode

JSON = JSONFormat()
RABBITMQ = Binding("ce-", "content-type", "content-type")
"""The binding of Knative, which we read and don't write."""


def read_by_sdk(binding: Binding, payload: bytes, headers: Mapping[str, str]) -> BaseCloudEvent:
    """Return the event of a message; the SDK has no binding of NATS, whose headers are those of HTTP."""
    if binding is NATS:
        return http.from_http(http.HTTPMessage(dict(headers), payload), JSON)
    if binding is AMQP:
        properties = {"content-type": headers["Content-Type"]}
        return amqp.from_amqp(amqp.AMQPMessage(properties, dict(headers), payload), JSON)
    encoded = {
        name.replace("Content-Type", "content-type"): value.encode() for name, value in headers.items()
    }
    return kafka.from_kafka(kafka.KafkaMessage(encoded, None, payload), JSON)


def write_by_sdk(event: BaseCloudEvent, binding: Binding, mode: Mode) -> CloudEventMessage:
    """Return the message of an event, with the values of its headers as sources return them."""
    if binding is NATS:
        sent = (http.to_binary if mode == "binary" else http.to_structured)(event, JSON)
        return CloudEventMessage(sent.body, sent.headers)
    if binding is AMQP:
        message = (amqp.to_binary if mode == "binary" else amqp.to_structured)(event, JSON)
        properties = message.properties | message.application_properties
        return CloudEventMessage(
            message.application_data, {name: str(each) for name, each in properties.items()}
        )
    if binding is RABBITMQ:
        delivery = (rabbitmq.to_binary if mode == "binary" else rabbitmq.to_structured)(event, JSON)
        return CloudEventMessage(
            delivery.body, delivery.headers | {"Content-Type": delivery.content_type or ""}
        )
    record = (kafka.to_binary if mode == "binary" else kafka.to_structured)(event, JSON)
    headers = {name: value.decode() for name, value in record.headers.items()}
    return CloudEventMessage(record.value, headers)


def attributes_of(event: BaseCloudEvent) -> dict[str, Any]:
    """Return all attributes; the time is RFC 3339 in UTC with microseconds."""
    attributes = dict(event.get_attributes())
    if isinstance(attributes.get("time"), datetime):
        text = attributes["time"].astimezone(UTC).isoformat(timespec="microseconds")
        attributes["time"] = text.replace("+00:00", "Z")
    return attributes
