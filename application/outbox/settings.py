"""Configuration of an outbox."""

from typing import Annotated

import msgspec
from msgspec import Meta

from postroom.application.outbox.formats import FormatName
from postroom.domain.outbox import PublishPolicy
from postroom.domain.policy import DAY_MS, SECOND_MS


class OutboxSettings(msgspec.Struct, frozen=True):
    """Configuration of an outbox: `[outbox]` of the settings file; times in ms.

    Arguments:
        to: URL of the target of `postroom outbox relay`; None uses the URL of `[nats]`.
        topic: template of the subject, topic or routing key (see `Route`); None uses the target's default.
        exchange: exchange of RabbitMQ; empty for the default exchange, whose routing keys are queue names.
        batch: maximum number of events published under one claim.
        concurrency: maximum number of aggregates published in parallel.
        poll_ms: poll interval when no hint arrives.
        claim_ms: duration of a claim; publishing stops after two thirds of it, and a publish may take 5 s.
        max_attempts, backoff_base_ms, backoff_max_ms: see `PublishPolicy`.
        hints: listen for notifications of new events.
        retention_ms: age at which published events are deleted.
        cleanup_every_ms: interval of cleanups by a relay; 0 leaves them to `postroom outbox cleanup`.
        keep_history: keep the histories of deleted events in `aggregate_events`.
        format: the form in which events are published.
        source: `source` of events that are published as CloudEvents; empty for `/` and the context.
    """

    batch: Annotated[int, Meta(ge=1, le=10_000)] = 500
    concurrency: Annotated[int, Meta(ge=1)] = 256
    poll_ms: Annotated[int, Meta(ge=10)] = 500
    claim_ms: Annotated[int, Meta(ge=20_000)] = 30_000
    max_attempts: Annotated[int, Meta(ge=1)] = 20
    backoff_base_ms: Annotated[int, Meta(ge=1)] = SECOND_MS
    backoff_max_ms: Annotated[int, Meta(ge=1)] = 300 * SECOND_MS
    hints: bool = True
    retention_ms: Annotated[int, Meta(ge=0)] = 7 * DAY_MS
    cleanup_every_ms: Annotated[int, Meta(ge=0)] = 600 * SECOND_MS
    keep_history: bool = False
    to: str | None = None
    topic: str | None = None
    exchange: str = ""
    format: FormatName = "postroom"
    source: str = ""

    @property
    def policy(self) -> PublishPolicy:
        """Return the policy for retries of refused events."""
        return PublishPolicy(self.max_attempts, self.backoff_base_ms, self.backoff_max_ms)
