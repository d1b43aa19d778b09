"""Configuration of an inbox."""

from typing import Annotated

import msgspec
from msgspec import Meta

from postroom.application.inbox.dispatcher import Unhandled
from postroom.domain.arguments import check_text
from postroom.domain.errors import InvalidRequest
from postroom.domain.policy import DAY_MS, SECOND_MS

TIMEOUT_MS = 60_000
CONCURRENCY = 50


class InboxSettings(msgspec.Struct, frozen=True):
    """Configuration of an inbox: `[inbox]` of the settings file; times in ms.

    Arguments:
        handler: URL that events are posted to if `handlers` has none for their type.
        handlers: URLs by event type, or by pattern with `*`, `?` or `[...]`; see `EventDispatcher`.
        unhandled: what happens to an event whose type has no handler.
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
    handlers: dict[str, str] = {}
    unhandled: Unhandled = "dead-letter"
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
        # Other fields are secret.
        return f"InboxSettings(handler={self.handler!r}, handlers={self.handlers!r})"

    @property
    def urls(self) -> dict[str, str]:
        """Return the URLs of all handlers by event type or pattern; `handler` is that of `*`, the last.

        Raises: InvalidRequest without any, or if `*` has two.
        """
        if not self.handler and not self.handlers:
            raise InvalidRequest(
                "No handler is configured; pass --handler URL, or set handler or handlers under [inbox]."
            )
        if self.handler and "*" in self.handlers:
            raise InvalidRequest(
                "handler and the * of handlers under [inbox] are the same; set only one of them."
            )
        urls = self.handlers | ({"*": self.handler} if self.handler else {})
        return {event_type: check_text(f"handlers.{event_type}", url, 1) for event_type, url in urls.items()}

    @property
    def allowed(self) -> tuple[str, ...]:
        """Return the entries of the allow-list."""
        entries = self.allow.split(",") if isinstance(self.allow, str) else self.allow
        return tuple(entry.strip() for entry in entries if entry.strip())
