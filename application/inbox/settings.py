"""Configuration of an inbox."""

from typing import Annotated

import msgspec
from msgspec import Meta

from postroom.domain.policy import DAY_MS, SECOND_MS

TIMEOUT_MS = 60_000
CONCURRENCY = 50


class InboxSettings(msgspec.Struct, frozen=True):
    """Configuration of an inbox: `[inbox]` of the settings file; times in ms.

    Arguments:
        handler: URL that events are posted to.
        allow: permitted handler URL prefixes, and their networks; a list, or text with commas
            between entries.
        signing_key, signing_key_file: key that signs requests, or the file that contains it.
        previous_signing_key, previous_signing_key_file: the previous key, while handlers still accept it.
        timeout_ms: how long the handler may take.
        concurrency: maximum number of messages in progress, up to the consumer's `max_ack_pending`.
        backoff_base_ms, backoff_max_ms: see `DeliveryPolicy`.
        retention_ms: age at which processed messages are deleted; longer than the stream's.
        cleanup_every_ms: interval of cleanups by a worker; 0 leaves them to `postroom inbox cleanup`.
        keep_history: keep the histories of deleted messages in `aggregate_events`.
        consumer: name of the consumer in `[consumers]`; required if there are several.
        ordered: keep the order of each aggregate with any number of workers, through a queue in the database.
        lease_ms: how long an ordered worker keeps its partitions after it was killed or paused.
    """

    handler: str = ""
    allow: str | tuple[str, ...] = ()
    signing_key: str = ""
    signing_key_file: str = ""
    previous_signing_key: str = ""
    previous_signing_key_file: str = ""
    timeout_ms: Annotated[int, Meta(ge=1)] = TIMEOUT_MS
    concurrency: Annotated[int, Meta(ge=1)] = CONCURRENCY
    backoff_base_ms: Annotated[int, Meta(ge=1)] = SECOND_MS
    backoff_max_ms: Annotated[int, Meta(ge=1)] = 120 * SECOND_MS
    retention_ms: Annotated[int, Meta(ge=0)] = 14 * DAY_MS
    cleanup_every_ms: Annotated[int, Meta(ge=0)] = 600 * SECOND_MS
    keep_history: bool = False
    consumer: str = ""
    ordered: bool = False
    lease_ms: Annotated[int, Meta(ge=100)] = 15 * SECOND_MS

    def __repr__(self) -> str:
        return f"InboxSettings(handler={self.handler!r})"  # other fields are secret

    @property
    def allowed(self) -> tuple[str, ...]:
        """Return the entries of the allow-list."""
        entries = self.allow.split(",") if isinstance(self.allow, str) else self.allow
        return tuple(entry.strip() for entry in entries if entry.strip())
