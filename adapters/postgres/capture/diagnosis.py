"""Check of the replication slot of a capture."""

import asyncio

from postroom.adapters.postgres.capture.settings import CaptureSettings
from postroom.adapters.postgres.capture.slot import ReplicationSlot
from postroom.adapters.postgres.database import shown
from postroom.application.diagnosis import Finding, shown_bytes
from postroom.application.ports.outbox import SlotState
from postroom.domain.errors import Unavailable

MAX_RETAINED_BYTES = 1_000_000_000
MIN_SAFE_BYTES = 500_000_000
_NAME = "capture"


def check_slot(url: str, settings: CaptureSettings, seconds: float) -> Finding:
    """Find whether the replication slot can be read, is read, and what the server keeps for it.

    Arguments:
        url: database of the table.
        seconds: deadline of all statements.

    Raises: NotFound without slot or publication, InvalidRequest if they can't be used as configured or the
        slot lost rows, Unavailable when the database can't be used.
    """
    return describe_slot(asyncio.run(_find_state(url, settings, seconds)))


def describe_slot(state: SlotState) -> Finding:
    """Return the finding of a slot that can be read."""
    size = shown_bytes(state.retained_bytes)
    text = f"{state.slot}: {'active' if state.active else 'no process reads it'}, keeps {size}"
    if state.safe_bytes is not None and state.safe_bytes < MIN_SAFE_BYTES:
        left = shown_bytes(max(0, state.safe_bytes))
        advice = "Raise max_slot_wal_keep_size, and see that a capture publishes what waits."
        return Finding(_NAME, "failure", f"{text}; rows are lost when {left} more are written", advice)
    if not state.active:
        advice = f"Start postroom outbox capture, or run: SELECT pg_drop_replication_slot('{state.slot}')"
        return Finding(_NAME, "warning", text, advice)
    if state.retained_bytes > MAX_RETAINED_BYTES:
        advice = "See the log of the capture: the target may be slow or refuse; end long transactions."
        return Finding(_NAME, "warning", text, advice)
    if state.safe_bytes is None:
        return Finding(_NAME, "ok", text, "Set max_slot_wal_keep_size, so that the slot can't fill the disk.")
    return Finding(_NAME, "ok", text)


async def _find_state(url: str, settings: CaptureSettings, seconds: float) -> SlotState:
    slot = ReplicationSlot(url, settings, "postroom doctor")
    try:
        async with asyncio.timeout(seconds):
            await slot.check()
            return await slot.state()
    except TimeoutError:
        raise Unavailable(f"The database {shown(url)} did not answer within {seconds:g} s.") from None
    finally:
        await slot.close()
