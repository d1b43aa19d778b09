"""Settings of the tools for agents, and the sources of their data."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from postroom.application.access.authority import KeyRing
from postroom.application.masking import NO_MASK, Mask
from postroom.application.operations.contract import Name
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.arguments import check_int
from postroom.domain.envelope.content import DecodedPayload
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.policy import MAX_DURATION_MS

Permission = Literal["redrive", "cancel", "pause"]
PERMISSIONS: Final[tuple[Permission, ...]] = get_args(Permission)
MAX_CALLS: Final = 32


class McpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `[mcp]`.

    Arguments:
        allow: commands that are tools if the caller's capability permits them: some of `redrive`, `cancel`
            and `pause`. None allows all that the capability permits, and no command to callers without one.
        max_calls: calls at a time over HTTP; further calls are refused.
    """

    allow: tuple[str, ...] | None = None
    max_calls: int = MAX_CALLS

    def validate(self) -> "McpSettings":
        """Return the settings, or raise InvalidRequest."""
        for each in self.allow or ():
            if each not in PERMISSIONS:
                raise InvalidRequest(
                    f"[mcp]: there are no commands {each[:80]!r}; allow some of {', '.join(PERMISSIONS)}."
                )
        check_int("[mcp]: max_calls", self.max_calls, 1, 10_000)
        return self


class ReportQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Report on the messages of the mailbox.

    Arguments:
        report: `latency`, from sending to receiving and acking; `retries`, failed deliveries by error;
            `traffic`, messages and bytes by topic and principal; `sla`, the share acked within `within_ms`.
        topic: a topic, or with `*` at its end those that begin so.
        since, until: of sending, or of the failure in `retries`: RFC 3339, or ms since 1970 UTC; by default
            the last 7 days.
        by: period of a row, in UTC.
    """

    report: Literal["latency", "retries", "traffic", "sla"]
    topic: Name | None = None
    since: int | datetime | None = None
    until: int | datetime | None = None
    by: Literal["hour", "day"] = "hour"
    within_ms: Annotated[int, Meta(ge=1, le=MAX_DURATION_MS)] = 60_000


Report = Callable[[ReportQuery], Sequence[dict[str, Any]]]
"""Returns the rows of a report; it blocks."""


class McpSources(msgspec.Struct, frozen=True, kw_only=True):
    """What tools use besides the mailbox.

    Arguments:
        mailbox: its name.
        mask: headers and fields of payloads that no caller sees, whatever its rights: a model reads the
            answers.
        decode: decodes a payload by the schemas of the mailbox's namespace.
        log: log of the mailbox, which is replayed to simulate policies; None if it is not readable.
        report: makes reports on the mailbox; None without a store.
        keys: root keys of the store, which sign the tokens of previews; None if it can't have any.
    """

    mailbox: str = ""
    mask: Mask = NO_MASK
    decode: Callable[[PrismEnvelope], DecodedPayload] | None = None
    log: EventLogReader | None = None
    report: Report | None = None
    keys: KeyRing | None = None
