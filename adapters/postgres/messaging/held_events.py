"""The port of held events over the outbox tables, on one connection that is opened on demand."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
import psycopg

from postroom.adapters.postgres.database import AsyncReconnecting, connect_shared, describe, shown
from postroom.adapters.postgres.messaging.aggregate_events import as_json, as_uuid, stored_rows, utc
from postroom.adapters.postgres.messaging.tables import Tables, messaging_statements
from postroom.adapters.sql.transaction import for_psycopg
from postroom.application.ports.outbox import Aggregate, Decision
from postroom.domain.errors import UnusableServer


class HeldEvent(msgspec.Struct, frozen=True, gc=False):
    """A row of the outbox as a JSON parameter."""

    id: UUID
    aggregate_type: str
    aggregate_id: str
    event_type: str
    event_version: int
    payload: msgspec.Raw
    occurred_at: datetime | None
    correlation_id: UUID | None
    causation_id: UUID | None
    attempts: int
    error: str | None
    has_failed: bool
    retry_at: datetime | None


class PostgresHeldEvents:
    """Captured events that wait in the outbox of a database; see `HeldEvents`."""

    def __init__(self, url: str, tables: Tables | None = None) -> None:
        self._url = url
        self._database = AsyncReconnecting(lambda: connect_shared(url, "postroom outbox capture held"))
        statements = messaging_statements("held_events.sql", tables or Tables())
        self._sql = {name: for_psycopg(text) for name, text in statements.items()}

    async def find_waiting(self, aggregates: Collection[Aggregate]) -> set[Aggregate]:
        """Return those of the aggregates that have unpublished events in the outbox."""
        types, ids = [type_ for type_, _ in aggregates], [id_ for _, id_ in aggregates]
        return {(type_, id_) for type_, id_ in await self._run("find_waiting", {"types": types, "ids": ids})}

    async def hold(self, events: Sequence[tuple[Decision, bytes]]) -> None:
        """Add events with their JSON payloads to the outbox, all or none; those that it has are skipped."""
        parameters = {
            "held": as_json([as_held(decision, payload) for decision, payload in events]),
            "events": as_json(stored_rows(change for (_, changes), _ in events for change in changes)),
        }
        await self._run("hold", parameters)

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
        await self._database.close()

    async def _run(self, statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        connection = await self._database.connected()
        try:
            cursor = await connection.execute(self._sql[statement], parameters)
            return await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            if isinstance(error, psycopg.errors.UndefinedTable):
                raise UnusableServer(
                    f"The database {shown(self._url)} has no outbox: {error.diag.message_primary}. Run "
                    "`postroom migrate --messaging URL` once, or configure the names of its tables."
                ) from error
            raise describe(error, self._url) from error


def as_held(decision: Decision, payload: bytes) -> HeldEvent:
    """Return an event and its JSON payload as a row of the outbox."""
    event = decision.event
    return HeldEvent(
        event.id,
        event.aggregate_type,
        event.aggregate_id,
        event.event_type,
        event.event_version,
        msgspec.Raw(payload),
        None if event.occurred_at is None else utc(event.occurred_at),
        as_uuid(event.correlation.correlation_id),
        as_uuid(event.correlation.causation_id),
        event.publish_attempts,
        event.publish_error,
        event.status == "parked" or event.retry_at is not None,
        None if event.retry_at is None else utc(event.retry_at),
    )
