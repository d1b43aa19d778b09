"""The message source that flags of `postroom ingest` name, by the scheme of the URL."""

from typing import Any

import msgspec

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage
from postroom.adapters.compose.ingest import (
    KafkaSource,
    MessageSource,
    NatsSettings,
    NatsSource,
    RabbitmqSource,
    RedisSource,
)

_KINDS: dict[str, tuple[type[MessageSource], str, str]] = {
    "redis": (RedisSource, "stream", "dead_letter_stream"),
    "rediss": (RedisSource, "stream", "dead_letter_stream"),
    "unix": (RedisSource, "stream", "dead_letter_stream"),
    "kafka": (KafkaSource, "topic", "dead_letter_topic"),
    "kafka+ssl": (KafkaSource, "topic", "dead_letter_topic"),
    "amqp": (RabbitmqSource, "queue", "dead_letter_routing_key"),
    "amqps": (RabbitmqSource, "queue", "dead_letter_routing_key"),
}
"""By scheme: the source, and the names of what is read and of the target of dead letters."""


def source_from_flags(session: Session, flags: dict[str, str | None]) -> MessageSource:
    """Return the source that flags name.

    Raises: WrongUsage when one is missing, or does not fit the URL.
    """
    url, subject, group = flags["url"] or "", flags["subject"], flags["durable"]
    scheme = url.partition("://")[0]
    if subject is None or group is None:
        raise WrongUsage("Name the stream to ingest: --config FILE, or --subject and --durable.")
    if scheme not in _KINDS:
        nats = session.settings.section("nats", NatsSettings, {"url": flags["url"]})
        values: dict[str, Any] = {"url": nats.url, "subject": subject, "stream": flags["stream"]}
        values |= {"consumer_group": group, "dead_letter_subject": flags["dlq"]} | nats.access()
        return msgspec.convert(values, NatsSource)
    if flags["stream"] is not None:
        raise WrongUsage(f"--stream is for NATS; name what to ingest from {scheme}:// by --subject.")
    kind, name, dead_letters = _KINDS[scheme]
    values = {"url": url, name: subject, "consumer_group": group, dead_letters: flags["dlq"]}
    return msgspec.convert({"field": "data"} | values if kind is RedisSource else values, kind)
